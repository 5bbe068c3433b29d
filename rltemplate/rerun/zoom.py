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
from typing import Any

import numpy as np

from rltemplate.analysis import traces
from rltemplate.analysis.compare import Comparison, diff_command
from rltemplate.config.command_args import make_folder
from rltemplate.config.loading import load_config, to_dict
from rltemplate.config.recorded import raw_config
from rltemplate.launch.subprocesses import Children, last_words
from rltemplate.rerun.operations import BETWEEN, UNSEEN, Finding, LoggedOperation, how_made
from rltemplate.rerun.recorded_code import Code, checked_out
from rltemplate.rerun.replay import FORM, OPERATIONS, RESULTS, TENSORS, Request
from rltemplate.rerun.ulp import EQUAL, compare_arrays
from rltemplate.rerun.zoom_report import Item, Zoom, place_name
from rltemplate.run import paths
from rltemplate.run.checkpoint import list_checkpoints
from rltemplate.run.git import changes, snapshot
from rltemplate.run.git.command import GitError
from rltemplate.run.job import PROJECT
from rltemplate.run.record import RunRecord
from rltemplate.run.state import START
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
            words, children = [json.dumps(asdict(request))], self.children
            status = side.code.run("rerun.replay", words, side.record, config, side.run_dir, log, children)
            problem = last_words(log, status) if status else None
            problem = problem or _not_repeated(side.run_dir, folder, self.iteration)
            if problem is not None:
                raise ConfigError(self._problem(side, problem))
        return folders

    def _problem(self, side: _Side, problem: str) -> str:
        if self.start is not None:
            problem += "; zoom=start needs no checkpoint"
        if side.stands_in is not None:
            problem += f"; {side.stands_in}, so the present code was run"
        shown_by = diff_command(*(each.run_dir for each in self.sides))
        return (
            f"{side.name}: cannot be run again here: {problem}\n"
            f"instead: {shown_by} shows what was changed, and trace=step says more"
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
        start = None if from_start else _common_start(dirs, at.env_steps_before)
        result = Zoom(sides[0].commit, sides[1].commit, start, at.iteration)
        result.kept = None if keep is None else str(folder)
        _look(_Work(sides, start, at.iteration, folder, say, children), result)
        return result


def _common_start(dirs: Sequence[Path], env_steps: int) -> int | None:
    """Environment steps of the last checkpoint from before the divergence that both have, if any."""
    known = [{int(path.stem.removeprefix("step_")) for path in list_checkpoints(each)} for each in dirs]
    return max((steps for steps in set.intersection(*known) if steps <= env_steps), default=None)


def _take_code(side: _Side, project: Path, stack: ExitStack) -> None:
    """Check out the code of a run; where that cannot be run, the present code stands in for it."""
    git = asdict(side.record.git)
    names = changes.commits(git)
    if not names:
        side.stands_in = f"its code was not recorded: {git['problem'] or 'no reason is given'}"
        return
    commit = next(filter(None, (snapshot.find_commit(project, name) for name in names)), None)
    if commit is None:
        fetch = snapshot.fetch_command(side.record.id)
        side.stands_in = f"its code, commit {names[0][:12]}, is not in this repository; `{fetch}` brings it"
        return
    code = stack.enter_context(checked_out(project, commit))
    sources = [path.read_text("utf-8") for path in code.project.glob("*/rerun/replay.py")]
    if any(re.search(rf"(?m)^FORM = {FORM}$", source) for source in sources):
        side.commit, side.code = commit, code
    else:
        side.stands_in = f"its code, commit {commit[:12]}, is of another version and cannot be zoomed in on"


def _look(work: _Work, result: Zoom) -> None:
    """Both passes; what they find goes into `result`."""
    steps = work.run_again("its steps and updates")
    at = traces.first_difference(*(traces.open_trace(folder, "") for folder in steps))
    if at is None or at.item in traces.NOT_FINGERPRINTS:
        sides = "" if at is None else f" (a: {at.a}; b: {at.b})"
        result.notes.append(
            f"The runs did different things next{sides}. "
            "All items before are equal, so it was a condition or a setting that differed, and no number."
        )
        return
    since = _event_before(steps[0] / paths.TRACE, at.line)
    result.event, result.index = at.event, 0 if at.event == RESULTS else at.index or 0
    here = place_name(result.event, result.index)
    folders = work.run_again(f"tensors of {here}", event=result.event, index=result.index, since=since)
    result.items = list(_compared(*folders))
    result.first = next((item.name for item in result.items if item.difference.kind != EQUAL), None)
    if result.first is None:
        result.notes.append("No tensor that both runs have there differs.")
    elif at.event == START:
        result.finding = Finding(kind=BETWEEN if at.iteration > 0 else UNSEEN)
    else:
        a, b = (_operations_before(result.first, folder) for folder in folders)
        result.finding = how_made(a, b, place_name(*since) if since else here)


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


def _event_before(trace: Path, line: int) -> tuple[str, int] | None:
    """The event before the one in a line, which counts from 1, if its iteration has any."""
    lines = trace.read_text(encoding="utf-8").splitlines()[1 : line - 1]
    events = [json.loads(text) for text in lines if not text.startswith('["items",')]
    return (events[-1][0], events[-1][1]) if events and events[-1][0] != RESULTS else None


def _compared(a: Path, b: Path) -> Iterator[Item]:
    with np.load(a / TENSORS) as ours, np.load(b / TENSORS) as theirs:
        for name in ours.files:
            if name in theirs:
                yield Item(name, compare_arrays(ours[name], theirs[name]))


def _operations_before(item: str, folder: Path) -> list[LoggedOperation]:
    """The operations that had been carried out when the item was there."""
    document = json.loads((folder / OPERATIONS).read_text())
    return [LoggedOperation(**each) for each in document["operations"][: document["before"][item]]]
