"""The certificate of a proof: a JSON file for programs, and a page of plain text for people."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rltemplate.analysis.compare import Comparison
from rltemplate.run.git.snapshot import GitRecord
from rltemplate.run.record import FINISHED

JSON, TEXT = "certificate.json", "certificate.txt"
HOLDS, BROKEN = "holds", "broken"
# The largest |ratio - 1| before the first update of an iteration; 0 where rows depend on nothing else.
RATIO = "policy/first_ratio_max_error"
_WIDTH = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One run that has ended. `ratio` is the largest value of that metric; None if the run has none."""

    name: str
    run_dir: str
    perturbations: list[str]
    seconds: float
    status: str
    error: str | None
    digest: str | None
    iterations: int
    ratio: float | None

    @property
    def finished(self) -> bool:
        """True if there is a result to compare."""
        return self.status == FINISHED

    def __str__(self) -> str:
        said = f"{self.status}: {self.error}"
        if self.finished:
            said = f"digest {self.digest}, {self.iterations:,} iterations, {self.seconds:.0f} s"
        return f"{self.name}  {said}; {', '.join(self.perturbations) or 'undisturbed'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The answer of one check without the additions of the level."""

    what: str
    fails: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inverse:
    """Checks and runs `without` the additions of the level; `tells_apart` if any of them fails."""

    without: str
    tells_apart: bool
    sentence: str
    seen: list[Seen]
    runs: list[RunResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The outcome of a proof; `sentence` is all of it in one line."""

    format: str = "rltemplate-certificate"
    version: int = 3
    id: str
    verdict: str
    sentence: str
    problems: list[str]
    date: str
    folder: str
    overrides: list[str]
    config: dict[str, Any]
    shortened_from: int | None
    runs: list[RunResult]
    checks: dict[str, Any]
    comparison: Comparison | None
    report: str | None
    inverse: Inverse | None
    settings: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    git: GitRecord

    def to_json(self) -> str:
        """Strict JSON."""
        return json.dumps(asdict(self), indent=2, allow_nan=False)

    def write(self) -> None:
        """Write both files into the folder of the proof and into those of its runs."""
        for folder in map(Path, (self.folder, *(run.run_dir for run in self.runs))):
            if folder.is_dir():  # a run that was refused has none
                (folder / JSON).write_text(self.to_json() + "\n", encoding="utf-8")
                (folder / TEXT).write_text(self.to_text(), encoding="utf-8")

    def to_text(self) -> str:
        """The page for people, the verdict first."""
        lines = [self.sentence, *([] if self.inverse is None else [self.inverse.sentence])]
        for title, texts in self._sections():
            lines.append("")
            for i, text in enumerate(texts):
                start = f"{'' if i else title:10}"
                lines += textwrap.wrap(
                    text, _WIDTH, initial_indent=start, subsequent_indent=" " * 12, break_on_hyphens=False
                )
        return "\n".join(lines) + ("" if self.report is None else f"\n\n{self.report}") + "\n"

    def _sections(self) -> Iterator[tuple[str, list[str]]]:
        machine, git = self.machine, self.git
        steps = f"{self.config['total_env_steps']:,} environment steps, seed {self.config['seed']}"
        if self.shortened_from is not None:
            steps += f"; shortened from {self.shortened_from:,}, total_env_steps= sets another length"
        yield "asked", [" ".join(self.overrides), steps]
        yield "problems", self.problems or ["none"]
        yield "runs", list(map(str, self.runs)) or ["none, for a check failed before"]
        yield "checks", [f"{name}: {_in_line(found)}" for name, found in self.checks.items()]
        if self.inverse is not None:
            seen = [f"{x.what} {'fails' if x.fails else 'passes'}: {x.text}" for x in self.inverse.seen]
            yield "inverse", [*seen, *map(str, self.inverse.runs)]
        yield "settings", [_in_line(self.settings)]
        known = ("torch", "numpy", "gymnasium", "mujoco")
        yield "versions", [_in_line({name: self.versions.get(name) for name in known})]
        yield (
            "machine",
            [_in_line({key: machine.get(key) for key in ("cpu", "usable_cores", "os", "python")})],
        )
        state = {True: "with changes", False: "unchanged", None: "unknown"}[git.dirty]
        yield "code", [f"commit {git.commit}, on {git.base_commit or 'no commit'} {state}"]
        yield "folder", [self.folder, self.date]


def _in_line(facts: dict[str, Any]) -> str:
    return ", ".join(f"{key} {v if isinstance(v, str) else json.dumps(v)}" for key, v in facts.items())
