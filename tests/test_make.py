"""The Makefile and the set-up behind it, with pretended interpreters.

Every make here runs in a copy of its own with a PATH of few chosen tools, so that no interpreter, index or
environment of this machine can be reached, let alone changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, until
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MAKE = shutil.which("make") or "make"
# All that a make below can call, next to the interpreters that the test makes up.
TOOLS = (
    "awk cat chmod cksum cp cut dirname env find flock git grep make mkdir mv printf readlink rm sed sh "
    "sleep tail test touch xargs"
)
PROGRAM = (
    "import json, os, sys\nprint(json.dumps([sys.argv[1:], os.environ.get('PYTHONPATH'), os.getcwd()]))\n"
)
# An interpreter as far as the set-up can tell: it answers the probe, makes a .venv with itself as its
# interpreter, and its pip does what the test asks for, leaving one line per call in 'calls'.
INTERPRETER = """#!/bin/sh
case "$1 $2" in
    "-c "*ensurepip*) printf '%s\\n' '{version} {fits} {complete}' "$0" ;;
    "-c "*) exit 0 ;;
    "-m venv") echo "venv {version}" >>calls; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    "-m pip") echo "pip $*" >>calls; . ./pip ;;
    *) echo "$@" ;;
esac
"""
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@dataclass
class Checkout:
    """A copy of what set-up needs, and the only programs it can find."""

    folder: Path
    bin: Path

    def add_interpreter(
        self, name: str, version: str = "3.11.9", fits: str = "fits", complete: str = "complete"
    ) -> Path:
        text = INTERPRETER.format(version=version, fits=fits, complete=complete)
        return executable(self.bin / name, text)

    def pip_does(self, script: str) -> None:
        (self.folder / "pip").write_text(script + "\n")

    def program(self, target: str, code: str = PROGRAM) -> None:
        (self.folder / "scripts" / f"{target}.py").write_text(code)

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [MAKE, "-C", str(self.folder), "--no-print-directory", *words],
            env={"PATH": str(self.bin), "HOME": str(self.folder), "LC_ALL": "C", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def make(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, **environment)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def calls(self) -> list[str]:
        """The first word of each call of an interpreter."""
        path = self.folder / "calls"
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []

    def arguments(self, *words: str, **environment: str) -> list[str]:
        """What the program behind the target gets."""
        done = self.make(*words, **environment)
        assert done.returncode == 0, done.stderr
        received: list[str] = json.loads(done.stdout.splitlines()[-1])[0]
        return received

    def fails(self, *words: str) -> str:
        """The message of a set-up that stops before anything is run or called complete."""
        done = self.make(*words)
        assert (done.returncode, (self.folder / ".venv" / ".installed").exists()) == (2, False)
        assert "Traceback" not in done.stderr
        assert "scripts/train.py" not in done.stdout
        return done.stderr

    def change_lock(self, text: str, after_s: float) -> None:
        """Add to the lock; file times are only as fine as the kernel's clock, and tests are faster."""
        lock = self.folder / "requirements.lock"
        lock.write_text(lock.read_text() + text)
        os.utime(lock, (time.time() + after_s,) * 2)

    @property
    def touched(self) -> bool:
        """True if something typed was evaluated."""
        return any(self.folder.rglob("touched"))


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def fresh(tmp_path: Path) -> Checkout:
    """A clone before the first make; it has no interpreter yet."""
    folder, tools = tmp_path / "a clone", tmp_path / "bin"  # with a space, as in people's folders
    (folder / "scripts").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "scripts/setup.sh"):
        shutil.copy(ROOT / name, folder / name)
    tools.mkdir()
    for tool in TOOLS.split():
        if found := shutil.which(tool):
            (tools / tool).symlink_to(found)
    checkout = Checkout(folder, tools)
    checkout.pip_does(":")
    return checkout


@pytest.fixture
def ready(fresh: Checkout) -> Checkout:
    """A clone that is set up, with programs that print what they were given."""
    # Isolated and without site-packages: a program of the test, never an installer. Commands are files too.
    command = '[ "$1 $2" != "-m rltemplate" ] || { name=$3; shift 3; set -- "scripts/$name.py" "$@"; }'
    python = fresh.folder / ".venv" / "bin" / "python"
    executable(python, f'#!/bin/sh\n{command}\nexec "{sys.executable}" -S -I "$@"\n')
    for name in ("train", "evaluate"):
        fresh.program(name)
    (fresh.folder / ".venv" / ".installed").write_text("")
    return fresh


