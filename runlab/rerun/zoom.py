"""The first difference between two runs, down to the numbers and to the operation that made it.

A trace shows where two runs diverge, but has only digests. So both runs are run again up to that place, each
in its own process with its recorded code and environment, from the last checkpoint that both have. The first
pass traces every step and update of the diverging iteration. The second pass keeps the tensors of the event
that differs, and the operations of torch before it. The new runs are compared with the recorded ones: a run
that does not repeat cannot explain the difference.

Operations in a compiled program are not logged. So compiled runs are also run without the compiler: if these
differ at the same item, their operations explain the difference, and otherwise the compiled programs differ.
Where an item was made long before its event, such as statistics that were merged after the rollout, a further
pass logs operations from the beginning of the iteration on.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from runlab.analysis import traces
from runlab.analysis.compare import Comparison, diff_command
from runlab.errors import ConfigError
from runlab.launch.subprocesses import Children, last_words
from runlab.rerun.operations import Finding, LoggedOperation, cause_of
from runlab.rerun.recorded_code import Code, recorded_code
from runlab.rerun.replay import OPERATIONS, TENSORS, Request
from runlab.rerun.ulp import compare_arrays
from runlab.rerun.zoom_report import Zoom, place_name
from runlab.run import paths
from runlab.run.files import to_stderr
from runlab.run.manifest import list_checkpoints
from runlab.run.read import raw_config
from runlab.run.record import RunRecord
from runlab.run.trace import RESET, START

_BY_ENVIRONMENTS = (RESET, "step")  # events whose items no operation of torch makes


def zoom_in(comparison: Comparison, project: Path = paths.PROJECT, trust: bool = False) -> Zoom:
    """Find the cause of the divergence in `comparison`; progress goes to standard error.

    `project` has the present code, in the repository that holds the recorded code. Raises ConfigError if the
    runs cannot be run again, or without `trust` came from elsewhere, and Interrupted after a signal.
    """
    at, children = comparison.divergence, Children()
    assert at is not None
    with children.listening(), ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zoom-")))
        dirs = [Path(side.run_dir) for side in (comparison.a, comparison.b)]
        recorded = [(RunRecord.read(each), raw_config(each), each) for each in dirs]
        codes = [stack.enter_context(recorded_code(project, *each, trust)) for each in recorded]
        start = _common_start(dirs, at.env_steps_before)
        work = _Work(dirs, codes, start, at.iteration, comparison.not_compared, folder, children)
        zoom = Zoom(codes[0].commit, codes[1].commit, start, at.iteration)
        _run_passes(work, zoom)
        return zoom


def _common_start(dirs: Sequence[Path], env_steps: int) -> int | None:
    """Environment steps of the last common checkpoint before the divergence, if there is one."""
    checkpoints = [set(map(paths.steps_of, list_checkpoints(each))) for each in dirs]
    return max((steps for steps in set.intersection(*checkpoints) if steps <= env_steps), default=None)


@dataclass(frozen=True, slots=True)
class _Work:
    """Two runs and their code; `start` is their common checkpoint, in environment steps."""

    dirs: list[Path]
    codes: list[Code]
    start: int | None
    iteration: int
    not_compared: list[str]
    folder: Path
    children: Children

    def run_again(self, aim: str, eager: bool = False, **wanted: Any) -> list[Path]:
        """Run both runs again, and compare them with their records; the new folders.

        With `eager` the compiler is left out: they then round in another way than their records, and are not
        compared. `wanted` are fields of `Request` about the event to keep, if there is one.
        """
        where = "the beginning" if self.start is None else f"step {self.start:,}"
        part = self.folder / f"pass-{len([*self.folder.iterdir()])}"
        folders = [part / name for name in "ab"]
        for folder, run_dir, code in zip(folders, self.dirs, self.codes, strict=True):
            name, log, start = folder.name, folder / "output.txt", None
            to_stderr(f"zoom: {name} again with {code} from {where}, for {aim}")
            folder.mkdir(parents=True)
            if self.start is not None:
                start = str(paths.checkpoint_path(run_dir, self.start))
            request = Request(folder=str(folder), iteration=self.iteration, checkpoint=start, **wanted)
            words, config = [json.dumps(asdict(request))], raw_config(run_dir)
            if eager:
                config["compile"] = False
            status = code.run("rerun.replay", words, config, run_dir, log, self.children)
            problem = last_words(log, status) if status else None
            if problem is None and not eager:
                problem = _not_repeated(run_dir, folder)
            if problem is not None:
                reasons = "; ".join([problem, *code.missing])
                raise ConfigError(
                    f"{name}: cannot be run again here with {code}: {reasons}\ninstead: "
                    f"{diff_command(*self.dirs)} shows what was changed, and trace=step says more"
                )
        return folders


def _run_passes(work: _Work, result: Zoom) -> None:
    """Make both passes, and put their findings into `result`."""
    steps = [traces.open_trace(folder) for folder in work.run_again("its steps and updates")]
    at = traces.first_difference(*steps, left_out=work.not_compared)
    if at is None or at.item in traces.NOT_FINGERPRINTS:
        sides = "" if at is None else f" (a: {at.a}; b: {at.b})"
        result.note = (
            f"The runs did different things next{sides}. "
            "All items before are equal, so it was a condition or a setting that differed, and no number."
        )
        return
    before = [line for line in steps[0].lines[: at.line - 2] if not line.startswith(traces.ITEMS_LINE)]
    event, index, *_ = json.loads(before[-1]) if before else (traces.ITERATION, 0)
    since = None if event == traces.ITERATION else (event, index)
    result.event, result.index = at.event, 0 if at.event == traces.ITERATION else at.index
    place = place_name(result.event, result.index)
    a, b = work.run_again(f"tensors of {place}", event=result.event, index=result.index, since=since)
    with np.load(a / TENSORS) as one, np.load(b / TENSORS) as other:
        shared = [name for name in one.files if name in other]
        result.items = {name: compare_arrays(one[name], other[name]) for name in shared}
    result.first = next((name for name, item in result.items.items() if item.differing != 0), None)
    if result.first is None:
        result.note = "No tensor that both runs have there differs."
    elif at.event == START:
        result.finding = Finding("between")
    else:
        _explain(work, result, at, since, [a, b])


def _explain(
    work: _Work, result: Zoom, at: traces.Divergence, since: tuple[str, int] | None, folders: list[Path]
) -> None:
    """Find the operation that made the first item that differs; `folders` are of the pass for its tensors."""
    place = place_name(result.event or "", result.index)
    item_of = attrgetter("iteration", "event", "index", "item")
    eager = any(raw_config(run_dir).get("compile") for run_dir in work.dirs)
    wanted: dict[str, Any] = {"event": result.event, "index": result.index}
    if eager:
        folders = work.run_again(f"operations of {place} without the compiler", True, **wanted, since=since)
        other = traces.first_difference(*map(traces.open_trace, folders), left_out=work.not_compared)
        if other is None or item_of(other) != item_of(at):
            where = "are equal there"
            if other is not None:
                event = place_name(other.event, other.index)
                where = f"first differ in iteration {other.iteration:,}, {event}: {other.item}"
            result.note = f"Without the compiler the runs {where}. So the compiled programs differ."
            return
        result.note = (
            "Without the compiler the runs differ at the same item. The operation is of these runs, and the "
            "values above are of the compiled ones."
        )
    finding = _finding(result, folders, place_name(*since) if since else place)
    if finding.kind == "outside" and since not in (None, (START, 0)) and result.event not in _BY_ENVIRONMENTS:
        aim = f"operations of {place} from the beginning of the iteration on"
        folders = work.run_again(aim, eager, **wanted, since=(START, 0))
        earlier = _finding(result, folders, "the beginning of the iteration")
        finding = finding if earlier.kind == "outside" else earlier
    result.finding = finding


def _finding(result: Zoom, folders: Sequence[Path], logged_from: str) -> Finding:
    documents = [json.loads((folder / OPERATIONS).read_text()) for folder in folders]
    before = [each["operations"][: each["before"][result.first]] for each in documents]
    ours, theirs = ([LoggedOperation(**each) for each in logged] for logged in before)
    return cause_of(ours, theirs, logged_from)


def _not_repeated(recorded: Path, again: Path) -> str | None:
    """The first difference between a new trace and the recorded one, which is longer; None if none."""
    old_ends, new_ends = (
        ((event.index, event.values) for _, event in trace.events() if event.name == traces.ITERATION)
        for trace in map(traces.open_trace, (recorded, again))
    )
    for index, values in new_ends:
        expected = next((values for number, values in old_ends if number == index), {})
        for name, value in values.items():
            # Traces of different detail have different items; only common ones are compared.
            if name != traces.OTHER_CHAIN and expected.get(name, value) != value:
                return f"it first differs from its own record in iteration {index:,}, {name}"
    return None
