"""Rules about the repository that `make lint` does not hold, and that it holds the ones in pyproject.toml."""

from __future__ import annotations

import ast
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from conftest import NAME, ROOT, git, run

# For each contract of import-linter: lines at the end of a file that break it, and the finding about them.
# An import within a function and one for types count like any other.
LAZY = "def imported_late():\n    import {}"
FOR_TYPES = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import {}"
PLAIN = "import {}"
AGAINST_CONTRACTS: dict[str, list[tuple[str, str, str | None]]] = {
    "The machinery imports nothing of the project": [
        ("runlab/run/paths.py", LAZY, f"{NAME}.learning.optim"),
        ("runlab/interfaces.py", FOR_TYPES, f"{NAME}.algos.ppo"),
        ("runlab/engine.py", PLAIN, f"{NAME}.train"),
        ("runlab/new.py", PLAIN, NAME),
    ],
    "Each module of the project imports from the lines below its own": [
        (f"{NAME}/learning/optim.py", LAZY, f"{NAME}.algos.sac"),
        (f"{NAME}/algos/sac.py", FOR_TYPES, f"{NAME}.project"),
        (f"{NAME}/new.py", PLAIN, None),
    ],
    "Each part of the machinery imports from the lines below its own": [
        ("runlab/errors.py", PLAIN, "runlab.rng"),
        ("runlab/run/record.py", LAZY, "runlab.launch.process"),
        ("runlab/envs/vector.py", FOR_TYPES, "runlab.run.job"),
        ("runlab/new.py", PLAIN, None),
    ],
    "No import circle within a package": [
        (f"{NAME}/learning/normalize.py", LAZY, f"{NAME}.learning.algorithm"),
        ("runlab/run/paths.py", FOR_TYPES, "runlab.run.record"),
    ],
    "Recorded runs are read without torch": [
        ("runlab/analysis/runs.py", PLAIN, "torch"),
        ("runlab/config/texts.py", LAZY, "torch"),
    ],
}
BY_KERNELS = ("exp", "log", "sqrt", "tanh", "norm")
BANNED = {
    f"{NAME}/algos/new.py": "import torch\n\ntorch.manual_seed(1)\n",
    f"{NAME}/learning/new.py": "from torch import distributions\n\nprint(distributions)\n",
    f"{NAME}/new.py": "import wandb\n\nwandb.init()\n",
    "runlab/envs/new.py": "import random\n\nrandom.random()\n",
    "runlab/run/new.py": "import wandb\n\nwandb.init()\n",
    "runlab/launch/new.py": "from hydra import compose\n\ncompose()\n",
}
# A fork grows as it likes. The name is in two parts, which `make rename` does not change.
of_the_template = pytest.mark.skipif(NAME != "rl" + "template", reason="proportions of the template alone")
# A folder, a local build of a package, and a package index; no pattern fits its own line.
OF_ONE_MACHINE = [
    re.compile(r"(?<![\w.)}/-])/(?:work|root|opt|Users)/[\w.-]|(?<![\w.)}/-])/home/(?!me\b|user\b)\w"),
    re.compile(r"==[\w.]+[+](?:cpu|cu\d+)"),
    re.compile(r"https?://\S+/(?:simple|whl)\b|(?<!\w)file:///[a-z]|--(?:extra-)?index-url[ =]\S*:"),
]


