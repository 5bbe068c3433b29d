"""Snapshots of the work tree, with real git in every state in which a researcher may start a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rltemplate.run import paths
from rltemplate.run.git import exclusions, work_tree
from rltemplate.run.git import snapshot as snapshot_module
from rltemplate.run.git.changes import files_between
from rltemplate.run.git.command import Git
from rltemplate.run.git.snapshot import (
    CONFIG_PATH,
    ENDED_PATHS,
    MAX_NAMED,
    METRICS_PATH,
    OUTCOME_PATH,
    RESERVED_PATHS,
    TRACE_PATH,
    DuplicateRunError,
    GitRecord,
    Snapshot,
    commit_outcome,
    commit_run,
    continue_run,
    ended_files,
    take_snapshot,
)
from rltemplate.types import ConfigError

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
CONFIG = "algo: ppo\nseed: 1\n"
LONGER = "algo: ppo\nseed: 1\ntotal_env_steps: 200\n"
REF = "refs/runs/run-1"
IDENTITY = ("-c", "user.name=Someone", "-c", "user.email=someone@example.org")
ROOT = Path(__file__).parents[3]
NOBODY = 65534


def changed_paths(project: Path, old: str, new: str) -> list[str] | None:
    return files_between(project, {"tree": old}, {"tree": new})


def changed_since(before: GitRecord, snapshot: Snapshot) -> list[str] | None:
    known = asdict(before), {"tree": snapshot.tree}
    return None if snapshot.top is None else files_between(Path(snapshot.top), *known)


@pytest.fixture(autouse=True)
def plain_git(monkeypatch: pytest.MonkeyPatch) -> None:
    unconfigured(monkeypatch)


def unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Git as it is for somebody who never configured it."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


def git(repo: Path, *args: str) -> str:
    command = ["git", "-C", str(repo), *IDENTITY, "-c", "protocol.file.allow=always", *args]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.fixture(scope="module")
def new_repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository to be copied: to make one takes four times as long."""
    with pytest.MonkeyPatch.context() as patch:
        unconfigured(patch)
        made = make_repo(tmp_path_factory.mktemp("new") / "project")
    shutil.rmtree(made / ".git" / "hooks")
    return made


@pytest.fixture
def repo(tmp_path: Path, new_repo: Path) -> Path:
    return Path(shutil.copytree(new_repo, tmp_path / "project"))


def make_repo(folder: Path) -> Path:
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "-b", "trunk")
    (folder / ".gitignore").write_text("ignored/\n*.log\n")
    (folder / "train.py").write_text("print('train')\n")
    (folder / "sub").mkdir()
    (folder / "sub" / "deep.py").write_text("x = 1\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    return folder


def files(folder: Path) -> dict[str, tuple[bool, bytes]]:
    """All files below `folder`, without git's own: whether executable, and the content (a link's target)."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = (False, b"-> " + os.fsencode(path.readlink()))
        elif path.is_file() and name != ".git" and not name.startswith(".git/"):
            found[name] = (os.access(path, os.X_OK), path.read_bytes())
    return found


def state(repo: Path) -> tuple[object, ...]:
    """Everything of a repository that a snapshot must leave as it is."""
    times = {p: p.lstat().st_mtime_ns for p in repo.rglob("*") if ".git" not in p.relative_to(repo).parts}
    index = repo / ".git" / "index"
    return (
        index.read_bytes() if index.exists() else None,
        (repo / ".git" / "HEAD").read_text(),
        git(repo, "for-each-ref", "refs/heads", "refs/tags", "refs/stash"),
        git(repo, "--no-optional-locks", "status", "--porcelain=v2", "--branch"),
        files(repo),
        times,
    )


def stored(repo: Path, commit: str | None) -> dict[str, bytes]:
    """Path and content of every file of a commit, without the run's configuration."""
    assert commit is not None
    command = ["git", "-C", str(repo), "ls-tree", "-r", "-z", commit]
    listing = subprocess.run(command, check=True, capture_output=True).stdout
    found = {}
    for entry in listing.split(b"\0")[:-1]:
        facts, _, path = entry.partition(b"\t")
        _, kind, blob = facts.split()
        if kind == b"blob":
            command = ["git", "-C", str(repo), "cat-file", "blob", blob.decode()]
            content = subprocess.run(command, check=True, capture_output=True).stdout
            found[os.fsdecode(path)] = content
    assert found.pop(CONFIG_PATH).decode() == CONFIG
    return found


def record_run(project: Path, run_id: str = "run-1") -> GitRecord:
    return commit_run(take_snapshot(project), run_id, CONFIG)


def whole(repo: Path, run_id: str = "run-1") -> GitRecord:
    """Record a run and see that it went well and left no trace outside its ref."""
    before = state(repo)
    record = record_run(repo, run_id)
    assert record.problem is None
    assert record.ref == f"refs/runs/{run_id}"
    assert git(repo, "rev-parse", record.ref).strip() == record.commit
    assert state(repo) == before
    return record


def left_out(record: GitRecord | Snapshot) -> dict[str, str]:
    return {entry["path"]: entry["reason"] for entry in record.skipped}


# --- what is in a snapshot ---------------------------------------------------------------------------


def test_a_clean_work_tree_is_its_base_commit_and_the_configuration(repo: Path) -> None:
    record = whole(repo)
    head = git(repo, "rev-parse", "HEAD").strip()
    assert (record.base_commit, record.branch, record.dirty) == (head, "trunk", False)
    assert (record.changed, record.changed_count, record.skipped) == ([], 0, [])
    assert git(repo, "rev-parse", "refs/runs/run-1^").strip() == head
    assert stored(repo, record.commit) == {name: content for name, (_, content) in files(repo).items()}


def mixed_up(repo: Path) -> None:
    """Staged, modified, deleted, renamed and new files in all combinations."""
    committed = "staged edited both gone forgotten run.sh becomes_folder hidden kept"
    for name in committed.split():
        (repo / name).write_text(f"{name}\n" * 3)
    (repo / "becomes_file").mkdir()
    (repo / "becomes_file" / "inside").write_text("inside\n")
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "second")
    (repo / "staged").write_text("staged change\n")
    git(repo, "add", "staged")
    (repo / "edited").write_text("edited\n")
    (repo / "both").write_text("staged\n")
    git(repo, "add", "both")
    (repo / "both").write_text("then edited again\n")
    (repo / "gone").unlink()
    git(repo, "rm", "-q", "--cached", "forgotten")
    (repo / "run.sh").chmod(0o755)
    git(repo, "mv", "sub/deep.py", "sub/moved.py")
    (repo / "new_staged").write_text("new\n")
    git(repo, "add", "new_staged")
    (repo / "intended").write_text("to be added\n")
    git(repo, "add", "-N", "intended")
    (repo / "new").write_text("untracked\n")
    (repo / "new_and_gone").write_text("x\n")
    git(repo, "add", "new_and_gone")
    (repo / "new_and_gone").unlink()
    (repo / "link").symlink_to("new")
    (repo / "dangling").symlink_to("nowhere")
    (repo / "becomes_folder").unlink()
    (repo / "becomes_folder").mkdir()
    (repo / "becomes_folder" / "inside").write_text("inside\n")
    shutil.rmtree(repo / "becomes_file")
    (repo / "becomes_file").write_text("file\n")
    git(repo, "update-index", "--assume-unchanged", "hidden")
    git(repo, "update-index", "--skip-worktree", "kept")
    (repo / "hidden").write_text("changed behind git's back\n")
    (repo / "kept").write_text("changed behind git's back, too\n")
    os.mkfifo(repo / "pipe")


def test_the_snapshot_is_the_work_tree_and_not_the_index(repo: Path, tmp_path: Path) -> None:
    mixed_up(repo)
    (repo / "ignored").mkdir()
    (repo / "ignored" / "big.bin").write_bytes(b"0" * 100)
    (repo / "x.log").write_text("noise\n")
    record = whole(repo)
    assert record.dirty is True
    expected = files(repo)
    del expected["ignored/big.bin"], expected["x.log"]
    copy = tmp_path / "copy"
    git(repo, "worktree", "add", "-q", "--detach", str(copy), "refs/runs/run-1")
    found = files(copy)
    assert found.pop(CONFIG_PATH) == (False, CONFIG.encode())
    assert found == expected
    assert {"gone", "staged", "new", "link", "run.sh", "hidden", "kept"} <= set(record.changed)
    assert record.changed_count == len(record.changed)
    assert "forgotten" not in record.changed  # in no index any more, but on disk as it was committed


