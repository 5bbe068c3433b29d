"""A part of a recorded run once more, in a process of its own, with a closer look at it.

`python -P -m rltemplate.rerun.replay REQUEST` finds the run's job in its environment. It goes on from a
checkpoint or starts at the beginning, follows the run with fingerprints up to one iteration, takes every step
and update of that one, and keeps the tensors of one event and torch's operations.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltemplate.config.loading import from_dict
from rltemplate.determinism import switches
from rltemplate.rerun.operations import LoggedOperation
from rltemplate.run.checkpoint import load_checkpoint
from rltemplate.run.job import Job
from rltemplate.run.state import START, State
from rltemplate.run.trace import Trace, add_item, digest, named_leaves
from rltemplate.types import Algorithm, ConfigError, Probe

if TYPE_CHECKING:
    import numpy as np

TENSORS, ITEMS, OPERATIONS = "tensors.npz", "items.json", "operations.jsonl"
RESULTS = "iteration"  # the event that ends an iteration, with all that it hands out
REFUSED, NO_START = 2, 3  # exit statuses: the run cannot be run again here, or not from this checkpoint
# The version of `Request`, of the files and of the exit statuses. The process may be older or newer code than
# the one that starts it, which reads this number in its source.
FORM = 3

# Addresses of objects in memory, such as generators, in the text of an operation's arguments.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The part of the run to look at.

    `checkpoint` is the file of one, or None for the beginning. The iteration `iteration` is traced by step
    and update. Of its event `event` number `index` (or RESULTS) tensors and operations are kept; with
    `since`, operations from that earlier event on, for the first item of an event may be made before it
    opens. Files are written to `folder`.
    """

    folder: str
    iteration: int
    checkpoint: str | None = None
    event: str | None = None
    index: int = 0
    since: tuple[str, int] | None = None

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        """The request that `to_json` wrote."""
        values = json.loads(text)
        since = values.pop("since")
        return cls(**values, since=None if since is None else tuple(since))


