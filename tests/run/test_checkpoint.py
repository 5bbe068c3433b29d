"""Checkpoints on a disk: whole or absent, known to be whole, and never code."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import re
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runlab.errors import ConfigError
from runlab.run import manifest
from runlab.run.checkpoint import Checkpoint, Checkpoints, load_checkpoint, load_experience, newest_checkpoint
from runlab.run.continuation import check_same_run
from runlab.run.manifest import Damaged, list_checkpoints, read_manifest
from runlab.run.trace import digest

CAPACITY = 50


def state(env_steps: int) -> dict[str, Any]:
    return {"env_steps": env_steps, "net": torch.arange(1000.0) + env_steps, "adam": [torch.zeros(3)]}


def held(added: int) -> Any:
    """A replay buffer after `added` transitions: row i holds the number i."""

    def since(first: int) -> dict[str, torch.Tensor]:
        return {"obs": torch.arange(max(first, added - CAPACITY, 0), added).float()}

    return SimpleNamespace(since=since, capacity=CAPACITY, added=added)


def loaded(checkpoint_: Checkpoint, first: int, last: int) -> list[float]:
    """The numbers of transitions `first` to `last`, as they are found."""
    parts = list(load_experience(checkpoint_, first, last))
    return [row for part in parts for row in part["obs"].tolist()]


def files(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def two_checkpoints(run_dir: Path) -> Path:
    """The folder of two whole checkpoints, after 20 and 40 steps."""
    writer = Checkpoints(run_dir, {}, keep=3)
    for added in (20, 40):
        writer.save(added, state(added), held(added))
    return run_dir / "checkpoints"


def test_the_newest_stay_and_come_back_as_they_were(tmp_path: Path) -> None:
    writer = Checkpoints(tmp_path, {"seed": 1}, keep=2)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step_best.json").touch()  # of the user
    for env_steps in (8, 100, 20, 9):
        writer.save(env_steps, state(env_steps), None)
    # By number, and not in the order of their names.
    ours = ["step_100.json", "step_100.pt", "step_20.json", "step_20.pt"]
    assert files(tmp_path) == [*ours, "step_best.json"]
    newest = newest_checkpoint(tmp_path, print)
    assert newest is not None
    assert newest.config == {"seed": 1}
    assert torch.equal(newest.state["net"], state(100)["net"])
    assert newest_checkpoint(tmp_path / "nowhere", print) is None


def test_chunks_hold_what_a_checkpoint_needs_and_go_with_the_last_that_does(tmp_path: Path) -> None:
    for added in (20, 40, 60, 80, 100):
        Checkpoints(tmp_path, {}, keep=2).save(added, state(added), held(added))
        newest_one = load_checkpoint(list_checkpoints(tmp_path)[-1])
        first = max(0, added - CAPACITY)
        assert loaded(newest_one, first, added) == list(range(first, added))
    chunks = [name for name in files(tmp_path) if name.startswith("experience")]
    # 80 needs what came in from 30 on, 100 what came in from 50 on.
    assert chunks == [f"experience_{a}_{a + 20}.pt" for a in (20, 40, 60, 80)]
    with pytest.raises(ConfigError, match="transitions 0 to 10 are missing"):
        loaded(newest_one, 0, 10)
    (tmp_path / "checkpoints" / "experience_60_80.pt").unlink()  # the policy can be had without them
    assert newest_checkpoint(tmp_path, pytest.fail, experience=False) is not None


@pytest.mark.parametrize("name", ["step_40.pt", "experience_20_40.pt"])
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, name: str) -> None:
    folder, passed = two_checkpoints(tmp_path), list[str]()
    (folder / name).unlink()
    newest = newest_checkpoint(tmp_path, passed.append)
    assert newest is not None
    assert newest.state["env_steps"] == 20
    assert name in passed[0]
    (folder / "step_20.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no checkpoint of .* is whole"):
        newest_checkpoint(tmp_path, pytest.fail)


def test_a_checkpoint_that_cannot_be_read_now_is_not_given_up(tmp_path: Path) -> None:
    """The older one would be taken, and the newer one removed, for a trouble that may pass."""
    for name in ("step_40.pt", "step_40.json"):
        path = two_checkpoints(tmp_path / name) / name
        path.unlink()
        path.mkdir()
        with pytest.raises(ConfigError, match=f"{name} cannot be read: Is a directory"):
            newest_checkpoint(tmp_path / name, pytest.fail)


def test_each_bit_counts(tmp_path: Path) -> None:
    """A flip anywhere in a small checkpoint is noticed: header, tensors, padding, list of files."""
    Checkpoints(tmp_path, {"seed": 1}, keep=1).save(8, {"env_steps": 8, "a": torch.arange(4)}, None)
    for path in (tmp_path / "checkpoints").iterdir():
        whole = path.read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 150)):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(Damaged):
                load_checkpoint(list_checkpoints(tmp_path)[0])
        path.write_bytes(whole)
    load_checkpoint(list_checkpoints(tmp_path)[0])


@pytest.mark.parametrize("name", ["step_8.pt", "step_8.json", "experience_0_5.pt"])
@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"]
)
def test_what_never_ends_is_not_read(name: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, {}, 1).save(8, {"env_steps": 8}, held(5))
    path.with_name(name).unlink()
    make(path.with_name(name))
    with pytest.raises(ConfigError, match=f"{name} cannot be read: it is no file"):
        load_checkpoint(path)


class Harmful:
    """Executes a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.mark}",))


