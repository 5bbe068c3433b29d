"""The certificate of a proof as files: JSON for programs, and a page of plain text for people."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

JSON, TEXT = "certificate.json", "certificate.txt"
_WIDTH = 110


def write(certificate: Mapping[str, Any], folders: Sequence[Path]) -> None:
    """Both files into each of the folders that are there."""
    document, text = json.dumps(certificate, indent=2, allow_nan=False) + "\n", as_text(certificate)
    for folder in folders:
        if folder.is_dir():  # a run that was refused has none
            (folder / JSON).write_text(document, encoding="utf-8")
            (folder / TEXT).write_text(text, encoding="utf-8")


def as_text(certificate: Mapping[str, Any]) -> str:
    """The certificate for people, the verdict first."""
    asked, machine, git = certificate["asked"], certificate["machine"], certificate["git"]
    lines = [certificate["sentence"]]
    inverse = certificate["inverse"]
    if inverse is not None:
        lines.append(_capital(inverse["sentence"]))
    lines += [f"({problem})" for problem in certificate["problems"][1:]]

    def section(title: str, texts: Sequence[str]) -> None:
        lines.append("")
        for i, text in enumerate(texts):
            start = f"{title if i == 0 else '':10}"
            wrapped = textwrap.wrap(
                text, _WIDTH, initial_indent=start, subsequent_indent=" " * 12, break_on_hyphens=False
            )
            lines.extend(wrapped or [start.rstrip()])

    config = asked["config"]
    steps = f"{config['total_env_steps']:,} environment steps, seed {config['seed']}"
    if asked["shortened_from"] is not None:
        steps += f"; shortened from {asked['shortened_from']:,}, total_env_steps= sets another length"
    section("asked", [" ".join(asked["overrides"]), steps])
    section("runs", [_run_line(run) for run in certificate["runs"]] or ["none, for a check failed before"])
    section("checks", list(_check_lines(certificate)))
    if inverse is None:
        section("inverse", ["not tried, since the level is broken"])
    else:
        seen = [
            f"{each['what']} {'fails' if each['fails'] else 'passes'}: {each['seen']}"
            for each in inverse["seen"]
        ]
        section("inverse", [f"without it ({inverse['without']}):", *seen])
        section("", [_run_line(run) for run in inverse["runs"]])
    settings = [
        f"{key} {value if isinstance(value, str) else json.dumps(value)}"
        for key, value in certificate["settings"].items()
    ]
    section("settings", [", ".join(settings)])
    known = [name for name in ("torch", "numpy", "gymnasium", "mujoco") if name in certificate["versions"]]
    section("versions", [", ".join(f"{name} {certificate['versions'][name]}" for name in known)])
    cpu = f"{machine.get('cpu')}, {machine.get('usable_cores')} cores usable"
    section("machine", [f"{cpu}, {machine.get('os')}, Python {machine.get('python')}"])
    state = {True: "with changes", False: "unchanged", None: "unknown"}[git.get("dirty")]
    commit = f"commit {git['commit']}, " if git.get("commit") else ""
    section("code", [f"{commit}on {git.get('base_commit') or 'no commit'} {state}"])
    section("folder", [certificate["folder"], certificate["date"]])
    if certificate["report"] is not None:
        lines += ["", f"Where {_names(certificate['comparison'])} part", "", certificate["report"]]
    return "\n".join(lines) + "\n"


def _run_line(run: Mapping[str, Any]) -> str:
    words = ", ".join(run["disturbances"]) or "undisturbed"
    if run["status"] != "finished":
        return f"{run['name']}  {run['status']}: {run['error']}; {words}"
    facts = f"digest {run['digest']}, {run['iterations']:,} iterations, {run['seconds']:.0f} s"
    return f"{run['name']}  {facts}; {words}"


def _check_lines(certificate: Mapping[str, Any]) -> Iterator[str]:
    for name, found in certificate["checks"].items():
        tried = [
            f"{key} {', '.join(map(str, value)) if isinstance(value, list) else value}"
            for key, value in found.items()
            if key not in ("holds", "problem")
        ]
        yield "; ".join([f"{name}: {'holds' if found['holds'] else found['problem']}", *tried])
    finished = [run for run in certificate["runs"] if run["status"] == "finished"]
    if len(finished) > 1:
        verdict = "differ" if certificate["comparison"] is not None else "identical in every digest"
        yield f"traces: {len(finished)}, {verdict}, trace={certificate['asked']['config']['trace']}"
    ratio = certificate["ratio"]
    if ratio is not None and ratio["values"]:
        yield f"ratio: {ratio['metric']} at most {ratio['largest']:g} in {ratio['values']:,} values"
    elif ratio is not None and finished:
        yield f"ratio: the algorithm does not report {ratio['metric']}"


def _names(comparison: Mapping[str, Any]) -> str:
    return " and ".join(Path(comparison[side]["run_dir"]).name for side in "ab")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
