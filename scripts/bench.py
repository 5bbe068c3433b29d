#!/usr/bin/env python3
"""Speed side by side: `python scripts/bench.py [only=peers,time] [seconds=15] [repetitions=3] [quick=true]`.

    peers      training against Stable-Baselines3 and SBX: the same work on the same cores
    time       where the time of training goes
    floor      what products of matrices and the simulation take at the least
    levels     what a level of determinism costs
    observers  what looking at a run costs
    scaling    environments, threads
    memory     of a replay buffer, against Stable-Baselines3's
    startup    from the command to the first step

Writes bench.json, bench.md and a picture to `out`. An interrupted bench goes on when it is started again;
`fresh=true` measures everything anew. Exit status: 0 measured, 1 something failed, 2 wrong words.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

# Until there are processes to end there is nothing to do for Ctrl-C but to go.
signal.signal(signal.SIGINT, lambda *_: os._exit(130))
# The code that lies beside this file, whichever copy is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rltemplate.bench import goals, measure, plots  # noqa: E402
from rltemplate.bench.distance import Distance  # noqa: E402
from rltemplate.bench.plan import PARTS, Part, Sizes, affordable_cores, plan  # noqa: E402
from rltemplate.bench.session import ONE, Processes, Session  # noqa: E402
from rltemplate.bench.works import Job, MeasurementError  # noqa: E402
from rltemplate.children import Children, Interrupted  # noqa: E402
from rltemplate.types import ConfigError  # noqa: E402
from rltemplate.words import Kinds, finite, make_folder, one_of, parse_words, readable, several, whole  # noqa: E402


def main(argv: list[str]) -> int:
    """Measure, print and write the tables."""
    if argv[:1] == [ONE] and len(argv) == 2:
        return one(argv[1])
    kinds: Kinds = {
        "only": several(one_of(*PARTS)),
        "cores": several(whole(1, len(affordable_cores()))),
        "repetitions": whole(1),
        "seconds": finite,
        "device": one_of("cpu", "cuda"),
        "quick": one_of("true", "false"),
        "fresh": one_of("true", "false"),
        "out": str,
    }
    try:
        given = parse_words(argv, kinds)
        quick, out = given.get("quick") == "true", Path(given.get("out", "results"))
        most = min(2, len(affordable_cores()))
        sizes = Sizes(
            seconds=given.get("seconds", 2.0 if quick else 15.0),
            repetitions=given.get("repetitions", 1 if quick else 3),
            cores=tuple(given.get("cores", [most] if quick else range(1, most + 1))),
            device=given.get("device", "cpu"),
            quick=quick,
        )
        make_folder("out", out)
        name = "bench-quick" if quick else "bench"
        children = Children()
        with tempfile.TemporaryDirectory() as scratch, _progress() as (say, begun, planned):
            run = Processes(children, Path(scratch))
            distance = Distance(affordable_cores(), Path(scratch))
            fresh = given.get("fresh") == "true"
            session = Session(out / f"{name}.json", sizes, run, say, begun, fresh, distance)
            parts = plan(given.get("only", list(PARTS)), sizes)  # seconds, so what is refused comes first
            planned(sum(len(session.todo(part)) for part in parts))
            with children.listening():
                failures = measure_all(session, parts, out / name)
    except ConfigError as error:
        print(f"error: {readable(str(error), argv)}", file=sys.stderr)
        return 2
    except Interrupted as stopped:
        print("interrupted; the same command goes on with what is missing", file=sys.stderr)
        return 128 + stopped.number
    print("\n" + goals.document(session.document))
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


def measure_all(session: Session, parts: list[Part], stem: Path) -> list[str]:
    """Part after part; whatever ends it, tables and picture say what has been measured until then."""
    failures: list[str] = []
    try:
        for part in parts:
            failures += session.measure(part)
    finally:
        stem.with_suffix(".md").write_text(goals.document(session.document), encoding="utf-8")
        plots.draw(session.document, stem)
    return failures


def one(text: str) -> int:
    """The measurement of this process."""
    asked = json.loads(text)
    measure.pin(asked["cores"])
    try:
        result = measure.measure(Job.from_dict(asked["job"]), asked["begun"])
    except (ConfigError, MeasurementError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


Progress = tuple[Callable[[str], None], Callable[[str], None], Callable[[int], None]]


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on a terminal that can move its cursor, plain lines elsewhere."""
    out = sys.stdout
    if not out.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda line: print(line, file=out, flush=True), lambda name: None, lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=out)) as progress:
        task = progress.add_task("bench", total=None)

        def say(line: str) -> None:
            if "/" in line.partition(" ")[0]:  # a measurement, and no note
                progress.advance(task)
            progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield (
            say,
            lambda name: progress.update(task, description=name),
            lambda count: progress.update(task, total=count),
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
