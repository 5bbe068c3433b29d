"""The journal of a folder of runs: `journal.md`, one entry per run or sweep, for people to read and to edit.

An entry is written when a run or sweep ends: what changed against its baseline, or else against the run
before it, why it was made (`note=...`), what came of it, and where everything lies. Entries are added at the
end, under a lock, so that runs that end together do not lose each other's.

The file belongs to whoever edits it. Everything outside the entries stays as it is, and so does an entry in
which a letter was changed: when its run goes on and ends again, what is new is added at the end instead.
An entry is found again by the two comments around it, of which the first holds a digest of what was written.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import xxhash

from rltemplate.analysis import diff, stats, targets
from rltemplate.analysis.baseline import difference, find_baseline
from rltemplate.analysis.runs import Run, experiment_of, load_run, load_runs
from rltemplate.run import paths
from rltemplate.run.lines import replace_text, to_stderr
from rltemplate.types import ConfigError

_HEADER = """\
# Journal

One entry per run or sweep, added when it ends. Write wherever you like: what you change stays.
"""
_ENTRY = re.compile(
    r"<!-- entry (?P<id>[A-Za-z0-9._-]+) (?P<digest>[0-9a-f]{16}) -->\n(?P<text>.*?)<!-- end (?P=id) -->\n",
    re.DOTALL,
)
# Of a sweep with many jobs, so many are listed.
_LISTED = 100
# Earlier runs of the same algorithm and environment among which seeds of the same experiment are looked for.
_LOOKED_AT = 200
# Characters that would make something else of a text in Markdown.
_SPECIAL = re.compile(r"([\\`*\[\]<])")


def write_run(run_dir: Path, runs_dir: Path, project: Path) -> None:
    """Add the entry of a run that has ended. What is in the way of that is said, and hurts nobody."""
    _write(runs_dir, lambda: _run_entry(load_run(run_dir), runs_dir, project))


def write_sweep(folder: Path, index: Mapping[str, Any], runs_dir: Path, project: Path) -> None:
    """Add the entry of a sweep that has ended, with its index, unless its runs were to have none."""
    _write(runs_dir, lambda: _sweep_entry(folder, index, runs_dir, project))


def _write(runs_dir: Path, entry: Callable[[], tuple[str, str] | None]) -> None:
    path = runs_dir / paths.JOURNAL
    try:
        made = entry()
        if made is not None:
            put(path, *made)
    except (ConfigError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
        to_stderr(f"no entry in {path}: {reason}")


# --- The file --------------------------------------------------------------------------------------------


def put(path: Path, name: str, text: str) -> None:
    """Add the entry `name`, or replace it if it is as it was written. Raises OSError."""
    block = _block(name, text)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The lock is a file of its own: the journal itself may be replaced at any time, by us or by an editor.
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            before = path.read_bytes()
        except FileNotFoundError:
            before = b""
        own = _untouched(before, name)
        if own is not None:
            # Through a link to what it leads to, so that a link stays a link.
            replace_text(path.resolve(), [own.string[: own.start()], block, own.string[own.end() :]])
            return
        gap = "" if before.endswith(b"\n\n") else "\n" if before.endswith(b"\n") else "\n\n"
        with path.open("ab") as file:  # added in place: an editor that has the file open can tell
            file.write(((gap if before else f"{_HEADER}\n") + block).encode())
            file.flush()
            os.fsync(file.fileno())


def _untouched(journal: bytes, name: str) -> re.Match[str] | None:
    """The last entry of that name, if nobody has changed it since it was written."""
    try:
        text = journal.decode()
    except UnicodeDecodeError:  # somebody's editor has its own encoding
        return None
    own = [match for match in _ENTRY.finditer(text) if match["id"] == name]
    return own[-1] if own and own[-1]["digest"] == _digest(own[-1]["text"]) else None


def _block(name: str, text: str) -> str:
    return f"<!-- entry {name} {_digest(text)} -->\n{text}<!-- end {name} -->\n"


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


# --- What an entry says ----------------------------------------------------------------------------------


def _run_entry(run: Run, runs_dir: Path, project: Path) -> tuple[str, str]:
    config = run.config
    started = f"{run.record.get('started_at')}"[:16].replace("T", " ")
    lines = [
        f"## {started} · {_plain(run.value('algo'))} on {_plain(run.env)}, seed {config['seed']} · "
        f"{run.record.get('status')}",
        "",
        *_why(config),
        _changes(run, config.get("baseline"), runs_dir, project, {run.id}),
        f"* **Result** {_result(run)}",
        *_seeds_so_far(run),
        *_problem(run),
        f"* {', '.join(_links(run, runs_dir))}",
    ]
    return run.id, "\n".join(lines) + "\n"


def _counted(statuses: Mapping[str, int]) -> str:
    """How many are what, as in `7 finished, 1 failed`."""
    return ", ".join(f"{number} {status}" for status, number in statuses.items())


def _sweep_entry(
    folder: Path, index: Mapping[str, Any], runs_dir: Path, project: Path
) -> tuple[str, str] | None:
    jobs: Sequence[Mapping[str, Any]] = index["jobs"]
    run_dirs = [run_dir for job in jobs if (run_dir := paths.job_run(folder, job)) is not None]
    runs, _ = load_runs(run_dir for run_dir in run_dirs if (run_dir / paths.RECORD).exists())
    if not any(run.config["logger"]["journal"] for run in runs):
        return None
    started = str(index["start_time"])[:16].replace("T", " ")
    counted = _counted(Counter(str(job["status"]) for job in jobs))
    lines = [
        f"## {started} · sweep {_code(' '.join(index['words']))} · {index['status']}",
        "",
        f"* **Jobs** {counted or 'none'} ({_link('index', folder / paths.SWEEP_INDEX, runs_dir)})",
    ]
    first = runs[0].config
    own = {run.id for run in runs}
    lines += [*_why(first), _changes(runs[0], first.get("baseline"), runs_dir, project, own)]
    ended = [run for run in runs if run.record.get("status") == "finished"]
    groups = _by_configuration(ended, jobs)
    lines += [f"* **Result** {_group_result(words, members)}" for words, members in groups.items()]
    lines += _cautions(groups.values())
    shown = runs[:_LISTED]
    lines += [f"* {run.value('status')}: {', '.join(_links(run, runs_dir))}" for run in shown]
    if len(runs) > len(shown):
        lines.append(f"* and {len(runs) - len(shown):,} more")
    return str(index["id"]), "\n".join(lines) + "\n"


def _why(config: Mapping[str, Any]) -> list[str]:
    note = config.get("note")
    return [f"* **Why** {_plain(' '.join(str(note).split()))}"] if note else []


def _changes(run: Run, baseline: str | None, runs_dir: Path, project: Path, own: set[str]) -> str:
    """What is different from the baseline, or from the run of the same algorithm and environment before."""
    try:
        other = _before(run, own) if baseline is None else find_baseline(baseline, runs_dir)
    except ConfigError as error:
        return f"* **Changed** unknown: {_plain(str(error).partition(chr(10))[0])}"
    if other is None:
        return "* **Changed** nothing to compare with: the first of its kind here"
    what = "the baseline" if baseline is not None else "the run before"
    where = _link(other.id, other.dir, runs_dir)
    return f"* **Changed** against {what} {where}: {_told(difference(project, other, run))}"


def _told(found: diff.Difference) -> str:
    said = _code(diff.describe(found.factors)) if found.factors else "nothing"
    if found.seeds is not None:
        said += " but the seed" if not found.factors else " (and the seed)"
    return said if found.changed_files is not None else f"{said}; whether the code did cannot be told"


def _before(run: Run, own: set[str]) -> Run | None:
    """The last run of the same algorithm and environment that had begun before this one.

    Of a sweep the one with the same seed, if it has one.
    """
    there = sorted((path.parent for path in run.dir.parent.glob(f"*/{paths.RECORD}")), reverse=True)
    begun = str(run.record.get("started_at"))
    last: Run | None = None
    for folder in there:
        if folder == run.dir or folder.name in own:
            continue
        others, _ = load_runs([folder])
        if not others or others[0].id in own or str(others[0].record.get("started_at")) >= begun:
            continue
        other = others[0]
        if last is not None and other.value("sweep") != last.value("sweep"):
            break
        if last is None or other.value("seed") == run.value("seed"):
            last = other
        if last.value("sweep") is None or last.value("seed") == run.value("seed"):
            break
    return last


def _result(run: Run) -> str:
    value, steps = run.value("return"), run.value("steps")
    if value is None:
        return "no return was logged"
    name = "eval/return" if "eval/return" in (run.record.get("final_metrics") or {}) else "episode/return"
    said = f"{name} {value:,.4g} after {steps or 0:,} steps"
    return said if name != "eval/return" else f"{said}{_standing(run, value)}"


def _seeds_so_far(run: Run) -> list[str]:
    """What all seeds of this experiment say together; nothing while there is only this one."""
    folders = sorted((path.parent for path in run.dir.parent.glob(f"*/{paths.RECORD}")), reverse=True)
    by_seed: dict[Any, Run] = {}
    code, experiment = run.value("git.tree"), experiment_of(run.config)
    for other in load_runs(folders[:_LOOKED_AT])[0]:  # of two with one seed the newer
        if (
            other.record.get("status") == "finished"
            and other.value("git.tree") == code
            and experiment_of(other.config) == experiment
        ):
            by_seed.setdefault(other.value("seed"), other)
    if len(by_seed) < 2 or run.id not in {each.id for each in by_seed.values()}:
        return []
    runs = [by_seed[seed] for seed in sorted(by_seed)]
    return [f"* **Seeds so far** {_group_result('', runs)}", *_cautions([runs])]


def _standing(run: Run, value: float) -> str:
    """Where a return stands between the random policy and published ones, if anything is known."""
    found = targets.standing_of(run.config, int(run.value("steps") or 0), value)
    return "" if found is None else f"; {found.text.partition(': ')[2]}"


def _group_result(words: str, runs: Sequence[Run]) -> str:
    returns = [float(run.value("return")) for run in runs if run.value("return") is not None]
    what = f"{_code(words)}: " if words else ""
    if not returns:
        return f"{what}no return was logged"
    each = ", ".join(f"{value:,.4g}" for value in returns[:_LISTED])
    if len(returns) == 1:
        return f"{what}{each} (1 seed){_standing(runs[0], returns[0])}"
    found = stats.interval(returns, "iqm")
    return (
        f"{what}interquartile mean {found.value:,.4g}, 95 % interval {found.low:,.4g} to {found.high:,.4g} "
        f"({len(returns)} seeds: {each}){_standing(runs[0], found.value)}"
    )


def _cautions(groups: Collection[Sequence[Run]]) -> list[str]:
    """What so few seeds cannot tell, once."""
    said = (text for members in groups for text in stats.caution(len(members)))
    return [f"* **Caution** {text}" for text in dict.fromkeys(said)]


def _by_configuration(runs: Sequence[Run], jobs: Sequence[Mapping[str, Any]]) -> dict[str, list[Run]]:
    """Runs by what the words of their jobs have beside the seed and what all jobs share."""
    shared = set[str]().union(*(job["overrides"] for job in jobs))
    shared.intersection_update(*(job["overrides"] for job in jobs))
    words = {
        job["run_id"]: " ".join(
            word for word in job["overrides"] if word not in shared and not word.startswith("seed=")
        )
        for job in jobs
    }
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(words.get(run.id, ""), []).append(run)
    return groups


def _problem(run: Run) -> list[str]:
    error, status = run.record.get("error"), run.record.get("status")
    if error:
        return [f"* **Error** {_plain(str(error))}"]
    if status == "interrupted":
        total = run.config["total_env_steps"]
        return [f"* **Interrupted** before its {total:,} steps; `make resume run={run.id}` goes on"]
    return []


def _links(run: Run, runs_dir: Path) -> list[str]:
    git = run.record.get("git") or {}
    videos = sorted((run.dir / paths.VIDEOS).glob("step_*.mp4"), key=lambda path: int(path.stem[5:]))
    links = [_link(f"run {run.id}", run.dir, runs_dir)]
    links += [_link("video", videos[-1], runs_dir)] if videos else []
    if git.get("base_commit"):
        changes = " with changes" if git.get("dirty") else ""
        links.append(f"commit {_code(git['base_commit'][:10])}{changes}")
    return [*links, _code(git["ref"])] if git.get("ref") else [*links, "code not recorded"]


def _link(text: str, path: Path, runs_dir: Path) -> str:
    """A link that works as long as journal and runs are moved together."""
    there = Path(os.path.relpath(path, runs_dir.absolute())).as_posix()
    return f"[{_plain(text)}]({quote(there)})"


def _code(text: str) -> str:
    return f"`{text.replace('`', chr(39))}`"


def _plain(text: Any) -> str:
    """Prose as prose, whatever it holds."""
    return _SPECIAL.sub(r"\\\1", str(text))
