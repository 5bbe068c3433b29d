"""Addresses of commits on the web, from the address of a remote repository."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from rltemplate.run.git.command import GitError, attempt

# https://host/owner/name, ssh://git@host:22/owner/name, git@host:owner/name; user names and tokens are cut.
_REMOTE = re.compile(
    r"(?:(?P<web>https?)://|ssh://|git://)?(?:[^@/\s]+@)?(?P<host>[\w-]+(?:\.[\w-]+)+)"
    r"(?P<port>:\d+(?=/))?[:/](?!/)(?P<path>[\w./~-]+)"
)


def web_address(remote: str) -> str | None:
    """The web page of the repository with this remote address; None for a folder."""
    found = _REMOTE.fullmatch(remote)
    if found is None:
        return None
    port = found["port"] or "" if found["web"] else ""  # another port is one of ssh or git
    return f"https://{found['host']}{port}/{found['path'].strip('/').removesuffix('.git')}"


def commit_links(project: Path) -> Callable[[str], str | None]:
    """A function that gives the web page of a commit; None for a commit that no remote is known to have."""

    def answer(*words: str) -> str:
        try:
            return attempt(project, lambda git: git.line(*words))
        except GitError:  # no repository, no such remote, or no such commit
            return ""

    remotes = answer("remote").split()
    web = (
        web_address(answer("remote", "get-url", "origin" if "origin" in remotes else remotes[0]))
        if remotes
        else None
    )

    @cache
    def address(commit: str) -> str | None:
        if web is None or not re.fullmatch(r"[0-9a-f]{7,64}", commit):
            return None
        known = answer("for-each-ref", "--count=1", f"--contains={commit}", "refs/remotes")
        return f"{web}/commit/{commit}" if known else None

    return address
