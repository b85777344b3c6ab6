"""The wheel holds every module, template and fit, and nothing else; it works where little else is installed."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest

from tests.conftest import ROOT

FOLDERS = {name: f"fitact/{name}" for name in ("base", "fitter", "codegen", "runtime", "generated")}
FOLDERS["src/fitact"] = "fitact"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    for room in FOLDERS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, folder)
    run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "."], folder)
    (made,) = folder.glob("*.whl")
    return made


def contents(wheel: Path) -> tuple[set[str], str]:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        return names, archive.read(metadata).decode()


def test_wheel_contents(wheel: Path) -> None:
    actual, text = contents(wheel)
    expected = {
        f"{target}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".j2", ".json", ".typed"}
    }
    assert actual == expected > {"fitact/codegen/templates/step.py.j2", "fitact/generated/fits/gelu_fewbit3.json"}
    assert 'Requires-Dist: triton>=3.5; platform_system == "Linux"' in text
    extras = re.findall(r"^Provides-Extra: (\w+)$", text, re.MULTILINE)
    assert {"plot", "transformers", "models", "docs"} <= {*extras}


def needed(name: str, without: str, actual: dict[str, Distribution]) -> None:
    """Collect a package and all that it needs, as far as it is installed."""
    try:
        package = distribution(name)
    except PackageNotFoundError:  # of another platform
        return
    if name == without or package.metadata["Name"] in actual:
        return
    actual[package.metadata["Name"]] = package
    for requirement in package.requires or ():
        match = re.match(r"[\w.-]+", requirement)
        if match and "extra ==" not in requirement:
            needed(match[0], without, actual)


def installed(folder: Path, wheel: Path, packages: Iterable[str], without: str = "") -> list[str]:
    """Put the wheel, and packages of this environment, into a folder; return a Python that finds nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    actual: dict[str, Distribution] = {}
    for name in packages:
        needed(name, without, actual)
    for package in actual.values():
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            (folder / top).symlink_to(Path(str(package.locate_file(top))).resolve())
    return [sys.executable, "-S", "-W", "ignore"]


def run(command: Iterable[str], folder: Path, status: int = 0) -> tuple[str, str]:
    """Run a command that has the modules in a folder; return what it prints."""
    environment = os.environ | {"PYTHONPATH": str(folder), "TRITON_INTERPRET": "0", "MPLBACKEND": "agg"}
    done = subprocess.run([*command], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr.strip()


TORCH_ALONE = """
import sys
import torch
import fitact
from fitact.generated.gelu_inverted1 import GeluInverted1

x = torch.randn(64, 32)
model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 32))
for given in (
    {"error": "exact"},
    {"error": "rounding", "example_inputs": (x,), "gradients": True},
    {"method": "fewbit", "bits": 3},
    {"replace": {torch.nn.GELU: GeluInverted1}},
):
    assert len(fitact.convert(model, **given).replaced) == 1
    assert fitact.verify(model, x).same == (given == {"error": "exact"})
    fitact.revert(model)
assert fitact.__file__.startswith(sys.argv[1]), fitact.__file__
assert not {"numpy", "scipy", "click", "matplotlib"} & {*sys.modules}
"""


@pytest.mark.full
def test_trained_with_pytorch_alone(wheel: Path, tmp_path: Path) -> None:
    python = installed(tmp_path, wheel, ["torch"])
    assert not (tmp_path / "numpy").exists() and not (tmp_path / "click").exists()
    run([*python, "-c", TORCH_ALONE, str(tmp_path)], tmp_path)


@pytest.mark.full
def test_commands_without_matplotlib(wheel: Path, tmp_path: Path) -> None:
    """Fits and modules are made; a picture is refused in one line, before anything is measured for it."""
    base = re.findall(r"^Requires-Dist: ([\w.-]+)(?!.*extra ==)", contents(wheel)[1], re.MULTILINE)
    assert {"torch", "numpy", "matplotlib"} <= {*base}
    python = installed(tmp_path, wheel, base, without="matplotlib")
    assert (tmp_path / "click").exists() and not (tmp_path / "matplotlib").exists()
    fitact = [*python, "-m", "fitact"]
    for command in ("fit --fn relu --bits 1 --name own", "codegen", "codegen --check"):
        run([*fitact, *command.split()], tmp_path)
    message = 'fitact: pictures need matplotlib, which is not installed: pip install "fitact[plot]"'
    for command in ("plot", "memory fitact.runtime.measure.reference:gelu_mlp --plot chart.png"):
        assert run([*fitact, *command.split()], tmp_path, 2) == ("", message)
