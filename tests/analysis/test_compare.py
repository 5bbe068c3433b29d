"""Two runs side by side: the first difference is found where it is, named, and explained.

The traces are written here, byte by byte as their format says, so that what reads them is not tested with
what writes them.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, program

from rltemplate.__main__ import main
from rltemplate.analysis.compare import (
    ABSENT,
    LOOK_AT,
    Comparison,
    Difference,
    compare_runs,
    headline,
    report,
)
from rltemplate.run import paths
from rltemplate.types import ConfigError

STEP_ITEMS = [
    *("obs", "normalized_obs", "policy", "noise", "action", "log_prob"),
    *("reward", "terminated", "truncated", "next_obs"),
]
UPDATE_ITEMS = ["loss", "gradient", "optimizer/mu", "optimizer/nu", "params"]
TARGET_ITEMS = ["scaled_reward", "value", "advantage"]
STREAMS = ["stream/action", "stream/minibatch"]
ENDS = ["obs_norm", "return_norm"]
INIT_ITEMS = ["init/actor.0.weight", "init/critic.0.weight"]
SAC_ITEMS = [
    *("replay_index", "update_noise", "update_noise#2", "critic/target", "critic/gradient", "actor/loss"),
    *("critic/optimizer/mu", "alpha/optimizer/mu", "alpha/log_alpha"),
]

HEADER = {"format": "rltemplate-trace", "version": 1, "digest": "xxh3_64", "detail": "step", "algo": "ppo"}
STEPS, UPDATES, ENV_STEPS = 4, 3, 8  # of one iteration


class Written:
    """A trace as a header and lines of JSON values, to be changed and written."""

    def __init__(self, detail: str = "step", iterations: int = 3, **header: Any) -> None:
        self.header = {**HEADER, "detail": detail, **header}
        self.lines: list[Any] = []
        self.event("init", 0, INIT_ITEMS)
        self.event("reset", 0, ["obs"])
        for i in range(iterations):
            names = ENDS
            if detail == "step":
                self.event("start", 0, STREAMS)
                for t in range(STEPS):
                    self.event("step", t, STEP_ITEMS)
                self.event("targets", 0, TARGET_ITEMS)
                for u in range(UPDATES):
                    self.event("update", u, UPDATE_ITEMS)
            else:
                names = [*STREAMS, *STEP_ITEMS, *TARGET_ITEMS, *UPDATE_ITEMS, *ENDS]
            self.event("iteration", i, names, (i + 1) * ENV_STEPS)

    def event(self, event: str, index: int, names: list[str], *env_steps: int) -> None:
        """Add a line, and before it the names of its items if they are new."""
        if self.names(event) != names:
            self.lines.append(["items", event, names])
        digits = "".join(_digits(f"{len(self.lines)} {name}", 16) for name in names)
        self.lines.append([event, index, *env_steps, digits])

    def names(self, event: str) -> list[str]:
        """The names that the event has at the end."""
        return next((line[2] for line in reversed(self.lines) if line[:2] == ["items", event]), [])

    def find(self, event: str, index: int, iteration: int = 0) -> int:
        """Which of the lines this is; `iteration` is that of an event inside one."""
        ended = 0
        for number, line in enumerate(self.lines):
            if line[:2] == [event, index] and (event == "iteration" or ended == iteration):
                return number
            ended += line[0] == "iteration"
        raise AssertionError(f"no {event} {index} in iteration {iteration}")

    def also(self, event: str, index: int, item: str, iteration: int = 0) -> Written:
        """Give one item alone another fingerprint."""
        self._spoil(self.find(event, index, iteration), self.names(event).index(item))
        return self

    def change(self, event: str, index: int, item: str, iteration: int = 0) -> Written:
        """Give an item, and all events after this one, other fingerprints, as a divergence does."""
        self.also(event, index, item, iteration)
        for number in range(self.find(event, index, iteration) + 1, len(self.lines)):
            if self.lines[number][0] != "items":
                for place in range(len(self.names(self.lines[number][0]))):
                    self._spoil(number, place)
        return self

    def _spoil(self, number: int, place: int) -> None:
        line = self.lines[number]
        at = 3 if line[0] == "iteration" else 2
        other = _digits(f"other {number} {place}", 16)
        line[at] = line[at][: 16 * place] + other + line[at][16 * (place + 1) :]

    def text(self) -> str:
        """The file."""
        text = json.dumps(self.header, separators=(",", ":")) + "\n"
        for number, line in enumerate(self.lines):
            chain = [_digits(str(self.lines[: number + 1]), 32)] if line[0] == "iteration" else []
            text += json.dumps([*line, *chain], separators=(",", ":")) + "\n"
        return text


def _digits(text: str, number: int) -> str:
    repeated = b"".join(hashlib.sha256(f"{text} {i}".encode()).digest() for i in range(number // 64 + 1))
    return repeated.hex()[:number]


RECORD: dict[str, Any] = {
    "schema": 1,
    "id": "the-id",
    "status": "finished",
    "command_line": ["python"],
    "working_directory": "/somewhere",
    "started_at": "2026-01-01T00:00:00.000Z",
    "pid": 1,
    "hostname": "here",
    "ended_at": "2026-01-01T00:00:01.000Z",
    "duration_s": 1.0,
    "final_metrics": {"eval/return": 1.0},
    "resumed": [],
    "overrides": [],
    "git": {
        "ref": "refs/runs/the-id",
        "commit": "c" * 40,
        "base_commit": "b" * 40,
        "branch": "main",
        "dirty": False,
        "changed": [],
        "changed_count": 0,
        "skipped": [],
        "skipped_count": 0,
        "dirty_submodules": [],
        "notes": [],
        "problem": None,
    },
    "determinism": {
        "level": "repeat",
        "settings": {"torch_num_threads": 1, "cpu_capability": "AVX512"},
        "machine": {"libm": "00ff"},
    },
    "versions": {"attrs": "1.0", "torch": "2.13.0", "numpy": "2.4.6"},
    "machine": {
        "cpu": "a processor",
        "cpu_flags": ["avx2", "fma", "avx512f"],
        "libc": "glibc 2.36",
        "memory_bytes": 1,
        "affinity": "0-3",
        "gpus": [{"name": "a card", "multiprocessors": 132}],
    },
    "environment": {"OMP_NUM_THREADS": "1"},
}
CONFIG: dict[str, Any] = {
    "algo": {"name": "ppo", "hidden_sizes": [64, 64]},
    "env": {"id": "Thing-v0", "kwargs": {}},
    "seed": 1,
    "runs_dir": "runs",
    "run_dir": None,
    "trace": "step",
}

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a run folder. The trace is given as lines or bytes or not at all; keys of `facts` are paths."""

    def make(
        name: str, content: Written | bytes | None, facts: dict[str, Any] | None = None, **config: Any
    ) -> Path:
        run_dir = tmp_path / "runs" / "ppo-Thing" / name
        run_dir.mkdir(parents=True)
        record = {**copy.deepcopy(RECORD), "id": name}
        for key, value in (facts or {}).items():
            *path, last = key.split("/")
            place = record
            for part in path:
                place = place[part]
            place[last] = value
        (run_dir / paths.RECORD).write_text(json.dumps(record))
        (run_dir / paths.CONFIG).write_text(yaml.safe_dump({**CONFIG, **config}))
        if content is not None:
            text = content.text().encode() if isinstance(content, Written) else content
            (run_dir / paths.TRACE).write_bytes(text)
        return run_dir

    return make


