"""The runs of the table of results, and a policy for each row. table_page.py makes the page from them.

    python results/table.py add 'RUNS'    gather finished runs (a pattern of folders) in runs.csv and
                                          evaluations.csv, and a policy for each row
    python results/table.py check 'RUNS'  say whether runs have the traces of those in runs.csv

A run of the same algorithm, environment, number of steps and seed takes the place of an earlier one.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from runlab.analysis.runs import Run, load_run
from runlab.config.affects_results import code_rule
from runlab.config.auto import AUTO_KEYS
from runlab.config.command_args import exit_status
from runlab.errors import ConfigError
from runlab.rerun.policy_file import export_policy, run_or_policy
from runlab.run.checkpoint import newest_checkpoint
from runlab.run.git.changes import files_between
from runlab.run.git.snapshot import GitRecord
from runlab.run.read import find_run_dirs
from runlab.run.used_code import files_of

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "results" / "table"
POLICIES = ROOT / "results" / "policies"
ENVS = ["CartPole", "Acrobot", "Pendulum", "LunarLander", "LunarLanderContinuous", "BipedalWalker"]
ENVS += ["InvertedPendulum", "InvertedDoublePendulum", "Reacher", "Pusher", "Swimmer"]
ENVS += ["Hopper", "Walker2d", "HalfCheetah", "Ant", "Humanoid", "Catch", "Pong"]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished run; `digest` is that of its trace, which the same words give again at the same commit."""

    algo: str
    env: str
    seed: int
    env_steps: int
    eval_return: float  # mean over the episodes of the last evaluation
    minutes: float  # wall-clock, beside other work on the machine
    steps_per_second: int
    run: str
    commit: str
    words: str
    digest: str
    cpu: str


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The mean return of the deterministic policy after so many steps."""

    algo: str
    env: str
    seed: int
    env_steps: int
    eval_return: float
    eval_length: float
    run: str


def main(words: Sequence[str]) -> int:
    """Do as the first word says."""
    if len(words) != 2 or words[0] not in ("add", "check"):
        print(__doc__, file=sys.stderr)
        return 2
    runs = [load_run(folder) for folder in find_run_dirs(words[1])]
    return add(runs) if words[0] == "add" else check(runs)


def add(runs: Iterable[Run]) -> int:
    """Gather finished runs into the files, and the policy nearest to the median if it is of these runs; 0."""
    finished = {key(run): run for run in runs if run.value("status") == "finished"}
    for run in finished.values():
        if run.env not in ENVS or "eval/return" not in run.last_row:
            raise ConfigError(f"{run.id}: no environment of the table, or no evaluation at its end")
        if changed := changes(run):
            raise ConfigError(f"{run.id}: its code had changes that were not committed: {', '.join(changed)}")
    kept = [each for each in read(Trained) if place(each) not in finished]
    came = [trained(run) for run in finished.values()]
    known = {each.run for each in kept}
    rows = [each for each in read(Evaluation) if each.run in known]
    for run in finished.values():
        rows += evaluations(run)
    before, table = cells(kept), cells([*kept, *came])
    names = {row: f"{row[0]}-{row_label(table, row)}" for row in table}
    renamed = any(row_label(table, row) != row_label(before, row) for row in before)
    if renamed or len({*names.values()}) < len(names):
        raise ConfigError("runs of fewer steps than a row has, or nearly as many, would take its name")
    save(Trained, [*kept, *came])
    save(Evaluation, rows)
    for row in sorted({name[:3] for name in finished}):
        file = POLICIES / f"{names[row]}.zip"
        here = {each.seed for each in came if place(each)[:3] == row}
        chosen = nearest_to_median(table[row], here | {exported_seed(file)})
        if chosen in here:
            export_policy(finished[*row, chosen].dir, file)
    print(f"{len(came)} runs added, {len(kept) + len(came)} in all")
    return 0


def changes(run: Run) -> list[str]:
    """The code of a run that was not committed."""
    git = run.record.git
    files = files_between(run.dir, git, GitRecord(commit=git.base_commit)) if git.dirty else []
    if files is None:
        return ["the recorded code is not in the repository of the run"]
    return [*filter(code_rule(files_of(run.record.used)), files)]


def nearest_to_median(row: Sequence[Trained], seeds: Collection[int | None]) -> int:
    """The seed among `seeds` whose return is nearest to the median of all runs of the row."""
    middle = median(run.eval_return for run in row)
    return min((run for run in row if run.seed in seeds), key=lambda run: abs(run.eval_return - middle)).seed


def exported_seed(file: Path) -> int | None:
    """The seed of the run that made a policy file; None if there is no such file."""
    if not file.exists():
        return None
    with run_or_policy(None, str(file), ROOT) as folder:
        found = newest_checkpoint(folder, print, experience=False)
    return int(found.config["seed"]) if found else None


def check(runs: Iterable[Run]) -> int:
    """Compare the traces of runs with those of runs.csv; 1 if one differs."""
    known, differ = {place(each): each.digest for each in read(Trained)}, False
    for run in runs:
        same = key(run) in known and known[key(run)] == run.value("trace.digest")
        print(f"{run.id}: {'identical' if same else 'not the run of the table'}")
        differ |= not same
    return int(differ)


def key(run: Run) -> tuple[str, str, int, int]:
    """The place of a run in the table: its algorithm, environment, number of steps, and seed."""
    return str(run.value("algo")), run.env, int(run.last_row.get("env_steps", 0)), int(run.value("seed"))


def place(run: Trained) -> tuple[str, str, int, int]:
    """The same of a run that is in the table."""
    return run.algo, run.env, run.env_steps, run.seed


def trained(run: Run) -> Trained:
    """The facts of a run that the table has."""
    algo, env, steps, seed = key(run)
    record, seconds = run.record, float(run.record.duration_s or 0.0)
    left_out = ("runs_dir", "run_dir", *AUTO_KEYS)
    words = [word for word in record.overrides if word.partition("=")[0] not in left_out]
    # A run alone may get another value for `auto` than one of a sweep.
    values = {name: run.value(name) for name in AUTO_KEYS}
    words += [f"{name}={str(value).lower()}" for name, value in values.items() if value is not None]
    return Trained(
        algo=algo,
        env=env,
        seed=seed,
        env_steps=steps,
        eval_return=round(run.last_row["eval/return"], 3),
        minutes=round(seconds / 60.0, 1),
        steps_per_second=round(steps / seconds),
        run=run.id,
        commit=str(record.git.base_commit)[:12],
        words=" ".join(words),
        digest=str(run.value("trace.digest")),
        cpu=" ".join(str(run.value("machine.cpu")).split()),
    )


def evaluations(run: Run) -> Iterator[Evaluation]:
    """All evaluations of a run."""
    algo, env, _, seed = key(run)
    for row in run.rows:
        if "eval/return" in row:
            yield Evaluation(
                algo=algo,
                env=env,
                seed=seed,
                env_steps=int(row["env_steps"]),
                eval_return=round(row["eval/return"], 3),
                eval_length=round(row["eval/length"], 3),
                run=run.id,
            )


def file_of(kind: type) -> Path:
    """The CSV file of a kind of rows."""
    return FOLDER / {Trained: "runs.csv", Evaluation: "evaluations.csv"}[kind]


def read(kind: type) -> list[Any]:
    """The rows of a file; none if it is not there yet."""
    if not file_of(kind).exists():
        return []
    with file_of(kind).open(newline="", encoding="utf-8") as file:
        return [msgspec.convert(row, kind, strict=False) for row in csv.DictReader(file)]


def save(kind: type, rows: Iterable[Any]) -> None:
    """Write all rows of a file, by algorithm, environment, seed and steps."""
    ordered = sorted(rows, key=lambda row: (row.algo, ENVS.index(row.env), row.seed, row.run, row.env_steps))
    FOLDER.mkdir(exist_ok=True)
    with file_of(kind).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(kind)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, ordered))


def cells(runs: Iterable[Trained]) -> dict[tuple[str, str, int], list[Trained]]:
    """The runs of each row of the table, by algorithm, environment and number of steps, in this order."""
    found: dict[tuple[str, str, int], list[Trained]] = {}
    for run in sorted(runs, key=lambda run: (run.algo, ENVS.index(run.env), run.env_steps, run.seed)):
        found.setdefault(place(run)[:3], []).append(run)
    return found


def row_label(table: Collection[tuple[str, str, int]], row: tuple[str, str, int]) -> str:
    """`Ant`, or `Ant-3M` if the table has another row of the algorithm with fewer steps."""
    algo, env, steps = row
    fewer = any(each[:2] == (algo, env) and each[2] < steps for each in table)
    length = f"{steps / 1e6:.3g}M" if steps >= 1_000_000 else f"{steps / 1e3:.3g}k"
    return f"{env}-{length}" if fewer else env


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
