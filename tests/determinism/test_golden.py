"""A machine either has the profile's bits or is refused by the name of what differs; other libraries, threads
and inherited variables change nothing.

Another machine is played by the variables that make libraries take the code they would take there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, program
from hydra import compose, initialize_config_dir

from rltemplate.config.loading import to_config, to_dict
from rltemplate.config.schema import Config, DeterminismConfig, register_schemas
from rltemplate.determinism import golden
from rltemplate.determinism.machine import cpu_identity
from rltemplate.determinism.switches import process_environment
from rltemplate.types import ConfigError

# A small training in the way of the profile and in the plain way, and what the profile's check finds.
SCRIPT = """
import json, sys
import torch, xxhash
from rltemplate.determinism import blas, kernels
from rltemplate.config.loading import from_dict
from rltemplate.learning.distributions import DiagGaussian
from rltemplate.learning.networks import mlp
from rltemplate.learning.optim import FlatModule, adam, adam_init, clip_by_norm, gradient
from rltemplate.determinism import golden as profile, switches as determinism
from rltemplate.types import ConfigError

config = from_dict(json.loads(sys.stdin.read()))
switches = config.determinism
try:
    settings = determinism.apply(switches, config.num_threads)
except ConfigError as error:
    print(json.dumps({"refused": str(error)}))
    sys.exit()

def loop(products):
    kernels.use(products)
    generator = torch.Generator().manual_seed(1)
    net, dist = mlp([11, 64, 64, 6], "tanh", generator, orthogonal_gain=1.0), DiagGaussian(3)
    flat = FlatModule(net)
    values, state, seen = flat.flat.clone(), adam_init(flat.flat), xxhash.xxh3_64()
    def loss(leaf, obs, action):
        params = flat.call(leaf, obs)
        return -(kernels.exp(0.1 * dist.log_prob(params, action))).mean() - dist.entropy(params).mean(), None
    for _ in range(12):
        obs = torch.randn(512, 11, generator=generator)
        with torch.no_grad():
            params = net(obs[:8])
            action = dist.sample(params, dist.noise(8, generator))
        grad, _ = gradient(loss, values, obs, action.repeat(64, 1))
        with torch.no_grad():
            grad, norm = clip_by_norm(grad, 0.5)
            values, state = adam(values, grad, state, torch.tensor(3e-3), 1e-5)
            flat.assign(values)
        for each in (params, action, grad, norm, values):
            seen.update(each.numpy().tobytes())
    return seen.hexdigest()

found = {"plain": loop("plain"), "blas": loop("blas"), "digests": profile.digests(), "check": None}
def refusal(golden, **more):
    switches.golden = golden
    try:
        return profile.check(switches, **more)
    except ConfigError as error:
        return str(error)
found["check"] = refusal(dict(switches.golden))
mine = found["digests"]
found["own"] = refusal(mine)
found["flipped"] = refusal(mine | {"tanh": mine["tanh"][::-1]})
found["missing"] = refusal({name: digest for name, digest in mine.items() if name != "update"})
found["without physics"] = refusal(mine, physics=False)
blas.blas_library().scipy_openblas_set_num_threads64_(2)
try:
    determinism.confirm(settings)
except ConfigError as error:
    found["two threads"] = str(error)
print(json.dumps(found))
"""


def profiled(**changes: Any) -> Config:
    register_schemas()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = to_config(compose("config", overrides=["determinism=profile"]))
    return replace(config, **changes)


def outcome(config: Config, environment: Mapping[str, str | None]) -> dict[str, Any]:
    """What the script finds in a process of this configuration, whose starter has these variables.

    Of those that the profile sets itself, its own values win, unless given as `!NAME`.
    """
    prepared = dict(os.environ, PYTHONPATH=str(ROOT))
    own = process_environment(config.determinism, config.num_threads)
    forced = {name[1:]: value for name, value in environment.items() if name.startswith("!")}
    inherited = {name: value for name, value in environment.items() if not name.startswith("!")}
    for name, value in {**inherited, **own, **forced}.items():
        prepared.pop(name, None)
        if value is not None:
            prepared[name] = value
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(to_dict(config)),
        env=prepared,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


OTHERS: dict[str, dict[str, str | None]] = {
    "MKL for the least CPU": {"MKL_CBWR": "COMPATIBLE"},
    "a CPU without AVX, for MKL, and another order of sets": {
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "OPENBLAS_NUM_THREADS": "2",
        "!PYTHONHASHSEED": "5",
    },
}
LACKING: dict[str, dict[str, str | None]] = {
    "cpu_capability": {"!ATEN_CPU_CAPABILITY": "default"},
    "blas_kernels": {"!OPENBLAS_CORETYPE": "Sandybridge"},
    "onednn_isa": {"!ONEDNN_MAX_CPU_ISA": "SSE41"},
    "numpy": {"!NPY_DISABLE_CPU_FEATURES": None},
}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """All outcomes, from two processes at a time."""
    config = profiled()
    # The hash seed is free here: what it may not change is tried with another one.
    free = replace(config, determinism=replace(config.determinism, hash_seed=None))
    jobs: dict[str, tuple[Config, dict[str, str | None]]] = {"base": (config, {})}
    jobs |= {name: (free if "sets" in name else config, variables) for name, variables in OTHERS.items()}
    # Waiting threads would otherwise spin, on cores that others need.
    jobs["two threads"] = (replace(config, num_threads=2), {"OMP_WAIT_POLICY": "passive"})
    jobs |= {name: (config, variables) for name, variables in LACKING.items()}
    jobs["any numpy"] = (replace(config, determinism=replace(config.determinism, numpy_without=None)), {})
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda job: outcome(*job), jobs.values()))
    if "refused" in outcomes[0]:
        pytest.skip(f"this machine does not have the profile's instructions: {outcomes[0]['refused']}")
    return dict(zip(jobs, outcomes, strict=True))


@pytest.mark.long
def test_this_machine_passes_or_is_refused_by_name(found: dict[str, dict[str, Any]]) -> None:
    seen, recorded = found["base"], profiled().determinism.golden
    assert list(seen["digests"]) == list(golden.PARTS)
    assert list(recorded) == list(golden.PARTS), "record with python -m rltemplate golden"
    differing = [part for part, digest in seen["digests"].items() if digest != recorded[part]]
    if not differing:
        assert seen["check"] == recorded
    else:
        assert re.search(
            rf"not of the class x86-avx2: {differing[0]} \(.*; use determinism=invariant$", seen["check"]
        )
        assert "\n" not in seen["check"]


@pytest.mark.long
@pytest.mark.parametrize("other", [*OTHERS, "two threads"])
def test_other_machines_compute_the_same(found: dict[str, dict[str, Any]], other: str) -> None:
    assert found[other]["blas"] == found["base"]["blas"]
    assert found[other]["digests"] == found["base"]["digests"]
    assert found[other]["own"] == found["base"]["digests"]


@pytest.mark.long
def test_without_the_profile_they_do_not(found: dict[str, dict[str, Any]]) -> None:
    """The same training by torch's own functions: it is the profile that makes machines equal."""
    plain = {found[other]["plain"] for other in OTHERS}
    assert found["base"]["plain"] != found["base"]["blas"]
    assert plain != {found["base"]["plain"]}


