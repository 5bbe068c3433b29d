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
from rltemplate.types import ConfigError

STEP_ITEMS = [
    *("obs", "normalized_obs", "policy", "noise", "action", "log_prob"),
    *("reward", "terminated", "truncated", "next_obs"),
]
UPDATE_ITEMS = ["loss", "gradient", "optimizer/mu", "optimizer/nu", "params"]
TARGET_ITEMS = ["scaled_reward", "value", "advantage"]
START_ITEMS = ["start/streams/action", "start/adam/2"]
END_ITEMS = ["obs_norm", "return_norm", "end/adam/2"]
HEADER = {"format": "rltemplate-trace", "version": 1, "digest": "xxh3_64", "detail": "step", "algo": "ppo"}
STEPS, UPDATES, ENV_STEPS = 4, 3, 8  # of one iteration


class Written:
    """A trace as a header and lines of JSON values, to be changed and written."""

    def __init__(self, detail: str = "step", iterations: int = 3, **header: Any) -> None:
        self.header = {**HEADER, "detail": detail, **header}
        self.lines: list[Any] = []
        self.event("reset", 0, ["obs"])
        for i in range(iterations):
            names = END_ITEMS
            if detail == "step":
                self.event("start", 0, START_ITEMS)
                for t in range(STEPS):
                    self.event("step", t, STEP_ITEMS)
                self.event("targets", 0, TARGET_ITEMS)
                for u in range(UPDATES):
                    self.event("update", u, UPDATE_ITEMS)
            else:
                names = [*START_ITEMS, *STEP_ITEMS, *TARGET_ITEMS, *UPDATE_ITEMS, *END_ITEMS]
            self.event("iteration", i, names, (i + 1) * ENV_STEPS)

    def event(self, event: str, index: int, names: list[str], *env_steps: int) -> Written:
        """Add a line, and before it the names of its items if they are new."""
        if self.names(event) != names:
            self.lines.append(["items", event, names])
        digits = "".join(_digits(f"{len(self.lines)} {name}", 16) for name in names)
        self.lines.append([event, index, *env_steps, digits])
        return self

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

    def change(self, event: str, index: int, item: str, iteration: int = 0) -> Written:
        """Give one item another fingerprint. The chain of its iteration and of later ones follows."""
        line = self.lines[self.find(event, index, iteration)]
        at, place = 3 if event == "iteration" else 2, self.names(event).index(item)
        line[at] = line[at][: 16 * place] + "0" * 16 + line[at][16 * (place + 1) :]
        return self

    def text(self) -> str:
        """The file."""
        text = json.dumps(self.header, separators=(",", ":")) + "\n"
        for number, line in enumerate(self.lines):
            chain = [_digits(str(self.lines[: number + 1]), 32)] if line[0] == "iteration" else []
            text += json.dumps([*line, *chain], separators=(",", ":")) + "\n"
        return text


def _digits(text: str, number: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:number]


