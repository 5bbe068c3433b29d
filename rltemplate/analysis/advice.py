"""Advice about the first difference of two traces: likely causes, in the order in which to examine them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rltemplate.analysis import traces
from rltemplate.analysis.differences import CODE, CONFIGURATION, SECTIONS, Difference
from rltemplate.analysis.traces import Divergence, Trace
from rltemplate.types import affects_results

_ENVIRONMENT = (
    "The environment itself: versions of gymnasium and of the simulator; the C library's sin, cos and pow "
    "(its version, fused multiply-add); BLAS behind np.linalg.norm; sums over a Python set, whose order is "
    "of hashes."
)
_STREAM = "A random stream: its seed; later one draw more or less, or of another size."
_LOSS = (
    "The forward pass on a minibatch: batch size, num_threads, MKL's branch; then the mean over the "
    "batch, split over threads from 32,768 values."
)
_OPTIMIZER = (
    "Moments of Adam: multiply-add, fused or not, changes with the instruction set and implementation."
)
_ALPHA = "The temperature: the mean of log-probabilities (num_threads), exp, and Adam's square root."
_PARAMS = (
    "The last step of Adam: torch.sqrt follows MKL's branch; the learning rate and total_env_steps behind it."
)
_FROM_ENVIRONMENT = ("obs", "reward", "terminated", "truncated", "next_obs", "last_obs", "final_obs")

# By event and item, by item, or by a part of an item's name between slashes.
LOOK_AT: dict[str, str] = {
    "reset:obs": (
        "Seeds of the environments (seed, env.num_envs), env.kwargs, versions of gymnasium and of the "
        "simulator. No action has been taken yet, so the learner has no part in it."
    ),
    **dict.fromkeys(_FROM_ENVIRONMENT, _ENVIRONMENT),
    "truncated": f"{_ENVIRONMENT} Time limits are env.max_episode_steps.",
    **dict.fromkeys(("streams", "draw"), _STREAM),
    "normalized_obs": "Running mean and variance of observations: updates, freezing, obs_clip, sums.",
    "policy": (
        "The policy's forward pass: rows depend on their batch (env.num_envs), num_threads and MKL's branch "
        "(cpu_capability, MKL_CBWR); a layer with one output is the first to show it."
    ),
    "draw/action": (
        "The stream of the noise: one draw more or less, or of another size. torch.randn gives other numbers "
        "for fewer than 16 values, and the noise of each environment changes with env.num_envs."
    ),
    "action": "From output and noise to an action: exp, tanh, softplus follow the instruction set.",
    "log_prob": "Log-probabilities: exp, log, softplus, pow follow instruction set and MKL's branch.",
    "scaled_reward": "The running variance of returns (reward_clip); the critic at truncations.",
    "value": (
        "The value head has one output: its products are summed in an order that depends on batch size, "
        "num_threads and MKL's branch. It often differs first, with the policy still equal."
    ),
    "advantage": (
        "Advantages: mean and standard deviation over the batch; sums of 32,768 values or more are split "
        "over the threads (num_threads). Then gamma, gae_lambda."
    ),
    "draw/minibatch": "The stream 'minibatch': one permutation more or less, or of other length.",
    **dict.fromkeys(("loss", "metrics"), _LOSS),
    "gradient": (
        "The backward pass: products for the weights are split over num_threads; gradients of indexing with "
        "repeated indices need deterministic_algorithms; then the norm that clips them."
    ),
    **dict.fromkeys(("mu", "nu", "steps"), _OPTIMIZER),
    **dict.fromkeys(("params", "net", "learned"), _PARAMS),
    "target": "The moving average of the parameters: tau, its interval, its multiply-add.",
    "obs_norm": "The running mean and variance of observations: sums over parallel environments, in order.",
    "return_norm": "The running variance of returns: sums over parallel environments, episode ends.",
    "draw/replay": "The stream 'replay': one draw more or less; buffer_size, batch_size, env.num_envs.",
    "draw/update": "The stream 'update': one draw more or less, or of another size (batch_size).",
    "td_target": "Critics' targets: next action and log-probability, target critics, reward, gamma.",
    **dict.fromkeys(("alpha", "alpha_gradient"), _ALPHA),
    traces.OTHER_EVENT: (
        "One run did something else next: target_kl, learning_starts, batch or iteration sizes, or the end "
        "of a run. All fingerprints before it are equal, so look at the condition, not at the numbers."
    ),
    traces.OTHER_ITEMS: "The traces name other items: other code, algorithm settings or network sizes.",
    traces.OTHER_ENV_STEPS: "Another number of steps: env.num_envs, num_steps or steps_per_iteration.",
    traces.OTHER_CHAIN: (
        "The chain digest follows from what comes before it, and that is equal: one of the files was damaged "
        "or edited, or the code that writes traces differs."
    ),
}
_STATE = (
    "An entry of the algorithm's state_dict, named by its keys: look for the code that writes or loads it."
)
_UNKNOWN = "There is no advice for this item; look for the code that computes it from the items before it."
_CUDA = (
    "On CUDA: the same GPU model with the same number of multiprocessors, the same CUDA version and driver; "
    "CUBLAS_WORKSPACE_CONFIG, float32 without TF32, and no kernels chosen by timing (cudnn_benchmark)."
)
_NAMED = 6  # keys in a line
_NOT_COMPUTED_ON_GPU = {
    *("streams", "draw", *_FROM_ENVIRONMENT, *traces.NOT_FINGERPRINTS),
}


def look_at(
    at: Divergence | None, trace: Trace, differences: Sequence[Difference], show_code: str
) -> Iterator[str]:
    """Lines of advice: known changes, then facts about the divergence `at`, then causes of such an item.

    `at` is None if one trace is shorter. `show_code` is the command that shows the changes of the code. Where
    code or configuration changed, other causes such as threads would mislead and are left out.
    """
    code = [one for one in differences if one.section == CODE and one.affects_results]
    missing = [name for name in "ab" if any(getattr(one, name) == "(not recorded)" for one in code)]
    keys = [one.key for one in differences if one.section == CONFIGURATION and affects_results(one.key)]
    numeric = at is not None and at.item not in traces.NOT_FINGERPRINTS
    if missing:
        yield f"The code of {' and '.join(missing)} was not recorded, so it may differ."
    elif code:
        place = f" Look for what computes {at.item}, the first to differ." if at and numeric else ""
        yield f"The code differs: {show_code} shows what was changed between them.{place}"
    changed = bool(keys or (code and not missing))
    if keys:
        more = f" and {len(keys) - _NAMED} more keys" if len(keys) > _NAMED else ""
        yield f"The configuration differs in {', '.join(keys[:_NAMED])}{more}."
    counts = Counter(one.section for one in differences)
    others = [f"{name} ({counts[name]})" for name in SECTIONS[2:] if counts[name]]
    if others:
        listed = " and ".join(filter(None, [", ".join(others[:-1]), others[-1]]))
        yield f"What differs in {listed} is listed below; examine it {'next' if changed else 'first'}."
    if at is not None:
        yield from _known(at, trace.detail) if numeric else ()
        if not (changed and numeric):
            yield from _causes(at, trace.digest)


def _causes(at: Divergence, digest: str) -> Iterator[str]:
    item = at.item.partition("#")[0]  # noise#2 is the second noise of an event
    of_state = item.startswith((traces.AT_START, traces.AT_END))
    parts = item.split("/")[of_state:]
    keys = (f"{at.event}:{item}", item, parts[0], *([] if of_state else reversed(parts)))
    yield next((LOOK_AT[key] for key in keys if key in LOOK_AT), _STATE if of_state else _UNKNOWN)
    if digest != "xxh3_64" and not {item, parts[0]} & _NOT_COMPUTED_ON_GPU:
        yield _CUDA


def _known(at: Divergence, detail: str) -> Iterator[str]:
    """Conclusions from the items that are equal before a divergence."""
    if at.item.startswith(traces.AT_START) and at.iteration:
        yield (
            f"The state at the end of iteration {at.iteration - 1} was equal, so it changed before the next "
            "one began: an evaluation, a checkpoint, or loading when the run was resumed."
        )
    elif at.item.startswith(traces.AT_START):
        yield "Nothing has been learned yet, so the run began with another state."
    elif at.item.startswith(traces.AT_END):
        yield f"All other items of iteration {at.iteration} were equal, so this was its last change."
    elif at.event == "step" and at.index is not None and at.item in _FROM_ENVIRONMENT:
        if at.item == "obs":
            yield "The step itself was equal, so the start of a new episode differs."
        else:
            yield f"The actions up to step {at.index} were equal, so the environment itself differs."
    elif at.event == "update" and at.index:
        yield f"All traced items of update {at.index - 1} were equal, so this update made the difference."
    elif at.event == traces.ITERATION and detail != traces.STEP_DETAIL and at.further:
        yield (
            "Items inside one iteration influence each other (an action changes the next observation), so "
            "the first of the list need not be the first in time: trace=step in both runs tells which it "
            "was, and so does zoom=true."
        )
