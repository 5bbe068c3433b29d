"""Snapshots of the work tree, with real git in every state in which a researcher may start a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from conftest import git

from runlab.config.affects_results import code_rule
from runlab.errors import ConfigError
from runlab.run import paths
from runlab.run.continuation import check_changes
from runlab.run.files import lock
from runlab.run.git import changes, selection, snapshot
from runlab.run.git.command import repository
from runlab.run.git.origin import made_here
from runlab.run.git.snapshot import (
    RESERVED,
    GitRecord,
    commit_outcome,
    commit_run,
    ended_files,
    take_snapshot,
)

CONFIG, CONFIG_PATH = "algo: ppo\nseed: 1\n", RESERVED + paths.CONFIG
LONGER = "algo: ppo\nseed: 1\ntotal_env_steps: 200\n"
REF = "refs/runs/run-1"


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository, with git as it is for somebody who never configured it."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    return make_repo(tmp_path / "project")


def make_repo(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / ".gitignore").write_text("ignored/\n*.log\n")
    (folder / "train.py").write_text("print('train')\n")
    (folder / "sub" / "deep.py").write_text("x = 1\n")
    git(folder, "init", "-q", "-b", "trunk")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    return folder


def files(folder: Path) -> dict[str, tuple[bool, bytes]]:
    """All files below `folder`, without git's own: whether executable, and the content (a link's target)."""
    contents = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            contents[name] = (False, b"-> " + os.fsencode(path.readlink()))
        elif path.is_file() and name != ".git" and not name.startswith(".git/"):
            contents[name] = (os.access(path, os.X_OK), path.read_bytes())
    return contents


def state(repo: Path) -> tuple[object, ...]:
    """Everything of a repository that a snapshot must leave as it is."""
    return (
        (repo / ".git" / "index").read_bytes(),
        git(repo, "for-each-ref", "refs/heads", "refs/tags", "refs/stash"),
        git(repo, "--no-optional-locks", "status", "--porcelain=v2", "--branch"),
        {name: ((repo / name).lstat().st_mtime_ns, entry) for name, entry in files(repo).items()},
    )


def stored(repo: Path, commit: str | None) -> dict[str, bytes]:
    """Path and content of every file of a commit, without the run's configuration."""
    names = git(repo, "ls-tree", "-r", "-z", "--name-only", f"{commit}").split("\0")[:-1]
    return {name: git(repo, "show", f"{commit}:{name}").encode() for name in names if name != CONFIG_PATH}


def on_disk(repo: Path) -> dict[str, bytes]:
    return {name: content for name, (_, content) in files(repo).items()}


def record_run(project: Path, run_id: str = "run-1", config: str = CONFIG) -> GitRecord:
    return commit_run(project, take_snapshot(project), run_id, config)


def whole(repo: Path, run_id: str = "run-1") -> GitRecord:
    """Record a run and see that it went well and left no trace outside its ref."""
    before = state(repo)
    record = record_run(repo, run_id)
    assert record.problem is None
    assert record.ref == f"refs/runs/{run_id}"
    assert at(repo, record.ref) == record.commit
    assert state(repo) == before
    return record


def at(repo: Path, name: str) -> str:
    return git(repo, "rev-parse", name).strip()


def test_a_clean_work_tree_is_its_base_commit_and_the_configuration(repo: Path) -> None:
    record = whole(repo)
    assert (record.base_commit, record.branch, record.dirty) == (at(repo, "HEAD"), "trunk", False)
    assert at(repo, f"{REF}^") == at(repo, "HEAD")
    assert stored(repo, record.commit) == on_disk(repo)
    assert git(repo, "show", f"{REF}:{CONFIG_PATH}") == CONFIG
    shutil.rmtree(repo / ".git")
    git(repo, "init", "-q", "-b", "trunk")
    record = record_run(repo)  # without any commit
    assert (record.base_commit, record.branch, record.dirty) == (None, "trunk", True)
    assert stored(repo, record.commit) == on_disk(repo)


ODD_NAMES = ("line\nbreak", 'quo"te', "-rf", "ünï 中", ":(glob)*")