OTHER_CODE = {"tree": "2" * 40, "commit": "d" * 40, "base_commit": "e" * 40}
MakeRun = Callable[..., Path]
Compared = Callable[[Written, Written], Comparison]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a run folder with a trace, or none."""

    def make(name: str, trace: Written | bytes | None, config: Any = None, **record: Any) -> Path:
        run_dir = write_run(tmp_path / "runs", tag=name, config={"trace": "step"} | (config or {}), **record)
        if trace is not None:
            content = trace.text().encode() if isinstance(trace, Written) else trace
            (run_dir / paths.TRACE).write_bytes(content)
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
    assert (result.a.iterations, result.b.env_steps, result.a.status) == (3, 3 * ENV_STEPS, "finished")
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
        ("update", 2, 0, "optimizer/nu", f"{FIRST}, update 2: optimizer/nu"),
        ("iteration", 1, 1, "return_norm", f"{SECOND}, at its end: return_norm"),
    ],
)
def test_each_kind_of_event_is_found_and_named(
    compared: Compared, name: str, number: int, iteration: int, item: str, place: str
) -> None:
    changed = Written().change(name, number, item, iteration)
    result = compared(Written(), changed)
    at = result.divergence
    assert at is not None
    assert (result.verdict, at.event, at.index, at.item, at.further) == ("diverged", name, number, item, [])
    assert (at.iteration, at.env_steps_before) == (iteration, iteration * ENV_STEPS)
    assert at.line == changed.find(name, number, iteration) + 2
    assert at.env_steps_after == at.env_steps_before + 8
    assert headline(result) == f"diverged {place}"


def test_the_items_of_the_line_are_told_apart_in_causal_order(compared: Compared) -> None:
    changed = Written()
    for item in ("next_obs", "noise", "reward"):
        changed.change("step", 2, item, iteration=1)
    at = compared(Written(), changed).divergence
    assert at is not None
    assert (at.item, at.further) == ("noise", ["reward", "next_obs"])
    assert at.equal_before == ["obs", "normalized_obs", "policy"]


def test_with_one_line_per_iteration_the_place_is_the_iteration(
    compared: Compared, make_run: MakeRun
) -> None:
    changed = Written("iteration").change("iteration", 1, "reward").change("iteration", 1, "loss")
    result = compared(Written("iteration"), changed)
    assert result.divergence is not None
    assert result.divergence.further == ["loss"]
    assert headline(result) == "diverged in iteration 1 (environment steps 9 to 16): reward"
    assert "trace=step" in result.look_at[0]
    longer = Written("iteration").change("iteration", 2, "obs")
    longer.lines[longer.find("iteration", 2)][2] = 30
    at = compare_runs(Path(result.a.run_dir), make_run("-longer", longer)).divergence
    assert at is not None
    assert (at.item, at.further, at.a, at.b) == ("env_steps", ["obs"], "24", "30")


def test_a_trace_that_ends_earlier_is_no_divergence_unless_it_differs_before(make_run: MakeRun) -> None:
    short, long = make_run("-short", Written(iterations=2)), make_run("-long", Written(iterations=4))
    for a, b, ends in ((short, long, (2, 4)), (long, short, (4, 2))):
        result = compare_runs(a, b)
        assert (result.verdict, result.divergence) == ("shorter", None)
        assert f"a ends after {ends[0]} iterations ({8 * ends[0]} environment steps), b" in headline(result)
    other = make_run("-other", Written(iterations=2).change("step", 1, "obs"))
    assert compare_runs(other, long).verdict == "diverged"


def test_another_event_or_other_items_in_the_same_place(compared: Compared, make_run: MakeRun) -> None:
    shorter = Written()
    del shorter.lines[shorter.find("update", 2, iteration=1)]
    result = compared(Written(), shorter)
    assert headline(result).endswith("update 2: a goes on with update 2, b with the end of iteration 1")
    changed = Written()
    changed.lines[0][2] = ["pixels"]
    result = compare_runs(Path(result.a.run_dir), make_run("-items", changed))
    assert result.divergence is not None
    assert (result.divergence.event, result.divergence.index) == ("reset", None)
    assert headline(result).endswith("only in a: obs; only in b: pixels")


WHOLE = Written().text().encode()
BAD: dict[str, tuple[Written | bytes | None, str]] = {
    "no trace, on purpose": (None, "has no trace.jsonl; it was made with trace=off"),
    "another version": (Written(version=2), "is no trace of this version"),
    "cut off": (WHOLE[:-200], "breaks off after 2 iterations"),
    "another algorithm": (Written(algo="sac"), "other algo: the trace of run-1-a has algo ppo, that"),
}


@pytest.mark.parametrize("case", BAD)
def test_traces_that_cannot_be_compared_are_refused_in_a_line(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    trace, message = BAD[case]
    a, b = make_run("-a", Written()), make_run("-b", trace, {"trace": "off"})
    assert main(["compare", f"a={a}", f"b={b}"]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "run-1-b" in printed.err
    assert (printed.err.count("\n"), printed.out) == (1, "")


@pytest.mark.parametrize(
    "damage",
    [lambda line: line[:-7] + line[-3:], lambda line: line.replace(",", ", ")],
    ids=["digits", "spelling"],
)
def test_a_damaged_line_is_not_taken_for_a_divergence(
    make_run: MakeRun, damage: Callable[[str], str]
) -> None:
    lines = Written().text().splitlines(keepends=True)
    number = Written().find("step", 2, iteration=1) + 1
    lines[number] = damage(lines[number])
    a, b = make_run("-a", Written()), make_run("-b", "".join(lines).encode())
    with pytest.raises(ConfigError, match=f"line {number + 1} of trace.jsonl is damaged"):
        compare_runs(a, b)


def test_the_report_begins_and_ends_with_the_verdict(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    changed = Written().change("step", 1, "policy").change("step", 1, "action")
    make_run("-a", Written(), versions={"torch": "2"})
    facts = {"versions": {f"package-{i}": "1" for i in range(40)} | {"torch": "3"}, "git": OTHER_CODE}
    make_run("-b", changed, {"algo": {"gamma": 0.5}}, **facts)
    assert main(["compare", "a=1-a", "b=1-b"]) == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert lines[0] == lines[-1] == "diverged in iteration 0 (environment steps 1 to 8), step 1: policy"
    folder, shows = "runs/ppo-Thing/run-1", "code=full shows what was changed."
    for line in (
        "  equal  obs, normalized_obs",
        "  also   action",
        f"  1. The code differs: make diff a={folder}-a b={folder}-b {shows}",
        "what else differs (43)",
        "    algo.gamma  0.99 -> 0.5",
        "    torch       2 -> 3",
        "    and 29 more; --json lists them all",
        "note: the code cannot be compared: this repository does not have both snapshots "
        "(`git fetch REMOTE 'refs/runs/*:refs/runs/*'`)",
    ):
        assert line in lines, printed.out
    assert "zoom=true" in printed.out


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
    result = compare_runs(a, b)
    assert (document["verdict"], document["a"]["run"]) == (result.verdict, "run-1-a")
    assert document["differences"] == [{"section": "configuration", "key": "seed", "a": 1, "b": 3}]
    assert bool(document["divergence"]) == (result.verdict == "diverged")
