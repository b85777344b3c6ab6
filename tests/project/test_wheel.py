"""The wheel holds every module, template and fit, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.conftest import ROOT

FOLDERS = {
    "src/fitact": "fitact",
    "fitter": "fitact/fitter",
    "codegen": "fitact/codegen",
    "runtime": "fitact/runtime",
    "generated": "fitact/generated",
}
KINDS = {".py", ".j2", ".json", ".typed"}


def test_wheel_contents(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "-w", tmp_path, "."], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = next(name for name in archive.namelist() if name.endswith("METADATA"))
        text = archive.read(metadata).decode()
    expected = {
        f"{target}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in KINDS or path.name == "py.typed"
    }
    assert found == expected
    assert "fitact/codegen/templates/step.py.j2" in found
    assert "fitact/generated/fits/gelu_fewbit3.json" in found
    assert 'Requires-Dist: triton>=3.5; platform_system == "Linux"' in text
    assert not {name.split("/")[0] for name in found} - {"fitact"}
