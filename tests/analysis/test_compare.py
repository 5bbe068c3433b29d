"""Comparison of two runs: the first difference of their traces is found, named and explained.

The traces are written here byte by byte, so that reading them is not tested with the code that writes them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import write_run

from runlab.__main__ import main
from runlab.analysis.compare import Comparison, compare_runs, headline, report
from runlab.run import paths

START, STEP = ["start/streams/action", "start/adam/2"], ["obs", "policy", "noise", "action", "reward"]
TARGETS, UPDATE, END = ["value", "advantage"], ["loss", "gradient", "params"], ["obs_norm", "end/adam/2"]
HEADER = {"format": "runlab-trace", "version": 1, "digest": "xxh3_64", "detail": "step", "algo": "ppo"}
Change = tuple[str, int, int, str]  # of an item: event, its number, the iteration, the item's name


def trace(*changes: Change, iterations: int = 3, steps: int = 8, **header: Any) -> str:
    """A trace in which some items have other fingerprints; `steps` are those of an iteration."""
    lines = [_json(HEADER | header), _json(["items", "reset", ["obs"]])]
    lines.append(_json(["reset", 0, _digits("reset 0 0 obs", changes)]))
    for iteration in range(iterations):
        events = [("start", 0, START), *(("step", t, STEP) for t in range(4)), ("targets", 0, TARGETS)]
        events += [("update", u, UPDATE) for u in range(3)]
        names = END
        if header.get("detail") == "iteration":
            events, names = [], [*START, *STEP, *TARGETS, *UPDATE, *END]
        for event, index, items in [*events, ("iteration", iteration, names)]:
            if iteration == index == 0:
                lines.append(_json(["items", event, items]))
            place = f"{event} {index} {iteration}"
            digits = "".join(_digits(f"{place} {item}", changes) for item in items)
            end = (steps * (iteration + 1), digits, hashlib.md5(f"{lines[1:]}".encode()).hexdigest())
            lines.append(_json([event, index, *(end if event == "iteration" else (digits,))]))
    return "".join(lines)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def _digits(place: str, changes: tuple[Change, ...]) -> str:
    changed = place in [" ".join(map(str, change)) for change in changes]
    return hashlib.md5(f"{place} {changed}".encode()).hexdigest()[:16]


MakeRun = Callable[..., Path]
Compared = Callable[[str, str], Comparison]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a run folder with a trace, or none."""

    def make(name: str, text: str | None, config: Any = None, **record: Any) -> Path:
        run_dir = write_run(tmp_path / "runs", tag=name, config={"trace": "step"} | (config or {}), **record)
        if text is not None:
            (run_dir / paths.TRACE).write_text(text)
        return run_dir

    return make


@pytest.fixture
def compared(make_run: MakeRun) -> Compared:
    number = iter(range(100))
    return lambda *texts: compare_runs(*(make_run(f"-{next(number)}", text) for text in texts))


FIRST, SECOND = "in iteration 0 (environment steps 1 to 8)", "in iteration 1 (environment steps 9 to 16)"


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (("reset", 0, 0, "obs"), "before the first iteration, reset: obs"),
        (("step", 2, 1, "reward"), f"{SECOND}, step 2: reward"),
        (("iteration", 1, 1, "obs_norm"), f"{SECOND}, at its end: obs_norm"),
    ],
)
def test_each_kind_of_event_is_found_and_named(compared: Compared, change: Change, place: str) -> None:
    result = compared(trace(), trace(change))
    assert result.divergence is not None
    lines = zip(trace().splitlines(), trace(change).splitlines(), strict=True)
    assert result.divergence.line == 1 + [one == other for one, other in lines].index(False)
    assert headline(result) == f"diverged {place}"


def test_the_items_of_a_line_are_told_apart_in_causal_order(compared: Compared) -> None:
    at = compared(trace(), trace(("step", 2, 1, "reward"), ("step", 2, 1, "noise"))).divergence
    assert at is not None
    assert (at.item, at.further, at.equal_before) == ("noise", ["reward"], ["obs", "policy"])
    rough = trace(detail="iteration")
    result = compared(
        rough, trace(("iteration", 1, 1, "reward"), ("iteration", 1, 1, "loss"), detail="iteration")
    )
    assert headline(result) == f"diverged {SECOND}: reward"
    assert "trace=step" in result.look_at[0]
    at = compared(rough, trace(("iteration", 0, 0, "obs"), detail="iteration", steps=10)).divergence
    assert at is not None
    assert (at.item, at.further, at.a, at.b) == ("env_steps", ["obs"], "8", "10")


