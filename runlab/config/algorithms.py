"""Declaration of hyperparameters (field helpers, `AlgoConfig`) and of an algorithm (`Entry`).

The table itself belongs to the project (config/project.py). The process that checks a command does not import
torch, which takes a second. So an algorithm and its configuration are in two modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

if TYPE_CHECKING:
    from runlab.interfaces import Codec

# Upper bounds of environment steps (three years at 10,000 a second) and of all other counts.
MOST_STEPS = 10**12
_MOST = 10**9


class Names(TypedDict, total=False):
    """Further arguments of each of these functions."""

    aliases: str  # names in other programs, for hints
    needs: str  # another field: while that one is false, zero or "none", this one has no effect


def setting(**metadata: Any) -> Any:
    """A configuration field without a default; with what `Names` lists."""
    return field(metadata=metadata)


def number(low: float, high: float = _MOST, *, open_low: bool = False, **names: Unpack[Names]) -> Any:
    """A field whose value must lie in [low, high] (or (low, high])."""
    return setting(low=low, high=high, open_low=open_low, **names)


def positive(high: float = float(_MOST), **names: Unpack[Names]) -> Any:
    """A field whose value must be greater than zero."""
    return number(0.0, high, open_low=True, **names)


def choice(*choices: str | None, **names: Unpack[Names]) -> Any:
    """A field whose value must be one of `choices`."""
    return setting(choices=choices, **names)


def count(high: float = _MOST, **names: Unpack[Names]) -> Any:
    """A field that counts something, or lists counts: 1 or more."""
    return number(1, high, **names)


# A coefficient over a run: constant, or falling linearly to zero at the last step.
Schedule = StrEnum("Schedule", ["constant", "linear"])


@dataclass(slots=True, kw_only=True)
class AlgoConfig:
    """The hyperparameters of an algorithm. A subclass has a field for each key of its file in conf/algo/.

    Every method has a default that suits an algorithm without networks.
    """

    name: str

    def problems(self, num_envs: int) -> Iterator[str]:
        """Yield combinations of values that cannot work."""
        return iter(())

    def fitted(self, codec: Codec) -> Self:
        """The configuration in which values are chosen that depend on an environment.

        `ConfigError` for values that do not suit it.
        """
        return self

    def product_problems(self, products: str) -> Iterator[str]:
        """Yield values that cannot work with a way of matrix products, `determinism.products`."""
        return iter(())

    def acts_as_it_learns(self) -> bool:
        """False if the policy of a rollout computes in other numbers, so that no metric need be 0."""
        return True

    def notes(self, num_envs: int, total_env_steps: int) -> Iterator[str]:
        """Yield warnings about values that work and are probably a mistake."""
        return iter(())

    def memory(self, num_envs: int, obs_size: int, action_size: int) -> Iterator[tuple[str, int]]:
        """Yield the large parts of a run in memory: what takes it, and how many float32 numbers it has.

        `obs_size`: the numbers of an observation; four bytes of an image are one number.
        """
        return iter(())

    def least_parameters(self) -> int:
        """A lower bound of the number of network weights; a smaller checkpoint is refused."""
        return 0

    def multiplications(self, num_envs: int) -> int:
        """Multiplications in the largest matrix product of an update; decides on a second thread."""
        return 0

    def compile_from(self) -> int | None:
        """Environment steps of a run from which compiled updates save more time than compiling takes.

        None if nothing is compiled.
        """
        return None

    def for_acting(self) -> Self:
        """A configuration for acting alone, without memory for learning."""
        return self

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Yield each hyperparameter that changes nothing, and the one that keeps it from having an effect."""
        for each in fields(self):
            needs = each.metadata.get("needs")
            if needs and getattr(self, needs) in (False, 0, None, "none"):
                yield each.name, needs

    def tied_to_total(self) -> Iterator[str]:
        """Yield settings that depend on `total_env_steps`: coefficients that fall to zero at the end."""
        for each in fields(self):
            if getattr(self, each.name) is Schedule.linear:
                yield f"algo.{each.name}=linear"


@dataclass(frozen=True, slots=True)
class Entry:
    """An algorithm: the type of its configuration, and `module:class` of its implementation.

    `needs_bounded_box`: actions must be real numbers between finite bounds. `needs_discrete`: an action must
    be one whole number. `takes_images`: observations may begin with an image of bytes. `takes_masks`: it
    applies a mask of actions at their end. `console`: its metrics on the console, each with a label.
    `zero_metric`: the metric that must be 0 where a row's result depends on the row alone, if
    `acts_as_it_learns`. `values`: the content of its file for conf/algo/, where a package brings it.
    `former`: hyperparameters of earlier versions, each with the value that stands for what the algorithm does
    now; with this value, recorded runs and policy files are read.
    """

    config: type[AlgoConfig]
    implementation: str
    needs_bounded_box: bool = False
    needs_discrete: bool = False
    takes_images: bool = False
    takes_masks: bool = False
    console: Mapping[str, str] = field(default_factory=dict)
    zero_metric: str | None = None
    values: Mapping[str, Any] | None = None
    former: Mapping[str, Any] = field(default_factory=dict)
