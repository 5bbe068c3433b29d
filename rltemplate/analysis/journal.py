"""The journal of a folder of runs: `journal.md`, with an entry for each run or sweep, added when it ends."""

from __future__ import annotations

import fcntl
import os
import re
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rltemplate.analysis import diff
from rltemplate.analysis.baseline import find_baseline
from rltemplate.analysis.report.experiments import Experiment, find_experiments
from rltemplate.analysis.runs import Run, load_run, load_runs
from rltemplate.run import paths
from rltemplate.run.lines import to_stderr
from rltemplate.run.sweep_record import SweepRecord
from rltemplate.types import ConfigError

_HEADER = "# Journal\n\nOne entry per run or sweep, added when it ends. Write wherever you like.\n"
_LOOKED_AT = 200  # newest runs of the same algorithm and environment


def write_run(run_dir: Path, runs_dir: Path, project: Path) -> None:
    """Add the entry of a run that has ended; an obstacle costs a line on standard error."""
    _append(runs_dir, lambda: _run_entry(load_run(run_dir), runs_dir, project))


def write_sweep(folder: Path, record: SweepRecord, runs_dir: Path, project: Path) -> None:
    """Add the entry of a sweep that has ended, unless its runs were to have none."""
    _append(runs_dir, lambda: _sweep_entry(folder, record, runs_dir, project))


def _append(runs_dir: Path, entry: Callable[[], list[str]]) -> None:
    path = runs_dir / paths.JOURNAL
    try:
        lines = entry()
        if lines:
            with path.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # runs that end together do not mix their entries
                header = "" if os.fstat(file.fileno()).st_size else _HEADER
                file.write("\n".join([header, *lines, ""]).encode())
    except (ConfigError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
        to_stderr(f"no entry in {path}: {reason}")


def _run_entry(run: Run, runs_dir: Path, project: Path) -> list[str]:
    status, value = run.value("status"), run.value("return")
    newest = sorted((path.parent for path in run.dir.parent.glob(f"*/{paths.RECORD}")), reverse=True)
    others = [other for other in load_runs(newest[:_LOOKED_AT])[0] if other.id != run.id]
    seeds = [other for other in others if other.value("git.tree") == run.value("git.tree")]
    found = next(each for each in find_experiments([*seeds, run], _same_code) if run in each.runs)
    result = "no return was logged" if value is None else f"return {value:,.4g}"
    standing = found.group.standing if found.group.runs == [run] else None
    return [
        f"## {_time(run.value('started'))} · {_plain(run.value('algo'))} on {_plain(run.env)}, "
        f"seed {run.config['seed']} · {status}\n",
        *_why_and_change(run, others, runs_dir, project),
        f"* **Result** {result} after {run.value('steps') or 0:,} steps"
        f"{f'; {standing.summary}' if standing else ''}",
        *(_outcome(found, "Seeds so far") if len(found.group.runs) > 1 else []),
        *([f"* **Error** {_plain(run.value('error'))}"] if run.value("error") else []),
        *([f"* **Next** `make resume run={run.id}` goes on"] if status == "interrupted" else []),
        f"* {_link(run.id, run.dir, runs_dir)}, commit `{run.value('commit')}`"
        f"{' with changes' if run.value('dirty') else ''}, `{run.value('git.ref')}`",
    ]


def _sweep_entry(folder: Path, record: SweepRecord, runs_dir: Path, project: Path) -> list[str]:
    there = [run_dir for job in record.jobs if (run_dir := job.run(folder)) is not None]
    runs, _ = load_runs(path for path in there if (path / paths.RECORD).exists())
    if not any(run.config["logger"]["journal"] for run in runs):
        return []
    before = sorted((path.parent for path in runs[0].dir.parent.glob(f"*/{paths.RECORD}")), reverse=True)
    others = load_runs(path for path in before[:_LOOKED_AT] if path not in there)[0]
    counts = Counter(job.status for job in record.jobs)
    return [
        f"## {_time(record.start_time)} · sweep `{' '.join(record.words)}` · {record.status}\n",
        f"* **Jobs** {', '.join(f'{count} {status}' for status, count in counts.items())}, "
        f"{_link(folder.name, folder, runs_dir)}",
        *_why_and_change(runs[0], others, runs_dir, project),
        *(line for each in find_experiments(runs, _same_code) for line in _outcome(each, each.title)),
    ]


def _why_and_change(run: Run, others: Collection[Run], runs_dir: Path, project: Path) -> list[str]:
    """The note of a run, and its change against its baseline or the run that began before it."""
    note, baseline = run.config.get("note"), run.config.get("baseline")
    lines = [f"* **Why** {_plain(note)}"] if note else []
    earlier = [other for other in others if str(other.value("started")) < str(run.value("started"))]
    try:
        if baseline:
            other = find_baseline(baseline, runs_dir)
        elif earlier:
            other = max(earlier, key=lambda each: str(each.value("started")))
        else:
            return [*lines, "* **Changed** nothing to compare with: the first of its kind here"]
        said = diff.verdict(diff.diff_runs(other, run, project))
        return [*lines, f"* **Changed** against {_link(other.id, other.dir, runs_dir)}: {_plain(said)}"]
    except ConfigError as error:
        return [*lines, f"* **Changed** unknown: {_plain(str(error).partition(chr(10))[0])}"]


def _outcome(experiment: Experiment, name: str) -> list[str]:
    """The IQM of an experiment with its returns, its standing and cautions."""
    group = experiment.group
    if not group.runs:
        return [f"* **{_plain(name)}** no run has finished with a return"]
    returns = ", ".join(f"{value:,.4g}" for value in group.returns[:100])
    standing = f"; {group.standing.summary}" if group.standing else ""
    seeds = f"{len(group.runs)} seed{'s' * (len(group.runs) > 1)}"
    lines = [f"* **{_plain(name)}** IQM {group.interval()}, {seeds}: {returns}{standing}"]
    return [*lines, *(f"* **Caution** {text}" for text in experiment.cautions())]


def _same_code(a: Run, b: Run) -> list[str]:
    return []


def _time(text: str) -> str:
    return str(text)[:16].replace("T", " ")


def _link(text: str, path: Path, runs_dir: Path) -> str:
    """A link that works as long as journal and runs are moved together."""
    return f"[{_plain(text)}]({quote(Path(os.path.relpath(path, runs_dir.absolute())).as_posix())})"


def _plain(text: Any) -> str:
    """Text without Markdown in it."""
    return re.sub(r"([\\`*\[\]<])", r"\\\1", str(text))
