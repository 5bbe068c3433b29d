"""Secrets stay out of what is recorded of a run, and harmless files stay in.

Every secret here is put together while the tests run, so that this file holds none.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import io
import json
import os
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NAME, ROOT, git

from runlab.config.cli.preflight import preflight
from runlab.config.secrets import masked, secret_content, secret_in_value, secret_name
from runlab.errors import ConfigError
from runlab.run.git.snapshot import take_snapshot

HEX = "0123456789abcdef" * 2 + "01234567"
SHA = "fedcba9876543210" * 2 + "fedcba98"
GITHUB = "gh" + "p_" + "aB3dE" * 8
NEW_WANDB = "wandb" + "_v1_" + "aB3dE" * 10


def arrays(values: Any, save: Any = np.savez) -> bytes:
    """A zip file, which is compressed with `np.savez_compressed` only."""
    out = io.BytesIO()
    save(out, values=values)
    return out.getvalue()


def packed(members: dict[str, bytes], kind: str) -> bytes:
    """An archive whose members are stored as they are."""
    out = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
    else:
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, content in members.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def saved(value: Any) -> bytes:
    """A file of torch, which is a zip file with a number of its own."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def notebook(*lines: str, image: bytes = b"") -> bytes:
    shown = {"data": {"image/png": base64.b64encode(image).decode()}, "output_type": "display_data"}
    cell = {"cell_type": "code", "source": [f"{line}\n" for line in lines], "outputs": [shown]}
    return json.dumps({"cells": [cell], "nbformat": 4}, indent=1).encode()


