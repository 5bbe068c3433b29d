"""The one list of secrets: names of files that likely hold one, and unmistakable forms of tokens and keys.

New files with such a name, and new or changed files with such content, never enter a snapshot of the code
(run/git). A configuration with such a value is refused. Names are matched without regard to case.

Entropy and names such as `password =` are no criteria for files: a digest of a commit, a lock file or the
image in a notebook would be taken for a secret.
"""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from runlab.errors import ConfigError

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

# Kind and pattern of each form of a token, one a line; an indented line continues the one before it.
# The distinctive prefixes in the rules of CredSweeper 1.19.5 (MIT), without rare ones and without those that
# base64 data or names match as well (Facebook, Square, Discord). The scanner itself brings 32 packages, among
# them pandas and onnxruntime; detect-secrets and its forks know no form such as age, gsk_, xai-, r8_ or hvs.
TOKENS = rb"""
# keys and clouds
a private key         -----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----
a private key         LS0tLS1CRUdJTi[\w+/]{1,60}(?:UFJJVkFURSBLRVkt|QUklWQVRFIEtFWS0t|BSSVZBVEUgS0VZ)
a private key         PuTTY-User-Key-File-\d
an age key            AGE-(?:SECRET-KEY|PLUGIN-[A-Z0-9-]{1,40})-1[0-9A-Z]{50}
an AWS key            A(?:3T[A-Z0-9]|BIA|CCA|KIA|SIA)[0-9A-Z]{16}\b
an AWS secret key     (?i)aws_?secret_?access_?key\W{1,8}[a-z0-9/+]{40}(?![a-z0-9/+])
an AWS key            \bamzn\.mws\.[0-9a-f]{8}-[0-9a-f-]{27}
an AWS key            \bABSK[A-Za-z0-9+/]{100}
an Alibaba key        \bLTAI[A-Za-z0-9]{20}\b
an Azure storage key  AccountKey=[A-Za-z0-9+/]{86}==
an Azure key          JQQJ9(?<=\b[A-Za-z0-9]{52}JQQJ9)[9DH][A-Za-z0-9]{26}
an Azure secret       8Q~(?<=(?<![\w~.-])[\w~.-]{3}8Q~)[\w~.-]{34}(?![\w~.-])
a Google API key      \bAIza[0-9A-Za-z_-]{35}
a Google OAuth secret  \bGOCSPX-[\w-]{28}
a Google OAuth token  \bya29\.[\w-]{30}
a Firebase token      :APA91b[\w-]{100}
a Cloudflare token    \bcf(?:at|ut|k)_[A-Za-z0-9]{48}
a DigitalOcean token  \bdo[oprs]_v1_[a-f0-9]{64}
a Heroku token        \bHRKU-[\w-]{36}
a Databricks token    \bdapi[0-9a-f]{32}\b
a PlanetScale token   \bpscale_(?:tkn|oauth|pw)_[\w.-]{32}
a Supabase key        \bsb(?:p_[a-f0-9]{40}|_secret_[\w-]{20})
a Vault token         \bhv[bsr]\.(?:(?=[A-Za-z]*\d)[A-Za-z0-9]{24}|[\w-]{80})
a Terraform token     \.atlasv1\.(?<=\b[A-Za-z0-9]{14}\.atlasv1\.)[\w-]{60}
a Pulumi token        \bpul-[a-f0-9]{40}\b
a Doppler token       \bdp\.(?:pt|st|ct|sa|scim|audit)\.[\w.-]{40}
a 1Password token     \bops_eyJ[\w-]{100}
a Tailscale key       \btskey-[a-z]+-[A-Za-z0-9]+-[A-Za-z0-9]{20}
# models and experiments
a W&B key             \bwandb_v\d_\w{20,}
a Hugging Face token  \bhf_[A-Za-z0-9]{30,}
a Hugging Face token  \bapi_org_[A-Za-z0-9]{34}
an API key (sk-...)   \bsk-(?:[A-Za-z0-9]{20}|(?:proj|svcacct|admin|ant|or|lf)-[\w-]{20})
a Groq key            \bgsk_[A-Za-z0-9]{40}
an xAI key            \bxai-[A-Za-z0-9]{60}
a Replicate token     \br8_[A-Za-z0-9]{37}
a Perplexity key      \bpplx-[A-Za-z0-9]{40}
an NVIDIA key         \bnvapi-[\w-]{60}
a Together key        \btgp_v1_[\w-]{40}
an ElevenLabs key     \bsk_[a-f0-9]{48}\b
a LangSmith key       \blsv2_(?:pt|sk)_[a-f0-9]{32}_[a-f0-9]{10}
a RunPod key          \brpa_[A-Z0-9]{40}
a Kaggle token        \bKGAT_[a-f0-9]{32}
a Neptune token       \beyJhcGlfYWRkcmVzcyI6[A-Za-z0-9+/]{40,}
# code and packages
a GitHub token        \bgh[pousr]_[A-Za-z0-9]{36}
a GitHub token        github_pat_[A-Za-z0-9_]{22}
a GitLab token        \bgl(?:p[at]t|agent|soat|ffct|oas|cbt|imt|rtr?|dt|ft|wt)-[A-Za-z0-9_-]{20,}
an Atlassian token    \bATATT3xFfG[\w=-]{80}
a Bitbucket token     \bAT(?:CTT3xFfG[\w=-]{80}|BB[A-Za-z0-9]{24}[A-F0-9]{8}\b)
a CircleCI token      \bCCIPAT_[A-Za-z0-9]{22}_[0-9a-f]{40}
a Docker Hub token    \bdckr_[po]at_[A-Za-z0-9_-]{20,}
a JFrog token         \bAKCp[A-Za-z0-9]{69}
a JFrog token         \bcmVmdGtuO[\w-]{55}
a PyPI token          \bpypi-Ag[A-Za-z0-9_-]{50,}
an npm token          \bnpm_[A-Za-z0-9-]{36}
a RubyGems key        \brubygems_[a-f0-9]{48}
a NuGet key           \boy2[a-z0-9]{43}\b
# services
a JSON web token      \beyJ[\w-]{10,4000}\.eyJ[\w-]{4,4000}\.
a Slack token         \bxox[abcdeoprs]-[A-Za-z0-9-]{10,}
a Slack token         \bxapp-\d-[A-Za-z0-9-]{20}
a Slack webhook       hooks\.slack\.com/services/T\w+/B\w+/\w{20,}
a Discord webhook     discord(?:app)?\.com/api/webhooks/\d{17,}/[\w-]{60,}
a Telegram bot token  :AA(?:(?<=\b[0-9]{8}:AA)|(?<=\b[0-9]{9}:AA)|(?<=\b[0-9]{10}:AA))[\w-]{33}\b
a Stripe key          k_(?<=\b[prs]k_)(?:live|test)_[0-9a-zA-Z]{24}
a Stripe key          \bwhsec_[A-Za-z0-9+/]{32}
a SendGrid key        \bSG\.[\w-]{22}\.[\w-]{43}
a Mailchimp key       -us(?<=\b[0-9a-f]{32}-us)[0-9]{1,2}\b
a Mailgun key         \bkey-[0-9a-f]{32}\b
a Twilio key          \bSK[0-9a-f]{32}\b
a Square secret       \bsq0(?:csp|atp|idp)-[\w-]{22}
a Shopify token       \bshp(?:at|ca|pa|ss|tka)_[0-9A-Fa-f]{32}
a Dropbox token       \bsl\.(?:u\.)?[\w-]{100}
a Dynatrace token     \bdt0[a-z]\d\d\.[0-9A-Z]{24}\.[0-9A-Z]{64}
a Grafana token       \bgl(?:sa_\w{32}_[0-9A-Fa-f]{8}|c_eyJ[\w-]{60})
a New Relic key       \bNRAK-[0-9A-Z]{27}
a Sentry token        \bsntry(?:u_[a-f0-9]{64}|s_eyJ[\w+/=-]{60})
a Linear key          \blin_(?:api|oauth)_[A-Za-z0-9]{40}
a Notion token        \bntn_[A-Za-z0-9]{40}
a Postman key         \bPMAK-[a-f0-9]{24}-[a-f0-9]{34}
a password in an address  ://[^\s:/@]{1,200}:(?!(?i:[<{$*x%.]|(?:(?:user)?pass(?:word|wd)?|pwd?|secret|token|git|key|changeme)@))
                      [^\s:/@]{1,200}@
"""


