"""Checkpoints on a disk: whole or absent, known to be whole, and never code."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rltemplate.run import checkpoint
from rltemplate.run.checkpoint import (
    Checkpoint,
    Checkpoints,
    list_checkpoints,
    load_checkpoint,
    load_experience,
    newest_checkpoint,
)
from rltemplate.run.continuation import check_same_run
from rltemplate.types import ConfigError, Experience

CAPACITY = 50


def state(env_steps: int) -> dict[str, Any]:
    return {"env_steps": env_steps, "net": torch.arange(1000.0) + env_steps, "adam": [torch.zeros(3)]}


def held(added: int) -> Callable[[int], Experience]:
    """The answers of a replay buffer after `added` transitions: row i holds the number i."""

    def since(first: int) -> Experience:
        first = max(first, added - CAPACITY, 0)
        rows = {"obs": torch.arange(first, added).float(), "reward": torch.arange(first, added).double()}
        return Experience(first, added, CAPACITY, rows)

    return since


def loaded(checkpoint_: Checkpoint, first: int, last: int) -> dict[str, Tensor]:
    """Transitions `first` to `last`, in one piece."""
    parts = list(load_experience(checkpoint_, first, last))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def nothing(_: int) -> None:
    return None


def files(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def steps(run_dir: Path) -> list[int]:
    return [int(path.stem[5:]) for path in list_checkpoints(run_dir)]


def newest(run_dir: Path) -> int | None:
    found = newest_checkpoint(run_dir, lambda _: None)
    return None if found is None else int(found.state["env_steps"])


def two_checkpoints(run_dir: Path) -> None:
    writer = Checkpoints(run_dir, {}, keep=3)
    for added in (20, 40):
        writer.save(added, state(added), held(added))
    assert newest(run_dir) == 40


def test_the_newest_stay_and_come_back_as_they_were(tmp_path: Path) -> None:
    writer = Checkpoints(tmp_path, {"seed": 1}, keep=2)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step_best.json").touch()  # of the user
    for env_steps in (8, 100, 20, 9):
        writer.save(env_steps, state(env_steps), nothing)
    assert steps(tmp_path) == [20, 100]  # by number, and not in the order of their names
    ours = ["step_100.json", "step_100.pt", "step_20.json", "step_20.pt"]
    assert files(tmp_path) == [*ours, "step_best.json"]
    found = newest_checkpoint(tmp_path, print)
    assert found is not None
    assert found.config == {"seed": 1}
    assert torch.equal(found.state["net"], state(100)["net"])
    assert newest_checkpoint(tmp_path / "nowhere", print) is None


def test_chunks_hold_what_a_checkpoint_needs_and_go_with_the_last_that_does(tmp_path: Path) -> None:
    writer = Checkpoints(tmp_path, {}, keep=2)
    for added in (20, 40, 60, 80, 100):
        if added == 80:  # a writer that goes on writes no chunk twice
            writer = Checkpoints(tmp_path, {}, 2)
        writer.save(added, state(added), held(added))
        newest_one = load_checkpoint(list_checkpoints(tmp_path)[-1])
        first = max(0, added - CAPACITY)
        rows = loaded(newest_one, first, added)
        assert rows["obs"].tolist() == list(range(first, added))
        assert rows["reward"].dtype == torch.float64
    chunks = [name for name in files(tmp_path) if name.startswith("experience")]
    # 80 needs what came in from 30 on, 100 what came in from 50 on.
    assert chunks == [f"experience_{a}_{a + 20}.pt" for a in (20, 40, 60, 80)]
    with pytest.raises(ConfigError, match="transitions 0 to 10 are missing"):
        loaded(newest_one, 0, 10)
    (tmp_path / "checkpoints" / "experience_60_80.pt").unlink()  # the policy can be had without them
    assert newest_checkpoint(tmp_path, pytest.fail, experience=False) is not None
    with pytest.raises(ConfigError, match=r"experience_60_80.pt cannot be read"):
        newest_checkpoint(tmp_path, print)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def hide(path: Path) -> None:
    path.unlink()
    path.mkdir()


FILES = pytest.mark.parametrize("name", ["step_40.pt", "step_40.json", "experience_20_40.pt"])


@FILES
def test_a_checkpoint_that_cannot_be_read_now_is_not_given_up(tmp_path: Path, name: str) -> None:
    """The older one would be taken, and the newer one removed, for a trouble that may pass."""
    two_checkpoints(tmp_path)
    hide(tmp_path / "checkpoints" / name)
    with pytest.raises(ConfigError, match=f"{name} cannot be read: Is a directory"):
        newest_checkpoint(tmp_path, pytest.fail)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@FILES
def test_a_damaged_checkpoint_is_passed_over_and_named(
    tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    two_checkpoints(tmp_path)
    damage(tmp_path / "checkpoints" / name)
    passed: list[str] = []
    found = newest_checkpoint(tmp_path, passed.append)
    assert found is not None
    assert found.state["env_steps"] == 20
    if (name, damage) != ("step_40.json", Path.unlink):  # then it was never finished
        (line,) = passed
        assert name in line
        damage(tmp_path / "checkpoints" / "step_20.pt")
        with pytest.raises(ConfigError, match=r"no checkpoint of .* is whole"):
            newest_checkpoint(tmp_path, pytest.fail)


def test_what_torch_cannot_load_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a trouble of the disk before the digest was taken."""
    two_checkpoints(tmp_path)
    monkeypatch.setattr(checkpoint, "_save", lambda file, _: file.write(b"PK\3\4"))
    Checkpoints(tmp_path, {}, keep=3).save(60, state(60), nothing)
    passed: list[str] = []
    found = newest_checkpoint(tmp_path, passed.append)
    assert found is not None
    assert found.state["env_steps"] == 40
    assert "step_60.pt is damaged, torch cannot load it" in passed[0]


