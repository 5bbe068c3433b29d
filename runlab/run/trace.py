"""The trace: fingerprints of everything that a run computed, in order.

One JSON value per line. The first line says what the file is. `["items", event, names]` names the items of
an event, and `[event, index, digests]` gives their digests, 16 hex digits each. An iteration ends with
`["iteration", number, environment steps, digests, chain]`, where `chain` is the digest of the chain before
and of everything since: equal chains mean equal pasts. So two runs diverge where the first line differs. The
whole state of the algorithm is in it at the start and at the end of each iteration, entry by entry
(`start/net/mu` is the entry `net`, `mu` of its `state_dict`), so that a change between two iterations shows.
Of a replay buffer only new transitions of the iteration are in it.

With detail `iteration` each iteration has one line, with the parts of the iteration, such as a rollout. With
detail `step` every draw of a random stream and every result of an environment step, a decision or an update
has its own digest.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import xxhash

from runlab.errors import ConfigError, RunError
from runlab.interfaces import Algorithm, IterationResult, Probe, replay_of
from runlab.run import paths
from runlab.run.files import LineFile
from runlab.run.limits import DEEPEST
from runlab.run.record import TraceFacts
from runlab.run.validation import Line

FORMAT, VERSION, DIGEST = "runlab-trace", 1, "xxh3_64"
# A line that names the items of an event.
NAMES = msgspec.json.Decoder(tuple[Literal["items"], Line, list[Line]])
NO_PAST = "0" * 32  # chain before the first iteration
RESET = "reset"  # this event happens once, and is recorded at every detail
OWN_ENTRIES = {"foreign", "run"}  # of a checkpoint, beside the state of the algorithm
START, END = "start", "end"  # names of entries at both ends of an iteration begin with these


def as_array(value: Any) -> Any:
    """A tensor as an array, or the array itself; formats that NumPy lacks as float32, which is exact."""
    if not hasattr(value, "detach"):
        return value
    tensor = value.detach().cpu()
    try:
        return tensor.numpy()
    except TypeError:  # bfloat16, float8
        return tensor.float().numpy()


def digest(value: Any) -> str:
    """16 hex digits from the bits of a tensor or an array; its shape is not part of them."""
    array = as_array(value)
    if not array.flags.c_contiguous:
        array = array.copy(order="C")
    return xxhash.xxh3_64_hexdigest(array.data if array.size else b"")


def named_leaves(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors and arrays in results, by the fields of the NamedTuples that hold them."""
    fields = values._asdict() if hasattr(values, "_asdict") else values
    if isinstance(fields, Mapping):
        for name, value in fields.items():
            yield from named_leaves(value, f"{path}/{name}" if path else name)
    elif isinstance(values, tuple | list):
        for value in values:
            yield from named_leaves(value, path)
    elif hasattr(values, "dtype"):
        yield path, values


