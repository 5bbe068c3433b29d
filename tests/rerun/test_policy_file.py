"""Policy files of other people: what they may name, how large they may be, and their wrong shapes."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from conftest import Configure, build, git, small

from runlab.__main__ import main
from runlab.config.loading import to_dict
from runlab.rerun.policy_file import export_policy
from runlab.run import paths, trust
from runlab.run.checkpoint import Checkpoints
from runlab.run.record import RunRecord


@dataclass
class Policy:
    """The content of a policy file, to be changed and sealed again."""

    manifest: dict[str, Any]
    state: dict[str, Any]
    name: str = "step_64"
    packed: bytes | None = None  # in the place of the packed state
    text: str | None = None  # in the place of the manifest

    @property
    def config(self) -> dict[str, Any]:
        return self.manifest["config"]  # type: ignore[no-any-return]

    def write(self, file: Path, kind: int = zipfile.ZIP_DEFLATED) -> Path:
        """Write the file with the right digests."""
        if self.packed is None:
            held = io.BytesIO()
            torch.save(self.state, held)
            self.packed = held.getvalue()
        if "state" in self.manifest and isinstance(self.manifest["state"], str):
            self.manifest["state"] = xxhash.xxh3_128_hexdigest(self.packed)
        text = json.dumps(self.manifest) if self.text is None else self.text
        sealed = f"{xxhash.xxh3_128_hexdigest(text.encode())}\n{text}".encode()
        with zipfile.ZipFile(file, "w", kind) as archive:
            archive.writestr(f"{self.name}.pt", self.packed)
            archive.writestr(f"{self.name}.json", sealed)
        return file


def export(configure: Configure, folder: Path, algo: str) -> Path:
    """A policy file of an algorithm on CartPole, or on Pendulum."""
    env = "Pendulum" if algo == "sac" else "CartPole"
    config = configure(*small(algo, "algo.hidden_sizes=[16,16]", env=env))
    algorithm, _ = build(config)
    algorithm.train_iteration()
    Checkpoints(folder, to_dict(config), 1).save(64, algorithm.state_dict(), None)
    algorithm.close()
    export_policy(folder, folder / "good.zip")
    return folder / "good.zip"


def opened(file: Path) -> Policy:
    with zipfile.ZipFile(file) as archive:
        (name,) = (Path(each).stem for each in archive.namelist() if each.endswith(".pt"))
        state = torch.load(io.BytesIO(archive.read(f"{name}.pt")), weights_only=True)
        return Policy(json.loads(archive.read(f"{name}.json").partition(b"\n")[2]), state, name)


@pytest.fixture(scope="module")
def exported(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy file of PPO."""
    return export(configure, tmp_path_factory.mktemp("exported"), "ppo")


@pytest.fixture
def policy(exported: Path) -> Policy:
    return opened(exported)