def test_a_merge_conflict_is_taken_as_it_lies_on_disk(repo: Path) -> None:
    git(repo, "checkout", "-q", "-b", "other")
    (repo / "train.py").write_text("other\n")
    (repo / "sub" / "deep.py").write_text("other\n")
    git(repo, "commit", "-qam", "other")
    git(repo, "checkout", "-q", "trunk")
    (repo / "train.py").write_text("trunk\n")
    (repo / "sub" / "deep.py").write_text("trunk\n")
    git(repo, "commit", "-qam", "trunk")
    with pytest.raises(subprocess.CalledProcessError):
        git(repo, "merge", "other")
    (repo / "sub" / "deep.py").unlink()
    tree = stored(repo, whole(repo).commit)
    assert b"<<<<<<<" in tree["train.py"]
    assert "sub/deep.py" not in tree


def test_changes_within_the_same_tick_of_the_clock_are_seen(repo: Path) -> None:
    """Same size, same time stamp as when it was staged: only git's distrust of young entries helps."""
    path = repo / "train.py"
    git(repo, "config", "core.trustctime", "false")  # nobody can set that time, so two writes would differ
    tick = time.time() - 60
    path.write_text("print(1)\n")
    os.utime(path, (tick, tick))
    git(repo, "add", "train.py")
    path.write_text("print(2)\n")
    os.utime(path, (tick, tick))
    os.utime(repo / ".git" / "index", (tick, tick))
    assert stored(repo, record_run(repo).commit)["train.py"] == b"print(2)\n"


def test_odd_file_names(repo: Path) -> None:
    names = ["a b", "line\nbreak", 'quo"te', "tab\there", "-rf", "ünï 中", ":(glob)*", "*", "back\\slash"]
    names.append("caf\udce9")  # a byte that is not UTF-8
    for name in names:
        (repo / name).write_text(repr(name))
    record = whole(repo)
    tree = stored(repo, record.commit)
    assert {name: tree.get(name) for name in names} == {name: repr(name).encode() for name in names}
    assert record.changed_count == len(names)
    assert json.loads(json.dumps(record.changed, ensure_ascii=False).encode("utf-8")) == record.changed


def test_a_project_below_the_top_of_its_repository_snapshots_all_of_it(repo: Path) -> None:
    (repo / "train.py").write_text("changed at the top\n")
    record = record_run(repo / "sub")
    assert stored(repo, record.commit)["train.py"] == b"changed at the top\n"
    assert record.changed == ["train.py"]


def test_a_folder_that_the_repository_around_it_ignores_is_not_taken_for_its_code(repo: Path) -> None:
    (repo / "ignored" / "download").mkdir(parents=True)
    record = record_run(repo / "ignored" / "download")
    assert record.commit is None
    assert "ignores this folder" in str(record.problem)


def test_a_file_at_the_reserved_path_gives_way_to_the_configuration(repo: Path) -> None:
    """As in the checkout of an earlier run, from which another one is started."""
    (repo / CONFIG_PATH).parent.mkdir(parents=True)
    (repo / CONFIG_PATH).write_text("of an earlier run\n")
    record = whole(repo)
    assert git(repo, "show", f"{record.commit}:{CONFIG_PATH}") == CONFIG


def test_a_repository_without_an_index_file(repo: Path) -> None:
    (repo / ".git" / "index").unlink()
    record = record_run(repo)
    assert record.dirty is False
    assert not (repo / ".git" / "index").exists()


# --- what stays out ----------------------------------------------------------------------------------

# Put together here, so that no scanner takes this file for a leak, and no snapshot leaves it out.
TOKENS = {
    "aws": "AKI" + "AIOSFODNN7EXAMPLE",
    "github": "gh" + "p_" + "a1B2" * 9,
    "github_pat": "github" + "_pat_" + "a1B2" * 9,
    "key": "-----BEGIN " + "RSA PRIVATE KEY-----\nMIIE",
    "openssh": "-----BEGIN " + "OPENSSH PRIVATE KEY-----\nMIIE",
    "wandb": 'os.environ["WANDB_API_KEY"] = "' + "0123456789abcdef" * 2 + '01234567"',
    "hugging_face": "h" + "f_" + "aB3dE" * 7,
    "sk": "s" + "k-" + "aB3dE" * 8,
    "sk_project": "s" + "k-proj-" + "aB3_E" * 8,
    "slack": "xo" + "xb-123456789012-abcdef",
    "google": "AI" + "za" + "a1B2c3D" * 5,
    "gitlab": "glp" + "at-" + "a1B2c" * 4,
    "npm": "np" + "m_" + "a1B2" * 9,
    "aws_secret": "aws_secret" + "_access_key = " + "a1B2/" * 8,
    "azure": "Account" + "Key=" + "ab" * 43 + "==",
    "wandb_alone": "wandb" + "_v1_" + "aB3dE" * 8,
    "neptune": "eyJhcGlf" + "YWRkcmVzcyI6" + "aB3d" * 12,
    "slack_hook": "hooks.slack" + ".com/services/T0AB/B0CD/" + "aB3d" * 6,
    "discord_hook": "discord" + ".com/api/webhooks/" + "1" * 18 + "/" + "aB3_" * 16,
    "telegram": "123456789" + ":AA" + "aB3dE-_" * 4 + "aB3dE",
    "stripe": "sk" + "_live_" + "aB3d" * 6,
    "docker": "dckr" + "_pat_" + "aB3d_" * 5,
    "databricks": "da" + "pi" + "0123456789abcdef" * 2,
}


def test_secrets_by_name_are_left_out_and_named(repo: Path) -> None:
    secret = [".env", ".ENV.local", "prod.env", "server.pem", "my.key", "id_rsa", "id_ed25519.bak", "a.p12"]
    secret += [".netrc", "_netrc", ".npmrc", ".pypirc", "credentials", "aws_credentials.json", "hf_token"]
    secret += ["TOKEN.txt", "client_secret.json", "pass.kdbx", "service-account-1.json", "sub/.ssh/config"]
    harmless = ["tokenizer.py", "test_secrets.py", ".env.example", ".env.template", "tokenizer.json"]
    harmless += ["environment.yaml", "keys.yaml", "conf/env/Hopper.yaml", "monkey.txt", "sub/token.ipynb"]
    for name in secret + harmless:
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text("harmless content\n")
    git(repo, "add", "-f", "my.key")  # staged, but never committed: not decided yet
    record = whole(repo)
    tree = stored(repo, record.commit)
    assert set(left_out(record)) == set(secret)
    assert not set(secret) & set(tree)
    assert set(harmless) <= set(tree)
    assert all("likely secret" in reason for reason in left_out(record).values())
    assert {entry["bytes"] for entry in record.skipped} == {len("harmless content\n")}


@pytest.mark.parametrize("kind", TOKENS)
def test_tokens_in_new_files_are_left_out_and_never_reach_gits_objects(repo: Path, kind: str) -> None:
    (repo / "notes.py").write_text(f"# mine\n{TOKENS[kind]}\n")
    (repo / "utf16.txt").write_bytes(f"my {TOKENS[kind]}\n".encode("utf-16"))
    record = whole(repo)
    assert set(left_out(record)) == {"notes.py", "utf16.txt"}
    assert not {"notes.py", "utf16.txt"} & set(stored(repo, record.commit))
    blob = git(repo, "hash-object", "notes.py").strip()
    with pytest.raises(subprocess.CalledProcessError):
        git(repo, "cat-file", "-e", blob)


