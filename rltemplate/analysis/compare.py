"""Two recorded runs side by side: where their traces part, what to look at, and what else differs."""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rltemplate.analysis import traces
from rltemplate.analysis.traces import Divergence, Reach
from rltemplate.run import paths
from rltemplate.run.read import read_config
from rltemplate.run.record import read_record
from rltemplate.types import BOOKKEEPING_KEYS, ConfigError, affects_results

IDENTICAL: Literal["identical"] = "identical"
DIVERGED: Literal["diverged"] = "diverged"
SHORTER: Literal["shorter"] = "shorter"

ABSENT = "(absent)"  # stands for the value that one of the runs does not have
SECTIONS = ("code", "configuration", "versions", "machine", "settings", "environment")


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs. `iterations` that ended and `env_steps` in them are as its trace says."""

    run: str
    run_dir: str
    status: str
    iterations: int
    env_steps: int


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact, other than the trace, in which the runs differ; `section` is one of SECTIONS."""

    section: str
    key: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare_runs` found.

    `verdict`: "identical"; "diverged", then `divergence` says where; or "shorter", if the traces are equal as
    far as both go and one of them ends earlier. `look_at` are lines of advice, in the order in which to
    follow them. `differences` come in the order of SECTIONS. `fewer` names the run, "a" or "b", whose trace
    is an older one with fewer items: only those that both have were compared.
    """

    verdict: Literal["identical", "diverged", "shorter"]
    a: Side
    b: Side
    detail: str
    divergence: Divergence | None
    look_at: list[str]
    differences: list[Difference]
    fewer: list[str] = field(default_factory=list)


def compare_runs(a: Path, b: Path) -> Comparison:
    """Compare the runs in two folders. Raises ConfigError, in one line, if that cannot be done."""
    facts = [_Facts(run_dir) for run_dir in (a, b)]
    with (
        traces.open_trace(a, facts[0].why_no_trace()) as trace_a,
        traces.open_trace(b, facts[1].why_no_trace()) as trace_b,
    ):
        traces.check_comparable(trace_a, trace_b)
        divergence = traces.first_difference(trace_a, trace_b)
        # By number, for equal events have lines of unequal length where one of the traces has fewer items.
        lengths = [sum(1 for _ in trace.events()) for trace in (trace_a, trace_b)]
        fewer = [name for name, trace in (("a", trace_a), ("b", trace_b)) if not trace.shows_state]
        sides = facts[0].side(trace_a.reach), facts[1].side(trace_b.reach)
    differences = list(_differences(*facts))
    verdict: Literal["identical", "diverged", "shorter"] = IDENTICAL
    look_at: list[str] = []
    if divergence is not None:
        verdict = DIVERGED
        changed = _code_differs(differences) or bool(_changed_keys(differences))
        look_at = advice(divergence, trace_a.detail, trace_a.digest, changed)
    elif lengths[0] != lengths[1]:
        verdict = SHORTER
    if verdict != IDENTICAL:
        look_at[:0] = _first_of_all(differences, sides, divergence)
    detail, fewer = trace_a.detail, fewer if len(fewer) == 1 else []
    return Comparison(verdict, sides[0], sides[1], detail, divergence, look_at, differences, fewer)


# --- What to look at -------------------------------------------------------------------------------------

_ENVIRONMENT = (
    "The environment itself: versions of gymnasium and of the simulator; the C library's sin, cos and pow, "
    "which differ by its version and with or without fused multiply-add; BLAS behind np.linalg.norm, as in "
    "rewards of Reacher and Pusher; sums over a Python set, whose order is that of hashes."
)

# By event and item, by item, and by the parts of an item's name between slashes, the first part first and
# then from the last on.
LOOK_AT: dict[str, str] = {
    "init": (
        "Initial weights: the stream 'init' and, with orthogonal_init, LAPACK, which gives other bits for "
        "another number of threads (num_threads) and another instruction set (cpu_capability, cpu_flags)."
    ),
    "reset:obs": (
        "Seeds of the environments (seed, env.num_envs), env.kwargs, and the versions of gymnasium and of "
        "the simulator. No action has been taken yet, so the learner has no part in it."
    ),
    "stream": (
        "A random stream: its seed at the start; later a draw too many, a draw too few, or a draw of another "
        "size since the state was last compared."
    ),
    "obs": _ENVIRONMENT,
    "reward": _ENVIRONMENT,
    "terminated": _ENVIRONMENT,
    "truncated": f"{_ENVIRONMENT} Time limits are env.max_episode_steps.",
    "next_obs": _ENVIRONMENT,
    "last_obs": _ENVIRONMENT,
    "final_obs": _ENVIRONMENT,
    "normalized_obs": (
        "The running mean and variance of observations: when they are updated, whether they are frozen, "
        "obs_clip, and the order of the sums over parallel environments."
    ),
    "policy": (
        "The policy's forward pass: rows depend on the batch they are in (env.num_envs), on num_threads and "
        "on MKL's branch (cpu_capability, MKL_CBWR); a layer with one output is the first to show it."
    ),
    "noise": (
        "The stream of the noise: a draw more or less, or of another size. torch.randn gives other numbers "
        "for fewer than 16 values, and the noise of each environment changes with env.num_envs."
    ),
    "action": (
        "The step from output and noise to an action: exp, tanh, softplus and the like change with the "
        "instruction set and MKL's branch, some of them with a tensor's size and strides."
    ),
    "log_prob": (
        "Log-probabilities: exp and log change with the instruction set and MKL's branch, softplus and pow "
        "also with a tensor's size and strides."
    ),
    "scaled_reward": (
        "The running variance of returns (normalize_reward, reward_clip) and what is added to a reward where "
        "an episode was truncated, which is a value of the critic."
    ),
    "value": (
        "The value head has one output: its products are summed in an order that depends on batch size, "
        "num_threads and MKL's branch. It often differs first, with the policy still equal."
    ),
    "advantage": (
        "Advantages: mean and standard deviation over the batch; sums of 32,768 values or more are split "
        "over the threads (num_threads). Then gamma, gae_lambda."
    ),
    "order": "The stream 'minibatch': a permutation more or less, or of another number of samples.",
    "loss": (
        "The forward pass on a minibatch: the same rows in another batch give other bits, so batch size, "
        "num_threads and MKL's branch; then the mean over the batch, split over threads from 32,768 values."
    ),
    "gradient": (
        "The backward pass: products for the weights are split over num_threads; gradients of indexing "
        "with repeated indices need deterministic_algorithms; then the norm that clips them."
    ),
    "optimizer": (
        "Moments of Adam: multiply-add, fused or not, changes with the instruction set, and with the "
        "implementation (foreach, fused, single tensors)."
    ),
    "params": (
        "The last step of Adam: torch.sqrt is not correctly rounded and follows MKL's branch; learning rate "
        "and its schedule, which knows total_env_steps."
    ),
    "target_params": "The moving average of the parameters: tau, how often it is taken, its multiply-add.",
    "obs_norm": "The running mean and variance of observations: sums over parallel environments, in order.",
    "return_norm": "The running variance of returns: sums over parallel environments, episode ends.",
    "replay_index": (
        "The stream 'replay': a draw more or less, or another number of stored transitions (buffer_size, "
        "batch_size, env.num_envs)."
    ),
    "update_noise": (
        "The stream 'update': a draw more or less, or of another size (batch_size). torch.randn gives other "
        "numbers for fewer than 16 values."
    ),
    "critic/target": (
        "Targets of the critics: the next action and its log-probability (tanh, softplus), the target "
        "critics, which have one output each, then reward, gamma and the end of episodes."
    ),
    "alpha": (
        "The temperature, a single number: the mean of the log-probabilities over the batch (num_threads), "
        "exp of its logarithm, and Adam's square root."
    ),
    traces.OTHER_EVENT: (
        "One run did something else next: target_kl, learning_starts, batch or iteration sizes, or the end "
        "of a run. All fingerprints before it are equal, so look at the condition, not at the numbers."
    ),
    traces.OTHER_ITEMS: (
        "The traces name other things, so the code that writes them or the networks differ: code, algorithm "
        "settings and network sizes."
    ),
    traces.OTHER_ENV_STEPS: (
        "An iteration took another number of environment steps: env.num_envs and num_steps or "
        "steps_per_iteration."
    ),
    traces.OTHER_CHAIN: (
        "The chain digest follows from what comes before it, and that is equal: one of the files was damaged "
        "or edited, or the code that writes traces differs."
    ),
}
_NAMED = 6  # keys in a line
_FEWER = (
    "is an older one, without what the algorithm held at both ends of an iteration; the items that both have "
    "were compared"
)
# An entry of what an algorithm holds is named by its keys; these are in the state of several algorithms.
LOOK_AT["streams"] = LOOK_AT["stream"]
LOOK_AT["adam"] = LOOK_AT["optimizer"]
LOOK_AT["net"] = LOOK_AT["params"]
_STATE = (
    "An entry of the algorithm's state_dict, named by its keys: look for what writes it, and for what loads "
    "it where the run was resumed."
)
_UNKNOWN = (
    "There is no advice for this item; look for what computes it, from the items before it in its line, "
    "which are equal."
)
_CUDA = (
    "On CUDA: the same GPU model with the same number of multiprocessors, the same CUDA version and driver; "
    "CUBLAS_WORKSPACE_CONFIG, float32 without TF32, and no kernels chosen by timing (cudnn_benchmark)."
)
_FROM_ENVIRONMENT = ("obs", "reward", "terminated", "truncated", "next_obs", "last_obs", "final_obs")
_NOT_COMPUTED_ON_GPU = ("init", "stream", "order", "replay_index", *_FROM_ENVIRONMENT)


def advice(divergence: Divergence, detail: str, digest: str, changed: bool = False) -> list[str]:
    """What to examine, in plain lines: what is known already, then what the item depends on.

    Where code or configuration was `changed`, what else it depends on, such as threads, would mislead.
    """
    if changed and divergence.item not in traces.NOT_FINGERPRINTS:
        return list(_what_is_known(divergence, detail))
    item = divergence.item.partition("#")[0]  # noise#2 is the second noise of an event
    state = item.startswith((traces.AT_START, traces.AT_END))
    parts = item.split("/")[state:]
    keys = (f"{divergence.event}:{item}", item, parts[0], *([] if state else reversed(parts)))
    known = next((LOOK_AT[key] for key in keys if key in LOOK_AT), _STATE if state else _UNKNOWN)
    lines = [*_what_is_known(divergence, detail), known]
    elsewhere = {*_NOT_COMPUTED_ON_GPU, *traces.NOT_FINGERPRINTS}
    if digest.startswith("keyed_sum") and not {item, parts[0]} & elsewhere:
        lines.append(_CUDA)
    return lines


def _what_is_known(at: Divergence, detail: str) -> Iterator[str]:
    if at.item in traces.NOT_FINGERPRINTS:
        return
    if at.item.startswith(traces.AT_START) and at.iteration:
        yield (
            f"All that iteration {at.iteration - 1} left behind was equal, so this changed before the next "
            "one began: an evaluation, a checkpoint, or what was loaded when the run was resumed."
        )
    elif at.item.startswith(traces.AT_START):
        yield "Nothing has been learned yet, so the run began with another one."
    elif at.item.startswith(traces.AT_END):
        yield f"All else that was traced of iteration {at.iteration} was equal, so this was its last change."
    elif at.event == "step" and at.index is not None and at.item in _FROM_ENVIRONMENT:
        if at.item == "obs" and at.index == at.iteration == 0:
            yield "The observations of the first reset were equal, and no action has been taken since."
        elif at.item == "obs":
            yield (
                "All actions before this step were equal, so the environment itself differs; or only its "
                "start of a new episode, where the next_obs of the step before is traced and was equal."
            )
        elif "action" in at.equal_before:
            yield f"The actions up to step {at.index} were equal, so the environment itself differs."
    elif at.event == "update" and at.index:
        yield f"All that was traced of update {at.index - 1} was equal, so this update made the difference."
    elif at.event == traces.ITERATION and detail != traces.STEP_DETAIL:
        if at.item.startswith("stream/") and at.iteration == 0:
            yield "No random number has been used for training yet, so the streams were seeded differently."
        elif at.item.startswith("stream/"):
            yield f"Streams are compared at the start, so iteration {at.iteration - 1} drew otherwise."
        elif at.further:
            yield (
                "Items inside one iteration influence each other (an action changes the next observation), "
                "so the first of the list need not be the first in time: trace=step in both runs tells which "
                "it was, and so does zoom=true."
            )


# --- What else differs -----------------------------------------------------------------------------------

# Where results lie changes nothing in them.
# How much memory there is, and which of equal cores are used.
_NO_MATTER_MACHINE = ("memory_bytes", "affinity", "container.memory_limit_bytes")
# Of a record's code; branch and ref are but names of it.
_CODE = (
    *("base_commit", "dirty", "changed", "changed_count", "skipped", "skipped_count"),
    *("dirty_submodules", "problem"),
)
# A commit that also holds another configuration need not hold other code.
_COMMITS = ("commit", "commit (code and configuration)", "base_commit")
_SECTIONS_OF_A_RECORD = ("versions", "machine", "git", "determinism", "environment")
# Packages that compute what is traced; those that differ are named before all others.
_COMPUTING = ("torch", "numpy", "scipy", "gymnasium", "mujoco", "box2d", "triton")


class _Facts:
    """Record and configuration of a run."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.record = read_record(run_dir)
        for name in _SECTIONS_OF_A_RECORD:
            if not isinstance(self.record.get(name) or {}, Mapping):
                raise ConfigError(f"{run_dir.name}: {name} in {paths.RECORD} is damaged: it has no facts")
        resumed = self.record.get("resumed") or []
        if not isinstance(resumed, list) or not all(isinstance(each, Mapping) for each in resumed):
            raise ConfigError(f"{run_dir.name}: resumed in {paths.RECORD} is damaged: it is no list of facts")
        self.config_text, self.config = read_config(run_dir)

    def why_no_trace(self) -> str:
        """The end of a message about a trace that is not there."""
        detail = self.config.get("trace")
        if detail == "off":
            return "the run was made with trace=off, make it again with trace=iteration or trace=step"
        if detail is None:
            return "make the run again with trace=iteration or trace=step"
        return f"it was made with trace={detail}, so the file was removed or the run ended before it began"

    def side(self, reach: Reach) -> Side:
        """The run as one side of a comparison, with a trace that goes so far."""
        status = str(self.record.get("status"))
        return Side(self.run_dir.name, str(self.run_dir), status, *reach)

    def starts(self) -> list[dict[str, Any]]:
        """The facts of the first start, then those of each time that the run was resumed."""
        facts = [self.record]
        for again in self.record.get("resumed") or []:
            facts.append(facts[-1] | again)
        return facts


def _differences(a: _Facts, b: _Facts) -> Iterator[Difference]:
    starts_a, starts_b = a.starts(), b.starts()
    found: dict[str, list[Difference]] = {section: [] for section in SECTIONS}
    found["configuration"] = list(_config_differences(a.config, b.config))
    configs_differ = a.config_text != b.config_text
    for i in range(max(len(starts_a), len(starts_b))):
        # A run that was not resumed so often went on with what it had last.
        start_a, start_b = starts_a[min(i, len(starts_a) - 1)], starts_b[min(i, len(starts_b) - 1)]
        for one in _start_differences(start_a, start_b, configs_differ):
            if i == 0:
                found[one.section].append(one)
            elif one not in found[one.section]:
                key = f"{one.key} (resumed, start {i + 1})"
                found[one.section].append(Difference(one.section, key, one.a, one.b))
    if len(starts_a) != len(starts_b):
        times = (len(starts_a) - 1, len(starts_b) - 1)
        found["settings"].insert(0, Difference("settings", "times resumed", *times))
    for section in SECTIONS:
        yield from found[section]


def _config_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for one in _unequal("configuration", a, b):
        if one.key not in BOOKKEEPING_KEYS:
            yield one


def _start_differences(
    a: Mapping[str, Any], b: Mapping[str, Any], configs_differ: bool
) -> Iterator[Difference]:
    yield from _code_differences(a.get("git") or {}, b.get("git") or {}, configs_differ)
    versions = _unequal("versions", a.get("versions"), b.get("versions"))
    yield from sorted(versions, key=lambda one: (one.key not in _COMPUTING, one.key))
    for one in _unequal("machine", a.get("machine"), b.get("machine")):
        if one.key not in _NO_MATTER_MACHINE:
            yield one
    # All of a level: what its settings read back as, what it found out about the machine, and what is added.
    levels = [dict(start.get("determinism") or {}) for start in (a, b)]
    for level in levels:
        level.pop("level", None)  # stands in the configuration
    yield from _unequal("machine", *(level.pop("machine", None) for level in levels))
    yield from _unequal("settings", *(level.pop("settings", None) for level in levels))
    yield from _unequal("settings", *levels)
    yield from _unequal("environment", a.get("environment"), b.get("environment"))


def _code_differences(
    a: Mapping[str, Any], b: Mapping[str, Any], configs_differ: bool
) -> Iterator[Difference]:
    commits, trees = ([side.get(name) for side in (a, b)] for name in ("commit", "tree"))
    if any(one == other and one is not None for one, other in (commits, trees)):
        return
    found = list(_unequal("code", *({key: side[key] for key in _CODE if key in side} for side in (a, b))))
    keys = {one.key for one in found}
    # A commit is base, work tree and configuration; where trees are as committed, the other two explain it.
    clean = all(side.get("dirty") is False for side in (a, b))
    explained = None in trees and clean and (configs_differ or "base_commit" in keys)
    if commits[0] != commits[1] and not explained:
        yield Difference("code", _COMMITS[configs_differ], *commits)
    for one in found:
        if not (one.key.endswith("_count") and one.key.removesuffix("_count") in keys):  # the list says it
            yield one


def _unequal(section: str, a: Any, b: Any) -> Iterator[Difference]:
    """Facts that differ between two sections of a record, nested ones by dotted keys."""
    flat_a, flat_b = dict(_flat(a or {})), dict(_flat(b or {}))
    for key in [*flat_a, *(key for key in flat_b if key not in flat_a)]:
        value_a, value_b = flat_a.get(key, ABSENT), flat_b.get(key, ABSENT)
        if value_a != value_b or type(value_a) is not type(value_b):
            yield Difference(section, key, value_a, value_b)


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for i, inner in enumerate(value):
            yield from _flat(inner, f"{key}[{i}]")
    else:
        yield key, value


def diff_command(a: Side, b: Side) -> str:
    """The command that shows what was changed in the code between two runs."""
    return f"make diff a={_given(a)} b={_given(b)} code=full"


def _given(side: Side) -> str:
    """How a command finds the run: by its id where it lies where runs usually do."""
    folder = Path(side.run_dir)
    usual = folder.parent.parent == Path("runs").absolute()
    return shlex.quote(side.run if usual else side.run_dir)


def _code_differs(differences: list[Difference]) -> bool:
    """Whether it is known that the code does."""
    return any(one.section == "code" for one in differences) and _unrecorded(differences) is None


def _unrecorded(differences: list[Difference]) -> tuple[str, ...] | None:
    """Which of the runs recorded no code, if there is such a run."""
    for one in differences:
        if one.section == "code" and one.key in _COMMITS[:2] and {None, ABSENT} & {one.a, one.b}:
            return tuple(name for name, value in (("a", one.a), ("b", one.b)) if value in (None, ABSENT))
    return None


def _changed_keys(differences: list[Difference]) -> list[str]:
    """Keys of the configuration that do more than look at the run."""
    keys = (one.key for one in differences if one.section == "configuration")
    return [key for key in keys if affects_results(key)]


def _first_of_all(
    differences: list[Difference], sides: tuple[Side, Side], divergence: Divergence | None
) -> Iterator[str]:
    """What was changed, before anything that only may differ."""
    place = ""
    if divergence is not None and divergence.item not in traces.NOT_FINGERPRINTS:
        place = f" Look for what computes {divergence.item}, the first to differ."
    missing = _unrecorded(differences)
    keys = _changed_keys(differences)
    if missing is not None:
        yield f"The code of {' and '.join(missing)} was not recorded, so it may be another one."
    elif _code_differs(differences):
        yield f"The code differs: {diff_command(*sides)} shows what was changed between them.{place}"
    if keys:
        more = f" and {len(keys) - _NAMED} more keys" if len(keys) > _NAMED else ""
        yield f"The configuration differs in {', '.join(keys[:_NAMED])}{more}."
    counts = Counter(one.section for one in differences)
    others = [f"{name} ({counts[name]})" for name in SECTIONS[2:] if counts[name]]
    if others:
        named = " and ".join(filter(None, [", ".join(others[:-1]), others[-1]]))
        when = "next" if keys or _code_differs(differences) else "first"
        yield f"What differs in {named} is listed below; examine it {when}."


# --- The report ------------------------------------------------------------------------------------------

_WIDTH = 110
_NO_BREAK = "\u00a0"
_LISTED = 12  # differences of a section; the machine of another kind easily brings a hundred
_EVENTS = {
    "init": "initial weights",
    "reset": "first reset",
    "start": "at its start",
    "end": "at its end",
}
_COUNTED = ("step", "update", "epoch")  # events of which an iteration has many


def headline(comparison: Comparison) -> str:
    """The verdict in one line."""
    a, b, at = comparison.a, comparison.b, comparison.divergence
    if at is not None:
        return f"diverged {_place(at, comparison.detail)}: {_thing(at)}"
    if comparison.verdict == SHORTER:
        return f"shorter: equal as far as both go; a ends after {_reach(a)}, b after {_reach(b)}"
    return f"identical: {_reach(a)}"


def _reach(side: Side) -> str:
    plural = "" if side.iterations == 1 else "s"
    return f"{side.iterations:,} iteration{plural} ({side.env_steps:,} environment steps)"


def _place(at: Divergence, detail: str) -> str:
    if at.event in traces.BEFORE_TRAINING:
        return f"before the first iteration, {_EVENTS[at.event]}"
    begin = at.env_steps_before + 1
    span = f"from {begin:,}" if at.env_steps_after is None else f"{begin:,} to {at.env_steps_after:,}"
    iteration = f"in iteration {at.iteration:,} (environment steps {span})"
    if at.event == traces.ITERATION:
        return iteration if detail != traces.STEP_DETAIL else f"{iteration}, at its end"
    index = f" {at.index:,}" if at.index or (at.event in _COUNTED and at.index == 0) else ""
    return f"{iteration}, {_EVENTS.get(at.event, at.event + index)}"


def _thing(at: Divergence) -> str:
    words = {
        traces.OTHER_EVENT: f"a goes on with {at.a}, b with {at.b}",
        traces.OTHER_ITEMS: f"other items; only in a: {at.a}; only in b: {at.b}",
        traces.OTHER_ENV_STEPS: f"it ends after {at.a} environment steps in a, {at.b} in b",
        traces.OTHER_CHAIN: "chain digest",
    }
    return words.get(at.item, at.item)


def report(comparison: Comparison) -> str:
    """All of it for a terminal, the verdict first."""
    lines = [headline(comparison), ""]
    for name, side in (("a", comparison.a), ("b", comparison.b)):
        lines.append(f"  {name}  {side.run_dir}  ({side.status}, {_reach(side)})")
    for name in comparison.fewer:
        lines += ["", *_wrapped(f"the trace of {name} {_FEWER}", "  ")]
    at = comparison.divergence
    if at is not None:
        lines += ["", f"line {at.line:,} of {paths.TRACE}, equal before it"]
        for title, names in (
            ("equal", at.equal_before),
            ("first", [at.item if at.item in traces.NOT_FINGERPRINTS else f"{at.item}  a {at.a}  b {at.b}"]),
            ("also", at.further),
        ):
            lines += _wrapped(", ".join(names), f"  {title:7}") if names else []
    if comparison.look_at:
        lines += ["", "look at"]
        command = diff_command(comparison.a, comparison.b)
        for i, text in enumerate(comparison.look_at, start=1):
            lines += _wrapped(text, f"  {i}. ", command)
    lines += ["", *_list_of(comparison.differences)]
    return "\n".join(lines)


def _list_of(differences: list[Difference]) -> Iterator[str]:
    if not differences:
        yield f"nothing else differs: {', '.join(SECTIONS)} are equal"
        return
    yield f"what else differs ({len(differences)})"
    for section in SECTIONS:
        here = [one for one in differences if one.section == section]
        if here:
            yield f"  {section}"
        width = min(32, max((len(one.key) for one in here[:_LISTED]), default=0))
        for one in here[:_LISTED]:
            a, b = _shown(one)
            yield from _wrapped(f"a: {a}  b: {b}", f"    {one.key:{width}}  ")
        if len(here) > _LISTED:
            yield f"    and {len(here) - _LISTED} more; --json lists them all"


def _shown(one: Difference) -> tuple[str, str]:
    if isinstance(one.a, list) and isinstance(one.b, list) and set(map(str, one.a)) != set(map(str, one.b)):
        return _without(one.a, one.b), _without(one.b, one.a)
    return _text(one.a), _text(one.b)


def _without(values: list[Any], others: list[Any]) -> str:
    extra = [str(value) for value in values if value not in others]
    return "also has " + ", ".join(extra) if extra else "has nothing more"


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, list) else str(value)


def _wrapped(text: str, start: str, whole: str = "") -> list[str]:
    """Lines of `text`; `whole`, a part of it that is to be copied, stays on one of them."""
    indent = " " * min(len(start), 40)
    text = text.replace(whole, whole.replace(" ", _NO_BREAK)) if whole else text
    lines = textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=not whole,
    )
    return [line.replace(_NO_BREAK, " ") for line in lines]
