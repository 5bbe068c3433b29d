"""Comparison of two runs: the first difference of their traces is found, named and explained.

The traces are written here byte by byte, so that reading them is not tested with the code that writes them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import write_run

from rltemplate.__main__ import main
from rltemplate.analysis.compare import Comparison, compare_runs, headline, report
from rltemplate.run import paths

START, STEP = ["start/streams/action", "start/adam/2"], ["obs", "policy", "noise", "action", "reward"]
TARGETS, UPDATE, END = ["value", "advantage"], ["loss", "gradient", "params"], ["obs_norm", "end/adam/2"]
HEADER = {"format": "rltemplate-trace", "version": 1, "digest": "xxh3_64", "detail": "step", "algo": "ppo"}


class Written:
    """A trace as a list of events, each with its items, to be changed and written."""

    def __init__(self, detail: str = "step", iterations: int = 3, **header: Any) -> None:
        self.header = {**HEADER, "detail": detail, **header}
        self.events: list[tuple[str, int, list[str]]] = [("reset", 0, ["obs"])]
        self.changed: set[tuple[int, str]] = set()
        self.env_steps: dict[int, int] = {}
        for i in range(iterations):
            if detail == "step":
                self.events += [("start", 0, START), *(("step", t, STEP) for t in range(4))]
                self.events += [("targets", 0, TARGETS), *(("update", u, UPDATE) for u in range(3))]
            names = END if detail == "step" else [*START, *STEP, *TARGETS, *UPDATE, *END]
            self.events.append(("iteration", i, names))

    def find(self, event: str, index: int, iteration: int = 0) -> int:
        """The number of an event; `iteration` is that of an event inside one."""
        found = [number for number, each in enumerate(self.events) if each[:2] == (event, index)]
        return found[iteration if len(found) > 1 else 0]

    def change(self, event: str, index: int, *items: str, iteration: int = 0) -> Written:
        """Give items another fingerprint. The chain of its iteration and of later ones follows."""
        self.changed |= {(self.find(event, index, iteration), item) for item in items}
        return self

    def lines(self) -> list[str]:
        """The lines of the file."""
        lines, named = [_json(self.header)], dict[str, list[str]]()
        for number, (event, index, names) in enumerate(self.events):
            if named.get(event) != names:
                named[event] = names
                lines.append(_json(["items", event, names]))
            texts = (f"{number} {name} {(number, name) in self.changed}" for name in names)
            digits = "".join(_digits(text, 16) for text in texts)
            end: tuple[int, ...] = (self.env_steps.get(index, 8 * index + 8),) if event == "iteration" else ()
            chain = [_digits(f"{lines[1:]} {digits}", 32)] if end else []
            lines.append(_json([event, index, *end, digits, *chain]))
        return lines


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def _digits(text: str, number: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:number]


OTHER_CODE = {"tree": "2" * 40, "commit": "d" * 40, "base_commit": "e" * 40}
MakeRun = Callable[..., Path]
Compared = Callable[[Written, Written], Comparison]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a run folder with a trace, or none."""

    def make(name: str, trace: Written | str | None, config: Any = None, **record: Any) -> Path:
        run_dir = write_run(tmp_path / "runs", tag=name, config={"trace": "step"} | (config or {}), **record)
        if trace is not None:
            text = trace if isinstance(trace, str) else "".join(trace.lines())
            (run_dir / paths.TRACE).write_text(text)
        return run_dir

    return make


@pytest.fixture
def compared(make_run: MakeRun) -> Compared:
    return lambda a, b: compare_runs(make_run("-a", a), make_run("-b", b))


FIRST, SECOND = "in iteration 0 (environment steps 1 to 8)", "in iteration 1 (environment steps 9 to 16)"


@pytest.mark.parametrize("detail", ["step", "iteration"])
def test_equal_traces_are_identical_whatever_their_headers_add(compared: Compared, detail: str) -> None:
    result = compared(Written(detail), Written(detail, note="added by a later version"))
    assert (result.verdict, result.divergence, result.look_at) == ("identical", None, [])
    text = report(result)
    assert text.startswith("identical: 3 iterations (24 environment steps)\n")
    assert text.endswith("nothing else differs: code, configuration, versions, machine, settings are equal")


@pytest.mark.parametrize(
    ("name", "number", "iteration", "item", "place"),
    [
        ("reset", 0, 0, "obs", "before the first iteration, reset: obs"),
        ("start", 0, 1, "start/streams/action", f"{SECOND}, at its start: start/streams/action"),
        ("step", 2, 1, "reward", f"{SECOND}, step 2: reward"),
        ("targets", 0, 1, "value", f"{SECOND}, targets 0: value"),
        ("update", 2, 0, "params", f"{FIRST}, update 2: params"),
        ("iteration", 1, 1, "obs_norm", f"{SECOND}, at its end: obs_norm"),
    ],
)
def test_each_kind_of_event_is_found_and_named(
    compared: Compared, name: str, number: int, iteration: int, item: str, place: str
) -> None:
    changed = Written().change(name, number, item, iteration=iteration)
    result = compared(Written(), changed)
    at = result.divergence
    assert at is not None
    assert (result.verdict, at.event, at.index, at.item, at.further) == ("diverged", name, number, item, [])
    pairs = zip(Written().lines()[1:], changed.lines()[1:], strict=True)
    assert at.line == 2 + [one == other for one, other in pairs].index(False)
    assert headline(result) == f"diverged {place}"


