"""Runs at another repository: pushed and fetched forward only, and no secret along with them."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, git

from rltemplate.run import remotes
from rltemplate.run.git import GitError
from rltemplate.run.remotes import choose_ids, choose_remote, fetch_runs, plan_push, push_runs
from rltemplate.run.snapshot import commit_outcome, commit_run, take_snapshot
from rltemplate.types import ConfigError

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
# Put together here, so that no scanner takes this file for a leak.
TOKEN = "gh" + "p_" + "a1B2" * 9


@pytest.fixture(autouse=True)
def plain_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """Git as it is for somebody who never configured it."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """A bare repository, as a server has it."""
    folder = tmp_path / "server.git"
    git(tmp_path, "init", "-q", "--bare", str(folder))
    return folder


@pytest.fixture
def repo(tmp_path: Path, server: Path) -> Path:
    """A project with a commit, the server as its origin, and two runs."""
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "trunk")
    (folder / "train.py").write_text("print('train')\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    git(folder, "remote", "add", "origin", str(server))
    record(folder, "run-1")
    record(folder, "run-2")
    return folder


@pytest.fixture
def colleague(tmp_path: Path, server: Path, repo: Path) -> Path:
    """A clone of the server, which has the branch and no run."""
    git(repo, "push", "-q", "origin", "trunk")
    git(tmp_path, "clone", "-q", "-b", "trunk", str(server), str(tmp_path / "colleague"))
    return tmp_path / "colleague"


def record(project: Path, run_id: str, end: str | None = None) -> str:
    """A run, and perhaps its end; the commit of its ref."""
    snapshot = take_snapshot(project)
    made = commit_run(snapshot, run_id, f"algo: ppo\nname: {run_id}\n")
    assert made.problem is None
    if end is not None:
        assert commit_outcome(snapshot, made, json.dumps({"status": end})) is None
    return at(project, run_id)


def at(project: Path, run_id: str) -> str:
    """Where the ref of a run leads, empty if there is none."""
    return git(project, "for-each-ref", "--format=%(objectname)", f"refs/runs/{run_id}").strip()


def runs(project: Path) -> dict[str, str]:
    """All refs of runs, also of a bare repository."""
    told = git(project, "for-each-ref", "--format=%(refname:lstrip=2) %(objectname)", "refs/runs")
    return dict(line.split() for line in told.splitlines())


def command(name: str, project: Path) -> Callable[..., int]:
    """The main function of a script, at work on another project."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = signal.getsignal(signal.SIGINT)
    spec.loader.exec_module(module)
    signal.signal(signal.SIGINT, before)
    vars(module)["PROJECT"] = project
    return lambda *words: int(module.main(list(words)))


# --- there and back ----------------------------------------------------------------------------------


