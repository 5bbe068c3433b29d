"""Rules about the repository that `make lint` does not hold, and that it holds the ones in pyproject.toml."""

from __future__ import annotations

import ast
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, git, run

# Mistakes that `make lint` has to find, all of them in one copy: ends of files, and new files.
AGAINST_THE_ORDER = {
    "interfaces.py": "import runlab.rng",
    "envs/vector.py": "import rltemplate.learning.optim",
    "run/files.py": "import rltemplate.learning.optim",
    "run/paths.py": "import runlab.run.record",
    "analysis/runs.py": "import torch",
}
BY_KERNELS = ("exp", "log", "sqrt", "tanh", "norm")
BANNED = {
    "algos/new.py": "import torch\n\ntorch.manual_seed(1)\n",
    "learning/new.py": "from torch import distributions\n\nprint(distributions)\n",
    "envs/new.py": "import random\n\nrandom.random()\n",
    "run/new.py": "import wandb\n\nwandb.init()\n",
    "launch/new.py": "from hydra import compose\n\ncompose()\n",
}
# A folder, a local build of a package, and a package index; no pattern fits its own line.
OF_ONE_MACHINE = [
    re.compile(r"(?<![\w.)}/-])/(?:work|root|opt|Users)/[\w.-]|(?<![\w.)}/-])/home/(?!me\b|user\b)\w"),
    re.compile(r"==[\w.]+[+](?:cpu|cu\d+)"),
    re.compile(r"https?://\S+/(?:simple|whl)\b|(?<!\w)file:///[a-z]|--(?:extra-)?index-url[ =]\S*:"),
]


def test_imports_against_the_order_and_banned_names_are_refused(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    package = shutil.copytree(ROOT / "rltemplate", tmp_path / "rltemplate")
    for file, text in {**AGAINST_THE_ORDER, **BANNED}.items():
        with (package / file).open("a") as module:
            module.write(f"\n{text}\n")
    lint = "from importlinter import cli; cli.lint_imports_command()"
    script = f"import sys; sys.path[0] = {str(tmp_path)!r}; {lint}"
    imports = run(tmp_path, sys.executable, "-P", "-c", script, status=1)
    contracts = re.findall(r'^name = "(.*)"', (tmp_path / "pyproject.toml").read_text(), re.MULTILINE)
    assert re.findall(r"^(.*) BROKEN", imports.stdout, re.MULTILINE) == contracts[-4:]
    for pair in ("interfaces -> runlab.rng", "envs.vector -> rltemplate.learning.optim"):
        assert f"rltemplate.{pair} (" in imports.stdout
    words = ["check", "--output-format", "concise", "rltemplate"]
    names = run(tmp_path, sys.executable, "-m", "ruff", *words)
    assert {line.partition(":")[0] for line in names.stdout.splitlines() if "TID251" in line} == {
        f"runlab/{file}" for file in BANNED
    }


@pytest.mark.parametrize("check", ["style", pytest.param("types", marks=pytest.mark.long)])
def test_an_environment_in_the_form_of_gymnasium_passes(check: str, tmp_path: Path) -> None:
    """Its `metadata` is a dict in the class, with no annotation: mypy would refuse ClassVar."""
    (text,) = re.findall(
        r"```python\n(.*?class Corridor.*?)```", (ROOT / "docs/extending.md").read_text(), re.S
    )
    assert "    metadata = {" in text
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
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
    files = [path for folder in ("algos", "learning") for path in (ROOT / "rltemplate" / folder).glob("*.py")]
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
    texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in files}
    assert {path: found for path, text in texts.items() if (found := tied_to_a_machine(text))} == {}
    ties = ["runs are in " + "/work" + "/main", "/home" + "/anna/rl", "torch==2.13.0" + "+cpu"]
    ties += ["--extra-index-url" + " https://example.org", "https://example.org" + "/simple"]
    for line in [*ties, "file://" + "/srv/wheels"]:
        assert tied_to_a_machine(f"first\n{line}\n") == [line]
