"""Changes between two runs are counted as a researcher would count them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import NAME, git, write_run

from runlab.__main__ import main
from runlab.analysis.differences import compare_records, listed, verdict
from runlab.analysis.runs import Run
from runlab.config import affects_results
from runlab.config.affects_results import (
    BOOKKEEPING_KEYS,
    EXECUTION_KEYS,
    OBSERVER_KEYS,
    code_rule,
    package_affects_results,
)
from runlab.errors import ConfigError
from runlab.run.record import RunRecord

PPO = {"name": "ppo", "gamma": 0.99, "clip_coef": 0.2, "hidden_sizes": [64, 64]}
SAC = {"name": "sac", "gamma": 0.98, "tau": 0.005, "hidden_sizes": [256, 256]}
CONFIG: dict[str, Any] = {
    "algo": PPO,
    "env": {"id": "Hopper-v5", "num_envs": 8, "kwargs": {}},
    "determinism": {"level": "repeat", "products": "plain", "cpu_capability": None},
    "recipe": "ppo-Hopper",
    "experiment": None,
    "seed": 1,
    "device": "cpu",
    "num_threads": 1,
}
RECORD: dict[str, Any] = {
    "schema": 1,
    "status": "finished",
    "git": {"tree": "1" * 40, "commit": "2" * 40, "base_commit": "3" * 40, "dirty": False},
    "determinism": {"level": "repeat", "settings": {"mkl_branch": "none", "torch_num_threads": 1}},
    "environment": {"OMP_NUM_THREADS": "1"},
    "versions": {"torch": "2.13.0", "numpy": "2.4.6", "wandb": "0.31.0", "runlab": "1.0.0"},
    "machine": {"cpu": "AMD EPYC", "logical_cores": 8, "memory_bytes": 10, "python": "3.11.7", "gpus": []},
}


def run(name: str, overrides: str = "", config: dict[str, Any] | None = None, **record: Any) -> Run:
    """A run with other values by dotted key, and with other facts in sections of its record."""
    values, facts = copy.deepcopy(CONFIG), copy.deepcopy(RECORD)
    for key, value in (config or {}).items():
        parent, _, last = key.rpartition(".")
        at = values
        for part in filter(None, parent.split(".")):
            at = at[part]
        at[last] = copy.deepcopy(value)
    for section, value in record.items():
        facts[section] = facts.get(section, {}) | value if isinstance(value, dict) else value
    facts |= {"id": name, "overrides": overrides.split()}
    return Run(Path(), RunRecord.parse(json.dumps(facts), name), values)


def names(a: Run, b: Run, files: list[str] | None = None) -> list[str]:
    """The factors between two runs, by name; the same the other way round."""
    forth, back = (compare_records(*pair, files or []).factors for pair in ((a, b), (b, a)))
    assert forth.keys() == back.keys()
    return [*forth]


SAC_VALUES = {"algo": SAC, "recipe": "sac-Hopper", "env.num_envs": 1, "num_threads": 2}
PENDULUM = {"env.id": "Pendulum-v1", "env.num_envs": 4, "recipe": "ppo-Pendulum", "algo.gamma": 0.9}
INVARIANT = {"determinism": {"level": "invariant", "products": "auto", "cpu_capability": "avx2"}}


@pytest.mark.parametrize(
    ("overrides", "config", "expected"),
    [
        ("seed=2", {"seed": 2}, ""),
        ("", dict.fromkeys((*BOOKKEEPING_KEYS, *OBSERVER_KEYS, *EXECUTION_KEYS), "another"), ""),
        # each key is one, given or not
        ("", {"algo.gamma": 0.9, "num_threads": 2, "seed": 2}, "algo.gamma num_threads"),
        ("+env.kwargs.x=1", {"env.kwargs": {"x": 1}}, "env.kwargs.x"),
        # the values of an experiment count one by one, and its name does not
        ("experiment=e", {"experiment": "e", "algo.gamma": 0.9, "num_threads": 2}, "algo.gamma num_threads"),
        ("experiment=e", {"experiment": "e"}, ""),
        ("", {"env.wrappers": {"A": None, "B": {"x": 1, "y": 2}}}, "env.wrappers"),
        # what a level left open follows from the others
        ("", {"algo.hidden_sizes": [63], "determinism.products": "blas"}, "algo.hidden_sizes"),
        # a choice brings its values along, but for those that were given
        ("algo=sac", SAC_VALUES, "algo"),
        ("env=Pendulum +env.kwargs.g=9", PENDULUM | {"env.kwargs": {"g": 9}}, "env"),
        ("env=Pendulum", PENDULUM | {"env.wrappers": {"A": {"x": 1}}}, "env"),
        (
            "env=Pendulum env.wrappers.A.x=1",
            PENDULUM | {"env.wrappers": {"A": {"x": 1}}},
            "env env.wrappers",
        ),
        ("determinism=invariant", INVARIANT | {"algo.gamma": 0.9}, "determinism algo.gamma"),
        ("recipe=other", {"recipe": "other", "algo.gamma": 0.9, "num_threads": 2}, "recipe"),
        # a file beside a choice may have changed what the choice seems to bring
        ("env=Pendulum experiment=e", PENDULUM | {"experiment": "e"}, "env experiment"),
        ("env=Pendulum debug=fast", PENDULUM, "env debug"),
        ("algo=sac experiment=e", SAC_VALUES | {"experiment": "e"}, "algo experiment"),
    ],
)
def test_factors_of_the_configuration(overrides: str, config: dict[str, Any], expected: str) -> None:
    assert names(run("a"), run("b", overrides, config)) == expected.split()


def test_a_text_that_looks_like_a_number_is_told_from_it() -> None:
    a, b = (run(name, config={"env.kwargs": {"x": x}}) for name, x in (("a", "1"), ("b", 1)))
    assert compare_records(a, b, []).factors == {"env.kwargs.x": "'1' -> 1"}


def test_the_order_of_wrappers_is_a_factor() -> None:
    a, b = ({"env.wrappers": dict.fromkeys(order)} for order in ("AB", "BA"))
    assert names(run("a", "", a), run("b", "", b)) == ["env.wrappers"]
    assert names(run("a", "", a), run("b", "", a)) == []
    assert names(run("a"), run("b", "", a), ["runlab/envs/make.py"]) == ["env.wrappers", "code"]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"versions": {"wandb": "0.32", "pytest": "10", "runlab": "2.0.0"}}, []),
        ({"versions": {"torch": "2.14.0", "numpy": "3", "wandb": "1"}}, ["versions"]),
        ({"machine": {"python": "3.12.1"}}, ["versions"]),
        ({"versions": {"c++ compiler": "g++ 12"}}, []),  # for a compiled run, which is a factor of its own
        # another compiler makes other programs, on other hardware as well, and in a part of a run
        ({"versions": {"torch": "2.13.0"}, "determinism": {"settings": {"cpp_compiler": "g++ 12"}}}, []),
        ({"resumed": [{"changed": {"libraries": ["c++ compiler g++ 12 -> g++ 14"]}}]}, ["resumed"]),
        ({"resumed": [{"changed": {"computation": ["sums 1", "sums 7"]}}]}, ["resumed"]),
        ({"resumed": [{"changed": {"cpu": ["A", "B"]}}]}, []),
        (
            {"resumed": [{"changed": {"cpu": ["A", "B"]}}], "versions": {"c++ compiler": "g++ 12"}},
            ["resumed"],
        ),
        ({"machine": {"cpu": "Intel", "logical_cores": 4}}, ["hardware"]),
        ({"machine": {"gpus": [{"name": "H100"}]}}, []),  # not used
        ({"environment": {"ATEN_CPU_CAPABILITY": "avx2"}}, ["settings"]),
        # the processor explains which branch a library takes
        ({"determinism": {"settings": {"mkl_branch": "AVX2"}}, "machine": {"cpu": "Intel"}}, ["hardware"]),
    ],
)
def test_factors_beside_the_configuration(record: dict[str, Any], expected: list[str]) -> None:
    assert names(run("a"), run("b", **record)) == expected
    a, b = (run(x, config={"device": "cuda"}, machine={"gpus": [{"name": x}]}) for x in ("H100", "H200"))
    assert names(a, b) == ["hardware"]  # they count where they are used


def test_the_compiler_is_compared_where_both_runs_are_compiled() -> None:
    """Also in records that had it among the settings."""
    ours, other = (run("r", versions={"c++ compiler": name}) for name in ("g++ 12", "g++ 14"))
    far = run("far", versions={"c++ compiler": "g++ 14"}, machine={"cpu": "Intel"})
    older = run("older", determinism={"settings": {"cpp_compiler": "g++ 12"}})
    assert (names(ours, other), names(ours, far)) == (["versions"], ["versions", "hardware"])
    assert (names(ours, older), names(other, older)) == ([], ["versions"])


def test_the_verdict_counts_code_as_one_and_says_what_is_unknown() -> None:
    a, other = run("a"), {"algo.gamma": 0.9, "seed": 2}
    b = run("b", git={"tree": None, "commit": None, "problem": "no git"})
    unknown = "the cause of a difference in returns is unclear"
    cases: list[tuple[Run, list[str] | None, str]] = [
        (run("b", config=other), [], "1 thing differs: algo.gamma 0.99 -> 0.9"),
        (run("b", "seed=2", {"seed": 2}), [], "same experiment: only the seed differs, 1 -> 2"),
        (run("b"), ["README.md", "docs/x.py"], "same experiment, same seed"),
        (
            run("b", config=other),
            ["README.md", "conf/algo/ppo.yaml", "runlab/engine.py", "runlab/rng.py"],
            "warning: 2 things differ: algo.gamma 0.99 -> 0.9; "
            f"code (runlab/engine.py, runlab/rng.py); {unknown}",
        ),
        (b, None, f"warning: nothing differs, and the code cannot be compared; {unknown}"),
    ]
    for each, files, expected in cases:
        assert verdict(compare_records(a, each, files)) == expected
    long = f"tests/{'long' * 9}.py"
    short, wide = listed(compare_records(a, run("b"), ["README.md", long]).differences, "code")
    assert wide.split(maxsplit=1)[1].startswith("3333333333, the same commit with other uncommitted changes")
    assert wide.index("33333") == short.index("33333")
    assert "this repository does not have both snapshots" in compare_records(a, run("b"), None).notes[0]
    assert compare_records(a, b, None).notes[0] == "b has no snapshot of its code (no git)"
    b = run("b", git={"tree": None, "commit": None, "base_commit": None})
    nothing = compare_records(b, b, None)
    assert (nothing.differences, nothing.factors, nothing.not_recorded) == ([], {}, ["code"])


def test_a_key_given_to_both_runs_stays_its_own_and_one_that_new_code_added_is_part_of_it() -> None:
    given = run("c", "algo.gamma=0.5", {"algo.gamma": 0.5})  # to both runs
    assert names(given, run("b", "algo=sac algo.gamma=0.98", SAC_VALUES)) == ["algo", "algo.gamma"]
    on = run("b", "algo.new_flag=true", {"algo.new_flag": True, "algo.gamma": 0.9})
    assert names(run("a"), on, ["runlab/engine.py"]) == ["algo.gamma", "code"]
    assert names(run("a"), on) == ["algo.gamma", "algo.new_flag"]


def test_what_else_is_to_be_known_is_noted() -> None:
    a = run("a", status="running", git={"skipped": [{"path": "big.bin"}, {"path": "sub/"}]})
    b = run("b", status="failed", resumed=[{"changed": {"code": ["x.py"], "cpu": []}}], versions=None)
    assert compare_records(a, b, ["README.md"]).notes == [
        "only files differ that cannot change a run: README.md",
        "a is still running",
        "not in the snapshot of a, so compared by size and digest only: big.bin",
        "not in the snapshot of a, so not compared: sub/",
        "b ended failed",
        "b was resumed with other code, cpu than before",
    ]


IDLE = "runlab/analysis/diff.py runlab/rerun/zoom.py docs/a conf/env/A.yaml a.tex b.mp4 Makefile "
IDLE += "runlab/run/sinks/console.py runlab/launch/sweep.py runlab/__main__.py "
IDLE += "runlab/config/cli/x.py runlab/determinism/computations.py"
USED = [
    *IDLE.split()[-4:],
    "runlab/engine.py",
    "runlab/envs/make.py",
    "my_env.py",
    "pack/__init__.py",
]
USED += ["pack/env.py", "levels.txt", "lib/physics/world.py", "fast.so"]


def test_the_name_of_a_file_decides_where_it_is_unknown_what_a_run_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computing = "runlab/engine.py runlab/analysis.py my_env.py maps/env.png pyproject.toml"
    for rule in (code_rule(), code_rule(None), code_rule(["my_env.py"], None)):
        assert all(map(rule, computing.split()))
        assert not any(map(rule, IDLE.split()))
    monkeypatch.setattr(affects_results, "_place", lambda: "mono/project/")
    for rule in (code_rule(None), code_rule([f"mono/project/{name}" for name in USED])):
        assert not any(rule(f"mono/project/{name}") for name in IDLE.split())
    assert code_rule(None)("mono/other/tests/x.py")


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        *dict.fromkeys(USED[4:], True).items(),
        *dict.fromkeys(IDLE.split(), False).items(),  # even if they were imported
        # never imported nor opened
        *dict.fromkeys(("other_env.py", "pack/tool.py", "runlab/trial.py", "notes.txt"), False).items(),
        *dict.fromkeys(
            ("Dockerfile", "figure.png", "figures/curve.svg", "mkdocs.yml", "plot.csv"), False
        ).items(),
        # compiled code may have opened them, which nobody sees
        *dict.fromkeys(("robot.xml", "meshes/arm.stl", "pack/maps/1.png", "pack/level.txt"), True).items(),
        *dict.fromkeys(("docs/robot.xml", "pack/README.md"), False).items(),
        *dict.fromkeys(("lib", "lib/physics"), True).items(),  # a submodule
    ],
)
def test_a_file_counts_if_a_run_used_it(name: str, counts: bool) -> None:
    assert code_rule(USED)(name) == code_rule([], USED)(name) == counts
    assert not code_rule([])(name) or name.endswith((".xml", ".stl", ".so"))


def test_machinery_of_before_changes_no_result_where_it_was() -> None:
    """When one package had all, under the name of a fork."""
    idle = ["run/sinks/console.py", "analysis/stats.py", "launch/sweep.py", "errors.py"]
    used = [f"mine/{name}" for name in (*idle, "run/used_code.py", "learning/engine.py", "train.py")]
    for folder in ("", "mono/project/"):
        rule = code_rule([f"{folder}{name}" for name in used])
        assert [name for name in used if rule(f"{folder}{name}")] == used[-2:]
    assert all(
        map(code_rule([name for name in used if "used_code" not in name]), used[:4])
    )  # of an own package
    by_name = code_rule(None)
    former = ("analysis/x.py", "rerun/x.py", "run/x.py", "launch/x.py", "config/secrets.py", "__main__.py")
    assert not any(by_name(f"{NAME}/{name}") for name in former)
    assert all(map(by_name, (f"{NAME}/train.py", f"{NAME}/signals.py", "other/analysis/x.py")))


def test_code_that_no_run_used_is_no_difference_and_code_outside_of_the_repository_is_one() -> None:
    def used(*files: str, **outside: str) -> dict[str, Any]:
        return {"used": {"files": [*files], "outside": outside}}

    a, b = run("a", **used("x.py", pack="1" * 32)), run("b", **used("y.py", pack="1" * 32))
    assert names(a, b, ["notes.txt", "z.py", "runlab/run/logger.py"]) == []
    assert names(a, b, ["notes.txt", "x.py"]) == names(a, b, ["y.py"]) == ["code"]
    assert names(a, run("b"), ["z.py"]) == ["code"]  # recorded by an earlier version
    assert names(a, run("b"), []) == []
    for outside in ({"pack": "2" * 32}, {}, {"pack": "1" * 32, "more": "3" * 32}):
        assert names(a, run("b", **used("x.py", **outside)), []) == ["code"]
    diff = compare_records(a, run("b", **used("x.py", pack="2" * 32)), [])
    assert verdict(diff) == "1 thing differs: code (pack (outside of the repository))"
    assert [*listed(diff.differences, "code")] == [
        "  pack (outside of the repository)  1111111111 -> 2222222222"
    ]


def test_which_packages_can_change_a_run() -> None:
    computing = ("torch", "numpy", "mujoco", "somebodys-env", "nvidia-cublas")
    assert all(map(package_affects_results, computing))
    idle = ("wandb", "opentelemetry-sdk", NAME.replace("_", "-"), "pytest", "runlab")
    assert not any(map(package_affects_results, idle))
    other = run("b", versions={"torch": "2.14.0", "runlab": "2.0.0"})
    assert [*listed(compare_records(run("a"), other, []).differences, "versions")] == [
        "  torch   2.13.0 -> 2.14.0",
        "  runlab  1.0.0 -> 2.0.0  (cannot change results)",
    ]


def test_the_command_shows_the_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project, code = tmp_path / "project", "runlab/rng.py"
    (project / code).parent.mkdir(parents=True)
    git(project, "init", "-q")
    for module in ("differences", "commands.diff"):
        monkeypatch.setattr(f"runlab.analysis.{module}.PROJECT", project)
    words = ["diff"]
    for name, seed, gamma, thought in (("a", 1, 0.98, ""), ("b", 2, 0.9, "# another thought\n")):
        (project / code).write_text(f"import torch\n{thought}")
        (project / "README.md").write_text(f"Of run {name}.\n")
        git(project, "add", "-A")
        facts = {"tree": git(project, "write-tree").strip(), "base_commit": f"{seed}" * 40, "dirty": False}
        config = {"algo": {"gamma": gamma}, "eval_episodes": seed, "log_every": seed}
        words.append(f"{name}={write_run(tmp_path, seed, config=config, git=facts, versions={'numpy': '2'})}")
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == (
        "warning: 2 things differ: algo.gamma 0.98 -> 0.9; code (runlab/rng.py); "
        "the cause of a difference in returns is unclear"
    )
    assert code in [line.split()[0] for line in lines if " -> " in line]
    idle = [line.split()[0] for line in lines if line.endswith("(cannot change results)")]
    assert idle == ["README.md", "log_every"]
    assert any(line.endswith("seed           1 -> 2  (other random numbers; not counted)") for line in lines)
    measured = "eval_episodes  1 -> 2  (changes what is measured, not what is learned; not counted)"
    assert any(line.endswith(measured) for line in lines)
    assert {f"{section}: equal" for section in ("versions", "machine", "settings")} <= set(lines)
    assert main([*words, "code=full"]) == 0
    assert "\n+# another thought\n" in capsys.readouterr().out


def computed(*digests: str, definition: str = "d", libraries: dict[str, str] | None = None) -> dict[str, Any]:
    """The part of a record about known computations, with a digest for each part."""
    made = {part: digit * 16 for part, digit in zip(("libm", "sums", "products"), digests, strict=False)}
    facts = {"digests": made, "definition": definition, "libraries": libraries or {"torch's MKL": "1"}}
    return {"determinism": {"computed": facts}}


SAME = "0", "1", "2"
OTHER = "0", "7", "7"


@pytest.mark.parametrize(
    ("a", "b", "part"),
    [
        (computed(*SAME), computed(*SAME), None),
        (computed(*SAME), computed(*OTHER), "sums"),
        (computed(*SAME), computed("0", "1", "7"), "products"),
        (computed(*SAME), computed("7", "1", "2"), "libm"),
        (computed(*SAME), computed("0"), None),  # only parts of both are compared
        (computed(*SAME), computed(*OTHER, definition="e"), None),
        (computed(*SAME), {}, None),  # of an earlier version
        (computed(*SAME), {"determinism": {"computed": None}}, None),
    ],
)
def test_the_first_part_that_is_computed_differently_is_one_difference_if_nothing_explains_it(
    a: dict[str, Any], b: dict[str, Any], part: str | None
) -> None:
    one, other = run("a", **a), run("b", **b)
    diff = compare_records(one, other, [])
    assert (diff.computation and diff.computation.part) == part
    assert names(one, other) == ([] if part is None else ["computation"])
    assert diff.differences == []
    others = b == computed(*OTHER, definition="e")
    assert diff.notes == ["digests of known computations are not compared: other code made them"] * others


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"machine": {"cpu": "Intel"}}, "hardware"),
        ({"versions": {"torch": "2.14.0"}}, "versions"),
        (computed(*OTHER, libraries={"torch's MKL": "2"}), "versions"),
        ({"environment": {"ATEN_CPU_CAPABILITY": "avx2"}}, "settings"),
        ({"config": {"num_threads": 2}}, "num_threads"),
        # these compute nothing of it
        ({"machine": {"logical_cores": 4}}, "hardware computation"),
        ({"versions": {"somebodys-env": "2"}}, "versions computation"),
        ({"config": {"algo.gamma": 0.9}}, "algo.gamma computation"),
    ],
)
def test_other_digests_are_no_further_difference_where_another_explains_them(
    changes: dict[str, Any], expected: str
) -> None:
    both: dict[str, Any] = {"versions": {"somebodys-env": "1"}}
    b = run("b", **both | computed(*OTHER) | changes)
    assert names(run("a", **both, **computed(*SAME)), b) == expected.split()
    assert names(run("a", **both, **computed(*OTHER)), b) == expected.removesuffix("computation").split()


def test_libraries_inside_of_packages_are_versions_where_both_runs_recorded_them() -> None:
    a, b = run("a", **computed(*SAME)), run("b", **computed(*SAME, libraries={"torch's MKL": "2"}))
    assert [*listed(compare_records(a, b, []).differences, "versions")] == ["  torch's MKL  1 -> 2"]
    assert compare_records(a, run("b"), []).differences == []


@pytest.mark.parametrize(
    "facts",
    [
        {"digests": {"sums": "\x1b[31m"}},
        {"digests": {"sums": 5}},
        {"digests": {"\x1b[31m": "0" * 16}},
        {"digests": {f"{chr(97 + i % 26) * (1 + i // 26)}": "0" * 16 for i in range(900)}},
        {"digests": {"sums": "0" * 100_000}},
        {"digests": ["sums"]},
        {"definition": "\x1b[31m"},
        {"libraries": {"torch's MKL": "1\n2"}},
    ],
)
def test_a_hostile_record_costs_a_line(facts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"b is damaged, or of another version: [^\n]{20,300}\Z"):
        run("b", determinism={"computed": facts})
