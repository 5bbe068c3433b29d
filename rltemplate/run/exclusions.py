"""Which files of a work tree are left out of a run's snapshot, and why.

A snapshot is a git commit that may be pushed one day, so likely secrets never enter it. What is pushed is
looked through once more, by the same names and patterns: it brings commits of the user's along. The rules:

* A *new* file (not in the base commit) is left out when its name is in `SECRET_NAMES`, when it lies in
  one of `SECRET_FOLDERS`, or when its name is in `BROAD_SECRET_NAMES` and it is no source code.
* A new or changed file is left out when its content holds an unmistakable token (`SECRET_CONTENT`) or
  when it is larger than `MAX_FILE_BYTES`. Of a changed file the base commit's version is kept.
* New files together may take `MAX_NEW_BYTES`; beyond that the largest are left out.

What is committed and unchanged stays: that was the user's own decision. Everything left out is named in
the record. Matching ignores case.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TypedDict

MAX_FILE_BYTES = 10_000_000
MAX_NEW_BYTES = 100_000_000

SECRET_NAMES = (
    *(".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".npmrc", ".pypirc", ".git-credentials"),
    *(".pgpass", ".htpasswd", ".dockercfg", ".boto", ".s3cfg", "kaggle.json"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "service-account*.json", "service_account*.json"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks", "*.keystore", "*.kdbx", "*.ovpn"),
)
SECRET_FOLDERS = (".ssh", ".aws", ".gnupg", ".kube", ".kaggle")
BROAD_SECRET_NAMES = (
    *("*credential*", "*token*", "*secret*", "*password*", "*passwd*", "*api_key*", "*api-key*", "*apikey*"),
)
# Placeholders that are meant to be shared, and files of text models that merely have "token" in their name.
KEPT_NAMES = (
    *("*.example", "*.template", "*.sample", "*.dist"),
    *("*tokeniz*", "special_tokens_map.json", "added_tokens.json"),
)
# The broad names would otherwise drop tokenizer.py or test_secrets.py, and the run could not be repeated.
SOURCE_SUFFIXES = (
    *(".py", ".pyi", ".pyx", ".pxd", ".ipynb", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh"),
    *(".rs", ".go", ".java", ".jl", ".r", ".js", ".jsx", ".ts", ".tsx", ".sh", ".sql", ".proto", ".cmake"),
    *(".md", ".rst", ".tex", ".bib", ".html", ".css", ".xml"),
)
SECRET_CONTENT = {
    "a private key": rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----",
    "an AWS access key": rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a GitHub token": rb"\bgh[pousr]_[A-Za-z0-9]{36,}|\bgithub_pat_[A-Za-z0-9_]{22,}",
    "a GitLab token": rb"\bglpat-[A-Za-z0-9_-]{20,}",
    "an AWS secret key": rb"(?:aws_secret_access_key|AWS_SECRET_ACCESS_KEY)\W{1,8}"
    rb"[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])",
    "an Azure storage key": rb"AccountKey=[A-Za-z0-9+/]{86}==",
    "a W&B key": rb"(?:WANDB_API_KEY|wandb_api_key)\W{1,8}[0-9a-f]{40}\b|\bwandb_v\d_\w{20,}",
    "a Neptune token": rb"\beyJhcGlfYWRkcmVzcyI6[A-Za-z0-9+/]{40,}",
    "a W&B login": rb"machine\s+api\.wandb\.ai\s[^#]{0,80}password\s+\w{40,}",
    "a Hugging Face token": rb"\bhf_[A-Za-z0-9]{30,}",
    "an API key (sk-...)": rb"\bsk-[A-Za-z0-9]{20,}|\bsk-(?:proj|svcacct|admin|ant|or)-[A-Za-z0-9_-]{20,}",
    "a Slack token": rb"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    "a Google API key": rb"\bAIza[0-9A-Za-z_-]{35}",
    "a Slack or Discord webhook": rb"hooks\.slack\.com/services/T\w+/B\w+/\w{20,}"
    rb"|discord(?:app)?\.com/api/webhooks/\d{17,}/[\w-]{60,}",
    "a Telegram bot token": rb"\b[0-9]{8,10}:AA[A-Za-z0-9_-]{33}\b",
    "a Stripe key": rb"\b[rs]k_live_[0-9A-Za-z]{20,}",
    "a Docker Hub token": rb"\bdckr_pat_[A-Za-z0-9_-]{20,}",
    "a Databricks token": rb"\bdapi[0-9a-f]{32}\b",
    "a package index token": rb"\bpypi-AgEI[A-Za-z0-9_-]{50,}|\bnpm_[A-Za-z0-9]{36}\b",
}
# Plain substring search is some fifty times faster than the patterns and settles nearly every file.
_HINTS = (
    *(b"PRIVATE KEY", b"AKIA", b"ASIA", b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"github_pat_"),
    *(b"glpat-", b"WANDB_API_KEY", b"wandb_api_key", b"api.wandb.ai", b"hf_", b"sk-", b"xox", b"AIza"),
    *(b"pypi-", b"npm_", b"aws_secret_access_key", b"AWS_SECRET_ACCESS_KEY", b"AccountKey=", b"wandb_v"),
    *(b"eyJhcGlf", b"hooks.slack.com", b"/api/webhooks/", b":AA", b"k_live_", b"dckr_pat_", b"dapi"),
)
_CONTENT = {kind: re.compile(pattern) for kind, pattern in SECRET_CONTENT.items()}


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
    if any(fnmatchcase(pure.name, pattern) for pattern in KEPT_NAMES):
        return None
    names = SECRET_NAMES if pure.suffix in SOURCE_SUFFIXES else SECRET_NAMES + BROAD_SECRET_NAMES
    match = next((pattern for pattern in names if fnmatchcase(pure.name, pattern)), None)
    return None if match is None else f"likely secret: named like {match}"


def secret_content(data: bytes) -> str | None:
    """Why the content `data` holds a secret for certain, else None."""
    found = next(secrets_in(data), None)
    return None if found is None else f"likely secret: contains {found[0]}"


def secrets_in(data: bytes) -> Iterator[tuple[str, int]]:
    """The kinds of secrets that `data` holds for certain, each with the line of its first, from 1 on."""
    text = data.replace(b"\0", b"")  # so that UTF-16, which some shells write, is read as well
    if not any(hint in text for hint in _HINTS):
        return
    for kind, pattern in _CONTENT.items():
        if match := pattern.search(text):
            yield kind, 1 + text.count(b"\n", 0, match.start())
