"""`make bench [only=peers,time] [works=ppo-Hopper] [seconds=15] [repetitions=3] [cores=N] [out=DIR]`.

    peers      training beside Stable-Baselines3 and SBX: the same work on the same cores
    time       where the time of training goes
    levels     what a level of determinism costs
    observers  what log and trace cost
    startup    from the command to the first environment step
    gpu        training on a GPU beside the CPU; only if it is asked for

Each measurement is made in a process of its own; contenders take turns, so that a change of the machine's
load falls on all of them. Writes bench.json and bench.md to `out`, also when it is interrupted. Exit status:
0 measured, 1 a measurement failed, 2 wrong words.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import tables
from bench.contenders import configuration
from bench.works import GPU, PARTS, WORKS, BenchJob, jobs
from runlab.config import command_args, texts
from runlab.config.command_args import Kind, argument, folder, one_of, whole
from runlab.determinism.levels import prepared
from runlab.errors import ConfigError
from runlab.machine import machine_facts, package_versions
from runlab.run.files import replace_text

Answer = dict[str, Any]
ONE = "--one"  # how a process is told to make one measurement
PACKAGES = ("torch", "numpy", "gymnasium", "mujoco", "ale-py", "stable-baselines3", "sbx-rl", "jax", "flax")


def cores() -> list[int]:
    """Cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def _several(kind: Kind) -> Kind:
    return lambda text: [kind(word) for word in text.split(",")]


@dataclass(frozen=True, kw_only=True)
class Args:
    """Speed, beside Stable-Baselines3 and SBX where they are installed."""

    only: Sequence[str] = argument(_several(one_of(*PARTS, GPU)), PARTS)
    works: Sequence[str] = argument(_several(one_of(*WORKS)), tuple(WORKS))
    seconds: int = argument(whole(1), 15)
    repetitions: int = argument(whole(1), 3)
    cores: int = argument(whole(1, len(cores())), min(2, len(cores())))
    out: Path = argument(folder, Path("results"))


def main(argv: list[str]) -> int:
    """Measure, print and write the tables."""
    if argv[:1] == [ONE] and len(argv) == 2:
        return measure_one(json.loads(argv[1]))
    try:
        args = command_args.parse(argv, Args)
        gpu = _gpu() if GPU in args.only else ""
        command_args.make_folder("out", args.out)
    except ConfigError as error:
        print(f"error: {texts.readable(str(error))}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    measured: list[dict[str, Any]] = []
    failed: list[str] = []
    facts: dict[str, str] = {}
    try:
        for part in args.only:
            facts[part] = _facts(part, argv, gpu if part == GPU else "")
            wanted = [job for job in jobs(part, args.seconds, args.cores) if job.work in args.works]
            measure_part(wanted, args.repetitions, in_process, measured, failed)
    except KeyboardInterrupt:
        failed.append("interrupted")
    text = tables.document(measured, facts)
    everything = json.dumps({"facts": facts, "measurements": measured}, indent=1)
    replace_text(args.out / "bench.json", [everything, "\n"])
    replace_text(args.out / "bench.md", [text])
    print(f"\n{text}")
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    return 1 if failed else 0


def measure_part(
    part: Sequence[BenchJob],
    repetitions: int,
    run: Callable[[BenchJob], Answer],
    measured: list[Answer],
    failed: list[str],
) -> None:
    """Measure all jobs in turns with `run`; add to `measured`, and a line for each failure to `failed`."""
    left_out = {job: line for job in part if (line := missing(job))}
    for line in sorted(set(left_out.values())):
        print(f"{line} is not installed (see bench/requirements.txt): left out", flush=True)
    facts: dict[str, Any] = {}  # of the first contender of each work
    for repetition in range(1, repetitions + 1):
        for job in (job for job in part if job not in left_out):
            name = f"{job.part} {job.work}, {job.contender}"
            print(f"{repetition}/{repetitions}  {name}: ", end="", flush=True)
            answer = run(job)
            if "error" not in answer:
                other = facts.setdefault(job.work, answer.get("facts"))
                if answer.get("facts") != other:
                    answer = {"error": f"does other work than the one before: {answer['facts']}, not {other}"}
            if "error" in answer:
                print("failed", flush=True)
                failed.append(f"{name}: {answer['error']}")
                continue
            measured.append({"job": asdict(job), "repetition": repetition, "result": answer["result"]})
            print(", ".join(f"{key} {value:,.4g}" for key, value in answer["result"].items()), flush=True)


def missing(job: BenchJob) -> str:
    """The library, or the package of the environment, that is not installed; empty if there is none."""
    work = WORKS[job.work]
    needed = {job.library: job.contender} | {each: f"{each} of {work.title}" for each in work.packages}
    return next((name for each, name in needed.items() if importlib.util.find_spec(each) is None), "")


def in_process(job: BenchJob) -> Answer:
    """The answer of a fresh process with pinned threads: `result` and `facts`, or `error`."""
    threads = {f"{name}_NUM_THREADS": str(job.threads) for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")}
    several = "true" if job.threads > 1 else "false"
    xla = f"--xla_cpu_multi_thread_eigen={several} intra_op_parallelism_threads={job.threads}"
    environment = {**os.environ, **threads, "XLA_FLAGS": xla, "JAX_PLATFORMS": "cpu"}
    if job.library == "rltemplate":
        environment = prepared(environment, configuration(job).determinism, job.threads)
    asked = json.dumps({"job": asdict(job), "begun": time.time()})
    command = [sys.executable, "-m", "bench", ONE, asked]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}


def measure_one(asked: Mapping[str, Any]) -> int:
    """Make the measurement of this process and print it as JSON."""
    from bench.measure import measure
    from bench.works import MeasurementError

    job = BenchJob(**asked["job"])
    os.sched_setaffinity(0, cores()[: job.cores])  # before libraries choose their threads
    try:
        answer = measure(job, asked["begun"])
    except (ConfigError, MeasurementError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))
    return 0


def _gpu() -> str:
    """The name of the GPU; ConfigError where there is none."""
    import torch

    from runlab.determinism.switches import resolve_device

    return f"{torch.cuda.get_device_name(resolve_device('cuda'))}, "


def _facts(part: str, argv: list[str], gpu: str) -> str:
    machine, installed = machine_facts(), package_versions()
    versions = ", ".join(f"{name} {installed[name]}" for name in PACKAGES if name in installed)
    return (
        f"Part {part} of `{' '.join(['make bench', *argv])}` on {machine['cpu']}, {machine['usable_cores']} "
        f"usable cores, load average {os.getloadavg()[0]:.1f} when it began; {gpu}"
        f"python {machine['python']}, {versions}."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