@pytest.fixture
def compared(make_run: MakeRun) -> Callable[[Written, Written], Comparison]:
    """Compare two traces of runs that are equal in everything else."""

    def compare(a: Written, b: Written) -> Comparison:
        return compare_runs(make_run("run-a", a), make_run("run-b", b))

    return compare


Compared = Callable[[Written, Written], Comparison]


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the script as `make compare` does."""
    line = [*program(ROOT, "compare"), *words]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)


# --- Where the traces part -------------------------------------------------------------------------------


@pytest.mark.parametrize("detail", ["step", "iteration"])
def test_equal_traces_are_identical(compared: Compared, detail: str) -> None:
    result = compared(Written(detail), Written(detail))
    assert (result.verdict, result.divergence, result.look_at, result.differences) == (
        "identical",
        None,
        [],
        [],
    )
    assert (result.a.iterations, result.b.env_steps, result.a.status) == (3, 3 * ENV_STEPS, "finished")
    assert headline(result) == "identical: 3 iterations (24 environment steps)"


def test_a_run_is_identical_to_itself(make_run: MakeRun) -> None:
    run_dir = make_run("run", Written())
    assert compare_runs(run_dir, run_dir).verdict == "identical"


@pytest.mark.parametrize(
    ("event", "index", "item", "iteration", "line"),
    [
        (
            "init",
            0,
            "init/critic.0.weight",
            0,
            "before the first iteration, initial weights: init/critic.0.weight",
        ),
        ("reset", 0, "obs", 0, "before the first iteration, first reset: obs"),
        (
            "start",
            0,
            "stream/minibatch",
            1,
            "in iteration 1 (environment steps 9 to 16), at its start: ",
        ),
        ("step", 3, "action", 0, "in iteration 0 (environment steps 1 to 8), step 3: action"),
        ("targets", 0, "value", 2, "in iteration 2 (environment steps 17 to 24), targets: value"),
        ("update", 2, "gradient", 1, "in iteration 1 (environment steps 9 to 16), update 2: gradient"),
        (
            "iteration",
            1,
            "return_norm",
            1,
            "in iteration 1 (environment steps 9 to 16), at its end: return_norm",
        ),
    ],
)
def test_each_kind_of_event_is_found_and_named(
    compared: Compared, event: str, index: int, item: str, iteration: int, line: str
) -> None:
    changed = Written().change(event, index, item, iteration)
    result = compared(Written(), changed)
    at = result.divergence
    assert result.verdict == "diverged"
    assert at is not None
    assert (at.event, at.index, at.item, at.iteration) == (event, index, item, iteration)
    assert (at.env_steps_before, at.env_steps_after) == (iteration * ENV_STEPS, (iteration + 1) * ENV_STEPS)
    assert at.line == changed.find(event, index, iteration) + 2
    assert at.further == []
    assert headline(result).startswith(f"diverged {line}")


def test_the_items_of_the_line_are_told_apart_in_causal_order(compared: Compared) -> None:
    changed = Written()
    for item in ("next_obs", "noise", "reward"):
        changed.also("step", 2, item, iteration=1)
    at = compared(Written(), changed).divergence
    assert at is not None
    assert (at.item, at.further) == ("noise", ["reward", "next_obs"])
    assert at.equal_before == ["obs", "normalized_obs", "policy"]
    assert re.fullmatch("[0-9a-f]{16}", at.a)
    assert at.a != at.b


def test_with_one_line_per_iteration_the_place_is_the_iteration(compared: Compared) -> None:
    changed = Written("iteration").also("iteration", 1, "reward").also("iteration", 1, "loss")
    result = compared(Written("iteration"), changed)
    at = result.divergence
    assert at is not None
    assert (at.iteration, at.item, at.further) == (1, "reward", ["loss"])
    assert headline(result) == "diverged in iteration 1 (environment steps 9 to 16): reward"
    assert "trace=step" in result.look_at[0]


def test_one_item_alone_in_its_iteration_was_the_first_for_sure(compared: Compared) -> None:
    result = compared(Written("iteration"), Written("iteration").also("iteration", 1, "return_norm"))
    assert result.divergence is not None
    assert "trace=step" not in " ".join(result.look_at)


def test_names_that_change_on_the_way_are_followed(compared: Compared) -> None:
    def with_new_names() -> Written:
        trace = Written(iterations=1)
        trace.event("update", 0, ["loss", "extra"])
        trace.event("update", 1, ["loss", "extra"])
        trace.event("iteration", 1, ENDS, 2 * ENV_STEPS)
        return trace

    changed = with_new_names()
    number = changed.find("update", 1, iteration=1)
    changed.lines[number][2] = changed.lines[number][2][:16] + "0" * 16
    at = compared(with_new_names(), changed).divergence
    assert at is not None
    assert (at.event, at.index, at.item, at.equal_before) == ("update", 1, "extra", ["loss"])


@pytest.mark.parametrize("longer", ["a", "b"])
def test_a_trace_that_ends_earlier_is_no_divergence(compared: Compared, longer: str) -> None:
    traces = [Written(iterations=2), Written(iterations=4)]
    result = compared(*(traces if longer == "b" else reversed(traces)))
    assert (result.verdict, result.divergence) == ("shorter", None)
    assert sorted([result.a.iterations, result.b.iterations]) == [2, 4]
    assert "b after 4 iterations (32 environment steps)" in headline(result) or longer == "a"
    assert "a ends after 4 iterations (32 environment steps)" in headline(result) or longer == "b"


def test_a_difference_before_the_end_of_the_shorter_one_counts(compared: Compared) -> None:
    result = compared(Written(iterations=2).also("step", 1, "obs"), Written(iterations=4))
    assert result.verdict == "diverged"


def test_no_end_of_an_iteration_after_the_difference(compared: Compared) -> None:
    def unfinished() -> Written:
        trace = Written(iterations=1)
        trace.event("start", 0, STREAMS)
        trace.event("step", 0, STEP_ITEMS)
        return trace

    result = compared(unfinished(), unfinished().also("step", 0, "policy", iteration=1))
    assert result.divergence is not None
    assert result.divergence.env_steps_after is None
    assert headline(result) == "diverged in iteration 1 (environment steps from 9), step 0: policy"


def test_another_event_in_the_same_place(compared: Compared) -> None:
    changed = Written()
    del changed.lines[changed.find("update", 2, iteration=1)]
    result = compared(Written(), changed)
    at = result.divergence
    assert at is not None
    assert (at.item, at.event, at.index, at.a, at.b) == (
        "event",
        "update",
        2,
        "update 2",
        "the end of iteration 1",
    )
    assert headline(result).endswith("update 2: a goes on with update 2, b with the end of iteration 1")
    assert "target_kl" in result.look_at[0]


def test_an_event_with_other_items(compared: Compared) -> None:
    changed = Written()
    changed.lines[0][2] = [*INIT_ITEMS[:1], "init/critic.9.weight"]
    result = compared(Written(), changed)
    at = result.divergence
    assert at is not None
    assert (at.item, at.event, at.index) == ("items", "init", None)
    assert (at.a, at.b) == ("init/critic.0.weight", "init/critic.9.weight")
    assert "only in b: init/critic.9.weight" in headline(result)


def with_state(detail: str, iterations: int = 3, before: int = 0) -> Written:
    """A trace as it is written now; of the `before` first iterations as it was before."""
    older, trace = Written(detail, iterations), Written(detail, 0)
    trace.lines = []
    for number, line in enumerate(older.lines):
        if line[0] == "items":
            continue
        event, index, *rest = line
        names = older.names(event)
        old = sum(each[0] == "iteration" for each in older.lines[:number]) < before
        if not old and event in ("start", "iteration"):
            names = [f"start/{name}" if name in STREAMS else name for name in names]
            names += ["start/adam/2", "end/adam/2"] if event == "iteration" else []
        if trace.names(event) != names:
            trace.lines.append(["items", event, names])
        digits = rest[-1] + "".join(_digits(f"{number} {name}", 16) for name in names[len(rest[-1]) // 16 :])
        trace.lines.append([event, index, *rest[:-1], digits])
    return trace


def test_items_that_come_up_in_one_run_alone(compared: Compared) -> None:
    """Such as the state of a stream that nobody had used before."""
    one, other = (with_state("iteration", iterations=1) for _ in "ab")
    one.event("iteration", 1, one.names("iteration"), 2 * ENV_STEPS)
    other.event("iteration", 1, [*one.names("iteration"), "end/streams/other"], 2 * ENV_STEPS)
    result = compared(one, other)
    assert result.divergence is not None
    assert result.divergence.iteration == 1
    assert headline(result).endswith("only in b: end/streams/other")


@pytest.mark.parametrize("detail", ["step", "iteration"])
@pytest.mark.parametrize("before", [0, 2])
def test_an_older_trace_is_compared_in_what_both_have(compared: Compared, detail: str, before: int) -> None:
    """The other one is newer, or of a run that went on with newer code after two iterations."""
    old, new = Written(detail), with_state(detail, before=before)
    result = compared(old, new)
    assert (result.verdict, result.fewer) == ("identical", ["a"] if before == 0 else [])
    assert ("the trace of a is an older one" in report(result)) == (before == 0)


@pytest.mark.parametrize("detail", ["step", "iteration"])
@pytest.mark.parametrize("before", [0, 2])
def test_a_difference_beside_an_older_trace(compared: Compared, detail: str, before: int) -> None:
    changed = with_state(detail, before=before).also("iteration", 2, "return_norm")
    at = compared(Written(detail), changed).divergence
    assert at is not None
    assert (at.iteration, at.event, at.item, at.further) == (2, "iteration", "return_norm", [])


def test_an_older_trace_may_be_the_longer_one(compared: Compared) -> None:
    assert compared(Written("step", 4), with_state("step", 3)).verdict == "shorter"


@pytest.mark.parametrize(
    ("iteration", "item", "words"),
    [
        (1, "start/adam/2", "All that iteration 0 left behind was equal"),
        (0, "start/adam/2", "Nothing has been learned yet"),
        (1, "end/adam/2", "this was its last change"),
    ],
)
def test_what_an_algorithm_holds_is_told_apart_by_when_it_changed(
    compared: Compared, iteration: int, item: str, words: str
) -> None:
    result = compared(with_state("iteration"), with_state("iteration").also("iteration", iteration, item))
    assert result.divergence is not None
    assert (result.divergence.iteration, result.divergence.item) == (iteration, item)
    assert words in result.look_at[0]
    assert result.look_at[-1] == LOOK_AT["optimizer"]


def test_an_iteration_of_another_length(compared: Compared) -> None:
    changed = Written("iteration").also("iteration", 2, "obs")
    changed.lines[changed.find("iteration", 2)][2] = 30
    result = compared(Written("iteration"), changed)
    at = result.divergence
    assert at is not None
    assert (at.item, at.further, at.a, at.b) == ("env_steps", ["obs"], "24", "30")


def test_an_item_nobody_knows_is_reported_all_the_same(compared: Compared) -> None:
    traces = [Written(iterations=0), Written(iterations=0)]
    for trace in traces:
        trace.event("dream", 0, ["vision", "sound"])
    number = traces[1].find("dream", 0)
    traces[1].lines[number][2] = traces[1].lines[number][2][:16] + "0" * 16
    result = compared(*traces)
    assert headline(result) == "diverged in iteration 0 (environment steps from 1), dream: sound"
    assert "no advice" in result.look_at[0]


def hex_positions(text: str) -> list[tuple[int, str]]:
    """Each place of a fingerprint or chain digest in the file, and the item it belongs to."""
    places: list[tuple[int, str]] = []
    start = 0
    names: dict[str, list[str]] = {}
    for line in text.splitlines(keepends=True):
        values = json.loads(line)
        if isinstance(values, list) and values[0] == "items":
            names[values[1]] = values[2]
        elif isinstance(values, list):
            digits = values[3 if values[0] == "iteration" else 2]
            begin = start + line.index(digits)
            places += [(begin + i, names[values[0]][i // 16]) for i in range(len(digits))]
            if values[0] == "iteration":
                places += [(start + line.index(values[4]) + i, "chain") for i in range(32)]
        start += len(line)
    return places


def test_a_line_is_found_wherever_the_pieces_end_that_are_read(make_run: MakeRun) -> None:
    a, b = make_run("run-a", None), make_run("run-b", None)
    for padding in range(65_300, 65_540):  # from the list of items to the difference it is about 2**16 bytes
        trace = Written(iterations=0)
        trace.event("iteration", 0, ["obs"], ENV_STEPS)
        trace.event("mark", 0, ["item"])
        trace.lines.append(["items", "padding", ["x" * padding]])
        trace.event("iteration", 1, ["obs"], 2 * ENV_STEPS)
        plain = trace.text()
        (a / paths.TRACE).write_text(plain)
        (b / paths.TRACE).write_text(trace.also("iteration", 1, "obs").text())
        at = compare_runs(a, b).divergence
        assert at is not None
        assert (at.line, at.iteration, at.env_steps_before) == (len(trace.lines) + 1, 1, ENV_STEPS)
        assert (at.env_steps_after, at.item) == (2 * ENV_STEPS, "obs")
        # And the other way round: from the difference to the end of the iteration.
        at_mark = plain.index('"mark",0,"') + len('"mark",0,"')
        other = "1" if plain[at_mark] == "0" else "0"
        (b / paths.TRACE).write_text(plain[:at_mark] + other + plain[at_mark + 1 :])
        at = compare_runs(a, b).divergence
        assert at is not None
        assert (at.event, at.iteration, at.env_steps_after) == ("mark", 1, 2 * ENV_STEPS)


@pytest.mark.parametrize("detail", ["step", "iteration"])
def test_any_single_digit_is_found_at_its_line_and_item(make_run: MakeRun, detail: str) -> None:
    # Long enough to need several pieces of the size in which the files are read.
    text = Written(detail, iterations=160 if detail == "step" else 400).text()
    assert len(text) > 150_000
    places = hex_positions(text)
    drawn = random.Random(7)
    a, b = make_run("run-a", text.encode()), make_run("run-b", text.encode())
    for position, item in [places[0], places[-1], *drawn.sample(places, 60)]:
        other = drawn.choice([digit for digit in "0123456789abcdef" if digit != text[position]])
        (b / paths.TRACE).write_text(text[:position] + other + text[position + 1 :])
        result = compare_runs(*drawn.sample([a, b], 2))
        at = result.divergence
        assert result.verdict == "diverged"
        assert at is not None
        assert (at.line, at.item, at.further) == (text.count("\n", 0, position) + 1, item, [])


def test_traces_are_compared_after_headers_of_unequal_length(compared: Compared) -> None:
    longer = Written(note="something that a later version adds")
    assert compared(longer, Written()).verdict == "identical"


def test_a_divergence_after_headers_of_unequal_length(compared: Compared) -> None:
    longer = Written(note="something that a later version adds")
    at = compared(longer, Written().also("step", 1, "reward", iteration=2)).divergence
    assert at is not None
    assert (at.iteration, at.event, at.index, at.item) == (2, "step", 1, "reward")


# --- What cannot be compared ------------------------------------------------------------------------------

WHOLE = Written().text().encode()
BAD: dict[str, tuple[Written | bytes | None, dict[str, Any], str]] = {
    "no trace, on purpose": (None, {"trace": "off"}, "has no trace.jsonl; the run was made with trace=off"),
    "no trace, an old run": (None, {"trace": None}, "make the run again with trace=iteration"),
    "no trace, though there should be": (None, {}, "it was made with trace=step, so the file was removed"),
    "empty": (b"", {}, "trace.jsonl is empty"),
    "another JSON": (b'{"format":"something"}\n', {}, "its first line is not the header of one"),
    "a list first": (b'["step",0,"00"]\n', {}, "its first line is not the header of one"),
    "no JSON": (b"\xff\xfe hello\n", {}, "its first line is not the header of one"),
    "another version": (Written(version=2), {}, "has format version 2, but this code reads version 1"),
    "cut off in the header": (WHOLE[:30], {}, "breaks off in its first line"),
    "cut off in the first iteration": (
        WHOLE[: WHOLE.index(b'["targets",0') + 9],
        {},
        "breaks off in the middle of a line before the end of iteration 0; the run was cut off",
    ),
    "cut off in an iteration": (
        WHOLE[:-200],
        {},
        "in the middle of a line after iteration 1; the run was cut off",
    ),
    "cut off before the last line break": (WHOLE[:-1], {}, "in the middle of a line after iteration 1"),
    "last line does not parse": (WHOLE[:-20] + b"\n", {}, "in the middle of a line after iteration 1"),
    "last line means nothing": (WHOLE + b'["step","x"]\n', {}, "in the middle of a line after iteration 2"),
    "another algorithm": (Written(algo="sac"), {}, "other algorithms: run-a ran ppo, run-b sac"),
    "another detail": (
        Written("iteration"),
        {},
        "run-a was traced with trace=step, run-b with trace=iteration; make one of them again",
    ),
    "another digest": (
        Written(digest="keyed_sum_64"),
        {},
        "run-a has xxh3_64 (the CPU), run-b keyed_sum_64 (CUDA)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_compared_is_said_in_a_line(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    trace, config, message = BAD[case]
    a, b = make_run("run-a", Written()), make_run("run-b", trace, **config)
    assert main(["compare", f"a={a}", f"b={b}"]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "run-b" in printed.err
    assert (printed.err.count("\n"), printed.out) == (1, "")
    assert main(["compare", f"a={a}", f"b={a}"]) == 0  # it is b that is refused


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda line: line[:-7] + line[-3:], "of trace.jsonl is damaged: 10 items need 160 digits"),
        (lambda line: line.replace('",', '"'), "of trace.jsonl is damaged: it is no line of a trace"),
        (lambda line: line[:-5] + "z" + line[-4:], "of trace.jsonl is damaged: it is no line of a trace"),
        (lambda line: line.replace(",", ", "), "of trace.jsonl is damaged: it has the values of"),
    ],
    ids=["digits", "syntax", "letter", "spelling"],
)
def test_a_damaged_line_is_not_taken_for_a_divergence(
    make_run: MakeRun, damage: Callable[[str], str], message: str
) -> None:
    lines = Written().text().splitlines(keepends=True)
    number = Written().find("step", 2, iteration=1) + 1
    lines[number] = damage(lines[number])
    a, b = make_run("run-a", Written()), make_run("run-b", "".join(lines).encode())
    with pytest.raises(ConfigError, match=message) as raised:
        compare_runs(a, b)
    assert f"line {number + 1} " in str(raised.value)


def test_an_event_whose_items_nothing_names(make_run: MakeRun) -> None:
    traces = [Written(), Written().also("targets", 0, "value")]
    for trace in traces:
        del trace.lines[next(i for i, line in enumerate(trace.lines) if line[:2] == ["items", "targets"])]
    with pytest.raises(ConfigError, match="nothing before it names the items of targets"):
        compare_runs(make_run("run-a", traces[0]), make_run("run-b", traces[1]))


def test_a_folder_without_a_readable_configuration(make_run: MakeRun) -> None:
    a, b = make_run("run-a", Written()), make_run("run-b", Written())
    (b / paths.CONFIG).write_text("{not yaml")
    with pytest.raises(ConfigError, match=r"run-b: config\.yaml cannot be read"):
        compare_runs(a, b)
    (b / paths.CONFIG).unlink()
    with pytest.raises(ConfigError, match=r"run-b: has no config\.yaml"):
        compare_runs(a, b)


# --- What else differs -----------------------------------------------------------------------------------


def differences(make_run: MakeRun, facts: dict[str, Any], **config: Any) -> list[tuple[str, str, Any, Any]]:
    """Everything besides the trace in which a run with these facts differs from the usual one."""
    result = compare_runs(make_run("run-a", Written()), make_run("run-b", Written(), facts, **config))
    assert result.verdict == "identical"
    return [(one.section, one.key, one.a, one.b) for one in result.differences]


def test_differences_come_in_the_order_in_which_to_examine_them(make_run: MakeRun) -> None:
    facts = {
        "environment/OMP_NUM_THREADS": "2",
        "determinism/settings/cpu_capability": "AVX2",
        "determinism/level": "invariant",  # which the configuration says, too
        "determinism/machine/libm": "abcd",
        "machine/libc": "glibc 2.41",
        "machine/gpus": [{"name": "a card", "multiprocessors": 114}],
        "versions": {"attrs": "2.0", "torch": "2.14.0", "numpy": "2.4.6", "zzz": "1"},
        "git/base_commit": "d" * 40,
        "git/commit": "e" * 40,
    }
    algo = {"name": "ppo", "hidden_sizes": [64, 32]}
    assert differences(make_run, facts, algo=algo, env={"id": "Thing-v0", "kwargs": {"wind": 1}}) == [
        ("code", "base_commit", "b" * 40, "d" * 40),
        ("configuration", "algo.hidden_sizes", [64, 64], [64, 32]),
        ("configuration", "env.kwargs.wind", ABSENT, 1),
        ("versions", "torch", "2.13.0", "2.14.0"),
        ("versions", "attrs", "1.0", "2.0"),
        ("versions", "zzz", ABSENT, "1"),
        ("machine", "libc", "glibc 2.36", "glibc 2.41"),
        ("machine", "gpus[0].multiprocessors", 132, 114),
        ("machine", "libm", "00ff", "abcd"),
        ("settings", "cpu_capability", "AVX512", "AVX2"),
        ("environment", "OMP_NUM_THREADS", "1", "2"),
    ]


def test_what_cannot_matter_is_not_listed(make_run: MakeRun) -> None:
    facts: dict[str, Any] = {
        "started_at": "2027-01-01T00:00:00.000Z",
        "ended_at": None,
        "duration_s": 99.0,
        "pid": 4711,
        "hostname": "elsewhere",
        "working_directory": "/elsewhere",
        "command_line": ["other"],
        "overrides": ["runs_dir=other"],
        "status": "interrupted",
        "final_metrics": {},
        "git/ref": "refs/runs/other",
        "git/branch": "other",
        "git/commit": "d" * 40,  # holds the configuration, and with it the folder of the runs
        "machine/memory_bytes": 2,
        "machine/affinity": "4-7",
    }
    assert differences(make_run, facts, runs_dir="other", run_dir="here/it/is") == []


def test_code_that_was_not_committed_differs_by_the_commit_of_the_run(make_run: MakeRun) -> None:
    dirty = {"git/dirty": True, "git/changed": ["a.py"], "git/changed_count": 1}
    a = make_run("run-a", Written(), dirty)
    b = make_run("run-b", Written(), {**dirty, "git/commit": "d" * 40})
    assert compare_runs(a, a).differences == []
    assert compare_runs(a, b).differences == [Difference("code", "commit", "c" * 40, "d" * 40)]
    changed = {**dirty, "git/changed": ["b.py", "c.py"], "git/changed_count": 2}
    c = make_run("run-c", Written(), {**changed, "git/commit": "d" * 40}, seed=2)
    keys = [one.key for one in compare_runs(a, c).differences]
    assert keys == ["commit (code and configuration)", "changed", "seed"]


def test_code_that_was_not_recorded_is_a_difference(make_run: MakeRun) -> None:
    facts = {"git/commit": None, "git/problem": "no repository"}
    assert [one[:2] for one in differences(make_run, facts)] == [("code", "commit"), ("code", "problem")]


def test_records_without_some_sections_can_be_compared(make_run: MakeRun) -> None:
    a, b = make_run("run-a", Written()), make_run("run-b", Written())
    record = json.loads((b / paths.RECORD).read_text())
    for key in ("git", "environment", "determinism", "machine", "resumed"):
        del record[key]
    (b / paths.RECORD).write_text(json.dumps(record))
    found = compare_runs(a, b).differences
    assert Difference("environment", "OMP_NUM_THREADS", "1", ABSENT) in found
    assert compare_runs(b, b).differences == []


def test_a_run_that_went_on_elsewhere(make_run: MakeRun) -> None:
    again = {"git": RECORD["git"], "machine": {**RECORD["machine"], "cpu": "another processor"}}
    assert differences(make_run, {"resumed": [again], "versions/torch": "2.14.0"}) == [
        ("versions", "torch", "2.13.0", "2.14.0"),
        ("machine", "cpu (resumed, start 2)", "a processor", "another processor"),
        ("settings", "times resumed", 0, 1),
    ]


# --- What to look at -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "index", "item", "iteration", "expected"),
    [
        ("init", 0, "init/actor.0.weight", 0, "LAPACK"),
        ("reset", 0, "obs", 0, "No action has been taken yet"),
        ("start", 0, "stream/action", 1, "a draw too many"),
        ("step", 0, "obs", 0, "no action has been taken since"),
        ("step", 2, "obs", 0, "All actions before this step were equal"),
        ("step", 0, "obs", 1, "All actions before this step were equal"),
        ("step", 2, "reward", 0, "actions up to step 2 were equal"),
        ("step", 2, "policy", 0, "MKL's branch"),
        ("step", 2, "noise", 0, "fewer than 16 values"),
        ("targets", 0, "value", 0, "value head"),
        ("update", 0, "gradient", 0, "split over num_threads"),
        ("update", 2, "optimizer/nu", 0, "All that was traced of update 1 was equal"),
    ],
)
def test_advice_fits_what_is_known(
    compared: Compared, event: str, index: int, item: str, iteration: int, expected: str
) -> None:
    result = compared(Written(), Written().change(event, index, item, iteration))
    assert expected in " ".join(result.look_at)
    others = ("All actions before", "actions up to", "All that was traced", "no action has been")
    said = [phrase for phrase in others if phrase in " ".join(result.look_at)]
    assert said == [phrase for phrase in others if phrase in expected or expected in phrase]


@pytest.mark.parametrize("item", SAC_ITEMS)
def test_each_item_of_sac_has_advice_of_its_own_kind(compared: Compared, item: str) -> None:
    traces = [Written(iterations=0, algo="sac"), Written(iterations=0, algo="sac")]
    for trace in traces:
        trace.event("update", 0, SAC_ITEMS)
    wanted = {
        "update_noise#2": "update_noise",
        "critic/gradient": "gradient",
        "actor/loss": "loss",
        "critic/optimizer/mu": "optimizer",
        "alpha/optimizer/mu": "alpha",
        "alpha/log_alpha": "alpha",
    }.get(item, item)
    assert compared(traces[0], traces[1].also("update", 0, item)).look_at == [LOOK_AT[wanted]]


def test_streams_at_the_first_start_and_later(make_run: MakeRun) -> None:
    plain = make_run("plain", Written("iteration"))
    first = make_run("first", Written("iteration").change("iteration", 0, "stream/action"))
    later = make_run("later", Written("iteration").change("iteration", 2, "stream/action"))
    assert "seeded differently" in compare_runs(plain, first).look_at[0]
    assert "iteration 1 drew otherwise" in compare_runs(plain, later).look_at[0]


def test_on_cuda_the_card_is_part_of_the_advice(make_run: MakeRun) -> None:
    def look_at(name: str, digest: str, item: str) -> str:
        a = make_run(f"{name}-a", Written(digest=digest))
        return " ".join(
            compare_runs(a, make_run(f"{name}-b", Written(digest=digest).also("step", 1, item))).look_at
        )

    assert "multiprocessors" in look_at("cuda", "keyed_sum_64", "policy")
    assert "multiprocessors" not in look_at("cpu", "xxh3_64", "policy")
    assert "multiprocessors" not in look_at("environment", "keyed_sum_64", "reward")
    a, shorter = make_run("whole", Written(digest="keyed_sum_64")), Written(digest="keyed_sum_64")
    del shorter.lines[shorter.find("update", 1)]
    assert "multiprocessors" not in " ".join(compare_runs(a, make_run("shorter", shorter)).look_at)


CHANGED_CODE = {"git/tree": "2" * 40, "git/commit": "d" * 40, "git/base_commit": "e" * 40}


def test_code_that_differs_is_the_first_hint_and_threads_are_none(make_run: MakeRun) -> None:
    changed = Written().also("targets", 0, "advantage")
    a, same = make_run("run-a", Written(), {"git/tree": "1" * 40}), make_run("same", changed, CHANGED_CODE)
    assert compare_runs(a, same).look_at == [
        f"The code differs: make diff a={a} b={same} code=full shows what was changed between them. "
        "Look for what computes advantage, the first to differ."
    ]
    # With the same code threads are worth a look, whatever only observes.
    b = make_run("run-b", changed, {"git/tree": "1" * 40, "git/commit": "d" * 40}, eval_every=7)
    assert compare_runs(a, b).look_at == [LOOK_AT["advantage"]]
    # Nobody knows whether it differs.
    unknown = make_run("unknown", changed, {"git/commit": None, "git/tree": None, "git/problem": "no git"})
    assert compare_runs(a, unknown).look_at == [
        "The code of b was not recorded, so it may be another one.",
        LOOK_AT["advantage"],
    ]


def test_what_is_known_of_the_place_is_said_of_changed_code_as_well(make_run: MakeRun) -> None:
    a = make_run("run-a", Written(), {"git/tree": "1" * 40})
    b = make_run("run-b", Written().also("step", 2, "reward"), CHANGED_CODE)
    first, *others = compare_runs(a, b).look_at
    assert "Look for what computes reward" in first
    assert others == ["The actions up to step 2 were equal, so the environment itself differs."]
    shorter = Written()
    del shorter.lines[shorter.find("update", 1)]
    c = make_run("run-c", shorter, CHANGED_CODE)
    first, condition = compare_runs(a, c).look_at
    assert first.endswith("shows what was changed between them.")
    assert condition == LOOK_AT["event"]


def test_a_command_to_be_copied_stays_on_one_line(make_run: MakeRun, tmp_path: Path) -> None:
    names = ["20261121-113241-seed1-453fed", "20261121-113455-seed1-9d0381"]
    make_run(names[0], Written(), {"git/tree": "1" * 40})
    make_run(names[1], Written().also("targets", 0, "advantage"), CHANGED_CODE)
    done = command(tmp_path, *(f"{key}={name}" for key, name in zip("ab", names, strict=True)))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == done.stdout.splitlines()[0]  # the answer comes last, too
    assert done.stdout.startswith("diverged")
    assert f"make diff a={names[0]} b={names[1]} code=full" in done.stdout
    assert "\u00a0" not in done.stdout
    elsewhere = make_run("it is", Written(), {"git/tree": "3" * 40})
    done = command(tmp_path / "runs", f"a={elsewhere}", f"b={elsewhere.with_name(names[1])}")
    assert f"make diff a='{elsewhere}' b={elsewhere.with_name(names[1])} code=full" in done.stdout


def test_configuration_comes_before_what_surrounds_a_run(make_run: MakeRun) -> None:
    a = make_run("run-a", Written())
    b = make_run("run-b", Written().also("step", 1, "policy"), {"versions/torch": "2.14.0"}, seed=2)
    assert compare_runs(a, b).look_at == [
        "The configuration differs in seed.",
        "What differs in versions (1) is listed below; examine it next.",
    ]
    facts = {"versions/torch": "2.14.0", "versions/numpy": "2.5", "environment/OMP_NUM_THREADS": "2"}
    c = make_run("run-c", Written().also("step", 1, "policy"), facts)
    assert compare_runs(a, c).look_at == [
        "What differs in versions (2) and environment (1) is listed below; examine it first.",
        LOOK_AT["policy"],
    ]
    many = {f"key_{i}": 1 for i in range(9)}
    d = make_run("run-d", Written(iterations=1), **many)
    assert compare_runs(a, d).look_at == [
        "The configuration differs in key_0, key_1, key_2, key_3, key_4, key_5 and 3 more keys."
    ]


# --- The command -----------------------------------------------------------------------------------------


def test_the_report_begins_with_the_verdict(make_run: MakeRun, tmp_path: Path) -> None:
    changed = Written().also("step", 1, "policy").also("step", 1, "action")
    flags = {"machine/cpu_flags": ["avx2", "fma"], "versions": {f"package-{i}": "1" for i in range(40)}}
    make_run("20260101-one", Written())
    make_run("20260102-two", changed, flags)
    done = command(tmp_path, "a=one", "b=20260102-two")
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "diverged in iteration 0 (environment steps 1 to 8), step 1: policy"
    assert re.search(r"^  equal +obs, normalized_obs$", done.stdout, re.MULTILINE)
    assert re.search(r"^  also +action$", done.stdout, re.MULTILINE)
    assert re.search(r"^    cpu_flags +a: also has avx512f +b: has nothing more$", done.stdout, re.MULTILINE)
    assert "    and 31 more" in done.stdout
    assert max(map(len, lines)) <= 110 or any(str(tmp_path) in line for line in lines if len(line) > 110)
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("trace", "status"), [(Written(), 0), (Written(iterations=2), 1), (Written().also("reset", 0, "obs"), 1)]
)
def test_json_says_the_same_with_the_same_exit_status(
    make_run: MakeRun, tmp_path: Path, trace: Written, status: int
) -> None:
    a, b = make_run("run-a", Written()), make_run("run-b", trace, seed=3)
    done = command(tmp_path, f"a={a}", f"b={b}", "--json")
    assert (done.returncode, done.stderr) == (status, "")
    document = json.loads(done.stdout)
    result = compare_runs(a, b)
    assert document["verdict"] == result.verdict
    assert document["a"]["run"] == "run-a"
    assert document["differences"] == [{"section": "configuration", "key": "seed", "a": 1, "b": 3}]
    if result.divergence is not None:
        assert (document["divergence"]["event"], document["divergence"]["item"]) == ("reset", "obs")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a=run-a"], "b= is missing"),
        (["a=run-a", "b=nothing"], "b=nothing: no such run under runs; the newest is run-b"),
        (["a=run", "b=run-b"], "a=run: in the ids of 2 runs"),
        (["a=run-a", "b=run-b", "run_dir=x"], "run_dir=x: no such key; did you mean runs_dir=?"),
        (["a=run-a", "b=run-b", "--json"], "run-b: trace.jsonl is empty"),
    ],
)
def test_mistakes_are_one_line_and_exit_status_2(
    make_run: MakeRun, tmp_path: Path, words: list[str], message: str
) -> None:
    make_run("run-a", Written())
    make_run("run-b", b"")
    done = command(tmp_path, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1


def test_neither_torch_nor_hydra_is_loaded(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("run-a", Written())
    make_run("run-b", Written().also("update", 1, "loss"))
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from rltemplate.__main__ import main\n"
        "status = main(['compare', 'a=run-a', 'b=run-b'])\n"
        "print(status, sorted({'torch', 'hydra', 'omegaconf', 'numpy', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "1 ['yaml']"


def test_make_hands_both_runs_over(make_run: MakeRun, tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    line = ["make", "-n", "compare", "a=x y", "b=z", "json=1"]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "-m rltemplate compare 'a=x y' 'b=z' --json" in done.stdout


def test_the_report_of_equal_runs_says_that_nothing_differs(make_run: MakeRun) -> None:
    a = make_run("run-a", Written())
    text = report(compare_runs(a, a))
    assert text.startswith("identical: 3 iterations")
    assert text.endswith(
        "nothing else differs: code, configuration, versions, machine, settings, environment are equal"
    )


def test_equal_trees_are_equal_code_whatever_the_commits_hold_besides(make_run: MakeRun) -> None:
    dirty = {"git/dirty": True, "git/changed": ["a.py"], "git/changed_count": 1}
    a = make_run("run-a", Written(), {**dirty, "git/tree": "1" * 40})
    b = make_run("run-b", Written(), {**dirty, "git/tree": "1" * 40, "git/commit": "d" * 40}, seed=2)
    c = make_run("run-c", Written(), {**dirty, "git/tree": "2" * 40, "git/commit": "d" * 40}, seed=2)
    assert [one.key for one in compare_runs(a, b).differences] == ["seed"]
    assert [one.key for one in compare_runs(a, c).differences] == ["commit (code and configuration)", "seed"]
