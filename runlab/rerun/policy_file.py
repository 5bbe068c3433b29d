"""Policies in small files: a checkpoint in which all tensors that acting does not read are zero.

A policy file is a ZIP with the two files of one checkpoint, in the format of a run's `checkpoints/`. So every
command that loads the policy of a run also loads a policy file.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from runlab.config.texts import choose, first_line
from runlab.errors import ConfigError
from runlab.run import paths
from runlab.run.files import replace_file
from runlab.run.read import LAST, find_run

POLICIES = Path("results") / "policies"
_FILES = re.compile(r"(step_\d{1,18})\.json \1\.pt")
# The zeros of a policy file are packed well: those of SAC are an eleventh of their checkpoints.
_MOST_RATIO, _FEW_BYTES = 100, 16_000_000
_PACKED = (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED)
_TRIES = 8  # with one, a policy of Catch was lost


@contextlib.contextmanager
def run_or_policy(
    run: str | None, policy: str | None, runs_dir: Path, eval_policy: str | None = None
) -> Iterator[Path]:
    """The folder with the checkpoints that `run=RUN` or `policy=NAME` names, while the block runs.

    NAME is a file in results/policies without its ending, or a path that ends in .zip. Raises ConfigError.
    """
    if (run is None) == (policy is None):
        raise ConfigError("give run=RUN or policy=NAME, one of the two")
    if run is not None:
        yield find_run(run, runs_dir)
        return
    if eval_policy is not None:  # the file lacks what another way of acting reads
        raise ConfigError(f"eval_policy={eval_policy}: a policy file acts as its run; give run=RUN")
    file = Path(str(policy))
    if file.suffix != ".zip":
        names = sorted(path.stem for path in POLICIES.glob("*.zip"))
        if policy not in names:
            answer = choose(str(policy), names, str(POLICIES)) if names else "give a path that ends in .zip"
            raise ConfigError(f"policy={policy}: no such file in {POLICIES}; {answer}")
        file = POLICIES / f"{policy}.zip"
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / paths.safe_name(file.stem)  # that of `...zip` is `..`
        try:
            _unpack(file, run_dir / paths.CHECKPOINTS)
        except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
            raise ConfigError(f"policy={policy}: {file} cannot be read: {first_line(error)}") from None
        yield run_dir


def _unpack(file: Path, folder: Path) -> None:
    """Write the two files of the checkpoint; `ValueError` for another archive, before anything is written."""
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        if not _FILES.fullmatch(" ".join(sorted(part.filename for part in parts))):
            raise ValueError("expected the two files of one checkpoint, step_N.json and step_N.pt")
        if any(part.compress_type not in _PACKED for part in parts):  # others fail in ways of their own
            raise ValueError("it is packed in another way than policy files are")
        most = max(_FEW_BYTES, _MOST_RATIO * file.stat().st_size)
        if sum(part.file_size for part in parts) > most:
            raise ValueError(f"it unpacks to more than {most:,} bytes")
        archive.extractall(folder)


def export_policy(run_dir: Path, file: Path, checkpoint: str = LAST) -> None:
    """Write a policy of a run into a policy file, for acting as in its evaluations."""
    import numpy as np
    import torch
    from torch.utils._pytree import tree_flatten, tree_unflatten

    from runlab.interfaces import act_of
    from runlab.rerun.policy import load_policy
    from runlab.rng import Streams
    from runlab.run.checkpoint import Checkpoints, load_chosen
    from runlab.run.limits import OF_TRAINING

    source = load_chosen(run_dir, checkpoint)
    config, algorithm, envs = load_policy(run_dir, f"{paths.steps_of(source.path)}")
    rng, act = np.random.default_rng(0), act_of(algorithm, config.eval_policy)
    size = 3, min(4096, 2**18 // envs.codec.obs_size + 1), envs.codec.obs_size  # images: fewer
    obs: np.ndarray = rng.normal(scale=3.0, size=size).astype(np.float32)
    if getattr(envs.codec, "obs_dtype", obs.dtype) == np.uint8:
        obs = rng.integers(256, size=size, dtype=np.uint8)

    def actions() -> list[np.ndarray]:
        """The actions in three steps, since a memory of zeros hides its weights in the first one."""
        taken, memory = [], None
        rngs = [Streams(0).torch("action")] * obs.shape[1]
        for rows in obs:
            action, memory = act(rows, memory, rngs)
            taken.append(action)
        return taken

    def as_expected(index: int, noise: torch.Tensor) -> bool:
        """True if the actions are the same with noise in the place of a tensor."""
        algorithm.load_state_dict(tree_unflatten([*leaves[:index], noise, *leaves[index + 1 :]], form))
        return np.array_equal(actions(), expected)

    expected = actions()
    leaves, form = tree_flatten({k: v for k, v in source.state.items() if k not in OF_TRAINING})
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            # If noise in the place of a tensor does not change the actions, acting does not read it. Several
            # times, since a policy that takes one action for all observations may take that one again.
            noise = (rng.normal(scale=9.0, size=tuple(leaf.shape)) for _ in range(_TRIES))
            unread = all(as_expected(index, torch.from_numpy(each).to(leaf.dtype)) for each in noise)
            leaves[index] = torch.zeros_like(leaf) if unread else leaf
    state = tree_unflatten(leaves, form)
    algorithm.close()
    file.parent.mkdir(parents=True, exist_ok=True)

    def write(target: IO[bytes]) -> None:
        with (
            tempfile.TemporaryDirectory() as folder,
            zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            path = Checkpoints(Path(folder), source.config, keep=1).save(int(state["env_steps"]), state, None)
            for part in (path, path.with_suffix(".json")):
                # Without a time stamp, so that equal policies give equal files.
                archive.writestr(zipfile.ZipInfo(part.name), part.read_bytes(), zipfile.ZIP_DEFLATED)

    replace_file(file, write)