PLAIN = b"nothing in here\n"
SECRET_TEXTS: dict[str, str] = {
    "login.py": f'import wandb\nwandb.login(key="{HEX}")\n',
    "login_named.py": f'import wandb\n\nkey = "{HEX}"\nwandb.login(key=key)  # do not commit\n',
    "pod.yaml": f"env:\n  - name: WANDB_API_KEY\n    value: {HEX}\n",
    "job.sh": f"cd /share/me/project && export WANDB_API_KEY={HEX}\n",
    "versioned.json": f'{{"version": 1, "wandb_api_key": "{HEX}"}}',
    "relogin.sh": f"git pull && wandb login --relogin --host=https://a.b {HEX}\n",
    "below.txt": f"# of my account, do not commit: wandb\n\n{HEX}\n",
    "alone.txt": f"{HEX}\n",
    "alone_new": NEW_WANDB,
    "github.py": f"TOKEN = '{GITHUB}'\n",
    "aws.cfg": "AK" + "IA" + "ABCDEFGH12345678",
    "aws_pair.txt": "aws_secret" + "_access_key = " + "a1B2/" * 8,
    "hub.py": "login('h" + "f_" + "aB3dE" * 7 + "')",
    "openai.py": "s" + "k-proj-" + "aB3_E" * 8,
    "slack.py": "xo" + "xb-123456789012-abcdef",
    "google.js": "AI" + "za" + "a1B2c3D" * 5,
    "gitlab.yml": "glp" + "at-" + "a1B2c" * 4,
    "npm.txt": "np" + "m_" + "a1B2" * 9,
    "jwt.txt": ".".join(
        base64.urlsafe_b64encode(part).decode().rstrip("=")
        for part in (b'{"alg":"HS256","typ":"JWT"}', b'{"sub":"1234567890"}', b"signature-of-it")
    ),
    "database.py": "url = 'postgresql://" + "me:" + "h7Kd92ls@" + "db.example.org/runs'",
    "key.txt": "-----BEGIN OPENSSH PRIVATE" + " KEY-----\nb3BlbnNz",
    "client.yaml": "client-key-data: "
    + base64.b64encode(b"-----BEGIN RSA PRIVATE" + b" KEY-----\nMIIE").decode(),
}
ALPHABETS = {"U": "ABCDEFGHIJ" * 9, "M": "aB3dE6gH1j" * 9, "N": "0123456789abcdef" * 6}
# The start of each unmistakable form, with a bar in it so that this file holds none, and what follows it:
# U58 stands for 58 characters of the alphabet U.
FORMS = """
    AGE-SECRET|-KEY-1 U58, gs|k_ M52, xa|i- M80, r|8_ M37, GOC|SPX- M28, do|p_v1_ N64, hv|s. M24,
    pp|lx- M48, nv|api- M64, ya|29. M60, cf|ut_ M48, sb|p_ N40, tsk|ey-auth- M12-M30, d|p.pt. M43, s|k_ N48,
    lsv|2_pt_ N32_N10, gl|soat- M20, dck|r_oat_ M30, ATA|TT3xFfG F0M90, xa|pp-1- M30, whs|ec_ M32,
    s|k_test_ M24, shp|at_ N32, gl|sa_ M32_N8, nt|n_ M46, NR|AK- U27, sntr|yu_ N64, lin|_api_ M40,
    S|K N32, ke|y- N32, PM|AK- N24-N34, N32-|us 12, hf|_ M34
"""
SECRET_FILES: dict[str, bytes] = {
    "login.ipynb": notebook("import wandb", f'wandb.login(key="{HEX}")'),
    "named.ipynb": notebook(f'key = "{HEX}"', "wandb.login(key=key)"),
    "utf16.txt": f"wandb login {HEX}".encode("utf-16"),
    "code.zip": arrays(np.zeros(9), np.savez_compressed),
    "broken.zip": arrays(np.zeros(9), np.savez_compressed)[:40],
    "newer.zip": re.sub(rb"(?<=PK\x01\x02..).", b"\x99", arrays(np.zeros(9)), flags=re.DOTALL),
    "log.txt.gz": gzip.compress(PLAIN),
    "arrays.npz": arrays(np.array([f"wandb login {HEX} now"])),
    # The token begins where the head of the member ends.
    "stored.npz": arrays(np.array([GITHUB.encode()])),
    **{
        f"member.{kind}": packed({"a": b"", "alone": GITHUB.encode(), "b": b"x"}, kind)
        for kind in ("zip", "tar")
    },
    **{f"env.{kind}": packed({"deploy/.env": b"PASSWORD=hunter2"}, kind) for kind in ("zip", "tar")},
    "wandb.tar": packed({"wandb_key": HEX.encode()}, "tar"),
    "nested.tar": packed({"inner.zip": packed({"a": GITHUB.encode()}, "zip")}, "tar"),
    "gzip.tar": packed({"log.gz": gzip.compress(PLAIN)}, "tar"),
    "deep.zip": functools.reduce(lambda inner, _: packed({"a": inner}, "zip"), range(5), PLAIN),
    "table.bin": b"\x01\x02name\0" + GITHUB.encode() + b"\0\xff" * 9,
}
SECRET_NAMES = (
    *("passwords.md", "token.html", "secrets.sql", ".env-prod", ".docker/config.json", ".my.cnf"),
    *(".vault-pass", "server.key.old", "settings.ini", "id_rsa.bak", "cert.pem~", "tokens.xml", ".env_local"),
    *("api_keys.rst", "database.ini", "sub/.azure/msal.json", "terraform.tfstate", "gh/hosts.yml"),
)
# A member of more bytes than a number of C holds.
HUGE_TAR = bytearray(packed({"a": PLAIN}, "tar"))
HUGE_TAR[124:136] = b"\x80\0\0\0" + (2**63).to_bytes(8, "big")
HUGE_TAR[148:156] = b"%06o\0 " % (sum(HUGE_TAR[:148]) + 8 * 32 + sum(HUGE_TAR[156:512]))
HARMLESS: dict[str, bytes] = {
    "damaged.tar": bytes(HUGE_TAR),
    "tokenizer.py": b"class Tokenizer:\n    token = 'abc'\n",
    "tokenizer.json": b'{"vocab": {"password": 1}}',
    ".env.example": b"WANDB_API_KEY=your-key\n",
    "ppo.py": (ROOT / NAME / "algos" / "ppo.py").read_bytes(),
    "requirements.lock": "\n".join(f"p{i}==1.0 --hash=sha256:{HEX}{HEX[:24]}" for i in range(5)).encode(),
    "README.md": f"wandb 0.31 logs the run of commit {SHA}; `wandb login` asks for a key\n".encode(),
    "config.yaml": f"_wandb:\n  value: {{}}\ngit_commit:\n  desc: null\n  value: {SHA}\n".encode(),
    "login.yml": f"- uses: docker/login-action@{SHA} # then wandb\n".encode(),
    "test_space.py": b"def test_highs_and_lows_of_the_observation_space_are_kept():\n    pass\n",
    "changes.txt": f"{SHA} fix wandb login\n{HEX} api key is read from a file\n".encode(),
    "image.ipynb": notebook("plot(returns)", image=np.random.default_rng(1).bytes(400_000)),
    "weights.npz": arrays(np.random.default_rng(2).normal(size=(200, 200))),
    "weights.tar": packed({"token_embedding.npy": arrays(np.zeros(3)), "a.py": PLAIN}, "tar"),
    "policy.pt": saved({"token.weight": torch.zeros(9), "password": "none"}),
    "empty.tar": packed({}, "tar"),
    "empty.zip": packed({}, "zip"),
    "zeros.bin": bytes(20_000),
    "noise.bin": np.random.default_rng(3).bytes(300_000),
    "floats.csv": "\n".join(f"{x:.17f}" for x in np.random.default_rng(4).normal(size=5000)).encode(),
    "url.md": b"https://user:password@host/ postgres://user:${PASSWORD}@localhost http://a.b:80/x@y\n",
    "risk.txt": b"risk-aware-exploration-of-the-environment sk-toggleable__content-arrow AKIA hf_hub\n",
    "forms.py": b"gsk_learning_rate_of_the_critic xai-explainable-reinforcement-learning-with-shap r8_conv\n"
    b"self.hvs.update_observation_statistics() key-value-cache sk_learn_pipeline_with_scaler GOCSPX\n"
    b"task_live_evaluation_of_the_policies_ab1 model-us1 SKRL_OBSERVATION_SPACE_OF_THE_ENVIRONMENT dp.pt.x\n",
}