def test_runs_get_to_a_colleague(
    repo: Path, server: Path, colleague: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("push_runs", repo)() == 0
    assert runs(server) == runs(repo)
    assert "pushed to origin: 2 of 2" in capsys.readouterr().out
    assert command("fetch_runs", colleague)() == 0
    assert "2 runs fetched" in capsys.readouterr().out
    assert runs(colleague) == runs(repo)
    assert git(colleague, "show", "refs/runs/run-2:.rltemplate/run/config.yaml") == "algo: ppo\nname: run-2\n"

    assert command("push_runs", repo)() == 0
    assert "nothing to push; 2 there already" in capsys.readouterr().out
    assert command("fetch_runs", colleague)() == 0
    assert "no runs fetched, 2 as here" in capsys.readouterr().out


def test_a_run_that_went_on_moves_on_there(repo: Path, server: Path, colleague: Path) -> None:
    push_runs(repo, plan_push(repo, "origin"))
    fetch_runs(colleague, "origin")
    snapshot = take_snapshot(repo)
    made = commit_run(snapshot, "run-3", "algo: ppo\nname: run-3\n")
    push_runs(repo, plan_push(repo, "origin"))
    assert commit_outcome(snapshot, made, "{}") is None
    states = {move.id: move.state for move in plan_push(repo, "origin").moves}
    assert states == {"run-1": "equal", "run-2": "equal", "run-3": "moved on"}
    assert push_runs(repo, plan_push(repo, "origin")) == []
    assert runs(server) == runs(repo)
    states = {move.id: move.state for move in fetch_runs(colleague, "origin")}
    assert states == {"run-1": "equal", "run-2": "equal", "run-3": "new"}


def test_only_what_was_chosen_is_taken(repo: Path, server: Path, colleague: Path) -> None:
    record(repo, "other")
    assert command("push_runs", repo)("runs=run-*") == 0
    assert set(runs(server)) == {"run-1", "run-2"}
    assert command("fetch_runs", colleague)("run=run-1") == 0
    assert set(runs(colleague)) == {"run-1"}
    assert git(colleague, "for-each-ref", "refs/heads", "refs/tags").count("\n") == 1


def test_a_dry_run_says_all_and_does_nothing(
    repo: Path, server: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("push_runs", repo)("dry=1") == 0
    said = capsys.readouterr().out
    assert "2 runs to push, and 1 commit of your own history would go along" in said
    assert "new       run-1" in said
    assert runs(server) == {}


def test_what_was_looked_through_is_what_is_pushed(repo: Path, server: Path) -> None:
    planned = plan_push(repo, "origin")
    before = at(repo, "run-1")
    git(repo, "update-ref", "refs/runs/run-1", record(repo, "run-3", "finished"))
    assert push_runs(repo, planned) == []
    assert at(server, "run-1") == before


def test_the_users_hook_is_asked_when_he_pushes(repo: Path, server: Path) -> None:
    """That of LFS brings the files that a commit only names."""
    hook = repo / ".git" / "hooks" / "pre-push"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    with pytest.raises(GitError):
        push_runs(repo, plan_push(repo, "origin"))
    assert runs(server) == {}
    hook.write_text("#!/bin/sh\nexit 0\n")
    assert push_runs(repo, plan_push(repo, "origin")) == []


# --- what leads elsewhere ----------------------------------------------------------------------------


def test_a_ref_that_leads_elsewhere_is_left_alone(
    repo: Path, server: Path, colleague: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = record(colleague, "run-1", "failed")
    push_runs(colleague, plan_push(colleague, "origin"))
    (repo / "train.py").write_text("changed\n")
    git(repo, "update-ref", "refs/runs/run-1", record(repo, "run-3"))
    ours = at(repo, "run-1")
    assert command("push_runs", repo)() == 1
    said = capsys.readouterr().out
    assert (
        f"left alone: refs/runs/run-1 leads elsewhere at origin, to {theirs[:12]}, and here to {ours[:12]}"
        in said
    )
    assert at(server, "run-1") == theirs
    assert set(runs(server)) == {"run-1", "run-2", "run-3"}  # the others went
    assert command("fetch_runs", repo)() == 1
    assert "left alone: refs/runs/run-1 leads elsewhere" in capsys.readouterr().out
    assert at(repo, "run-1") == ours


def test_who_lags_behind_is_told_so(
    repo: Path, server: Path, colleague: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = record(repo, "run-3", "finished")
    push_runs(repo, plan_push(repo, "origin"))
    git(repo, "update-ref", "refs/runs/run-3", f"{ended}^")
    assert command("push_runs", repo)("run=run-3") == 1
    assert "is further at origin; make fetch-runs run=run-3" in capsys.readouterr().out
    assert at(server, "run-3") == ended
    assert command("fetch_runs", repo)("run=run-3") == 0
    assert at(repo, "run-3") == ended

    git(server, "update-ref", "refs/runs/run-3", f"{ended}^")
    assert command("fetch_runs", repo)("run=run-3") == 1
    assert "is further here; make push-runs run=run-3" in capsys.readouterr().out
    assert at(repo, "run-3") == ended


def test_a_fetch_that_prunes_loses_no_run(repo: Path, server: Path) -> None:
    git(repo, "config", "fetch.prune", "true")
    push_runs(repo, plan_push(repo, "origin", "run", "run-1"))
    before = runs(repo)
    fetch_runs(repo, "origin")
    assert runs(repo) == before


def test_names_that_are_no_ids_stay_there(repo: Path, server: Path, colleague: Path) -> None:
    push_runs(repo, plan_push(repo, "origin"))
    git(server, "update-ref", "refs/runs/deep/run-9", "refs/runs/run-1")
    assert {move.id for move in fetch_runs(colleague, "origin")} == {"run-1", "run-2"}
    assert set(runs(colleague)) == {"run-1", "run-2"}


# --- secrets -----------------------------------------------------------------------------------------


def commit(repo: Path, name: str, content: str | bytes, message: str = "a change") -> str:
    """A commit of the user with a file."""
    (repo / name).parent.mkdir(parents=True, exist_ok=True)
    (repo / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    git(repo, "add", "-f", name)
    git(repo, "commit", "-qm", message)
    return git(repo, "rev-parse", "HEAD").strip()


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("notes.md", f"one\ntwo\nmy {TOKEN}\n", "notes.md, line 3: contains a GitHub token"),
        ("sub/utf.txt", f"one\n{TOKEN}\n".encode("utf-16"), "sub/utf.txt, line 2: contains a GitHub token"),
        ("config/.env", "harmless\n", "config/.env: named like .env"),
        ("keys/id_rsa", "harmless\n", "keys/id_rsa: named like id_rsa*"),
        ("a b\n.py", f"{TOKEN}\n", "a b\n.py, line 1: contains a GitHub token"),
    ],
)
def test_a_secret_in_the_history_stops_all(
    repo: Path,
    server: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str | bytes,
    where: str,
) -> None:
    """Also one that was taken out again: the commit that had it would go along."""
    guilty = commit(repo, name, content)
    git(repo, "rm", "-q", name)
    git(repo, "commit", "-qm", "removed")
    record(repo, "run-3")
    assert command("push_runs", repo)() == 2
    said = capsys.readouterr().err
    assert "nothing was pushed to origin: 1 thing looks like a secret" in said
    assert f"{where}, in commit {guilty[:12]}" in said
    assert TOKEN not in said
    assert runs(server) == {}
    # The runs before it can still go.
    assert command("push_runs", repo)("runs=run-1,run-2") == 0
    assert set(runs(server)) == {"run-1", "run-2"}
    # And it itself, once somebody has said that it is none; nothing else is let through by that.
    assert command("push_runs", repo)("allow=other.md") == 2
    assert command("push_runs", repo)(f"allow=other.md,{name}") == 0
    assert f"let through by allow=: {where}" in capsys.readouterr().out
    assert "run-3" in runs(server)


def test_a_secret_in_a_message_or_in_a_runs_own_files_stops_all(repo: Path) -> None:
    guilty = commit(repo, "x.py", "x = 1\n", f"with {TOKEN}")
    record(repo, "run-3")
    snapshot = take_snapshot(repo)
    made = commit_run(snapshot, "run-4", f"note: {TOKEN}\n")
    found = plan_push(repo, "origin").findings
    assert {(each.path, each.commit) for each in found} == {
        (remotes.MESSAGE, guilty),
        (".rltemplate/run/config.yaml", made.commit),
    }


def test_what_the_remote_has_is_not_looked_through_again(repo: Path, server: Path) -> None:
    """It was the user's own decision, and nothing can be kept back any more."""
    commit(repo, "notes.md", TOKEN)
    record(repo, "run-3")
    assert len(plan_push(repo, "origin").findings) == 1
    git(repo, "push", "-q", "origin", "trunk")
    planned = plan_push(repo, "origin")
    assert planned.findings == []
    assert planned.own_commits == 0
    git(repo, "update-ref", "-d", "refs/remotes/origin/trunk")  # known from the remote itself
    assert plan_push(repo, "origin").findings == []
    commit(repo, "notes.md", f"{TOKEN}\nmore\n")  # another version is new there
    record(repo, "run-4")
    assert [each.line for each in plan_push(repo, "origin").findings] == [1]


def test_own_commits_are_counted(repo: Path) -> None:
    for number in range(3):
        commit(repo, "train.py", f"{number}\n")
    assert plan_push(repo, "origin").own_commits == 1
    record(repo, "run-3", "finished")
    assert plan_push(repo, "origin").own_commits == 4


def test_the_history_of_this_repository_has_none(repo: Path, tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not in a repository")
    git(tmp_path, "clone", "-q", "--bare", str(ROOT), str(tmp_path / "own.git"))
    own = tmp_path / "own"
    git(tmp_path, "clone", "-q", "--no-checkout", str(tmp_path / "own.git"), str(own))
    git(own, "remote", "add", "empty", str(tmp_path / "server.git"))
    git(own, "update-ref", "refs/runs/all", "HEAD")
    planned = plan_push(own, "empty")
    assert planned.files > 100
    assert [str(finding) for finding in planned.findings] == []


# --- which remote, which runs ------------------------------------------------------------------------


def test_the_remote_is_origin_or_the_only_one(repo: Path, tmp_path: Path) -> None:
    git(repo, "remote", "add", "lab", str(tmp_path / "lab.git"))
    assert choose_remote(repo, None) == "origin"
    assert choose_remote(repo, "lab") == "lab"
    git(repo, "remote", "rename", "origin", "home")
    with pytest.raises(ConfigError, match="there are several: home, lab"):
        choose_remote(repo, None)
    with pytest.raises(ConfigError, match="remote=hom: no such remote; did you mean home"):
        choose_remote(repo, "hom")
    git(repo, "remote", "remove", "home")
    assert choose_remote(repo, None) == "lab"
    git(repo, "remote", "remove", "lab")
    with pytest.raises(ConfigError, match="has no remote; `git remote add"):
        choose_remote(repo, None)


def test_pushes_go_where_git_would_push(repo: Path, tmp_path: Path, server: Path) -> None:
    other = tmp_path / "other.git"
    git(tmp_path, "init", "-q", "--bare", str(other))
    git(repo, "remote", "set-url", "--push", "origin", str(other))
    assert push_runs(repo, plan_push(repo, "origin")) == []
    assert runs(other) == runs(repo)
    assert runs(server) == {}
    assert plan_push(repo, "origin").to_go == []  # it is the other one that is asked what it has


@pytest.mark.parametrize(
    ("key", "text", "chosen"),
    [
        ("runs", None, ["a-1", "a-2", "b-3"]),
        ("runs", "a-*", ["a-1", "a-2"]),
        ("runs", "b-3, a-1", ["a-1", "b-3"]),
        ("run", "3", ["b-3"]),
        ("run", "a-1", ["a-1"]),
        ("run", "refs/runs/a-1", ["a-1"]),
    ],
)
def test_runs_are_chosen(key: str, text: str | None, chosen: list[str]) -> None:
    assert choose_ids(key, text, {"b-3", "a-2", "a-1"}, "here") == chosen


@pytest.mark.parametrize(
    ("key", "text", "says"),
    [
        ("runs", "c-*", "runs=c-\\*: no such runs here; the newest is b-3"),
        ("run", "a-", "run=a-: in the ids of 2 runs here, the last are a-1, a-2"),
        ("run", "b-4", "run=b-4: no such run here; did you mean b-3"),
        ("run", "", "no such run here"),
    ],
)
def test_a_choice_that_means_nothing_is_refused(key: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        choose_ids(key, text, {"b-3", "a-2", "a-1"}, "here")


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("/no/such/place.git", "does not appear to be a git repository"),
        ("https://me:s3cr3t@127.0.0.1:1/x.git", "unable to access"),
    ],
)
def test_a_remote_that_cannot_be_reached_is_a_line(
    repo: Path, capsys: pytest.CaptureFixture[str], address: str, says: str
) -> None:
    git(repo, "remote", "set-url", "origin", address)
    for name in ("push_runs", "fetch_runs"):
        assert command(name, repo)() == 2
        said = capsys.readouterr().err
        assert said.startswith("error: the remote cannot be reached: ")
        assert says in said
        assert said.count("\n") == 1
        assert "s3cr3t" not in said


def test_no_repository_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ConfigError, match="is in no git repository"):
        choose_remote(tmp_path, None)


def test_ctrl_c_ends_a_push_at_once(repo: Path, tmp_path: Path) -> None:
    """Here while a hook waits, as git would for a password."""
    hook = repo / ".git" / "hooks" / "pre-push"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch '{tmp_path}/waits'\nexec sleep 60\n")
    hook.chmod(0o755)
    program = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'scripts')!r}]; import push_runs; "
        f"from pathlib import Path; push_runs.PROJECT = Path({str(repo)!r}); push_runs.main([])"
    )
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    until = time.monotonic() + 20
    while not (tmp_path / "waits").exists() and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(20) == 130