# Some would leave a file called 'touched' if anything evaluated them.
VALUES = [
    *("$HOME $(id) ${HOME} $$ $", "`id`", "it's", 'say "hi"', """a'b"c""", "#a#b", "a;b", "choice(1,2)"),
    *("range(1,5)", "[256,256]", "{a: 1, b: {c: 2}}", "~", "*", "?", "a&b&&c", "a|b>c<d", "a\\b\\", "%s%"),
    *("a=b:=c", "a  b ", "a\tb", "!!", "", "üλ", "$(shell touch touched)", "${shell touch touched}"),
    *("$(shell touch touched", "$x$@$$(touch touched)", "`touch touched`", "';touch touched;'"),
    *('";touch touched;"$(touch touched)', "#$(touch touched)"),
]
TYPED = ["+env.kwargs.x=1", "++a.b=2", "~a.c=3", "hydra/launcher=joblib", "algo@x=ppo", "algo.lr=3e-4"]
TYPED += [
    "+algo.it's=1",
    "~a/b,c(d=2",
    "path=/nowhere",
    *(f"x.k{i}={value}" for i, value in enumerate(VALUES)),
]


@pytest.mark.parametrize("target", TARGETS)
def test_any_word_arrives_as_it_was_typed_in_one_order_and_is_not_evaluated(
    ready: Checkout, target: str
) -> None:
    if re.search(rf"^{target}:.*\n\t\$\((call RUN,scripts/|COMMAND)", MAKEFILE, re.MULTILINE):
        ready.program(target)
        arrived = ready.arguments(target, *TYPED)
        assert sorted(arrived) == sorted(TYPED)
        assert arrived == ready.arguments(target, *reversed(TYPED))
    else:
        ready.make(target, *TYPED)
    ready.make(target, "ARGS=" + " ".join(VALUES))
    assert not ready.touched


def test_what_is_evaluated_is_noticed(ready: Checkout) -> None:
    (ready.folder / "Makefile").write_text(MAKEFILE.replace("unexport $(TYPED) ", "unexport "))
    ready.make("train", "note=$(shell touch touched)")
    assert ready.touched


FLAGS = """-k 'a or (b and not c)' tests/x.py::y[1-a] * ~ $HOME $(id) `id` ${x ; # > < & "it's" \\$"""
SPLIT = [
    *("-k", "a or (b and not c)", "tests/x.py::y[1-a]", "*", "~", "$HOME", "$(id)", "`id`"),
    *("${x", ";", "#", ">", "<", "&", "it's", "$"),
]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "env=Hopper"], ["env=Hopper"]),  # only the command line makes overrides
        (["evaluate", "run=a"], ["run=a"]),
        (["-e", "train"], []),
        (["evaluate", "run=a", "json=1"], ["run=a", "--json"]),  # composes no configuration
        (["evaluate", "run=a", "json=0"], ["run=a"]),
        (["train", "json=1"], ["json=1"]),
        (["train", "PYTHON=$(shell touch touched)", "algo=sac"], ["algo=sac"]),  # upper case stays with make
        (["train", "algo=sac", f"ARGS={FLAGS}"], ["algo=sac", *SPLIT]),
    ],
)
def test_words_go_in_and_arguments_come_out(ready: Checkout, words: list[str], expected: list[str]) -> None:
    inherited = {"env": "CartPole", "seed": "3", "json": "1", "ARGS": "--bad", "algo": "ppo"}
    assert ready.arguments(*words, **({} if "-e" in words else inherited)) == expected
    assert not ready.touched