def test_each_bit_counts(tmp_path: Path) -> None:
    """A flip anywhere in a small checkpoint is noticed: header, tensors, padding, list of files."""
    Checkpoints(tmp_path, {"seed": 1}, keep=1).save(8, {"env_steps": 8, "a": torch.arange(4)}, nothing)
    for path in (tmp_path / "checkpoints").iterdir():
        whole = path.read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 150)):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(ConfigError):
                load_checkpoint(list_checkpoints(tmp_path)[0])
        path.write_bytes(whole)
    load_checkpoint(list_checkpoints(tmp_path)[0])


class Harmful:
    """Executes a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.mark}",))


def test_loading_never_executes_what_a_file_says(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    writer = Checkpoints(tmp_path, {}, keep=1)
    path = writer.save(8, {"env_steps": 8, "bad": Harmful(mark)}, nothing)
    with pytest.raises(ConfigError, match="torch cannot load it"):
        load_checkpoint(path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Harmful(mark)))  # the inverse: it would have
    assert mark.exists()


def test_another_format_is_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "VERSION", 99)
    Checkpoints(tmp_path, {}, keep=1).save(8, state(8), nothing)
    monkeypatch.undo()
    Checkpoints(tmp_path, {}, keep=2).save(4, state(4), nothing)
    # Not damaged: its own code can go on there, so no older one is taken.
    with pytest.raises(ConfigError, match="was made by another version of this code"):
        newest_checkpoint(tmp_path, pytest.fail)
    list_checkpoints(tmp_path)[-1].with_suffix(".json").write_text('{\n "version": 5\n}\n')
    with pytest.raises(ConfigError, match="was made by an older version of this code"):
        newest_checkpoint(tmp_path, pytest.fail)


def test_only_the_configuration_that_a_checkpoint_was_made_with_goes_on(configure: Any) -> None:
    from rltemplate.config.loading import to_dict

    made = to_dict(configure("algo=ppo", "env=CartPole"))
    free = ["runs_dir=/elsewhere", "total_env_steps=200000", "env.num_workers=2"]
    allowed = check_same_run(made, configure("algo=ppo", "env=CartPole", *free), "step_8.pt")
    assert allowed == {"total_env_steps": [100000, 200000], "env.num_workers": [0, 2]}
    for words, message in (
        (["algo.gamma=0.9"], "algo.gamma=0.9: step_8.pt was made with 0.98"),
        (["log_every=1"], "log_every=1: step_8.pt was made with 4000"),
        (["total_env_steps=5"], "total_env_steps=5: step_8.pt was made with 100000"),
        (["+env.kwargs.sutton_barto_reward=true"], "env.kwargs.sutton_barto_reward=True: step_8.pt was made"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
            check_same_run(made, configure("algo=ppo", "env=CartPole", *words), "step_8.pt")


@pytest.mark.parametrize("write", range(3))  # of a chunk, a state and a manifest
def test_a_full_disk_keeps_the_checkpoints_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: int
) -> None:
    writer = Checkpoints(tmp_path, {}, keep=1)
    writer.save(20, state(20), held(20))
    before, syncs, fsync = files(tmp_path), itertools.count(), os.fsync

    def full(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and next(syncs) == write:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        writer.save(40, state(40), held(40))
    assert files(tmp_path) == before  # nothing half-written
    path = writer.save(60, state(60), held(60))
    assert newest(tmp_path) == 60
    assert loaded(load_checkpoint(path), 10, 60)["obs"].tolist() == list(range(10, 60))


def test_a_kill_at_any_moment_of_a_write_leaves_a_whole_one(tmp_path: Path) -> None:
    """Killed six times, at moments that go through several writes."""
    source = """
import sys, itertools, torch
from pathlib import Path
from rltemplate.run.checkpoint import Checkpoints, newest_checkpoint
from rltemplate.types import Experience
run_dir = Path(sys.argv[1])
since = newest_checkpoint(run_dir, lambda text: sys.exit(text))
begin = 0 if since is None else since.state["env_steps"]
writer = Checkpoints(run_dir, {}, 2)
def held(added):
    def since(first):
        first = max(first, added - 30)
        rows = torch.arange(first, added).repeat(2000, 1).T.contiguous()
        return Experience(first, added, 30, {"obs": rows})
    return since
print("ready", flush=True)
for env_steps in itertools.count(begin + 10, 10):
    state = {"env_steps": env_steps, "net": torch.full((100_000,), env_steps)}
    writer.save(env_steps, state, held(env_steps))
"""
    partial = 0
    for round_ in range(6):
        writing = subprocess.Popen([sys.executable, "-c", source, str(tmp_path)], stdout=subprocess.PIPE)
        assert writing.stdout is not None
        assert writing.stdout.readline() == b"ready\n"
        time.sleep(0.02 + 0.0137 * round_)
        os.kill(writing.pid, signal.SIGKILL)
        writing.wait()
        partial += any(name.endswith(".tmp") for name in files(tmp_path))
        found = newest_checkpoint(tmp_path, pytest.fail)
        if found is not None:
            env_steps = found.state["env_steps"]
            assert found.state["net"].tolist() == [env_steps] * 100_000
            first = max(0, env_steps - 30)
            assert loaded(found, first, env_steps)["obs"][:, 0].tolist() == list(range(first, env_steps))
    assert found is not None
    assert partial > 0  # at least one kill met a write in the middle
    Checkpoints(tmp_path, {}, 1).save(env_steps + 10, state(env_steps + 10), nothing)
    assert len(files(tmp_path)) == 2
