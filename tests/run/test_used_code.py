"""The code that a run uses is found by what its process imported and opened."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import NAME, copy_project, git, record, run, small

from runlab.analysis import experiments
from runlab.analysis.experiments import find_experiments
from runlab.analysis.runs import load_runs
from runlab.config.affects_results import code_rule, modules_of_others
from runlab.config.project import ALGORITHMS, project
from runlab.errors import ConfigError
from runlab.run import paths
from runlab.run.continuation import check_changes, check_used
from runlab.run.git.snapshot import take_snapshot
from runlab.run.record import ResumedPart, RunRecord
from runlab.run.used_code import CodeWatch, UsedCode, digests_now, outside_changes


def write(*files: Path, text: str = "x = 1\n") -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository that ignores a package, with code elsewhere beside it."""
    repo, away = tmp_path / "repo", tmp_path / "away"
    write(*(repo / name for name in ("env.py", "fast.so", "pack/__init__.py", "pack/deep.py", "pack/a.py")))
    write(*(repo / name for name in ("ignored/__init__.py", "ignored/maps/1.txt", "pack/made.py")))
    write(*(repo / name for name in ("levels.csv", "notes.txt", "data/big.npz", "runs/r/a.npz", "run.log")))
    write(*(away / name for name in ("linked/__init__.py", "front.py", "space/inside.py", "plain.py")))
    write(away / "lone.py", away / "space" / "sub" / "deep.py")
    (repo / "linked").symlink_to(away / "linked")
    (repo / "plain.py").symlink_to(away / "plain.py")
    (repo / "alias.py").symlink_to("env.py")
    (repo / ".gitignore").write_text("ignored/\ndata/\n__pycache__/\nmade.py\n*.log\n")
    git(repo, "init", "-q")
    return repo


def modules(**files: Path) -> dict[str, types.ModuleType]:
    """Modules with these files, by name; `__` stands for a dot."""
    built = {}
    for name, file in files.items():
        module = types.ModuleType(name.replace("__", "."))
        module.__file__ = str(file)
        built[module.__name__] = module
    return built


def watch(repo: Path) -> CodeWatch:
    return CodeWatch(repo, take_snapshot(repo), aside=[repo / "runs"])