def test_what_only_resembles_a_token_is_kept(repo: Path) -> None:
    text = "risk-aware-exploration-of-the-environment sk-toggleable__content-arrow AKIA hf_hub_download\n"
    text += "WANDB_API_KEY=changeme password=\n" + "0" * 40 + "\n-----BEGIN CERTIFICATE-----\n"
    (repo / "notes.py").write_text(text)
    assert whole(repo).skipped == []


def test_a_committed_file_that_got_a_token_keeps_its_committed_version(repo: Path) -> None:
    (repo / "train.py").write_text(TOKENS["github"])
    (repo / "sub" / "deep.py").write_text(TOKENS["aws"])
    git(repo, "add", "sub/deep.py")  # staged: the index has the token as well
    record = whole(repo)
    tree = stored(repo, record.commit)
    assert (tree["train.py"], tree["sub/deep.py"]) == (b"print('train')\n", b"x = 1\n")
    assert set(left_out(record)) == {"train.py", "sub/deep.py"}
    assert "base commit is kept" in left_out(record)["train.py"]
    assert record.dirty is True


def test_a_committed_env_file_is_the_users_decision(repo: Path) -> None:
    (repo / ".env").write_text("A=1\n")
    git(repo, "add", "-f", ".env")
    git(repo, "commit", "-qm", "on purpose")
    (repo / ".env").write_text("A=2\n")
    assert stored(repo, whole(repo).commit)[".env"] == b"A=2\n"


def test_large_files_are_left_out_and_named(repo: Path) -> None:
    (repo / "limit.bin").write_bytes(b"\0" * exclusions.MAX_FILE_BYTES)
    (repo / "over.bin").write_bytes(b"\0" * (exclusions.MAX_FILE_BYTES + 1))
    (repo / "staged.bin").write_bytes(b"\0" * 11_000_000)
    git(repo, "add", "staged.bin")
    (repo / "train.py").write_bytes(b"\0" * 12_000_000)
    record = whole(repo)
    tree = stored(repo, record.commit)
    assert "limit.bin" in tree
    assert not {"over.bin", "staged.bin"} & set(tree)
    assert tree["train.py"] == b"print('train')\n"
    assert {entry["path"]: entry["bytes"] for entry in record.skipped} == {
        "over.bin": exclusions.MAX_FILE_BYTES + 1,
        "staged.bin": 11_000_000,
        "train.py": 12_000_000,
    }


def test_new_files_are_limited_together(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exclusions, "MAX_NEW_BYTES", 1000)
    (repo / "runs").mkdir()
    for number, size in enumerate([600, 500, 300, 90]):
        (repo / "runs" / f"{number}.npz").write_bytes(b"x" * size)
    (repo / "train.py").write_text("y" * 2000)  # changed, not new
    record = whole(repo)
    assert set(left_out(record)) == {"runs/0.npz"}
    assert {"runs/1.npz", "runs/2.npz", "runs/3.npz"} <= set(stored(repo, record.commit))


def test_long_lists_are_cut_but_counted(repo: Path) -> None:
    for number in range(MAX_NAMED + 5):
        (repo / f"{number}.pem").touch()
        (repo / f"{number}.txt").touch()
    record = whole(repo)
    assert (len(record.changed), record.changed_count) == (MAX_NAMED, MAX_NAMED + 5)
    assert (len(record.skipped), record.skipped_count) == (MAX_NAMED, MAX_NAMED + 5)


def test_what_git_cannot_take_is_named_and_the_rest_is_taken(repo: Path) -> None:
    (repo / ".gitattributes").write_text("*.dat filter=broken\n")
    git(repo, "config", "filter.broken.clean", "false")
    git(repo, "config", "filter.broken.required", "true")
    for name in ("a.dat", "b.txt", "c.dat", "d.txt"):
        (repo / name).write_text(name)
    record = record_run(repo)
    assert set(left_out(record)) == {"a.dat", "c.dat"}
    assert {"b.txt", "d.txt"} <= set(stored(repo, record.commit))


def test_repositories_inside_are_named(repo: Path) -> None:
    make_repo(repo / "embedded")
    (repo / "unborn").mkdir()
    git(repo / "unborn", "init", "-q")
    record = whole(repo)
    assert set(left_out(record)) == {"embedded/", "unborn/"}


def test_a_dirty_submodule_is_named(repo: Path, tmp_path: Path) -> None:
    library = make_repo(tmp_path / "library")
    git(repo, "submodule", "--quiet", "add", str(library), "lib")
    git(repo, "commit", "-qm", "submodule")
    assert whole(repo, "clean").dirty is False
    (repo / "lib" / "train.py").write_text("changed inside\n")
    record = whole(repo, "dirty")
    assert (record.dirty, record.dirty_submodules) == (True, ["lib"])
    assert any("submodules" in note for note in record.notes)
    git(repo / "lib", "commit", "-qam", "inside")
    record = whole(repo, "moved")
    inside = git(repo / "lib", "rev-parse", "HEAD").strip()
    assert git(repo, "rev-parse", f"{record.commit}:lib").strip() == inside


# --- trouble with git ---------------------------------------------------------------------------------


def no_code(record: GitRecord) -> str:
    """The problem of a run that could not be recorded: one line, and no ref."""
    assert (record.ref, record.commit) == (None, None)
    assert record.problem is not None
    assert "\n" not in record.problem
    return record.problem


