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
from conftest import ROOT, until
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MAKE = shutil.which("make") or "make"
# All that a make below can call, next to the interpreters that the test makes up.
TOOLS = (
    "awk cat chmod cksum cp cut dirname du env find flock git grep head make mkdir mv printf readlink rm sed "
    "sh sleep tail test touch uname xargs"
)
PROGRAM = "import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
# An interpreter as far as the set-up can tell: it answers the probe, makes a .venv with itself as its
# interpreter, and its pip does what the test asks for, leaving one line per call in 'calls'.
INTERPRETER = """#!/bin/sh
case "$1 $2" in
    "-c "*ensurepip*) printf '%s\\n' '{answer}' "$0" ;;
    "-c import "*) echo "compiled$PYTHONDONTWRITEBYTECODE" >>calls ;;
    "-c "*) exit 0 ;;
    "-m venv") echo "venv by {answer}" >>calls; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    "-m pip") echo pip >>calls; . ./pip ;;
    *) echo "$@" ;;
esac
"""
MAKEFILE = (ROOT / "Makefile").read_text()
EXTRAS = re.findall(r"(?m)^EXTRAS := (.*)$", MAKEFILE)[0].split()  # of the lock
TARGETS = re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@dataclass
class Checkout:
    """A copy of what set-up needs, and the only programs it can find."""

    folder: Path
    bin: Path

    def add_interpreter(self, name: str, answer: str = "3.11.9 fits complete") -> Path:
        return executable(self.bin / name, INTERPRETER.format(answer=answer))

    def pip_does(self, script: str) -> None:
        (self.folder / "pip").write_text(script + "\n")

    def program(self, target: str, code: str = PROGRAM) -> None:
        (self.folder / "scripts" / f"{target.replace('-', '_')}.py").write_text(code)

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [MAKE, "-C", str(self.folder), "--no-print-directory", *words],
            env={"PATH": str(self.bin), "HOME": str(self.folder), "LC_ALL": "C", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def make(self, *words: str, status: int = 0, **environment: str) -> tuple[str, str]:
        """What make writes to standard output and standard error."""
        process = self.start(*words, **environment)
        out, err = process.communicate(timeout=60)
        assert process.returncode == status, out + err
        return out, err

    def calls(self) -> list[str]:
        """The calls of interpreters that make .venv or install."""
        return (self.folder / "calls").read_text().splitlines()

    def arguments(self, *words: str, **environment: str) -> list[str]:
        """What the program behind the target gets."""
        received: list[str] = json.loads(self.make(*words, status=0, **environment)[0].splitlines()[-1])[0]
        return received

    def change_lock(self, text: str, after_s: float) -> None:
        """Add to the lock; file times are only as fine as the kernel's clock, and tests are faster."""
        self.lock.write_text(self.lock.read_text() + text)
        os.utime(self.lock, (time.time() + after_s,) * 2)

    @property
    def lock(self) -> Path:
        return self.folder / "requirements.lock"

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
        if path := shutil.which(tool):
            (tools / tool).symlink_to(path)
    checkout = Checkout(folder, tools)
    checkout.pip_does(":")
    return checkout


@pytest.fixture
def ready(fresh: Checkout) -> Checkout:
    """A clone that is set up, with programs that print what they were given."""
    # Isolated and without site-packages: a program of the test, never an installer. Commands are files too.
    command = '[ "$1 $2" != "-m runlab" ] || { name=$3; shift 3; set -- "scripts/$name.py" "$@"; }'
    python = fresh.folder / ".venv" / "bin" / "python"
    executable(python, f'#!/bin/sh\n{command}\nexec "{sys.executable}" -S -I "$@"\n')
    for name in ("train", "evaluate"):
        fresh.program(name)
    (fresh.folder / ".venv" / ".installed").write_text("")
    return fresh


# Some would leave a file called 'touched' if anything evaluated them.
VALUES = [
    *("$HOME $(id) ${HOME} $$ $", "`id`", "it's", 'say "hi"', "#a#b", "a;b", "{a: 1, b: {c: 2}}"),
    *("~", "*", "a&b&&c", "a|b>c<d", "a\\b\\", "%s%", "a=b:=c", "a  b ", "!!", "", "üλ"),
    *("$(shell touch touched)", "$x$@$$(touch touched)", "`touch touched`", "';touch touched;'"),
    *('";touch touched;"$(touch touched)', "#$(touch touched)"),
]
TYPED = ["+env.kwargs.x=1", "~a.c=3", "hydra/launcher=joblib", "algo@x=ppo", "+algo.it's=1", "path=/nowhere"]
TYPED += [*(f"x.k{i}={v}" for i, v in enumerate(VALUES))]


@pytest.mark.parametrize("target", TARGETS)
def test_any_word_arrives_as_it_was_typed_in_one_order_and_is_not_evaluated(
    ready: Checkout, target: str
) -> None:
    if re.search(rf"^{target}:.*\n\t\$\((call RUN,|COMMAND)", MAKEFILE, re.MULTILINE):
        ready.program(target)
        arrived = ready.arguments(target, *TYPED)
        assert sorted(arrived) == sorted(TYPED)
        assert arrived == ready.arguments(target, *reversed(TYPED))
    else:
        ready.start(target, *TYPED).communicate(timeout=60)
    ready.start(target, "ARGS=" + " ".join(VALUES)).communicate(timeout=60)
    assert not ready.touched


def test_what_is_evaluated_is_noticed(ready: Checkout) -> None:
    (ready.folder / "Makefile").write_text(MAKEFILE.replace("unexport $(TYPED) ", "unexport "))
    ready.make("train", "note=$(shell touch touched)")
    assert ready.touched


FLAGS = """-k 'a or (b and not c)' tests/x.py::y[1-a] * ~ $HOME $(id) `id` ${x ; # > < & "it's" \\$"""
SPLIT = ["-k", "a or (b and not c)", *FLAGS.split("' ")[1].split()[:-2], "it's", "$"]


def test_words_go_in_and_arguments_come_out(ready: Checkout) -> None:
    inherited = {"env": "CartPole", "seed": "3", "json": "1", "ARGS": "--bad", "algo": "ppo"}
    for words, expected in (
        (["train", "env=Hopper"], ["env=Hopper"]),  # only the command line makes overrides
        (["evaluate", "run=a", "json=1"], ["json=1", "run=a"]),  # in one order
        (["train", "json=1"], ["json=1"]),
        (["train", "PYTHON=$(shell touch touched)", "algo=sac"], ["algo=sac"]),  # upper case stays with make
        (["train", "algo=sac", f"ARGS={FLAGS}"], ["algo=sac", *SPLIT]),
    ):
        assert ready.arguments(*words, **inherited) == expected
    assert not ready.touched
    seen = json.loads(ready.make("train", "seed=3", "-j2", PYTHONPATH="/else")[0])[1]
    assert seen["PYTHONPATH"] == f"{ready.folder}:/else"
    assert not {"seed", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES"} & {*seen}, "a make below would take them over"


def test_what_cannot_be_meant_stops_before_anything_runs(ready: Checkout) -> None:
    touch = "$(shell touch touched)"
    for message, words in {
        "line break": ["train", "x=a\nb"],
        "Write seed=... instead of seed:=...": ["train", "seed:=3"],
        "No such target: sac": ["train", "sac"],
        "No such target: comparee. 'make help' lists them": ["comparee", "seed=1"],
        "'test' takes no overrides, but got: k": ["test", "k=record"],
        "serve=maybe: expected true or false": ["docs", "serve=maybe"],
        "serve=: expected true or false": ["docs", "serve="],
        "serve=true true: expected true or false": ["docs", "serve=true true"],
        "'docs' takes serve=true only, but got: served": ["docs", "served=true"],
        "unmatched single quote": ["train", "ARGS=-k 'a"],
        "Not known here: SHELL. Keys are in lower case": ["train", f"SHELL={touch}"],
    }.items():
        out, err = ready.make(*words, status=2)
        assert (out, message in err) == ("", True), err
    assert not ready.touched
    for words, command in ([], "build"), (["serve=false"], "build"), (["serve=1"], "serve"):
        shown, _ = ready.make("-n", "docs", *words)
        assert f"-m mkdocs {command} " in re.sub(r"\\\n *", "", shown)


def test_help_and_dry_runs_set_nothing_up(fresh: Checkout) -> None:
    helped = re.findall(r"^([a-z-]+):.* ## ", MAKEFILE, re.MULTILINE)
    assert re.findall(r"^  ([a-z-]+) +\S", fresh.make()[0], re.MULTILINE) == helped != []
    shown, _ = fresh.make("-n", "train", "algo=sac", "name=it's")
    assert shown.rstrip().endswith("-m runlab train 'algo=sac' 'name=it'\\''s'")
    assert not (fresh.folder / ".venv").exists()


@pytest.mark.parametrize("target", ["compare", "train"])
def test_an_answer_is_the_last_word_and_its_status_is_that_of_make(ready: Checkout, target: str) -> None:
    """A program whose status 1 is no answer has failed, which make says in one line after its own message."""
    for status, noise in {0: [], 1: ["make"] * (target == "train"), 2: ["make"], 130: ["make"]}.items():
        ready.program(target, f"import sys\nprint('different', sys.argv[1:])\nsys.exit({status})\n")
        out, err = ready.make("-j2", target, "a=it's", status=2 if noise else status)
        assert out == """different ["a=it's"]\n"""
        assert [line.partition(":")[0] for line in err.splitlines()] == noise
    assert "different" not in ready.make("-n", target)[0]


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
    out, err = fresh.make("train", "seed=1")
    assert "installing the locked dependencies" in err
    assert out.strip() == "-m runlab train seed=1"
    assert fresh.make("-j4", "train", "seed=2")[1] == ""
    fresh.change_lock("", 2)
    assert "installing" not in fresh.make("install")[1]  # touched, and still the same
    fresh.change_lock("more==1\n", 4)
    assert "installing" in fresh.make("install")[1]
    assert fresh.calls() == ["venv by 3.11.9 fits complete", "pip", "pip"]
    (fresh.folder / ".venv" / "bin" / "python").unlink()
    fresh.make("train", PYTHONDONTWRITEBYTECODE="1")
    assert fresh.calls()[3:] == ["venv by 3.11.9 fits complete", "pip", "compiled"]
    fresh.change_lock("more==2\n", 6)
    fresh.pip_does("echo ERROR: it is wrong >&2; exit 1")
    for _ in range(2):
        assert "ERROR: it is wrong" in fresh.make("train", status=2)[1]


def test_another_build_of_torch_is_installed_and_stays(fresh: Checkout) -> None:
    fresh.add_interpreter("python3")
    for wrong in ("gpu", "cpu;touch touched", "$(touch touched)"):
        assert f"TORCH={wrong}: no such build" in fresh.make("install", f"TORCH={wrong}", status=2)[1]
    assert not fresh.touched
    fresh.pip_does('for lock; do :; done; cat "$lock" >wanted')
    torch = next(line for line in fresh.lock.read_text().splitlines() if line.startswith("torch=="))

    def wanted(*words: str) -> list[str]:
        (fresh.folder / "wanted").write_text("nothing was installed")
        fresh.make("install", *words)
        return [line for line in (fresh.folder / "wanted").read_text().splitlines() if "torch==" in line]

    assert wanted() == [torch]
    assert wanted("TORCH=cpu") == [f"{torch}+cpu"]
    assert wanted("TORCH=cpu") == wanted() == []
    fresh.change_lock("more==1\n", 2)
    assert wanted() == [f"{torch}+cpu"]
    fresh.pip_does(f"echo 'ERROR: No matching distribution found for {torch}+cu126' >&2; exit 1")
    _, err = fresh.make("install", "TORCH=cu126", status=2)
    assert f"No matching distribution found for {torch}+cu126\n" in err
    assert "PIP_EXTRA_INDEX_URL=ADDRESS make install TORCH=cu126" in err
    fresh.pip_does('for lock; do :; done; cat "$lock" >wanted')
    assert wanted() == [f"{torch}+cpu"]  # the build that failed is forgotten


@pytest.mark.long
def test_an_installation_says_how_much_it_takes_and_how_far_it_is(fresh: Checkout) -> None:
    fresh.add_interpreter("python3")
    fresh.pip_does('head -c 3000000 /dev/zero >"$TMPDIR/wheel"; mkdir -p .venv/lib; sleep 14')
    lines = fresh.make("install")[1].splitlines()
    assert [line for line in lines if "MB" in line] == [lines[0], "    downloaded 3 MB, installed 1 MB"]
    assert re.search(r"[0-9]+ MB to download, [0-9]+ MB on disk", lines[0])
    assert not (fresh.folder / ".venv/.tmp").exists()


def test_the_first_complete_interpreter_that_fits_is_found_by_calling_it(fresh: Checkout) -> None:
    assert "Python 3.11, 3.12 or 3.13 is needed" in fresh.make("train", status=2)[1]
    fresh.add_interpreter("python3", "3.14.0 other complete")
    executable(fresh.bin / "python3.12", "#!/bin/sh\nexit 127\n")
    assert "found: python3 (3.14.0), python3.12 (does not start)." in fresh.make("train", status=2)[1]
    fresh.add_interpreter("python3.11", "3.11.9 fits bare")
    assert "apt install python3.11-venv" in fresh.make("train", status=2)[1]
    fresh.add_interpreter("python3.13", "3.13.1 fits complete")
    fresh.make("install")
    shutil.rmtree(fresh.folder / ".venv")
    fresh.make("install", f"PYTHON={fresh.add_interpreter('my own', '3.12.4 fits complete')}")
    assert fresh.calls()[::2] == ["venv by 3.13.1 fits complete", "venv by 3.12.4 fits complete"]


def test_an_install_that_was_killed_is_made_anew_and_another_make_waits_for_it(fresh: Checkout) -> None:
    fresh.add_interpreter("python3")
    reached, installed = fresh.folder / "reached", fresh.folder / ".venv" / ".installed"
    fresh.pip_does("touch reached; exec sleep 30")
    process = fresh.start("install")
    until(reached.exists)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    assert not installed.exists()
    reached.unlink()
    fresh.pip_does("touch reached; sleep 0.5")
    first = fresh.start("install")
    until(reached.exists)
    assert "waiting" in fresh.make("install")[1]
    assert (first.wait(), installed.exists()) == (0, True)
    assert fresh.calls() == ["venv by 3.11.9 fits complete", "pip"] * 2


def test_clean_keeps_runs_and_the_environment(ready: Checkout) -> None:
    in_runs, in_scripts = ready.folder / "runs/a/__pycache__", ready.folder / "scripts/__pycache__"
    for folder in (in_runs, in_scripts):
        folder.mkdir(parents=True)
    ready.make("clean")
    assert (in_runs.exists(), in_scripts.exists()) == (True, False)


def test_hooks_and_the_lock_fulfil_the_project() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    lock = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [
        *project["dependencies"],
        *(each for name in EXTRAS for each in project["optional-dependencies"][name]),
    ]:
        required = Requirement(text)
        assert required.specifier.contains(lock[canonicalize_name(required.name)], prereleases=True), text
    pins = re.findall(r'"([a-z]+==.*)"', (ROOT / ".pre-commit-config.yaml").read_text())
    assert {*pins} <= {*lines}
    assert len(pins) > 2
