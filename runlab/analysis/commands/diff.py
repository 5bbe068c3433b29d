"""`make diff`: the changes between two runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runlab.analysis.differences import CODE, MACHINE, SECTIONS, diff_runs, listed, verdict
from runlab.analysis.runs import NOTHING, Run, cell, load_run, single_line
from runlab.config.command_args import argument, one_of, runs_folder
from runlab.run.git import changes
from runlab.run.paths import PROJECT
from runlab.run.read import find_run


@dataclass(frozen=True, kw_only=True)
class Args:
    """Changes between two runs, counted: a=RUN b=RUN [code=full].

    Configuration, code, versions, hardware and settings that differ, the last metrics side by side, and the
    number of things that were changed; a warning if they are more than one. `code=full` shows the diff of the
    two snapshots in place of the names of the files.
    """

    a: str = argument()
    b: str = argument()
    code: str = argument(one_of("names", "full"), "names")
    runs_dir: Path = argument(runs_folder, Path("runs"))


def main(args: Args) -> int:
    """Print the differences, and in the last line the number of changes."""
    a, b = (load_run(find_run(text, args.runs_dir, key)) for key, text in (("a", args.a), ("b", args.b)))
    diff, text = diff_runs(a, b), None
    if diff.changed_files and args.code == "full":
        text = changes.text_between(PROJECT, a.record.git, b.record.git)
    print(f"a  {a.id}\nb  {b.id}")
    for section in SECTIONS:
        full = text if section == CODE else None
        differences = [
            one for one in diff.differences if not (full and one.key in (diff.changed_files or ()))
        ]
        shown = list(listed(differences, section))
        if section == MACHINE and diff.computation is not None:
            shown.insert(0, f"  computes {diff.computation}")
        nothing = "not recorded" if section in diff.not_recorded else "equal"
        print("", section if shown or full else f"{section}: {nothing}", sep="\n")
        if full:
            print(full)
        print(*(f"{line}\n" for line in shown), sep="", end="")
    rows = [("", "a", "b"), *_metrics(a, b)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("\nmetrics at the end")
    for name, *values in rows:
        print(f"  {name:{widths[0]}}  {values[0]:>{widths[1]}}  {values[1]:>{widths[2]}}")
    print("", *(f"note: {single_line(note)}" for note in diff.notes), verdict(diff), sep="\n")
    return 0


def _metrics(a: Run, b: Run) -> Iterator[tuple[str, str, str]]:
    metrics = {**(a.record.final_metrics or a.last_row), **(b.record.final_metrics or b.last_row)}
    names = [name for name in ("eval/return", *metrics) if name not in ("env_steps", "wall_time_s")]
    for name in dict.fromkeys(("steps", *names, "duration")):
        if (values := (cell(a, name), cell(b, name))) != (NOTHING, NOTHING):
            yield single_line(name), *values
