"""Sinks: the console, TensorBoard and Weights & Biases, which show the rows of `metrics.jsonl`."""

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

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
    if config.wandb.enabled and os.environ.get("WANDB_MODE", "").lower() != "disabled":
        sinks.append(WandbSink(facts, config.wandb))
    for name, settings in config.sinks.items():
        try:
            sinks += [make(facts) for make in brought_sinks(replace(config, sinks={name: settings}))]
        except Exception as error:
            facts.notify(f"the sink {name} is left out: {first_line(error)}")
    return sinks


def brought_sinks(config: LoggerConfig) -> list[Callable[[RunFacts], Sink]]:
    """Makers of the sinks that installed packages bring; `ConfigError` for an unknown name or setting."""
    makers: list[Callable[[RunFacts], Sink]] = []
    for name, settings in config.sinks.items():
        if settings in (None, False):
            continue
        kind = load(f"logger.sinks.{name}", "sinks", name)
        words = {} if settings is True else settings
        try:
            inspect.signature(kind).bind(None, **words)
        except TypeError as error:
            raise ConfigError(f"logger.sinks.{name}={settings}: {first_line(error)}") from error
        makers.append(partial(kind, **words))
    return makers
