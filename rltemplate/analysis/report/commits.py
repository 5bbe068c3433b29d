"""Addresses of commits on the web, from the address of a remote repository."""

from __future__ import annotations

import re
from urllib.parse import quote, urlsplit

# git@host:owner/name.git, as ssh has it without a scheme.
_SSH = re.compile(r"(?:[\w.-]+@)?(?P<host>[\w-]+(?:\.[\w-]+)+):(?!/)(?P<path>[^\s]+)")
_COMMIT = re.compile(r"[0-9a-f]{7,64}")


def web_address(remote: str) -> str | None:
    """Where people look at the repository with this remote address; None if that is no place on the web.

    User names, passwords and tokens in the address stay behind.
    """
    scp = _SSH.fullmatch(remote)
    if scp is not None:
        host, path = scp["host"], scp["path"]
    else:
        try:
            parts = urlsplit(remote)
            # Another port is one of ssh or git, unless the address is of the web already.
            port = f":{parts.port}" if parts.port and parts.scheme in ("http", "https") else ""
        except ValueError:
            return None
        if parts.scheme not in ("http", "https", "ssh", "git") or not parts.hostname:
            return None
        host, path = f"{parts.hostname}{port}", parts.path
    path = path.strip("/").removesuffix(".git")
    return f"https://{host}/{quote(path, safe='/~')}" if path else None


def commit_address(web: str, commit: str) -> str | None:
    """The page of a commit, as GitHub, GitLab, Bitbucket, Gitea, sourcehut and their like have it."""
    if not _COMMIT.fullmatch(commit):
        return None
    host = urlsplit(web).hostname or ""
    if "gitlab" in host:
        return f"{web}/-/commit/{commit}"
    return f"{web}/{'commits' if host == 'bitbucket.org' else 'commit'}/{commit}"