def test_loading_never_executes_what_a_file_says(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    path = Checkpoints(tmp_path, {}, 1).save(8, {"env_steps": 8, "bad": Harmful(mark)}, None)
    with pytest.raises(Damaged, match=r"names posix\.system, which no checkpoint does"):
        load_checkpoint(path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Harmful(mark)))  # the inverse: it would have
    assert mark.exists()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.uint32, torch.float8_e5m2]
)
def test_tensors_of_every_dtype_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    """The inverse of what is refused: torch pickles some of them in another way."""
    layer = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(layer.parameters())
    layer(torch.ones(2)).sum().backward()
    adam.step()
    own = {"value": torch.ones(3).to(dtype), "layer": layer.state_dict(), "adam": adam.state_dict()}
    own |= {"parameter": layer.weight, "buffer": torch.nn.Buffer(torch.ones(2))}  # which has an attribute
    loaded = load_checkpoint(Checkpoints(tmp_path, {}, 1).save(8, own, None)).state
    assert loaded["value"].dtype == dtype
    assert digest(loaded["value"]) == digest(own["value"])
    assert torch.equal(loaded["parameter"], layer.weight)
    assert torch.equal(loaded["buffer"], torch.ones(2))
    assert torch.equal(loaded["adam"]["state"][0]["exp_avg"], adam.state_dict()["state"][0]["exp_avg"])


def test_another_format_is_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_checkpoints(tmp_path)
    monkeypatch.setattr(manifest, "VERSION", 99)
    # Not damaged: its own code can go on there, so no older one is taken.
    with pytest.raises(ConfigError, match="was made by another version of this code"):
        newest_checkpoint(tmp_path, pytest.fail)


