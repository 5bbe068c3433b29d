"""How much an experiment varies: `python scripts/noise.py algo=ppo env=CartPole [seeds=5] [--json]`.

All other words are overrides, as for training. One seed is run twice and each of the seeds once. Exit status:
0 measured, 1 a run failed or one seed gave two results where the level forbids it, 2 it cannot be asked.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# Until there are processes to end there is nothing to do for Ctrl-C but to go.
signal.signal(signal.SIGINT, lambda *_: os._exit(130))
# The code that lies beside this file, whichever copy is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rltemplate import journal, noise  # noqa: E402
from rltemplate.children import Interrupted  # noqa: E402
from rltemplate.types import ConfigError, RunError  # noqa: E402
from rltemplate.words import readable  # noqa: E402


def main(argv: list[str]) -> int:
    """Print a line per run, then what was found; with --json that alone is on standard output."""
    as_json = "--json" in argv
    work = None
    try:
        question = noise.ask([word for word in argv if word != "--json"])
        config = question.config
        for note in config.algo.notes(config.env.num_envs, config.total_env_steps):
            print(f"note: {note}", file=sys.stderr)
        with _progress(as_json) as (say, begun):
            work = noise.Noise(question, [*sys.argv[:1], *argv], say=say, begun=begun)
            document = work.run()
    except ConfigError as error:
        print(f"error: {readable(str(error), argv)}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Interrupted as stopped:
        made = f"; what was made until then is in {work.folder}" if work and work.folder.exists() else ""
        print(f"interrupted, so nothing is measured{made}", file=sys.stderr)
        return 128 + stopped.number
    if config.logger.journal:
        journal.write_noise(document, Path(config.runs_dir).expanduser())
    print(json.dumps(document) if as_json else f"\n{noise.report(document)}")
    return 0 if document["holds"] else 1


@contextlib.contextmanager
def _progress(as_json: bool) -> Iterator[tuple[noise.Say, noise.Begun]]:
    """A bar on a terminal that can move its cursor, plain lines elsewhere."""
    out = sys.stderr if as_json else sys.stdout
    if not out.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda line: print(line, file=out, flush=True), lambda name, number, count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=out)) as progress:
        task = progress.add_task("noise", total=None)

        def begun(name: str, number: int, count: int) -> None:
            progress.update(task, description=name, completed=number - 1, total=count)

        def say(line: str) -> None:
            progress.advance(task)
            progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield say, begun


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
