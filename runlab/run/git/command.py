"""Git, called so that it can do no harm: own index, no hooks, no terminal, no remote, bounded time.

The only module that starts git. Trouble becomes a `GitError` whose message is one line for the record.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runlab.errors import ConfigError

_LIMIT_S = 600.0  # for one command; it takes a hundredth of a second for each new file
_SETTINGS = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "core.safecrlf": "false",
    "core.splitIndex": "false",
    "core.filesRefLockTimeout": "2000",
    # Git flushes neither new objects nor refs, and an empty one after a power failure damages the repository.
    "core.fsync": "objects,reference",
    "core.fsyncMethod": "batch",
    "i18n.commitEncoding": "UTF-8",  # another one would be a line of the commit
    "log.showSignature": "false",  # which stands before what `git show` is asked for
    "status.showStash": "false",
}
_OF_A_FILTER = ("clean", "smudge", "process")
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
    **{f"GIT_{who}_NAME": "runlab" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "runlab@localhost" for who in ("AUTHOR", "COMMITTER")},
}


class GitError(ConfigError):
    """Trouble with git, in one line."""


class Git:
    """Git in the repository around `project`, with a private index in `scratch`.

    `prefix` is the project's folder in the repository: empty, or with a slash behind it. `common` is the
    folder of git, which linked worktrees share.
    """

    def __init__(self, project: Path, scratch: Path) -> None:
        variables = os.environ.items()
        passed = {k: v for k, v in variables if not k.startswith("GIT_") or k.startswith(_KEPT_VARIABLES)}
        self.env = passed | _OWN_VARIABLES
        self.top = project
        self.failing: set[str] | None = None  # filters that are not called; None: none was tried
        words = ("--show-toplevel", "--show-prefix", "--git-common-dir", "--git-path", "index")
        lines = [os.fsdecode(line) for line in self("rev-parse", *words).split(b"\n")]
        if len(lines) != 5:  # four answers, and nothing behind the last line end
            raise GitError(f"{str(project)!r}: a folder with a line break in its path is not recorded")
        top, self.prefix, common, index, _ = lines
        self.top, self.common, self.users_index = Path(top), project / common, (project / index).resolve()
        self.index = scratch / "index"
        self.env["GIT_INDEX_FILE"] = str(self.index)

    def __call__(self, *args: str, stdin: bytes = b"", fine: int = 0) -> bytes:
        """Standard output of one git command that exits with 0 or `fine`. Raises GitError."""
        left = self.failing or ()
        values = _SETTINGS | {f"filter.{name}.{key}": "" for name in left for key in _OF_A_FILTER}
        values |= {f"filter.{name}.required": "false" for name in left}
        settings = [word for key, value in values.items() for word in ("-c", f"{key}={value}")]
        command = ["git", "-C", str(self.top), *settings, *args]
        bounds: dict[str, Any] = {"env": self.env, "input": stdin, "timeout": _LIMIT_S}
        try:
            # In a session of its own, which Ctrl-C does not reach.
            done = subprocess.run(command, capture_output=True, start_new_session=True, **bounds)
        except OSError as error:
            raise GitError(
                f"git cannot be started ({error.strerror}): install it to have code recorded"
            ) from None
        except subprocess.TimeoutExpired:
            raise GitError(f"`git {args[0]}` took longer than {_LIMIT_S:.0f} s") from None
        if done.returncode not in (0, fine):
            name = next(word for word in args if word != "-c" and "=" not in word)
            raise _explain(name, done.stderr.decode(errors="replace"), self.top)
        return bytes(done.stdout)

    def line(self, *args: str, stdin: bytes = b"", fine: int = 0) -> str:
        return as_text(self(*args, stdin=stdin, fine=fine)).strip()

    def names(self, *args: str) -> list[bytes]:
        return self(*args).split(b"\0")[:-1]

    def find(self, name: str) -> str:
        """The full name of the object that a revision stands for; empty if there is none."""
        return self.line("rev-parse", "--quiet", "--verify", name, fine=1)

    def leave_failing_filters(self) -> None:
        """Call filters that fail no more, such as that of git-lfs where it is missing."""
        listed = self("config", "-z", "--name-only", "--get-regexp", r"^filter\..*\.(clean|process)$", fine=1)
        names = {as_text(key)[len("filter.") :].rpartition(".")[0] for key in listed.split(b"\0")[:-1]}
        attributes, self.failing = self.index.with_name("attributes"), set()
        for name in sorted(names):
            attributes.write_text(f"* filter={name}\n")
            try:
                self("-c", f"core.attributesFile={attributes}", "hash-object", "--stdin", "--path=any")
            except GitError:
                self.failing.add(name)

    def left_by_filters(self, paths: Sequence[bytes]) -> dict[bytes, str]:
        """The files among `paths` that need a filter which is not called, and its name."""
        if not self.failing or not paths:
            return {}
        triples = self("check-attr", "-z", "--stdin", "filter", stdin=b"\0".join(paths)).split(b"\0")
        needed = {path: as_text(name) for path, name in zip(triples[::3], triples[2::3], strict=False)}
        return {path: name for path, name in needed.items() if name in self.failing}

    def file(self, path: bytes) -> Path:
        return self.top / os.fsdecode(path)


@contextmanager
def repository(project: Path) -> Iterator[Git]:
    """Git in the repository around `project`. Raises GitError where there is none."""
    with tempfile.TemporaryDirectory(prefix="runlab-", ignore_cleanup_errors=True) as scratch:
        yield Git(project, Path(scratch))


def as_text(path: bytes) -> str:
    """A path as git gives it, as text that any JSON reader takes, whatever its bytes are."""
    return path.decode("utf-8", "backslashreplace")


def _explain(command: str, stderr: str, folder: Path) -> GitError:
    """The cause of git's complaint in one line, with the cure of the common ones."""
    if hint := re.search(r"git config --global --add safe\.directory .*", stderr):
        return GitError(f"{folder} belongs to another user; to let git trust it: {hint.group()}")
    if "not a git repository" in stderr and not (folder / ".git").exists():
        cure = "`git init` and a commit let runs record their code"
        return GitError(f"{folder} is in no git repository: {cure}")
    # The cause comes first: `fatal: Unable to add (null) to database` says nothing of a disk.
    lines = [line for line in stderr.splitlines() if line.startswith(("fatal:", "error:"))]
    return GitError(f"`git {command}` failed: {[*lines, ' '.join(stderr.split())][0]}")