def _patterns() -> Iterator[tuple[str, bytes, re.Pattern[bytes]]]:
    """Kind, first characters and pattern of each form in `TOKENS`.

    Nearly every file lacks these characters, and a plain search for them is fast. `re` searches far faster,
    too, where they stand in front of a boundary.
    """
    for line in re.sub(rb"\n +", b"", TOKENS).splitlines():
        if form := re.fullmatch(rb"([^#].*?)  +((\\b)?((?:[\w:/ -]|\\\.)*)(.*))", line):
            kind, pattern, boundary, start, rest = form.groups()
            if boundary:
                pattern = start + rb"(?<!\w" + start + rb")" + rest
            yield kind.decode(), start.replace(b"\\", b""), re.compile(pattern)


_PATTERNS = [*_patterns()]
_SPREAD = re.compile(rb"(?:[!-~]\0{1,3}){12}")  # a text of two or four bytes for each character
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
_DEPTH = 3  # archives in archives that are searched
_NOT_SEARCHED = "a compressed file, which is not searched for secrets; it is recorded once it is committed"
_COMPRESSED = re.compile(
    rb"\x1f\x8b|BZh[1-9]1AY&SY|\xfd7zXZ\0|7z\xbc\xaf\x27\x1c|Rar!\x1a\x07|\x28\xb5\x2f\xfd"
)


