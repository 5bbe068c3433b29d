"""Tab completion, typed into real shells."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from conftest import ROOT

from rltemplate.config.cli.completion import complete

SHELLS = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}


def typed(shell: str, text: str, ends: str) -> str:
    """What an interactive shell shows once `text` was typed, until `ends` is there or ten seconds passed."""
    mine, its = pty.openpty()
    process = subprocess.Popen(
        [shell, *SHELLS[shell]],
        cwd=ROOT,
        env=os.environ | {"PS1": "> ", "TERM": "dumb"},
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
    )
    os.close(its)
    shown, until = "", time.monotonic() + 20
    try:
        os.write(mine, b"source scripts/completion.sh; echo rea''dy\n")
        sent = False
        while time.monotonic() < until and not (sent and ends in shown.rpartition("ready")[2]):
            if select.select([mine], [], [], 0.1)[0]:
                shown += os.read(mine, 65536).decode(errors="replace")
            if not sent and "ready\r" in shown:
                os.write(mine, text.encode())
                sent = True
    finally:
        process.kill()
        process.wait()
        os.close(mine)
    return shown.rpartition("ready")[2]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("make train algo=sa\t", "algo=sac"),
        ("make train seed=1 env=Walk\t", "env=Walker2d"),
        ("make train hydra/launcher=sl\t", "hydra/launcher=slurm"),
        ("make evaluate epi\t", "episodes="),
    ],
)
def test_a_tab_completes_the_word(shell: str, text: str, ends: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    shown = typed(shell, text, ends)
    assert ends in shown


def test_a_key_that_would_be_refused_is_not_offered_and_a_list_of_algorithms_is_understood() -> None:
    keys = complete(["train", "algo=ppo,sac", "algo."], ["train"], lambda _: None)
    assert "algo.clip_coef=" in keys
    assert "algo.name=" not in keys


@pytest.mark.parametrize(("shell", "name"), [("/bin/bash", ".bashrc"), ("/usr/bin/zsh", ".zshrc")])
def test_one_command_installs_it_once(shell: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("# mine\n")
    script = f"'{ROOT}/scripts/completion.sh'"
    for _ in range(2):
        command = ["sh", "scripts/completion.sh", "install"]
        subprocess.run(command, cwd=ROOT, env={"HOME": str(tmp_path), "SHELL": shell}, check=True)
    assert (tmp_path / name).read_text() == f"# mine\n[ ! -f {script} ] || source {script}\n"
