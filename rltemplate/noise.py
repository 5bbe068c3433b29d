"""How much the same experiment varies: one seed run twice, and several seeds run once.

What differs between two runs of one seed is noise of the machine, and at every level but `fast` there must be
none. What differs between seeds is there whatever anybody changes: an improvement that is smaller cannot be
told from luck, and how much larger it must be follows from the number of seeds.

Each run is a process of its own, as in training. They lie side by side in `<runs_dir>/noise/<id>/`, with what
was found in `noise.json`.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rltemplate import cli, launch
from rltemplate.analysis import compare, stats, targets
from rltemplate.analysis.runs import Run, load_run
from rltemplate.analysis.stats import Interval
from rltemplate.children import REFUSED, complaint, last_words
from rltemplate.config import Config, Level, to_dict
from rltemplate.disturbances import changed, with_changes
from rltemplate.run.lines import replace_text
from rltemplate.series import Series, check_environment, record_of, take_out
from rltemplate.types import ConfigError, RunError
from rltemplate.words import whole

FORMAT, VERSION = "rltemplate-noise", 1
FOLDER, FILE = "noise", "noise.json"
SEEDS, MOST = 5, 1000
AGAIN = "again"
CONFIDENCE, POWER = 0.95, 0.8

# Takes a line about what has come to its end; the run that has begun, its number and how many there are.
Say = Callable[[str], None]
Begun = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be measured: a configuration, whose seed is the first of `seeds` in a row."""

    config: Config
    overrides: list[str]
    seeds: int


def ask(words: Sequence[str]) -> Question:
    """The question that a command line stands for: overrides as for training, and `seeds=N`.

    Raises `ConfigError` with one or two lines for the first mistake. Creates nothing.
    """
    word, overrides = take_out("seeds", words)
    seeds = SEEDS if word is None else _number(word)
    plan = cli.preflight(overrides)
    if plan.sweep:
        raise ConfigError(
            "noise is that of one configuration: give each key one value; seeds=N says how many seeds"
        )
    config, argv = plan.configs[0], plan.argv
    if config.run_dir is not None:
        raise ConfigError(f"run_dir={config.run_dir}: each run has its own folder; use runs_dir")
    if not config.eval_every:
        raise ConfigError("eval_every=0: noise compares evaluations; use eval_every=N")
    if config.seed > 2**63 - 1 - seeds:
        raise ConfigError(f"seed={config.seed}: there are no {seeds} seeds from there on")
    check_environment(config)
    if not any(word.startswith("video_every=") for word in overrides):
        config, argv = changed(config, {"video_every": 0}), with_changes(argv, {"video_every": 0})
    return Question(config=replace(config, seeds=None), overrides=argv, seeds=seeds)


def _number(word: str) -> int:
    try:
        return whole(2, MOST)(word.partition("=")[2])
    except ConfigError as error:
        raise ConfigError(f"{word}: {error}; one seed has no spread") from error


