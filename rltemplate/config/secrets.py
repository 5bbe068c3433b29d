"""The one list of secrets: names of files that likely hold one, and unmistakable forms of tokens and keys.

New files with such a name, and new or changed files with such content, never enter a snapshot of the code
(run/git). A configuration with such a value is refused. Names are matched without regard to case.

Entropy and names such as `password =` are no criteria for files: a digest of a commit, a lock file or the
image in a notebook would be taken for a secret.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from rltemplate.interfaces import ConfigError

LIKELY = "likely secret"  # begins each reason about a secret in a file
SECRET_NAMES = (
    *(".env", ".env.*", ".env-*", ".env_*", "*.env", ".envrc", ".netrc", "_netrc", ".npmrc", ".yarnrc.yml"),
    *(".pypirc", ".git-credentials", ".pgpass", ".my.cnf", ".mylogin.cnf", ".htpasswd", ".dockercfg"),
    *(".boto", ".s3cfg", ".vault-pass*", ".vault_pass*", ".vault-token", ".condarc", "kaggle.json"),
    *("database.ini", "db.ini", "settings.ini", "appsettings*.json", "auth.json", "local.ini"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "service-account*.json", "service_account*.json"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks", "*.keystore", "*.kdbx", "*.ovpn"),
    *("*.tfstate", "*.tfvars"),
)
SECRET_PLACES = (
    *("*/.ssh/*", "*/.aws/*", "*/.azure/*", "*/.gcloud/*", "*/.gnupg/*", "*/.kube/*", "*/.kaggle/*"),
    *("*/.docker/config.json", "*/gh/hosts.yml"),
)
BROAD_SECRET_NAMES = (
    *("*credential*", "*token*", "*secret*", "*password*", "*passwd*", "*api_key*", "*api-key*", "*apikey*"),
)
# Endings of backup copies, such as `.old` and `~`.
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

# Kind, a text that any token of this kind contains, and the pattern. The text is searched for first: nearly
# every file lacks it, and a plain search is fast.
TOKENS: tuple[tuple[str, bytes, bytes], ...] = (
    ("a private key", b"PRIVATE KEY", rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"),
    ("a W&B key", b"wandb_v", rb"\bwandb_v\d_\w{20,}"),
    ("a GitHub token", b"gh", rb"\bgh[pousr]_[A-Za-z0-9]{36}"),
    ("a GitHub token", b"github_pat_", rb"github_pat_[A-Za-z0-9_]{22}"),
    ("a GitLab token", b"glpat-", rb"\bglpat-[A-Za-z0-9_-]{20,}"),
    ("a Hugging Face token", b"hf_", rb"\bhf_[A-Za-z0-9]{30,}"),
    ("an API key (sk-...)", b"sk-", rb"\bsk-(?:[A-Za-z0-9]{20}|(?:proj|svcacct|admin|ant|or)-[\w-]{20})"),
    ("an AWS key", b"A", rb"A(?:3T[A-Z0-9]|BIA|CCA|KIA|SIA)[0-9A-Z]{16}\b"),
    ("an AWS secret key", b"", rb"(?i)aws_?secret_?access_?key\W{1,8}[a-z0-9/+]{40}(?![a-z0-9/+])"),
    ("an Azure storage key", b"AccountKey=", rb"AccountKey=[A-Za-z0-9+/]{86}=="),
    ("a Google API key", b"AIza", rb"\bAIza[0-9A-Za-z_-]{35}"),
    ("a Neptune token", b"eyJhcGlf", rb"\beyJhcGlfYWRkcmVzcyI6[A-Za-z0-9+/]{40,}"),
    ("a JSON web token", b"eyJ", rb"\beyJ[\w-]{10,4000}\.eyJ[\w-]{4,4000}\."),
    ("a Slack token", b"xox", rb"\bxox[abeoprs]-[A-Za-z0-9-]{10,}"),
    ("a Slack webhook", b"hooks.slack.com", rb"hooks\.slack\.com/services/T\w+/B\w+/\w{20,}"),
    ("a Discord webhook", b"/api/webhooks/", rb"discord(?:app)?\.com/api/webhooks/\d{17,}/[\w-]{60,}"),
    ("a Telegram bot token", b":AA", rb"\b[0-9]{8,10}:AA[A-Za-z0-9_-]{33}\b"),
    ("a Docker Hub token", b"dckr_pat_", rb"\bdckr_pat_[A-Za-z0-9_-]{20,}"),
    ("a Databricks token", b"dapi", rb"\bdapi[0-9a-f]{32}\b"),
    ("a PyPI token", b"pypi-AgEI", rb"\bpypi-AgEI[A-Za-z0-9_-]{50,}"),
    ("an npm token", b"npm_", rb"\bnpm_[A-Za-z0-9-]{36}"),
    ("a Stripe key", b"k_live_", rb"\b[rs]k_live_[0-9a-zA-Z]{24}"),
    ("a SendGrid key", b"SG.", rb"\bSG\.[\w-]{22}\.[\w-]{43}"),
    ("a Mailchimp key", b"-us", rb"\b[0-9a-f]{32}-us[0-9]{1,2}\b"),
    ("a Square secret", b"sq0csp-", rb"\bsq0csp-[\w-]{43}"),
    (
        "a password in an address",  # except for placeholders
        b"://",
        rb"://[^\s:/@]{1,200}:(?!(?i:[<{$*x%.]|(?:(?:user)?pass(?:word|wd)?|pwd?|secret|token|git|key|changeme)@))"
        rb"[^\s:/@]{1,200}@",
    ),
)
# An old W&B key looks like the digest of a commit, so the word before it decides. A manifest of Kubernetes
# has the name on one line and the value on the next.
_W_AND_B_KEY = rb"(?:local-)?[0-9a-fA-F]{40}\b"
_NAMED_KEY = re.compile(
    rb"(?i)(?:wandb|w&b|key|token|login|password)(?:[ \t]+-\S+){0,5}(?:[\"'\\]*\s+[\"']?value\b)?"
    rb"(?:[ \t]+is)?[\"'\\]*[ \t]*[:=,(]?[ \t]*[\"'\\]*" + _W_AND_B_KEY
)
_OF_A_COMMIT = re.compile(rb"(?i)commit|revision|version|head|sha|hash|revs?\b|\bref\b|\bgit")
_SPEAKS_OF_W_AND_B = re.compile(rb"(?i)wandb|w&b")
# A W&B key, or a commit, in a file of its own; there may be comments before it.
_ALONE = re.compile(rb"\s*((?:(?:#|;|//)[^\n]*\n\s*)*)[\"']?" + _W_AND_B_KEY + rb"[\"']?\s*")
# Keys of a configuration whose value is a secret if it looks drawn at random.
_SECRET_KEY = re.compile(
    r"(?i)(?:tokens?|secrets?|pass(?:word|wd|phrase)?|pwd|(?:api|access|private|secret)_?key|credentials?)$"
)
_READABLE = r"(?:[A-Z]?[a-z]+[0-9]{0,4}|[0-9]{1,4})"  # a word that a person can read, or a small number
_RANDOM = re.compile(rf"(?!{_READABLE}(?:[_-]{_READABLE})+\Z)(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9_+=-]{{16,}}")
# A name and its value inside braces.
_ENTRY = re.compile(r"([\w.-]{1,100})[\"']?\s*:\s*[\[\"']*([^\s,\"'{}\[\]]+)")
# Compressed files are not searched.
_COMPRESSED = re.compile(
    rb"\x1f\x8b|BZh[1-9]1AY&SY|\xfd7zXZ\0|7z\xbc\xaf\x27\x1c|Rar!\x1a\x07|\x28\xb5\x2f\xfd"
)


def secret_name(path: str) -> str | None:
    """The reason why the name of a new file (relative, with slashes) suggests a secret, else None."""
    path = f"/{path.lower()}"
    pure = PurePosixPath(path)
    match = next((each for each in SECRET_PLACES if fnmatchcase(path, each)), None)
    if match is None and not any(fnmatchcase(pure.name, each) for each in KEPT_NAMES):
        names = SECRET_NAMES if pure.suffix in SOURCE_SUFFIXES else SECRET_NAMES + BROAD_SECRET_NAMES
        spoken = (pure.name, _BACKUP.sub("", pure.name))
        match = next((each for each in names if any(fnmatchcase(name, each) for name in spoken)), None)
    return None if match is None else f"{LIKELY}: named like {match}"


def secret_content(data: bytes, path: str = "") -> str | None:
    """The reason why the content `data` of a file holds a secret, or cannot be searched, else None."""
    if _is_compressed(data):
        return "a compressed file, which is not searched for secrets; it is recorded once it is committed"
    if len(data) < 400 and (alone := _ALONE.fullmatch(data)):
        spoken = path.rpartition("/")[2].encode(errors="replace") + alone[1]
        if not _OF_A_COMMIT.search(spoken) or _SPEAKS_OF_W_AND_B.search(spoken):
            return f"{LIKELY}: contains what looks like a W&B key and nothing else"
    kind = _token(data.replace(b"\0", b""))  # so that UTF-16 is read as well
    return None if kind is None else f"{LIKELY}: contains {kind}"


def _is_compressed(data: bytes) -> bool:
    """True for compressed files; a zip file of stored members, such as weights, can be searched as it is."""
    if _COMPRESSED.match(data):
        return True
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return any(member.compress_type or member.flag_bits & 1 for member in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError):
        return data.startswith(b"PK\x03\x04")


def secret_in_value(key: str, text: str) -> str | None:
    """The reason why the value of a key in dotted form is taken for a secret ("holds ..."), else None."""
    name = key.rpartition(".")[2]
    kind = _token(f"{name}={text}".encode(errors="replace"))
    if kind is None and _SECRET_KEY.search(name) and _RANDOM.fullmatch(text):
        return "looks like a secret, because of the name of its key"
    return None if kind is None else f"holds {kind}"


def _token(data: bytes) -> str | None:
    """The kind of the first token in a text."""
    kinds = (kind for kind, hint, pattern in TOKENS if hint in data and re.search(pattern, data))
    old_key = _SPEAKS_OF_W_AND_B.search(data) and _NAMED_KEY.search(data)
    return next(kinds, "a W&B key" if old_key else None)


def refuse_secrets(value: Any, key: str = "") -> None:
    """Raise `ConfigError` for the first text in a nested value that is a secret; `key` is in dotted form."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            refuse_secrets(str(name), key)
            refuse_secrets(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for item in value:
            refuse_secrets(item, key)
    elif isinstance(value, str) and (reason := secret_in_value(key, value)):
        raise ConfigError(
            f"{key}: its value {reason}; it would be recorded and shown with the run. Leave it out, and have "
            "the code that needs it read a variable of the environment"
        )


def refuse_secret_words(words: Sequence[str]) -> None:
    """Raise `ConfigError` for the first argument of a command whose value is a secret.

    Arguments are checked before they are read, so that no later message can repeat a secret.
    """
    for word in words:
        key, equals, value = word.lstrip("+~").partition("=")
        refuse_secrets(value.strip("'\"") if equals else word, key if equals else "an argument")
        for name, text in _ENTRY.findall(value) if "{" in value else ():
            refuse_secrets(text, f"{key}.{name}")