@pytest.mark.long
def test_a_variable_that_did_not_take_is_caught(found: dict[str, dict[str, Any]]) -> None:
    assert "cpu_capability should be AVX2 and is DEFAULT" in found["cpu_capability"]["refused"]
    assert "blas_kernels should be Haswell and is" in found["blas_kernels"]["refused"]
    assert "onednn_isa should be AVX2 and is SSE41" in found["onednn_isa"]["refused"]
    for name in ("cpu_capability", "blas_kernels", "onednn_isa"):
        assert "this machine cannot be x86-avx2; use determinism=invariant" in found[name]["refused"]
    # A CPU without AVX-512 computes the same with and without it.
    if "avx512_vnni" in cpu_identity()[1]:
        refused = found["numpy"]["refused"]
        assert re.search(r"numpy_instructions should be .* and is \[.*'X86_V4'.*start runs with", refused)
        assert found["any numpy"]["digests"]["exp"] != found["base"]["digests"]["exp"]
    else:
        assert found["numpy"]["own"] == found["any numpy"]["own"] == found["base"]["own"]


@pytest.mark.long
def test_the_check_names_what_differs(found: dict[str, dict[str, Any]]) -> None:
    seen = found["base"]
    assert seen["own"] == seen["digests"]
    right = seen["digests"]["tanh"]
    assert seen["flipped"] == (
        f"determinism=profile: this machine is not of the class x86-avx2: tanh (tanh and its gradient) gives "
        f"{right} instead of {right[::-1]}; use determinism=invariant"
    )
    assert seen["missing"].startswith("determinism.golden.update: no digest in the profile x86-avx2")
    assert "blas_threads should be 1 and is 2 after the environment was made" in seen["two threads"]
    assert {**seen["without physics"], "physics": seen["digests"]["physics"]} == seen["digests"]


def test_a_gpu_is_no_cpu() -> None:
    switches: DeterminismConfig = profiled().determinism
    with pytest.raises(ConfigError, match=r"device=cuda: .* use device=cpu or determinism=invariant"):
        golden.check(switches, device="cuda")


def test_digests_cover_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one result changes the digest of its part, and of no other."""
    from rltemplate.determinism import kernels

    before = golden.digests(physics=False)
    assert "physics" not in before
    exact = kernels.sqrt

    def wrong(x: Any) -> Any:
        y = exact(x)
        if y.numel() > 1000 and not y.requires_grad:
            y.view(-1).numpy().view("u4")[-1] ^= 1 << 20
        return y

    monkeypatch.setattr(kernels, "sqrt", wrong)
    after = golden.digests(physics=False)
    assert {part for part in before if before[part] != after[part]} == {"sqrt", "update"}


# --- Recording -------------------------------------------------------------------------------------------


def golden_script(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*program(folder, "golden"), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.long
def test_digests_are_recorded_with_their_meaning(tmp_path: Path, found: dict[str, dict[str, Any]]) -> None:
    for name in ("rltemplate", "conf", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "conf" / "determinism" / "profile.yaml"
    digest = yaml.safe_load(file.read_text())["golden"]["exp"]
    file.write_text(file.read_text().replace(digest, "0" * 16))
    done = golden_script(tmp_path, "profile=x86-avx2", "--write")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^exp +[0-9a-f]{16}  differs$", done.stdout, re.MULTILINE)
    content = yaml.safe_load(file.read_text())
    assert content["golden"] == found["base"]["digests"]
    assert content["numpy_without"] == profiled().determinism.numpy_without
    assert f'  exp: "{content["golden"]["exp"]}" # {golden.PARTS["exp"][0]}\n' in file.read_text()
    assert re.search(r"^golden: # recorded on \S.*numpy \d", file.read_text(), re.MULTILINE)


def test_an_unknown_profile_is_refused() -> None:
    done = golden_script(ROOT, "profile=x86-avx")
    assert done.returncode == 2
    assert done.stderr == "error: profile=x86-avx: did you mean x86-avx2? allowed: x86-avx2\n"