class Noise:
    """The work on one question."""

    def __init__(
        self,
        question: Question,
        command: Sequence[str] = (),
        *,
        say: Say = print,
        begun: Begun = lambda name, number, count: None,
    ) -> None:
        self.question = question
        self._series = Series(FOLDER, question.config, command)
        self._say = say
        self._begun = begun

    @property
    def folder(self) -> Path:
        """Where the runs go, and what was found."""
        return self._series.folder

    def run(self) -> dict[str, Any]:
        """Do it, write `noise.json` and return what is in it.

        Raises `ConfigError` for what refuses the runs, and leaves nothing; `RunError` if one fails;
        `Interrupted` after a signal. The runs that there are then stay.
        """
        first = self.question.config.seed
        named = [(f"seed_{first}", first), (AGAIN, first)]
        named += [(f"seed_{seed}", seed) for seed in range(first + 1, first + self.question.seeds)]
        found: dict[str, Run] = {}
        with self._series.children.listening():
            launch.check_folder(self.question.config)
            self._series.begin()
            for i, (name, seed) in enumerate(named, start=1):
                self._begun(name, i, len(named))
                started = time.monotonic()
                found[name] = self._run(name, seed)
                took = time.monotonic() - started
                value = stats.show(_final(found[name]))
                self._say(f"{name}, {i} of {len(named)}: eval/return {value}, {took:.0f} s")
        document = self._document(found)
        replace_text(self.folder / FILE, [json.dumps(document, indent=2, allow_nan=False) + "\n"])
        return document

    def _run(self, name: str, seed: int) -> Run:
        changes = {"seed": seed}
        config = changed(self.question.config, changes)
        status = self._series.run(name, config, with_changes(self.question.overrides, changes))
        run_dir, log = self._series.run_dir(name), self._series.log(name)
        if status == REFUSED:
            said = complaint(log) or last_words(log, status)
            self._leave_nothing()
            raise ConfigError(said)
        if status:
            reason = record_of(run_dir).get("error") or last_words(log, status)
            raise RunError(f"{name} failed: {reason}\nwhat it wrote is in {log}")
        run = load_run(run_dir)
        if not math.isfinite(_final(run)):
            raise RunError(f"{name} has no eval/return at its end\nwhat it wrote is in {log}")
        return run

    def _leave_nothing(self) -> None:
        """A configuration that is refused was never tried."""
        shutil.rmtree(self.folder)
        with contextlib.suppress(OSError):  # what others have put there stays
            self.folder.parent.rmdir()
            self.folder.parent.parent.rmdir()

    def _document(self, runs: dict[str, Run]) -> dict[str, Any]:
        config = self.question.config
        each = {name: _facts(run) for name, run in runs.items()}
        once, again = runs[f"seed_{config.seed}"], runs[AGAIN]
        seeds = [run for name, run in runs.items() if name != AGAIN]
        same = _same_seed(once, again)
        between = _between_seeds([_final(run) for run in seeds])
        steps = int(once.last_row.get("env_steps", 0))
        standing = targets.standing_of(once.config, steps, between["mean"]["value"])
        document = {
            "format": FORMAT,
            "version": VERSION,
            "id": self._series.id,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "folder": str(self.folder),
            "algo": config.algo.name,
            "env": once.env,
            "level": config.determinism.level.name,
            "env_steps": steps,
            "asked": {
                "command": self._series.command,
                "overrides": self.question.overrides,
                "seeds": self.question.seeds,
                "config": to_dict(config),
            },
            "runs": each,
            "same_seed": same,
            "between_seeds": between,
            "standing": None if standing is None else standing.text,
            "cautions": stats.caution(len(seeds)),
        }
        document["holds"] = _holds(document)
        return document | {"sentences": sentences(document)}


def _final(run: Run) -> float:
    value = (run.record.get("final_metrics") or {}).get("eval/return")
    return math.nan if value is None else float(value)


def _facts(run: Run) -> dict[str, Any]:
    trace = run.record.get("trace") or {}
    return {
        "id": run.id,
        "run_dir": str(run.dir),
        "seed": run.config["seed"],
        "eval_return": _final(run),
        "digest": trace.get("digest"),
        "seconds": run.record.get("duration_s"),
    }


def _same_seed(a: Run, b: Run) -> dict[str, Any]:
    """What differs between two runs of one seed: evaluations, the final return, and traces if kept."""
    steps = [step for (step, one), (_, other) in zip(a.curve, b.curve, strict=True) if one != other]
    digests = [(run.record.get("trace") or {}).get("digest") for run in (a, b)]
    known = None not in digests
    found = compare.headline(compare.compare_runs(a.dir, b.dir)) if known else None
    return {
        "seed": a.config["seed"],
        "returns": [_final(a), _final(b)],
        "difference": abs(_final(b) - _final(a)),
        "evaluations": len(a.curve),
        "evaluations_that_differ": len(steps),
        "first_differing_evaluation": steps[0] if steps else None,
        "identical_traces": digests[0] == digests[1] if known else None,
        "trace": found,
    }