def test_a_program_gets_this_checkout_and_no_overrides_by_the_environment(ready: Checkout) -> None:
    (ready.folder / "inner.mk").write_text("$(info seed=$(seed) flags=$(MAKEOVERRIDES))\nall: ; @:\n")
    environment = f"{{'PATH': {str(ready.bin)!r}, **{{k: v for k, v in os.environ.items() if k[0] == 'M'}}}}"
    code = f"import os, subprocess\nsubprocess.run(['make', '-f', 'inner.mk'], env={environment}, check=True)"
    ready.program("train", code)
    done = ready.make("train", "seed=3", "-j2")
    assert "seed= flags=\n" in done.stdout + "\n", done.stdout + done.stderr
    done = ready.make("evaluate", "a=1", PYTHONPATH="/else")
    assert json.loads(done.stdout) == [["a=1"], f"{ready.folder}:/else", str(ready.folder)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "x=a\nb"], "line break"),
        (["train", "seed:=3"], "Write seed=... instead of seed:=..."),
        (["train", "sac"], "No such target: sac"),
        (["train", "algo", "=", "sac"], "empty variable name"),
        (["test", "k=record"], "'test' takes no overrides, but got: k"),
        (["clean", "runs=all"], "'clean' takes no overrides"),
        (["nonsense"], "No rule to make target 'nonsense'"),
        (["train", "ARGS=-k 'a"], "unmatched single quote"),
        *(
            (["train", f"{name}=$(shell touch touched)"], f"Not known here: {name}. An environment variable")
            for name in ("SHELL", ".SHELLFLAGS", "RUN", "MAKEFLAGS")
        ),
    ],
)
def test_what_cannot_be_meant_stops_before_anything_runs(
    ready: Checkout, words: list[str], message: str
) -> None:
    done = ready.make(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert not ready.touched


def test_help_and_dry_runs_set_nothing_up(fresh: Checkout) -> None:
    done = fresh.make()
    assert (done.returncode, done.stdout) == (0, fresh.make("help").stdout)
    helped = re.findall(r"^([a-z-]+):.* ## ", MAKEFILE, re.MULTILINE)
    assert re.findall(r"^  ([a-z-]+) +\S", done.stdout, re.MULTILINE) == helped != []
    done = fresh.make("-n", "train", "algo=sac", "name=it's")
    assert done.stdout.rstrip().endswith("scripts/train.py 'algo=sac' 'name=it'\\''s'")
    assert not (fresh.folder / ".venv").exists()


@pytest.mark.parametrize("target", ["compare", "prove", "reproduce", "train"])
def test_an_answer_is_the_last_word_and_its_status_is_that_of_make(ready: Checkout, target: str) -> None:
    """A program whose status 1 is no answer has failed, which make says in one line after its own message."""
    for status, noise in {0: [], 1: ["make"] * (target == "train"), 2: ["make"], 130: ["make"]}.items():
        ready.program(target, f"import sys\nprint('different', sys.argv[1:])\nsys.exit({status})\n")
        done = ready.make("-j2", target, "a=it's")
        assert done.stdout == """different ["a=it's"]\n"""
        assert done.returncode == (2 if noise else status)
        assert [line.partition(":")[0] for line in done.stderr.splitlines()] == noise
    assert "different" not in ready.make("-n", target).stdout
    ready.program(target, "raise SystemExit(1)\n")
    assert "Error 1\n" in ready.make(target, "evaluate").stderr, "make is silent where all goals answer"


def test_a_signal_to_make_reaches_the_program_which_may_finish(ready: Checkout) -> None:
    code = (
        "import pathlib, signal, sys, time\n"
        "def stop(*_):\n    time.sleep(0.3); pathlib.Path('saved').touch(); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\npathlib.Path('started').touch()\ntime.sleep(30)\n"
    )
    ready.program("train", code)
    process = ready.start("train", "x=it's")
    until((ready.folder / "started").exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert (ready.folder / "saved").exists(), "make went first, or the signal got lost in a shell"


def test_the_first_make_sets_up_and_later_ones_install_what_has_changed(fresh: Checkout) -> None:
    fresh.add_interpreter("python3")
    fresh.pip_does('echo "$PIP_REQUIRE_VIRTUALENV $PIP_USER" >seen')
    (fresh.bin / "git").unlink(missing_ok=True)
    first = fresh.make("train", "seed=1", PIP_USER="1")
    assert "installing the locked dependencies" in first.stderr
    assert "git was not found" in first.stderr
    assert (fresh.folder / "seen").read_text() == "1 0\n"  # outside of an environment pip refuses
    assert first.stdout.strip() == "scripts/train.py seed=1"
    assert fresh.make("compare").stdout.strip() == "-m rltemplate compare"
    assert fresh.make("-j4", "train", "seed=2").stderr == ""
    fresh.change_lock("", 2)
    assert "installing" not in fresh.make("install").stderr  # touched, and still the same
    fresh.change_lock("more==1\n", 4)
    assert "installing" in fresh.make("install").stderr
    assert fresh.calls() == ["venv", "pip", "pip"]
    python = fresh.folder / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/gone/python3.11")
    assert fresh.make("train").returncode == 0
    assert fresh.calls()[3:] == ["venv", "pip"]
    fresh.change_lock("more==2\n", 6)
    fresh.pip_does("echo ERROR: it is wrong >&2; exit 1")
    for _ in range(2):
        message = fresh.fails("train")
        assert "ERROR: it is wrong" in message
        assert "pip install -r requirements.lock" in message
    fresh.pip_does(":")
    assert fresh.make("train").returncode == 0


def test_the_first_complete_interpreter_that_fits_is_found_by_calling_it(fresh: Checkout) -> None:
    message = fresh.fails("train")
    assert "Python 3.11, 3.12 or 3.13 is needed" in message
    assert "apt install python3 python3-venv" in message
    fresh.add_interpreter("python3", "3.14.0", fits="other")
    executable(fresh.bin / "python3.12", "#!/bin/sh\necho 'pyenv: command not found' >&2\nexit 127\n")
    assert "found: python3 (3.14.0), python3.12 (does not start)." in fresh.fails("train")
    assert "/nowhere/python" in fresh.fails("train", "PYTHON=/nowhere/python")
    fresh.add_interpreter("python3.11", complete="bare")
    assert "apt install python3.11-venv" in fresh.fails("train")
    fresh.add_interpreter("python3.13", "3.13.1")
    other = fresh.add_interpreter("my own", "3.12.4")
    assert fresh.make("install").returncode == 0
    shutil.rmtree(fresh.folder / ".venv")
    assert fresh.make("install", f"PYTHON={other}").returncode == 0
    called = (fresh.folder / "calls").read_text().splitlines()
    assert (called[0], called[2]) == ("venv 3.13.1", "venv 3.12.4")


def test_an_install_that_was_ended_is_made_anew_and_another_make_waits_for_it(fresh: Checkout) -> None:
    fresh.add_interpreter("python3")
    reached, installed = fresh.folder / "reached", fresh.folder / ".venv" / ".installed"
    half = fresh.folder / ".venv" / "half a package"
    for number in (signal.SIGKILL, signal.SIGINT):
        fresh.pip_does("touch reached; exec sleep 30")
        process = fresh.start("install")
        until(reached.exists)
        os.killpg(process.pid, number)
        _, message = process.communicate(timeout=30)
        assert number == signal.SIGKILL or "interrupted" in message
        assert not installed.exists()
        reached.unlink()
    half.touch()
    fresh.pip_does("touch reached; sleep 0.5")
    first = fresh.start("install")
    until(reached.exists)
    second = fresh.make("install")
    assert (first.wait(), second.returncode, "waiting" in second.stderr) == (0, 0, True)
    assert fresh.calls() == ["venv", "pip"] * 3
    assert (installed.exists(), half.exists()) == (True, False)


def test_a_linked_interpreter_that_is_no_environment_is_never_installed_into(fresh: Checkout) -> None:
    """Without pyvenv.cfg beside it, a link in .venv/bin leads pip to the interpreter behind it: here a real
    one, behind a wrapper that cannot run pip.
    """
    pip = 'case "$1 $2" in "-m pip") echo pip >>calls; exit 0 ;; esac'
    text = f'#!/bin/sh\n{pip}\nexec "{sys.executable}" -I "$@"\n'
    wrapper = executable(fresh.bin.parent / "outside" / "python", text)
    (fresh.folder / ".venv" / "bin").mkdir(parents=True)
    (fresh.folder / ".venv" / "bin" / "python").symlink_to(wrapper)
    assert fresh.make("install").returncode == 2
    assert fresh.calls() == []


def test_clean_keeps_runs_and_the_environment(ready: Checkout) -> None:
    kept, gone = ["runs/a/__pycache__", ".venv/lib/__pycache__"], ["build", "scripts/__pycache__"]
    for name in kept + gone:
        (ready.folder / name).mkdir(parents=True)
    assert ready.make("clean").returncode == 0
    assert [name for name in kept + gone if (ready.folder / name).exists()] == kept


def test_hooks_and_the_lock_fulfil_the_project() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pinned = [line.split("==") for line in lines if line and not line.startswith("#")]
    lock = {canonicalize_name(name): version for name, version in pinned}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        required = Requirement(text)
        assert required.specifier.contains(lock[canonicalize_name(required.name)], prereleases=True), text
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    pins = [pin for hook in repos[0]["hooks"] for pin in hook.get("additional_dependencies", [])]
    assert pins
    assert [pin for pin in pins if pin.partition("==")[2] != lock.get(pin.partition("==")[0])] == []