def test_the_snapshot_is_the_work_tree_and_not_the_index(repo: Path, tmp_path: Path) -> None:
    """Staged, modified, deleted, renamed and new files in all combinations, with odd names."""
    committed = "both gone forgotten run.sh becomes_file/inside becomes_link/inside hidden kept"
    for name in ("becomes_file", "becomes_link"):
        (repo / name).mkdir()
    for name in committed.split():
        (repo / name).write_text(f"{name}\n" * 3)
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "second")
    (repo / "both").write_text("staged\n")
    (repo / "new_staged.log").write_text("ignored, but staged\n")
    git(repo, "add", "-f", "both", "new_staged.log")
    (repo / "both").write_text("then edited again\n")
    (repo / "gone").unlink()
    git(repo, "rm", "-q", "--cached", "forgotten")
    (repo / "run.sh").chmod(0o755)
    git(repo, "mv", "sub/deep.py", "sub/moved.py")
    (repo / "link").symlink_to("both")
    shutil.rmtree(repo / "becomes_file")
    (repo / "becomes_file").write_text("file\n")
    shutil.rmtree(repo / "becomes_link")
    (repo / "becomes_link").symlink_to("elsewhere")
    git(repo, "update-index", "--assume-unchanged", "hidden")
    git(repo, "update-index", "--skip-worktree", "kept")
    for name in ("hidden", "kept"):
        (repo / name).write_text("changed behind git's back\n")
    for name in ODD_NAMES:
        (repo / name).write_text(repr(name))
    expected = files(repo)
    (repo / "x.log").write_text("ignored\n")
    assert whole(repo).dirty
    with snapshot.worktree(repo, REF, tmp_path / "copy") as copy:
        copied = files(copy)
    assert copied.pop(CONFIG_PATH) == (False, CONFIG.encode())
    assert copied == expected


def test_a_project_below_the_top_of_its_repository_snapshots_all_of_it(repo: Path, tmp_path: Path) -> None:
    (repo / "train.py").write_text("changed at the top\n")
    record = record_run(repo / "sub")
    assert stored(repo, record.commit)["train.py"] == b"changed at the top\n"
    with snapshot.worktree(repo / "sub", REF, tmp_path / "copy") as project:
        assert project == tmp_path / "copy" / "sub"
    (repo / "ignored" / "download").mkdir(parents=True)
    assert "ignores this folder" in no_code(record_run(repo / "ignored" / "download", "another"))


# Put together here, so that no scanner takes this file for a leak, and no snapshot leaves it out.
TOKEN = "gh" + "p_" + "a1B2" * 9


