"""Run a part of a recorded run again, in its own process, with a more detailed trace.

`python -P -m runlab.rerun.replay REQUEST` finds the run's job in its environment. It starts from a
checkpoint or at the beginning, and traces the run up to one iteration. It traces this iteration by step and
update, and keeps the tensors of one event and torch's operations before it.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses import FakeTensor
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from runlab.analysis.traces import ITERATION
from runlab.config.command_args import exit_status
from runlab.config.project import as_typed, project, project_folder
from runlab.determinism import switches
from runlab.envs.global_rng import seed_global_rng
from runlab.errors import ConfigError
from runlab.interfaces import attach_probe
from runlab.launch.subprocesses import end_with_parent
from runlab.rerun.operations import LoggedOperation
from runlab.run.checkpoint import load_checkpoint
from runlab.run.continuation import restore
from runlab.run.job import Job
from runlab.run.trace import TraceWriter, as_array, digest

TENSORS, OPERATIONS = "tensors.npz", "operations.json"
# The version of `Request` and of the files: the process may have other code than the process that starts it.
FORM = 5

# Addresses of objects in memory, such as generators, in the text of an operation's arguments.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PLACE = re.compile(r'File "(.+)", line (\d+), in (.+)(?:\n(?!\s*File )(.*))?')  # in a traceback


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The part of the run to look at, as JSON in the command line.

    `checkpoint` is a file, or None for the beginning. The iteration `iteration` is traced by step and update.
    Tensors and operations of its event `event` number `index` (or ITERATION) are kept. With `since`,
    operations are kept from the end of that earlier event on, because the first item of an event may be made
    before the event begins. Files are written to `folder`.
    """

    folder: str
    iteration: int
    checkpoint: str | None = None
    event: str | None = None
    index: int = 0
    since: tuple[str, int] | None = None
    form: int = FORM

    @classmethod
    def parse(cls, text: str) -> Request:
        """The request in a command line. Raises ConfigError for one of another version."""
        values = json.loads(text)
        if values["form"] != FORM:  # it may have other fields
            raise ConfigError(
                f"this code is of another version; use {as_typed('compare')} in a worktree of it"
            )
        return cls(**values)


class _KeptDigest(str):
    """The digest of an item, with a copy of it and the length of the log before it."""

    __slots__ = ("array", "log_length")
    array: np.ndarray
    log_length: int


class Keeper(TraceWriter):
    """A trace that keeps the tensors of one event, and torch's operations until its end.

    The trace learns of an event at its end. So operations are logged from the end of the previous event on.
    """

    def __init__(self, request: Request, algo: str, first_iteration: int) -> None:
        super().__init__(Path(request.folder), "step", algo, first_iteration)
        self._folder, self._wanted = Path(request.folder), (request.event, request.index)
        self._logged_from = tuple(request.since or ())
        self._stack = contextlib.ExitStack()
        self._log: Any = None
        self._kept: dict[str, Any] = {}
        self._before: dict[str, int] = {}  # operations before each item
        self._operations: list[LoggedOperation] = []

    def _digest(self, value: Any) -> str:
        with _disable_current_modes():  # operations of the trace are not logged
            item = _KeptDigest(super()._digest(value))
            if self.stepwise:
                item.array = np.array(as_array(value))
                item.log_length = 0 if self._log is None else len(self._log.logs)
        return item

    def _add(self, event: str, index: int, items: Mapping[str, str]) -> str:
        at = (event, 0 if event == ITERATION else index)
        if self.stepwise and at == self._wanted:
            self._kept = dict(items)
            self._before = {item: len(self._calls(each.log_length)) for item, each in self._kept.items()}
            self._operations = [_described(call) for call in self._calls()]
            self._stack.close()
            self._log = None
        elif self.stepwise and at == self._logged_from:
            # Every operation, with digests of its inputs and results, and the calling line.
            self._log = DebugMode(record_stack_trace=True, record_profiler_context=False)
            self._stack.enter_context(self._log)
            self._stack.enter_context(DebugMode.log_tensor_hashes(_bits, hash_inputs=True))
        return super()._add(event, index, items)

    def _calls(self, length: int | None = None) -> list[Any]:
        """The operations that have tensors as results, in the log or in its first part."""
        logs = [] if self._log is None else self._log.logs[:length]
        return [call for call in logs if "hash" in (getattr(call, "log", None) or {})]

    def write_kept(self) -> None:
        np.savez(self._folder / TENSORS, **{item: each.array for item, each in self._kept.items()})
        document = {"before": self._before, "operations": [asdict(each) for each in self._operations]}
        (self._folder / OPERATIONS).write_text(json.dumps(document))


def _bits(tensor: Any) -> str | None:
    if isinstance(tensor, FakeTensor):  # without numbers, while a program is compiled
        return None
    with _disable_current_modes():
        return digest(tensor.detach().cpu())


def _described(call: Any) -> LoggedOperation:
    positional, named = call.log.get("input_hash") or ((), {})
    read = {name: value for name, value in named.items() if name != "out"}  # `out` is only written
    return LoggedOperation(
        operation=str(call.op),
        arguments=_ADDRESS.sub("", f"{call.args_str}{call.kwargs_str}"),
        inputs=[leaf for leaf in tree_leaves((positional, read)) if leaf is not None],
        outputs=[leaf for leaf in tree_leaves(call.log["hash"]) if leaf is not None],
        source=_places(call.stack_trace),
        forward_source=_places(call.fwd_stack_trace),
    )


def _places(trace: str | None) -> list[str]:
    """The lines of both packages in a traceback, as `file:line in function: code`, the innermost first."""
    this, lines = Path(__file__).resolve(), list[str]()
    packages = this.parents[1], project_folder().resolve()
    for file, line, function, code in _PLACE.findall(trace or ""):
        package = next((each for each in packages if Path(file).is_relative_to(each)), None)
        if package is not None and file != str(this):
            lines.insert(0, f"{Path(file).relative_to(package.parent)}:{line} in {function}: {code.strip()}")
    return lines


def replay(job: Job, request: Request) -> None:
    """Carry out the request. Raises ConfigError if the run cannot be run again here."""
    config = job.config
    switches.apply(config)
    if request.event is not None and not config.compile:  # the switch would cause a new compilation
        # With deterministic algorithms, torch then fills uninitialised memory, and such operations agree.
        deterministic: Any = torch.utils.deterministic  # the attribute is missing from torch's type stubs
        deterministic.fill_uninitialized_memory = True
    seed_global_rng(config.seed)
    algorithm, _ = project().build(config)
    with contextlib.closing(algorithm):
        first = 0
        if request.checkpoint is not None:
            first = restore(algorithm, load_checkpoint(Path(request.checkpoint)))
        keeper = Keeper(request, config.algo.name, first)
        attach_probe(algorithm, keeper)
        for iteration in range(first, request.iteration + 1):
            keeper.stepwise = iteration == request.iteration
            keeper.begin(algorithm)
            result = algorithm.train_iteration()
            keeper.end(algorithm, result.metrics)
        keeper.lines.close()
        keeper.write_kept()


if __name__ == "__main__":
    end_with_parent()
    sys.exit(exit_status(lambda: replay(Job.from_environment(), Request.parse(sys.argv[1]))))
