"""Whether a level holds here: `python scripts/prove.py algo=ppo env=Hopper determinism=repeat [times=5]`.

All other words are overrides, as for training. Exit status: 0 it holds, 1 it is broken, 2 it cannot be asked.
"""

import json
import os
import signal
import sys
from pathlib import Path

# Until there are processes to end there is nothing to do for Ctrl-C but to go.
signal.signal(signal.SIGINT, lambda *_: os._exit(130))
# The code that lies beside this file, whichever copy is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rltemplate.config.command_args import readable  # noqa: E402
from rltemplate.launch.subprocesses import Interrupted  # noqa: E402
from rltemplate.rerun import certificate, prove  # noqa: E402
from rltemplate.types import ConfigError  # noqa: E402


def main(argv: list[str]) -> int:
    """Print a line per run, then the certificate; with --json that alone is on standard output."""
    as_json = "--json" in argv
    proof = None

    def say(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    try:
        question = prove.ask([word for word in argv if word != "--json"])
        for note in question.config.algo.notes(question.config.env.num_envs, question.config.total_env_steps):
            print(f"note: {note}", file=sys.stderr)
        proof = prove.Proof(question, [*sys.argv[:1], *argv], say=say)
        document = proof.run()
    except ConfigError as error:
        print(f"error: {readable(str(error), argv)}", file=sys.stderr)
        return 2
    except Interrupted as stopped:
        made = f"; what was made until then is in {proof.folder}" if proof and proof.folder.exists() else ""
        print(f"interrupted, so nothing is proved{made}", file=sys.stderr)
        return 128 + stopped.number
    print(json.dumps(document) if as_json else f"\n{certificate.as_text(document)}", end="\n" * as_json)
    return 0 if document["verdict"] == prove.HOLDS else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
