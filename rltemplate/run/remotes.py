"""Runs at another repository: what is pushed there, what is fetched from there, and what must not be.

Only refs below `refs/runs/` are touched, each only ever moved forward, here and there. A ref that leads
elsewhere on the other side is named and left alone. Before anything is pushed, all that the push would newly
bring to the remote is looked through for secrets: files of every commit, also of the user's own history, by
the names and the unmistakable patterns of `exclusions.py`, and the messages of commits.

Of the scanners that exist, detect-secrets was tried: nobody has worked on it since 2024, and its entropy rule
takes the digests of a trace for secrets.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeVar

from rltemplate.run.exclusions import secret_name, secrets_in
from rltemplate.run.git import Git, GitError, attempt, shown
from rltemplate.run.paths import REF_PREFIX, safe_name
from rltemplate.types import ConfigError

T = TypeVar("T")
State = Literal["new", "moved on", "equal", "behind", "elsewhere"]
NEW: Literal["new"] = "new"
MOVED: Literal["moved on"] = "moved on"
EQUAL: Literal["equal"] = "equal"
BEHIND: Literal["behind"] = "behind"
ELSEWHERE: Literal["elsewhere"] = "elsewhere"

MESSAGE = "commit message"  # stands for the path of a finding that is in no file

_OWN_EMAIL = "rltemplate@localhost"  # of the commits of runs; all others are the user's
_AT_ONCE = 32_000_000  # bytes of files read in one go
_REFS_AT_ONCE = 100  # a command line has an end
_PATIENCE_S = 3600.0  # for a walk through a history of many years


@dataclass(frozen=True, slots=True)
class Move:
    """The ref of one run: where it is here and at the remote (None: not there), and what follows.

    Seen from where it is to be taken to: "new" and "moved on" can be taken there, "behind" is further there
    already, "elsewhere" is neither before nor behind.
    """

    id: str
    here: str | None
    there: str | None
    state: State


@dataclass(frozen=True, slots=True)
class Finding:
    """What looks like a secret: where, of which kind, and the first commit that would bring it. Not itself.

    `line` is None where the name of the file gives it away. A finding in the message of a commit has MESSAGE
    as path.
    """

    path: str
    line: int | None
    kind: str
    commit: str

    def __str__(self) -> str:
        where = self.path if self.line is None else f"{self.path}, line {self.line}"
        return f"{where}: {self.kind}, in commit {self.commit[:12]}"


@dataclass(slots=True)
class Push:
    """What would be pushed: `moves` of all chosen refs, what looks like a secret, what was let through.

    `own_commits` of the user's history, and `files` in total, would come along.
    """

    remote: str
    moves: list[Move]
    findings: list[Finding] = field(default_factory=list)
    allowed: list[Finding] = field(default_factory=list)
    own_commits: int = 0
    files: int = 0

    @property
    def to_go(self) -> list[Move]:
        """Those that the remote lacks or has in an earlier state."""
        return [move for move in self.moves if move.state in (NEW, MOVED)]


def choose_remote(project: Path, wanted: str | None) -> str:
    """The name of the remote repository: `wanted`, else origin, else the only one there is.

    Raises ConfigError in a line if there is none, no such one, or no way to choose.
    """
    try:
        names = attempt(project, lambda git: git("remote").decode().split())
    except GitError as error:
        raise ConfigError(str(error)) from error
    allowed = ", ".join(names)
    if not names:
        asked = "" if wanted is None else f"remote={wanted}: "
        raise ConfigError(f"{asked}this repository has no remote; `git remote add origin ADDRESS` makes one")
    if wanted is None:
        if "origin" in names or len(names) == 1:
            return "origin" if "origin" in names else names[0]
        raise ConfigError(f"remote= is missing, for there are several: {allowed}")
    if wanted in names:
        return wanted
    near = difflib.get_close_matches(wanted[:100], names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"remote={wanted}: no such remote; {hint}allowed: {allowed}")


def choose_ids(key: str, text: str | None, known: Collection[str], where: str) -> list[str]:
    """The runs among `known` that `key=text` means, sorted; all of them for None. ConfigError if none.

    For `run` an id, a unique part of one or a ref; for `runs` patterns such as `2026*`, separated by commas.
    """
    if text is None:
        return sorted(known)
    if key == "runs":
        patterns = [part.strip().removeprefix(REF_PREFIX) for part in text.split(",")]
        chosen = [run for run in sorted(known) if any(fnmatchcase(run, pattern) for pattern in patterns)]
        if chosen:
            return chosen
        raise ConfigError(f"runs={text}: no such runs {where}; {_for_example(known)}")
    wanted = text.removeprefix(REF_PREFIX).strip("/")
    if wanted in known:
        return [wanted]
    matches = [run for run in sorted(known) if wanted and wanted in run]
    if len(matches) == 1:
        return matches
    if matches:
        last = ", ".join(matches[-3:])
        raise ConfigError(f"run={text}: in the ids of {len(matches)} runs {where}, the last are {last}")
    near = difflib.get_close_matches(wanted[:255], known, n=1)
    hint = f"did you mean {near[0]}?" if near else _for_example(known)
    raise ConfigError(f"run={text}: no such run {where}; {hint}")


def _for_example(known: Collection[str]) -> str:
    return f"the newest is {max(known)}" if known else "there are none"


def run_refs(project: Path) -> dict[str, str]:
    """The commit of every run that this repository has a ref of, by id. Raises GitError."""
    return attempt(project, _refs_here)


# --- Pushing ---------------------------------------------------------------------------------------------


def plan_push(
    project: Path, remote: str, key: str = "runs", text: str | None = None, allow: Sequence[str] = ()
) -> Push:
    """What a push of the chosen runs would bring to the remote. Writes nothing.

    `allow` are paths, or patterns of paths, of findings that are none. Raises ConfigError for a choice that
    means nothing, GitError if the remote cannot be reached.
    """

    def plan(git: Git) -> Push:
        here = _refs_here(git)
        chosen = choose_ids(key, text, here, "here")
        address = git.line("remote", "get-url", "--push", remote)
        everything = _refs_at(git, address)
        there = {
            name.removeprefix(REF_PREFIX): sha
            for name, sha in everything.items()
            if name.startswith(REF_PREFIX)
        }
        known = _known(git, everything.values())
        moves = [_move(git, run, here[run], there.get(run), known, push=True) for run in chosen]
        push = Push(remote, moves)
        # What the remote was seen to have at other times counts as well: it came from there, or went there.
        seen = git.line("for-each-ref", "--format=%(objectname)", f"refs/remotes/{remote}/").split()
        _look_through(git, push, known | set(seen), allow)
        return push

    return attempt(project, plan)


def push_runs(project: Path, push: Push) -> list[str]:
    """Push what was planned, the very commits that were looked through; a line for each that was refused.

    Raises GitError if the remote cannot be reached.
    """

    def work(git: Git) -> list[str]:
        refused = []
        for part in _parts(push.to_go):
            refspecs = [f"{move.here}:{REF_PREFIX}{move.id}" for move in part]
            options = ("--porcelain", "--no-follow-tags", "--recurse-submodules=no")
            told = git.talk("push", *options, push.remote, *refspecs, fine=1)
            became = {f"{REF_PREFIX}{move.id}": "the push ended before it" for move in part}
            for line in told.decode(errors="replace").splitlines():
                flag, _, rest = line.partition("\t")
                names, _, why = rest.partition("\t")
                name = names.partition(":")[2]
                if name in became and flag != "!":
                    del became[name]
                elif name in became:
                    became[name] = why
            refused += [f"{name}: {why}" for name, why in became.items()]
        return refused

    return attempt(project, work)


def _look_through(git: Git, push: Push, has: Collection[str], allow: Sequence[str]) -> None:
    """Fill in what the push would bring to a remote that `has` these commits."""
    tips = [f"{move.here}" for move in push.to_go]
    if not tips:
        return
    wanted = "\n".join([*tips, *(f"^{sha}" for sha in sorted(has))]).encode() + b"\n"
    listed = git("rev-list", "--objects", "--stdin", stdin=wanted, timeout_s=_PATIENCE_S)
    named = dict(line.partition(b" ")[::2] for line in listed.splitlines())
    places = _places(git, wanted)
    push.own_commits = sum(email != _OWN_EMAIL for email in places.commits.values())
    findings: list[Finding] = []
    for path, commit in places.first.items():
        reason = secret_name(path)
        if reason is not None:
            findings.append(Finding(path, None, reason.removeprefix("likely secret: "), commit))
    for sha, kind, content in _contents(git, list(named)):
        if kind == b"blob":
            push.files += 1
            path, commit = places.of.get(sha, (shown(named[sha.encode()]), tips[0]))
        else:
            path, commit = MESSAGE, sha
        findings += [Finding(path, line, f"contains {what}", commit) for what, line in secrets_in(content)]
    for finding in findings:
        fine = any(fnmatchcase(finding.path, pattern) for pattern in allow)
        (push.allowed if fine else push.findings).append(finding)


@dataclass(slots=True)
class _Places:
    """Where in a history things are: `of` a blob its path and first commit, `first` commit by path.

    `commits` have the e-mail address of their author.
    """

    of: dict[str, tuple[str, str]] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=dict)


def _places(git: Git, wanted: bytes) -> _Places:
    """All paths that the commits bring, the oldest commit first, against each of their parents."""
    places = _Places()
    options = (
        "--raw",
        "-z",
        "-r",
        "-m",
        "--root",
        "--no-abbrev",
        "--no-renames",
        "--reverse",
        "--topo-order",
    )
    told = git(
        "log",
        "--no-show-signature",
        *options,
        "--format=%x01%H %ae",
        "--stdin",
        stdin=wanted,
        timeout_s=_PATIENCE_S,
    )
    commit = ""
    fields = iter(told.split(b"\0"))
    for each in fields:
        text = each.lstrip(b"\n")
        if text.startswith(b"\x01"):
            commit, _, email = text[1:].decode(errors="replace").partition(" ")
            places.commits[commit] = email
        elif text.startswith(b":"):
            _, mode, _, blob, _ = text.split(b" ", 4)
            path = shown(next(fields))
            if mode not in (b"000000", b"160000"):  # removed; a submodule
                places.of.setdefault(blob.decode(), (path, commit))
                places.first.setdefault(path, commit)
    return places


def _contents(git: Git, objects: Sequence[bytes]) -> Iterator[tuple[str, bytes, bytes]]:
    """Name, type and content of the blobs and commits among the objects."""
    told = git("cat-file", "--batch-check", stdin=b"\n".join(objects) + b"\n", timeout_s=_PATIENCE_S)
    batch: list[bytes] = []
    total = 0
    for line in [*told.splitlines(), b""]:
        sha, kind, size = line.split() if line else (b"", b"", b"0")
        if batch and (not line or total + int(size) > _AT_ONCE):
            yield from _read(
                git("cat-file", "--batch", stdin=b"\n".join(batch) + b"\n", timeout_s=_PATIENCE_S)
            )
            batch, total = [], 0
        if kind in (b"blob", b"commit"):
            batch.append(sha)
            total += int(size)


def _read(data: bytes) -> Iterator[tuple[str, bytes, bytes]]:
    start = 0
    while start < len(data):
        end = data.index(b"\n", start)
        sha, kind, size = data[start:end].split()
        yield sha.decode(), kind, data[end + 1 : end + 1 + int(size)]
        start = end + 2 + int(size)


# --- Fetching --------------------------------------------------------------------------------------------


def fetch_runs(project: Path, remote: str, key: str = "runs", text: str | None = None) -> list[Move]:
    """Fetch the chosen runs of the remote; what became of each. No ref here is moved but forward.

    Raises ConfigError for a choice that means nothing, GitError if the remote cannot be reached.
    """

    def fetch(git: Git) -> list[Move]:
        found = _refs_at(git, remote, f"{REF_PREFIX}*")
        there = {name.removeprefix(REF_PREFIX): sha for name, sha in found.items()}
        there = {run: sha for run, sha in there.items() if safe_name(run) == run}
        here = _refs_here(git)
        chosen = choose_ids(key, text, there, f"at {remote}")
        wanted = [run for run in chosen if here.get(run) != there[run]]
        options = ("--no-tags", "--no-prune", "--no-write-fetch-head", "--no-recurse-submodules", "--quiet")
        for part in _parts(wanted):
            # Without a plus git itself lets a ref only move forward; it exits with 1 for those it left alone.
            refspecs = [f"{REF_PREFIX}{run}:{REF_PREFIX}{run}" for run in part]
            git.talk("fetch", *options, remote, *refspecs, fine=1)
        now = _refs_here(git)
        known = _known(git, there.values())
        return [_fetched(git, run, here.get(run), there[run], now.get(run), known) for run in chosen]

    return attempt(project, fetch)


def _fetched(
    git: Git, run: str, before: str | None, there: str, now: str | None, known: Collection[str]
) -> Move:
    if before != there and now == there:
        return Move(run, now, there, NEW if before is None else MOVED)
    move = _move(git, run, now, there, known, push=False)
    if move.state in (NEW, MOVED):
        raise GitError(f"`git fetch` did not bring {REF_PREFIX}{run}; try again", final=True)
    return move


# --- Refs ------------------------------------------------------------------------------------------------


def _refs_here(git: Git) -> dict[str, str]:
    told = git.line("for-each-ref", "--format=%(objectname) %(refname)", REF_PREFIX)
    pairs = (line.split(" ", 1) for line in told.splitlines())
    return {name.removeprefix(REF_PREFIX): sha for sha, name in pairs}


def _refs_at(git: Git, remote: str, *patterns: str) -> dict[str, str]:
    """The refs of a remote repository, by full name."""
    try:
        told = git.talk("ls-remote", "--refs", remote, *patterns).decode(errors="replace")
    except GitError as error:
        raise GitError(f"the remote cannot be reached: {error}", final=True) from None
    pairs = (line.split("\t", 1) for line in told.splitlines() if "\t" in line)
    return {name: sha for sha, name in pairs}


def _known(git: Git, shas: Collection[str]) -> set[str]:
    """Those of the commits that are here."""
    wanted = sorted(set(shas))
    if not wanted:
        return set()
    told = git("cat-file", "--batch-check", stdin="\n".join(wanted).encode() + b"\n").decode()
    return {sha for sha, line in zip(wanted, told.splitlines(), strict=True) if line.split()[1] != "missing"}


def _move(
    git: Git, run: str, here: str | None, there: str | None, known: Collection[str], push: bool
) -> Move:
    """What becomes of a ref: of one that is pushed, or of one that was not moved by a fetch."""
    source, target = (here, there) if push else (there, here)
    if source == target:
        return Move(run, here, there, EQUAL)
    if target is None:
        return Move(run, here, there, NEW)
    state: State = ELSEWHERE
    if source is not None and {source, target} <= {*known, here}:
        if _leads_to(git, target, source):
            state = MOVED
        elif _leads_to(git, source, target):
            state = BEHIND
    return Move(run, here, there, state)


def _leads_to(git: Git, early: str, late: str) -> bool:
    base = git("merge-base", early, late, fine=1).decode().strip()
    return base == early


def _parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for first in range(0, len(items), _REFS_AT_ONCE):
        yield items[first : first + _REFS_AT_ONCE]