def test_planted_secrets_are_left_out_and_named_and_harmless_lookalikes_stay_in(tmp_path: Path) -> None:
    planted = {name: text.encode() for name, text in SECRET_TEXTS.items()} | SECRET_FILES
    planted |= dict.fromkeys(SECRET_NAMES, PLAIN)
    git(tmp_path, "init", "-q")
    for name, content in {**planted, **HARMLESS}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    snapshot = take_snapshot(tmp_path)
    stored = git(tmp_path, "ls-tree", "-r", "--name-only", f"{snapshot.tree}").splitlines()
    assert {*stored} == {*HARMLESS}
    assert {skipped["path"] for skipped in snapshot.skipped} == {*planted}
    for skipped in snapshot.skipped:
        assert not any(secret in skipped["reason"] for secret in (HEX, GITHUB, NEW_WANDB))
    # They are not in git's objects either.
    blob = git(tmp_path, "hash-object", "login.py").strip()
    with pytest.raises(subprocess.CalledProcessError):
        git(tmp_path, "cat-file", "-e", blob)


def test_every_unmistakable_form_is_known_and_its_start_alone_is_none() -> None:
    whole = re.sub(r"([UMN])(\d+)", lambda run: ALPHABETS[run[1]][: int(run[2])], FORMS.replace("|", ""))
    for start, rest in re.findall(r"([^\s,]+) ([^\s,]+)", whole):
        for text in (f"x = '{start}{rest}'", f"{start}{rest}\n", f'{{"a":"{start}{rest}"}}'):
            assert secret_content(text.encode()), start
            assert secret_content(text.encode("utf-16")), start
        assert f"{start}{rest}" not in masked(f"a/{start}{rest}/b"), start
        harmless = f"x = '{start}', {start}..., {start}<your-key>, {start}your_key"
        assert secret_content(f"{harmless} {start}{rest[: len(rest) // 3]}".encode()) is None, start
        if start[0].isalpha():  # the end of a longer word
            assert start == "AGE-SECRET" + "-KEY-1" or not secret_content(f"my{start}{rest}".encode()), start