def test_a_trace_that_ends_earlier_is_no_divergence_unless_it_differs_before(compared: Compared) -> None:
    result = compared(trace(iterations=4), trace(iterations=2))
    assert (result.verdict, result.divergence) == ("shorter", None)
    assert "a ends after 4 iterations (32 environment steps), b after 2" in headline(result)
    assert compared(trace(("step", 1, 0, "obs"), iterations=2), trace()).verdict == "diverged"
    # A killed run may have been writing.
    assert "a ends after 2 iterations" in headline(compared(trace()[:-200], trace()))


def test_another_event_or_other_items_in_the_same_place(compared: Compared) -> None:
    lines = trace().splitlines(keepends=True)
    lines.pop(max(number for number, line in enumerate(lines) if line.startswith('["update",2,')))
    result = compared(trace(), "".join(lines))
    assert headline(result).endswith("update 2: a goes on with update 2, b with the end of iteration 2")
    result = compared(trace(), trace().replace('["obs"]', '["pixels"]'))
    assert headline(result).endswith("reset: other items; only in a: obs; only in b: pixels")


def renamed(text: str, event: str, names: list[str]) -> str:
    """A trace in which an event has other names of items; a name that is new has a fingerprint of its own."""
    lines = []
    for line in map(json.loads, text.splitlines()[1:]):
        if line[:2] == ["items", event]:
            before, line[2] = line[2], names
        elif line[0] == event:
            at = 3 if event == "iteration" else 2
            digits = dict(zip(before, re.findall(".{16}", line[at]), strict=True))
            line[at] = "".join(digits.get(name, _digits(name, ())) for name in names)
        lines.append(line)
    return "".join(map(_json, [json.loads(text.splitlines()[0]), *lines]))


def test_the_first_item_of_those_that_both_runs_have_is_named_where_names_differ(
    compared: Compared, capsys: pytest.CaptureFixture[str]
) -> None:
    many = [f"layer/{i}" for i in range(700)]
    changes = ("step", 2, 1, "noise"), ("step", 2, 1, "reward"), ("update", 0, 1, "loss")
    a = renamed(trace(), "step", ["own", *STEP])
    b = renamed(trace(*changes), "step", [*STEP[:3], *many, *STEP[3:]])
    result = compared(a, b)
    at = result.divergence
    assert at is not None
    assert headline(result) == f"diverged {SECOND}, step 2: noise"
    assert (at.item, at.further, at.equal_before) == ("noise", ["reward"], ["obs", "policy"])
    assert (at.only_a, at.only_b) == (["own"], many)
    # Items that only one run has are named also if they are of another event before that.
    between = compared(a, renamed(b, "update", ["gradient", "loss", "params", "clipped"])).divergence
    assert between is not None
    assert (between.item, between.only_b) == ("noise", [*many, "clipped"])
    text = report(result)
    assert max(map(len, text.splitlines())) < 250
    assert "  only a own" in text.splitlines()
    assert any(line.startswith("  only b layer/0, layer/1, ") for line in text.splitlines())
    # Other items are the first difference where all that both have are equal; the chain says nothing then.
    result = compared(a, renamed(trace(), "step", [*STEP[:3], *many, *STEP[3:]]))
    assert headline(result) == f"diverged {FIRST}, step 0: other items; only in a: own; " + (
        "only in b: layer/0, layer/1, layer/2 and 697 more"
    )
    result = compared(trace(), renamed(trace(), "iteration", [*END, "end/new"]))
    assert headline(result).endswith(
        "its end: other items; only in a: nothing that the other lacks; only in b: end/new"
    )
    result = compared(trace(), renamed(trace(), "update", ["gradient", "loss", "params"]))
    assert headline(result).endswith(
        "update 0: the items are in another order: a goes on with loss, b with gradient"
    )


def test_evaluations_that_differ_are_told_though_the_traces_are_equal(make_run: MakeRun) -> None:
    a, b = make_run("-a", trace(), returns=[0.5, 1.0, 2.0]), make_run("-b", trace(), returns=[0.5, 1.5, 3.0])
    result = compare_runs(a, b)
    assert result.verdict == "identical"
    (note,) = result.notes
    assert note == (
        "the traces are equal, but rows of metrics.jsonl differ, first after 200 environment steps: "
        "eval/return (a 1, b 1.5), loss/policy"
    )
    assert compare_runs(a, make_run("-c", trace(), returns=[0.5, 1.0])).notes == []
    # Rows of other intervals have other means: only their evaluations are compared.
    rows = (b / paths.METRICS).read_text().splitlines(keepends=True)
    (b / paths.METRICS).write_text("".join(rows[1:]))
    assert compare_runs(a, b).notes == [note.removesuffix(", loss/policy")]
    (b / paths.METRICS).write_text("damaged\n")
    (note,) = compare_runs(a, b).notes
    assert note.startswith("rows of metrics were not compared: run-1-b: metrics.jsonl: line 1 is damaged")