def test_without_git(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    record = record_run(repo)
    assert "git cannot be started" in no_code(record)
    assert (record.base_commit, record.branch, record.dirty) == (None, None, None)


def test_without_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "git init" in no_code(record_run(tmp_path))


def test_without_commits(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "trunk")
    (tmp_path / "train.py").write_text("first\n")
    record = record_run(tmp_path)
    assert record.problem is None
    assert (record.base_commit, record.branch, record.dirty) == (None, "trunk", True)
    assert record.changed == ["train.py"]
    assert stored(tmp_path, record.commit) == {"train.py": b"first\n"}
    assert any("no commits" in note for note in record.notes)


def test_without_identity(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.delenv("GIT_CONFIG_GLOBAL")
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    git(repo, "config", "user.useConfigOnly", "true")
    plain = subprocess.run(["git", "-C", repo, "commit", "--allow-empty", "-qm", "x"], capture_output=True)
    assert plain.returncode != 0  # the case is real
    whole(repo)


def test_detached_head(repo: Path) -> None:
    git(repo, "checkout", "-q", "--detach")
    record = whole(repo)
    assert record.branch is None
    assert record.base_commit == git(repo, "rev-parse", "HEAD").strip()


def test_shallow_clone(repo: Path, tmp_path: Path) -> None:
    git(repo, "commit", "-q", "--allow-empty", "-m", "second")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repo}", str(clone))
    (clone / "train.py").write_text("changed\n")
    record = whole(clone)
    assert stored(clone, record.commit)["train.py"] == b"changed\n"
    assert any("shallow" in note for note in record.notes)


def test_linked_worktree(repo: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    git(repo, "worktree", "add", "-q", "-b", "side", str(linked))
    (linked / "train.py").write_text("beside\n")
    (repo / "train.py").write_text("main\n")
    record = record_run(linked)
    assert record.branch == "side"
    assert stored(repo, record.commit)["train.py"] == b"beside\n"


def test_dubious_ownership(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    problem = no_code(record_run(repo))
    assert "another user" in problem
    assert f"git config --global --add safe.directory {repo}" in problem


def test_a_leftover_index_lock(repo: Path) -> None:
    (repo / "train.py").write_text("changed\n")
    (repo / ".git" / "index.lock").touch()
    assert stored(repo, whole(repo).commit)["train.py"] == b"changed\n"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach, unlike tmp_path."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_read_only_git_folder(open_folder: Path) -> None:
    """In a process that is not root, for root may write anywhere."""
    project = make_repo(open_folder / "project")
    (project / "new.py").write_text("new\n")
    everything = [project, *project.rglob("*")]
    if os.getuid() == 0:
        for path in everything:
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    folders = [path for path in everything if path.is_dir() and ".git" in path.parts]
    for path in folders:
        path.chmod(0o555)
    script = """
        import json, os, sys
        from dataclasses import asdict
        from pathlib import Path
        from rltemplate.run.git.snapshot import commit_run, take_snapshot
        if os.getuid() == 0:
            os.setgroups([]), os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[2]))
        print(json.dumps(asdict(commit_run(take_snapshot(Path(sys.argv[1])), "run-1", "a: 1"))))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(project), str(NOBODY)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    finally:
        for path in folders:
            path.chmod(0o755)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["commit"], record["branch"], record["dirty"]) == (None, "trunk", True)
    assert record["base_commit"] is not None
    assert "make it writable" in record["problem"]


def test_the_callers_git_variables_do_not_leak(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a run is started from within a git hook."""
    other = make_repo(tmp_path / "other")
    before = state(other)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    monkeypatch.setenv("GIT_LITERAL_PATHSPECS", "1")
    (repo / "here.py").write_text("here\n")
    record = record_run(repo)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_LITERAL_PATHSPECS"):
        monkeypatch.delenv(name)
    assert "here.py" in stored(repo, record.commit)
    assert state(other) == before
    assert git(other, "for-each-ref", "refs/runs") == ""


def test_hooks_and_monitors_are_not_run(repo: Path, tmp_path: Path) -> None:
    trace = tmp_path / "called"
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("reference-transaction", "post-index-change", "post-commit", "pre-commit", "monitor"):
        (hooks / name).write_text(f"#!/bin/sh\necho {name} >> '{trace}'\n")
        (hooks / name).chmod(0o755)
    git(repo, "config", "core.hooksPath", str(hooks))
    git(repo, "config", "core.fsmonitor", str(hooks / "monitor"))
    git(repo, "status")
    git(repo, "commit", "-q", "--allow-empty", "-m", "x")
    assert {"reference-transaction", "monitor"} <= set(trace.read_text().split())  # the case is real
    trace.unlink()
    (repo / "train.py").write_text("changed\n")
    assert stored(repo, record_run(repo).commit)["train.py"] == b"changed\n"
    assert not trace.exists()


# --- ids and hashes ----------------------------------------------------------------------------------


def test_a_second_run_of_the_same_id_is_refused(repo: Path) -> None:
    first = whole(repo)
    (repo / "train.py").write_text("changed\n")
    with pytest.raises(DuplicateRunError, match="refs/runs/run-1"):
        record_run(repo)
    assert git(repo, "rev-parse", "refs/runs/run-1").strip() == first.commit
    with pytest.raises(DuplicateRunError):
        take_snapshot(repo, keep_ref="run-1")


@pytest.mark.parametrize("run_id", ["a/b", "../x", "a b", "x.lock", "a..b", "-x", ""])
def test_an_id_that_is_no_ref_name_is_refused(repo: Path, run_id: str) -> None:
    with pytest.raises(ValueError, match="cannot be an id"):
        commit_run(take_snapshot(repo), run_id, CONFIG)


def test_equal_runs_share_a_commit_and_others_do_not(repo: Path) -> None:
    (repo / "new.py").write_text("new\n")
    first = record_run(repo, "one").commit
    time.sleep(1.1)  # commits have times in seconds
    assert record_run(repo, "two").commit == first
    assert commit_run(take_snapshot(repo), "three", CONFIG + "x: 1\n").commit != first
    (repo / "new.py").write_text("newer\n")
    assert record_run(repo, "four").commit != first


def test_a_snapshot_goes_through_json(repo: Path) -> None:
    (repo / ".env").write_text("x\n")
    (repo / "caf\udce9").write_text("x\n")
    snapshot = take_snapshot(repo, keep_ref="sweep")
    text = snapshot.to_json()
    assert "\n" not in text
    assert Snapshot.from_json(text) == snapshot
    record = commit_run(Snapshot.from_json(text), "job-1", CONFIG)
    assert git(repo, "rev-parse", f"{record.commit}:train.py") == git(repo, "rev-parse", "HEAD:train.py")


# --- beside other git commands -----------------------------------------------------------------------


def test_a_sweep_holds_its_snapshot_for_jobs_that_start_later(repo: Path) -> None:
    (repo / "new.py").write_text("as the sweep began\n")
    snapshot = take_snapshot(repo, keep_ref="sweep")
    (repo / "new.py").write_text("edited since\n")
    git(repo, "gc", "-q", "--prune=now")
    record = commit_run(snapshot, "job-1", CONFIG)
    assert record.problem is None
    assert stored(repo, record.commit)["new.py"] == b"as the sweep began\n"


def test_without_a_ref_gc_takes_the_snapshot_away(repo: Path) -> None:
    (repo / "new.py").write_text("as the run began\n")
    snapshot = take_snapshot(repo)
    git(repo, "gc", "-q", "--prune=now")
    healed = commit_run(snapshot, "same-files", CONFIG)  # the work tree still has it all
    assert stored(repo, healed.commit)["new.py"] == b"as the run began\n"

    (repo / "new.py").write_text("second\n")
    snapshot = take_snapshot(repo)
    (repo / "new.py").write_text("edited since\n")
    git(repo, "gc", "-q", "--prune=now")
    assert "gc" in no_code(commit_run(snapshot, "other-files", CONFIG))
    assert "other-files" not in git(repo, "for-each-ref")


def gc_before(folder: Path, commands: str, times: int) -> str:
    """A PATH whose git runs `gc --prune=now` before the first `times` of the given commands."""
    folder.mkdir()
    real = shutil.which("git")
    script = f"""\
        #!/bin/sh
        for word in "$@"; do
            case "$word" in {commands})
                count=$(cat '{folder}/count' 2>/dev/null || echo 0)
                if [ "$count" -lt {times} ]; then
                    echo $((count + 1)) > '{folder}/count'
                    env -u GIT_INDEX_FILE -u GIT_OBJECT_DIRECTORY '{real}' -C "$2" gc -q --prune=now
                fi;;
            esac
        done
        exec '{real}' "$@"
    """
    (folder / "git").write_text(textwrap.dedent(script))
    (folder / "git").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("commands", "times"),
    [
        ("write-tree", 1),
        ("read-tree", 1),
        ("commit-tree", 1),
        ("update-ref", 1),
        ("rev-list", 1),
        ("pack-objects|commit-tree", 4),
        ("status|write-tree|hash-object|commit-tree|pack-objects|update-ref|rev-list", 1000),
    ],
)
def test_gc_at_the_worst_moments(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: str, times: int
) -> None:
    (repo / "new.py").write_text("new\n")
    (repo / "sub" / "new.py").write_text("new, too\n")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", gc_before(tmp_path / "bin", commands, times))
        snapshot = take_snapshot(repo, keep_ref="sweep")
        records = [commit_run(snapshot, "job", CONFIG), record_run(repo)]
    assert (tmp_path / "bin" / "count").exists()
    git(repo, "gc", "-q", "--prune=now")
    for record in records:
        assert record.problem is None
        tree = stored(repo, record.commit)
        assert (tree["new.py"], tree["sub/new.py"]) == (b"new\n", b"new, too\n")
    git(repo, "fsck", "--full", "--strict")
    assert not list((repo / ".git" / "objects" / "pack").glob("*.keep"))


def test_a_ref_whose_objects_cannot_be_held_is_taken_back(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object is lost just after the ref was made, every time: no ref may lead to an incomplete commit."""
    snapshot = take_snapshot(repo, keep_ref="sweep")
    real = shutil.which("git")
    (tmp_path / "bin").mkdir()
    script = f"""\
        #!/bin/sh
        case " $* " in *" rev-list "*)
            if '{real}' -C "$2" show-ref -q refs/runs/job; then
                echo seen >> '{tmp_path}/seen'
                exit 1
            fi;;
        esac
        exec '{real}' "$@"
    """
    script = textwrap.dedent(script)
    (tmp_path / "bin" / "git").write_text(script)
    (tmp_path / "bin" / "git").chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
        record = commit_run(snapshot, "job", CONFIG)
    assert (tmp_path / "seen").exists()
    assert "rev-list" in no_code(record)
    assert "refs/runs/job" not in git(repo, "for-each-ref")


@pytest.mark.parametrize("held", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_many_runs_at_once_beside_commits_and_gc(repo: Path, held: bool) -> None:
    """Without a ref of its own a snapshot survives only as long as nobody edits the files meanwhile."""
    script = """
        import sys
        from pathlib import Path
        from rltemplate.run.git.snapshot import commit_run, take_snapshot
        for number in range(3):
            name = f"{sys.argv[2]}-{number}"
            snapshot = take_snapshot(Path(sys.argv[1]), keep_ref=f"sweep-{name}" if sys.argv[3] else None)
            record = commit_run(snapshot, name, f"name: {name}")
            if record.problem:
                print(record.problem)
    """
    new = {f"new{number}.py": f"{number}\n" for number in range(30)}
    for name, content in new.items():
        (repo / name).write_text(content)
    command = [sys.executable, "-c", textwrap.dedent(script), str(repo)]
    runs = [
        subprocess.Popen([*command, str(number), "x" * held], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for number in range(8)
    ]
    commits = 0
    while any(run.poll() is None for run in runs):  # one user, one command after the other
        if held:
            (repo / "train.py").write_text(f"# {commits}\n")
        git(repo, "commit", "-qam", f"commit {commits}", "--allow-empty")
        git(repo, "gc", "-q", "--prune=now")
        commits += 1
    assert [run.communicate()[0] for run in runs] == [""] * 8
    assert [run.returncode for run in runs] == [0] * 8
    assert commits > 0
    git(repo, "gc", "-q", "--prune=now")
    git(repo, "fsck", "--full", "--strict")
    refs = git(repo, "for-each-ref", "--format=%(refname)", "refs/runs").split()
    assert len([ref for ref in refs if "sweep" not in ref]) == 24
    for ref in refs:
        listing = git(repo, "ls-tree", "-r", "--name-only", ref).split()
        assert new.keys() <= set(listing)
    assert int(git(repo, "rev-list", "--count", "HEAD")) == commits + 1


def test_one_of_many_gets_the_id(repo: Path) -> None:
    script = """
        import sys
        from pathlib import Path
        from rltemplate.run.git.snapshot import DuplicateRunError, commit_run, take_snapshot
        try:
            record = commit_run(take_snapshot(Path(sys.argv[1])), "same", f"number: {sys.argv[2]}")
            print(record.problem or "won")
        except DuplicateRunError:
            print("lost")
    """
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), str(repo), str(number)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for number in range(6)
    ]
    assert sorted(run.communicate()[0].strip() for run in runs) == ["lost"] * 5 + ["won"]


# --- a run that goes on ------------------------------------------------------------------------------


def go_on(repo: Path, before: GitRecord, config: str = CONFIG) -> GitRecord:
    """What another process records that goes on with the run and knows it from `record.json` alone."""
    known = GitRecord.from_dict(json.loads(json.dumps(asdict(before))))
    return continue_run(take_snapshot(repo), known, "run-1", config)


def end(repo: Path, record: GitRecord, status: str) -> str | None:
    """The run ends; of its snapshot only the place matters by then."""
    return commit_outcome(Snapshot(top=str(repo)), record, json.dumps({"status": status}))


def at(repo: Path, name: str) -> str:
    return git(repo, "rev-parse", "--verify", name).strip()


def history(repo: Path, record: GitRecord) -> list[str]:
    """The commits of a run, first to last: `code`, or how it ended."""
    beyond = [] if record.base_commit is None else [f"^{record.base_commit}"]
    commits = git(repo, "rev-list", "--reverse", "--topo-order", REF, *beyond).split()
    command = ["git", "-C", str(repo), "cat-file", "--batch=%(objecttype)"]
    asked = "".join(f"{commit}:{OUTCOME_PATH}\n" for commit in commits)
    told = subprocess.run(command, input=asked, check=True, stdout=subprocess.PIPE, text=True).stdout
    lines = [line for line in told.splitlines() if line not in ("blob", "")]
    return ["code" if line.endswith(" missing") else json.loads(line)["status"] for line in lines]


def lost(repo: Path, commits: list[str]) -> list[str]:
    """Those of `commits` that the history of the ref does not have."""
    return sorted(set(commits) - set(git(repo, "rev-list", REF).split()))


def sound(repo: Path) -> bool:
    """Whether git finds nothing wrong."""
    command = ["git", "-C", str(repo), "fsck", "--full", "--strict", "--no-dangling"]
    return subprocess.run(command, capture_output=True).returncode == 0


def test_a_killed_run_goes_on_and_finishes(repo: Path) -> None:
    (repo / "new.py").write_text("new\n")
    first = record_run(repo)
    before = state(repo)
    again = go_on(repo, first)
    assert (again.problem, again.notes, again.ref, again.commit) == (None, [], REF, first.commit)
    assert history(repo, first) == ["code"]
    assert end(repo, again, "finished") is None
    assert history(repo, first) == ["code", "finished"]
    assert state(repo) == before
    assert sound(repo)


def test_a_run_that_is_interrupted_again_and_again(repo: Path) -> None:
    (repo / "new.py").write_text("new\n")
    before = state(repo)
    first = record = record_run(repo)
    for status in ("interrupted", "interrupted", "finished"):
        assert end(repo, record, status) is None
        assert json.loads(git(repo, "show", f"{REF}:{OUTCOME_PATH}")) == {"status": status}
        found = stored(repo, REF)
        del found[OUTCOME_PATH]
        assert found == {name: content for name, (_, content) in files(repo).items()}
        record = go_on(repo, record)
        assert (record.problem, record.ref, record.commit) == (None, REF, first.commit)
    assert history(repo, first) == ["code", "interrupted", "interrupted", "finished"]
    assert git(repo, "rev-list", "--merges", REF) == ""
    assert state(repo) == before
    assert sound(repo)


def test_more_steps_are_a_commit_on_top(repo: Path) -> None:
    first = record_run(repo)
    end(repo, first, "finished")
    ended = at(repo, REF)
    again = go_on(repo, first, LONGER)
    assert again.problem is None
    assert at(repo, REF) == again.commit != first.commit
    assert at(repo, f"{again.commit}^") == ended
    assert git(repo, "show", f"{again.commit}:{CONFIG_PATH}") == LONGER
    assert git(repo, "show", f"{first.commit}:{CONFIG_PATH}") == CONFIG
    assert go_on(repo, again, LONGER).commit == again.commit  # killed, and on
    # Killed after its commit was made and before its record was written.
    assert go_on(repo, first, LONGER).commit == again.commit
    assert end(repo, again, "finished") is None
    assert git(repo, "show", f"{REF}:{CONFIG_PATH}") == LONGER
    assert history(repo, first) == ["code", "finished", "code", "finished"]
    assert sound(repo)


def test_changed_code_is_a_commit_on_top(repo: Path) -> None:
    first = record_run(repo)
    end(repo, first, "interrupted")
    (repo / "train.py").write_text("print('better')\n")
    (repo / "sub" / "deep.py").unlink()
    git(repo, "commit", "-qam", "better")
    (repo / "new.py").write_text("new\n")
    before = state(repo)
    again = go_on(repo, first)
    assert again.problem is None
    assert stored(repo, again.commit) == {name: content for name, (_, content) in files(repo).items()}
    assert again.base_commit == at(repo, "HEAD")
    assert f"Base commit: {again.base_commit}" in git(repo, "log", "-1", "--format=%B", f"{again.commit}")
    assert (again.changed, again.dirty) == (["new.py"], True)
    assert end(repo, again, "finished") is None
    assert git(repo, "show", f"{REF}:train.py") == "print('better')\n"
    assert git(repo, "rev-list", "--first-parent", REF).split()[-2] == first.commit
    assert state(repo) == before

    (repo / "train.py").write_text("print('train')\n")
    (repo / "sub" / "deep.py").write_text("x = 1\n")
    (repo / "new.py").unlink()
    back = go_on(repo, again)  # the code of the beginning: what ran last was another
    assert back.tree == first.tree
    assert back.commit == at(repo, REF) != first.commit
    assert lost(repo, [f"{first.commit}", f"{again.commit}"]) == []


def test_who_commits_the_code_of_the_run_has_not_changed_it(repo: Path) -> None:
    (repo / "new.py").write_text("new\n")
    first = record_run(repo)
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "what the run began with")
    again = go_on(repo, first)
    assert again.commit == first.commit == at(repo, REF)
    assert again.base_commit == at(repo, "HEAD") != first.base_commit
    assert changed_since(first, take_snapshot(repo)) == []

    git(repo, "update-ref", "-d", REF)
    git(repo, "gc", "-q", "--prune=now")
    assert go_on(repo, first).commit == first.commit == at(repo, REF)


def test_commits_of_a_run_never_go_back_in_time(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on from an older base commit than the one it began on."""
    monkeypatch.setenv("GIT_COMMITTER_DATE", "@2000000000 +0000")
    git(repo, "commit", "-q", "--allow-empty", "-m", "later")
    monkeypatch.delenv("GIT_COMMITTER_DATE")
    record = record_run(repo)
    git(repo, "reset", "-q", "--hard", "HEAD^")
    record = go_on(repo, record, LONGER)
    end(repo, record, "finished")
    times = git(repo, "log", "--format=%ct", REF).split()
    assert times[:3] == ["2000000000"] * 3
    assert int(times[-1]) < 2000000000  # the case is real


@pytest.mark.parametrize("gc", [False, True])
def test_a_deleted_ref_is_made_again(repo: Path, gc: bool) -> None:
    (repo / "new.py").write_text("new\n")
    first = record_run(repo)
    git(repo, "update-ref", "-d", REF)
    if gc:
        git(repo, "gc", "-q", "--prune=now")
    again = go_on(repo, first)
    assert (again.problem, again.notes) == (None, [])
    assert again.commit == first.commit == at(repo, REF)

    end(repo, again, "interrupted")
    longer = go_on(repo, again, LONGER)
    git(repo, "update-ref", "-d", REF)
    if gc:
        git(repo, "gc", "-q", "--prune=now")
    last = go_on(repo, longer, LONGER)
    assert last.problem is None
    assert at(repo, REF) == last.commit
    if gc:  # of what came before the last commit nothing is left
        assert last.commit != longer.commit
        assert history(repo, first) == ["code"]
        assert any("begins where the run went on" in note for note in last.notes)
    else:
        assert last.commit == longer.commit
        assert history(repo, first) == ["code", "interrupted", "code"]
    assert end(repo, last, "finished") is None
    assert sound(repo)


def test_a_clone_without_the_ref(repo: Path, tmp_path: Path) -> None:
    first = record_run(repo)
    end(repo, first, "interrupted")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repo), str(clone))
    again = go_on(clone, first)
    assert (again.problem, again.notes, again.commit) == (None, [], first.commit)
    assert end(clone, again, "finished") is None
    assert history(clone, first) == ["code", "finished"]
    assert sound(clone)

    (repo / "train.py").write_text("never pushed\n")
    git(repo, "commit", "-qam", "never pushed")
    git(repo, "update-ref", "-d", REF)
    unpushed = record_run(repo)
    git(clone, "update-ref", "-d", REF)
    (clone / "train.py").write_text("never pushed\n")
    again = go_on(clone, unpushed)
    assert (again.problem, again.tree) == (None, unpushed.tree)
    assert again.commit != unpushed.commit
    assert at(clone, f"{REF}^") == at(clone, "HEAD")
    assert len(again.notes) == 1