def entries(state: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The tensors, numbers and texts in nested dictionaries and lists, named by their keys and sorted.

    `RunError` for a value that no checkpoint keeps: torch would write it, and refuse to read it.
    """
    kind = type(state)
    if path.count("/") > DEEPEST:
        raise RunError(f"{path[:80]}... in the algorithm's state_dict() is nested too deeply")
    if kind in (dict, OrderedDict):
        if odd := [key for key in state if type(key) not in (str, int)]:
            raise RunError(f"{path} in the algorithm's state_dict() has the key {odd[0]!r}, expected a text")
        for key in sorted(state, key=lambda key: (type(key) is str, key)):
            yield from entries(state[key], f"{path}/{key}")
    elif kind in (list, tuple):
        for place, value in enumerate(state):
            yield from entries(value, f"{path}/{place}")
    elif hasattr(state, "detach"):
        yield path, state
    elif kind in (bool, int, float, str):
        import numpy as np  # not needed to compare traces

        if kind is int and state.bit_length() > 63:  # numpy has no such number, and its generators have them
            state = str(state)
        if isinstance(state, str):
            yield path, np.frombuffer(state.encode(errors="surrogatepass"), np.uint8)
        else:
            yield path, np.asarray(state)
    elif state is not None:
        raise RunError(
            f"{path} in the algorithm's state_dict() is a {kind.__module__}.{kind.__qualname__}, which a "
            "checkpoint does not keep; it has tensors, numbers, strings and None in dicts and lists"
        )


def check_state(algorithm: Algorithm) -> None:
    """Raise `ConfigError` if a checkpoint would not keep all of an algorithm's state."""
    try:
        state = algorithm.state_dict()
        for _ in entries(state, "state"):
            pass
    except RunError as error:
        raise ConfigError(f"{error}") from error
    if own := sorted(OWN_ENTRIES.intersection(state)):
        raise ConfigError(f"state_dict() of the algorithm has {own[0]}, an entry of the checkpoint itself")
    if state.get("env_steps", algorithm.env_steps) != algorithm.env_steps:
        raise ConfigError("env_steps in state_dict() of the algorithm is another number than its env_steps")


def first_not_finite(algorithm: Algorithm, result: IterationResult) -> str | None:
    """Name, value and index of the first NaN or infinity in the losses, then in the state."""
    losses = [(name, value) for name, value in result.metrics.items() if name.startswith("loss/")]
    for name, values in (*losses, *entries(algorithm.state_dict(), END)):
        if not hasattr(values, "is_floating_point") or not values.is_floating_point():
            continue
        # A finite sum has finite terms, and takes a tenth of the time of testing each. A sum may overflow.
        if not math.isfinite(values.sum().item()) and len(bad := (~values.isfinite()).nonzero()):
            return f"{name} became {values[tuple(bad[0])].item()} at {bad[0].tolist()}"
    return None


def add_item(items: dict[str, Any], item: str, value: Any) -> None:
    """Add an item. A second one of the same name gets a number, such as a second draw of a stream."""
    name, number = item, 1
    while name in items:
        number += 1
        name = f"{item}#{number}"
    items[name] = value


class TraceWriter(Probe):
    """Writes `trace.jsonl` during a run.

    The training loop calls `begin` and `end` around each iteration. Values between two iterations are not of
    the run: an observer may have asked the algorithm to act.
    """

    def __init__(self, run_dir: Path, detail: str, algo: str, first_iteration: int = 0) -> None:
        """`detail` is `iteration` or `step`; the first line of an iteration is number `first_iteration`."""
        self.stepwise = detail == "step"  # may change between two iterations
        self.lines = LineFile(run_dir / paths.TRACE)
        self._names: dict[str, list[str]] = {}
        self._items: dict[str, str] = {}  # of the event under way
        self._parts: dict[str, str] = {}  # of the iteration under way
        self._counts: Counter[str] = Counter()  # events in this iteration
        self._begun = False  # an iteration is under way
        self._held = 0  # transitions in the replay buffer when the iteration began
        self._since = xxhash.xxh3_128()
        self._iteration = first_iteration
        self.chain = NO_PAST
        head = {"format": FORMAT, "version": VERSION, "digest": DIGEST, "detail": detail, "algo": algo}
        self._new = [_json(head)]  # lines that wait for the end of the iteration

    def resume(self, iterations: int, chain: str) -> None:
        """Continue after `iterations` iterations, which ended with `chain`; the file ends there."""
        self._iteration, self.chain = iterations, chain
        path, head = self.lines.path, self._new
        try:
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                for line in file:
                    self._new = []  # the file has its first line
                    if line.startswith(b'["items",'):
                        _, event, self._names[event] = NAMES.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            path.replace(path.with_name(paths.OLD_TRACE))
            self._new, self._names = head, {}
            self.lines.warn(f"{path} is damaged: a new one begins here, and {paths.OLD_TRACE} keeps it")

    def begin(self, algorithm: Algorithm) -> None:
        """Take the state with which an iteration begins."""
        self._begun = True
        self._counts.clear()
        replay = replay_of(algorithm)
        self._held = 0 if replay is None else replay.added
        state = entries(algorithm.state_dict(), START)
        self._parts = {item: self._digest(value) for item, value in state}
        if self.stepwise or self._iteration == 0:
            self._write_event(START, self._parts)
            self._parts = {}

    def draw(self, stream: str, value: Any) -> None:
        if self.stepwise and self._begun:
            add_item(self._items, f"draw/{stream}", self._digest(value))

    def results(self, event: str, values: Any, whole: bool = False) -> None:
        if not (self._begun and (whole or self.stepwise or event == RESET)):
            return
        for item, value in named_leaves(values):
            text = self._digest(value)
            add_item(self._items, item, text)
            if whole:
                add_item(self._parts, item, text)
        items, self._items = self._items, {}
        if self.stepwise or event == RESET:
            self._write_event(event, items)

    def end(self, algorithm: Algorithm, metrics: Mapping[str, Any]) -> None:
        """Write the line of an iteration that has ended, with its parts and the state at its end."""
        items, self._items, self._begun = self._parts, {}, False
        state = [*entries(algorithm.state_dict(), END)]
        if (replay := replay_of(algorithm)) is not None:
            state += entries(replay.since(self._held), f"{END}/experience")
        for name, value in (*metrics.items(), *state):
            add_item(items, name, self._digest(value))
        text = self._add("iteration", algorithm.env_steps, items)
        past = xxhash.xxh3_128(bytes.fromhex(self.chain))
        past.update(self._since.digest())
        self.chain = past.hexdigest()
        self._since.reset()
        self._new.append(_json(["iteration", self._iteration, algorithm.env_steps, text, self.chain]))
        self._iteration += 1
        self.lines.write("\n".join(self._new))
        self._new = []

    def facts(self) -> TraceFacts:
        """The chain and the number of iterations so far, for the record."""
        return TraceFacts(digest=self.chain, iterations=self._iteration)

    def _digest(self, value: Any) -> str:
        return digest(value)

    def _write_event(self, event: str, items: Mapping[str, str]) -> None:
        index = self._counts[event]
        self._counts[event] += 1
        if items:
            self._new.append(_json([event, index, self._add(event, index, items)]))

    def _add(self, event: str, index: int, items: Mapping[str, str]) -> str:
        """Add the items of an event to the chain, and their names to the file where they are new."""
        names = list(items)
        if self._names.get(event) != names:
            self._names[event] = names
            self._new.append(_json(["items", event, names]))
        text = "".join(items.values())
        self._since.update(f"{event}{index}{text}".encode())
        return text


_json = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps() would make one for each line