def secret_name(path: str, broad: bool = True) -> str | None:
    """The reason why the name of a new file (relative, with slashes) suggests a secret, else None.

    `broad`: also if it merely speaks of one.
    """
    path = f"/{path.lower()}"
    pure = PurePosixPath(path)
    match = next((each for each in SECRET_PLACES if fnmatchcase(path, each)), None)
    if match is None and not any(fnmatchcase(pure.name, each) for each in KEPT_NAMES):
        narrow = not broad or pure.suffix in SOURCE_SUFFIXES
        names = SECRET_NAMES if narrow else SECRET_NAMES + BROAD_SECRET_NAMES
        spoken = (pure.name, _BACKUP.sub("", pure.name))
        match = next((each for each in names if any(fnmatchcase(name, each) for name in spoken)), None)
    return None if match is None else f"{LIKELY}: named like {match}"


def secret_content(data: bytes, path: str = "", depth: int = _DEPTH) -> str | None:
    """The reason why the content `data` of a file holds a secret, or cannot be searched, else None.

    Members of archives are searched one by one, `depth` archives deep.
    """
    if _COMPRESSED.match(data):
        return _NOT_SEARCHED
    if len(data) < 400 and (alone := _ALONE.fullmatch(data)):
        spoken = path.rpartition("/")[2].encode(errors="replace") + alone[1]
        # In an archive it may be a number of the program that made it, as in files of torch.
        doubtful = depth < _DEPTH or _OF_A_COMMIT.search(spoken)
        if not doubtful or _SPEAKS_OF_W_AND_B.search(spoken):
            return f"{LIKELY}: contains what looks like a W&B key and nothing else"
    kind = _token(data)
    if kind is None and b"\0" in data and _SPREAD.search(data):
        kind = _token(data.replace(b"\0", b""))
    return f"{LIKELY}: contains {kind}" if kind is not None else _member_reason(data, depth)


# What the libraries raise for archives that are damaged, or that they cannot read.
_DAMAGE = (
    *(zipfile.BadZipFile, tarfile.TarError, NotImplementedError),
    *(OSError, ValueError, EOFError, OverflowError),
)


def _member_reason(data: bytes, depth: int) -> str | None:
    """The reason why a member of the archive `data` holds a secret, or cannot be searched, else None."""
    room = 2 * len(data)  # members of an archive that was made to harm may overlap
    try:
        for name, content in _members(data):
            room -= len(content)
            if depth == 0 or room < 0:
                return _NOT_SEARCHED
            # Arrays and layers have broad names, such as `token_embedding`.
            if reason := secret_name(name, broad=False) or secret_in_name(name):
                return f"{reason} (in an archive)"
            if reason := secret_content(content, name, depth - 1):
                return reason if reason is _NOT_SEARCHED else f"{reason} (in an archive)"
    except _DAMAGE:
        return _NOT_SEARCHED if data.startswith(b"PK\x03\x04") else None
    return None


def _members(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of the files of an archive whose members are stored as they are; nothing for others.

    Raises `NotImplementedError` for compressed members, and what the libraries raise for damaged ones.
    """
    if zipfile.is_zipfile(io.BytesIO(data)) or data.startswith(b"PK\x03\x04"):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if any(member.compress_type or member.flag_bits & 1 for member in archive.infolist()):
                raise NotImplementedError
            for member in archive.infolist():
                yield member.filename, archive.read(member)
    elif data[257:262] == b"ustar":
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for entry in archive:
                content = archive.extractfile(entry) if entry.isreg() and entry.size <= len(data) else None
                yield (
                    entry.name,
                    entry.linkname.encode(errors="replace") if content is None else content.read(),
                )


def secret_in_name(name: str, what: str = "name") -> str | None:
    """The reason why the name of a file, or another text about it, holds a secret, else None."""
    kind = _token(name.encode(errors="replace"))
    return None if kind is None else f"{LIKELY}: its {what} contains {kind}"


def masked(name: str) -> str:
    """`name` with another text in the place of its tokens."""
    data = name.encode(errors="replace")
    if _token(data) is None:
        return name
    for _, hint, pattern in _PATTERNS:
        if hint in data:
            data = re.sub(pattern.pattern + rb"[\w-]*", b"(a secret)", data)
    return data.decode() if _token(data) is None else "(a secret)"


def secret_in_value(key: str, text: str) -> str | None:
    """The reason why the value of a key in dotted form is taken for a secret ("holds ..."), else None."""
    name = key.rpartition(".")[2]
    kind = _token(f"{name}={text}".encode(errors="replace"))
    if kind is None and _SECRET_KEY.search(name) and _RANDOM.fullmatch(text):
        return "looks like a secret, because of the name of its key"
    return None if kind is None else f"holds {kind}"


def _token(data: bytes) -> str | None:
    """The kind of the first token in a text."""
    kinds = (kind for kind, hint, pattern in _PATTERNS if hint in data and pattern.search(data))
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
