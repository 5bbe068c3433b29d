"""`make prove`: a determinism level put to the test."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rltemplate.config.command_args import flag, program, rest, whole, word
from rltemplate.launch.subprocesses import Interrupted
from rltemplate.rerun import prove
from rltemplate.rerun.certificate import HOLDS
from rltemplate.rerun.proof_config import parse


@dataclass(frozen=True, kw_only=True)
class Args:
    """Proof that a level holds here: algo=ppo env=Hopper determinism=repeat [times=5].

    All other words are overrides, as for training.
    Exit status: 0 it holds, 1 it is broken, 2 it cannot be asked.
    """

    words: list[str] = rest(options=True)
    times: int = word(whole(2, 1000), 5)
    json: bool = flag()


def main(args: Args) -> int:
    """Print a line per run, then the certificate; with --json that alone is on standard output."""
    asked = parse(args.words, args.times)
    out = sys.stderr if args.json else sys.stdout
    proof = prove.Proof(asked, program(), say=lambda line: print(line, file=out, flush=True))
    try:
        certificate = proof.run()
    except Interrupted as stopped:
        if proof.folder.exists():
            stopped.notes.append(f"what was made until then is in {proof.folder}")
        raise
    print(certificate.to_json() if args.json else f"\n{certificate.to_text()}", end="\n" * args.json)
    return 0 if certificate.verdict == HOLDS else 1
