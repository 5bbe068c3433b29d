"""A profile's digests, as this machine computes them: `python scripts/golden.py profile=NAME [--write]`.

They are compared with those in the profile's file in `conf/determinism/`; status 1 says that some differ.
`--write` puts them there. That makes this machine the measure of the class, so do it only after a change of
the parts or of a library's version, on a machine that passed before the change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rltemplate.config.command_args import parse_words, readable  # noqa: E402
from rltemplate.types import ConfigError  # noqa: E402

HERE, WRITE = "--here", "--write"


def profile_file(name: str) -> Path:
    """The file of `conf/determinism/` that describes the profile."""
    import yaml

    from rltemplate.config.validation import choose

    levels = (ROOT / "conf" / "determinism").glob("*.yaml")
    found = {yaml.safe_load(path.read_text()).get("profile"): path for path in levels}
    found.pop(None, None)
    if name not in found:
        raise ConfigError(f"profile={name}: {choose(name, found)}")
    return found[name]


def measured(level: str) -> dict[str, str]:
    """The digests, by a process that is prepared as a run's is."""
    from rltemplate.config.cli.preflight import preflight
    from rltemplate.config.loading import to_dict
    from rltemplate.determinism.switches import prepared

    (config,) = preflight([f"determinism={level}", "local=null"]).configs
    environment = prepared(os.environ, config.determinism, config.num_threads)
    command = [sys.executable, "-P", str(Path(__file__).resolve()), HERE]
    text = json.dumps(to_dict(config))
    done = subprocess.run(command, input=text, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode == 2:
        raise SystemExit(2)  # it has said why
    done.check_returncode()
    digests: dict[str, str] = json.loads(done.stdout)
    return digests


def here() -> dict[str, str]:
    """The digests of this process, whose configuration is on standard input."""
    from rltemplate.config.loading import from_dict
    from rltemplate.determinism import golden, switches

    try:
        config = from_dict(json.load(sys.stdin))
    except ValueError:
        raise ConfigError(f"{HERE} is for a process that this command starts itself") from None
    switches.apply(config.determinism, config.num_threads, device=config.device.name)
    return golden.digests()


def write(path: Path, digests: dict[str, str]) -> None:
    """Replace the file's digests, which are the last it says."""
    from rltemplate.determinism.golden import PARTS
    from rltemplate.determinism.machine import machine_facts

    facts = machine_facts(with_gpus=False)
    versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("torch", "numpy", "mujoco"))
    lines = [f"golden: # recorded on {facts['cpu']}, {facts['libc']}, {versions}"]
    lines += [f'  {part}: "{digest}" # {PARTS[part][0]}' for part, digest in digests.items()]
    before, _, _ = path.read_text().partition("\ngolden:")
    path.write_text(before + "\n" + "\n".join(lines) + "\n")


def main(argv: list[str]) -> int:
    """Compare, and write if asked to."""
    try:
        if argv == [HERE]:
            print(json.dumps(here()))
            return 0
        given = parse_words(argv, {"profile": str}, required=["profile"], flags=[WRITE])
        path = profile_file(given["profile"])
        digests = measured(path.stem)
    except ConfigError as error:
        print(f"error: {readable(str(error), argv)}", file=sys.stderr)
        return 2
    import yaml

    golden = yaml.safe_load(path.read_text())["golden"]
    for part, digest in digests.items():
        print(f"{part:20}{digest}  {'same' if golden.get(part) == digest else 'differs'}")
    same: bool = golden == digests
    if WRITE in given and not same:
        write(path, digests)
        print(f"written to {path.relative_to(ROOT)}")
        return 0
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