def test_a_clone_that_fetched_the_ref(repo: Path, tmp_path: Path) -> None:
    (repo / "new.py").write_text("new\n")
    first = record_run(repo)
    end(repo, first, "interrupted")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repo), str(clone))
    git(clone, "fetch", "-q", "origin", "refs/runs/*:refs/runs/*")
    (clone / "new.py").write_text("new\n")
    again = go_on(clone, first)
    assert again.commit == first.commit
    assert end(clone, again, "interrupted") is None
    longer = go_on(clone, again, LONGER)
    assert end(clone, longer, "finished") is None
    assert history(clone, first) == ["code", "interrupted", "interrupted", "code", "finished"]
    git(clone, "push", "-q", "origin", "refs/runs/*:refs/runs/*")  # goes on from what is there
    assert at(repo, REF) == at(clone, REF)
    assert sound(clone)
    assert sound(repo)


# --- what the end of a run adds ----------------------------------------------------------------------


def ended(folder: Path, trace: bytes, metrics: bytes = b'{"env_steps": 1}\n') -> Path:
    """The folder of a run that has ended."""
    folder.mkdir()
    (folder / paths.TRACE).write_bytes(trace)
    (folder / paths.METRICS).write_bytes(metrics)
    return folder


def test_the_trace_of_a_run_lies_with_its_outcome(repo: Path, tmp_path: Path) -> None:
    """Byte for byte, whatever git would make of line ends, and so with every end of the run."""
    git(repo, "config", "core.autocrlf", "input")
    first = record_run(repo)
    for trace in (b"one\r\n", b"one\r\ntwo\n"):
        folder = ended(tmp_path / str(len(trace)), trace)
        files, left_out = ended_files(folder)
        assert left_out == {}
        assert commit_outcome(Snapshot(top=str(repo)), first, "{}", files) is None
        for path, name in ((TRACE_PATH, paths.TRACE), (METRICS_PATH, paths.METRICS)):
            command = ["git", "-C", str(repo), "cat-file", "blob", f"{REF}:{path}"]
            held = subprocess.run(command, check=True, capture_output=True).stdout
            assert held == (folder / name).read_bytes()
    assert sound(repo)


