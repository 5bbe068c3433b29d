"""The films of the README: `python results/films.py` trains a policy for each and films it, in half an hour.

The runs and their refs are in a clone of the present commit that is removed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from runlab.run.video.film import animate

PROJECT = Path(__file__).resolve().parents[1]
WORKS = ("CartPole", "LunarLander", "Hopper", "HalfCheetah")  # PPO with its recipe, seed 1
QUIET = ["video_every=0", "logger=none", "num_threads=1"]
WIDTH, SECONDS = 240, 6.0
HEAD = """\
# The films of the README

Made by `python results/films.py` with the code of commit {}: PPO with its recipe and seed 1, the
deterministic policy of the last checkpoint, the first {:.0f} seconds of an episode.

| environment | steps | mean return of the last evaluation | kB |
| --- | --- | --- | --- |
"""


def main() -> None:
    """Train, film, and write the table."""
    folder = Path(__file__).parent / "films"
    folder.mkdir(exist_ok=True)
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=PROJECT, text=True).strip()
    with tempfile.TemporaryDirectory() as scratch:
        clone = Path(scratch) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(PROJECT), str(clone)], check=True)
        rows = [_row(env, clone, folder) for env in WORKS]
    (folder / "films.md").write_text(HEAD.format(commit, SECONDS) + "".join(rows))


def _row(env: str, clone: Path, folder: Path) -> str:
    run_dir, film = clone.parent / env, clone.parent / f"{env}.mp4"
    words = ["algo=ppo", f"env={env}", f"run_dir={run_dir}", *QUIET]
    subprocess.run([sys.executable, str(clone / "scripts" / "train.py"), *words], check=True)
    command = [sys.executable, "-m", "runlab", "film", f"run={run_dir}", f"out={film}"]
    subprocess.run(command, cwd=clone, check=True)
    path = folder / f"{env}.webp"
    animate(film, path, WIDTH, SECONDS)
    metrics = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    size = path.stat().st_size / 1000
    return f"| {env} | {metrics['env_steps']:,} | {metrics['eval/return']:,.1f} | {size:,.0f} |\n"


if __name__ == "__main__":
    main()
