"""Kill runs at random moments, go on with them, and compare with runs that nobody interrupted.

`python scripts/prove_resume.py [times=25] [works=ppo-CartPole,sac-Hopper] [num_envs=1,4]
[num_workers=0,1] [compile=false,true] [at_once=1] [seed=1] [out=results/resume]`

A case is a work with so many environments, so many processes beside the learner's for them, compiled or not;
there are none with more processes than environments. Its run is killed by
SIGKILL `times` times, at moments drawn between its start and some seconds after its first new iteration, and
continued with `scripts/resume.py` each time; where it gets to its end before, another one is begun. At the
end its trace must be the uninterrupted run's, byte for byte, and so must every tensor of its last checkpoint
and every row of metrics but for times. The inverse, once for each work: a run of another seed must differ.

One line of JSON per case is added to `<out>.jsonl`; cases that are there already are left out. `<out>.md`
shows them as a table. Exit status: 0 all identical, 1 not, 2 bad words.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from rltemplate.config.command_args import (
    Kinds,
    one_of,
    parse_words,
    whole,
)
from rltemplate.determinism.machine import machine_facts
from rltemplate.run import paths
from rltemplate.types import ConfigError

PROJECT = Path(__file__).resolve().parents[1]

# Small iterations and many checkpoints, so that a kill meets all that there is. Humanoid falls over within
# twenty steps unless it may lie on the ground; then its episodes have their full 1,000 steps.
PPO = ["algo=ppo", "eval_every=8000", "eval_episodes=1", "log_every=500"]
SAC = [
    *("algo=sac", "algo.learning_starts=200", "algo.steps_per_iteration=40", "eval_every=800"),
    *("eval_episodes=1", "log_every=200"),
]
LYING = "+env.kwargs.terminate_when_unhealthy=false"
WORKS: dict[str, list[str]] = {
    "ppo-CartPole": [*PPO, "env=CartPole", "checkpoint_every=1000"],
    "ppo-Hopper": [*PPO, "env=Hopper", "checkpoint_every=1000"],
    "ppo-LunarLander": [*PPO, "env=LunarLander", "checkpoint_every=2000"],
    "sac-Pendulum": [*SAC, "env=Pendulum", "checkpoint_every=120"],
    "sac-Hopper": [*SAC, "env=Hopper", "checkpoint_every=120"],
    "sac-Humanoid": [*SAC, "env=Humanoid", LYING, "checkpoint_every=120"],
}
# Environment steps with one environment, and with several; each of several comes to the end of an episode.
LENGTHS = {
    "ppo-CartPole": (12_000, 24_000),
    "ppo-Hopper": (10_000, 20_000),
    "ppo-LunarLander": (16_384, 32_768),
    "sac-Pendulum": (1_200, 1_600),
    "sac-Hopper": (1_200, 1_600),
    "sac-Humanoid": (1_400, 4_800),
}
AFTER_START_S = 3.0  # so long after its first new iteration a run may still be killed
LONGEST_S = 1800.0  # nothing here takes longer


@dataclass(frozen=True, slots=True)
class Case:
    """What is killed."""

    work: str
    num_envs: int
    num_workers: int
    compile: bool

    @property
    def words(self) -> list[str]:
        """Its overrides."""
        several = self.num_envs > 1
        length = LENGTHS[self.work][several]
        if self.compile and self.work.startswith("ppo"):  # or it would be over before it can be killed often
            length *= 4
        fewer = ["algo.updates_per_step=0.25"] if several and self.work == "sac-Humanoid" else []
        return [
            *(*WORKS[self.work], *fewer, f"total_env_steps={length}", "video_every=0"),
            *(f"env.num_envs={self.num_envs}", f"env.num_workers={self.num_workers}"),
            f"compile={str(self.compile).lower()}",
        ]

    def __str__(self) -> str:
        form = "compiled" if self.compile else "eager"
        return f"{self.work}, {self.num_envs} in {self.num_workers} workers, {form}"


def main(argv: list[str]) -> int:
    """Prove it, case by case."""
    kinds: Kinds = {
        "times": whole(1),
        "at_once": whole(1, 64),
        "seed": whole(0),
        **dict.fromkeys(("works", "num_envs", "num_workers", "compile", "out"), str),
    }
    try:
        given = parse_words(argv, kinds)
        times, at_once, seed = (given.get(key, value) for key, value in zip(kinds, (25, 1, 1), strict=False))
        cases = list(_cases(given))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    out = Path(given.get("out", PROJECT / "results" / "resume"))
    done = _read(out.with_suffix(".jsonl"))
    done = [result for result in done if result["identical"]]  # others are tried again
    known = [result["case"] for result in done if result["kills"] >= times]
    writing = threading.Lock()

    def prove(case: Case) -> None:
        if asdict(case) in known:
            print(f"{case}: is in {out.with_suffix('.jsonl')} already", flush=True)
            return
        with tempfile.TemporaryDirectory(prefix="resume-") as folder:
            # Another seed differs in the same way however many environments there are.
            inverse = not any(other["case"]["work"] == case.work for other in done)
            result = _prove(case, times, seed, Path(folder), inverse)
        with writing:
            done.append(result)
            with out.with_suffix(".jsonl").open("a") as file:
                file.write(json.dumps(result) + "\n")
            verdict = "identical" if result["identical"] else f"NOT IDENTICAL: {result['differences']}"
            print(f"{case}: {result['kills']} kills, {result['runs']} runs, {verdict}", flush=True)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(prove, cases))
    out.with_suffix(".md").write_text(_table(done))
    return 0 if all(result["identical"] for result in done) else 1


def _cases(given: dict[str, Any]) -> Iterator[Case]:
    kinds: Kinds = {
        "works": one_of(*WORKS),
        "num_envs": whole(1, 1024),
        "num_workers": whole(0, 1024),
        "compile": one_of("false", "true"),
    }
    defaults = {
        "works": ",".join(WORKS),
        "num_envs": "1,4",
        "num_workers": "0,1",
        "compile": "false,true",
    }
    chosen: dict[str, list[Any]] = {}
    for key, kind in kinds.items():
        chosen[key] = []
        for text in given.get(key, defaults[key]).split(","):
            try:
                chosen[key].append(kind(text))
            except ConfigError as error:
                raise ConfigError(f"{key}={text}: {error}") from error
    orders = (chosen[key] for key in ("compile", "works", "num_envs", "num_workers"))
    for form, work, number, workers in itertools.product(*orders):
        if workers <= number:
            yield Case(work, number, workers, form == "true")


def _prove(case: Case, times: int, seed: int, folder: Path, inverse: bool) -> dict[str, Any]:
    """Kill the runs of one case `times` times in total; `inverse` also sees that another run differs."""
    draw = np.random.default_rng([seed, *str(case).encode()])
    began = time.monotonic()
    straight = folder / "straight"
    startup_s = _train(case, straight, None)
    kills, runs, differences = 0, 0, []
    moments: list[float] = []
    env_steps: list[int] = []  # from which runs went on
    while kills < times:
        runs += 1
        run_dir = folder / f"killed{runs}"
        while True:
            early = draw.uniform() < 0.5  # while it starts, loads and replays; or while it trains
            moment = draw.uniform(0.0, startup_s) if early else startup_s + draw.uniform(0.0, AFTER_START_S)
            killed = _train(case, run_dir, moment if kills < times else None) < 0
            if not killed:
                break
            kills += 1
            moments.append(round(moment, 2))
        record = json.loads((run_dir / paths.RECORD).read_text())
        env_steps += [part["env_steps"] for part in record["resumed"]]
        differences += _differences(straight, run_dir)
        shutil.rmtree(run_dir)
    if inverse:
        other = folder / "other"
        _train(case, other, None, "seed=2")
        if not _differences(straight, other):
            differences.append("a run with another seed compares equal")
    facts = machine_facts()
    return {
        "case": asdict(case),
        "identical": not differences,
        "differences": differences,
        "kills": kills,
        "runs": runs,
        "went_on_after": env_steps,
        "startup_s": round(startup_s, 2),
        "moments_s": moments,
        "took_s": round(time.monotonic() - began),
        "cpu": facts["cpu"],
        "cores": facts["usable_cores"],
        "commit": record["git"]["base_commit"],
    }


def _train(case: Case, run_dir: Path, kill_after_s: float | None, *more: str) -> float:
    """Begin or go on with a run. Seconds to its first new iteration; -1 if it was killed.

    Of a run that was killed before it had a record there is nothing to go on with; it is begun again.
    """
    if not (run_dir / paths.RECORD).exists():
        shutil.rmtree(run_dir, ignore_errors=True)
        words = ["scripts/train.py", *case.words, *more, f"run_dir={run_dir}"]
    else:
        words = ["scripts/resume.py", f"run={run_dir}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    log = run_dir.with_suffix(".log")
    before = _iterations(run_dir)
    began = time.monotonic()
    first_s = 0.0
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=PROJECT, env=environment, stdout=out, stderr=out
        )
    while process.poll() is None:
        now_s = time.monotonic() - began
        if kill_after_s is not None and now_s >= kill_after_s:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return -1.0
        if kill_after_s is None and not first_s and _iterations(run_dir) > before:
            first_s = now_s
        if now_s > LONGEST_S:
            process.kill()
            raise TimeoutError(f"{case}: no end after {now_s:.0f} s")
        left_s = 0.05 if kill_after_s is None else min(0.05, max(0.0, kill_after_s - now_s))
        time.sleep(left_s)
    if process.returncode != 0:
        raise RuntimeError(f"{case}: exit status {process.returncode}\n{log.read_text()[-2000:]}")
    return first_s


def _iterations(run_dir: Path) -> int:
    trace = run_dir / paths.TRACE
    return trace.read_bytes().count(b'\n["iteration"') if trace.exists() else 0


def _differences(straight: Path, killed: Path) -> list[str]:
    """What is not the same in two runs that have ended."""
    found = []
    if (straight / paths.TRACE).read_bytes() != (killed / paths.TRACE).read_bytes():
        found.append(paths.TRACE)
    if _rows(straight) != _rows(killed):
        found.append(paths.METRICS)
    found += _unequal_tensors(straight, killed)
    return found


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (run_dir / paths.METRICS).read_text().splitlines())
    return [{name: value for name, value in row.items() if "time" not in name} for row in rows]


def _unequal_tensors(straight: Path, killed: Path) -> list[str]:
    import torch

    from rltemplate.run.checkpoint import list_checkpoints, load_checkpoint

    def walk(a: Any, b: Any, place: str) -> Iterator[str]:
        if isinstance(a, torch.Tensor):
            if not torch.equal(a, b):
                yield place
        elif isinstance(a, dict):
            for key in {**a, **b}:
                yield from walk(a.get(key), b.get(key), f"{place}/{key}")
        elif isinstance(a, list):
            for number, pair in enumerate(itertools.zip_longest(a, b)):
                yield from walk(*pair, f"{place}/{number}")
        elif a != b:
            yield place

    one, two = (load_checkpoint(list_checkpoints(run_dir)[-1]).state for run_dir in (straight, killed))
    for state in (one, two):
        del state["run"]["training_s"], state["run"]["logger"]  # clocks
    return list(walk(one, two, "checkpoint"))


def _read(path: Path) -> list[dict[str, Any]]:
    results = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for case in (result["case"] for result in results):
        if "async_envs" in case:  # of the time when each environment had a process of its own, or none had
            case["num_workers"] = case["num_envs"] if case.pop("async_envs") else 0
    return results


def _table(results: Sequence[dict[str, Any]]) -> str:
    """What was seen, as Markdown."""
    total = sum(result["kills"] for result in results)
    equal = sum(result["kills"] for result in results if result["identical"])
    machines = sorted({f"{result['cpu']}, {result['cores']} cores" for result in results})
    lines = [
        "# Killed, continued, identical",
        "",
        f"{total:,} kills in {len(results)} cases, {equal:,} of them in cases whose runs all ended identical",
        "with the uninterrupted run: trace byte for byte, every tensor of the last checkpoint, every row of",
        "metrics but for times.",
        "Half of the moments are drawn from the time that a start takes (interpreter, libraries, checkpoint,",
        "replay of episodes), the others from the seconds of training, checkpoints and evaluations after it.",
        f"Made with `make prove-resume` on {'; '.join(machines)}; every kill is in `resume.jsonl`.",
        "",
        "| work | environments | workers | update | kills | after a start's time | runs | identical |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        case = Case(**result["case"])
        lines.append(
            f"| {case.work} | {case.num_envs} | {case.num_workers} "
            f"| {'compiled' if case.compile else 'eager'} | {result['kills']} "
            f"| {sum(moment > result['startup_s'] for moment in result['moments_s'])} | {result['runs']} "
            f"| {'yes' if result['identical'] else 'NO'} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
