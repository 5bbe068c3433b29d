"""The certificate of a proof: a JSON file for programs, and a page of plain text for people."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runlab.run.files import replace_text, strict_json
from runlab.run.git.snapshot import GitRecord

JSON, TEXT = "certificate.json", "certificate.txt"
HOLDS, BROKEN, UNDECIDED = "holds", "broken", "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One run that has ended: `error` if it did not finish, `ratio` from `prove.ratio_of`."""

    name: str
    run_dir: str
    perturbations: list[str]
    seconds: float
    error: str | None
    digest: str
    iterations: int
    ratio: float | None

    @property
    def title(self) -> str:
        """Its name, and what disturbed it."""
        return f"{self.name} ({', '.join(self.perturbations) or 'undisturbed'})"

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f", first ratio off by {self.ratio:g}"
        ended = f"digest {self.digest}, {self.iterations:,} iterations{ratio}, {self.seconds:.0f} s"
        return f"{self.name}  {self.error or ended}; {', '.join(self.perturbations) or 'undisturbed'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The outcome of a proof; `sentence` tells it in one line, with a second line about the inverse.

    `verdict`: BROKEN if a check fails or runs differ; UNDECIDED if a run failed and no such difference shows;
    HOLDS otherwise.
    `inverse` has the result of each check without the additions of the level: its problem, or None if the
    check succeeds even so.
    """

    verdict: str
    sentence: str
    problems: list[str]
    date: str
    folder: str
    overrides: list[str]
    runs: list[RunResult]
    checks: dict[str, Any]
    inverse: dict[str, str | None]
    settings: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    git: GitRecord

    def to_json(self) -> str:
        return strict_json(asdict(self), indent=2)

    def write(self) -> None:
        """Write both forms into the folder of the proof and into the folders of its runs."""
        for folder in filter(Path.is_dir, map(Path, (self.folder, *(run.run_dir for run in self.runs)))):
            replace_text(folder / JSON, [self.to_json(), "\n"])
            replace_text(folder / TEXT, [self.to_text(), "\n"])

    def to_text(self) -> str:
        """The page for people, the verdict first."""
        lines = [("asked", " ".join(self.overrides))]
        lines += [("problem", problem) for problem in self.problems]
        lines += [("run", str(run)) for run in self.runs]
        lines += [("check", f"{name}: {json.dumps(result)}") for name, result in self.checks.items()]
        inverse = ((name, problem or "holds all the same") for name, problem in self.inverse.items())
        lines += [("inverse", f"{name}: {result}") for name, result in inverse]
        lines += [("settings", json.dumps(self.settings))]
        libraries = (f"{name} {self.versions.get(name)}" for name in ("torch", "numpy", "mujoco"))
        gpus = dict.fromkeys(gpu["name"] for gpu in self.machine["gpus"])
        parts = self.machine["cpu"], *gpus, self.machine["os"]
        lines += [("machine", ", ".join([*map(str, parts), *libraries]))]
        lines += [("code", f"commit {self.git.commit}, on {self.git.base_commit}")]
        lines += [("folder", f"{self.folder}, {self.date}")]
        return "\n".join([self.sentence, "", *(f"{title:10}{text}" for title, text in lines)])
