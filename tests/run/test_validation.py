"""Files of others: whatever they hold, they are typed values or one line of an error, soon."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from runlab.errors import ConfigError
from runlab.run.validation import Missing, parse_json, parse_yaml, read_bytes, read_text, typed

_MERGES = "".join(f"k{i}: &k{i} {{<<: [{', '.join([f'*k{i - 1}'] * 9)}]}}\n" for i in range(1, 9))
_COPIES = "".join(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 9)}]\n" for i in range(1, 12))
NO_JSON = (
    *("", "{", "[" * 100_000, '{"a":' * 40 + "1" + "}" * 40),
    *("NaN", "-Infinity", "1e999", "9" * 5000, b"\xff"),
)
NO_YAML = (
    *("a: [", "[" * 100_000, "- " * 100_000, "&a [*a]", "? [a]\n: 1", "1: 2", "a: {null: 1}", "9" * 5000),
    *("!!python/object/apply:os.system [true]", "!!set {a}", "a: \x1b", f"k0: &k0 {{a: 1}}\n{_MERGES}"),
    f"k0: &k0 [a]\n{_COPIES}",
)
WRONG = [*((parse_json, text) for text in NO_JSON), *((parse_yaml, text) for text in NO_YAML)]


@pytest.mark.parametrize(("parse", "text"), WRONG, ids=range(len(WRONG)))
def test_other_json_and_yaml_is_named_in_a_line(parse: Callable[..., Any], text: str | bytes) -> None:
    with pytest.raises(ConfigError, match=r"^a file is damaged: ") as refusal:
        parse(text, "a file")
    assert len(str(refusal.value)) < 400
    assert "\n" not in str(refusal.value)


def test_plain_values_are_read_as_they_are() -> None:
    values: dict[str, Any] = {"a": [1, -2.5, None, True], "b": {"c": "\udcff \x1b"}, "d": 10**299}
    assert parse_json(json.dumps(values), "a file") == values
    assert parse_yaml("a: [1, .inf]\nb: &b {c: x}\nd: *b\n", "a file") == {
        "a": [1, float("inf")],
        "b": {"c": "x"},
        "d": {"c": "x"},
    }
    assert parse_json("[Infinity]", "a file", finite=False) == [float("inf")]


@dataclass(slots=True, kw_only=True)
class _Facts:
    name: str
    count: int = 0
    share: float | None = None
    of: dict[str, str] = field(default_factory=dict)


def test_types_are_those_of_a_dataclass_and_nothing_is_converted() -> None:
    facts = typed({"name": "x", "share": 1, "later": [1]}, _Facts, "a file")
    assert (facts, type(facts.share)) == (_Facts(name="x", share=1.0), float)
    wrong: list[Any] = [{}, [], 5, {"name": 5}, {"name": "x", "count": True}, {"name": "x", "count": 1.0}]
    wrong += [{"name": "x", "count": "1"}, {"name": "x", "share": "1"}, {"name": "x", "of": {"y": [1]}}]
    for values in wrong:
        with pytest.raises(ConfigError, match=r"^a file is damaged, or of another version: "):
            typed(values, _Facts, "a file")


def test_only_files_of_a_usual_size_are_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with pytest.raises(Missing):
        read_bytes(file)
    os.mkfifo(file)
    with pytest.raises(ConfigError, match=r"the file cannot be read: it is no file"):
        read_bytes(file, "the file")
    file.unlink()
    file.write_bytes(b"abc\xff")
    with pytest.raises(ConfigError, match=r"file cannot be read: no UTF-8 at byte 3"):
        read_text(file)
    with pytest.raises(ConfigError, match=r"file is damaged: 4 bytes, and at most 3 are read"):
        read_bytes(file, most=3)
