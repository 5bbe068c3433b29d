"""What is measured, by part: a list of jobs for each, and in a line each what is left out and why."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rltemplate.bench.contenders import configuration
from rltemplate.bench.works import WORKS, Job
from rltemplate.types import ConfigError

SB3, SBX = "Stable-Baselines3", "SBX"
EAGER, COMPILED = "rltemplate, eager", "rltemplate, compile=true"
WORKER = f"{COMPILED} env.num_workers=1"
FORMS = {
    EAGER: (),
    COMPILED: ("compile=true",),
    WORKER: ("compile=true", "env.num_workers=1"),
}
PEERS = {SB3: "stable_baselines3", SBX: "sbx"}
# Packages that the speed of a contender hangs on.
PACKAGES = (
    *("torch", "numpy", "gymnasium", "mujoco", "stable-baselines3", "sbx-rl", "jax", "jaxlib", "flax"),
    "optax",
)
EAGER_LEVELS = ("fast", "repeat", "invariant", "profile")
COMPILED_LEVELS = ("fast", "repeat")
NUM_ENVS = (1, 2, 4, 8, 16, 32)
FULL_BUFFER = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured."""

    seconds: float
    repetitions: int
    cores: tuple[int, ...]
    device: str
    quick: bool


@dataclass(slots=True)
class Part:
    """Jobs in the order in which they take turns; all of them once, then again, `repetitions` times."""

    name: str
    repetitions: int
    jobs: list[Job] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def affordable_cores() -> list[int]:
    """Cores that this process may use, one of each physical core before any second one."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    taken: set[str] = set()
    first: list[int] = []
    second: list[int] = []
    for core in sorted(os.sched_getaffinity(0)):
        siblings = siblings_of(core)
        (second if siblings in taken else first).append(core)
        taken.add(siblings)
    return [*first, *second]


def siblings_of(core: int) -> str:
    """The logical cores that share a physical one with this, as Linux writes them: `0,4`."""
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(core)


def plan(names: Sequence[str], sizes: Sizes) -> list[Part]:
    """The parts of these names."""
    return [PARTS[name](sizes) for name in names]


def peers(sizes: Sizes) -> Part:
    """Training against others: the same work, the same cores."""
    part = Part("peers", sizes.repetitions)
    works = ["ppo-Hopper", "sac-Hopper"] if sizes.quick else list(WORKS)
    for cores in sizes.cores:
        # On one core a few works are enough, so that the whole fits into an evening.
        few = [name for name in works if name in ("ppo-Hopper", "ppo-CartPole", "sac-Hopper")]
        for name in works if cores > 1 or len(sizes.cores) == 1 else few:
            part.jobs += _peer_jobs(part, name, cores, sizes)
    part.left_out = list(dict.fromkeys(part.left_out))
    return part


def _peer_jobs(part: Part, name: str, cores: int, sizes: Sizes) -> Iterator[Job]:
    """Who takes part in a work. Two threads serve large batches; small ones they only slow down."""
    threads = cores if WORKS[name].algo == "sac" else 1

    def job(contender: str, library: str = "rltemplate") -> Job:
        return Job(
            *(part.name, "rate", name, contender, library, cores, threads, sizes.seconds, sizes.device),
            () if contender in PEERS else FORMS[contender],
        )

    for contender, library in PEERS.items():
        if not _installed(library):
            part.left_out.append(
                f"{contender} is not installed (.venv/bin/pip install -e '.[bench]'): left out"
            )
        elif library == "sbx" and sizes.device == "cuda" and not _jax_has_gpu():
            part.left_out.append(f"{contender}: this JAX has no GPU support: left out")
        else:
            yield job(contender, library)
    if cores == 1:
        yield job(EAGER)
    yield job(COMPILED)
    if cores > 1:
        wanted = job(WORKER)
        problem = refused(wanted)
        if problem is None:
            yield wanted
        else:
            part.left_out.append(f"{WORKER}: left out, for {problem}")


def refused(job: Job) -> str | None:
    """Why this project does not take the overrides of a job, in a line; None if it does."""
    try:
        configuration(job.words())
    except ConfigError as error:
        return str(error).splitlines()[0]
    return None


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _jax_has_gpu() -> bool:
    return any(_installed(f"jax_cuda{version}_plugin") for version in (12, 13))


def _cores(sizes: Sizes) -> int:
    """The most that are asked for."""
    return max(sizes.cores)


def _job(sizes: Sizes, part: str, kind: str, work: str, contender: str, share: float, *overrides: str) -> Job:
    """A job of this project, on one core, that measures for a share of the seconds."""
    return Job(
        *(part, kind, work, contender, "rltemplate", 1, 1, max(0.5, share * sizes.seconds), sizes.device),
        overrides,
    )


def time(sizes: Sizes) -> Part:
    """Where the time of training goes."""
    part = Part("time", 1)
    works = ["ppo-Hopper", "sac-Hopper"] if sizes.quick else list(WORKS)
    for work in works:
        for form in (COMPILED,) if sizes.quick else (EAGER, COMPILED):
            part.jobs.append(_job(sizes, part.name, "shares", work, form, 0.4, *FORMS[form]))
    return part


def floor(sizes: Sizes) -> Part:
    """What a core does for a step at the least."""
    part = Part("floor", 1)
    if sizes.device != "cpu":
        part.left_out.append("what a processor does at the least says nothing about a GPU: left out")
        return part
    for env in ("Hopper",) if sizes.quick else ("Hopper", "Humanoid"):
        for work in (f"ppo-{env}", f"sac-{env}"):
            job = _job(sizes, part.name, "floor", work, "the least", 0.2)
            part.jobs.append(Job.from_dict(job.to_dict() | {"options": {"cores": _cores(sizes)}}))
    return part


def levels(sizes: Sizes) -> Part:
    """Each level of determinism against `fast`: often and for a short time, since little is looked for."""
    part = Part("levels", sizes.repetitions if sizes.quick else max(4, sizes.repetitions))
    for work in ("ppo-Hopper",) if sizes.quick else ("ppo-Hopper", "sac-Hopper"):
        for level in EAGER_LEVELS:
            part.jobs.append(
                _job(sizes, part.name, "rate", work, level, 0.25, f"determinism={level}", "compile=false")
            )
        for level in () if sizes.quick else COMPILED_LEVELS:
            part.jobs.append(
                _job(
                    *(sizes, part.name, "rate", work, f"{level}, compile=true", 0.25),
                    *(f"determinism={level}", "compile=true"),
                )
            )
    return part


def observers(sizes: Sizes) -> Part:
    """What each observer takes."""
    part = Part("observers", 1 if sizes.quick else sizes.repetitions)
    for work in ("ppo-Hopper", "sac-Hopper"):
        job = _job(sizes, part.name, "observers", work, COMPILED, 2.0, *FORMS[COMPILED])
        values = job.to_dict() | {"options": {"checkpoint_every": 10_000} if sizes.quick else {}}
        part.jobs.append(Job.from_dict(values))
    return part


def scaling(sizes: Sizes) -> Part:
    """By the number of environments and of threads."""
    part = Part("scaling", 1)
    quick = sizes.quick
    for algo in ("ppo",) if quick else ("ppo", "sac"):
        base = f"{algo}-Hopper"
        for number in (1, 8, 32) if quick else NUM_ENVS:
            words = ["compile=true", f"env.num_envs={number}"]
            if algo == "ppo":  # as many samples in a rollout, whatever their number
                words.append(f"algo.num_steps={2048 // number}")
            name = f"env.num_envs={number}"
            part.jobs.append(_job(sizes, part.name, "rate", base, name, 0.5, *words))
    for algo in () if quick else ("ppo", "sac"):
        for threads in range(1, _cores(sizes) + 1):
            job = _job(
                sizes, part.name, "rate", f"{algo}-Hopper", f"num_threads={threads}", 0.5, "compile=true"
            )
            part.jobs.append(Job.from_dict(job.to_dict() | {"cores": _cores(sizes), "threads": threads}))
    return part


def memory(sizes: Sizes) -> Part:
    """Of a replay buffer with large observations."""
    part = Part("memory", 1)
    transitions = FULL_BUFFER // 100 if sizes.quick else FULL_BUFFER // 10
    for contender, library in (("rltemplate", "rltemplate"), (SB3, "stable_baselines3")):
        if not _installed(library):
            part.left_out.append(
                f"{contender} is not installed (.venv/bin/pip install -e '.[bench]'): left out"
            )
            continue
        job = _job(sizes, part.name, "memory", "sac-Humanoid", contender, 1.0)
        options = {"transitions": transitions}
        part.jobs.append(Job.from_dict(job.to_dict() | {"library": library, "options": options}))
    return part


def startup(sizes: Sizes) -> Part:
    """From the command to the first environment step, and to what was learned first."""
    part = Part("startup", 1 if sizes.quick else min(2, sizes.repetitions))
    works = ("ppo-CartPole",) if sizes.quick else ("ppo-CartPole", "ppo-Hopper", "sac-Hopper")
    for work in works:
        job = _job(sizes, part.name, "startup", work, "first environment step", 1.0)
        words = [f"algo={WORKS[work].algo}", f"env={WORKS[work].env}"]
        part.jobs.append(Job.from_dict(job.to_dict() | {"options": {"words": words}}))
    for work in (name for name in works if name != "ppo-Hopper"):  # it compiles what CartPole does
        part.jobs.append(_job(sizes, part.name, "rate", work, "first learned, eager", 0.0))
        for cache in ("cold", "warm"):
            name = f"first learned, compile=true, {cache} cache"
            job = _job(sizes, part.name, "rate", work, name, 0.0, "compile=true")
            part.jobs.append(Job.from_dict(job.to_dict() | {"options": {"cache": cache}}))
    return part


PARTS: dict[str, Callable[[Sizes], Part]] = {
    "peers": peers,
    "time": time,
    "floor": floor,
    "levels": levels,
    "observers": observers,
    "scaling": scaling,
    "memory": memory,
    "startup": startup,
}
