"""Git, called so that it can do no harm: own index, no hooks, no terminal, no remote, bounded time.

The only module that starts git. Trouble becomes a `GitError` whose message is one line for the record.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

_TIMEOUT_S = 60.0
_SETTINGS = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "core.safecrlf": "false",
    "core.splitIndex": "false",
    "core.logAllRefUpdates": "false",
    "core.filesRefLockTimeout": "2000",
    "i18n.commitEncoding": "UTF-8",
    "gc.auto": "0",
}
# Git variables of the caller that pass. GIT_DIR, GIT_INDEX_FILE and the like, which git sets for its hooks,
# would lead to another repository or to the user's own index.
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

T = TypeVar("T")


class GitError(Exception):
    """One line for the record. `final`: another attempt would fail in the same way."""

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class Git:
    """Git in the repository around `project`, with a private index in `scratch`.

    `aside`: new objects are written to `scratch`, and nothing to the repository.
    """

    def __init__(self, project: Path, scratch: Path, aside: bool = False) -> None:
        passed = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("GIT_") or key.startswith(_KEPT_VARIABLES)
        }
        self.scratch = scratch
        self.env = passed | _OWN_VARIABLES
        self.top = project
        options = ("--show-toplevel", "--absolute-git-dir", "--git-common-dir", "--show-prefix")
        top, git_dir, common_dir, self.prefix, *_ = self("rev-parse", *options).split(b"\n")
        self.top = Path(os.fsdecode(top))
        self.git_dir = Path(os.fsdecode(git_dir))
        self.common_dir = (project / os.fsdecode(common_dir)).resolve()
        self.env["GIT_INDEX_FILE"] = str(scratch / "index")
        if aside:
            (scratch / "objects" / "info").mkdir(parents=True)
            alternates = scratch / "objects" / "info" / "alternates"
            alternates.write_bytes(os.fsencode(self.common_dir / "objects") + b"\n")
            self.env["GIT_OBJECT_DIRECTORY"] = str(scratch / "objects")

    def __call__(
        self,
        *args: str,
        stdin: bytes = b"",
        env: dict[str, str] | None = None,
        fine: int = 0,
        timeout_s: float = _TIMEOUT_S,
    ) -> bytes:
        """Standard output of one git command that exits with 0 or `fine`. Raises GitError."""
        settings = [word for key, value in _SETTINGS.items() for word in ("-c", f"{key}={value}")]
        command = ["git", "-C", str(self.top), *settings, *args]
        pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        try:
            # A session of its own, so that a filter of git that hangs ends with it.
            with subprocess.Popen(command, env=env or self.env, start_new_session=True, **pipes) as process:
                try:
                    out: bytes
                    out, told = process.communicate(stdin, timeout_s)
                except BaseException:
                    os.killpg(process.pid, signal.SIGKILL)
                    raise
        except OSError as error:
            message = f"git cannot be started ({error.strerror}): install it to have code recorded"
            raise GitError(message, final=True) from None
        except subprocess.TimeoutExpired:
            raise GitError(f"`git {args[0]}` took longer than {timeout_s:.0f} s", final=True) from None
        if process.returncode not in (0, fine):
            raise _explain(args[0], told.decode(errors="replace"), self.top)
        return out

    def line(self, *args: str, stdin: bytes = b"", env: dict[str, str] | None = None, fine: int = 0) -> str:
        """Standard output as one line of text."""
        return self(*args, stdin=stdin, env=env, fine=fine).decode().strip()

    def names(self, *args: str, stdin: bytes = b"") -> list[bytes]:
        """Standard output of a command with `-z`, as a list."""
        return self(*args, stdin=stdin).split(b"\0")[:-1]


def attempt(project: Path, work: Callable[[Git], T], aside: bool = False) -> T:
    """The result of `work`, repeated once if `git gc` or a changing work tree got in its way."""
    for last in (False, True):
        with tempfile.TemporaryDirectory(prefix="rltemplate-", ignore_cleanup_errors=True) as scratch:
            try:
                return work(Git(project, Path(scratch), aside))
            except GitError as error:
                if error.final or last:
                    raise
    raise AssertionError("unreachable")


def as_text(path: bytes) -> str:
    """A path as git gives it, as text that any JSON reader takes, whatever its bytes are."""
    return path.decode("utf-8", "backslashreplace")


def _explain(command: str, stderr: str, folder: Path) -> GitError:
    """The cause of git's complaint and its cure, in one line."""
    told = stderr.lower()
    if "dubious ownership" in told:
        hint = re.search(r"git config --global --add safe\.directory .*", stderr)
        advice = hint.group() if hint else "git config --global --add safe.directory FOLDER"
        return GitError(f"{folder} belongs to another user, so git refuses it; to trust it: {advice}", True)
    if "bad object head" in told or ("not a git repository" in told and (folder / ".git").exists()):
        return GitError(f"{folder / '.git'} is damaged: look at its HEAD, and at `git fsck`", True)
    if "not a git repository" in told:
        message = f"{folder} is in no git repository: `git init` and a commit let runs record their code"
        return GitError(message, True)
    lines = [line for line in stderr.splitlines() if line.startswith(("fatal:", "error:"))]
    lines = lines or [" ".join(stderr.split())]
    if re.search("permission denied|insufficient permission|read-only file system|no space left", told):
        return GitError(f"git cannot write to the repository {folder} ({lines[0]}): make it writable", True)
    return GitError(f"`git {command}` failed: {lines[-1]}")