def test_tokens_in_names_of_files_targets_of_links_and_branches_are_neither_stored_nor_recorded(
    tmp_path: Path,
) -> None:
    git(tmp_path, "init", "-q", "-b", f"fix-{GITHUB}")
    (tmp_path / "a.py").write_bytes(PLAIN)
    (tmp_path / "link").symlink_to("a.py")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "first")
    (tmp_path / f"{GITHUB}.log").write_bytes(PLAIN)
    (tmp_path / GITHUB).mkdir()
    (tmp_path / GITHUB / "b.py").write_bytes(PLAIN)
    (tmp_path / "new_link").symlink_to(f"/mnt/{GITHUB}/data")
    (tmp_path / "fine").symlink_to("/mnt/data")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(f"/mnt/{GITHUB}")
    snapshot = take_snapshot(tmp_path)
    stored = git(tmp_path, "ls-tree", "-r", "--name-only", f"{snapshot.tree}").split()
    assert stored == ["a.py", "fine", "link"]
    assert git(tmp_path, "cat-file", "blob", f"{snapshot.tree}:link") == "a.py"
    kind = "likely secret: its {} contains a GitHub token"
    assert {each["path"]: each["reason"] for each in snapshot.skipped} == {
        "(a secret).log": kind.format("name"),
        "(a secret)/b.py": kind.format("name"),
        "new_link": kind.format("target"),
        "link": f"{kind.format('target')}; the version of the base commit is kept",
    }
    assert GITHUB not in json.dumps(dataclasses.asdict(snapshot))
    assert snapshot.branch == "fix-(a secret)"


@pytest.mark.parametrize("text", ["eyJ", "xoxb", "wandb login -a ", "://a:b", "aws key "])
def test_a_long_file_takes_no_longer_than_its_length_allows(text: str) -> None:
    assert secret_content(text.encode() * 100_000) is None


def test_nothing_of_this_project_is_taken_for_a_secret() -> None:
    """But for policies, which are compressed: they are recorded because they are committed."""
    listed = git(ROOT, "ls-files", "-z", ":!results/policies").split("\0")[:-1]
    for path in filter(os.path.isfile, (str(ROOT / name) for name in listed)):
        name = Path(path).relative_to(ROOT).as_posix()
        assert (secret_name(name), secret_content(Path(path).read_bytes(), name)) == (None, None), name


RANDOM = "h7Kd92lsQ0mZx81bTr4u"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("note", f"'my W&B key is {HEX}'"),
        ("+env.kwargs.api_key", HEX),
        *((f"+env.kwargs.{name}", RANDOM) for name in ("password", "tokens", "db_pass")),
        ("seed", GITHUB),
        ("seed", "${oc.env:MINE}"),
        ("+env.kwargs", f"{{a: 1, 'api_key': '{RANDOM}'}}"),
        ("env.nosuch", f"{{b: {{db_pass: [{RANDOM}]}}}}"),
    ],
)
def test_a_secret_in_a_value_is_refused_by_its_key_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    monkeypatch.setenv("MINE", GITHUB)
    with pytest.raises(ConfigError) as refused:
        preflight([f"{key}={value}", "local=null"])
    message = str(refused.value)
    assert message.startswith(key.lstrip("+"))
    assert "\n" not in message
    assert not any(secret in message for secret in (HEX, GITHUB, RANDOM))


def test_a_secret_in_a_file_of_this_machine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "mine.yaml").write_text(f"# @package _global_\nnote: {GITHUB}\n")
    with pytest.raises(ConfigError, match=r"^note: its value holds a GitHub token; ") as refused:
        preflight([f"--config-dir={tmp_path}", "local=mine"])
    assert GITHUB not in str(refused.value)


def test_a_long_value_that_is_no_secret_is_taken() -> None:
    values = {
        "note": f"a long note, about commit {SHA} and why it learns more slowly than the run before it did",
        "env.kwargs.commit": SHA,
        "env.kwargs.token": "blue",
        "env.kwargs.bypass": "a-way-around-wall-12",
        "env.kwargs.tokenizer": "a_rather_long_name_of_a_tokenizer_2",
        "logger.wandb.project": "20241122-seed1-abcdef-and-more-of-it",
    }
    assert [secret_in_value(key, value) for key, value in values.items()] == [None] * len(values)
