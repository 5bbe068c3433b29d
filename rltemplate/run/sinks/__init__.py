"""Sinks: the console, TensorBoard and Weights & Biases, which show what `metrics.jsonl` holds."""

import os

from rltemplate.config.schema import LoggerConfig
from rltemplate.run.sinks.console import ConsoleSink
from rltemplate.run.sinks.sink import RunFacts, Sink
from rltemplate.run.sinks.tensorboard import TensorBoardSink
from rltemplate.run.sinks.wandb import WandbSink


def make_sinks(config: LoggerConfig, facts: RunFacts) -> list[Sink]:
    """The sinks that are switched on, in the order in which they get each row.

    A new sink needs a class, two lines here, its key in `LoggerConfig`, its value in conf/logger/local.yaml.
    """
    sinks: list[Sink] = []
    if config.console:
        sinks.append(ConsoleSink(facts))
    if config.tensorboard:
        sinks.append(TensorBoardSink(facts))
    if config.wandb.enabled and os.environ.get("WANDB_MODE", "").lower() != "disabled":
        sinks.append(WandbSink(facts, config.wandb))
    return sinks
