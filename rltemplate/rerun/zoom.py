"""The first difference between two runs, down to the numbers and to the operation that made them.

A trace says where two runs part, and holds digests only. So both runs are run again up to there, each in a
fresh process with the environment that it had, from the last checkpoint that both have. The first pass takes
every step and update of the iteration in which they part; the second keeps the tensors of the event that
differs, and the operations of torch that led to it. Each run is run again with its own code (own_code.py).
What is run again is held to the run's own record: a run that does not repeat has nothing to say about itself.
"""

from __future__ import annotations

import json
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rltemplate.analysis import traces
from rltemplate.analysis.compare import Comparison, diff_command
from rltemplate.analysis.traces import Divergence
from rltemplate.config.loading import load_config, to_dict
from rltemplate.launch.process import worker_environment
from rltemplate.launch.subprocesses import Children, last_words
from rltemplate.rerun import diverging_operations, recorded_code, ulp
from rltemplate.rerun.replay import (
    ITEMS,
    MODULE,
    NO_START,
    OPERATIONS,
    REFUSED,
    REQUEST_VARIABLE,
    RESULTS,
    TENSORS,
    Request,
)
from rltemplate.rerun.rerun_environment import as_it_was
from rltemplate.rerun.ulp import ArrayDifference
from rltemplate.run import paths
from rltemplate.run.checkpoint import list_checkpoints
from rltemplate.run.git.command import GitError
from rltemplate.run.job import PROJECT, Job
from rltemplate.run.read import read_config
from rltemplate.run.record import check_alone, read_record
from rltemplate.types import ConfigError

# What is known of how the first difference was made.
COMPUTED = "computed"  # an operation made another result of equal inputs
ARGUMENTS = "arguments"  # an operation was called with other numbers or shapes
DRAWN = "drawn"  # a random stream gave other numbers
OUTSIDE = "outside"  # no operation made it
OTHER_OPERATIONS = "other operations"  # the runs did not carry out the same ones
UNSEEN = "unseen"  # it was made where operations are not logged
BETWEEN = "between"  # it was changed after one iteration had ended and before the next began
OTHER_CODE = "other code"  # lines that differ between the codes of the runs made other numbers

# Items of the event "start", which some traces make part of the end of the iteration.
_AT_START = (traces.AT_START, "stream/")
_SHOWN_VALUES = 6
_SHOWN_FILES = 6

# Results of these are whatever was in memory.
_UNWRITTEN = ("empty", "new_empty", "resize_")
_DRAWING = ("rand", "normal", "uniform", "bernoulli", "multinomial", "exponential", "poisson")
# These show a part of a tensor and compute nothing.
_SHOWING = {"select", "slice", "view", "t", "transpose", "expand", "split", "split_with_sizes", "unbind"} | {
    "unsqueeze",
    "squeeze",
    "detach",
    "alias",
    "permute",
    "as_strided",
    "_unsafe_view",
}


