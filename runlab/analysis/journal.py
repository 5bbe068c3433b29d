"""The journal: a Markdown file with an entry for each run or sweep that has ended, made from its record.

The file belongs to its reader: entries are only appended, and only those that it lacks. Records may come from
strangers: every text of theirs passes through `_plain`.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

from runlab.analysis.differences import diff_runs, verdict
from runlab.analysis.experiments import find_experiments
from runlab.analysis.published import show
from runlab.analysis.runs import KILLED, Run, load_run, load_runs
from runlab.config.terminal import escaped
from runlab.errors import ConfigError, in_a_line
from runlab.run import paths
from runlab.run.files import in_use
from runlab.run.read import find_run
from runlab.run.record import RUNNING, RunRecord, SweepRecord

_HEADER = "# Journal\n\nOne entry per run or sweep. Write wherever you like.\n"


@dataclass(frozen=True)
class Journal:
    """The journal in `file` of runs in `runs_dir`."""

    file: Path
    runs_dir: Path

    def add(self, runs: Sequence[Run]) -> int:
        """Append the entries that the file lacks about these runs; their number.

        Processes that add at once wait for each other. Raises ConfigError if the file cannot be read or
        written; its content is then the former one.
        """
        with in_a_line(f"journal={self.file} cannot be written"):
            if self.file.exists() and not self.file.is_file():  # reading a pipe or a device might never end
                raise ConfigError(f"journal={self.file}: expected a file")
            with self.file.open("a+b", buffering=0) as file:
                with suppress(OSError):  # no locks on this file system: go on without
                    fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
                file.seek(0)
                content = file.read()
                text = content.decode(errors="replace")
                entries = ["\n".join(lines) + "\n" for lines in self._lacking(runs, text)]
                if entries:
                    _append(file, "\n".join(["" if text else _HEADER, *entries]).encode(), len(content))
        return len(entries)

    def _lacking(self, runs: Sequence[Run], text: str) -> Iterator[list[str]]:
        """The lines of each entry that `text` lacks. The runs of a sweep have one entry together."""
        sweeps = set[Path]()
        for run in runs:
            if run.record.sweep is not None:
                folder = run.dir.parents[1] / paths.SWEEPS / run.record.sweep.id
                if folder in sweeps:
                    continue
                sweep = None
                # Without its record, its runs have entries of their own. ValueError: the id is no file name.
                with suppress(ConfigError, ValueError):
                    sweep = SweepRecord.read(folder)
                if sweep is not None:
                    sweeps.add(folder)
                    if sweep.status == RUNNING and not in_use(folder):
                        _end_as_killed(sweep)
                    mark = self._mark(folder.name, folder, len(sweep.commands) - 1)
                    if sweep.status != RUNNING and mark not in text:
                        yield self._about_sweep(folder, sweep, mark)
                    continue
            mark = self._mark(run.id, run.dir, len(run.record.resumed))
            if run.value("status") != RUNNING and mark not in text:
                yield self._about_run(run, mark)

    def _mark(self, name: str, folder: Path, resumed: int) -> str:
        """The start of an entry's last line. A run that is resumed has another entry when it ends again."""
        times = f", resumed {resumed} time{'s' * (resumed > 1)}" if resumed else ""
        return f"* {self._link(name, folder)}{times}"

    def _about_run(self, run: Run, mark: str) -> list[str]:
        score, git = run.value("return"), run.record.git
        result = "no return was logged" if score is None else f"return {show(score)}"
        error = f"; {_plain(run.record.error)}" if run.record.error else ""
        return [
            f"## {_time(run.record.started_at)} · {_plain(run.value('algo'))} on {_plain(run.env)}, "
            f"seed {run.config['seed']} · {_plain(run.value('status'))}\n",
            *self._why_and_change(run, [run.dir]),
            f"* **Result** {result} after {run.value('steps') or 0:,} steps{error}",
            f"{mark}, commit {_plain(run.value('commit'))}{' with changes' if git.dirty else ''}, "
            f"{_plain(git.ref)}",
        ]

    def _about_sweep(self, folder: Path, sweep: SweepRecord, mark: str) -> list[str]:
        dirs = [run_dir for job in sweep.jobs if (run_dir := job.run(folder)) is not None]
        recorded = [path for path in dirs if os.path.isfile(path / paths.RECORD)]  # noqa: PTH113 - never raises
        runs, _ = load_runs(recorded)
        counts = Counter(job.status for job in sweep.jobs)
        results = [", ".join(f"{count} {status}" for status, count in counts.items())]
        results += [each.result for each in find_experiments(runs) if each.counted]
        return [
            f"## {_time(sweep.start_time)} · sweep {_plain(' '.join(sweep.words))} · "
            f"{_plain(sweep.status)}\n",
            *(self._why_and_change(runs[0], dirs) if runs else []),
            f"* **Result** {_plain('; '.join(results))}",
            mark,
        ]

    def _why_and_change(self, run: Run, itself: Sequence[Path]) -> Iterator[str]:
        """The note of a run, and the changes since its baseline or since the previous run of its kind.

        The folders `itself` are no previous runs.
        """
        note, baseline = run.config.get("note"), run.config.get("baseline")
        if note:
            yield f"* **Why** {_plain(note)}"
        try:
            if baseline:
                other = load_run(find_run(escaped(str(baseline)), self.runs_dir, "baseline"))
            else:
                dirs = {path.parent for path in run.dir.parent.glob(f"*/{paths.RECORD}")} - set(itself)
                earlier = [path for path in dirs if _began(path) < _began(run.dir)]
                if not earlier:
                    yield "* **Changed** nothing to compare with: the first of its kind here"
                    return
                other = load_run(max(earlier, key=_began))
            changes = verdict(diff_runs(other, run))
            yield f"* **Changed** against {self._link(other.id, other.dir)}: {_plain(changes)}"
        except ConfigError as error:
            yield f"* **Changed** unknown: {_plain(str(error).partition(chr(10))[0])}"

    def _link(self, text: str, path: Path) -> str:
        """A relative link, which works as long as journal and runs are moved together."""
        target = os.path.relpath(path.absolute(), self.file.absolute().parent)
        return f"[{_plain(text)}]({quote(os.fsencode(target))})"


@cache
def _began(run_dir: Path) -> tuple[str, str]:
    """Start of the run in a folder, in UTC, and the folder's name, which may be the user's."""
    with suppress(ConfigError):
        return RunRecord.read(run_dir).started_at or "", run_dir.name
    return "", run_dir.name


def _end_as_killed(sweep: SweepRecord) -> None:
    """Give a sweep whose process is gone, and the jobs that ran in it, the status that runs have then."""
    sweep.status = KILLED
    for job in sweep.jobs:
        job.status = KILLED if job.status == RUNNING else job.status


def _append(file: FileIO, data: bytes, size: int) -> None:
    """Append to a file of `size` bytes; if that fails or is interrupted, cut the file to its former end."""
    try:
        while data:
            data = data[file.write(data) :]
        os.fsync(file.fileno())
    except BaseException:
        file.truncate(size)
        raise


def _time(text: str | None) -> str:
    return _plain(str(text)[:16].replace("T", " "))


def _plain(text: Any) -> str:
    """Text on one line, without Markdown and HTML. Not for code spans, in which nothing can be escaped."""
    return re.sub(r"([\\`*\[\]<~])", r"\\\1", " ".join(escaped(str(text)).split()))
