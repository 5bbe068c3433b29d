"""THE list of secrets: names of files that speak of one, and tokens and keys that cannot be anything else.

Files with such a name or content never enter a snapshot of the code (run/git), and a configuration with such
a value is refused (config/cli). Names are matched without regard to case.

Tokens of common services are found by detect-secrets (the maintained package `bc-detect-secrets`), by its
plugins that recognise a token by its form. Its plugins for entropy and for names such as `password =` are not
used: they take a digest of a commit, a lock file or a notebook's image for a secret. Services of machine
learning, which it does not know, are in `OWN`.

A plain search for substrings comes first. It settles nearly every file without importing the scanner, which
takes a tenth of a second.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from pathlib import PurePosixPath
from typing import Any

# --- Names of files -----------------------------------------------------------------------------------

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

# --- Tokens -------------------------------------------------------------------------------------------

# By module and class of a plugin: what it finds, and what any of its finds contains.
SCANNED: dict[str, tuple[str, tuple[bytes, ...]]] = {
    "aws.AWSKeyDetector": ("an AWS key", (b"A3T", b"ABIA", b"ACCA", b"AKIA", b"ASIA", b"aws", b"AWS")),
    "basic_auth.BasicAuthDetector": ("a password in an address", (b"://",)),
    "github_token.GitHubTokenDetector": ("a GitHub token", (b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_")),
    "jwt.JwtTokenDetector": ("a JSON web token", (b"eyJ",)),
    "mailchimp.MailchimpDetector": ("a Mailchimp key", tuple(b"-us%d" % digit for digit in range(10))),
    "npm.NpmDetector": ("an npm token", (b"npm_",)),
    "sendgrid.SendGridDetector": ("a SendGrid key", (b"SG.",)),
    "slack.SlackDetector": ("a Slack token", (b"xox",)),
    "square_oauth.SquareOAuthDetector": ("a Square secret", (b"sq0csp",)),
    "stripe.StripeDetector": ("a Stripe key", (b"k_live_",)),
}
_W_AND_B_KEY = rb"(?:local-)?[0-9a-fA-F]{40}\b"  # a digest of a commit has the same form, so words decide
_W_AND_B = (
    rb"\bwandb_v\d_\w{20,}",
    rb"\bwandb\.login\s*\([^)]{0,200}?[\"']" + _W_AND_B_KEY,
    rb"\bwandb[\"' ,]+login[\"',]*[ \t]+(?:-\S+[ \t]+)*[\"']?" + _W_AND_B_KEY,
    rb"(?i:\bwandb[_-]?(?:api[_-]?)?(?:key|token)\W{1,12})" + _W_AND_B_KEY,
    rb"(?i:\b(?:wandb|w&b)\s{0,4}[:=]?\s{0,4}[\"']?)" + _W_AND_B_KEY,
    rb"(?i:\bapi[_-]?key\W{1,12})" + _W_AND_B_KEY,
    rb"(?i:\bWANDB_API_KEY\b\W{1,12}value\W{1,12})" + _W_AND_B_KEY,  # of Kubernetes, in YAML and JSON
    rb"\b"
    + _W_AND_B_KEY
    + rb"(?i:\W{1,4}(?:is|was|my|our)\b[^\n]{0,20}\b(?:wandb|w&b)[^\n]{0,12}(?:key|token)\b)",
    rb"machine\s+api\.wandb\.ai\s[^#]{0,80}password\s+\w{40,}",
)
OWN: dict[str, tuple[bytes, tuple[bytes, ...]]] = {
    "a private key": (rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----", (b"PRIVATE KEY",)),
    "a GitHub token": (rb"\bgithub_pat_[A-Za-z0-9_]{22,}", (b"github_pat_",)),
    "a GitLab token": (rb"\bglpat-[A-Za-z0-9_-]{20,}", (b"glpat-",)),
    "an AWS secret key": (
        rb"(?i:aws_secret_access_key)\W{1,8}[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])",
        (b"aws_secret_access_key", b"AWS_SECRET_ACCESS_KEY"),
    ),
    "an Azure storage key": (rb"AccountKey=[A-Za-z0-9+/]{86}==", (b"AccountKey=",)),
    "a W&B key": (
        rb"|".join(_W_AND_B),
        (b"wandb", b"WANDB", b"W&B", b"api_key", b"API_KEY", b"api-key", b"apikey"),
    ),
    "a Neptune token": (rb"\beyJhcGlfYWRkcmVzcyI6[A-Za-z0-9+/]{40,}", (b"eyJhcGlf",)),
    "a Hugging Face token": (rb"\bhf_[A-Za-z0-9]{30,}", (b"hf_",)),
    "an API key (sk-...)": (
        rb"\bsk-[A-Za-z0-9]{20,}|\bsk-(?:proj|svcacct|admin|ant|or)-[A-Za-z0-9_-]{20,}",
        (b"sk-",),
    ),
    "a Slack token": (rb"\bxox[abeoprs]-[A-Za-z0-9-]{10,}", (b"xox",)),
    "a Slack webhook": (rb"hooks\.slack\.com/services/T\w+/B\w+/\w{20,}", (b"hooks.slack.com",)),
    "a Google API key": (rb"\bAIza[0-9A-Za-z_-]{35}", (b"AIza",)),
    "a Discord webhook": (rb"discord(?:app)?\.com/api/webhooks/\d{17,}/[\w-]{60,}", (b"/api/webhooks/",)),
    "a Telegram bot token": (rb"\b[0-9]{8,10}:AA[A-Za-z0-9_-]{33}\b", (b":AA",)),
    "a Docker Hub token": (rb"\bdckr_pat_[A-Za-z0-9_-]{20,}", (b"dckr_pat_",)),
    "a Databricks token": (rb"\bdapi[0-9a-f]{32}\b", (b"dapi",)),
    "a PyPI token": (rb"\bpypi-AgEI[A-Za-z0-9_-]{50,}", (b"pypi-AgEI",)),
}
# Of a text only these pieces are given to a plugin that would take hours for a long one, or finds many.
_PIECES = {
    "basic_auth.BasicAuthDetector": rb"://[^\s:/@]{1,200}:[^\s:/@]{1,200}@",
    "jwt.JwtTokenDetector": rb"\beyJ[\w=-]{10,4000}\.[\w=-]{4,4000}(?:\.[\w+/=-]{0,4000})?",
}
# In an address these stand for a password, and are none.
_NO_PASSWORDS = re.compile(
    r"(?i)[<{$*x%].*|(?:user)?pass(?:word|wd)?|pw|pwd|secret|token|git|key|changeme|\.+"
)
# A W&B key, or a commit, in a file of its own; there may be comments before it.
_ALONE = re.compile(rb"\s*((?:(?:#|;|//)[^\n]*\n\s*)*)[\"']?" + _W_AND_B_KEY + rb"[\"']?\s*")
_WORDS = re.compile(rb"\b" + _W_AND_B_KEY)
_SPEAKS_OF_W_AND_B = re.compile(rb"(?i)wandb|w&b")
_BEFORE_A_KEY = re.compile(
    rb"(?i)([^\n]{0,20}(?:\b|_|api|wandb)(?:keys?|tokens?)\b[^\n]{0,80}|\bhit enter\b[^#]{0,60})\Z"
)
# Keys of a configuration whose value is a secret if it looks drawn at random.
_SECRET_KEY = re.compile(
    r"(?i)(?:tokens?|secrets?|pass(?:word|wd|phrase)?|pwd|(?:api|access|private|secret)_?key|credentials?)$"
)
_READABLE = r"(?:[A-Z]?[a-z]+[0-9]{0,4}|[0-9]{1,4})"  # a word that a person can read, or a small number
_RANDOM = re.compile(rf"(?!{_READABLE}(?:[_-]{_READABLE})+\Z)(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9_+=-]{{16,}}")
_OF_A_COMMIT = re.compile(rb"(?i)commit|revision|version|head|sha|hash|revs?\b|\bref\b|\bgit")
# Compressed files are not searched.
_COMPRESSED = re.compile(
    rb"\x1f\x8b|BZh[1-9]1AY&SY|\xfd7zXZ\0|7z\xbc\xaf\x27\x1c|Rar!\x1a\x07|\x28\xb5\x2f\xfd"
)


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


def secret_content(data: bytes, path: str = "") -> str | None:
    """Why the content `data` of a file holds a secret for certain, or could without being seen, else None."""
    if _is_compressed(data):
        return "a compressed file, which is not searched for secrets; it is recorded once it is committed"
    if len(data) < 400 and (alone := _ALONE.fullmatch(data)):
        spoken = path.rpartition("/")[2].encode(errors="replace") + alone[1]
        if not _OF_A_COMMIT.search(spoken) or _SPEAKS_OF_W_AND_B.search(spoken):
            return "likely secret: contains what looks like a W&B key and nothing else"
    kind = next(_tokens(data.replace(b"\0", b"")), None)  # so that UTF-16 is read as well
    return None if kind is None else f"likely secret: contains {kind}"


def _is_compressed(data: bytes) -> bool:
    """True for compressed files; a zip file of stored members, such as weights, can be searched as it is."""
    if _COMPRESSED.match(data):
        return True
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return any(member.compress_type or member.flag_bits & 1 for member in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError):
        return data.startswith(b"PK\x03\x04")


def secret_in_value(key: str, text: str) -> str | None:
    """Why the value of a key in dotted form is taken for a secret ("holds ..."), else None."""
    name = key.rpartition(".")[2]
    kind = next(_tokens(f"{name}={text}".encode(errors="replace")), None)
    if kind is None and _SECRET_KEY.search(name) and _RANDOM.fullmatch(text):
        return "looks like a secret, because of the name of its key"
    return None if kind is None else f"holds {kind}"


def _tokens(data: bytes) -> Iterator[str]:
    """Kinds of tokens in a text."""
    for kind, (pattern, hints) in OWN.items():
        if any(hint in data for hint in hints) and re.search(pattern, data):
            yield kind
    if _key_after_a_word(data):
        yield "a W&B key"
    text = ""
    for plugin, (kind, hints) in SCANNED.items():
        if not any(hint in data for hint in hints):
            continue
        if plugin in _PIECES:
            pieces = "\n".join(piece.decode("latin-1") for piece in re.findall(_PIECES[plugin], data))
            found = _plugin(plugin).analyze_string(pieces) if pieces else ()
        else:
            text = text or data.decode("latin-1")
            found = _plugin(plugin).analyze_string(text)
        if any(not (plugin.startswith("basic_auth") and _NO_PASSWORDS.fullmatch(f"{one}")) for one in found):
            yield kind


def _key_after_a_word(data: bytes) -> bool:
    """Tell whether a text that mentions W&B holds a word like one of its keys after "key" or "token"."""
    if not _SPEAKS_OF_W_AND_B.search(data):
        return False
    for word in _WORDS.finditer(data):
        before = _BEFORE_A_KEY.search(data, max(0, word.start() - 120), word.start())
        if before and not _OF_A_COMMIT.search(before[1]):
            return True
    return False


@cache
def _plugin(name: str) -> Any:
    module, _, detector = name.partition(".")
    return getattr(import_module(f"detect_secrets.plugins.{module}"), detector)()
