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


@dataclass(frozen=True, kw_only=True)
class Args:
    """Changes between two runs, counted: a=RUN b=RUN [code=full].

    Configuration, code, versions, hardware and settings that differ, the last metrics side by side, and the
    number of things that were changed; a warning if they are more than one. `code=full` shows the diff of the
    two snapshots in place of the names of the files.
    --json prints one object; its `diff` is the text, null unless code=full.
    """

    a: str = word()
    b: str = word()
    code: str = word(one_of("names", "full"), "names")
    runs_dir: Path = word(Path, Path("runs"))
    json: bool = flag()


def main(args: Args) -> int:
    """Print what differs, and how many things that are."""
    a, b = (load_run(find_run(text, args.runs_dir, key)) for key, text in (("a", args.a), ("b", args.b)))
    found = diff.diff_runs(a, b, PROJECT)
    text = None
    if found.changed_files and args.code == "full":
        color = sys.stdout.isatty() and not args.json
        text = changes.text_between(PROJECT, a.recorded["git"], b.recorded["git"], color)
    if args.json:
        print(json.dumps(diff.to_dict(found) | {"diff": text}, default=str))
    else:
        print(diff.report(found, text))
    return 0
