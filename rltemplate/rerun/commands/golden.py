"""A profile's digests as this machine computes them, against those in `conf/determinism/`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import yaml

from rltemplate.config.command_args import flag, word
from rltemplate.config.loading import CONF, from_dict, to_dict
from rltemplate.config.validation import choose
from rltemplate.run.job import PROJECT
from rltemplate.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Args:
    """Digests of a profile as this machine computes them: profile=NAME [--write].

    `--write` puts them into the profile's file, which makes this machine the measure of its class: only after
    a change of the parts or of a library's version, on a machine that passed before the change.
    Exit status: 0 all are the same, 1 some differ.
    """

    profile: str = word()
    write: bool = flag("--write")


def main(args: Args) -> int:
    """Compare, and write if asked to."""
    files = {
        yaml.safe_load(path.read_text()).get("profile"): path for path in CONF.glob("determinism/*.yaml")
    }
    files.pop(None, None)
    if args.profile not in files:
        raise ConfigError(f"profile={args.profile}: {choose(args.profile, files)}")
    path = files[args.profile]
    golden, digests = yaml.safe_load(path.read_text())["golden"], _measured(path.stem)
    for part, digest in digests.items():
        print(f"{part:20}{digest}  {'same' if golden.get(part) == digest else 'differs'}")
    if args.write and golden != digests:
        _write(path, digests)
        print(f"written to {path}")
        return 0
    return 0 if golden == digests else 1


def _measured(level: str) -> dict[str, str]:
    """The digests, by a process that is prepared as a run's is."""
    from rltemplate.config.cli.preflight import preflight
    from rltemplate.determinism.levels import prepared

    (config,) = preflight([f"determinism={level}", "local=null"]).configs
    environment = prepared(os.environ, config.determinism, config.num_threads)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PROJECT), environment.get("PYTHONPATH")]))
    command, text = [sys.executable, "-P", "-m", __name__], json.dumps(to_dict(config))
    done = subprocess.run(command, input=text, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode == 2:
        raise SystemExit(2)  # it has said why
    done.check_returncode()
    digests: dict[str, str] = json.loads(done.stdout)
    return digests


def _write(path: Path, digests: dict[str, str]) -> None:
    """Replace the file's digests, which are its last key."""
    from rltemplate.determinism.golden import PARTS
    from rltemplate.determinism.machine import machine_facts

    facts = machine_facts()
    versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("torch", "numpy", "mujoco"))
    lines = [f"golden: # recorded on {facts['cpu']}, {facts['libc']}, {versions}"]
    lines += [f'  {part}: "{digest}" # {PARTS[part][0]}' for part, digest in digests.items()]
    before, _, _ = path.read_text().partition("\ngolden:")
    path.write_text(before + "\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    from rltemplate.determinism import golden, switches

    config = from_dict(json.load(sys.stdin))
    try:
        switches.apply(config.determinism, config.num_threads, device=config.device.name)
        print(json.dumps(golden.digests()))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