def test_a_file_over_the_bound_is_named_and_left_out(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ended(tmp_path / "run", b"x" * 101)
    monkeypatch.setattr(snapshot_module, "MAX_ENDED_BYTES", 101)
    assert ended_files(folder)[1] == {}  # the bound itself is within
    monkeypatch.setattr(snapshot_module, "MAX_ENDED_BYTES", 100)
    files, left_out = ended_files(folder)
    assert list(files) == [METRICS_PATH]
    assert left_out == {paths.TRACE: "101 bytes, and the limit is 100"}
    (folder / paths.METRICS).unlink()  # never written
    assert ended_files(folder) == ({}, left_out)


def test_nothing_reserved_is_code(repo: Path, tmp_path: Path) -> None:
    """A checkout of a run that has ended holds them all, and is still the code that the run began with."""
    (repo / "new.py").write_text("new\n")
    first = record_run(repo)
    files, _ = ended_files(ended(tmp_path / "run", b"trace\n"))
    assert commit_outcome(Snapshot(top=str(repo)), first, "{}", files) is None
    copy = tmp_path / "as-it-was"
    git(repo, "worktree", "add", "-q", "--detach", str(copy), REF)
    assert all((copy / path).exists() for path in RESERVED_PATHS)
    found = take_snapshot(copy)
    assert changed_paths(repo, f"{first.tree}", f"{found.tree}") == []
    assert first.tree != found.tree  # they are part of the work tree there
    again = go_on(copy, first)
    assert again.commit == first.commit
    assert git(repo, "ls-tree", "-r", f"{again.commit}", *ENDED_PATHS) == ""


def test_a_checkout_of_the_run_is_its_code(repo: Path, tmp_path: Path) -> None:
    """The way to go on with a run whose code has been changed since; the checkout has its outcome, too."""
    (repo / "new.py").write_text("new\n")
    first = record_run(repo)
    end(repo, first, "interrupted")
    (repo / "train.py").write_text("changed\n")
    copy = tmp_path / "as-it-was"
    git(repo, "worktree", "add", "-q", "--detach", str(copy), REF)
    assert (copy / OUTCOME_PATH).exists()
    assert changed_since(first, take_snapshot(repo)) == ["train.py"]
    assert changed_since(first, take_snapshot(copy)) == []
    again = go_on(copy, first)
    assert again.commit == first.commit
    longer = go_on(copy, again, LONGER)
    assert git(repo, "ls-tree", f"{longer.commit}", OUTCOME_PATH) == ""
    assert end(copy, longer, "finished") is None
    assert history(repo, first) == ["code", "interrupted", "code", "finished"]


def test_a_repository_that_had_no_commits_when_the_run_began(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "trunk")
    (tmp_path / "train.py").write_text("first\n")
    first = record_run(tmp_path)
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "first")
    assert go_on(tmp_path, first).commit == first.commit
    git(tmp_path, "update-ref", "-d", REF)
    git(tmp_path, "gc", "-q", "--prune=now")
    again = go_on(tmp_path, first)
    assert (again.problem, again.commit) == (None, first.commit)
    assert end(tmp_path, again, "finished") is None
    assert history(tmp_path, first) == ["code", "finished"]


