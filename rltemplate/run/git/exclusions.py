"""Which files of a work tree are left out of a run's snapshot, and why.

A snapshot is a git commit that may be pushed one day, so likely secrets never enter it. The rules:

* A *new* file (not in the base commit) is left out when its name is in `SECRET_NAMES`, when it lies in
  one of `SECRET_FOLDERS`, or when its name is in `BROAD_SECRET_NAMES` and it is no source code.
* A new or changed file is left out when its content holds an unmistakable token (secret_content.py), also
  inside an archive, or when it is larger than `MAX_FILE_BYTES`. Of a changed file the base commit's version
  is kept.
* New files together may take `MAX_NEW_BYTES`; beyond that the largest are left out.

What is committed and unchanged stays: that was the user's own decision. Everything left out is named in
the record. Matching ignores case.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TypedDict

MAX_FILE_BYTES = 10_000_000
MAX_NEW_BYTES = 100_000_000

SECRET_NAMES = (
    *(".env", ".env.*", ".env-*", ".env_*", "*.env", ".envrc", ".netrc", "_netrc", ".npmrc", ".yarnrc.yml"),
    *(".pypirc", ".git-credentials", ".pgpass", ".my.cnf", ".mylogin.cnf", ".htpasswd", ".dockercfg"),
    *(".boto", ".s3cfg", ".vault-pass*", ".vault_pass*", ".vault-token", ".condarc", "kaggle.json"),
    *("database.ini", "db.ini", "settings.ini", "appsettings*.json", "auth.json", "local.ini"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "service-account*.json", "service_account*.json"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks", "*.keystore", "*.kdbx", "*.ovpn"),
    *("*.tfstate", "*.tfvars"),
)
SECRET_FOLDERS = (".ssh", ".aws", ".azure", ".gcloud", ".gnupg", ".kube", ".kaggle")
SECRET_PATHS = (".docker/config.json", "gh/hosts.yml")
BROAD_SECRET_NAMES = (
    *("*credential*", "*token*", "*secret*", "*password*", "*passwd*", "*api_key*", "*api-key*", "*apikey*"),
)
# What stands behind the name of a file that is kept beside its successor.
_BACKUP = re.compile(r"(?:[._-](?:old|bak|backup|orig|save|copy|[0-9]+)|~)+$")
# Placeholders that are meant to be shared, and files of text models that merely have "token" in their name.
KEPT_NAMES = (
    *("*.example", "*.template", "*.sample", "*.dist", ".env-example", ".env_example"),
    *("*tokeniz*", "special_tokens_map.json", "added_tokens.json"),
)
# The broad names would otherwise drop tokenizer.py or test_secrets.py, and the run could not be repeated.
SOURCE_SUFFIXES = (
    *(".py", ".pyi", ".pyx", ".pxd", ".ipynb", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh"),
    *(".rs", ".go", ".java", ".jl", ".r", ".js", ".jsx", ".ts", ".tsx", ".sh", ".proto", ".cmake"),
    *(".tex", ".bib", ".css"),
)


class SkippedFile(TypedDict):
    """A file that the snapshot lacks (or holds in its base version), and why. `bytes` is None if unknown."""

    path: str
    reason: str
    bytes: int | None


def secret_name(path: str) -> str | None:
    """Why the name of the new file `path` (relative, with slashes) speaks of a secret, else None."""
    pure = PurePosixPath(path.lower())
    folder = next((part for part in pure.parts[:-1] if part in SECRET_FOLDERS), None)
    if folder is not None:
        return f"likely secret: in {folder}/"
    match = next((known for known in SECRET_PATHS if f"/{pure}".endswith(f"/{known}")), None)
    if match is not None:
        return f"likely secret: is a {match}"
    if any(fnmatchcase(pure.name, pattern) for pattern in KEPT_NAMES):
        return None
    names = SECRET_NAMES if pure.suffix in SOURCE_SUFFIXES else SECRET_NAMES + BROAD_SECRET_NAMES
    spoken = (pure.name, _BACKUP.sub("", pure.name))
    match = next((each for each in names if any(fnmatchcase(name, each) for name in spoken)), None)
    return None if match is None else f"likely secret: named like {match}"
