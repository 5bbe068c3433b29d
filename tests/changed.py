"""Prints the test files that reach a changed file: `make test-changed`.

Changed are files of the work tree that differ from the branch `main`. A test file reaches the modules that it
imports, and the modules that these import. A change of a file that no test imports (conf/, scripts/) reaches
all tests.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULE = re.compile(r"rltemplate(\.\w+)+(:\w+)?$")


def changed_files(base: str = "main") -> set[Path]:
    """Files that differ from `base`, or are new."""

    def listed(*words: str) -> list[str]:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    names = listed("diff", "--name-only", base) + listed("ls-files", "--others", "--exclude-standard")
    return {ROOT / name for name in names}


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
    stems = [
        folder / Path(*name.split(".")) for name in names for folder in (ROOT, file.parent, ROOT / "tests")
    ]
    found = {path for stem in stems for path in (stem.with_suffix(".py"), stem / "__init__.py")}
    return {path for path in found if path.is_file()}


def reached_by(file: Path) -> set[Path]:
    """All files that a file imports, also through other files."""
    reached, ahead = set[Path](), [file]
    while ahead:
        for path in imported_files(ahead.pop()) - reached:
            reached.add(path)
            ahead.append(path)
    return reached | {file}


def affected_tests(changed: set[Path]) -> list[Path]:
    """Test files that reach one of `changed`; all of them if it has a file that no import leads to."""
    tests = {test: reached_by(test) for test in sorted((ROOT / "tests").rglob("test_*.py"))}
    documents = {path for path in changed if path.suffix == ".md"}
    if not changed - documents <= set[Path]().union(*tests.values()):
        return list(tests)
    return [test for test, reached in tests.items() if reached & changed]


if __name__ == "__main__":
    print(*(path.relative_to(ROOT) for path in affected_tests(changed_files())))
