"""The works that are measured, each the same arithmetic for every library, and the jobs of a bench."""

from __future__ import annotations

from dataclasses import dataclass

SAC_BATCH, SAC_BUFFER = 256, 1_000_000
LEARNING_STARTS = 500  # environment steps with random actions, so that measuring begins soon
SAC_ITERATION = 250  # environment steps
GAMMA = 0.99
BOUND = 10.0  # of scaled observations and rewards


class MeasurementError(Exception):
    """The measurement is worth nothing. The message is one line that says why."""


@dataclass(frozen=True, slots=True)
class Work:
    """An algorithm on copies of an environment; networks, batches and counts follow from these."""

    algo: str
    env: str  # a file of conf/env/
    env_id: str
    num_envs: int
    scaled: bool = False  # PPO scales observations and rewards by running statistics
    num_steps: int = 256  # of each environment in a rollout of PPO
    batch_size: int = 64  # samples in an update of PPO
    epochs: int = 10  # passes of PPO over a rollout
    game: bool = False  # a game of Atari with the frames of conf/env/_atari.yaml, and a convolutional network

    @property
    def name(self) -> str:
        return f"{self.algo}-{self.env}"

    @property
    def title(self) -> str:
        return f"{self.algo.upper()} {self.env}"

    @property
    def hidden_sizes(self) -> tuple[int, int]:
        return (64, 64) if self.algo == "ppo" else (256, 256)

    @property
    def first_steps(self) -> int:
        """Environment steps until something has been learned: a rollout, or an iteration of SAC."""
        return self.num_steps * self.num_envs if self.algo == "ppo" else LEARNING_STARTS + SAC_ITERATION

    @property
    def packages(self) -> tuple[str, ...]:
        """Modules that its environment needs beside Gymnasium."""
        return ("ale_py", "cv2") if self.game else ()

    @property
    def peers(self) -> list[tuple[str, list[str]]]:
        """Other libraries that have its network: the PPO of SBX has no convolutions."""
        return [(name, []) for name in PEERS if not (self.game and name == "SBX")]

    def overrides(self) -> list[str]:
        """The configuration of this project; the other libraries are built from the same numbers."""
        sizes = ",".join(map(str, self.hidden_sizes))
        words = [f"algo={self.algo}", f"env={self.env}", f"env.num_envs={self.num_envs}", "logger=none"]
        words += [f"algo.hidden_sizes=[{sizes}]", f"algo.obs_clip={BOUND}", f"algo.gamma={GAMMA}"]
        if self.algo == "sac":
            own = f"""activation=relu batch_size={SAC_BATCH} buffer_size={SAC_BUFFER} updates_per_step=1
                policy_delay=1 learning_starts={LEARNING_STARTS} steps_per_iteration={SAC_ITERATION}
                normalize_obs=false"""
        else:
            scaled = str(self.scaled).lower()
            own = f"""activation=tanh num_steps={self.num_steps} update_epochs={self.epochs} gae_lambda=0.95
                num_minibatches={self.num_steps * self.num_envs // self.batch_size} target_kl=null
                recompute_advantage=false normalize_advantage=true clip_value_loss=false
                normalize_obs={scaled} normalize_reward={scaled} reward_clip={BOUND}"""
        return [*words, "total_env_steps=1000000000", *(f"algo.{word}" for word in own.split())]


WORKS = {
    work.name: work
    for work in (
        Work("ppo", "Hopper", "Hopper-v5", 8, scaled=True),
        Work("ppo", "HalfCheetah", "HalfCheetah-v5", 8, scaled=True),
        Work("ppo", "CartPole", "CartPole-v1", 8),
        Work("ppo", "Pong", "ale_py:ALE/Pong-v5", 8, False, 128, 256, 4, game=True),
        Work("sac", "Hopper", "Hopper-v5", 1),
        Work("sac", "Humanoid", "Humanoid-v5", 1),
    )
}
PEERS = {"Stable-Baselines3": "stable_baselines3", "SBX": "sbx"}
FORMS = {
    "rltemplate, eager": ["compile=false", "env.num_workers=0"],
    "rltemplate, compile=true": ["compile=true", "env.num_workers=0"],
    "rltemplate, compile=true env.num_workers=1": ["compile=true", "env.num_workers=1"],
}
COMPILED = FORMS["rltemplate, compile=true"]
_EAGER_LEVELS, _COMPILED_LEVELS = ("fast", "repeat", "invariant", "profile"), ("fast", "repeat")
LEVELS = {level: [f"determinism={level}", "compile=false"] for level in _EAGER_LEVELS}
LEVELS |= {f"{level}, compile=true": [f"determinism={level}", *COMPILED] for level in _COMPILED_LEVELS}
DEVICES = {
    "CPU, compile=true": COMPILED,
    "GPU, eager": [*FORMS["rltemplate, eager"], "device=cuda"],
    "GPU, compile=true": [*COMPILED, "device=cuda"],
}


@dataclass(frozen=True, slots=True)
class BenchJob:
    """One measurement, made in a process of its own."""

    part: str
    work: str  # a name of WORKS
    contender: str  # a row of the table
    library: str = "rltemplate"
    overrides: tuple[str, ...] = ()  # of this project, beyond those of the work
    threads: int = 1  # of the numerical library
    cores: int = 1  # that the process and all that it starts may use
    seconds: float = 15.0  # to measure for, beyond the warm-up


def jobs(part: str, seconds: float, cores: int) -> list[BenchJob]:
    """The measurements of one repetition of a part, in the order in which they take turns."""
    hopper, forms = ("ppo-Hopper", "sac-Hopper"), list(FORMS.items())
    plans: dict[str, list[tuple[str, str, list[str]]]] = {
        "peers": [(name, *each) for name, work in WORKS.items() for each in [*work.peers, *forms]],
        "time": [(work, *form) for work in WORKS for form in forms[:2]],
        "levels": [(work, *level) for work in hopper for level in LEVELS.items()],
        "observers": [(work, "compile=true", COMPILED) for work in hopper],
        "startup": [(work, "make train", []) for work in (*hopper, "ppo-CartPole")],
        GPU: [(work, *form) for work in hopper for form in DEVICES.items()],
    }
    used = cores if part in ("peers", GPU) else 1
    made = []
    for work, contender, words in plans[part]:
        # Two threads serve the large batches of SAC, and convolutions; the small ones of PPO they slow down.
        large, library = WORKS[work].algo == "sac" or WORKS[work].game, PEERS.get(contender, "rltemplate")
        threads = used if large else 1
        made.append(BenchJob(part, work, contender, library, tuple(words), threads, used, seconds))
    return made


PARTS = ("peers", "time", "levels", "observers", "startup")
GPU = "gpu"  # this part is measured only if it is asked for
