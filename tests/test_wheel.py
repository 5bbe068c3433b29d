"""An installed wheel trains without the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT


@pytest.mark.long
def test_an_installed_wheel_trains_and_looks_at_its_runs(tmp_path: Path) -> None:
    def done(*command: str, **more: str) -> str:
        result = subprocess.run(
            command, cwd=tmp_path, env=os.environ | more, capture_output=True, text=True, timeout=240
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    done(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "wheels", str(ROOT))
    (wheel,) = (tmp_path / "wheels").iterdir()
    installed = tmp_path / "installed"
    done(*pip, "install", "--no-deps", "--target", str(installed), str(wheel))
    (package,) = (path.parent for path in installed.glob("*/py.typed"))
    own = [sys.executable, "-P", str(installed / "bin" / package.name)]
    words = ["debug=fast", "video_every=0", "logger=none"]
    done(*own, "train", *words, PYTHONPATH=str(installed))
    (run,) = json.loads(done(*own, "runs", "--json", PYTHONPATH=str(installed)))
    assert run["status"] == "finished"
    record = json.loads(next(tmp_path.glob("runs/*/*/record.json")).read_text())
    assert record["command_line"][:4] == ["python", "-m", package.name, "train"]
    where = f"import {package.name} as p; print(p.__file__)"
    assert done(sys.executable, "-P", "-c", where, PYTHONPATH=str(installed)).startswith(str(package))
