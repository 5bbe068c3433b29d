"""The certificate of a proof: a JSON file for programs, and a page of plain text for people."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
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
    """One run that has ended. `ratio` is the largest of `ratios` values of the metric."""

    name: str
    run_dir: str
    perturbations: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    environment: dict[str, str | None] = field(default_factory=dict)
    working_directory: str | None
    seconds: float = 0.0
    exit_status: int
    status: str
    error: str | None
    digest: str | None
    iterations: int
    env_steps: int
    ratios: int
    ratio: float | None
    settings: dict[str, Any]
    checks: dict[str, Any]

    @property
    def finished(self) -> bool:
        """True if there is a result to compare."""
        return self.status == FINISHED

    @property
    def words(self) -> str:
        """The perturbations, for people."""
        return ", ".join(self.perturbations) or "undisturbed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inverse:
    """The checks and runs `without` the additions of the level; `tells_apart` if any of them fails."""

    without: str
    tells_apart: bool
    sentence: str
    seen: list[dict[str, Any]]
    runs: list[RunResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The outcome of a proof; `sentence` is all of it in one line."""

    format: str = "rltemplate-certificate"
    version: int = 2
    id: str
    verdict: str
    sentence: str
    problems: list[str]
    date: str
    folder: str
    asked: dict[str, Any]
    runs: list[RunResult]
    checks: dict[str, Any]
    ratio: dict[str, Any] | None
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
        lines = [self.sentence]
        if self.inverse is not None:
            lines.append(self.inverse.sentence[:1].upper() + self.inverse.sentence[1:])
        lines += [f"({problem})" for problem in self.problems[1:]]
        for title, texts in self._sections():
            lines.append("")
            for i, text in enumerate(texts):
                start = f"{title if i == 0 else '':10}"
                wrapped = textwrap.wrap(
                    text, _WIDTH, initial_indent=start, subsequent_indent=" " * 12, break_on_hyphens=False
                )
                lines.extend(wrapped or [start.rstrip()])
        if self.comparison is not None and self.report is not None:
            names = " and ".join(Path(side.run_dir).name for side in (self.comparison.a, self.comparison.b))
            lines += ["", f"Where {names} part", "", self.report]
        return "\n".join(lines) + "\n"

    def _sections(self) -> Iterator[tuple[str, Sequence[str]]]:
        config, machine, git = self.asked["config"], self.machine, self.git
        steps = f"{config['total_env_steps']:,} environment steps, seed {config['seed']}"
        if (before := self.asked["shortened_from"]) is not None:
            steps += f"; shortened from {before:,}, total_env_steps= sets another length"
        yield "asked", [" ".join(self.asked["overrides"]), steps]
        yield "runs", [_run_line(run) for run in self.runs] or ["none, for a check failed before"]
        yield "checks", list(self._check_lines())
        if self.inverse is None:
            yield "inverse", ["not tried, since the level is broken"]
        else:
            seen = [
                f"{each['what']} {'fails' if each['fails'] else 'passes'}: {each['seen']}"
                for each in self.inverse.seen
            ]
            yield "inverse", [f"without it ({self.inverse.without}):", *seen]
            yield "", [_run_line(run) for run in self.inverse.runs]
        values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in self.settings.items()}
        yield "settings", [", ".join(f"{key} {value}" for key, value in values.items())]
        known = [name for name in ("torch", "numpy", "gymnasium", "mujoco") if name in self.versions]
        yield "versions", [", ".join(f"{name} {self.versions[name]}" for name in known)]
        cpu = f"{machine.get('cpu')}, {machine.get('usable_cores')} cores usable"
        yield "machine", [f"{cpu}, {machine.get('os')}, Python {machine.get('python')}"]
        state = {True: "with changes", False: "unchanged", None: "unknown"}[git.dirty]
        commit = f"commit {git.commit}, " if git.commit else ""
        yield "code", [f"{commit}on {git.base_commit or 'no commit'} {state}"]
        yield "folder", [self.folder, self.date]

    def _check_lines(self) -> Iterator[str]:
        for name, found in self.checks.items():
            tried = [
                f"{key} {', '.join(map(str, value)) if isinstance(value, list) else value}"
                for key, value in found.items()
                if key not in ("holds", "problem")
            ]
            yield "; ".join([f"{name}: {'holds' if found['holds'] else found['problem']}", *tried])
        finished = sum(run.finished for run in self.runs)
        if finished > 1:
            verdict = "differ" if self.comparison is not None else "identical in every digest"
            yield f"traces: {finished}, {verdict}, trace={self.asked['config']['trace']}"
        if self.ratio is not None and self.ratio["values"]:
            yield f"ratio: {RATIO} at most {self.ratio['largest']:g} in {self.ratio['values']:,} values"
        elif self.ratio is not None and finished:
            yield f"ratio: the algorithm does not report {RATIO}"


def _run_line(run: RunResult) -> str:
    if not run.finished:
        return f"{run.name}  {run.status}: {run.error}; {run.words}"
    facts = f"digest {run.digest}, {run.iterations:,} iterations, {run.seconds:.0f} s"
    return f"{run.name}  {facts}; {run.words}"
