"""A machine either has the profile's bits or is refused by the name of what differs; other libraries, threads
and inherited variables change nothing.

Another machine is played by the variables that make libraries take the code they would take there.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Configure
from test_switches import answer

from runlab.determinism import golden, kernels, switches
from runlab.errors import ConfigError
from runlab.machine import cpu_identity

# The digests in the way of the profile and in the plain way, and what the profile's check finds.
SCRIPT = """
import json, sys
from runlab.config.loading import from_dict
from runlab.determinism import golden, kernels, switches
from runlab.errors import ConfigError

config = from_dict(json.loads(sys.stdin.read()))
level = config.determinism

def attempt(function, *arguments):
    try:
        return function(*arguments)
    except ConfigError as error:
        return {"refused": str(error)}

settings = seen = attempt(switches.apply, config)
if "refused" not in settings:
    seen = {"digests": golden.digests(), "check": attempt(golden.check, level, False)}
    level.golden = seen["digests"] | {"tanh": seen["digests"]["tanh"][::-1]}
    seen["flipped"] = attempt(golden.check, level, False)
    switches.use_blas_threads(2)
    seen["two threads"] = attempt(switches.confirm, settings)
    kernels.use("plain")
    seen["plain"] = golden.digests(physics=False)
print(json.dumps(seen))
"""


OTHERS: dict[str, dict[str, str]] = {  # machines that MKL would treat in another way
    "the least CPU": {"MKL_CBWR": "COMPATIBLE"},
    "no AVX": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "OPENBLAS_NUM_THREADS": "2"},
}
LACKING = {
    "cpu_capability": {"!ATEN_CPU_CAPABILITY": "default"},
    "blas_kernels": {"!OPENBLAS_CORETYPE": "Sandybridge"},
    "numpy": {"!NPY_DISABLE_CPU_FEATURES": ""},
}


@pytest.fixture(scope="module")
def answers(configure: Configure) -> dict[str, dict[str, Any]]:
    """All answers, from two processes at a time."""
    profiled = configure("determinism=profile")
    jobs = [(profiled, each) for each in ({}, *OTHERS.values(), *LACKING.values())]
    # Waiting threads would otherwise spin, on cores that others need.
    jobs.append((replace(profiled, num_threads=2), {"OMP_WAIT_POLICY": "passive"}))
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda job: answer(SCRIPT, *job), jobs))
    if "refused" in outcomes[0]:
        pytest.skip(f"this machine does not have the profile's instructions: {outcomes[0]['refused']}")
    return dict(zip(["base", *OTHERS, *LACKING, "two threads"], outcomes, strict=True))


@pytest.mark.long
def test_this_machine_passes_or_is_refused_by_the_name_of_what_differs(
    answers: dict[str, dict[str, Any]], configure: Configure
) -> None:
    seen, recorded = answers["base"], configure("determinism=profile").determinism.golden
    assert list(seen["digests"]) == list(recorded) == list(golden.PARTS)
    differing = [part for part, digest in seen["digests"].items() if digest != recorded[part]]
    if differing:
        words = rf"not of the class x86-avx2: {differing[0]} gives .*; use determinism=invariant$"
        assert re.search(words, seen["check"]["refused"])
    else:
        assert seen["check"]["holds"] is True
    right = seen["digests"]["tanh"]
    assert seen["flipped"]["refused"] == (
        f"determinism=profile: this machine is not of the class x86-avx2: tanh gives {right} instead of "
        f"{right[::-1]}; use determinism=invariant"
    )
    assert "blas_threads was 1 and is 2 after the env" in seen["two threads"]["refused"]


@pytest.mark.long
def test_other_machines_compute_the_same_and_without_the_profile_they_do_not(
    answers: dict[str, dict[str, Any]],
) -> None:
    for other in (*OTHERS, "two threads"):
        assert answers[other]["digests"] == answers["base"]["digests"]
    assert any(answers[other]["plain"] != answers["base"]["plain"] for other in OTHERS)


@pytest.mark.long
def test_a_variable_that_did_not_take_is_caught(answers: dict[str, dict[str, Any]]) -> None:
    assert "cpu_capability should be AVX2 and is DEFAULT" in answers["cpu_capability"]["refused"]
    assert "blas_kernels should be Haswell and is" in answers["blas_kernels"]["refused"]
    assert "this machine cannot be x86-avx2; use determinism=invariant" in answers["blas_kernels"]["refused"]
    if "avx512_vnni" in cpu_identity()[1]:  # a CPU without AVX-512 has nothing to switch off
        words = r"numpy_instructions should be .* and is \[.*'X86_V4'.*cannot be x86-avx2"
        assert re.search(words, answers["numpy"]["refused"])


def test_a_gpu_is_no_cpu(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    profiled = configure("determinism=profile", "device=cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"device=cuda: .* use device=cpu, or determinism=invariant"):
        switches.apply(profiled)
    torch.set_deterministic_debug_mode("default")


def test_digests_cover_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one result changes the digest of its part, and of no other."""
    before = golden.digests(physics=False)
    exact = kernels.sqrt

    def wrong(x: Any) -> Any:
        y = exact(x)
        if y.numel() > 1000 and not y.requires_grad:
            y.view(-1).numpy().view("u4")[-1] ^= 1 << 20
        return y

    monkeypatch.setattr(kernels, "sqrt", wrong)
    after = golden.digests(physics=False)
    assert {part for part in before if before[part] != after[part]} == {"sqrt", "update"}
