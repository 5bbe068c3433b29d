"""The journal of a folder of runs: `journal.md`, with an entry for each run or sweep, added when it ends."""

from __future__ import annotations

import fcntl
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rltemplate.analysis.differences import diff_runs, verdict
from rltemplate.analysis.experiments import find_experiments
from rltemplate.analysis.runs import Run, load_run, load_runs
from rltemplate.config.terminal import escaped
from rltemplate.interfaces import ConfigError
from rltemplate.run import paths
from rltemplate.run.files import flush_folder, make_durable_folder, to_stderr
from rltemplate.run.read import find_run
from rltemplate.run.record import SweepRecord

_HEADER = "# Journal\n\nOne entry per run or sweep, added when it ends. Write wherever you like.\n"


def write_run(run_dir: Path, runs_dir: Path, project: Path) -> None:
    """Add the entry of a run that has ended; an error is printed in a line on standard error."""
    _append(runs_dir, lambda: _run_entry(load_run(run_dir), runs_dir, project))


def write_sweep(folder: Path, record: SweepRecord, runs_dir: Path, project: Path) -> None:
    """Add the entry of a sweep that has ended, unless `logger.journal` is off."""
    _append(runs_dir, lambda: _sweep_entry(folder, record, runs_dir, project))


def _append(runs_dir: Path, entry: Callable[[], list[str]]) -> None:
    path = runs_dir / paths.JOURNAL
    try:
        lines = entry()
        if lines:
            make_durable_folder(path.parent)  # a run with run_dir= leaves no folder here
            with path.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # runs that end together do not mix their entries
                header = "" if os.fstat(file.fileno()).st_size else _HEADER
                file.write("\n".join([header, *lines, ""]).encode())
                file.flush()
                os.fsync(file.fileno())
            if header:
                flush_folder(path.parent)
    except (ConfigError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
        to_stderr(f"no entry in {path}: {reason}")


def _run_entry(run: Run, runs_dir: Path, project: Path) -> list[str]:
    score, git = run.value("return"), run.record.git
    result = "no return was logged" if score is None else f"return {score:,.4g}"
    error = f"; {_plain(run.record.error)}" if run.record.error else ""
    return [
        f"## {_time(run.record.started_at)} · {_plain(run.value('algo'))} on {_plain(run.env)}, "
        f"seed {run.config['seed']} · {run.value('status')}\n",
        *_why_and_change(run, [run.dir], runs_dir, project),
        f"* **Result** {result} after {run.value('steps') or 0:,} steps{error}",
        f"* {_link(run.id, run.dir, runs_dir)}, commit `{run.value('commit')}`"
        f"{' with changes' if git.dirty else ''}, `{git.ref}`",
    ]


def _sweep_entry(folder: Path, record: SweepRecord, runs_dir: Path, project: Path) -> list[str]:
    there = [run_dir for job in record.jobs if (run_dir := job.run(folder)) is not None]
    runs, _ = load_runs(path for path in there if (path / paths.RECORD).exists())
    if not any(run.config.get("logger", {}).get("journal") for run in runs):
        return []
    counts = Counter(job.status for job in record.jobs)
    results = [", ".join(f"{count} {status}" for status, count in counts.items())]
    results += [each.result for each in find_experiments(runs) if each.counted]
    return [
        f"## {_time(record.start_time)} · sweep `{' '.join(record.words)}` · {record.status}\n",
        *_why_and_change(runs[0], there, runs_dir, project),
        f"* **Result** {_plain('; '.join(results))}",
        f"* {_link(folder.name, folder, runs_dir)}",
    ]


def _why_and_change(run: Run, itself: Sequence[Path], runs_dir: Path, project: Path) -> list[str]:
    """The note of a run, and the changes since its baseline or since the previous run of its kind."""
    note, baseline = run.config.get("note"), run.config.get("baseline")
    lines = [f"* **Why** {_plain(note)}"] if note else []
    try:
        if baseline:
            other = load_run(find_run(baseline, runs_dir, "baseline"))
        else:  # folders are named by the time of their start
            found = {path.parent for path in run.dir.parent.glob(f"*/{paths.RECORD}")} - set(itself)
            earlier = [path for path in found if path.name < run.dir.name]
            if not earlier:
                return [*lines, "* **Changed** nothing to compare with: the first of its kind here"]
            other = load_run(max(earlier))
        said = verdict(diff_runs(other, run, project))
        return [*lines, f"* **Changed** against {_link(other.id, other.dir, runs_dir)}: {_plain(said)}"]
    except ConfigError as error:
        return [*lines, f"* **Changed** unknown: {_plain(str(error).partition(chr(10))[0])}"]


def _time(text: str | None) -> str:
    return str(text)[:16].replace("T", " ")


def _link(text: str, path: Path, runs_dir: Path) -> str:
    """A relative link, which works as long as journal and runs are moved together."""
    return f"[{_plain(text)}]({quote(Path(os.path.relpath(path, runs_dir.absolute())).as_posix())})"


def _plain(text: Any) -> str:
    """Text without Markdown in it."""
    return re.sub(r"([\\`*\[\]<])", r"\\\1", " ".join(escaped(str(text)).split()))
