"""The groups of `conf/`, and what each of them has to offer."""

from __future__ import annotations

import yaml

from rltemplate.config.loading import CONF

# Groups of which none may be chosen, and the name that choice has where a name is needed.
OPTIONAL = ("recipe", "experiment", "debug", "local")
# Of these the name that was applied is a value of the configuration.
NAMED = ("recipe", "experiment")
NONE = "none"
# Hydra's own that can be chosen.
HYDRA_GROUPS = ("hydra/launcher", "hydra/sweeper")


def group_names() -> list[str]:
    """The groups that a user chooses from."""
    return sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")


def option_names(group: str) -> list[str]:
    """The files of a group; a leading underscore marks what others build on."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if not path.name.startswith("_"))


def default_option(group: str) -> str:
    """What conf/config.yaml chooses where the user does not."""
    defaults = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    return next(str(entry[group]) for entry in defaults if isinstance(entry, dict) and group in entry)
