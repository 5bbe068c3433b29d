"""Where the time of training goes, told from outside: by what is called, and in which order.

An algorithm calls `envs.step`, and programs of its own whose names begin with `_update`. These are wrapped on
the objects; what lies between them is named after what it leads to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rltemplate.bench.works import MeasurementError

ENVIRONMENT = "environment"
ACTING = "choosing actions"  # from whatever came before to the step of the environments
UPDATE = "updates"
REST = "around updates"  # targets, drawing batches, shuffling, statistics, and what is reported
OBSERVERS = "observers"
SHARES = (ENVIRONMENT, ACTING, UPDATE, REST, OBSERVERS)


class Timeline:
    """Seconds by what they were spent on, from mark to mark, so that none is lost and none counted twice."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.spent = dict.fromkeys(SHARES, 0.0)
        self._clock = clock
        self._last = clock()
        self._inside = False  # of a call that is timed; what it calls in turn belongs to it
        self._seen: set[str] = set()

    def mark(self, share: str) -> None:
        """What has passed since the last mark was spent on `share`."""
        now = self._clock()
        self.spent[share] += now - self._last
        self._last = now

    def start(self) -> None:
        """Forget everything up to now."""
        self.spent = dict.fromkeys(SHARES, 0.0)
        self._seen = set()
        self._last = self._clock()

    def timed(
        self,
        call: Callable[..., Any],
        name: str,
        before: str,
        share: str,
        sync: Callable[[], None] = lambda: None,
    ) -> Callable[..., Any]:
        """`call`, whose time goes to `share` and the time that leads to it to `before`.

        `sync` waits for what the call has only asked a device for.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self.mark(before)
            self._inside = True
            try:
                result = call(*args, **kwargs)
                sync()
                return result
            finally:
                self._inside = False
                self._seen.add(name)
                self.mark(share)

        return run

    def watch(self, algorithm: Any, sync: Callable[[], None] = lambda: None) -> None:
        """Wrap what the algorithm calls. `MeasurementError` if it has no such parts."""
        envs = algorithm.envs
        steps = callable(getattr(envs, "step", None))
        updates = [
            name
            for name in dir(algorithm)
            if name.startswith("_update") and callable(getattr(algorithm, name))
        ]
        if not steps or not updates:
            missing = "step of its environments" if not steps else "_update of its own"
            raise MeasurementError(f"{type(algorithm).__name__} has no {missing} that could be timed")
        envs.step = self.timed(envs.step, "step", ACTING, ENVIRONMENT)
        for name in updates:
            setattr(algorithm, name, self.timed(getattr(algorithm, name), "update", REST, UPDATE, sync))

    def shares(self) -> dict[str, float]:
        """Parts of the whole. `MeasurementError` if steps or updates went by unseen."""
        for name in ("step", "update"):
            if name not in self._seen:
                raise MeasurementError(f"no {name} was seen: it is no longer called as it is timed here")
        whole = sum(self.spent.values())
        return {share: seconds / whole for share, seconds in self.spent.items()}
