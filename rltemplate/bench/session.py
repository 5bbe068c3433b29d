"""A bench: every job in a process of its own, and what was measured kept at once.

Contenders take turns, so that a change of the machine's load falls on all of them. What is in `bench.json`
with the same settings, versions and code is not measured again, so that an interrupted bench goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rltemplate.bench.contenders import configuration
from rltemplate.bench.plan import PACKAGES, Part, Sizes, affordable_cores, siblings_of
from rltemplate.bench.works import Job, MeasurementError, differences
from rltemplate.children import Children, last_words
from rltemplate.run.determinism import prepared
from rltemplate.run.lines import replace_text
from rltemplate.run.machine import machine_facts, package_versions
from rltemplate.types import ConfigError

FORMAT = 2
ROOT = Path(__file__).resolve().parents[2]
# How the processes of single measurements are started: with this word and a job as JSON.
ONE = "--one"

Document = dict[str, Any]
# Runs a job in a process of its own, and returns what it measured.
Run = Callable[[Job, Path], dict[str, Any]]


class Processes:
    """Starts a fresh process for each job, with pinned threads, and waits for it."""

    def __init__(self, children: Children, scratch: Path) -> None:
        self._children = children
        self._scratch = scratch
        self._cores = affordable_cores()

    def __call__(self, job: Job, cache: Path) -> dict[str, Any]:
        """What the job measured. `MeasurementError` says in a line why it measured nothing."""
        log, out = self._scratch / "log", self._scratch / "out"
        asked = {"job": job.to_dict(), "cores": self._cores[: job.cores], "begun": time.time()}
        command = [sys.executable, str(ROOT / "scripts" / "bench.py"), ONE, json.dumps(asked)]
        code = self._children.run(command, environment(job, os.environ, cache), log, out=out)
        lines = out.read_text(encoding="utf-8").splitlines()
        if code != 0 or not lines:
            raise MeasurementError(last_words(log, code))
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer


def environment(job: Job, base: Mapping[str, str], cache: Path) -> dict[str, str]:
    """The environment of a job's process: as many threads as the job may have, for every library."""
    level = configuration(job.words()).determinism if job.library == "rltemplate" else None
    threads = str(job.threads)
    merged = dict(base) if level is None else prepared(base, level, job.threads)
    several = "true" if job.threads > 1 else "false"
    merged |= {
        **{f"{name}_NUM_THREADS": threads for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")},
        "XLA_FLAGS": f"--xla_cpu_multi_thread_eigen={several} intra_op_parallelism_threads={threads}",
        "JAX_PLATFORMS": "cuda,cpu" if job.device == "cuda" else "cpu",
    }
    if "cache" in job.options:
        merged["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    return merged


class Session:
    """One bench, over the file that keeps it."""

    def __init__(
        self,
        file: Path,
        sizes: Sizes,
        run: Run,
        say: Callable[[str], None],
        begun: Callable[[str], None] = lambda name: None,
        fresh: bool = False,
        distance: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`say` gets a line about each measurement, `begun` the name of one that begins.

        `ConfigError` if the file is there and cannot be gone on with; `fresh` measures everything anew.
        `distance` says how far apart the cores are, in nanoseconds, if that is known.
        """
        self.file = file
        self.document = read(file, fresh)
        self._sizes, self._run, self._say, self._begun, self._fresh = sizes, run, say, begun, fresh
        self._distance = distance

    def todo(self, part: Part) -> list[tuple[int, Job]]:
        """What is still to be measured of a part, in order, with the number of the repetition from 1."""
        kept = self.document["parts"].get(part.name)
        done = []
        if kept is not None and not self._fresh and kept["made_with"] == made_with(part):
            done = [(each["repetition"], each["job"]) for each in kept["measurements"]]
        every = [(number, job) for number in range(1, part.repetitions + 1) for job in part.jobs]
        return [(number, job) for number, job in every if (number, job.to_dict()) not in done]

    def measure(self, part: Part) -> list[str]:
        """Measure what is missing of a part; a line for each measurement that failed."""
        todo = self.todo(part)
        kept = self.document["parts"].get(part.name)
        if kept is None or len(todo) == part.repetitions * len(part.jobs):
            kept = self.document["parts"][part.name] = {
                "made_with": made_with(part),
                "machine": machine(),
                "versions": versions(),
                "measurements": [],
            }
        kept["settings"] = asdict(self._sizes)
        kept["left_out"] = part.left_out
        kept["failures"] = []
        for line in part.left_out:
            self._say(f"{part.name}: {line}")
        with tempfile.TemporaryDirectory() as scratch:
            for number, job in todo:
                name = f"{part.name}  {job.work}  {job.cores} core(s)  {job.contender}"
                self._begun(name)
                load, before = os.getloadavg()[0], self._distance()
                try:
                    result = self._one(job, number, Path(scratch))
                    check_same_work(job, result, kept["measurements"])
                except MeasurementError as error:
                    kept["failures"].append(f"{name}: {error}")
                    self._say(f"{number}/{part.repetitions}  {name}: FAILED: {error}")
                    self._keep()
                    continue
                around = {"load": load, "core_to_core_ns": [before, self._distance()]}
                kept["measurements"].append(
                    {"job": job.to_dict(), "repetition": number, **around, "result": result}
                )
                self._keep()
                self._say(f"{number}/{part.repetitions}  {name}: {shown(result)}")
        return list(kept["failures"])

    def _one(self, job: Job, number: int, scratch: Path) -> dict[str, Any]:
        """A measurement, with the compiler's cache that it is to find: none, or that of the one before."""
        cache = scratch / f"cache-{job.work}-{number}"
        if job.options.get("cache") == "cold":
            shutil.rmtree(cache, ignore_errors=True)
        elif job.options.get("cache") == "warm" and not cache.exists():
            self._run(job, cache)
        return self._run(job, cache)

    def _keep(self) -> None:
        replace_text(self.file, [json.dumps(self.document, indent=1), "\n"])


def check_same_work(job: Job, result: Mapping[str, Any], others: list[dict[str, Any]]) -> None:
    """`MeasurementError` if a peer did other work than the contenders that were measured before it."""
    if job.part != "peers":
        return
    for other in others:
        if other["job"]["work"] != job.work or other["job"]["device"] != job.device:
            continue
        found = differences(result["arithmetic"], other["result"]["arithmetic"])
        if found:
            raise MeasurementError(
                f"does other work than {other['job']['contender']}, so the two cannot be compared: "
                + ", ".join(found)
            )


def read(file: Path, fresh: bool = False) -> Document:
    """What was measured earlier; `ConfigError` if that cannot be read and would be lost."""
    empty: Document = {"format": FORMAT, "parts": {}}
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return empty
    except (OSError, ValueError) as error:
        if fresh:
            return empty
        raise ConfigError(
            f"{file} cannot be read, {error}; repair or remove it, or say fresh=true"
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        if fresh:
            return empty
        raise ConfigError(f"{file} holds no measurements of this version; remove it, or say fresh=true")
    return document


def made_with(part: Part) -> str:
    """A digest of all that a measurement hangs on: what is asked for, versions, code and machine."""
    facts = machine_facts()
    about = {
        "jobs": [job.to_dict() for job in part.jobs],
        "versions": versions(),
        "code": code_digest(),
        "machine": {key: facts[key] for key in ("cpu", "usable_cores", "kernel", "memory_bytes")},
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Of Python and of the packages that speed hangs on, as far as they are installed."""
    installed = package_versions()
    return {"python": sys.version.split()[0]} | {
        name: installed[name] for name in PACKAGES if name in installed
    }


def code_digest() -> str:
    """Of all code and configuration of this project but what only shows results."""
    digest = hashlib.sha256()
    shows = {"goals.py", "plots.py", "session.py", "tables.py"}
    for folder, pattern in (("rltemplate", "*.py"), ("conf", "*.yaml")):
        for path in sorted((ROOT / folder).rglob(pattern)):
            if not (path.parent.name == "bench" and path.name in shows):
                digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def machine() -> dict[str, Any]:
    """What the machine is, and how busy it was when the part began."""
    facts = machine_facts(with_gpus=None)
    cores = affordable_cores()
    kept = ("cpu", "logical_cores", "usable_cores", "memory_bytes", "kernel", "os", "gpu_driver")
    return {
        **{key: facts[key] for key in kept},
        "physical_cores": len({siblings_of(core) for core in cores}),
        "pinned": hasattr(os, "sched_setaffinity"),
        "load": list(os.getloadavg()),
    }


def shown(result: Mapping[str, Any]) -> str:
    """A measurement in a few words."""
    if "shares" in result:
        return ", ".join(f"{name} {share:.0%}" for name, share in result["shares"].items())
    if "inside" in result:
        return f"an iteration takes {result['iteration']['wall_s'] * 1e3:,.1f} ms"
    if "buffer_bytes" in result:
        return f"{result['buffer_bytes'] / 1e6:,.0f} MB for {result['transitions']:,} transitions"
    if "flops" in result:
        return f"{result['flops'] / 1e6:,.1f} MFLOP a step, {result['flop_rate'] / 1e9:,.0f} GFLOP/s a core"
    if "env_steps" in result:
        rate = result["env_steps"] / result["wall_s"]
        return f"{rate:,.0f} steps/s, first learned after {result['first_s']:.1f} s"
    return f"{result['wall_s']:.2f} s"
