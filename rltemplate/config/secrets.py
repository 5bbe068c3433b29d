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
# The distinctive prefixes in the rules of CredSweeper 1.19.5 (MIT), without rare ones and without those that
# base64 data or names match as well (Facebook, Square, Discord). The scanner itself brings 32 packages, among
# them pandas and onnxruntime; detect-secrets and its forks know no form such as age, gsk_, xai-, r8_ or hvs.
TOKENS: tuple[tuple[str, bytes, bytes], ...] = (
    # keys and clouds
    ("a private key", b"PRIVATE KEY", rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"),
    (
        "a private key",  # in base64, as in a file of Kubernetes
        b"LS0tLS1CRUdJTi",
        rb"LS0tLS1CRUdJTi[\w+/]{1,60}(?:UFJJVkFURSBLRVkt|QUklWQVRFIEtFWS0t|BSSVZBVEUgS0VZ)",
    ),
    ("a private key", b"PuTTY-User-Key-File", rb"PuTTY-User-Key-File-\d"),
    ("an age key", b"AGE-", rb"AGE-(?:SECRET-KEY|PLUGIN-[A-Z0-9-]{1,40})-1[0-9A-Z]{50}"),
    ("an AWS key", b"A", rb"A(?:3T[A-Z0-9]|BIA|CCA|KIA|SIA)[0-9A-Z]{16}\b"),
    ("an AWS secret key", b"", rb"(?i)aws_?secret_?access_?key\W{1,8}[a-z0-9/+]{40}(?![a-z0-9/+])"),
    ("an AWS key", b"amzn.mws.", rb"\bamzn\.mws\.[0-9a-f]{8}-[0-9a-f-]{27}"),
    ("an AWS key", b"ABSK", rb"\bABSK[A-Za-z0-9+/]{100}"),
    ("an Alibaba key", b"LTAI", rb"\bLTAI[A-Za-z0-9]{20}\b"),
    ("an Azure storage key", b"AccountKey=", rb"AccountKey=[A-Za-z0-9+/]{86}=="),
    ("an Azure key", b"JQQJ9", rb"\b[A-Za-z0-9]{52}JQQJ9[9DH][A-Za-z0-9]{26}"),
    ("an Azure secret", b"8Q~", rb"(?<![\w~.-])[\w~.-]{3}8Q~[\w~.-]{34}(?![\w~.-])"),
    ("a Google API key", b"AIza", rb"\bAIza[0-9A-Za-z_-]{35}"),
    ("a Google OAuth secret", b"GOCSPX-", rb"\bGOCSPX-[\w-]{28}"),
    ("a Google OAuth token", b"ya29.", rb"\bya29\.[\w-]{30}"),
    ("a Firebase token", b":APA91b", rb":APA91b[\w-]{100}"),
    ("a Cloudflare token", b"cf", rb"\bcf(?:at|ut|k)_[A-Za-z0-9]{48}"),
    ("a DigitalOcean token", b"do", rb"\bdo[oprs]_v1_[a-f0-9]{64}"),
    ("a Heroku token", b"HRKU-", rb"\bHRKU-[\w-]{36}"),
    ("a Databricks token", b"dapi", rb"\bdapi[0-9a-f]{32}\b"),
    ("a PlanetScale token", b"pscale_", rb"\bpscale_(?:tkn|oauth|pw)_[\w.-]{32}"),
    ("a Supabase key", b"sb", rb"\bsb(?:p_[a-f0-9]{40}|_secret_[\w-]{20})"),
    ("a Vault token", b"hv", rb"\bhv[bsr]\.(?:(?=[A-Za-z]*\d)[A-Za-z0-9]{24}|[\w-]{80})"),
    ("a Terraform token", b".atlasv1.", rb"\b[A-Za-z0-9]{14}\.atlasv1\.[\w-]{60}"),
    ("a Pulumi token", b"pul-", rb"\bpul-[a-f0-9]{40}\b"),
    ("a Doppler token", b"dp.", rb"\bdp\.(?:pt|st|ct|sa|scim|audit)\.[\w.-]{40}"),
    ("a 1Password token", b"ops_eyJ", rb"\bops_eyJ[\w-]{100}"),
    ("a Tailscale key", b"tskey-", rb"\btskey-[a-z]+-[A-Za-z0-9]+-[A-Za-z0-9]{20}"),
    # models and experiments
    ("a W&B key", b"wandb_v", rb"\bwandb_v\d_\w{20,}"),
    ("a Hugging Face token", b"hf_", rb"\bhf_[A-Za-z0-9]{30,}"),
    ("a Hugging Face token", b"api_org_", rb"\bapi_org_[A-Za-z0-9]{34}"),
    ("an API key (sk-...)", b"sk-", rb"\bsk-(?:[A-Za-z0-9]{20}|(?:proj|svcacct|admin|ant|or|lf)-[\w-]{20})"),
    ("a Groq key", b"gsk_", rb"\bgsk_[A-Za-z0-9]{40}"),
    ("an xAI key", b"xai-", rb"\bxai-[A-Za-z0-9]{60}"),
    ("a Replicate token", b"r8_", rb"\br8_[A-Za-z0-9]{37}"),
    ("a Perplexity key", b"pplx-", rb"\bpplx-[A-Za-z0-9]{40}"),
    ("an NVIDIA key", b"nvapi-", rb"\bnvapi-[\w-]{60}"),
    ("a Together key", b"tgp_v1_", rb"\btgp_v1_[\w-]{40}"),
    ("an ElevenLabs key", b"sk_", rb"\bsk_[a-f0-9]{48}\b"),
    ("a LangSmith key", b"lsv2_", rb"\blsv2_(?:pt|sk)_[a-f0-9]{32}_[a-f0-9]{10}"),
    ("a RunPod key", b"rpa_", rb"\brpa_[A-Z0-9]{40}"),
    ("a Kaggle token", b"KGAT_", rb"\bKGAT_[a-f0-9]{32}"),
    ("a Neptune token", b"eyJhcGlf", rb"\beyJhcGlfYWRkcmVzcyI6[A-Za-z0-9+/]{40,}"),
    # code and packages
    ("a GitHub token", b"gh", rb"\bgh[pousr]_[A-Za-z0-9]{36}"),
    ("a GitHub token", b"github_pat_", rb"github_pat_[A-Za-z0-9_]{22}"),
    (
        "a GitLab token",
        b"gl",
        rb"\bgl(?:p[at]t|agent|soat|ffct|oas|cbt|imt|rtr?|dt|ft|wt)-[A-Za-z0-9_-]{20,}",
    ),
    ("an Atlassian token", b"ATATT3", rb"\bATATT3xFfG[\w=-]{80}"),
    ("a Bitbucket token", b"AT", rb"\bAT(?:CTT3xFfG[\w=-]{80}|BB[A-Za-z0-9]{24}[A-F0-9]{8}\b)"),
    ("a CircleCI token", b"CCIPAT_", rb"\bCCIPAT_[A-Za-z0-9]{22}_[0-9a-f]{40}"),
    ("a Docker Hub token", b"dckr_", rb"\bdckr_[po]at_[A-Za-z0-9_-]{20,}"),
    ("a JFrog token", b"AKCp", rb"\bAKCp[A-Za-z0-9]{69}"),
    ("a JFrog token", b"cmVmdGtuO", rb"\bcmVmdGtuO[\w-]{55}"),
    ("a PyPI token", b"pypi-Ag", rb"\bpypi-Ag[A-Za-z0-9_-]{50,}"),
    ("an npm token", b"npm_", rb"\bnpm_[A-Za-z0-9-]{36}"),
    ("a RubyGems key", b"rubygems_", rb"\brubygems_[a-f0-9]{48}"),
    ("a NuGet key", b"oy2", rb"\boy2[a-z0-9]{43}\b"),
    # services
    ("a JSON web token", b"eyJ", rb"\beyJ[\w-]{10,4000}\.eyJ[\w-]{4,4000}\."),
    ("a Slack token", b"xox", rb"\bxox[abcdeoprs]-[A-Za-z0-9-]{10,}"),
    ("a Slack token", b"xapp-", rb"\bxapp-\d-[A-Za-z0-9-]{20}"),
    ("a Slack webhook", b"hooks.slack.com", rb"hooks\.slack\.com/services/T\w+/B\w+/\w{20,}"),
    ("a Discord webhook", b"/api/webhooks/", rb"discord(?:app)?\.com/api/webhooks/\d{17,}/[\w-]{60,}"),
    ("a Telegram bot token", b":AA", rb"\b[0-9]{8,10}:AA[A-Za-z0-9_-]{33}\b"),
    ("a Stripe key", b"k_", rb"k_(?<=\b[prs]k_)(?:live|test)_[0-9a-zA-Z]{24}"),
    ("a Stripe key", b"whsec_", rb"\bwhsec_[A-Za-z0-9+/]{32}"),
    ("a SendGrid key", b"SG.", rb"\bSG\.[\w-]{22}\.[\w-]{43}"),
    ("a Mailchimp key", b"-us", rb"-us(?<=\b[0-9a-f]{32}-us)[0-9]{1,2}\b"),
    ("a Mailgun key", b"key-", rb"\bkey-[0-9a-f]{32}\b"),
    ("a Twilio key", b"SK", rb"\bSK[0-9a-f]{32}\b"),
    ("a Square secret", b"sq0", rb"\bsq0(?:csp|atp|idp)-[\w-]{22}"),
    ("a Shopify token", b"shp", rb"\bshp(?:at|ca|pa|ss|tka)_[0-9A-Fa-f]{32}"),
    ("a Dropbox token", b"sl.", rb"\bsl\.(?:u\.)?[\w-]{100}"),
    ("a Dynatrace token", b"dt0", rb"\bdt0[a-z]\d\d\.[0-9A-Z]{24}\.[0-9A-Z]{64}"),
    ("a Grafana token", b"gl", rb"\bgl(?:sa_\w{32}_[0-9A-Fa-f]{8}|c_eyJ[\w-]{60})"),
    ("a New Relic key", b"NRAK-", rb"\bNRAK-[0-9A-Z]{27}"),
    ("a Sentry token", b"sntry", rb"\bsntry(?:u_[a-f0-9]{64}|s_eyJ[\w+/=-]{60})"),
    ("a Linear key", b"lin_", rb"\blin_(?:api|oauth)_[A-Za-z0-9]{40}"),
    ("a Notion token", b"ntn_", rb"\bntn_[A-Za-z0-9]{40}"),
    ("a Postman key", b"PMAK-", rb"\bPMAK-[a-f0-9]{24}-[a-f0-9]{34}"),
    (
        "a password in an address",  # except for placeholders
        b"://",
        rb"://[^\s:/@]{1,200}:(?!(?i:[<{$*x%.]|(?:(?:user)?pass(?:word|wd)?|pwd?|secret|token|git|key|changeme)@))"
        rb"[^\s:/@]{1,200}@",
    ),
)


def _compiled(hint: bytes, pattern: bytes) -> re.Pattern[bytes]:
    """The pattern, with the text at its start in front of the boundary: `re` then searches far faster."""
    text = re.escape(hint)
    boundary = rb"\b" + text
    if hint and pattern.startswith(boundary):
        pattern = text + rb"(?<!\w" + text + rb")" + pattern[len(boundary) :]
    return re.compile(pattern)


_PATTERNS = [(kind, hint, _compiled(hint, pattern)) for kind, hint, pattern in TOKENS]
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
    except (zipfile.BadZipFile, tarfile.TarError, NotImplementedError, OSError, ValueError, EOFError):
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
