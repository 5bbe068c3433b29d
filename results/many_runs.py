"""How long the tools take that look at many runs: `python results/many_runs.py`.

One short run is trained for real. Its folder is written again for every run, with another id, seed, discount
factor and start, and with the rows that a run of 1M steps logs at the default interval: 500, of which every
25,000 steps one has an evaluation. Five seeds make an experiment. Wall times, so that the machine should have
nothing else to do.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml

from runlab.machine import machine_facts
from runlab.run import paths

PROJECT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
RUNS, STEPS, LOG_EVERY, EVAL_EVERY, SEEDS = 500, 1_000_000, 2_000, 25_000, 5


def main() -> None:
    """Make the runs, measure, and write the table."""
    facts = machine_facts()
    lines = [
        f"# What it takes to look at {RUNS} runs of 1M steps",
        "",
        f"Made with `python results/many_runs.py` on {facts['cpu']}, {facts['usable_cores']} cores.",
        "",
        "| command | wall time | |",
        "| --- | --- | --- |",
    ]
    with tempfile.TemporaryDirectory() as folder:
        runs_dir = Path(folder) / "runs"
        ids = _make_runs(runs_dir)
        page = Path(folder) / "report.html"
        for words in (
            ["runs"],
            ["runs", "algo.gamma=>0.95", "sort=-return", "show=algo.gamma"],
            ["diff", f"a={ids[0]}", f"b={ids[-1]}"],
            ["stats", f"runs={runs_dir}/*/*", "by=algo.gamma"],
            ["report", f"runs={runs_dir}/*/*", f"out={page}"],
        ):
            where = [] if words[0] in ("stats", "report") else [f"runs_dir={runs_dir}"]
            took_s, printed = _timed([*words, *where])
            shown = shlex.join(words).replace(f"{runs_dir}", "runs").replace(f"{page}", "report.html")
            size = f"{page.stat().st_size / 1e6:.1f} MB" if words[0] == "report" else f"{printed:,} lines"
            lines.append(f"| `make {shown}` | {took_s:.1f} s | {size} |")
            print(lines[-1], flush=True)
    Path(__file__).with_name("many-runs.md").write_text("\n".join(lines) + "\n")


def _make_runs(runs_dir: Path) -> list[str]:
    """The folders of the runs; their ids."""
    words = ["algo=ppo", "env=CartPole", "total_env_steps=2000", "eval_every=1000", "video_every=0"]
    command = [sys.executable, str(PROJECT / "scripts" / "train.py"), *words, "logger=none"]
    subprocess.run([*command, f"run_dir={runs_dir / 'first'}"], check=True, env=ENVIRONMENT)
    record = json.loads((runs_dir / "first" / paths.RECORD).read_text())
    subprocess.run(["git", "-C", str(PROJECT), "update-ref", "-d", record["git"]["ref"]], check=True)
    config = yaml.safe_load((runs_dir / "first" / paths.CONFIG).read_text())
    row = json.loads((runs_dir / "first" / paths.METRICS).read_text().splitlines()[-1])
    rng, ids = np.random.default_rng(0), []
    for i in range(RUNS):
        experiment, seed = divmod(i, SEEDS)
        name = f"2026{1 + experiment // 28 % 12:02}{1 + experiment % 28:02}-0930{seed:02}-seed{seed}-{i:06x}"
        ids.append(name)
        folder = runs_dir / "ppo-CartPole" / name
        folder.mkdir(parents=True)
        rows = [_row(row, steps, rng) for steps in range(LOG_EVERY, STEPS + 1, LOG_EVERY)]
        (folder / paths.METRICS).write_text("".join(json.dumps(each) + "\n" for each in rows))
        last = {key: value for key, value in rows[-1].items() if key not in ("env_steps", "wall_time_s")}
        own = {"id": name, "final_metrics": last, "overrides": [f"algo.gamma={0.9 + experiment / 1e3}"]}
        (folder / paths.RECORD).write_text(json.dumps(record | own))
        config |= {
            "seed": seed,
            "total_env_steps": STEPS,
            "algo": config["algo"] | {"gamma": 0.9 + experiment / 1e3},
        }
        (folder / paths.CONFIG).write_text(yaml.safe_dump(config, sort_keys=False))
    return ids


def _row(like: dict[str, float], steps: int, rng: np.random.Generator) -> dict[str, float]:
    """A row with the metrics of a real one and values of its own."""
    values = {key: float(value) * rng.uniform(0.5, 1.5) for key, value in like.items()}
    if steps % EVAL_EVERY:
        values = {key: value for key, value in values.items() if not key.startswith("eval/")}
    return {**values, "env_steps": steps, "wall_time_s": steps / 1e3}


def _timed(words: list[str]) -> tuple[float, int]:
    """How long a command took, and how many lines it printed."""
    command = [sys.executable, "-m", "runlab", *words]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=PROJECT, check=True, env=ENVIRONMENT, capture_output=True, text=True)
    return time.perf_counter() - began, len(done.stdout.splitlines())


if __name__ == "__main__":
    main()