@dataclass(frozen=True, slots=True)
class Rerun:
    """One of the runs, run again. `problem` says why nothing is known of it; None if it repeated itself.

    `commit` has the code with which it was run; None stands for the present code. With a problem, `remark` is
    what its code may have to do with it.
    """

    run: str
    problem: str | None = None
    commit: str | None = None
    remark: str | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """One item of the event. `values` are its first ones where only one of the runs could be run again."""

    name: str
    dtype: str
    shape: list[int]
    difference: ArrayDifference | None
    values: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of torch on both sides.

    `source` are the lines of this project that led to it, the innermost first; `forward_source` those of the
    operation whose gradient it computes; `source_b` and `forward_source_b` those of b where the code of the
    runs differs. In arguments a tensor is shown as its type and shape; None where a run did nothing like it.
    """

    name: str
    arguments_a: str | None
    arguments_b: str | None
    source: list[str]
    forward_source: list[str]
    source_b: list[str] = field(default_factory=list)
    forward_source_b: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Finding:
    """How the first difference was made.

    `kind` is one of this module's words. `agreeing` operations came before; `operation` is the one that made
    the difference, or for OUTSIDE the first that saw it. `logged_from` is the event in which the log begins.
    """

    kind: str
    agreeing: int = 0
    operation: Operation | None = None
    other_name: str | None = None  # what b did instead, for OTHER_OPERATIONS and OTHER_CODE
    logged_from: str = ""


@dataclass(frozen=True, slots=True)
class Zoom:
    """What was found.

    The runs went on after `from_env_steps` environment steps, where both have a checkpoint; None stands for
    the beginning. They part in `event` number `index` of `iteration`; `event` is None where there is no event
    that both have. `items` are all of the event, in causal order, and `first` is the first that differs.
    `notes` are sentences about what could not be done. `kept` is the folder with tensors and operations, if
    they are kept. `code` names the files that may change results and differ between the code of the runs,
    None where nobody can tell; `code_shown_by` is the command that shows their lines.
    """

    a: Rerun
    b: Rerun
    from_env_steps: int | None
    iteration: int
    event: str | None = None
    index: int = 0
    items: list[Item] = field(default_factory=list)
    first: str | None = None
    finding: Finding | None = None
    notes: list[str] = field(default_factory=list)
    kept: str | None = None
    code: list[str] | None = None
    code_shown_by: str = ""


class _Side:
    """A run, and what is needed to run it again."""

    def __init__(self, name: str, run_dir: Path, project: Path) -> None:
        self.name = name
        self.run_dir = run_dir
        # As its own code wrote it; the present code need not know all of it.
        self.config = read_config(run_dir)[1]
        self.record = read_record(run_dir)
        self.code = recorded_code.find_code(project, run_dir.name, self.record.get("git") or {})
        self.tree: recorded_code.Tree | None = None
        self.problem: str | None = None

    def run_again(self, folder: Path, request: Request, children: Children) -> None:
        """Run it again; `problem` says why it cannot be. Raises ConfigError if the checkpoint is no good."""
        folder.mkdir(parents=True)
        try:
            check_alone(self.record)
            environment = self._environment() | {REQUEST_VARIABLE: request.to_json()}
        except ConfigError as error:  # written by code that has other keys
            self.problem = str(error)
            return
        log = folder / "output.txt"
        status = children.run([sys.executable, "-P", "-m", MODULE], environment, log)
        why = last_words(log, status)
        if status == NO_START:
            raise ConfigError(f"{self.name}: {why}; zoom=start needs no checkpoint")
        if status == REFUSED:
            self.problem = why
        elif status != 0:
            print(log.read_text(errors="replace").rstrip(), file=sys.stderr)
            self.problem = f"its process ended with exit status {status}, {why}"

    def _environment(self) -> dict[str, str]:
        job = Job(
            config=self.config, run_id=self.run_dir.name, run_dir=str(self.run_dir), command=[], overrides=[]
        )
        if self.tree is not None:
            return recorded_code.environment(self.tree, job, self.record)
        config = load_config(self.run_dir / paths.CONFIG)
        return worker_environment(replace(job, config=to_dict(config)), config, as_it_was(self.record))

    def hold_to(self, record: Path, folder: Path, iteration: int) -> None:
        """See whether what was run again to `folder` is what the trace in `record` says."""
        recorded, here = (_header(path / paths.TRACE)["digest"] for path in (record, folder))
        if recorded != here:
            self.problem = (
                f"its trace holds {recorded} digests, made on another device, and here they are {here}"
            )
            return
        again = dict(_digests(folder / paths.TRACE, iteration))
        reached = {number for number, _ in again}
        for (number, item), value in _digests(record / paths.TRACE, iteration):
            # An older trace has other items of the start of an iteration.
            if number in reached and again.get((number, item)) != value and not item.startswith("stream/"):
                self.problem = f"it first differs from its own record in iteration {number:,}, {item}"
                return

    @property
    def rerun(self) -> Rerun:
        """How it went."""
        remark = None if self.problem is None else self._remark()
        return Rerun(self.run_dir.name, self.problem, self.code.commit, remark)

    def _remark(self) -> str | None:
        words = []
        for part in self.record.get("resumed") or []:
            if (part.get("changed") or {}).get("code"):
                steps = part.get("env_steps", 0)
                words.append(f"it went on with changed code after {steps:,} environment steps")
        if self.code.stands_in is not None:
            words.append(f"{self.code.stands_in}, so the present code was run")
        return "; ".join(words) or None

    def __str__(self) -> str:
        return f"{self.name}: {_unknown(self.rerun)}"


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
    repository that is asked for other code. Raises ConfigError, in a line or two, where nothing can be found
    out, and Interrupted after a signal.
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
        code = recorded_code.files_apart(project, *(side.record.get("git") or {} for side in sides))
        if code is None and not any(one.section == "code" for one in comparison.differences):
            code = []
        if keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zoom-")))
        else:
            folder = _new_folder(keep)
        try:
            trees = stack.enter_context(recorded_code.laid_out(project, [side.code for side in sides]))
        except GitError as error:
            children.check()  # Ctrl-C reaches git as well
            raise ConfigError(str(error)) from error
        for side, tree in zip(sides, trees, strict=True):
            side.tree = tree
        shown_by = diff_command(comparison.a, comparison.b)
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


@dataclass(frozen=True, slots=True)
class _Place:
    """An event of the iteration, and the one before it where that is in the iteration too."""

    event: str
    index: int
    since: tuple[str, int] | None = None

    def __str__(self) -> str:
        return "its end" if self.event == RESULTS else _named(self.event, self.index)

    @property
    def logged_from(self) -> str:
        """The event in which operations begin to be logged."""
        return str(self) if self.since is None else _named(*self.since)


def _next(words: str) -> str:
    """What a trace goes on with; the event itself where the line only names its items."""
    return words.removeprefix("a list of the items of ")


def _named(event: str, index: int) -> str:
    return f"{event} {index:,}" if index or event in ("step", "update", "epoch") else event


class _Look:
    """One closer look, pass by pass."""

    def __init__(
        self,
        sides: Sequence[_Side],
        at: Divergence,
        detail: str,
        start: int | None,
        folder: Path,
        children: Children,
        say: Callable[[str], None],
        code: list[str] | None,
        shown_by: str,
    ) -> None:
        self.sides = sides
        self.at = at
        self.step_by_step = detail == traces.STEP_DETAIL
        self.start = start
        self.folder = folder
        self.children = children
        self.say = say
        self.code = code
        self.shown_by = shown_by
        self.notes: list[str] = []

    def look(self, keep: Path | None) -> Zoom:
        """All of it."""
        records = [side.run_dir for side in self.sides]  # folders whose traces know each step
        at: Divergence | None = self.at
        if not self.step_by_step:
            records = [self.folder / "steps" / side.name for side in self.sides]
            for side, record in zip(self.sides, records, strict=True):
                self._pass(1, side, record, side.run_dir)
            self._some_must_repeat()
            at = self.at if self._problems() else _first_difference(records)
        place = self._place(at, records)
        views: list[_Kept] = []
        if place is not None:
            for side, record in zip(self.sides, records, strict=True):
                if side.problem is None:
                    self._pass(2, side, self.folder / side.name, record, place)
            self._some_must_repeat()
            views = [_Kept(self.folder / side.name) for side in self.sides if side.problem is None]
        items: list[Item] = []
        finding = None
        if len(views) == 2:
            assert place is not None
            items = list(_compared(*views))
            finding = self._finding(views[0], views[1], items, place)
        elif views:
            assert at is not None
            items = list(_alone(views[0], [at.item, *at.further]))
        of_interest = (item.name for item in items if item.difference is None or _differs(item))
        return Zoom(
            a=self.sides[0].rerun,
            b=self.sides[1].rerun,
            from_env_steps=self.start,
            iteration=self.at.iteration,
            event=None if place is None else place.event,
            index=0 if place is None else place.index,
            items=items,
            first=next(of_interest, None),
            finding=finding,
            notes=self.notes,
            kept=None if keep is None else str(keep),
            code=self.code,
            code_shown_by=self.shown_by,
        )

    def _pass(
        self, number: int, side: _Side, folder: Path, record: Path, place: _Place | None = None
    ) -> None:
        """Run a side again to `folder`, and hold it to the trace in `record`."""
        where = "beginning" if self.start is None else f"checkpoint after {self.start:,} environment steps"
        what = "its steps and updates" if place is None else f"tensors and operations of {place}"
        own = "" if side.code.commit is None else f" with its own code, commit {side.code.commit[:12]},"
        self.say(
            f"zoom: {side.name} again{own} from the {where} to iteration {self.at.iteration:,}, for {what}"
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
            side.hold_to(record, folder, self.at.iteration)

    def _problems(self) -> list[str]:
        return [str(side) for side in self.sides if side.problem is not None]

    def _some_must_repeat(self) -> None:
        problems = self._problems()
        if len(problems) == len(self.sides):
            instead = [_instead(self.shown_by)] if any(side.rerun.remark for side in self.sides) else []
            raise ConfigError("neither run can be run again here: " + "\n".join([*problems, *instead]))

    def _place(self, at: Divergence | None, records: Sequence[Path]) -> _Place | None:
        """Where to look; None if there is no such event, and why in the notes."""
        if at is None or at.item in (traces.OTHER_CHAIN, traces.OTHER_ENV_STEPS):
            self.notes.append(
                "No item differs: what does is the number of environment steps or the chain of digests, and "
                "no operation makes these."
            )
            return None
        if at.item == traces.OTHER_EVENT:
            self.notes.append(
                f"The runs did different things next: a went on with {_next(at.a)}, b with {_next(at.b)}. "
                "All items before are equal, so it was a condition that differed, and no number."
            )
            return None
        if self._problems() and not self.step_by_step:
            # Of the other run there is only the trace of whole iterations.
            if at.event in traces.BEFORE_TRAINING:
                return _Place(at.event, 0)
            return _Place("start" if at.item.startswith(_AT_START) else RESULTS, 0)
        if at.item == traces.OTHER_ITEMS:
            self.notes.append(f"The event has other items; only in a: {at.a}; only in b: {at.b}.")
        index, since = _around(records[0] / paths.TRACE, at)
        return _Place(RESULTS, 0, since) if at.event == RESULTS else _Place(at.event, index, since)

    def _finding(self, a: _Kept, b: _Kept, items: Sequence[Item], place: _Place) -> Finding | None:
        first = next((item.name for item in items if _differs(item)), None)
        if first is None:
            if all(item.difference is not None for item in items):
                self.notes.append("No tensor that both runs have there differs.")
            return None
        compiled = any(side.config.get("compile") for side in self.sides)
        if compiled and place.event not in (*traces.BEFORE_TRAINING, "start", "step"):
            self.notes.append(
                "Updates are compiled (compile=true): of the operations inside the compiled program only "
                "some matrix products can be seen. Runs with compile=false show all, if they part as well."
            )
        if place.event in ("init", "start"):
            return Finding(kind=BETWEEN if self.at.iteration > 0 else UNSEEN)
        limits = [kept.after_operations(first) for kept in (a, b)]
        found = how_made(a.operations, b.operations, limits, place.logged_from)
        if self.code != [] and found.kind in (OTHER_OPERATIONS, OUTSIDE):
            found = made_by_other_code(a.operations, b.operations, limits, place.logged_from) or found
        return found


class _Kept:
    """What a process kept of an event."""

    def __init__(self, folder: Path) -> None:
        with (folder / OPERATIONS).open() as lines:
            self.operations: list[dict[str, Any]] = [json.loads(line) for line in lines]
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
        """How many operations had been carried out when the item was there."""
        return self._before.get(item, len(self.operations))


def _compared(a: _Kept, b: _Kept) -> Iterator[Item]:
    for name, value in a.tensors.items():
        if name in b.tensors:
            yield Item(name, str(value.dtype), list(value.shape), ulp.compare_arrays(value, b.tensors[name]))


def _alone(kept: _Kept, wanted: Sequence[str]) -> Iterator[Item]:
    chosen = [name for name in kept.tensors if name in wanted] or list(kept.tensors)
    for name in chosen:
        value = kept.tensors[name]
        first = [str(number) for number in value.reshape(-1)[:_SHOWN_VALUES]]
        yield Item(name, str(value.dtype), list(value.shape), None, first)


def _differs(item: Item) -> bool:
    return item.difference is not None and item.difference.kind != ulp.EQUAL


# --- Traces ----------------------------------------------------------------------------------------------


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.readline())
    return header


def _digests(path: Path, closely: int) -> Iterator[tuple[tuple[int, str], str]]:
    """Iteration, item and digest of all that every trace of a run has, up to iteration `closely`.

    Of that one also the items of steps and updates, if they are there.
    """
    rare = tuple(f'["{event}",'.encode() for event in (*traces.BEFORE_TRAINING, "start"))
    names: dict[str, list[str]] = {}
    waiting: list[bytes] = []
    with path.open("rb") as lines:
        next(lines)
        for line in lines:
            if not line.startswith(b'["iteration",'):
                waiting.append(line)
                continue
            number = json.loads(line)[1]
            for each in [*waiting, line]:
                if not (each is line or number == closely or each.startswith((b'["items",', *rare))):
                    continue
                event, index, *rest = json.loads(each)
                if event == "items":
                    names[index] = rest[0]
                    continue
                text = rest[1] if each is line else rest[0]
                place = "" if event in (traces.ITERATION, "start") else f"{event} {index:,}: "
                for i, name in enumerate(names[event]):
                    digest = text[i * traces.DIGITS : (i + 1) * traces.DIGITS]
                    yield (number, f"{place}{name}"), digest
            waiting.clear()
            if number >= closely:
                return


def _first_difference(records: Sequence[Path]) -> Divergence | None:
    with traces.open_trace(records[0], "") as a, traces.open_trace(records[1], "") as b:
        return traces.first_difference(a, b)


def _around(path: Path, at: Divergence) -> tuple[int, tuple[str, int] | None]:
    """The index of the event at which two traces part, and the event before it in the same iteration."""
    before: bytes | None = None
    index = at.index
    with path.open("rb") as lines:
        next(lines)
        for number, line in enumerate(lines, start=2):
            if line.startswith(b'["items",'):
                continue
            if number >= at.line:
                index = json.loads(line)[1] if index is None else index  # none: the line names items
                break
            before = line
    place = None if before is None or before.startswith(b'["iteration",') else json.loads(before)
    return int(index or 0), None if place is None else (str(place[0]), int(place[1]))


# --- Operations ------------------------------------------------------------------------------------------


def how_made(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], limits: Sequence[int], logged_from: str
) -> Finding:
    """How the first item that differs was made, from the operations of both runs as `replay` logs them.

    The item came after `limits` operations of a and of b. An operation is the cause if it had equal inputs in
    both runs and another result; what was read from memory that nobody had written counts for nothing.
    """
    limit = min(limits)
    pairs = list(zip(a, b, strict=False))
    alike = next((i for i, (x, y) in enumerate(pairs) if x["operation"] != y["operation"]), len(pairs))
    apart = [
        i
        for i, (x, y) in enumerate(pairs[:alike])
        if x["outputs"] != y["outputs"] and not _base_name(x).startswith(_UNWRITTEN)
    ]

    def found(kind: str, at: int | None, other_name: str | None = None) -> Finding:
        end = limit if at is None else min(at, limit)
        return Finding(
            kind=kind,
            agreeing=end - sum(i < end for i in apart),
            operation=None if at is None else _operation(*pairs[at]),
            other_name=other_name,
            logged_from=logged_from,
        )

    for i in apart:
        one, other = pairs[i]
        if i < limit and one["inputs"] == other["inputs"]:
            drawn = any(word in _base_name(one) for word in _DRAWING)
            return found(
                ARGUMENTS if one["arguments"] != other["arguments"] else DRAWN if drawn else COMPUTED, i
            )
    if alike < limit:
        return found(OTHER_OPERATIONS, alike, pairs[alike][1]["operation"])
    if limits[0] != limits[1]:
        ahead, name = (a, "b") if limits[0] > limit else (b, "a")
        finding = found(OTHER_OPERATIONS, None, f"the item, which {name} had by then")
        return replace(finding, operation=_operation(ahead[limit], ahead[limit]))
    for i in apart:
        if pairs[i][0]["inputs"] != pairs[i][1]["inputs"] and _base_name(pairs[i][0]) not in _SHOWING:
            return found(OUTSIDE, i)
    return found(OUTSIDE, None)


def made_by_other_code(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], limits: Sequence[int], logged_from: str
) -> Finding | None:
    """How lines that differ between two codes made the first item that differs; None if none can be named.

    As `how_made`, but operations need not stand side by side.
    """
    logs = [
        [call for call in log[:limit] if not _base_name(call).startswith(_UNWRITTEN)]
        for log, limit in zip((a, b), limits, strict=True)
    ]
    found = [diverging_operations.first_own(*logs), diverging_operations.first_own(*reversed(logs))]
    calls = [None if own is None else log[own.at] for own, log in zip(found, logs, strict=True)]
    mine = 0 if found[0] is not None else 1
    own, one, other = found[mine], calls[mine], calls[1 - mine]
    if own is None or one is None:
        return None
    alike = other is not None and all(one[key] == other[key] for key in ("operation", "arguments"))
    if alike and not any(each is not None and each.known for each in found):
        return None  # the same in both, of numbers that came from elsewhere
    operation = _operation(one, other or one)
    if other is None and mine == 0:
        operation = replace(operation, arguments_b=None)
    elif other is None:
        operation = replace(operation, arguments_a=None)
    return Finding(
        kind=OTHER_CODE,
        agreeing=diverging_operations.shared(logs[mine][: own.at], logs[1 - mine]),
        operation=operation,
        other_name=None if other is None else other["operation"],
        logged_from=logged_from,
    )


def _base_name(call: Mapping[str, Any]) -> str:
    """`select` for aten.select.int."""
    parts = str(call["operation"]).split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def _operation(a: Mapping[str, Any], b: Mapping[str, Any]) -> Operation:
    return Operation(
        name=a["operation"],
        arguments_a=a["arguments"],
        arguments_b=b["arguments"],
        source=a["source"],
        forward_source=a["forward_source"],
        source_b=b["source"] if b["source"] != a["source"] else [],
        forward_source_b=b["forward_source"] if b["forward_source"] != a["forward_source"] else [],
    )


# --- The report ------------------------------------------------------------------------------------------

_WIDTH = 110


def headline(zoom: Zoom) -> str:
    """What was found, in one line."""
    place = f"iteration {zoom.iteration:,}"
    if zoom.event is not None:
        place += f", {_Place(zoom.event, zoom.index)}"
    if zoom.first is None:
        return place
    first = next(item for item in zoom.items if item.name == zoom.first)
    return f"{place}: {zoom.first}" + ("" if first.difference is None else f", {_words(first.difference)}")


def report(zoom: Zoom) -> str:
    """All of it for a terminal."""
    start = "the beginning"
    if zoom.from_env_steps is not None:
        start = f"the checkpoint after {zoom.from_env_steps:,} environment steps"
    lines = [f"zoom: {headline(zoom)}", ""]
    failed = [(name, side) for name, side in (("a", zoom.a), ("b", zoom.b)) if side.problem is not None]
    if not failed:
        lines.append(f"  both runs were run again from {start}, and repeated their own records")
    for name, side in failed:
        lines += _wrapped(f"{name} cannot be run again here: {_unknown(side)}", "  ")
        lines.append(
            f"  so these are the values of {'b' if name == 'a' else 'a'} alone, run again from {start}"
        )
    lines += _code_lines(zoom)
    equal = [item.name for item in zoom.items if item.difference is not None and not _differs(item)]
    if equal:
        lines += _wrapped(", ".join(equal), "  equal  ")
    for item in zoom.items:
        if item.name not in equal:
            lines += _item(item, closely=item.name == zoom.first)
    if zoom.finding is not None:
        lines += ["", *_finding_lines(zoom.finding, zoom.first or "")]
    for note in zoom.notes:
        lines += ["", *_wrapped(note, "  ")]
    if zoom.kept is not None:
        lines += ["", f"  tensors and operations are in {zoom.kept}"]
    return "\n".join(lines)


def _unknown(side: Rerun) -> str:
    """Why nothing is known of a run."""
    return "; ".join(text for text in (side.problem, side.remark) if text)


def _instead(shown_by: str) -> str:
    """What to do where a run cannot be run again with its own code."""
    return f"instead: {shown_by} shows what was changed, and runs with trace=step are told apart to the step"


def _code_lines(zoom: Zoom) -> Iterator[str]:
    """With which code the runs were run again, and how it differs."""
    own = [f"{n} with commit {x.commit[:12]}" for n, x in (("a", zoom.a), ("b", zoom.b)) if x.commit]
    if own:
        yield f"  {' and '.join(own)}, as recorded and not as the code is now"
    if zoom.code:
        more = len(zoom.code) - _SHOWN_FILES
        files = ", ".join(zoom.code[:_SHOWN_FILES]) + (f" and {more} more" if more > 0 else "")
        yield from _wrapped(f"their code differs in {files}; to see the lines:", "  ")
        yield f"    {zoom.code_shown_by}"  # whole, to be copied
    if zoom.a.remark or zoom.b.remark:
        yield from _wrapped(_instead(zoom.code_shown_by), "  ")


def _item(item: Item, closely: bool) -> Iterator[str]:
    kind = f"{item.dtype} {item.shape}"
    difference = item.difference
    if difference is None:
        more = ", ..." if len(item.values) == _SHOWN_VALUES else ""
        yield from _wrapped(f"{', '.join(item.values)}{more}", f"  {item.name}  {kind}: ")
        return
    yield from _wrapped(_words(difference), f"  {item.name}  {kind}: ")
    first = difference.first
    if closely and first is not None:
        yield f"    first at {first.coordinates}" if first.coordinates else "    its value"
        width = max(len(first.a), len(first.b))
        yield f"      a  {first.a:{width}}  {first.hex_a}  {first.bits_a}"
        yield f"      b  {first.b:{width}}  {first.hex_b}  {first.bits_b}"


def _words(difference: ArrayDifference) -> str:
    """A difference in one line."""
    if difference.shape_a != difference.shape_b:
        return f"another shape: a {difference.shape_a}, b {difference.shape_b}"
    if difference.dtype_a != difference.dtype_b:
        return f"another type: a {difference.dtype_a}, b {difference.dtype_b}"
    count = difference.differing or difference.only_bits
    plural = "" if difference.size == 1 else "s"
    words = [
        f"{count:,} of {difference.size:,} element{plural} ({100 * count / max(1, difference.size):.3g} %)"
    ]
    words.append(difference.kind)
    if difference.max_ulp is not None:
        median = f", median {difference.median_ulp:,.6g}" if difference.differing > 1 else ""
        words.append(f"{difference.max_ulp:,} ULP{median}")
    if difference.max_scaled is not None:
        words.append(f"scaled {difference.max_scaled:,.3g}")
    if difference.max_over_rms is not None:
        words.append(f"{difference.max_over_rms:.1e} of the RMS")
    if difference.max_difference is not None and difference.dtype_a != "bool":
        words.append(f"by up to {difference.max_difference:,}")
    if difference.nan_a or difference.nan_b:
        words.append(f"NaN in a alone {difference.nan_a:,} times, in b alone {difference.nan_b:,} times")
    return ", ".join(words)


def _finding_lines(finding: Finding, item: str) -> Iterator[str]:
    operation = finding.operation
    name = "" if operation is None else operation.name
    before = (
        f"the {finding.agreeing:,} operations before it, from {finding.logged_from} on, have equal results"
    )
    if finding.agreeing == 1:
        before = f"the one operation before it, from {finding.logged_from} on, has equal results"
    elif finding.agreeing == 0:
        before = f"it is the first from {finding.logged_from} on"
    texts = {
        COMPUTED: f"made by {name}: equal inputs, other results; {before}",
        ARGUMENTS: f"made by {name}: called with other arguments; {before}",
        DRAWN: f"drawn by {name}: its random stream was in another state; {before}",
        OTHER_OPERATIONS: (
            f"the runs carried out other operations: one went on with {name}, the other with "
            f"{finding.other_name}; {before}"
        ),
        OUTSIDE: (
            f"made by no operation of torch that was logged: {item} came from elsewhere, such as the "
            f"environment or numpy, or from before {finding.logged_from}"
        ),
        UNSEEN: "made before operations can be logged, while networks and streams were built",
        BETWEEN: (
            "changed between two iterations: what the one before left behind is equal, and nothing of this "
            "one had been computed"
        ),
    }
    if finding.kind == OTHER_CODE:
        text = (
            f"made by other code: {_of_both(finding)}; "
            f"{finding.agreeing:,} operations before it, from {finding.logged_from} on, have equal results"
        )
    else:
        text = texts[finding.kind]
    if finding.kind == OUTSIDE and finding.agreeing:
        text += f"; the {finding.agreeing:,} operations before it have equal results"
    yield from _wrapped(text, "  ")
    if operation is None:
        return
    if finding.kind == OUTSIDE:
        yield from _wrapped(f"the first operation that saw the difference: {name}", "  ")
    arguments = (operation.arguments_a, operation.arguments_b)
    yield from _of_each("with", [[] if text is None else [text] for text in arguments])
    for title, *sources in (
        ("in", operation.source, operation.source_b),
        ("the gradient of", operation.forward_source, operation.forward_source_b),
    ):
        yield from _of_each(title, [_of_interest(lines) for lines in sources])


def _of_both(finding: Finding) -> str:
    """What each run did."""
    operation = finding.operation
    assert operation is not None
    if operation.arguments_b is None:
        return f"a went on with {operation.name}, and b with nothing like it"
    if operation.arguments_a is None:
        return f"b went on with {operation.name}, and a with nothing like it"
    return f"a went on with {operation.name}, b with {finding.other_name}"


def _of_each(title: str, both: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines about a and b: once where they are the same, or one of them has none."""
    apart = both[0] != both[1] and all(both)
    for name, lines in zip("ab", both, strict=True):
        if name == "b" and not apart and both[0]:
            return
        for i, line in enumerate(lines):
            start = "called from" if i else f"{'' if name == 'b' and apart else title:{len(title)}}"
            yield from _wrapped(line, f"    {start}{f'  {name}' if apart and i == 0 else ''}  ")


def _of_interest(source: Sequence[str]) -> list[str]:
    """The innermost line, and the one from which its file was called."""
    if not source:
        return []
    file = source[0].partition(":")[0]
    return [source[0], *[line for line in source if line.partition(":")[0] != file][:1]]


def _wrapped(text: str, start: str) -> list[str]:
    indent = " " * min(len(start), 24)
    return textwrap.wrap(text, _WIDTH, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False)