def test_what_is_left_out_is_named_and_counted(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MAX_FILE_BYTES", 2000)
    monkeypatch.setattr(selection, "MAX_NEW_BYTES", 3000)
    make_repo(repo / "embedded")
    for name, size in {"over": 2001, "limit": 2000, "too_much": 1500, "small": 500}.items():
        (repo / f"{name}.npz").write_bytes(b"x" * size)
    (repo / "a.pem").touch()
    (repo / ".kube").mkdir()
    (repo / ".kube" / "config").write_text("password: hunter2\n")
    for name in (committed := (".env", "big.py", "changed.py", "nest")):
        (repo / name).touch()
    git(repo, "add", "-f", *committed)
    git(repo, "commit", "-qm", "on purpose", "--", *committed)
    (repo / "nest").unlink()
    make_repo(repo / "nest")
    (repo / ".env").write_text("changed\n")
    (repo / "changed.py").write_text("y" * 2000)  # changed, not new: it does not count
    (repo / "big.py").write_text("y" * 2001)
    (repo / "train.py").write_text(TOKEN)
    git(repo, "add", "train.py")  # the index has the token as well
    record = whole(repo)
    base = "; the version of the base commit is kept"
    assert {entry["path"]: entry["reason"] for entry in record.skipped} == {
        "big.py": f"larger than 0 MB{base}",
        "train.py": f"likely secret: contains a GitHub token{base}",
        "nest/": f"a git repository of its own{base}",
        "a.pem": "likely secret: named like *.pem",
        ".kube/config": "likely secret: named like */.kube/*",
        "embedded/": "a git repository of its own",
        "over.npz": "larger than 0 MB",
        "limit.npz": "new files together exceed 0 MB",
    }
    # A digest of a password could be found by trying passwords.
    assert {each["path"] for each in record.skipped if each["digest"] is None} == {
        *("a.pem", ".kube/config", "nest/", "embedded/")
    }
    tree = stored(repo, record.commit)
    assert (tree["train.py"], tree["nest"]) == (b"print('train')\n", b"")
    assert (tree[".env"], tree["big.py"]) == (b"changed\n", b"")  # committed names: the user's decision
    assert {"changed.py", "small.npz", "too_much.npz"} <= {*tree}


def test_code_that_is_left_out_is_compared_by_its_digest_which_knows_no_secret(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal trees are not equal code where a changed file stays out: for a token in it, or for its size."""

    def record(text: str, token: str = TOKEN) -> GitRecord:
        (repo / "train.py").write_text(f"{text}\n{token}\n")
        return take_snapshot(repo)

    first, again, other = record("loss * 0.5"), record("loss * 0.5", TOKEN[:-1] + "z"), record("loss * 5.0")
    assert first.tree == again.tree == other.tree
    assert changes.files_between(repo, first, again) == []
    assert changes.files_between(repo, first, other) == ["train.py"]
    contents = (changes.code_contents(repo, each) for each in (first, again, other))
    digests = [changes.code_digest(each.contents, code_rule(["train.py"])) for each in contents if each]
    assert digests[0] == digests[1] != digests[2]
    assert check_changes("it", first, {}, again, accept=False) == {}
    with pytest.raises(ConfigError, match=r"it began with other code: train\.py"):
        check_changes("it", first, {}, other, accept=False)
    monkeypatch.setattr(selection, "MAX_FILE_BYTES", 100)
    large = []
    for content in (b"a" * 200, b"a" * 199 + b"b", b"a" * 200):
        (repo / "weights.bin").write_bytes(content)
        large.append(take_snapshot(repo))
    assert changes.files_between(repo, large[0], large[1]) == ["weights.bin"]
    assert changes.files_between(repo, large[0], large[2]) == []


@pytest.mark.parametrize("kind", ["clean", "process"])
def test_a_file_that_git_cannot_take_in_costs_that_file_and_no_other(
    repo: Path, tmp_path: Path, kind: str
) -> None:
    """As of git-lfs on a machine without it; and a file in another encoding than it should have."""
    attributes = "*.bin filter=lfs\n*.txt working-tree-encoding=nosuch\n*.md filter=upper\n"
    (repo / ".gitattributes").write_text(attributes)
    (repo / "committed.bin").write_text("pointer\n")
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "weights")
    for name in ("lfs", "lost"):  # one that no file needs
        git(repo, "config", f"filter.{name}.{kind}", "git-lfs-that-is-missing")
        git(repo, "config", f"filter.{name}.smudge", "git-lfs-that-is-missing")
        git(repo, "config", f"filter.{name}.required", "true")
    git(repo, "config", "filter.upper.clean", "tr a-z A-Z")
    clean = record_run(repo, "clean")
    assert (clean.problem, clean.skipped, clean.dirty) == (None, [], False)
    with snapshot.worktree(repo, f"{clean.commit}", tmp_path / "copy") as copy:
        assert (copy / "committed.bin").read_text() == "pointer\n"
    (repo / "committed.bin").write_text("POINTER\n")  # of the same size, so that git has to look
    for name in ("new.bin", "sub/new.bin", "odd.txt", "notes.md", "new.py"):
        (repo / name).write_text("text\n")
    (repo / "git~1").write_text("text\n")  # git leaves it out without a word, for the sake of other systems
    record = record_run(repo)
    filtered = "the filter lfs of git, which it needs, fails here"
    reasons = {each["path"]: each["reason"] for each in record.skipped}
    assert reasons.pop("odd.txt").startswith("git cannot take it in: `git update-index` failed: ")
    assert reasons == {
        "committed.bin": f"{filtered}; the version of the base commit is kept",
        "new.bin": filtered,
        "sub/new.bin": filtered,
        "git~1": "git takes no file of this name",
    }
    tree = stored(repo, record.commit)
    assert (tree["new.py"], tree["notes.md"], tree["committed.bin"]) == (b"text\n", b"TEXT\n", b"pointer\n")
    assert all(each["digest"] for each in record.skipped)
    (repo / "new.bin").write_text("other\n")
    assert changes.files_between(repo, record, record_run(repo, "other")) == ["new.bin"]


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(repo: Path) -> None:
    (repo / "train.py").unlink()
    os.mkfifo(repo / "train.py")
    os.mkfifo(repo / "new")
    ((path, reason),) = [(each["path"], each["reason"]) for each in record_run(repo).skipped]
    assert path == "train.py"
    assert reason.startswith("git cannot take it in")


def test_a_dirty_submodule_is_named(repo: Path, tmp_path: Path) -> None:
    library = make_repo(tmp_path / "library")
    git(repo, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(library), "lib")
    git(repo, "commit", "-qm", "submodule")
    assert whole(repo, "clean").dirty is False
    (repo / "lib" / "train.py").write_text("changed inside\n")
    record = whole(repo, "dirty")
    (left_out,) = record.skipped
    assert (record.dirty, left_out["path"], left_out["reason"]) == (
        True,
        "lib",
        "changes inside of a submodule",
    )
    assert changes.files_between(repo, record, whole(repo, "again")) == []
    (repo / "lib" / "train.py").write_text("changed otherwise\n")
    assert changes.files_between(repo, record, whole(repo, "other")) == ["lib"]
    shutil.rmtree(repo / "lib")
    (repo / "lib").write_text("a file in its place\n")
    assert stored(repo, whole(repo, "replaced").commit)["lib"] == b"a file in its place\n"


def no_code(record: GitRecord) -> str:
    """The problem of a run that could not be recorded: one line, and no ref."""
    assert (record.ref, record.commit) == (None, None)
    assert record.problem is not None
    assert "\n" not in record.problem
    return record.problem


def test_a_problem_is_one_line_with_a_cure(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "line break in its path" in no_code(record_run(make_repo(tmp_path / "a\nb")))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    shutil.rmtree(repo / ".git")
    assert "git init" in no_code(record_run(repo))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git cannot be started" in no_code(record_run(repo))


def test_a_problem_names_the_cause_that_git_gave_first(repo: Path) -> None:
    for prefix in range(256):  # no object can be added, as on a disk that cannot be written
        (repo / ".git" / "objects" / f"{prefix:02x}").touch()
    problem = no_code(record_run(repo))
    assert problem.startswith("`git hash-object` failed: error: unable to "), problem


def test_a_snapshot_ends_no_lock_of_its_process(repo: Path) -> None:
    """As for a run in a folder that git does not ignore: closing a file ends all locks on it."""
    try_it = f"import pathlib, runlab.run.files as f; f.lock(pathlib.Path({str(repo)!r}))"
    unlock = lock(repo)
    take_snapshot(repo)
    tried = subprocess.run([sys.executable, "-c", try_it], capture_output=True, text=True, check=False)
    assert "is in use, by process" in tried.stderr
    unlock()
    subprocess.run([sys.executable, "-c", try_it], check=True)


def test_a_sweep_holds_its_snapshot_against_gc(repo: Path) -> None:
    (repo / "new.py").write_text("as the sweep began\n")
    held = take_snapshot(repo, keep_ref="sweep")
    (repo / "new.py").write_text("edited since\n")
    loose = take_snapshot(repo)  # the inverse
    git(repo, "gc", "-q", "--prune=now")
    record = commit_run(repo, GitRecord(**json.loads(json.dumps(asdict(held)))), "job-1", CONFIG)
    assert stored(repo, record.commit)["new.py"] == b"as the sweep began\n"
    (repo / "new.py").write_text("edited again\n")
    assert "read-tree" in no_code(commit_run(repo, loose, "lost", CONFIG))


def test_a_job_that_starts_after_an_edit_records_what_it_runs(repo: Path) -> None:
    of_sweep = take_snapshot(repo)
    assert changes.code_of_job(repo, of_sweep) == (of_sweep, [])
    (repo / "notes.md").write_text("about the sweep\n")
    assert changes.code_of_job(repo, of_sweep) == (of_sweep, [])
    (repo / "new.py").write_text("edited while the first job ran\n")
    now, edited = changes.code_of_job(repo, of_sweep)
    assert (now.tree, edited) == (take_snapshot(repo).tree, ["new.py"])
    shutil.rmtree(repo / ".git")  # as on a node that has the files alone
    assert changes.code_of_job(repo, of_sweep) == (of_sweep, [])


def test_a_partial_clone_of_a_part_of_the_files_is_recorded(repo: Path, tmp_path: Path) -> None:
    """Its snapshot names files whose contents were never fetched."""
    (repo / "src").mkdir()
    (repo / "src" / "a.py").write_text("1\n")
    (repo / "data").mkdir()
    (repo / "data" / "large").write_text("2\n")
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", "x")
    git(repo, "config", "uploadpack.allowFilter", "true")
    part = tmp_path / "part"
    git(tmp_path, "clone", "-q", "--no-checkout", "--filter=blob:none", repo.as_uri(), str(part))
    git(part, "sparse-checkout", "set", "src")
    git(part, "checkout", "-q")
    assert not (part / "data").exists()
    (part / "src" / "a.py").write_text("changed\n")
    record = record_run(part)
    assert (record.problem, record.dirty) == (None, True)
    assert git(part, "ls-tree", "-r", "--name-only", f"{record.tree}", "data") == "data/large\n"
    assert git(part, "show", f"{record.tree}:src/a.py") == "changed\n"


def test_neither_variables_nor_hooks_of_the_caller_have_a_say(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a run is started from within a git hook."""
    called, hook = tmp_path / "called", tmp_path / "reference-transaction"
    hook.write_text(f"#!/bin/sh\necho called >> '{called}'\n")
    hook.chmod(0o755)
    git(repo, "config", "core.hooksPath", str(tmp_path))
    git(repo, "commit", "-q", "--allow-empty", "-m", "x")
    called.unlink()  # the case is real
    monkeypatch.setenv("GIT_DIR", str(make_repo(tmp_path / "other") / ".git"))
    record = record_run(repo)
    monkeypatch.delenv("GIT_DIR")
    assert not called.exists()
    assert stored(repo, record.commit) == on_disk(repo)


def test_signed_commits_and_names_that_are_no_utf8_are_recorded(repo: Path, tmp_path: Path) -> None:
    """`git show` puts the check of a signature before the time that it is asked for."""
    (tmp_path / "signed").write_text(
        git(repo, "cat-file", "commit", "HEAD").replace("\n\n", "\ngpgsig none\n\n", 1)
    )
    signed = git(repo, "hash-object", "-t", "commit", "-w", str(tmp_path / "signed")).strip()
    git(repo, "config", "log.showSignature", "true")
    git(repo, "symbolic-ref", "HEAD", os.fsdecode(b"refs/heads/caf\xe9"))
    git(repo, "update-ref", "HEAD", signed)
    (repo / "new.txt").write_text("so that the commit of the run is another one")
    record = record_run(repo)
    assert (record.problem, record.branch, record.base_commit) == (None, "caf\\xe9", signed)
    assert stored(repo, record.commit) == on_disk(repo)


def resume(repo: Path, before: GitRecord, config: str = CONFIG) -> GitRecord:
    """The record of another process, which knows the run from `record.json` alone."""
    recorded = GitRecord(**json.loads(json.dumps(asdict(before))))
    return commit_run(repo, take_snapshot(repo), "run-1", config, recorded)


def end(repo: Path, record: GitRecord, **files: Path) -> str | None:
    return commit_outcome(repo, record, '{"status": "ended"}', files)


def test_a_run_and_its_outcome_are_one_ref_that_is_its_code(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repo / "new.py").write_text("new\n")
    first = record_run(repo)
    before = state(repo)
    (tmp_path / "trace.jsonl").write_bytes(b"a trace\r\n")
    (tmp_path / "metrics.jsonl").write_bytes(b"x" * 100)
    ended, _ = ended_files(tmp_path)
    assert end(repo, resume(repo, first), **ended) is None
    assert at(repo, f"{REF}^") == first.commit
    assert git(repo, "show", f"{REF}:{RESERVED}outcome.json") == '{"status": "ended"}'
    assert state(repo) == before
    with snapshot.worktree(repo, REF, tmp_path / "copy") as copy:
        assert (copy / RESERVED / paths.TRACE).read_bytes() == b"a trace\r\n"
        # A run that is started there has the same code as the first, and none of how that ended.
        record = record_run(copy, "from-there")
        assert git(repo, "diff", "--name-only", f"{record.commit}", f"{first.commit}") == ""
    assert not copy.exists()
    assert len(git(repo, "worktree", "list").splitlines()) == 1
    monkeypatch.setattr(snapshot, "MAX_ENDED_BYTES", 10)
    too_large = {"metrics.jsonl": "100 bytes, and the limit is 10"}
    assert ended_files(tmp_path) == ({paths.TRACE: tmp_path / "trace.jsonl"}, too_large)


def test_a_ref_of_gigabytes_is_not_unpacked(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_run(repo)
    assert commit_outcome(repo, record, " " * 5000, {}) is None
    assert [*snapshot.read_run_files(repo, REF, tmp_path)] == [paths.CONFIG, snapshot.OUTCOME]
    monkeypatch.setattr(snapshot, "MAX_ENDED_BYTES", 4999)
    with pytest.raises(ConfigError, match=r"outcome\.json has 5,000 bytes, and at most 4,999 are read"):
        snapshot.read_run_files(repo, REF, tmp_path)


def test_another_code_or_configuration_is_a_commit_on_top(repo: Path) -> None:
    first = record_run(repo)
    end(repo, first)
    ended = at(repo, REF)
    longer = resume(repo, first, LONGER)
    assert at(repo, REF) == longer.commit
    assert at(repo, f"{REF}^") == ended
    assert git(repo, "show", f"{REF}:{CONFIG_PATH}") == LONGER
    (repo / "train.py").write_text("print('better')\n")
    (repo / "sub" / "deep.py").unlink()
    git(repo, "commit", "-qam", "better")
    (repo / "new.py").write_text("new\n")
    before = state(repo)
    again = resume(repo, longer)
    assert at(repo, f"{REF}^") == longer.commit
    assert stored(repo, again.commit) == on_disk(repo)
    assert (again.problem, again.base_commit) == (None, at(repo, "HEAD"))
    assert resume(repo, again).commit == again.commit  # killed, and on
    assert end(repo, again) is None
    assert state(repo) == before
    assert git(repo, "fsck", "--no-dangling", "--connectivity-only") == ""


def test_equal_code_gives_the_commit_of_a_missing_ref_again(repo: Path) -> None:
    (repo / "new.py").write_text("new\n")
    first = record_run(repo)
    assert "already exists" in no_code(record_run(repo))
    git(repo, "update-ref", "-d", REF)
    assert "was deleted" in (end(repo, first) or "")
    git(repo, "gc", "-q", "--prune=now")
    time.sleep(1.1)  # commits have times in seconds
    assert resume(repo, first).commit == first.commit == at(repo, REF)
    assert record_run(repo, "longer", LONGER).commit != first.commit


def test_a_received_record_marks_no_other_commit_as_made_here(repo: Path) -> None:
    """Its commit is any text, and a revision may have lines."""
    first, other = record_run(repo), "2" * 40
    text = f"{REF}^{{/.|\n{other}\n}}"
    assert at(repo, text) == first.commit
    assert resume(repo, replace(first, commit=text)).commit == first.commit
    with repository(repo) as commands:
        assert made_here(commands, first.commit)
        assert not made_here(commands, other)


def test_changes_between_runs_of_two_clones_and_the_work_tree(repo: Path, tmp_path: Path) -> None:
    clean, clone = record_run(repo, "clean"), tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repo), "clone")
    (repo / "train.py").write_text("print('better')\n")
    (repo / "new.py").write_text("y = 1\n")
    edited = record_run(repo, "edited", LONGER)
    assert changes.files_between(repo, clean, edited) == ["new.py", "train.py"]
    text = changes.text_between(repo, clean, edited) or ""
    assert "-print('train')\n+print('better')\n" in text
    assert "seed" not in text  # the configuration is no code, and is compared by itself
    (repo / "train.py").write_text("print('best')\n")
    assert changes.files_between(repo, edited, take_snapshot(repo)) == ["train.py"]
    # A record may come from anywhere, and may not give git options.
    assert changes.files_between(repo, clean, GitRecord(tree=f"--output={repo}/written")) is None
    assert not (repo / "written").exists()
    # Committed code is in every clone; other code is known where it was recorded.
    (clone / "sub" / "deep.py").write_text("x = 4\n")
    assert changes.files_between(clone, clean, take_snapshot(clone)) == ["sub/deep.py"]
    assert changes.files_between(clone, edited, take_snapshot(clone)) is None


def test_a_file_of_the_project_is_the_same_under_another_name_of_its_package(repo: Path) -> None:
    """In a project that lies in a folder of its repository."""
    project = repo / "project"

    def write(package: str, **texts: str) -> GitRecord:
        for name, text in {**dict.fromkeys(("a", "b", "c"), "x = 1\n"), **texts}.items():
            path = project / package / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        settings = f'[tool.own]\nproject = "x.y"\n\n[tool.runlab]\nproject = "{package}.project"\n'
        (project / "pyproject.toml").write_text(settings)
        return take_snapshot(project)

    before = write("old")
    (project / "old").rename(project / "new")
    assert changes.files_between(project, before, write("new")) == ["project/pyproject.toml"]
    (project / "new" / "c.py").chmod(0o755)
    after = write("new", b="x = 2\n", d="x = 1\n")
    assert changes.files_between(project, before, after) == [
        *("project/new/b.py", "project/new/c.py", "project/new/d.py"),
        *("project/old/b.py", "project/old/c.py", "project/pyproject.toml"),
    ]
    (project / "old").mkdir()
    (project / "old" / "a.py").write_text("x = 3\n")  # a package of its own
    assert "project/old/a.py" in (changes.files_between(project, before, take_snapshot(project)) or [])
    codes = [changes.code_contents(project, side) for side in (before, after)]
    assert [code.package for code in codes if code] == ["project/old/", "project/new/"]