def test_a_metric_that_one_run_logs_alone_does_not_end_the_comparison(make_run: MakeRun) -> None:
    """From its second iteration on; the chains differ from there."""
    a = make_run("-a", trace(), final_metrics={"eval/return": 1.0})
    lines = trace(("step", 2, 2, "reward")).splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if line.startswith('["iteration",1,'))
    event, index, steps, digits, _ = json.loads(lines[at])
    lines[at] = _json(["items", event, ["luck", *END]]) + _json([event, index, steps, "0" * 16 + digits, "1"])
    b = make_run("-b", "".join(lines), final_metrics={"luck": 1.0})
    result = compare_runs(a, b)
    assert result.notes[0] == "not compared, for only b logs it: luck"
    assert result.not_compared == ["luck"]
    assert headline(result) == "diverged in iteration 2 (environment steps 17 to 24), step 2: reward"
    assert compare_runs(make_run("-c", "".join(lines)), b).notes == []
    (b / paths.TRACE).write_text("".join(lines[: at + 1]))
    (a / paths.TRACE).write_text(trace(iterations=2))
    assert compare_runs(a, b).verdict == "identical"


BAD: dict[str, tuple[str | None, str]] = {
    "no trace, on purpose": (None, "has no trace.jsonl; it was made with trace=off"),
    "another version": (trace(version=2), "is no trace of this version"),
    "another format": (trace(format="a film"), "is no trace of this version"),
    "a format that is no text": (trace(format=[1]), "is no trace of this version"),
    "another digest": (trace(digest="sha256"), "is no trace of this version"),
    "a first line of brackets": (f'{{"x": {"[" * 200_000}\n{trace()}', "is no trace of this version"),
    "no iteration": (trace(iterations=0), "has no iteration in trace.jsonl"),
    "damaged lines": (
        trace().replace('["step",1,"', '["step",1,"0'),
        "run-1-b: trace.jsonl: line 8 is damaged",
    ),
    "begun in the middle": (
        "".join(
            x for x in trace().splitlines(keepends=True) if not x.startswith(('["iteration",0,', '["step",0'))
        ),
        "run-1-b: its trace has no first iteration",
    ),
    "a line lost": (trace().replace('["items","step"', '["none","step"'), "trace.jsonl: line 6 is damaged"),
    "another algorithm": (trace(algo="sac"), "run-1-a was made with algo=ppo, "),
}