def test_only_the_configuration_that_a_checkpoint_was_made_with_goes_on(configure: Any) -> None:
    from runlab.config.loading import to_dict

    made = to_dict(configure("algo=ppo", "env=CartPole"))
    free = ["runs_dir=/elsewhere", "total_env_steps=200000", "env.num_workers=2"]
    allowed = check_same_run(made, configure("algo=ppo", "env=CartPole", *free), "step_8.pt")
    assert allowed == {"total_env_steps": [100000, 200000], "env.num_workers": [0, 2]}
    for words, message in (
        (["algo.gamma=0.9"], "algo.gamma=0.9: step_8.pt was made with 0.98"),
        (["total_env_steps=5"], "total_env_steps=5: step_8.pt was made with 100000"),
        (["+env.kwargs.sutton_barto_reward=true"], "env.kwargs.sutton_barto_reward=True: step_8.pt was made"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
            check_same_run(made, configure("algo=ppo", "env=CartPole", *words), "step_8.pt")


@pytest.mark.parametrize("steps", [40, 20])  # the same again, as a run whose last evaluation was cut short
@pytest.mark.parametrize(
    "write", range(3)
)  # of a chunk, a state and a manifest; or of a state and two manifests
def test_a_full_disk_keeps_the_checkpoints_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: int, steps: int
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
        writer.save(steps, state(steps) | {"row": 1}, held(steps))
    assert files(tmp_path) == before  # nothing half-written
    assert load_checkpoint(list_checkpoints(tmp_path)[0]).state["env_steps"] == 20
    path = writer.save(60, state(60), held(60))
    assert loaded(load_checkpoint(path), 10, 60) == list(range(10, 60))


def test_a_kill_while_a_checkpoint_is_written_again_leaves_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, left, fsync = tmp_path / "run", list[Path](), os.fsync
    writer = Checkpoints(run_dir, {}, keep=1)
    writer.save(20, state(20), held(20))

    def copied(descriptor: int) -> None:
        fsync(descriptor)
        left.append(Path(shutil.copytree(run_dir, tmp_path / f"after_{len(left)}")))

    monkeypatch.setattr(os, "fsync", copied)
    writer.save(20, state(20) | {"row": 1}, held(20))
    monkeypatch.undo()
    found = [newest_checkpoint(each, pytest.fail) for each in (*left, run_dir)]
    rows = ["row" in each.state for each in found if each is not None]
    assert len(rows) == len(found) > 6
    assert rows == sorted(rows)
    assert {*rows} == {False, True}
    assert " " not in read_manifest(list_checkpoints(run_dir)[0]).state


def test_a_checkpoint_counts_though_an_older_one_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_checkpoints(tmp_path)
    unlink, notes = Path.unlink, list[str]()

    def held_back(path: Path, missing_ok: bool = False) -> None:
        if path.name == "step_20.json":
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", held_back)
    writer = Checkpoints(tmp_path, {}, keep=1, note=notes.append)
    assert load_checkpoint(writer.save(60, state(60), held(60))).state["env_steps"] == 60
    why = f"{tmp_path}/checkpoints/step_20.json cannot be removed: Operation not permitted"
    assert notes == [f"step_60.pt is written, but {why}"]
    # Whatever it needs stays with it, and the one that can be removed goes.
    names = [path.name for path in list_checkpoints(tmp_path)]
    assert names == ["step_20.pt", "step_60.pt"]
    assert all(map(load_checkpoint, list_checkpoints(tmp_path)))


def test_a_kill_at_any_step_of_a_write_leaves_a_whole_one(tmp_path: Path) -> None:
    """Before each time that a file is opened, renamed or removed."""
    partial = 0
    for moment in itertools.count():
        run_dir, calls = tmp_path / f"{moment}", itertools.count()
        two_checkpoints(run_dir)

        def kill(event: str, _: object, moment: int = moment, calls: Iterator[int] = calls) -> None:
            if event in ("open", "os.rename", "os.remove") and next(calls) == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        if (child := os.fork()) == 0:
            sys.addaudithook(kill)
            try:
                Checkpoints(run_dir, {}, keep=1).save(60, state(60), held(60))
            finally:
                os._exit(0)
        killed = os.waitpid(child, 0)[1] == signal.SIGKILL
        partial += any(name.endswith(".tmp") for name in files(run_dir))
        newest = newest_checkpoint(run_dir, pytest.fail)
        assert newest is not None
        steps = newest.state["env_steps"]
        assert steps == 40 if moment == 0 else steps >= 40
        assert torch.equal(newest.state["net"], state(steps)["net"])
        assert loaded(newest, max(0, steps - CAPACITY), steps) == list(range(max(0, steps - CAPACITY), steps))
        Checkpoints(run_dir, {}, keep=1).save(200, state(200), None)
        assert files(run_dir) == ["step_200.json", "step_200.pt"]
        if not killed:
            break
    assert steps == 60
    assert partial > 0
