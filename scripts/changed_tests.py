"""Print the test files that reach a changed file: `make test-changed`.

Changed are files of the work tree that differ from the branch `main`. A test file reaches the modules that it
imports, and the modules that these import. A change of a file that no test imports, such as one in conf/ or
scripts/, reaches all tests.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULE = re.compile(r"rltemplate(\.\w+)+(:\w+)?$")


def changed_files() -> set[Path]:
    """Files that are new, or differ from the branch `main`."""
    found = set[Path]()
    for words in ("diff --name-only -z main", "ls-files --others --exclude-standard -z"):
        names = subprocess.check_output(["git", *words.split()], cwd=ROOT, text=True)
        found |= {ROOT / name for name in names.split("\0")[:-1]}
    return found


@functools.cache
def imported_files(file: Path) -> set[Path]:
    """Files of the repository that one of its files imports, wherever the import stands."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and MODULE.match(str(node.value)):  # imported by its name
            names.add(str(node.value).partition(":")[0])
    folders = ROOT, file.parent, ROOT / "tests"
    stems = [folder / name.replace(".", "/") for name in names for folder in folders]
    found = {path for stem in stems for path in (stem.with_suffix(".py"), stem / "__init__.py")}
    return {path for path in found if path.is_file()}


def reached_by(file: Path) -> set[Path]:
    """A file and all that it imports, also through other files."""
    reached, ahead = {file}, [file]
    while ahead:
        new = imported_files(ahead.pop()) - reached
        reached |= new
        ahead += new
    return reached


if __name__ == "__main__":
    tests = {test: reached_by(test) for test in sorted((ROOT / "tests").rglob("test_*.py"))}
    changed = {path for path in changed_files() if path.suffix != ".md"}
    everything = not changed <= set[Path]().union(*tests.values())
    print(*(test.relative_to(ROOT) for test, files in tests.items() if everything or files & changed))
