"""Git, called so that it can do no harm: own index, no hooks, no terminal, no remote, bounded time.

The only module that starts git. Everything that goes wrong becomes a `GitError` whose message is one line
for the record.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rltemplate.run.git.scratch import scratch_folder

_TIMEOUT_S = 60.0
_ATTEMPTS = 6
_SETTINGS = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "core.safecrlf": "false",
    "core.splitIndex": "false",
    "core.logAllRefUpdates": "false",
    "core.filesRefLockTimeout": "2000",
    "i18n.commitEncoding": "UTF-8",
    "gc.auto": "0",
    "pack.packSizeLimit": "0",
}
# Of the caller's git variables only these pass: GIT_DIR, GIT_INDEX_FILE and the like, which git sets for its
# hooks, would lead to another repository or to the user's own index.
_KEPT_VARIABLES = ("GIT_CONFIG_", "GIT_EXEC_PATH", "GIT_CEILING_", "GIT_DISCOVERY_", "GIT_TEST_")
_OWN_VARIABLES = {
    "LC_ALL": "C",
    "LANGUAGE": "",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_LAZY_FETCH": "1",
    # Git refuses to commit without an identity, and the user's own would make equal runs differ.
    **{f"GIT_{who}_NAME": "rltemplate" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "rltemplate@localhost" for who in ("AUTHOR", "COMMITTER")},
}
BROKEN_HEAD = "HEAD leads to no commit, for a ref or an object is damaged: `git fsck` names it"
_NO_WRITE = ("permission denied", "insufficient permission", "read-only file system", "no space left")

T = TypeVar("T")
Environment = dict[str, str] | None


class GitError(Exception):
    """One line for the record. `final`: another attempt would fail in the same way."""

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class Git:
    """Git in the repository around `project`, with a private index in `scratch`.

    `private` is the environment of commands that work on that index; `aside` lets them also write their
    objects to `scratch` instead of the repository. `public` is for commands on the repository itself.
    """

    def __init__(self, project: Path, scratch: Path, aside: bool) -> None:
        passed = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("GIT_") or key.startswith(_KEPT_VARIABLES)
        }
        self.public = passed | _OWN_VARIABLES
        self.private = self.public | {"GIT_INDEX_FILE": str(scratch / "index")}
        self.scratch = scratch
        self.aside = aside
        self.top = project
        options = ("--show-toplevel", "--absolute-git-dir", "--git-common-dir", "--show-prefix")
        top, git_dir, common_dir, self.prefix, *_ = self("rev-parse", *options, env=self.public).split(b"\n")
        self.top = Path(os.fsdecode(top))
        self.git_dir = Path(os.fsdecode(git_dir))
        self.common_dir = (project / os.fsdecode(common_dir)).resolve()
        if aside:
            objects = scratch / "objects"
            (objects / "info").mkdir(parents=True)
            (objects / "info" / "alternates").write_bytes(os.fsencode(self.common_dir / "objects") + b"\n")
            self.private["GIT_OBJECT_DIRECTORY"] = str(objects)

    def __call__(
        self,
        *args: str,
        stdin: bytes = b"",
        env: Environment = None,
        fine: int = 0,
        timeout_s: float = _TIMEOUT_S,
    ) -> bytes:
        """Standard output of one git command that exits with 0 or `fine`. Raises GitError."""
        settings = [word for key, value in _SETTINGS.items() for word in ("-c", f"{key}={value}")]
        try:
            command = ["git", "-C", str(self.top), *settings, *args]
            done = _run(command, stdin, self.private if env is None else env, timeout_s)
        except OSError as error:
            message = f"git cannot be started ({error.strerror}): install it to have code recorded"
            raise GitError(message, final=True) from None
        except subprocess.TimeoutExpired:
            raise GitError(f"`git {args[0]}` took longer than {timeout_s:.0f} s", final=True) from None
        if done.returncode not in (0, fine):
            raise _explain(args[0], done.stderr.decode(errors="replace"), self.top)
        return done.stdout

    def line(self, *args: str, stdin: bytes = b"", env: Environment = None) -> str:
        """Standard output as one line of text."""
        return self(*args, stdin=stdin, env=env).decode().strip()


def _run(
    command: list[str], stdin: bytes, env: Environment, timeout_s: float
) -> subprocess.CompletedProcess[bytes]:
    """Like `subprocess.run`, but what git has started, such as a filter that hangs, does not outlive it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(stdin, timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def attempt(project: Path, work: Callable[[Git], T]) -> T:
    """The result of `work`, repeated if `git gc` or a changing work tree got in its way. Raises GitError.

    From the second time on objects are built aside: `git gc` may be at work all the time.
    """
    for number in range(_ATTEMPTS):
        with scratch_folder() as scratch:
            try:
                return work(Git(project, scratch, aside=number > 0))
            except GitError as error:
                if error.final or number == _ATTEMPTS - 1:
                    raise
    raise AssertionError("unreachable")


def shown(path: bytes) -> str:
    """A path as git gives it, as text that any JSON reader takes, whatever its bytes are."""
    return path.decode("utf-8", "backslashreplace")


def _explain(command: str, stderr: str, folder: Path) -> GitError:
    """What git's complaint means for the user, in one line."""
    told = stderr.lower()
    if "dubious ownership" in told:
        hint = re.search(r"git config --global --add safe\.directory .*", stderr)
        advice = hint.group() if hint else "git config --global --add safe.directory FOLDER"
        return GitError(f"{folder} belongs to another user, so git refuses it; to trust it: {advice}", True)
    if "not a git repository" in told and (folder / ".git").exists():
        message = f"{folder / '.git'} is damaged, and git takes it for no repository: look at its HEAD"
        return GitError(message, True)
    if "bad object head" in told:
        return GitError(f"{folder}: {BROKEN_HEAD}", True)
    if "not a git repository" in told:
        message = f"{folder} is in no git repository: `git init` and a commit let runs record their code"
        return GitError(message, True)
    lines = [line for line in stderr.splitlines() if line.startswith(("fatal:", "error:"))]
    lines = lines or [" ".join(stderr.split())]
    if any(sign in told for sign in _NO_WRITE):
        return GitError(f"git cannot write to the repository {folder} ({lines[0]}): make it writable", True)
    return GitError(f"`git {command}` failed: {lines[-1]}")
