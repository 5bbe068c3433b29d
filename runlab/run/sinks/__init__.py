"""Sinks: the console, TensorBoard and Weights & Biases, which show the rows of `metrics.jsonl`."""

import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from runlab.config.entry_points import load
from runlab.config.schema import LoggerConfig
from runlab.config.texts import first_line
from runlab.errors import ConfigError
from runlab.run.sinks.console import ConsoleSink
from runlab.run.sinks.sink import RunFacts, Sink
from runlab.run.sinks.tensorboard import TensorBoardSink
from runlab.run.sinks.wandb import WandbSink


def make_sinks(config: LoggerConfig, facts: RunFacts) -> list[Sink]:
    """The sinks that are switched on, in the order in which they get each row.

    A sink of another package that cannot be made costs a note only: a run may resume where it is missing.
    """
    sinks: list[Sink] = []
    if config.console:
        sinks.append(ConsoleSink(facts))
    if config.tensorboard:
        sinks.append(TensorBoardSink(facts))
    if config.wandb.enabled and os.environ.get("WANDB_MODE", "").strip().lower() != "disabled":
        sinks.append(WandbSink(facts, config.wandb))
    for name, settings in config.sinks.items():
        try:
            if (make := brought_sink(name, settings)) is not None:
                sinks.append(make(facts))
        except Exception as error:
            facts.notify(f"the sink {name} is left out: {first_line(error)}")
    return sinks


def brought_sink(name: str, settings: Any) -> Callable[[RunFacts], Sink] | None:
    """The maker of a sink of an installed package; None: switched off. `ConfigError` for a wrong one."""
    if settings in (None, False):
        return None
    kind = load(f"logger.sinks.{name}", "sinks", name)
    words = {} if settings is True else settings
    try:
        inspect.signature(kind).bind(None, **words)
    except TypeError as error:
        raise ConfigError(f"logger.sinks.{name}={settings}: {first_line(error)}") from error
    return partial(kind, **words)
