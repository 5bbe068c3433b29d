"""`make diff`: what was changed between two runs."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from rltemplate.analysis import diff
from rltemplate.analysis.runs import load_run
from rltemplate.config.command_args import flag, one_of, word
from rltemplate.run.git import changes
from rltemplate.run.paths import PROJECT
from rltemplate.run.read import find_run

SHORT = 200  # lines of a diff that is shown unasked


@dataclass(frozen=True, kw_only=True)
class Args:
    """Changes between two runs, counted: a=RUN b=RUN [code=full|names|none].

    Configuration, code, versions, hardware and settings that differ, the last metrics side by side, and the
    number of things that were changed; a warning if they are more than one. `code=full` shows the whole diff
    of the two snapshots, `names` the files; by default a short diff, and of a long one the names.
    --json prints one object; its `diff` is the text, null unless code=full.
    """

    a: str = word()
    b: str = word()
    code: str | None = word(one_of("full", "names", "none"), None)
    runs_dir: Path = word(Path, Path("runs"))
    json: bool = flag()


def main(args: Args) -> int:
    """Print what differs, and how many things that are."""
    a, b = (load_run(find_run(text, args.runs_dir, key)) for key, text in (("a", args.a), ("b", args.b)))
    found = diff.diff_runs(a, b, PROJECT)
    text = None
    if found.changed_files and (args.code == "full" or (args.code is None and not args.json)):
        color = sys.stdout.isatty() and not args.json
        text = changes.text_between(PROJECT, a.recorded["git"], b.recorded["git"], color)
    if args.json:
        print(json.dumps(diff.to_dict(found) | {"diff": text}, default=str))
    else:
        print(diff.report(found, _code(found, args.code, text)))
    return 0


def _code(found: diff.RunDiff, wanted: str | None, text: str | None) -> str | None:
    """The code's part of the report: the diff, None for the names of the files, or a sentence."""
    if wanted == "none":
        return "  not shown"
    if wanted is None and text is not None and text.count("\n") > SHORT:
        return f"{diff.file_names(found)}\n  code=full shows the {len(text.splitlines()):,} lines of the diff"
    return text if text is None else text.rstrip("\n")