def test_the_start_was_not_recorded(repo: Path) -> None:
    """A run that began where there was no git goes on where there is."""
    unknown = replace(record_run(repo, "other"), ref=None, commit=None, tree=None, base_commit=None)
    again = go_on(repo, unknown)
    assert (again.problem, again.notes, again.ref) == (None, [], REF)
    assert at(repo, REF) == again.commit
    assert "names no commit" in no_code(go_on(repo, unknown))


# --- a ref that is not what it was -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["commit", "sibling", "blob", "dangling", "unknown"])
def test_a_ref_with_something_else_is_left_alone(repo: Path, kind: str) -> None:
    before = record = record_run(repo)
    if kind == "commit":
        foreign = at(repo, "HEAD")  # behind the run's commit, which is gone
        git(repo, "update-ref", "-d", REF)
        git(repo, "gc", "-q", "--prune=now")
    elif kind == "sibling":
        foreign = f"{commit_run(take_snapshot(repo), 'other', LONGER).commit}"
    elif kind == "blob":
        foreign = at(repo, "HEAD:train.py")
    elif kind == "dangling":
        foreign = "1" * len(at(repo, "HEAD"))
    else:  # what the record names was never here
        foreign, before = f"{record.commit}", replace(record, commit="2" * len(at(repo, "HEAD")))
    path = repo / ".git" / REF
    path.write_text(f"{foreign}\n")
    problem = no_code(go_on(repo, before, LONGER))
    assert REF in problem
    told = end(repo, before, "finished")
    assert told is not None
    assert "\n" not in told
    assert path.read_text() == f"{foreign}\n"
    if kind == "dangling":
        return
    advice = problem.split("`")[1::2]
    for command in advice:
        subprocess.run(["sh", "-c", command], cwd=repo, check=True)
    assert at(repo, "refs/kept/run-1") == foreign
    again = go_on(repo, before, LONGER)
    assert (again.problem, again.ref) == (None, REF)
    assert end(repo, again, "finished") is None


def test_a_ref_that_was_set_back_moves_up_again(repo: Path) -> None:
    """As after `git fetch origin '+refs/runs/*:refs/runs/*'` of a state that was pushed earlier."""
    first = record_run(repo)
    end(repo, first, "interrupted")
    pushed = at(repo, REF)
    longer = go_on(repo, first, LONGER)
    git(repo, "update-ref", REF, pushed)
    again = go_on(repo, longer, LONGER)
    assert (again.problem, again.commit) == (None, longer.commit)
    assert at(repo, REF) == longer.commit
    git(repo, "update-ref", REF, pushed)  # while the run is under way
    assert end(repo, again, "finished") is None
    assert history(repo, first) == ["code", "interrupted", "code", "finished"]


def test_a_ref_that_is_deleted_under_way_stays_deleted(repo: Path) -> None:
    record = record_run(repo)
    git(repo, "update-ref", "-d", REF)
    assert "was deleted" in str(end(repo, record, "finished"))
    assert git(repo, "for-each-ref", "refs/runs") == ""


def test_going_on_without_git_or_repository(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, snapshot = record_run(repo), take_snapshot(repo)
    (tmp_path / "elsewhere").mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
        assert "git init" in no_code(go_on(tmp_path / "elsewhere", first))
        assert changed_since(first, take_snapshot(tmp_path / "elsewhere")) is None
        assert changed_paths(tmp_path / "elsewhere", f"{first.tree}", f"{first.commit}") is None
        assert changed_paths(tmp_path / "elsewhere", f"{first.tree}", f"{first.tree}") == []
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    assert "git cannot be started" in no_code(go_on(repo, first))
    assert "git cannot be started" in no_code(continue_run(snapshot, first, "run-1", LONGER))
    assert "git cannot be started" in str(commit_outcome(snapshot, first, "{}"))


def test_the_record_of_another_version_is_refused(repo: Path) -> None:
    values = asdict(record_run(repo))
    assert GitRecord.from_dict(values) == GitRecord(**values)
    for odd in ({**values, "blessed": True}, {key: values[key] for key in values if key != "tree"}):
        with pytest.raises(ConfigError, match=r"look at: (blessed|tree)$"):
            GitRecord.from_dict(odd)


# --- what of the code has changed --------------------------------------------------------------------


def test_changed_paths_are_named(repo: Path) -> None:
    first = take_snapshot(repo)
    assert first.tree is not None
    assert changed_paths(repo, first.tree, first.tree) == []
    (repo / "train.py").write_text("changed\n")
    (repo / "sub" / "deep.py").rename(repo / "sub" / "moved.py")
    (repo / "ünï\n.py").write_text("new\n")
    (repo / ".gitignore").chmod(0o755)
    (repo / CONFIG_PATH).parent.mkdir(parents=True)
    (repo / CONFIG_PATH).write_text("of an earlier run\n")
    second = take_snapshot(repo)
    assert second.tree is not None
    names = {"train.py", "sub/deep.py", "sub/moved.py", "ünï\n.py", ".gitignore"}
    assert set(changed_paths(repo, first.tree, second.tree) or []) == names
    assert set(changed_paths(repo / "sub", second.tree, first.tree) or []) == names
    assert changed_paths(repo, "3" * len(first.tree), second.tree) is None
    assert changed_paths(repo, first.tree, "3" * len(first.tree)) is None
    assert changed_paths(repo, at(repo, "HEAD:train.py"), second.tree) is None


def test_changes_are_known_when_the_recorded_tree_is_gone(repo: Path, tmp_path: Path) -> None:
    """A ref holds the tree with the configuration; the tree without it may fall to `git gc`."""
    (repo / "new.py").write_text("new\n")
    first = record_run(repo)
    git(repo, "gc", "-q", "--prune=now")
    (repo / "train.py").write_text("changed\n")
    snapshot = take_snapshot(repo)
    assert changed_paths(repo, f"{first.tree}", f"{snapshot.tree}") is None  # the case is real
    assert changed_since(first, snapshot) == ["train.py"]
    git(repo, "update-ref", "-d", REF)
    git(repo, "gc", "-q", "--prune=now")
    assert changed_since(first, take_snapshot(repo)) is None
    (repo / "train.py").write_text("print('train')\n")
    assert changed_since(first, take_snapshot(repo)) == []

    clean = record_run(make_repo(tmp_path / "clean"), "run-2")
    git(tmp_path, "clone", "-q", str(tmp_path / "clean"), str(tmp_path / "clone"))
    (tmp_path / "clone" / "train.py").write_text("changed\n")
    assert changed_since(clean, take_snapshot(tmp_path / "clone")) == ["train.py"]


# --- two processes with one run ----------------------------------------------------------------------


def first_before(folder: Path, command: str, action: str) -> str:
    """A PATH whose git runs the shell command `action`, once, before the first `command`."""
    folder.mkdir()
    real = shutil.which("git")
    script = f"""\
        #!/bin/sh
        case " $* " in *" {command} "*)
            if mkdir '{folder}/done' 2>/dev/null; then
                '{real}' -C "$2" {action}
            fi;;
        esac
        exec '{real}' "$@"
    """
    (folder / "git").write_text(textwrap.dedent(script))
    (folder / "git").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("command", "ref"), [("commit-tree", "there"), ("update-ref", "there"), ("update-ref", "missing")]
)
def test_of_two_that_go_on_one_is_told(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, ref: str
) -> None:
    first = record_run(repo)
    end(repo, first, "interrupted")
    start = at(repo, REF)
    winner = go_on(repo, first, LONGER)
    git(repo, "update-ref", "refs/kept/all", REF)
    git(repo, "update-ref", REF, start)
    if ref == "missing":
        git(repo, "update-ref", "-d", REF)
    snapshot = take_snapshot(repo)
    with monkeypatch.context() as patch:
        action = f"update-ref {REF} {winner.commit}"
        patch.setenv("PATH", first_before(tmp_path / "bin", command, action))
        loser = continue_run(snapshot, first, "run-1", CONFIG + "seed: 2\n")
    assert (tmp_path / "bin" / "done").exists()
    assert "twice" in no_code(loser)
    assert at(repo, REF) == winner.commit
    assert end(repo, loser, "interrupted") is None  # nothing was recorded, so there is nothing to add to
    assert at(repo, REF) == winner.commit
    assert end(repo, winner, "finished") is None
    assert history(repo, first) == ["code", "interrupted", "code", "finished"]