class Keeper(Probe):
    """Keeps the tensors of one event, and the operations that torch carries out in it.

    An event has its name when it ends. So the operations are logged from the end of the event before.
    """

    def __init__(self, inner: Probe, request: Request) -> None:
        """Hands everything on to `inner`."""
        self._inner = inner
        self._wanted, self._since = (request.event, request.index), request.since
        self._stack = contextlib.ExitStack()
        self._log: Any = None
        self._state = State()
        self._counts: Counter[str] = Counter()
        self.inside = False  # in the wanted iteration
        self._kept: dict[str, tuple[int, np.ndarray]] = {}  # number of operations before, and the value
        self.operations: list[LoggedOperation] = []

    def begin(self, algorithm: Algorithm) -> None:
        """Keep the state with which an iteration begins, if this is the event."""
        self._counts.clear()
        self._inner.begin(algorithm)
        for item, value in self._state.begin(algorithm):
            if self.inside and self._wanted[0] in (START, RESULTS):
                self._keep(item, value)
        self._ended(START)

    def draw(self, stream: str, value: Any) -> None:
        """Keep a copy, if this is the event."""
        with _unobserved():
            self._inner.draw(stream, value)
            if self._log is not None:
                self._keep(f"draw/{stream}", value)

    def results(self, event: str, values: Any, whole: bool = False) -> None:
        """Keep copies, if this is the event or the end of the iteration."""
        with _unobserved():
            self._inner.results(event, values, whole)
            here = (event, self._counts[event]) == self._wanted
            if self.inside and (here or (whole and self._wanted[0] == RESULTS)):
                for item, value in named_leaves(values):
                    self._keep(item, value)
        self._ended(event)

    def end_iteration(self, algorithm: Algorithm, metrics: Mapping[str, Any]) -> None:
        """Metrics and state at the end of the iteration."""
        if self.inside and self._wanted[0] == RESULTS:
            with _unobserved():
                for item, value in (*metrics.items(), *self._state.end(algorithm)):
                    self._keep(item, value)
        self._close()

    def _ended(self, event: str) -> None:
        at = (event, self._counts[event])
        self._counts[event] += 1
        if self.inside and at == self._wanted:
            self._close()
        elif self.inside and at == self._since:
            self._log = self._stack.enter_context(_operations())

    def _keep(self, item: str, value: Any) -> None:
        import numpy as np

        before = 0 if self._log is None else len(self._log.logs)
        array = np.array(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
        add_item(self._kept, item, (before, array))

    def _close(self) -> None:
        if self._log is not None:
            log, self._log = self._log, None
            self._stack.close()
            described = [_described(call) for call in log.logs]
            self.operations = [call for call in described if call is not None]
            for item, (number, array) in self._kept.items():
                self._kept[item] = sum(call is not None for call in described[:number]), array

    def write(self, folder: Path) -> None:
        """Write everything that was kept."""
        import numpy as np

        items = [{"item": item, "after_operations": before} for item, (before, _) in self._kept.items()]
        (folder / ITEMS).write_text(json.dumps(items))
        named: dict[str, Any] = {str(i): array for i, (_, array) in enumerate(self._kept.values())}
        np.savez(folder / TENSORS, **named)
        with (folder / OPERATIONS).open("w") as file:
            file.writelines(json.dumps(asdict(call)) + "\n" for call in self.operations)


@contextlib.contextmanager
def _unobserved() -> Iterator[None]:
    """Operations in the block are not the run's own, and are not logged."""
    import torch

    with torch.utils._python_dispatch._disable_current_modes():
        yield


@contextlib.contextmanager
def _operations() -> Iterator[Any]:
    """torch's log of every operation with digests of its inputs and results, and the calling line."""
    from torch.utils._debug_mode import DebugMode

    mode = DebugMode(record_stack_trace=True, record_profiler_context=False)
    with mode, DebugMode.log_tensor_hashes(_bits, hash_inputs=True):
        yield mode


def _bits(tensor: Any) -> str | None:
    from torch._subclasses import FakeTensor

    if isinstance(tensor, FakeTensor):  # of a program that is being compiled, without numbers
        return None
    with _unobserved():
        return digest(tensor.detach().cpu())


def _described(call: Any) -> LoggedOperation | None:
    """One operation, or None if it has no result that could differ."""
    from torch.utils._pytree import tree_leaves

    if not getattr(call, "log", None) or "hash" not in call.log:
        return None
    given, named = call.log.get("input_hash") or ((), {})
    read = {name: value for name, value in named.items() if name != "out"}  # which is only written
    return LoggedOperation(
        operation=str(call.op),
        arguments=_ADDRESS.sub("", f"{call.args_str}{call.kwargs_str}"),
        inputs=[leaf for leaf in tree_leaves((given, read)) if leaf is not None],
        outputs=[leaf for leaf in tree_leaves(call.log["hash"]) if leaf is not None],
        source=_places(call.stack_trace),
        forward_source=_places(call.fwd_stack_trace),
    )


def _places(trace: str | None) -> list[str]:
    """The lines of this project in a traceback, as `file:line in function: code`, the innermost first."""
    project = Path(__file__).resolve().parents[1]
    own: list[str] = []
    lines = (trace or "").splitlines()
    for line, code in itertools.pairwise([*lines, ""]):
        place = line.strip()
        if place.startswith(f'File "{project}{os.sep}'):
            file, _, rest = place.removeprefix('File "').partition('", line ')
            number, _, function = rest.partition(", in ")
            if Path(file).resolve() != Path(__file__).resolve():
                relative = Path(file).relative_to(project.parent)
                own.insert(0, f"{relative}:{number} in {function}: {code.strip()}")
    return own


class _NoStart(Exception):
    """The run cannot go on from the checkpoint."""


def replay(job: Job, request: Request) -> None:
    """Do what is asked. Raises ConfigError where the run cannot be run again here."""
    # These load torch, which a process that only starts this one does not need.
    import torch

    from rltemplate.algos.build import build_algorithm
    from rltemplate.envs.global_rng import seed_global_rng
    from rltemplate.run.continuation import restore

    config = from_dict(job.config)
    switches.apply(config.determinism, config.num_threads, config.compile, config.device.name)
    if request.event is not None and not config.compile:  # the compiler would start over
        # Operations on memory that was never written then agree, where torch is deterministic.
        deterministic: Any = torch.utils.deterministic  # the attribute is missing from torch's type stubs
        deterministic.fill_uninitialized_memory = True
    seed_global_rng(config.seed)
    algorithm, _ = build_algorithm(config)
    try:
        first = 0
        if request.checkpoint is not None:
            try:
                first = restore(algorithm, load_checkpoint(Path(request.checkpoint)))
            except ConfigError as error:
                raise _NoStart(str(error)) from error
        folder = Path(request.folder)
        device = switches.resolve_device(config.device.name).type
        trace = Trace(folder, "step", config.algo.name, device, first)
        algorithm.probe = keeper = Keeper(trace, request)
        for iteration in range(first, request.iteration + 1):
            trace.step_by_step = keeper.inside = iteration == request.iteration
            result = algorithm.train_iteration()
            keeper.end_iteration(algorithm, result.metrics)
            trace.end_iteration(algorithm, result.metrics)
        trace.close()
        keeper.write(folder)
    finally:
        algorithm.close()


def main(request: str) -> int:
    """The process; returns the exit status."""
    try:
        replay(Job.from_environment(), Request.from_json(request))
    except (ConfigError, _NoStart) as error:
        print(f"error: {error}", file=sys.stderr)
        return NO_START if isinstance(error, _NoStart) else REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
