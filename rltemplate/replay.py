"""A part of a recorded run once more, in a fresh process, with a closer look at it.

`python -P -m rltemplate.replay` finds the run's job and a `Request` in its environment. It goes on from a
checkpoint or starts at the beginning, follows the run with fingerprints up to one iteration, takes every
step and update of that one, and keeps what it was asked for: tensors, or the operations of torch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltemplate.config import from_dict
from rltemplate.foreign_rng import seed_foreign_code
from rltemplate.launch import Job
from rltemplate.run import determinism
from rltemplate.run.faults import VARIABLE as FAULT
from rltemplate.run.faults import Fault
from rltemplate.run.trace import Trace, digest
from rltemplate.train import build_algorithm, go_on
from rltemplate.types import ConfigError, Probe, V

if TYPE_CHECKING:
    import numpy as np

MODULE = "rltemplate.replay"
REQUEST_VARIABLE = "RLTEMPLATE_REPLAY"
TENSORS, ITEMS, OPERATIONS = "tensors.npz", "items.json", "operations.jsonl"
_REFUSED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to look at.

    `checkpoint` is a file in the run's folder, or None for the beginning. The iteration `iteration` is
    traced by step and update; of its event `event` number `index`, if one is named, tensors and operations
    are kept. Everything is written to `folder`.
    """

    run_dir: str
    folder: str
    iteration: int
    checkpoint: str | None = None
    event: str | None = None
    index: int = 0

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> Request:
        """The request of this process."""
        return cls(**json.loads(os.environ.pop(REQUEST_VARIABLE)))


class Keeper(Probe):
    """Keeps the tensors of one event, and the operations that torch carries out in it."""

    def __init__(self, inner: Probe, request: Request) -> None:
        """Hands everything on to `inner`."""
        self._inner = inner
        self._request = request
        self._stack = contextlib.ExitStack()
        self._log: Any = None
        self.inside = False  # whether the iteration is the one that was asked for
        self.items: list[dict[str, Any]] = []
        self.tensors: list[np.ndarray] = []
        self.operations: list[dict[str, Any]] = []

    def event(self, name: str, index: int = 0) -> None:
        """Begin or end keeping."""
        self.end()
        self._inner.event(name, index)
        if self.inside and (name, index) == (self._request.event, self._request.index):
            self._log = self._stack.enter_context(_operations())

    def __call__(self, item: str, value: V) -> V:
        """Keep a copy, if this is the event."""
        with _unobserved():
            value = self._inner(item, value)
            if self._log is not None:
                self.items.append({"item": item, "after_operations": len(self._log.logs)})
                self.tensors.append(_copied(value))
        return value

    def end(self) -> None:
        """The event is over."""
        if self._log is not None:
            log, self._log = self._log, None
            self._stack.close()
            self.operations = [call for call in map(_described, log.logs) if call is not None]

    def write(self, folder: Path) -> None:
        """Everything that was kept."""
        import numpy as np

        (folder / ITEMS).write_text(json.dumps(self.items))
        named: dict[str, Any] = {str(i): tensor for i, tensor in enumerate(self.tensors)}
        np.savez(folder / TENSORS, **named)
        with (folder / OPERATIONS).open("w") as file:
            for call in self.operations:
                file.write(json.dumps(call) + "\n")


def _copied(value: Any) -> np.ndarray:
    import numpy as np

    return np.array(value.detach().cpu().numpy() if hasattr(value, "detach") else value)


@contextlib.contextmanager
def _unobserved() -> Iterator[None]:
    """Operations in the block are not the run's own, and are not logged."""
    import torch

    with torch.utils._python_dispatch._disable_current_modes():
        yield


@contextlib.contextmanager
def _operations() -> Iterator[Any]:
    """torch's log of every operation with digests of what went in and came out, and the calling line."""
    from torch.utils._debug_mode import DebugMode

    mode = DebugMode(record_stack_trace=True, record_profiler_context=False)
    with mode, DebugMode.log_tensor_hashes(_bits, hash_inputs=True):
        yield mode


def _bits(tensor: Any) -> str:
    with _unobserved():
        return digest(tensor.detach().cpu())


def _described(call: Any) -> dict[str, Any] | None:
    """One operation, or None for what has no result that could differ."""
    from torch.utils._pytree import tree_leaves

    if not getattr(call, "log", None) or "hash" not in call.log:
        return None
    return {
        "operation": str(call.op),
        "inputs": [leaf for leaf in tree_leaves(call.log.get("input_hash")) if leaf is not None],
        "outputs": [leaf for leaf in tree_leaves(call.log["hash"]) if leaf is not None],
        "source": _source(call.stack_trace),
        "forward_source": _source(call.fwd_stack_trace),
    }


def _source(trace: str | None) -> str | None:
    """The innermost line of this project in a traceback, as `file:line: code`."""
    project = str(Path(__file__).resolve().parent)
    own = None
    lines = (trace or "").splitlines()
    for line, code in itertools.pairwise([*lines, ""]):
        place = line.strip()
        if place.startswith(f'File "{project}') and f'{Path(__file__).name}"' not in place:
            file, _, rest = place.removeprefix('File "').partition('", line ')
            number, _, function = rest.partition(", in ")
            own = f"{Path(file).relative_to(Path(project).parent)}:{number} in {function}: {code.strip()}"
    return own


def replay(job: Job, request: Request) -> None:
    """Do what is asked. Raises ConfigError where the run cannot be run again here."""
    config = from_dict(job.config)
    determinism.apply(config.determinism, config.num_threads, config.compile, config.device.name)
    seed_foreign_code(config.seed)
    algorithm, _ = build_algorithm(config)
    try:
        first = 0
        if request.checkpoint is not None:
            first = go_on(algorithm, Path(request.run_dir), Path(request.checkpoint))
        folder = Path(request.folder)
        device = determinism.resolve_device(config.device.name).type
        trace = Trace(folder, "step", config.algo.name, device, first)
        keeper = Keeper(trace, request)
        probe: Probe = keeper
        if FAULT in os.environ:
            probe = Fault(keeper, os.environ[FAULT], first)
        algorithm.probe = probe
        for iteration in range(first, request.iteration + 1):
            trace.step_by_step = keeper.inside = iteration == request.iteration
            result = algorithm.train_iteration()
            keeper.end()
            trace.end_iteration(algorithm.env_steps, result.probes)
        trace.close()
        keeper.write(folder)
    finally:
        algorithm.close()


def main() -> int:
    """The process; returns the exit status."""
    try:
        replay(Job.from_environment(), Request.from_environment())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