def planted(folder: Path, mistakes: Iterable[tuple[str, str]]) -> None:
    """Copy both packages to a folder, and add text at the ends of files, which may be new."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    for package in (NAME, "runlab"):
        shutil.copytree(ROOT / package, folder / package)
    for file, text in mistakes:
        with (folder / file).open("a") as module:
            module.write(f"\n{text}\n")


def test_every_import_that_breaks_a_contract_is_named(tmp_path: Path) -> None:
    mistakes = [each for several in AGAINST_CONTRACTS.values() for each in several]
    planted(tmp_path, [(file, form.format(target or "sys")) for file, form, target in mistakes])
    lint = "from importlinter import cli; cli.lint_imports_command()"
    script = f"import sys; sys.path[0] = {str(tmp_path)!r}; {lint}"
    output = run(tmp_path, sys.executable, "-P", "-c", script, status=1).stdout
    assert re.findall(r"^(.*) (?:KEPT|BROKEN)", output, re.MULTILINE) == [*AGAINST_CONTRACTS]
    _, *found = re.split(r"^(.+)\n-+$", output.partition("Broken contracts")[2], flags=re.MULTILINE)
    findings = dict(zip(found[::2], found[1::2], strict=True))
    for contract, against in AGAINST_CONTRACTS.items():
        for file, _, target in against:
            module = file.removesuffix(".py").replace("/", ".")
            finding = f"{module} -> {target} (" if target else f"not listed as layers:\n\n- {module}\n"
            if contract.startswith("No import circle"):
                finding = f".{module.rpartition('.')[2]} -> .{str(target).rpartition('.')[2]} ("
            assert finding in findings[contract]


def test_a_banned_name_is_refused_in_both_packages(tmp_path: Path) -> None:
    planted(tmp_path, BANNED.items())
    words = ["check", "--output-format", "concise", NAME, "runlab"]
    names = run(tmp_path, sys.executable, "-m", "ruff", *words)
    refused = {line.partition(":")[0] for line in names.stdout.splitlines() if "TID251" in line}
    assert refused == {*BANNED}


@of_the_template
def test_the_part_that_a_fork_owns_is_small() -> None:
    files = git(ROOT, "ls-files", f"{NAME}/*.py").splitlines()
    assert 10 < len(files) <= 22
    assert sum(len((ROOT / file).read_text().splitlines()) for file in files) <= 2_800


def functions(file: str) -> dict[str, int]:
    """Lines of each function of a module, and of each method of its classes, by `name` or `Class.name`."""
    lines = {}
    module = ast.parse((ROOT / file).read_text())
    owners: list[ast.Module | ast.ClassDef] = [module]
    owners += [node for node in module.body if isinstance(node, ast.ClassDef)]
    for owner in owners:
        for node in owner.body:
            if isinstance(node, ast.FunctionDef):
                name = f"{owner.name}.{node.name}" if isinstance(owner, ast.ClassDef) else node.name
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                lines[name] = node.end_lineno - first + 1 if node.end_lineno else 0
    return lines


@of_the_template
def test_the_path_from_the_command_to_the_gradient_is_short() -> None:
    """The functions that docs/design.md lists are in these files, and are about as long as it says."""
    page = (ROOT / "docs/design.md").read_text().partition("## From the command to the gradient")[2]
    table = re.findall(r"^\| `([\w/]+\.py)` \| (.*) \|$", page.partition("\n## ")[0], re.MULTILINE)
    (number,) = re.findall(r"about (\d+) lines in seven files", page)
    passed = sum(functions(file)[name] for file, names in table for name in re.findall(r"`([\w.]+)`", names))
    assert len(table) == 7
    assert abs(passed - int(number)) <= 20
    assert passed <= 360


@pytest.mark.parametrize("check", ["style", pytest.param("types", marks=pytest.mark.long)])
def test_an_environment_in_the_form_of_gymnasium_passes(check: str, tmp_path: Path) -> None:
    """Its `metadata` is a dict in the class, with no annotation: mypy would refuse ClassVar."""
    (text,) = re.findall(
        r"```python\n(.*?class Corridor.*?)```", (ROOT / "docs/extending.md").read_text(), re.S
    )
    assert "    metadata = {" in text
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    # That of `make lint`: without it, mypy reads all of torch.
    if check == "types" and (ROOT / ".mypy_cache").exists():
        shutil.copytree(ROOT / ".mypy_cache", tmp_path / ".mypy_cache")
    for wrong in (False, True):
        (tmp_path / "corridor.py").write_text(text + "\nx: int = undefined\n" * wrong)
        words = ["ruff", "check", "."] if check == "style" else ["mypy", "corridor.py"]
        done = run(tmp_path, sys.executable, "-m", *words)
        assert (done.returncode, "undefined" in done.stdout) == (int(wrong), wrong), done.stdout + done.stderr


def own_functions(text: str) -> list[str]:
    """Calls, not of kernels, of functions whose bits depend on the processor or the number of threads."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, owner = node.func.attr, ast.unparse(node.func.value)
            whole_sum = name == "sum" and not node.args
            if (name in BY_KERNELS or whole_sum) and owner not in ("kernels", "math", "np"):
                found.append(ast.unparse(node))
    return sorted(found)


def test_algorithms_take_elementary_functions_and_whole_sums_from_kernels() -> None:
    files = [path for folder in ("algos", "learning") for path in (ROOT / NAME / folder).glob("*.py")]
    found = {path.name: calls for path in files if (calls := own_functions(path.read_text(encoding="utf-8")))}
    assert found == {"networks.py": ["(vectors[i] * vectors[i]).sum()"]}  # of NumPy
    text = "kernels.exp(x) + torch.exp(x) + x.tanh() + x.sum(-1) + (x * x).sum()"
    assert own_functions(text) == ["(x * x).sum()", "torch.exp(x)", "x.tanh()"]


def tied_to_a_machine(text: str) -> list[str]:
    """The lines that hold on one machine only."""
    lines = (line for pattern in OF_ONE_MACHINE for line in text.splitlines() if pattern.search(line))
    return [line.strip()[:80] for line in lines]


def test_nothing_in_the_repository_ties_it_to_one_machine() -> None:
    names = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    files = [ROOT / name for name in names if name and (ROOT / name).is_file()]
    assert ROOT / "pyproject.toml" in files
    contents = {path: path.read_bytes() for path in files}
    # Pictures and packed policies, which are most of the bytes, have no lines.
    texts = {path: each.decode(errors="replace") for path, each in contents.items() if b"\0" not in each}
    assert {path: found for path, text in texts.items() if (found := tied_to_a_machine(text))} == {}
    ties = ["runs are in " + "/work" + "/main", "/home" + "/anna/rl", "torch==2.13.0" + "+cpu"]
    ties += ["--extra-index-url" + " https://example.org", "https://example.org" + "/simple"]
    for line in [*ties, "file://" + "/srv/wheels"]:
        assert tied_to_a_machine(f"first\n{line}\n") == [line]
