"""`make film`: films of a recorded policy, read back picture by picture."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import RecordedRun, read_video, write_video
from PIL import Image, ImageSequence

from runlab.__main__ import main
from runlab.envs import make
from runlab.rerun.policy_file import export_policy
from runlab.run import paths
from runlab.run.video.film import Clip, animate, join


@pytest.mark.long
def test_a_film_has_the_episodes_that_evaluate_plays(
    recorded_run: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, single, both = f"run={recorded_run.run_dir}", tmp_path / "single.mp4", tmp_path / "both.mp4"
    assert main(["evaluate", run, "episodes=2", "json=true"]) == 0
    evaluated = capsys.readouterr().out
    assert main(["film", run, f"out={single}"]) == 0
    assert main(["film", run, f"out={both}", "grid=1x2", "gif=true"]) == 0
    lines = capsys.readouterr().err.splitlines()
    returns = [float(line.rpartition(" ")[2]) for line in lines]
    first, second = (round(each, 1) for each in json.loads(evaluated)["returns"])
    assert returns == [first, first, second]
    one, two = read_video(single), read_video(both)
    height, width, _ = one[0].shape
    assert two[0].shape == (height, 2 * width, 3)
    # The left half is the first episode, except for changes by the compression.
    left, right = (np.abs(half.astype(int) - one[5]).mean() for half in np.split(two[5], 2, axis=1))
    assert left < min(3, right)
    assert np.abs(two[5][:, width:].astype(int) - two[0][:, width:]).mean() > 0.1
    assert main(["film", run, "checkpoint=all", f"out={single}"]) == 0
    steps = [line.split(": after ")[1].split(" ")[0] for line in capsys.readouterr().err.splitlines()]
    assert steps == ["64", "128", "192"]
    with Image.open(both.with_suffix(".gif")) as gif:
        assert (gif.width, getattr(gif, "n_frames", 1) > 3, gif.info["loop"]) == (640, True, 0)


def test_a_film_passes_over_a_damaged_checkpoint_as_an_evaluation_does(
    recorded_run: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(shutil.copytree(recorded_run.run_dir, tmp_path / "copy"))
    with paths.checkpoint_path(run_dir, 192).open("ab") as file:
        file.write(b"x")
    words = [f"run={run_dir}", "trust=true", "episodes=1"]
    assert main(["film", *words]) == 0
    assert "step_192.pt is damaged" in capsys.readouterr().err
    assert [path.name for path in (run_dir / paths.VIDEOS).glob("film_*.mp4")] == ["film_128.mp4"]


def test_a_film_of_a_longer_episode_says_that_it_is_cut(
    recorded_run: RecordedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    film, cut = tmp_path / "film.mp4", "note: of longer episodes the film shows the first 1,000 steps"
    assert main(["film", f"run={recorded_run.run_dir}", f"out={film}"]) == 0
    assert cut not in capsys.readouterr().err
    monkeypatch.setattr("runlab.run.evaluation.LONGEST_VIDEO", 5)
    assert main(["film", f"run={recorded_run.run_dir}", f"out={film}", "episodes=2"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines.count(cut.replace("1,000", "5")) == 1


@pytest.mark.parametrize("width", [160, 480])
def test_a_caption_is_seen_to_its_end(tmp_path: Path, width: int) -> None:
    """The games of Atari are 160 wide."""
    write_video(tmp_path / "clip.mp4", size=(96, width))
    bars = []
    for end in "18":
        clip = Clip(tmp_path / "clip.mp4", f"after 2,000,896 steps   return 17.{end}")
        join([clip], (1, 1), tmp_path / "film.mp4")
        bars.append(read_video(tmp_path / "film.mp4")[0][-12:].astype(int))
    assert np.abs(bars[0] - bars[1]).max() > 100


@pytest.mark.parametrize("kind", ["gif", "webp"])
def test_an_animation_is_as_long_as_its_film(tmp_path: Path, kind: str) -> None:
    write_video(tmp_path / "film.mp4", frames=60)  # two seconds; a picture of the animation has 1/15
    animate(tmp_path / "film.mp4", path := tmp_path / f"film.{kind}", 48)
    with Image.open(path) as animation:
        pictures = ImageSequence.Iterator(animation)
        assert sum(each.info["duration"] for each in pictures if each.load()) == 2000


class Opened:
    """Environments that are open, and the most of them at once."""

    now = most = 0


@pytest.mark.long
def test_an_evaluation_of_many_episodes_holds_few_environments(
    recorded_run: RecordedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Counted(gym.Wrapper[Any, Any, Any, Any]):
        def __init__(self, env: Any) -> None:
            super().__init__(env)
            Opened.now += 1
            Opened.most = max(Opened.most, Opened.now)

        def close(self) -> None:
            super().close()
            Opened.now -= 1

    made = make.make_env
    monkeypatch.setattr(make, "make_env", lambda *words, **named: Counted(made(*words, **named)))
    run, returns = f"run={recorded_run.run_dir}", []
    for episodes in (40, 16):
        assert main(["evaluate", run, f"episodes={episodes}", "json=true"]) == 0
        returns.append(json.loads(capsys.readouterr().out)["returns"])
    assert (Opened.most, len(returns[0]), len(set(returns[0])) > 1) == (16, 40, True)
    assert returns[0][:16] == returns[1]


@pytest.mark.long
def test_a_policy_file_plays_the_episodes_of_its_run(
    recorded_run: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Although it lacks most of the checkpoint: moments of the optimiser, streams, environments."""
    file, film = tmp_path / "small.zip", tmp_path / "small.mp4"
    export_policy(recorded_run.run_dir, file)
    assert main(["evaluate", f"run={recorded_run.run_dir}", "json=true"]) == 0
    assert main(["evaluate", f"policy={file}", "json=true"]) == 0
    of_run, of_file = map(json.loads, capsys.readouterr().out.splitlines())
    assert of_file["returns"] == of_run["returns"]
    assert file.stat().st_size < 0.4 * max(
        path.stat().st_size for path in recorded_run.run_dir.glob("checkpoints/*")
    )
    assert main(["film", f"policy={file}", f"out={film}"]) == 0
    assert read_video(film)
    whole = file.read_bytes()
    file.write_bytes(whole[:200] + bytes(30) + whole[230:])
    assert main(["evaluate", f"policy={file}"]) == 2
    file.write_bytes(whole[:500])
    assert main(["film", f"policy={file}", "out=a.gif"]) == 2
    damaged, wrong = capsys.readouterr().err.splitlines()[-2:]
    assert "small.zip cannot be read" in damaged
    assert "out=a.gif: expected FILE.mp4" in wrong
    for words in (["policy=ppo-Nothing"], [f"policy={file}"], [], ["run=last", "policy=a"]):
        assert main(["evaluate", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in lines[-2:]] == [
        "error: give run=RUN or policy=NAME, one of the two"
    ] * 2
    assert "small.zip cannot be read" in lines[-3]
