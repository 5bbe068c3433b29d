"""The first difference between two runs, down to the numbers and to the operation that made it.

A trace says where two runs part, and holds digests only. So both runs are run again up to there, each in a
process of its own with the environment and the code that it had, from the last checkpoint that both have. The
first pass takes every step and update of the iteration in which they part; the second keeps the tensors of
the event that differs, and the operations of torch that led to it. The new runs are held to the recorded
ones: a run that does not repeat has nothing to say about itself.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from rltemplate.analysis import traces
from rltemplate.analysis.compare import Comparison, diff_command
from rltemplate.analysis.traces import Divergence
from rltemplate.config.loading import load_config, to_dict
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
from rltemplate.rerun.recorded_code import CodeTree, checked_out, find_code
from rltemplate.rerun.recorded_run import raw_config
from rltemplate.rerun.replay import (
    ITEMS,
    NO_START,
    OPERATIONS,
    REFUSED,
    RESULTS,
    TENSORS,
    Request,
)
from rltemplate.rerun.retraced import event_at, not_repeated
from rltemplate.rerun.zoom_report import SHOWN_VALUES, Item, Place, Rerun, Zoom, instead
from rltemplate.run import paths
from rltemplate.run.checkpoint import list_checkpoints
from rltemplate.run.git import changes
from rltemplate.run.git.command import GitError
from rltemplate.run.influence import file_matters
from rltemplate.run.job import PROJECT
from rltemplate.run.record import RunRecord
from rltemplate.types import ConfigError


class _Side:
    """A run, and its code to run it again with."""

    def __init__(self, name: str, run_dir: Path, project: Path) -> None:
        self.name = name
        self.run_dir = run_dir
        self.record = RunRecord.read(run_dir)
        self.commit, self.stands_in = find_code(project, run_dir.name, asdict(self.record.git))
        self.config = raw_config(run_dir / paths.CONFIG)
        self.tree = CodeTree(PROJECT)
        self.problem: str | None = None

    def run_again(self, folder: Path, request: Request, children: Children) -> None:
        """Run it again; `problem` says why it cannot be. Raises ConfigError if the checkpoint is no good."""
        folder.mkdir(parents=True)
        log = folder / "output.txt"
        try:
            config = self.config
            if self.commit is None:  # the present code may have other keys
                config = to_dict(load_config(self.run_dir / paths.CONFIG))
            environment = self.tree.environment(self.record, config, self.run_dir)
        except ConfigError as error:
            self.problem = str(error)
            return
        module = f"{self.tree.package}.rerun.replay"
        status = children.run(
            [str(self.tree.python), "-P", "-m", module, request.to_json()], environment, log
        )
        why = last_words(log, status)
        if status == NO_START:
            raise ConfigError(f"{self.name}: {why}; zoom=start needs no checkpoint")
        if status == REFUSED:
            self.problem = why
        elif status != 0:
            print(log.read_text(errors="replace").rstrip(), file=sys.stderr)
            self.problem = f"its process ended with exit status {status}, {why}"

    @property
    def rerun(self) -> Rerun:
        """The outcome for this run."""
        remarks = []
        if self.problem is not None:
            remarks += [
                f"it went on with changed code after {part.env_steps:,} environment steps"
                for part in self.record.resumed
                if part.changed.get("code")
            ]
            if self.stands_in is not None:
                remarks.append(f"{self.stands_in}, so the present code was run")
        return Rerun(self.run_dir.name, self.problem, self.commit, "; ".join(remarks) or None)


def zoom_in(
    comparison: Comparison,
    *,
    from_start: bool = False,
    keep: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
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
        runs = (("a", comparison.a), ("b", comparison.b))
        sides = [_Side(name, Path(side.run_dir), project) for name, side in runs]
        start = None if from_start else _common_start(sides, at.env_steps_before)
        code = changes.files_between(project, *(asdict(side.record.git) for side in sides))
        code = None if code is None else [name for name in code if file_matters(name)]
        if code is None and not any(one.section == "code" for one in comparison.differences):
            code = []
        if keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zoom-")))
        else:
            folder = _new_folder(keep)
        try:
            for side in sides:
                if side.commit is not None:
                    side.tree = stack.enter_context(checked_out(project, side.commit))
        except GitError as error:
            children.check()  # Ctrl-C reaches git as well
            raise ConfigError(str(error)) from error
        shown_by = diff_command(comparison.a.run_dir, comparison.b.run_dir)
        look = _Look(sides, at, comparison.detail, start, folder, children, say, code, shown_by)
        if start is None and not from_start and at.iteration > 0:
            look.notes.append("There is no checkpoint from before the difference that both runs have.")
        return look.look(keep)


def _new_folder(keep: Path) -> Path:
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"keep={keep}: cannot be made, {error.strerror}") from None
    if any(keep.iterdir()):
        raise ConfigError(f"keep={keep}: is not empty; expected a new folder")
    return keep.absolute()


def _common_start(sides: Sequence[_Side], env_steps: int) -> int | None:
    """Environment steps of the last checkpoint from before the divergence that both have, if any."""
    for side in sides:
        every = int(side.config.get("checkpoint_every") or 0)
        if 0 < every <= env_steps and not (side.run_dir / paths.CHECKPOINTS).is_dir():
            raise ConfigError(
                f"{side.name}: the checkpoints of {side.run_dir.name} are gone; put them back, or run both "
                "from the beginning with zoom=start"
            )
    known = [{int(path.stem.removeprefix("step_")) for path in list_checkpoints(s.run_dir)} for s in sides]
    return max((steps for steps in known[0] & known[1] if steps <= env_steps), default=None)


@dataclass(slots=True)
class _Look:
    """One closer look, pass by pass."""

    sides: list[_Side]
    at: Divergence
    detail: str
    start: int | None
    folder: Path
    children: Children
    say: Callable[[str], None]
    code: list[str] | None
    shown_by: str
    notes: list[str] = field(default_factory=list)

    def look(self, keep: Path | None) -> Zoom:
        """All passes."""
        records = [side.run_dir for side in self.sides]  # folders whose traces have each step
        at: Divergence | None = self.at
        if self.detail != traces.STEP_DETAIL:
            records = [self.folder / "steps" / side.name for side in self.sides]
            for side, record in zip(self.sides, records, strict=True):
                self._pass(side, record, side.run_dir)
            if not self._problems():
                at = traces.first_difference(*(traces.open_trace(record, "") for record in records))
        place = self._place(at, records)
        items: list[Item] = []
        finding = None
        if place is not None:
            for side, record in zip(self.sides, records, strict=True):
                if side.problem is None:
                    self._pass(side, self.folder / side.name, record, place)
            kept = [_Kept(self.folder / side.name) for side in self.sides if side.problem is None]
            if len(kept) == 2:
                items = list(_compared(*kept))
                finding = self._finding(kept[0], kept[1], items, place)
            else:
                assert at is not None
                items = list(_alone(kept[0], [at.item, *at.further]))
        return Zoom(
            a=self.sides[0].rerun,
            b=self.sides[1].rerun,
            from_env_steps=self.start,
            iteration=self.at.iteration,
            event=None if place is None else place.event,
            index=0 if place is None else place.index,
            items=items,
            first=next((item.name for item in items if item.difference is None or item.differs), None),
            finding=finding,
            notes=self.notes,
            kept=None if keep is None else str(keep),
            code=self.code,
            code_shown_by=self.shown_by,
        )

    def _pass(self, side: _Side, folder: Path, record: Path, place: Place | None = None) -> None:
        """Run a side again to `folder`, and hold it to the trace in `record`."""
        where = "beginning" if self.start is None else f"checkpoint after {self.start:,} environment steps"
        aim = "its steps and updates" if place is None else f"tensors and operations of {place}"
        own = "" if side.commit is None else f" with its own code, commit {side.commit[:12]},"
        self.say(
            f"zoom: {side.name} again{own} from the {where} to iteration {self.at.iteration:,}, for {aim}"
        )
        request = Request(
            folder=str(folder),
            iteration=self.at.iteration,
            checkpoint=None if self.start is None else str(paths.checkpoint_path(side.run_dir, self.start)),
            event=None if place is None else place.event,
            index=0 if place is None else place.index,
            since=None if place is None else place.since,
        )
        side.run_again(folder, request, self.children)
        if side.problem is None:
            side.problem = not_repeated(record / paths.TRACE, folder / paths.TRACE, self.at.iteration)
        problems = self._problems()
        if len(problems) == len(self.sides):
            advice = [instead(self.shown_by)] if any(each.rerun.remark for each in self.sides) else []
            raise ConfigError("neither run can be run again here: " + "\n".join([*problems, *advice]))

    def _problems(self) -> list[str]:
        return [f"{side.name}: {side.rerun.why}" for side in self.sides if side.problem is not None]

    def _place(self, at: Divergence | None, records: Sequence[Path]) -> Place | None:
        """The event to look at; None if there is none, and why in the notes."""
        if at is None or at.item in (traces.OTHER_CHAIN, traces.OTHER_ENV_STEPS):
            self.notes.append(
                "No item differs: what does is the number of environment steps or the chain of digests, and "
                "no operation makes these."
            )
            return None
        if at.item == traces.OTHER_EVENT:
            # A line that names items belongs to the event.
            a, b = (words.removeprefix("a list of the items of ") for words in (at.a, at.b))
            self.notes.append(
                f"The runs did different things next: a went on with {a}, b with {b}. "
                "All items before are equal, so it was a condition that differed, and no number."
            )
            return None
        if self._problems() and self.detail != traces.STEP_DETAIL:
            # Of the other run there is only the trace of whole iterations.
            if at.event in traces.BEFORE_TRAINING:
                return Place(at.event, 0)
            return Place("start" if at.item.startswith((traces.AT_START, "stream/")) else RESULTS, 0)
        if at.item == traces.OTHER_ITEMS:
            self.notes.append(f"The event has other items; only in a: {at.a}; only in b: {at.b}.")
        return event_at(records[0] / paths.TRACE, at)

    def _finding(self, a: _Kept, b: _Kept, items: Sequence[Item], place: Place) -> Finding | None:
        first = next((item.name for item in items if item.differs), None)
        if first is None:
            self.notes.append("No tensor that both runs have there differs.")
            return None
        compiled = any(side.config.get("compile") for side in self.sides)
        if compiled and place.event not in (*traces.BEFORE_TRAINING, "start", "step"):
            self.notes.append(
                "Updates are compiled (compile=true): of the operations inside the compiled program only "
                "some matrix products can be seen. Runs with compile=false show all, if they part as well."
            )
        if place.event == "start":
            return Finding(kind=BETWEEN if self.at.iteration > 0 else UNSEEN)
        limits = [kept.after_operations(first) for kept in (a, b)]
        found = how_made(a.operations, b.operations, limits, place.logged_from)
        if self.code != [] and found.kind in (OTHER_OPERATIONS, OUTSIDE):
            found = made_by_other_code(a.operations, b.operations, limits, place.logged_from) or found
        return found


class _Kept:
    """The tensors and operations of an event that a process kept."""

    def __init__(self, folder: Path) -> None:
        with (folder / OPERATIONS).open() as lines:
            self.operations = [LoggedOperation(**json.loads(line)) for line in lines]
        self._before: dict[str, int] = {}
        self.tensors: dict[str, np.ndarray] = {}
        with np.load(folder / TENSORS) as arrays:
            for i, entry in enumerate(json.loads((folder / ITEMS).read_text())):
                name, number = entry["item"], 2
                while name in self.tensors:  # as in traces
                    name, number = f"{entry['item']}#{number}", number + 1
                self.tensors[name] = arrays[str(i)]
                self._before[name] = entry["after_operations"]

    def after_operations(self, item: str) -> int:
        """The number of operations that had been carried out when the item was there."""
        return self._before.get(item, len(self.operations))


def _compared(a: _Kept, b: _Kept) -> Iterator[Item]:
    for name, value in a.tensors.items():
        if name in b.tensors:
            yield Item(name, str(value.dtype), list(value.shape), ulp.compare_arrays(value, b.tensors[name]))


def _alone(kept: _Kept, wanted: Sequence[str]) -> Iterator[Item]:
    for name in [name for name in kept.tensors if name in wanted] or list(kept.tensors):
        value = kept.tensors[name]
        first = [str(number) for number in value.reshape(-1)[:SHOWN_VALUES]]
        yield Item(name, str(value.dtype), list(value.shape), None, first)