@pytest.fixture(autouse=True)
def in_own_folder(own_scratch: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Evaluate a policy that must be refused in a line or two; these."""

    def evaluate(policy: Policy | Path, *words: str) -> str:
        file = policy if isinstance(policy, Path) else policy.write(tmp_path / "bad.zip")
        assert main(["evaluate", f"policy={file}", "episodes=1", *words]) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: ")
        assert message.count("\n") <= 2
        assert len(message) < 700
        return message

    return evaluate


Change = Callable[[Policy], object]


GONE, NAN, HUGE = object(), math.nan, 10**30
SIZE = b"J" + (200_000_000).to_bytes(4, "little") + b"\x85"  # the argument of a pickled call


def put(key: str, value: Any, part: str = "manifest") -> Change:
    """Sets a value of the manifest or of the state, or takes it away; a function gets the present one."""
    *parents, last = key.split(".")

    def change(policy: Policy) -> None:
        node = reduce(getitem, parents, getattr(policy, part))
        if value is GONE:
            del node[last]
        else:
            node[last] = value(node[last]) if callable(value) else value

    return change


def of_state(key: str, value: Any) -> Change:
    return put(key, value, "state")


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def doubled(times: int) -> Any:
    """A small structure with very many values."""
    value: Any = [0.0, 0.0]
    for _ in range(times):
        value = [value, value]
    return value


def repacked(
    policy: Policy, kind: int = zipfile.ZIP_STORED, part: str = "", change: Callable[[bytes], bytes] = bytes
) -> None:
    """The state in an archive of its own, with compression or with another content of a part."""
    held, made = io.BytesIO(), io.BytesIO()
    torch.save(policy.state, held)
    with zipfile.ZipFile(held) as old, zipfile.ZipFile(made, "w", kind) as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change(content) if name.endswith(part) else content)
    policy.packed = made.getvalue()


def larger_than_it_is(policy: Policy) -> None:
    """A stored part that says in the table of contents that it is a terabyte long."""
    repacked(policy)
    assert policy.packed is not None
    at = policy.packed.rindex(b"PK\x01\x02")
    policy.packed = policy.packed[: at + 20] + struct.pack("<II", 2**31, 2**31) + policy.packed[at + 28 :]


def naming(name: str, arguments: bytes) -> Change:
    """A further value of the state, which the function `name` makes while the state is read."""
    call = b"X\x01\x00\x00\x00z" + f"c{name}\n".encode() + arguments + b"Rs."
    return lambda policy: repacked(policy, part="data.pkl", change=lambda content: content[:-1] + call)


def with_two_tables(policy: Policy) -> None:
    """An archive whose end names the table of one archive by its place, and that of another by its size."""
    repacked(policy)
    plain = policy.packed
    naming("__builtin__\nbytearray", SIZE)(policy)
    assert plain is not None
    assert policy.packed is not None
    (size, table), (also, at) = (struct.unpack("<II", each[-10:-2]) for each in (policy.packed, plain))
    assert size == also
    shown = bytearray(plain[at:])
    for entry in re.finditer(b"PK\x01\x02", shown):
        (place,) = struct.unpack_from("<I", shown, entry.start() + 42)
        struct.pack_into("<I", shown, entry.start() + 42, table - at + place)
    struct.pack_into("<I", shown, len(shown) - 6, table)
    policy.packed = policy.packed[: table + size] + plain[:at] + shown


def manifest_is(text: str) -> Change:
    return lambda policy: setattr(policy, "text", text)


def packed_is(content: Any, legacy: bool = False) -> Change:
    def change(policy: Policy) -> None:
        held = io.BytesIO()
        torch.save(content, held, _use_new_zipfile_serialization=not legacy)
        policy.packed = held.getvalue()

    return change


def cut(policy: Policy) -> None:
    packed_is(policy.state)(policy)
    assert policy.packed is not None
    policy.packed = policy.packed[: len(policy.packed) // 2]


# Wrong values by key.
OF_MANIFEST: dict[str, list[Any]] = {
    "version": [GONE, "6", 6.0, HUGE, [6]],
    "state": [GONE, 5, None],
    "chunks": [GONE, ["a"], {"../../x.pt": "0"}, {"/etc/passwd": "0"}, {"experience_0_5.pt": 5}],
    "config": [GONE, [], "x", {}],
    "config.surprise": [{"a": 1}],
    "config.seed": ["x", HUGE],
    "config.determinism": [[]],
    "config.determinism.level": ["most"],
    "config.algo": [GONE, [], "ppo", None],
    "config.algo.name": [5, "pop", ["ppo"], "\x1b[31mppo", "sac"],
    "config.algo.gamma": ["high", NAN, 2.0, None, {"a": 1}],
    "config.algo.hidden_sizes": [[], "[64]", 64, [16.5, 16.5], [-16, 16], [NAN], [[16], [16]], [8, 8]],
    "config.algo.activation": ["os.system"],
    "config.algo.normalize_obs": ["perhaps"],
    "config.algo.surprise": [1],
    "config.env": [None, [1], "CartPole-v1"],
    "config.env.id": [
        *(None, 5, "", "CarPole-v1", "///", "../../x:A-v0", "a:b:CartPole-v1", "os:", "Acrobot-v1"),
    ],
    "config.env.max_episode_steps": ["long", -1],
    "config.env.num_envs": [HUGE],
    "config.env.kwargs": [[1], "a", {"surprise": 1}, {"render_mode": "human"}, {"a": nested(500)}],
    "config.env.wrappers": [
        *(["TimeLimit"], "TimeLimit", {"TimLimit": None}, {"TimeLimit": 5}, {"": {}}, {"...": {}}),
        {"TransformReward": {"func": "print"}},
        {"pydoc.pipepager": {"cmd": "touch executed"}},
        {"gymnasium.wrappers.common.Any": {}},
        {"FrameStackObservation": {"stack_size": 10**9}},
        {"ReshapeObservation": {"shape": [10**5, 10**5]}},
    ],
}
OF_STATE: dict[str, list[Any]] = {
    "env_steps": [GONE, NAN, "many", []],
    "net": [GONE, "net", [1]],
    "net.params": [GONE, 3.0, None, "0"],
}
CHANGES: dict[str, Change] = {
    f"{key}={'gone' if value is GONE else value!r:.40}": put(key, value, part)
    for part, wrong in (("manifest", OF_MANIFEST), ("state", OF_STATE))
    for key, values in wrong.items()
    for value in values
}
CHANGES |= {
    "manifest empty": manifest_is(""),
    "manifest null": manifest_is("null"),
    "manifest number": manifest_is("5"),
    "manifest list": manifest_is("[]"),
    "manifest deep": manifest_is("[" * 100_000),
    "manifest deep objects": manifest_is('{"a":' * 50_000),
    "manifest digits": manifest_is('{"version": ' + "9" * 6_000 + "}"),
    "manifest cut": manifest_is('{"version": 6, "state": "'),
    "manifest surrogate": manifest_is('{"version": "\\ud800\\u001b[31m"}'),
    "sizes absurd": put("config.algo.hidden_sizes", [16_384] * 40),
    "sizes many": put("config.algo.hidden_sizes", [1] * 100_000),
    "state list": packed_is([1, 2]),
    "state text": packed_is("state"),
    "state tensor": packed_is(torch.zeros(3)),
    "state empty": packed_is({}),
    "state cut": cut,
    "state no archive": lambda policy: setattr(policy, "packed", b"no archive"),
    "state nothing": lambda policy: setattr(policy, "packed", b""),
    "state legacy": packed_is({"env_steps": 1}, legacy=True),
    "state compressed": lambda policy: repacked(policy, zipfile.ZIP_DEFLATED),
    "state long record": lambda policy: repacked(policy, part="data/0", change=lambda data: data + bytes(64)),
    "state terabyte": larger_than_it_is,
    "state bytes of a number": naming("__builtin__\nbytearray", SIZE),
    "state storage of a number": naming("torch.storage\nUntypedStorage", SIZE),
    "state place of a number": naming("collections\nOrderedDict", b")r\0\0\0\1"),
    "state of two tables": with_two_tables,
    "state deep": of_state("deep", nested(200)),
    "state doubled": of_state("doubled", doubled(60)),
    "state expanded": of_state("expanded", torch.zeros(1).expand(10**12)),
    "state odd keys": of_state("odd", {(1, 2): 3}),
    "params short": of_state("net.params", lambda old: old[:-1].clone()),
    "params one": of_state("net.params", torch.zeros(1)),
    "params square": of_state("net.params", lambda old: old[None].clone()),
    "params whole numbers": of_state("net.params", lambda old: old.long()),
    "params double": of_state("net.params", lambda old: old.double()),
    "params complex": of_state("net.params", lambda old: old.to(torch.complex64)),
    "params sparse": of_state("net.params", lambda old: old.to_sparse()),
    "params nan": of_state("net.params", lambda old: old * NAN),
    "params infinite": of_state("net.params", lambda old: old + math.inf),
}
FAST = (
    "state bytes of a number",
    "config='gone'",
    "config.algo=[]",
    "manifest deep",
    "sizes absurd",
    "state expanded",
    "params one",
    "params nan",
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.long) for n in CHANGES]
)
def test_a_policy_file_of_wrong_shape_is_refused_in_a_line(
    name: str, policy: Policy, refused: Refused
) -> None:
    CHANGES[name](policy)
    refused(policy)
    assert not Path("executed").exists()


def enlarged(policy: Policy) -> None:
    """One residual block of thousands of numbers, whose layers are all inner ones."""
    policy.config["algo"] |= {"network": "residual", "hidden_sizes": [4096]}


VARIANTS: dict[str, list[tuple[Change, str]]] = {
    "sac": [(enlarged, "its networks are larger: ")],
    "ppo_moe": [
        (put("config.algo.num_experts", 1024), "its networks are larger: "),
        (put("config.algo.num_experts", 7), "does not fit what this code makes"),
        (put("config.algo.num_chosen", 9), "must be at most algo.num_experts=8"),
        (put("config.algo.rollout_bits", 0), "must be at least 1"),
    ],
    "ppo_recurrent": [
        (put("config.algo.memory_size", 4096), "its networks are larger: "),
        (put("config.algo.memory_size", 7), "does not fit what this code makes"),
        (put("config.algo.sequence_length", 3), "does not divide algo.num_steps=16"),
        (of_state("carry", GONE), "carry"),
        (of_state("carry", [1]), "carry"),
        (of_state("carry.memory", lambda old: old[:, 1:].clone()), "carry.memory"),
        (of_state("carry.begins", torch.zeros(9)), "carry.begins"),
        (of_state("carry.memory", lambda old: old * NAN), "not finite"),
    ],
}


@pytest.mark.parametrize("algo", VARIANTS)
def test_wrong_files_of_other_algorithms_are_refused_in_a_line_and_the_right_one_plays(
    algo: str, configure: Configure, tmp_path: Path, refused: Refused
) -> None:
    """A small file builds no network that is larger than the file."""
    file = export(configure, tmp_path, algo)
    for change, problem in VARIANTS[algo]:
        policy = opened(file)
        change(policy)
        assert problem in refused(policy)
    assert main(["evaluate", f"policy={file}", "episodes=1"]) == 0


def test_the_file_that_the_wrong_ones_are_made_of_plays(
    exported: Path, policy: Policy, tmp_path: Path, refused: Refused
) -> None:
    """The inverse: neither its shape nor the way in which it is changed is what is refused."""
    assert main(["evaluate", f"policy={exported}", "episodes=1"]) == 0
    # Each wrapper is small, and makes observations that no network of this size reads.
    policy.config["env"]["wrappers"] = {"FrameStackObservation": {"stack_size": 60_000}}
    assert "its networks are larger: 240,000 or more" in refused(policy)
    policy.config["env"]["wrappers"] |= {"gymnasium.wrappers.FrameStackObservation": {"stack_size": 60_000}}
    assert "may have wrappers of Gymnasium" in refused(policy)
    policy.config["env"]["wrappers"] = {"TimeLimit": {"max_episode_steps": 5}}
    assert main(["evaluate", f"policy={policy.write(tmp_path / 'good.zip')}", "episodes=1"]) == 0


def test_a_file_of_any_name_is_unpacked_into_a_folder_that_is_removed(exported: Path, tmp_path: Path) -> None:
    """`own_scratch` sees what is left beside the folder."""
    file = shutil.copy(exported, tmp_path / "...zip")
    assert main(["evaluate", f"policy={file}", "episodes=1"]) == 0


def test_an_archive_of_other_files_or_of_zeros_is_not_unpacked(
    policy: Policy, refused: Refused, tmp_path: Path
) -> None:
    """A kilobyte may say that it is a terabyte; nothing is written before that is seen."""
    file = policy.write(tmp_path / "policy.zip")
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../outside.txt", "x")
    assert "expected the two files of one checkpoint" in refused(file)
    policy.name = "step_5/../../outside"
    assert "expected the two files" in refused(policy)
    bomb = tmp_path / "bomb.zip"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("step_5.json", bytes(5))
        archive.writestr("step_5.pt", bytes(20_000_000))
    assert bomb.stat().st_size < 100_000
    assert "unpacks to more than" in refused(bomb)
    packed = policy.write(tmp_path / "packed.zip", zipfile.ZIP_LZMA).read_bytes()
    for content in (
        packed[:60] + bytes(90) + packed[150:],
        b"",
        b"PK",
        file.read_bytes()[:-30],
        file.read_bytes()[30:],
        bytes(1000),
    ):
        bomb.write_bytes(content)
        refused(bomb)
    bomb.unlink()
    bomb.mkdir()
    refused(bomb)


def test_a_film_is_not_written_through_a_link(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, outside = Path(shutil.copytree(exported.parent, tmp_path / "received")), tmp_path / "outside"
    RunRecord(id="received", status="finished").write(run_dir)
    outside.mkdir()
    (run_dir / paths.VIDEOS).symlink_to(outside)
    assert main(["film", f"run={run_dir}"]) == 2
    assert "videos is a link to" in capsys.readouterr().err
    assert not list(outside.iterdir())
    assert main(["evaluate", f"run={run_dir}", "episodes=1"]) == 0


@pytest.mark.parametrize(
    "env",
    [
        {"wrappers": {"pydoc.pipepager": {"cmd": "touch executed"}}},
        {"training_wrappers": {"payload:Wrapper": None}},
        {"wrappers": {"RecordVideo": {"video_folder": "executed"}}},
        {"wrappers": {"gymnasium.wrappers.rendering:RecordVideo": {"video_folder": "executed"}}},
        {"wrappers": {"os.path:join": None, "TimeLimit": {"max_episode_steps": 5}}},
        {"id": "payload:Payload-v0"},
        {"id": "runs.group.run.payload:Payload-v0"},
        {"id": "this:Payload-v0"},
        {"id": "pip.__main__:Payload-v0"},
        {"id": "GymV26Environment-v0", "kwargs": {"env_id": "payload:P-v0"}},
    ],
    ids=str,
)
def test_a_file_names_no_code_that_came_along(
    env: dict[str, Any],
    policy: Policy,
    refused: Refused,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "runs/group/run").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "runs/group/run"):
        (folder / "payload.py").write_text(PAYLOAD)
    policy.config["env"] |= env
    name = next(iter(env.get("wrappers", env.get("training_wrappers", [env.get("id")]))))
    message = refused(policy)
    assert f"{name}" in message
    assert "trust=true" in message
    assert not (tmp_path / "executed").exists()
    if "payload" in name:  # trusted, it is imported
        main(["evaluate", f"policy={policy.write(tmp_path / 'bad.zip')}", "episodes=1", "trust=true"])
        assert (tmp_path / "executed").exists()
        del sys.modules[name.partition(":")[0]]
    capsys.readouterr()


PAYLOAD = """\
import pathlib
import gymnasium as gym
pathlib.Path("executed").touch()
class Wrapper(gym.Wrapper):
    pass
gym.register("Payload-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=5)
"""


def test_environments_of_installed_packages_and_committed_files_need_no_trust(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy.config["env"]["id"] = "gymnasium.envs.classic_control:CartPole-v1"
    assert main(["evaluate", f"policy={policy.write(tmp_path / 'good.zip')}", "episodes=1"]) == 0
    policy.config["env"]["id"] = "committed.envs:Payload-v0"
    file = f"policy={policy.write(tmp_path / 'good.zip')}"
    project = tmp_path / "project"
    (project / "committed").mkdir(parents=True)
    (project / "committed/envs.py").write_text(PAYLOAD)
    monkeypatch.setattr(trust, "PROJECT", project)
    monkeypatch.syspath_prepend(project)
    git(project, "init", "-q")
    git(project, "add", "-A")
    assert main(["evaluate", file, "episodes=1"]) == 2
    git(project, "commit", "-q", "-m", "an environment")
    assert main(["evaluate", file, "episodes=1"]) == 0
    (project / "committed/__init__.py").touch()  # not committed, and importing the module executes it
    monkeypatch.delitem(sys.modules, "committed.envs")
    monkeypatch.delitem(sys.modules, "committed")
    assert main(["evaluate", file, "episodes=1"]) == 2