def _between_seeds(returns: Sequence[float]) -> dict[str, Any]:
    """The spread over seeds, and what it lets so many seeds find."""
    import numpy as np

    deviation = float(np.std(returns, ddof=1))
    low, high = np.quantile(returns, [0.25, 0.75])
    return {
        "seeds": len(returns),
        "returns": list(returns),
        "std": deviation,
        "iqr": float(high - low),
        "min": min(returns),
        "max": max(returns),
        **{name: _as_dict(stats.interval(returns, name)) for name in ("mean", "iqm")},
        "confidence": CONFIDENCE,
        "power": POWER,
        "smallest_difference": stats.smallest_difference(deviation, len(returns), CONFIDENCE, POWER),
        "formula": "two-sample t test, two-sided, power from the noncentral t distribution",
    }


def _as_dict(interval: Interval) -> dict[str, float]:
    return interval._asdict()


def _holds(document: dict[str, Any]) -> bool:
    """Whether the level kept its promise: at all but `fast` one seed gives one run."""
    same = document["same_seed"]
    differs = bool(same["evaluations_that_differ"]) or same["identical_traces"] is False
    return document["level"] == Level.fast.name or not differs


def sentences(document: dict[str, Any]) -> list[str]:
    """What was found, a sentence each: between runs of one seed, between seeds, and what follows."""
    same, between, level = document["same_seed"], document["between_seeds"], document["level"]
    show = stats.show
    traces = {None: "traces not kept", True: "traces identical", False: "traces differ"}
    if same["evaluations_that_differ"] or same["identical_traces"] is False:
        where = same["first_differing_evaluation"]
        first = "no evaluation differs" if where is None else f"evaluations differ from {where:,} steps on"
        last, kept = show(same["difference"]), traces[same["identical_traces"]]
        noise = f"seed {same['seed']} run twice: {first}, the last by {last}, {kept}"
        if same["trace"] is not None:
            noise += f": {same['trace']}"
        if not document["holds"]:
            noise += f"; at determinism={level} nothing may differ: make prove looks for the cause"
    else:
        noise = (
            f"seed {same['seed']} run twice: no difference in {same['evaluations']} evaluations, "
            f"{traces[same['identical_traces']]}"
        )
    count = between["seeds"]
    spread = (
        f"{count} seeds: eval/return {show(between['min'])} to {show(between['max'])}, standard deviation "
        f"{show(between['std'])}, middle half {show(between['iqr'])} wide; mean {_spelled(between['mean'])}, "
        f"IQM {_spelled(between['iqm'])}"
    )
    if between["std"]:
        least = show(between["smallest_difference"])
        follows = (
            f"with {count} seeds against {count}, a true difference of {least} is found "
            f"{between['power']:.0%} of the time at the {between['confidence']:.0%} level "
            f"({between['formula']}); smaller ones mostly look like luck"
        )
    else:
        follows = (
            f"all {count} seeds end with the same return, so nothing follows about differences: a ceiling, "
            "or too easy a task to compare anything on"
        )
    return [noise, spread, follows]


def _spelled(interval: dict[str, float]) -> str:
    value, low, high = (stats.show(interval[name]) for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def report(document: dict[str, Any]) -> str:
    """All of it for a terminal."""
    head = (
        f"{document['algo']} on {document['env']}, {document['env_steps']:,} steps, "
        f"determinism={document['level']}"
    )
    lines = [head, *(f"  {text}" for text in document["sentences"])]
    if document["standing"] is not None:
        lines.append(f"  {document['standing']}")
    lines += [f"  caution: {text}" for text in document["cautions"]]
    return "\n".join([*lines, f"written: {document['folder']}/{FILE}"])
