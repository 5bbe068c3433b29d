"""Sweeps, proofs, journal and videos in the folder of the runs."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rltemplate.analysis.report.experiments import Experiment
from rltemplate.analysis.runs import Run
from rltemplate.run import paths

PROOFS = "prove/*/certificate.json"
VIDEO_CHOICES = ("last", "all", "none")
_MOST_BYTES = {"last": 12_000_000, "all": 96_000_000, "none": 0}  # of videos in one page
_STEP = re.compile(r"step_([0-9]{1,15})\.mp4")


class Video(NamedTuple):
    """A film of one run after so many environment steps, as base64 text."""

    run: Run
    env_steps: int
    data: str


@dataclass
class Videos:
    """The films of a page by experiment, and a line about each that is not in it and might be missed."""

    shown: dict[int, list[Video]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def read_documents(runs_dir: Path, pattern: str, problems: list[str]) -> list[tuple[Path, dict[str, Any]]]:
    """The JSON objects in the files below `runs_dir` that fit `pattern`, with their folders, oldest first.

    One that cannot be read adds a line to `problems`.
    """
    found = []
    for path in sorted(runs_dir.glob(pattern)):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{path.parent.name}: {path.name} cannot be read, {_first_line(error)}")
            continue
        if isinstance(document, dict):
            found.append((path.parent, document))
        else:
            problems.append(f"{path.parent.name}: {path.name} is damaged: it has no facts")
    return found


def read_sweeps(runs_dir: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The indexes of sweeps, of which `jobs` is a list of facts about each job."""
    sweeps = []
    for folder, index in read_documents(runs_dir, f"{paths.SWEEPS}/*/{paths.SWEEP_INDEX}", problems):
        jobs, words = index.get("jobs"), index.get("words", [])
        if not _is_list_of(jobs, Mapping) or not _is_list_of(words, str):
            problems.append(f"{folder.name}: {paths.SWEEP_INDEX} is damaged: its jobs cannot be told")
            continue
        sweeps.append({"id": folder.name, **index})
    return sweeps


def read_proofs(runs_dir: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The certificates of proofs, each with `folder_name`."""
    found = []
    for folder, document in read_documents(runs_dir, PROOFS, problems):
        inverse = document.get("inverse")
        if not isinstance(document.get("sentence"), str) or not isinstance(inverse or {}, Mapping):
            problems.append(f"{folder.name}: certificate.json is damaged: it says nothing")
            continue
        found.append(document | {"folder_name": folder.name})
    return found


def read_journal(runs_dir: Path, problems: list[str]) -> str:
    """The text of the journal, empty if there is none."""
    path = runs_dir / paths.JOURNAL
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, ValueError) as error:
        problems.append(f"{paths.JOURNAL} cannot be read, {_first_line(error)}")
        return ""


def choose_videos(experiments: Iterable[Experiment], choice: str) -> Videos:
    """The films that go into the page, as long as there is room for them.

    `last`: of each experiment the last film of the seed whose score is the median, or the lower of two. Not
    of the best seed, which would flatter. `all`: every film of every run.
    """
    videos = Videos()
    room = _MOST_BYTES[choice]
    for experiment in experiments:
        for run, steps, path in _candidates(experiment, choice):
            try:
                size = path.stat().st_size
                if size > room:
                    videos.left_out.append(f"{run.id}: {path.name}, {size / 1e6:.1f} MB, has no room here")
                    continue
                data = base64.b64encode(path.read_bytes()).decode("ascii")
            except OSError as error:
                videos.left_out.append(f"{run.id}: {path.name} cannot be read, {error.strerror}")
                continue
            room -= size
            videos.shown.setdefault(experiment.number, []).append(Video(run, steps, data))
    return videos


def _candidates(experiment: Experiment, choice: str) -> Iterator[tuple[Run, int, Path]]:
    if choice == "none":
        return
    runs: Sequence[Run] = experiment.runs
    if choice == "last":
        filmed = [found for found in sorted(experiment.finals(), key=_score) if _films(found[0])]
        runs = [filmed[(len(filmed) - 1) // 2][0]] if filmed else [run for run in runs if _films(run)][-1:]
    for run in runs:
        films = _films(run)
        for steps, path in films if choice == "all" else films[-1:]:
            yield run, steps, path


def _score(final: tuple[Run, int, float]) -> float:
    return final[2]


def _films(run: Run) -> list[tuple[int, Path]]:
    """Environment steps and files of a run's videos, in order."""
    matches = ((_STEP.fullmatch(path.name), path) for path in (run.dir / paths.VIDEOS).glob("step_*.mp4"))
    return sorted((int(match[1]), path) for match, path in matches if match)


def _is_list_of(value: Any, kind: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def _first_line(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error).partition("\n")[0]
