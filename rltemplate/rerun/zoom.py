"""The first difference between two runs, down to the numbers and to the operation that made it.

A trace says where two runs part, and holds digests only. So both runs are run again up to there, each in a
process of its own with the environment and the code that it had, from the last checkpoint that both have. The
first pass takes every step and update of the iteration in which they part; the second keeps the tensors of
the event that differs, and the operations of torch that led to it. The new runs are held to the recorded
ones: a run that does not repeat has nothing to say about itself.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from rltemplate.analysis import traces
from rltemplate.analysis.compare import Comparison, diff_command
from rltemplate.analysis.differences import CODE
from rltemplate.config.command_args import make_folder
from rltemplate.config.loading import load_config, to_dict
from rltemplate.config.recorded import raw_config
from rltemplate.launch.subprocesses import Children, last_words
from rltemplate.rerun import ulp
from rltemplate.rerun.operations import (
    BETWEEN,
    OTHER_OPERATIONS,
    OUTSIDE,
    UNSEEN,
    Finding,
    LoggedOperation,
    how_made,
    made_by_other_code,
)
from rltemplate.rerun.recorded_code import Code, checked_out
from rltemplate.rerun.replay import FORM, ITEMS, OPERATIONS, RESULTS, TENSORS, Request
from rltemplate.rerun.zoom_report import Item, Zoom, place_name
from rltemplate.run import paths
from rltemplate.run.checkpoint import list_checkpoints
from rltemplate.run.git import changes, checkout
from rltemplate.run.git.command import GitError
from rltemplate.run.job import PROJECT
from rltemplate.run.record import RunRecord
from rltemplate.types import ConfigError

Say = Callable[[str], None]


@dataclass(slots=True)
class _Side:
    """A run, and the code to run it again with; `stands_in` says why that is the present code."""

    name: str
    run_dir: Path
    record: RunRecord
    commit: str | None = None
    code: Code = field(default_factory=Code)
    stands_in: str | None = None


@dataclass(slots=True)
class _Work:
    """The processes of one zoom; `start` is the checkpoint that both runs go on from, in steps."""

    sides: list[_Side]
    start: int | None
    iteration: int
    folder: Path
    say: Say
    shown_by: str
    children: Children

    def run_again(self, aim: str, **wanted: Any) -> list[Path]:
        """Run both runs again, and hold them to their records; the new folders.

        `wanted` are the fields of the request about the event to keep, if there is one.
        """
        folders = []
        for side in self.sides:
            where = "the beginning" if self.start is None else f"step {self.start:,}"
            code = "the present code" if side.commit is None else f"commit {side.commit[:12]}"
            self.say(f"zoom: {side.name} again with {code} from {where}, for {aim}")
            folder = self.folder / ("event" if wanted else "steps") / side.name
            folder.mkdir(parents=True)
            folders.append(folder)
            config, log = raw_config(side.run_dir / paths.CONFIG), folder / "output.txt"
            if side.commit is None:  # the present code may have other keys
                config = to_dict(load_config(side.run_dir / paths.CONFIG))
            start = None if self.start is None else str(paths.checkpoint_path(side.run_dir, self.start))
            request = Request(folder=str(folder), iteration=self.iteration, checkpoint=start, **wanted)
            words, children = [request.to_json()], self.children
            status = side.code.run("rerun.replay", words, side.record, config, side.run_dir, log, children)
            problem = last_words(log, status) if status else None
            problem = problem or _not_repeated(side.run_dir, folder, self.iteration)
            if problem is not None:
                self._give_up(side, problem)
        return folders

    def _give_up(self, side: _Side, problem: str) -> NoReturn:
        if any(part.changed.get("code") for part in side.record.resumed):
            problem += "; it was resumed with changed code"
        if self.start is not None:
            problem += "; zoom=start needs no checkpoint"
        if side.stands_in is not None:
            problem += f"; {side.stands_in}, so the present code was run"
        raise ConfigError(
            f"{side.name}: cannot be run again here: {problem}\n"
            f"instead: {self.shown_by} shows what was changed, and trace=step says more"
        )


def zoom_in(
    comparison: Comparison,
    *,
    from_start: bool = False,
    keep: Path | None = None,
    say: Say = lambda _: None,
    project: Path = PROJECT,
) -> Zoom:
    """Look closely at the divergence that `comparison` has found.

    `from_start` leaves checkpoints alone. `keep` is a folder for tensors and operations, which are otherwise
    removed. `say` gets a line about each process before it starts. `project` has the present code, in the
    repository that holds the recorded code. Raises ConfigError where nothing can be found out, and
    Interrupted after a signal.
    """
    at = comparison.divergence
    if at is None:
        raise ConfigError("the traces do not part, so there is nothing to zoom in on")
    children = Children()
    with ExitStack() as stack:
        stack.enter_context(children.listening())
        dirs = [Path(side.run_dir) for side in (comparison.a, comparison.b)]
        sides = [_Side(name, path, RunRecord.read(path)) for name, path in zip("ab", dirs, strict=True)]
        start = None if from_start else _common_start(sides, at.env_steps_before)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zoom-")))
        if keep is not None:
            make_folder("keep", keep)
            folder = keep.absolute()
            if any(folder.iterdir()):
                raise ConfigError(f"keep={keep}: is not empty; expected a new folder")
        for side in sides:
            try:
                _take_code(side, project, stack)
            except GitError as error:
                children.check()  # Ctrl-C reaches git as well
                side.stands_in = str(error)
        shown_by = diff_command(*dirs)
        work = _Work(sides, start, at.iteration, folder, say, shown_by, children)
        result = Zoom(sides[0].commit, sides[1].commit, start, at.iteration)
        if keep is not None:
            result.kept = str(folder)
        other_code = any(one.section == CODE and one.affects_results for one in comparison.differences)
        _look(work, result, other_code)
        return result


def _common_start(sides: Sequence[_Side], env_steps: int) -> int | None:
    """Environment steps of the last checkpoint from before the divergence that both have, if any."""
    for side in sides:
        every = int(raw_config(side.run_dir / paths.CONFIG).get("checkpoint_every") or 0)
        if 0 < every <= env_steps and not (side.run_dir / paths.CHECKPOINTS).is_dir():
            raise ConfigError(
                f"{side.name}: the checkpoints of {side.run_dir.name} are gone; put them back, or run both "
                "from the beginning with zoom=start"
            )
    known = [{int(path.stem.removeprefix("step_")) for path in list_checkpoints(s.run_dir)} for s in sides]
    return max((steps for steps in known[0] & known[1] if steps <= env_steps), default=None)


def _take_code(side: _Side, project: Path, stack: ExitStack) -> None:
    """Check out the code of a run; where that cannot be run, the present code stands in for it."""
    git = asdict(side.record.git)
    names = list(changes.commits(git))
    if not names:
        side.stands_in = f"its code was not recorded: {git['problem'] or 'no reason is given'}"
        return
    commit = next(filter(None, (checkout.find_commit(project, name) for name in names)), None)
    if commit is None:
        fetch = checkout.fetch_command(side.record.id)
        side.stands_in = f"its code, commit {names[0][:12]}, is not in this repository; `{fetch}` brings it"
        return
    code = stack.enter_context(checked_out(project, commit))
    sources = [path.read_text("utf-8") for path in code.project.glob("*/rerun/replay.py")]
    if any(re.search(rf"(?m)^FORM = {FORM}$", source) for source in sources):
        side.commit, side.code = commit, code
    else:
        side.stands_in = f"its code, commit {commit[:12]}, is of another version and cannot be zoomed in on"


def _look(work: _Work, result: Zoom, other_code: bool) -> None:
    """Both passes; what they find goes into `result`."""
    steps = work.run_again("its steps and updates")
    at = traces.first_difference(*(traces.open_trace(folder, "") for folder in steps))
    if at is None or at.item in (traces.OTHER_CHAIN, traces.OTHER_ENV_STEPS):
        result.notes.append("No item differs, so no operation made the difference: a count may differ.")
        return
    if at.item == traces.OTHER_EVENT:
        result.notes.append(
            f"The runs did different things next: a went on with {at.a}, b with {at.b}. "
            "All items before are equal, so it was a condition that differed, and no number."
        )
        return
    if at.item == traces.OTHER_ITEMS:
        result.notes.append(f"The event has other items; only in a: {at.a}; only in b: {at.b}.")
    index, since = _place(steps[0] / paths.TRACE, at.line)
    result.event, result.index = at.event, 0 if at.event == RESULTS else index
    place = (result.event, result.index)
    aim, wanted = f"tensors of {place_name(*place)}", {"event": place[0], "index": place[1], "since": since}
    kept = [_Kept(folder) for folder in work.run_again(aim, **wanted)]
    result.items = list(_compared(*kept))
    result.first = next((item.name for item in result.items if item.difference.kind != ulp.EQUAL), None)
    if result.first is None:
        result.notes.append("No tensor that both runs have there differs.")
    elif at.event == "start":
        result.finding = Finding(kind=BETWEEN if at.iteration > 0 else UNSEEN)
    else:
        logs, logged_from = [each.operations for each in kept], place_name(*(since or place))
        limits = [each.after_operations(result.first) for each in kept]
        found = how_made(logs[0], logs[1], limits, logged_from)
        if other_code and found.kind in (OTHER_OPERATIONS, OUTSIDE):
            found = made_by_other_code(logs[0], logs[1], limits, logged_from) or found
        result.finding = found


# --- Traces and tensors of what was run again ------------------------------------------------------------


def _not_repeated(recorded: Path, again: Path, last: int) -> str | None:
    """The first difference of a recorded trace and a new one up to iteration `last`; None if none."""
    known = dict(_iterations(recorded / paths.TRACE, last))
    for number, items in _iterations(again / paths.TRACE, last):
        for name, value in items.items():
            # Which items a line has depends on the detail of the trace.
            if known.get(number, {}).get(name, value) != value:
                return f"it first differs from its own record in iteration {number:,}, {name}"
    return None


def _iterations(trace: Path, last: int) -> Iterator[tuple[int, dict[str, str]]]:
    """Number and digests by item of the iterations of a trace."""
    names: list[str] = []
    with trace.open("rb") as lines:
        for line in lines:
            if line.startswith(b'["items","iteration",'):
                names = json.loads(line)[2]
            elif line.startswith(b'["iteration",'):
                _, number, _, digits, _ = json.loads(line)
                cut = range(0, len(digits), traces.DIGITS)
                yield number, dict(zip(names, (digits[i : i + traces.DIGITS] for i in cut), strict=True))
                if number >= last:
                    return


def _place(trace: Path, line: int) -> tuple[int, tuple[str, int] | None]:
    """The index of the event in a line, which counts from 1, and the event before it in its iteration."""
    before: list[Any] = []
    with trace.open("rb") as lines:
        for number, text in enumerate(lines, start=1):
            if number == 1 or text.startswith(b'["items",'):
                continue
            event = json.loads(text)
            if number >= line:
                break
            before = event
    since = None if not before or before[0] == traces.ITERATION else (before[0], before[1])
    return event[1], since


class _Kept:
    """The tensors and operations of an event that a process kept."""

    def __init__(self, folder: Path) -> None:
        with (folder / OPERATIONS).open() as lines:
            self.operations = [LoggedOperation(**json.loads(line)) for line in lines]
        items = json.loads((folder / ITEMS).read_text())
        self._before = {each["item"]: int(each["after_operations"]) for each in items}
        with np.load(folder / TENSORS) as arrays:
            self.tensors = {name: arrays[str(i)] for i, name in enumerate(self._before)}

    def after_operations(self, item: str) -> int:
        """The number of operations that had been carried out when the item was there."""
        return self._before.get(item, len(self.operations))


def _compared(a: _Kept, b: _Kept) -> Iterator[Item]:
    for name, value in a.tensors.items():
        if name in b.tensors:
            yield Item(name, ulp.compare_arrays(value, b.tensors[name]))
