"""`make prove`: a determinism level put to the test."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from rltemplate.config.command_args import flag, program, rest
from rltemplate.launch.subprocesses import Interrupted
from rltemplate.rerun import certificate, prove


@dataclass(frozen=True, kw_only=True)
class Args:
    """Proof that a level holds here: algo=ppo env=Hopper determinism=repeat [times=5].

    All other words are overrides, as for training.
    Exit status: 0 it holds, 1 it is broken, 2 it cannot be asked.
    """

    words: list[str] = rest(options=True)
    json: bool = flag()


def main(args: Args) -> int:
    """Print a line per run, then the certificate; with --json that alone is on standard output."""
    question = prove.ask(args.words)
    for note in question.config.algo.notes(question.config.env.num_envs, question.config.total_env_steps):
        print(f"note: {note}", file=sys.stderr)
    out = sys.stderr if args.json else sys.stdout
    proof = prove.Proof(question, program(), say=lambda line: print(line, file=out, flush=True))
    try:
        document = proof.run()
    except Interrupted as stopped:
        if proof.folder.exists():
            stopped.notes.append(f"what was made until then is in {proof.folder}")
        raise
    print(json.dumps(document) if args.json else f"\n{certificate.as_text(document)}", end="\n" * args.json)
    return 0 if document["verdict"] == prove.HOLDS else 1