@pytest.mark.parametrize("case", BAD)
def test_traces_that_cannot_be_compared_are_refused_in_a_line(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    a, b = make_run("-a", trace()), make_run("-b", BAD[case][0], {"trace": "off"})
    assert main(["compare", f"a={a}", f"b={b}"]) == 2
    printed = capsys.readouterr()
    assert BAD[case][1] in printed.err
    assert (printed.err.count("\n"), printed.out) == (1, "")


def test_the_report_begins_and_ends_with_the_verdict(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run("-a", trace(), versions={"torch": "2"})
    facts: Any = {"versions": {f"package-{i}": "1" for i in range(40)} | {"torch": "3"}}
    facts["git"] = {"tree": "2" * 40, "commit": "d" * 40, "base_commit": "e" * 40}
    make_run("-b", trace(("step", 1, 0, "policy")), {"algo": {"gamma": 0.5}}, **facts)
    assert main(["compare", "a=1-a", "b=1-b"]) == 1
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert lines[0] == lines[-1] == f"diverged {FIRST}, step 1: policy"
    folder, shows = "runs/ppo-Thing/run-1", "code=full shows what was changed."
    for line in (
        "  equal  obs",
        f"  1. The code differs: make diff a={folder}-a b={folder}-b {shows}",
        "what else differs (43)",
        "    algo.gamma  0.99 -> 0.5",
        "    and 29 more; json=true lists them all",
    ):
        assert line in lines, output


def test_facts_that_a_record_lacks_are_not_called_equal(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make_run("-a", trace(), versions={"torch": "2"}), make_run("-b", trace())
    assert main(["compare", f"a={a}", f"b={b}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "nothing else differs: code, configuration, machine, settings are equal" in lines
    assert "not recorded by both, so not compared: versions" in lines
    assert main(["diff", f"a={a}", f"b={b}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"versions: not recorded", "machine: equal"} <= set(lines)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (trace(note="added by a later version"), "identical"),
        (trace(format="some_fork-trace"), "identical"),  # written before the format had a name of its own
        (trace(iterations=2), "shorter"),
        (trace(("reset", 0, 0, "obs")), "diverged"),
    ],
)
def test_json_and_the_exit_status_say_the_same(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], text: str, verdict: str
) -> None:
    a, b = make_run("-a", trace()), make_run("-b", text, {"seed": 3})
    assert main(["compare", f"a={a}", f"b={b}", "json=true"]) == (verdict != "identical")
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["a"]["run"]) == (verdict, "run-1-a")
    seed = {"section": "configuration", "key": "seed", "a": 1, "b": 3, "idle": False}
    assert document["differences"] == [seed]
    assert document["not_recorded"] == ["versions"]
    assert verdict != "diverged" or "The seeds differ" in document["look_at"][0]


def facts(digests: str, **more: Any) -> dict[str, Any]:
    """Entries of a record whose known computations gave these digests, of a digit each."""
    parts = dict(zip(("libm", "products", "convolution"), (each * 16 for each in digests), strict=True))
    level = {"level": "repeat", "settings": {"mkl": True} | more.pop("settings", {})}
    return {"versions": {"torch": "2"}, "determinism": level | {"computed": {"digests": parts}}} | more


WHERE = 'differently from "products" on (digest a 1111111111111111, b 7777777777777777); '
WHERE += "equal before it: libm; equal after it: convolution"
PROFILE = "The processors differ: on CPUs that pass its check, determinism=profile gives the same bits."


@pytest.mark.parametrize(
    ("more", "config", "cure"),
    [
        ({"machine": {"cpu": "other"}}, {}, PROFILE),
        ({"machine": {"cpu": "other"}, "settings": {"mkl_branch": "AVX2"}}, {}, PROFILE),
        ({"environment": {"MKL_CBWR": "1"}, "settings": {"mkl": False}}, {}, "Give both the same MKL_CBWR."),
        ({"versions": {"torch": "3"}}, {}, "Install the same torch."),
        ({"settings": {"products": "padded"}}, {"num_threads": 2}, "The configuration says so: num_threads."),
        ({}, {}, "Nothing in the records explains it: look for other files of the libraries, or microcode."),
        ({"machine": {"cpu": "other"}, "versions": {"torch": "3"}}, {}, f"Install the same torch. {PROFILE}"),
    ],
)
def test_the_first_part_that_is_computed_differently_comes_with_a_cure(
    make_run: MakeRun, more: dict[str, Any], config: dict[str, Any], cure: str
) -> None:
    a = make_run("-a", trace(), {"num_threads": 1}, **facts("012"))
    b = make_run("-b", trace(("step", 1, 0, "policy")), {"num_threads": 1} | config, **facts("072", **more))
    result = compare_runs(a, b)
    assert result.look_at[0] == f"The runs compute {WHERE}. {cure}"
    lines = report(result).splitlines()
    at = lines.index("  machine")
    assert lines[at + 1] == f"    computes {WHERE}"
    # Nothing is said where all digests are equal.
    c = make_run("-c", trace(("step", 1, 0, "policy")), {"num_threads": 1} | config, **facts("012", **more))
    text = report(compare_runs(a, c))
    assert "comput" not in text
    assert ("what else differs" in text) == bool(more or config)


@pytest.mark.parametrize(
    ("cpu", "gpu", "cure"),
    [
        ("x", "H200", "The GPUs or their drivers differ, and no level makes those agree."),
        ("y", "H100", "no level makes convolutions agree; other networks do not use them."),
    ],
)
def test_a_gpu_and_a_convolution_have_cures_of_their_own(
    make_run: MakeRun, cpu: str, gpu: str, cure: str
) -> None:
    machines = [{"cpu": each, "gpus": [{"name": name}]} for each, name in (("x", "H100"), (cpu, gpu))]
    a, b = (facts(each, machine=machine) for each, machine in zip(("012", "017"), machines, strict=True))
    one = make_run("-a", trace(), {"device": "cuda"}, **a)
    other = make_run("-b", trace(("step", 1, 0, "policy")), {"device": "cuda"}, **b)
    assert compare_runs(one, other).look_at[0].endswith(cure)


def test_another_computation_is_shown_for_equal_traces_and_by_diff(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make_run("-a", trace(), **facts("012")), make_run("-b", trace(), **facts("072"))
    assert main(["compare", f"a={a}", f"b={b}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"what else differs (1)", "  machine", f"    computes {WHERE}"} <= set(lines)
    assert main(["diff", f"a={a}", f"b={b}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"machine", f"  computes {WHERE}"} <= set(lines)
    assert lines[-1] == '1 thing differs: computation (from "products" on)'
    assert main(["compare", f"a={a}", f"b={b}", "json=true"]) == 0
    assert json.loads(capsys.readouterr().out)["computation"]["part"] == "products"
    assert main(["stats", f"runs={a.parents[1]}/*/*"]) == 0
    assert capsys.readouterr().out.count("ppo on Thing") == 1  # they are one experiment