RACE = """
    import json, sys
    from dataclasses import replace
    from pathlib import Path
    from rltemplate.run.git.snapshot import GitRecord, commit_outcome, continue_run, take_snapshot
    project, before, what, number = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
    record, snapshot = GitRecord.from_dict(before), take_snapshot(project)
    print("ready", flush=True)
    sys.stdin.read()
    if what == "go on":
        record = continue_run(snapshot, record, "run-1", f"number: {number}")
        print(record.problem or record.commit)
    else:
        print(commit_outcome(snapshot, record, json.dumps({"status": number})) or "kept")
"""


def race(repo: Path, record: GitRecord, what: str, count: int) -> list[str]:
    """What `count` processes say that do the same thing at once."""
    command = [sys.executable, "-c", textwrap.dedent(RACE), str(repo), json.dumps(asdict(record)), what]
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(number)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=ROOT,
                )
            )
            for number in range(count)
        ]
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in running:  # each waits for the end of its input
            assert process.stdin is not None
            process.stdin.close()
        said = [process.stdout.read().strip() for process in running if process.stdout is not None]
    assert [process.returncode for process in running] == [0] * count
    return said


def test_whatever_was_recorded_stays_when_many_go_on_at_once(repo: Path) -> None:
    first = record_run(repo)
    said = race(repo, first, "go on", 3)
    made = [line for line in said if "twice" not in line]
    assert len(made) >= 1
    assert lost(repo, [f"{first.commit}", *made]) == []
    assert history(repo, first) == ["code"] * (1 + len(made))
    assert sound(repo)


def test_all_outcomes_stay_when_many_end_at_once(repo: Path) -> None:
    first = record_run(repo)
    assert race(repo, first, "end", 3) == ["kept"] * 3
    assert sorted(history(repo, first)) == ["0", "1", "2", "code"]


def test_an_outcome_comes_with_the_code_that_had_it(repo: Path) -> None:
    """Somebody goes on elsewhere, with more steps, while the run that was taken for dead still ends."""
    first = record_run(repo)
    longer = go_on(repo, first, LONGER)
    assert end(repo, first, "failed") is None
    assert history(repo, first) == ["code", "code", "failed"]
    assert git(repo, "show", f"{REF}:{CONFIG_PATH}") == CONFIG
    assert end(repo, longer, "finished") is None
    assert git(repo, "show", f"{REF}:{CONFIG_PATH}") == LONGER
    assert lost(repo, [f"{first.commit}", f"{longer.commit}"]) == []


def test_what_is_lost_would_be_seen(repo: Path) -> None:
    first = record_run(repo)
    end(repo, first, "interrupted")
    ended = at(repo, REF)
    git(repo, "update-ref", REF, f"{first.commit}")
    assert lost(repo, [f"{first.commit}", ended]) == [ended]
    assert history(repo, first) == ["code"]
    assert sound(repo)
    blob = at(repo, f"{REF}:{CONFIG_PATH}")
    (repo / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    assert not sound(repo)


def test_going_on_beside_gc(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = "read-tree|write-tree|commit-tree|pack-objects|update-ref|rev-list"
    (repo / "new.py").write_text("new\n")
    first = record_run(repo)
    end(repo, first, "interrupted")
    (repo / "new.py").write_text("newer\n")
    (repo / "sub" / "new.py").write_text("new, too\n")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", gc_before(tmp_path / "bin", commands, 1000))
        record = continue_run(take_snapshot(repo), first, "run-1", LONGER)
        assert record.problem is None
        assert end(repo, record, "finished") is None
    assert (tmp_path / "bin" / "count").exists()
    assert history(repo, first) == ["code", "interrupted", "code", "finished"]
    assert git(repo, "show", f"{REF}:new.py") == "newer\n"
    assert git(repo, "show", f"{REF}:sub/new.py") == "new, too\n"
    git(repo, "gc", "-q", "--prune=now")
    assert sound(repo)
    assert not list((repo / ".git" / "objects" / "pack").glob("*.keep"))


# ------------------------------------------------------------------------------ what is damaged or killed


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("refs/heads/trunk", "garbage\n", "HEAD leads to no commit"),
        ("refs/heads/trunk", "", "HEAD leads to no commit"),
        ("refs/heads/trunk", f"{'12' * 20}\n", "HEAD leads to no commit"),
        ("HEAD", f"{'12' * 20}\n", "HEAD leads to no commit"),
        ("HEAD", "garbage\n", ".git is damaged"),
    ],
)
def test_a_damaged_head_is_called_so(repo: Path, file: str, content: str, told: str) -> None:
    (repo / ".git" / file).write_text(content)
    snapshot = take_snapshot(repo)
    assert snapshot.tree is None
    assert told in (snapshot.problem or "")
    assert snapshot.notes == []


def test_a_branch_without_commits_is_none_of_these(repo: Path) -> None:
    git(repo, "checkout", "-q", "--orphan", "other")
    snapshot = take_snapshot(repo)
    assert snapshot.tree is not None
    assert "no commits yet" in snapshot.notes[0]


def test_many_new_files_are_announced_and_taken(
    repo: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(work_tree, "MANY_FILES", 20)
    for number in range(20):
        (repo / f"data-{number}.txt").write_text(f"{number}")
    assert take_snapshot(repo).changed_count == 20
    assert capfd.readouterr().err == ""
    (repo / "one-more.txt").touch()
    asked: list[float] = []
    call = Git.__call__

    def watched(self: Git, *args: str, **options: Any) -> bytes:
        asked.append(options.get("timeout_s", 60.0))
        return call(self, *args, **options)

    monkeypatch.setattr(Git, "__call__", watched)
    monkeypatch.setattr(work_tree, "FILES_PER_S", 1)
    assert take_snapshot(repo).changed_count == 21
    assert capfd.readouterr().err.startswith("recording 21 new or changed files of ")
    assert max(asked) == 60.0 + 21  # git has longer where there is more to do


def test_a_filter_that_hangs_does_not_outlive_git(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = Git.__call__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "timeout_s", 3.0)
    pid = tmp_path / "pid"
    git(repo, "config", "filter.slow.clean", f"echo $$ >{pid}; sleep 600 & wait")
    (repo / ".gitattributes").write_text("*.py filter=slow\n")
    (repo / "train.py").write_text("print('changed')\n")
    began = time.monotonic()
    snapshot = take_snapshot(repo)
    assert time.monotonic() - began < 20
    assert "took longer than 3 s" in (snapshot.problem or "")
    listed = ["ps", "-o", "stat=", "-p", pid.read_text().strip()]
    until = time.monotonic() + 5
    while subprocess.run(listed, stdout=subprocess.PIPE).stdout.strip() and time.monotonic() < until:
        time.sleep(0.05)
    assert not subprocess.run(listed, stdout=subprocess.PIPE).stdout.strip()


def test_what_a_killed_process_left_in_the_temporary_folder_is_removed(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    holder = """
import os, signal, sys
from rltemplate.run.git.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "index").write_text("of somebody")
    print("ready", flush=True)
    sys.stdin.read()
"""
    environ = {**os.environ, "TMPDIR": str(folder)}
    command = [sys.executable, "-c", holder]
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert take_snapshot(repo).tree is not None
        (left,) = folder.iterdir()  # it is still in use
        process.kill()
        process.wait()
    assert left.exists()
    assert take_snapshot(repo).tree is not None
    assert list(folder.iterdir()) == []