def test_the_items_of_a_line_are_told_apart_in_causal_order(compared: Compared, make_run: MakeRun) -> None:
    result = compared(Written(), Written().change("step", 2, "reward", "noise", iteration=1))
    at = result.divergence
    assert at is not None
    assert (at.item, at.further, at.equal_before) == ("noise", ["reward"], ["obs", "policy"])
    changed = Written("iteration").change("iteration", 1, "reward", "loss")
    a = make_run("-line", Written("iteration"))
    result = compare_runs(a, make_run("-other", changed))
    assert headline(result) == "diverged in iteration 1 (environment steps 9 to 16): reward"
    assert "trace=step" in result.look_at[0]
    longer = Written("iteration").change("iteration", 2, "obs")
    longer.env_steps[2] = 30
    at = compare_runs(a, make_run("-longer", longer)).divergence
    assert at is not None
    assert (at.item, at.further, at.a, at.b) == ("env_steps", ["obs"], "24", "30")


def test_a_trace_that_ends_earlier_is_no_divergence_unless_it_differs_before(make_run: MakeRun) -> None:
    short, long = make_run("-short", Written(iterations=2)), make_run("-long", Written(iterations=4))
    result = compare_runs(long, short)
    assert (result.verdict, result.divergence) == ("shorter", None)
    assert "a ends after 4 iterations (32 environment steps), b after 2" in headline(result)
    other = make_run("-other", Written(iterations=2).change("step", 1, "obs"))
    assert compare_runs(other, long).verdict == "diverged"


def test_another_event_or_other_items_in_the_same_place(compared: Compared, make_run: MakeRun) -> None:
    shorter = Written()
    del shorter.events[shorter.find("update", 2, iteration=1)]
    result = compared(Written(), shorter)
    assert headline(result).endswith("update 2: a goes on with update 2, b with the end of iteration 1")
    changed = Written()
    changed.events[0] = ("reset", 0, ["pixels"])
    result = compare_runs(Path(result.a.run_dir), make_run("-items", changed))
    assert headline(result).endswith("reset: other items; only in a: obs; only in b: pixels")


BAD: dict[str, tuple[Written | str | None, str]] = {
    "no trace, on purpose": (None, "has no trace.jsonl; it was made with trace=off"),
    "another version": (Written(version=2), "is no trace of this version"),
    "cut off": ("".join(Written().lines())[:-200], "breaks off after 2 iterations"),
    "another algorithm": (Written(algo="sac"), "other algo: the trace of run-1-a has algo ppo, that"),
}
LINES = Written().lines()
for name, line in (("digits", LINES[20][:-7] + LINES[20][-3:]), ("spelling", LINES[20].replace(",", ", "))):
    text = "".join([*LINES[:20], line, *LINES[21:]])
    BAD[f"damaged {name}"] = text, "line 21 of trace.jsonl is damaged in run-1-a or in run-1-b"


@pytest.mark.parametrize("case", BAD)
def test_traces_that_cannot_be_compared_are_refused_in_a_line(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    trace, message = BAD[case]
    a, b = make_run("-a", Written()), make_run("-b", trace, {"trace": "off"})
    assert main(["compare", f"a={a}", f"b={b}"]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert (printed.err.count("\n"), printed.out) == (1, "")


def test_the_report_begins_and_ends_with_the_verdict(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run("-a", Written(), versions={"torch": "2"})
    facts = {"versions": {f"package-{i}": "1" for i in range(40)} | {"torch": "3"}, "git": OTHER_CODE}
    make_run("-b", Written().change("step", 1, "policy", "action"), {"algo": {"gamma": 0.5}}, **facts)
    assert main(["compare", "a=1-a", "b=1-b"]) == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert lines[0] == lines[-1] == "diverged in iteration 0 (environment steps 1 to 8), step 1: policy"
    folder, shows = "runs/ppo-Thing/run-1", "code=full shows what was changed."
    for line in (
        "  equal  obs",
        "  also   action",
        f"  1. The code differs: make diff a={folder}-a b={folder}-b {shows}",
        "what else differs (43)",
        "    algo.gamma  0.99 -> 0.5",
        "    and 29 more; --json lists them all",
    ):
        assert line in lines, printed.out
    assert "note: the code cannot be compared: this repository does not have both snapshots" in printed.out


@pytest.mark.parametrize(
    ("trace", "status"),
    [(Written(), 0), (Written(iterations=2), 1), (Written().change("reset", 0, "obs"), 1)],
)
def test_json_says_the_same_with_the_same_exit_status(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], trace: Written, status: int
) -> None:
    a, b = make_run("-a", Written()), make_run("-b", trace, {"seed": 3})
    assert main(["compare", f"a={a}", f"b={b}", "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["a"]["run"]) == (compare_runs(a, b).verdict, "run-1-a")
    assert document["differences"] == [{"section": "configuration", "key": "seed", "a": 1, "b": 3}]
    assert bool(document["divergence"]) == (document["verdict"] == "diverged")