def test_modules_of_the_snapshot_are_files_and_others_are_outside(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away, site = repo.parent / "away", Path(sysconfig.get_paths()["purelib"])
    cache = repo.parent / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    imported = modules(
        env=repo / "env.py",
        renamed=repo / "alias.py",  # a link inside of the repository
        pack=repo / "pack" / "__init__.py",
        pack__deep=repo / "pack" / "deep.py",
        pack__made=repo / "pack" / "made.py",
        fast=repo / "fast.so",
        ignored=repo / "ignored" / "__init__.py",
        linked=repo / "linked" / "__init__.py",
        plain=repo / "plain.py",
        front=away / "front.py",
        space__inside=away / "space" / "inside.py",  # of a namespace package
        copied=site / "copied.py",  # in the folder of installed packages, and of none
        # Python's own, an installed package, and what that made elsewhere
        json=Path(json.__file__),
        numpy=Path(str(sys.modules["numpy"].__file__)),
        numpy__made=away / "lone.py",
        alias=Path(str(sys.modules["numpy.random"].__file__)),  # by another name, such as distutils
        program=cache / "program.so",  # of torch's compiler
    )
    used = watch(repo).used(imported | {"odd": "no module"})
    assert used.files == ["env.py", "fast.so", "pack/__init__.py", "pack/deep.py"]
    outside = "copied front ignored linked pack.made plain space.inside"
    assert [*used.outside] == outside.split()


def test_a_module_that_only_declares_another_algorithm_is_code_if_code_names_it(repo: Path) -> None:
    write(repo / "own_config.py", repo / "other_config.py")
    imported = modules(**{name: repo / f"{name}.py" for name in ("env", "own_config", "other_config")})
    looked = CodeWatch(repo, take_snapshot(repo), declaring={"own_config", "other_config"})
    assert looked.used(imported).files == ["env.py"]
    write(repo / "env.py", text="from own_config import LIMIT\n")
    assert looked.used(imported).files == ["env.py", "own_config.py"]
    assert watch(repo).used(imported).files == ["env.py", "other_config.py", "own_config.py"]
    write(repo / "env.py")
    write(repo / "other_config.py", text="from own_config import ENTRY\n")  # of an algorithm that is not used
    assert looked.used(imported).files == ["env.py"]


def test_the_configuration_that_an_algorithm_inherits_is_code_of_its_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the class is of an installed package, in which nobody looks for names."""
    ppo, package = ALGORITHMS["ppo"], f"{NAME}.algos"
    others = {f"{package}.{name}_config" for name in project().ALGORITHMS if name != "ppo"}
    variant = types.ModuleType(f"{package}.variant_config")
    entry = replace(ppo, implementation=f"{package}.variant:Variant")
    variant.__dict__.update(BASE=ppo, ENTRY=entry)
    monkeypatch.setitem(sys.modules, variant.__name__, variant)
    for table in (ALGORITHMS, project().ALGORITHMS):
        monkeypatch.setitem(table, "variant", entry)
    assert modules_of_others("ppo") == others | {variant.__name__}
    assert modules_of_others("variant") == others
    for table, name in ((ALGORITHMS, "brought"), (project().ALGORITHMS, "outside")):
        monkeypatch.setitem(table, name, replace(ppo, implementation="own_package.own:Own"))
        monkeypatch.setitem(ALGORITHMS, name, table[name])
        assert modules_of_others(name) == set()


def test_other_code_outside_has_another_digest(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = repo.parent / "away"
    deep = away / "space" / "sub" / "deep.py"
    imported = modules(
        ignored=repo / "ignored" / "__init__.py", front=away / "front.py", space__sub__deep=deep
    )
    monkeypatch.setattr(sys, "path", [str(repo), str(away), *sys.path])
    code = take_snapshot(repo)
    looked = CodeWatch(repo, code)
    first = looked.used(imported)
    assert str(away / "front.py") in str(looked)
    (repo / "ignored" / "maps" / "1.txt").read_text()
    write(repo / "ignored" / "README.md", repo / "ignored" / "__pycache__" / "x.pyc")
    assert looked.used(imported) == digests_now(repo, first) == first
    before = first
    ignored = repo / "ignored"
    for changed in (away / "front.py", deep, ignored / "maps" / "1.txt", ignored / "new.py"):
        write(changed, text="x = 2\n")
        now = looked.used(imported)
        name = {away: "front", deep.parent: "space.sub.deep"}.get(changed.parent, "ignored")
        assert [*outside_changes(before, now)] == [name]
        assert digests_now(repo, first) == now  # as `baseline=` finds it, which imports nothing
        before = now
        # As a sweep that goes on finds it, and a resume before its environments are made.
        with pytest.raises(ConfigError, match=f"it began with other code: .*{name}"):
            check_changes("it", code, {}, code, accept=False, used=[first])
        assert check_changes("it", code, {}, code, accept=False, used=[first, now, None]) == {}
    (away / "front.py").unlink()
    assert [*digests_now(repo, first).outside] == ["ignored", "space.sub.deep"]
    assert check_changes("it", code, {}, code, accept=False, used=[now]) == {}
    assert outside_changes(None, first) == {}  # recorded by an earlier version


def test_an_installed_package_is_not_outside_and_one_in_editable_form_is(
    tmp_path: Path, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, source = tmp_path / "target", tmp_path / "source"
    for folder, name in ((target, "whole"), (source, "editable")):
        write(folder / name / "__init__.py")
        info = target / f"{name}-1.0.dist-info"
        write(info / "METADATA", text=f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        write(info / "RECORD", text=f"{name}/__init__.py,,\n" if folder == target else "editable.pth,,\n")
    monkeypatch.setattr(sys, "path", [str(target), str(source), *sys.path])
    imported = modules(whole=target / "whole" / "__init__.py", editable=source / "editable" / "__init__.py")
    assert [*watch(repo).used(imported).outside] == ["editable"]
    shadow = modules(numpy=source / "editable" / "__init__.py")  # the name of an installed package
    assert [*watch(repo).used(shadow).outside] == ["numpy"]


def test_opened_files_of_the_repository_are_noted_unless_a_run_wrote_them(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = watch(repo)
    assert looked.used({}) == UsedCode()
    monkeypatch.chdir(repo / "pack")
    with Path("../levels.csv").open():
        pass
    os.close(os.open(os.fsencode(repo / "env.py"), os.O_RDONLY))
    for name in ("data/big.npz", "runs/r/a.npz", "pack/made.py"):
        (repo / name).read_bytes()
    for name in ("notes.txt", "run.log"):
        (repo / name).write_text("written\n")
    os.close(os.open(repo / "notes.txt", os.O_WRONLY))
    for wrong in (repo / "nowhere", repo / "pack"):
        with pytest.raises(OSError, match=wrong.name):
            wrong.read_bytes()
    used = looked.used({})
    assert used.files == ["env.py", "levels.csv"]
    assert [*used.outside] == ["data/big.npz"]
    write(repo / "data" / "big.npz", text="x = 2\n")
    assert [*outside_changes(used, digests_now(repo / "pack", used))] == ["data/big.npz"]
    assert watch(repo).used({}) == UsedCode()
    (repo / "linked_runs").symlink_to(repo / "runs")  # as to a larger disk
    beside = CodeWatch(repo, take_snapshot(repo), aside=[repo / "linked_runs"])
    (repo / "linked_runs" / "r" / "a.npz").read_bytes()
    assert beside.used({}) == UsedCode()
    everywhere = CodeWatch(repo, take_snapshot(repo), aside=[repo])  # with runs_dir=.
    (repo / "levels.csv").read_bytes()
    assert everywhere.used({}).files == ["levels.csv"]


def test_a_module_of_a_submodule_is_a_file_and_one_of_a_repository_in_the_work_tree_is_outside(
    repo: Path,
) -> None:
    for name in ("lib", "nested"):
        write(repo / name / name / "__init__.py")
        git(repo / name, "init", "-q")
        git(repo / name, "add", "-A")
        git(repo / name, "commit", "-qm", "first")
    git(repo, "add", "lib")
    git(repo, "commit", "-qm", "a submodule", "--", "lib")
    imported = modules(**{name: repo / name / name / "__init__.py" for name in ("lib", "nested")})
    used = watch(repo).used(imported)
    assert (used.files, [*used.outside]) == (["lib/lib/__init__.py"], ["nested"])
    assert code_rule(used.files)("lib")


def test_without_git_the_files_of_the_project_are_named(tmp_path: Path) -> None:
    write(tmp_path / "env.py")
    used = watch(tmp_path).used(modules(env=tmp_path / "env.py"))
    assert used == UsedCode(files=["env.py"])


def test_a_resume_compares_what_either_part_of_the_run_used(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "PROJECT", repo)
    first = UsedCode(files=["env.py", "levels.csv"], outside={"pack": "1"})
    record = RunRecord(id="r", status="failed", git=take_snapshot(repo), used=first)

    def check(*used: str, accept: bool = False, **outside: str) -> dict[str, Any]:
        now, part = take_snapshot(repo), ResumedPart()
        part.changed |= check_changes("it", record.git, {}, now, accept, [record.used])
        present = UsedCode(files=[*used], outside=outside or {"pack": "1"})
        part.changed |= check_used(record, now, accept, present)
        return part.changed

    write(repo / "notes.txt", repo / "Dockerfile", repo / "figure.png", repo / "pack" / "a.py", text="new\n")
    assert check("env.py") == {}
    with pytest.raises(ConfigError, match=r"the run began with other code: pack/a\.py"):
        check("env.py", "pack/a.py")  # which the environment imports now
    with pytest.raises(ConfigError, match="the run began with other code: pack"):
        check(pack="2")
    write(repo / "levels.csv", text="new\n")
    with pytest.raises(ConfigError, match=r"it began with other code: levels\.csv"):
        check()
    assert check("pack/a.py", accept=True, pack="2") == {"code": ["levels.csv", "pack/a.py", "pack"]}
    # What the first part opened late is compared although this one has not opened it yet.
    data = "data/big.npz"
    first.outside |= digests_now(repo, UsedCode(outside={data: ""})).outside
    assert check("pack/a.py", accept=True) == {"code": ["levels.csv", "pack/a.py"]}
    write(repo / "data" / "big.npz", text="new\n")
    assert check("pack/a.py", accept=True) == {"code": ["levels.csv", "pack/a.py", data]}
    (repo / "data" / "big.npz").unlink()
    assert check("pack/a.py", accept=True) == {"code": ["levels.csv", "pack/a.py", data]}
    record.used = None  # recorded by an earlier version: names decide
    by_name = ["figure.png", "levels.csv", "notes.txt", "pack/a.py"]
    assert check(accept=True) == {"code": by_name}


ENV = """
import gymnasium as gym
import helper
import os
from pathlib import Path

if "MORE" in os.environ:
    import more

class Env(gym.Env):
    observation_space, action_space = gym.spaces.Box(-2, 2, (1,)), gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.limit = 0, int(Path(__file__).with_name("levels.txt").read_text())
        return self.observation_space.low, {}
    def step(self, action):
        self.steps += 1
        return self.observation_space.low, helper.REWARD, False, self.steps >= self.limit, {}

gym.register("Env-v0", Env)
"""


NEW_ALGORITHM = f"""
from {NAME}.algos.ppo_config import PPOConfig
from runlab.config.algorithms import Entry

ENTRY = Entry(PPOConfig, "{NAME}.algos.new:New")
"""
IDLE = [
    *("runlab/__init__.py", "runlab/errors.py", "runlab/signals.py", "runlab/config/texts.py"),
    *(
        "runlab/config/terminal.py",
        "runlab/config/auto.py",
        "runlab/config/fit.py",
        "runlab/launch/worker.py",
    ),
    *("runlab/run/sinks/console.py", "runlab/run/video/recorder.py", "runlab/config/cli/preflight.py"),
    *("runlab/analysis/stats.py", f"{NAME}/algos/sac.py", f"{NAME}/algos/sac_config.py"),
    *("Dockerfile", "mkdocs.yml", "CITATION.cff", f"{NAME}/reference_returns.csv"),
]
COMPUTING = [
    *("runlab/engine.py", "runlab/rng.py", "runlab/envs/make.py", "runlab/envs/vector.py"),
    *(
        "runlab/machine.py",
        "runlab/determinism/switches.py",
        "runlab/determinism/checks.py",
        "runlab/interfaces.py",
    ),
    *("runlab/trial.py", "runlab/config/loading.py", "runlab/config/schema.py", "runlab/config/project.py"),
    *(f"{NAME}/train.py", f"{NAME}/project.py", f"{NAME}/algos/ppo.py", f"{NAME}/algos/ppo_config.py"),
    *(f"{NAME}/learning/networks.py", f"{NAME}/learning/optim.py"),
]


@pytest.mark.long
def test_runs_are_kept_apart_by_the_code_that_they_used_and_by_no_other(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, away = tmp_path_factory.mktemp("own") / "project", tmp_path / "away"
    copy_project(project)
    monkeypatch.setattr(experiments, "PROJECT", project)
    write(project / "my_env.py", text=ENV)
    write(project / "levels.txt", text="9\n")
    write(away / "helper.py", text="REWARD = 1.0\n")

    def command(name: str, *words: str, status: int | None = 0, **variables: str) -> str:
        line = (sys.executable, "-P", "-m", "runlab", name, *words)
        done = run(tmp_path, *line, status=status, PYTHONPATH=f"{project}:{away}", **variables)
        return done.stdout + done.stderr

    def train(seed: int, folder: str) -> str:
        words = small("ppo", "logger.tensorboard=false", env="my_env:Env-v0")
        return command("train", *words, "total_env_steps=64", f"seed={seed}", f"run_dir={tmp_path / folder}")

    def seeds(*folders: str) -> list[list[int]]:
        runs, _ = load_runs(tmp_path / folder for folder in folders)
        return [[run.config["seed"] for run in each.runs] for each in find_experiments(runs)]

    def resume(steps: int, status: int = 0, **variables: str) -> str:
        words = (f"run={tmp_path / 'r1'}", f"total_env_steps={steps}")
        return command("resume", *words, status=status, **variables)

    assert f"only a digest is recorded: helper ({away / 'helper.py'})" in train(1, "r1")
    used = record(tmp_path / "r1")["used"]
    assert {"my_env.py", "levels.txt", f"{NAME}/algos/ppo.py"} <= {*used["files"]}
    assert not {"notes.txt", "Dockerfile", f"{NAME}/algos/sac.py"} & {*used["files"]}
    counts = code_rule(used["files"])
    assert [name for name in [*IDLE, *COMPUTING] if counts(name)] == COMPUTING
    assert not code_rule([*used["files"], f"{NAME}/algos/sac.py"])("runlab/run/observers.py")
    assert code_rule([*used["files"], IDLE[-1]])(IDLE[-1])  # of an environment that reads it
    assert [*used["outside"]] == ["helper"]
    write(project / "notes.txt", project / "figure.png", text="a thought\n")
    write(project / NAME / "algos" / "new_config.py", text=NEW_ALGORITHM)
    for changed in (name for name in IDLE if (project / name).exists()):
        (project / changed).write_text((project / changed).read_text() + "# a comment\n")
    git(project, "add", "-A")
    git(project, "commit", "-q", "-m", "another version")
    train(2, "r2")
    assert seeds("r1", "r2") == [[1, 2]]
    write(project / "more.py")
    git(project, "add", "-A")
    git(project, "commit", "-q", "-m", "more")
    assert "the run began with other code: more.py" in resume(96, 2, MORE="1")  # which is imported now
    resume(96)
    loop = project / NAME / "train.py"
    before = loop.read_text()
    loop.write_text(before + "# a comment\n")
    git(project, "commit", "-q", "-a", "-m", "another loop")
    assert f"the run began with other code: {NAME}/train.py\n" in resume(128, 2)
    train(5, "r5")
    assert seeds("r2", "r5") == [[2], [5]]
    loop.write_text(before)
    write(project / "levels.txt", text="8\n")
    assert "the run began with other code: levels.txt" in resume(128, 2)
    train(3, "r3")
    assert seeds("r2", "r3") == [[2], [3]]
    write(project / "levels.txt", text="9\n")
    write(away / "helper.py", text="REWARD = 2.0\n")
    assert "the run began with other code: helper" in resume(128, 2)
    train(4, "r4")
    assert seeds("r2", "r3", "r4") == [[2], [3], [4]]
    output = command("diff", f"a={tmp_path / 'r2'}", f"b={tmp_path / 'r4'}", "code=full")
    assert output.endswith("1 thing differs: code (helper (outside of the repository))\n")
    assert "helper (outside of the repository)  " in output
