"""The wheel, installed as users install it, with each Python: python benchmarks/pythons.py [PATHS].

Run by `make test-pythons`. PATHS are interpreters; by default, those that a shell finds as python3.11 to
python3.14. Each gets an environment of its own in build/pythons, with the newest versions of all that the wheel
needs. There the commands fit, generate and draw, and a model is trained as it is, with recomputed outputs, with
steps and with codes. An environment takes up to 6 GB, and is removed at the end.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "pythons"
MINORS = range(11, 15)
PIP = ("-m", "pip", "-q", "--disable-pip-version-check")
ASK = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
COMMANDS = (
    ("fit", "--fn", "gelu", "--bits", "2", "--name", "own"),
    ("codegen",),
    ("codegen", "--check"),
    ("plot",),
)
TRAIN = """
import torch, fitact
from generated.own import Own

def gradients(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return [one.grad.clone() for one in model.parameters()]

torch.manual_seed(0)
x = torch.randn(64, 32)
model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 32))
baseline = gradients(model, x)
for given in ({"error": "exact"}, {"error": "rounding", "example_inputs": (x,)}):
    assert fitact.convert(model, **given).replaced
    found = gradients(model, x)
    assert all(torch.allclose(a, b, rtol=0.1, atol=1e-3) for a, b in zip(baseline, found))
    assert all(map(torch.equal, baseline, found)) == (given == {"error": "exact"})
    fitact.revert(model)
fitact.convert(model, replace={torch.nn.GELU: Own})
assert not all(map(torch.equal, baseline, gradients(model, x)))
print(torch.__version__)
"""


def interpreters(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield a version and an interpreter: of those given, or of each supported minor version that is found."""
    for name in paths or [f"python3.{minor}" for minor in MINORS]:
        path = shutil.which(name)
        # a launcher may be there without the version that it would launch
        done = path and subprocess.run([path, "-c", ASK], capture_output=True, text=True, check=False)
        if not done or done.returncode:
            if paths:
                sys.exit(f"{name}: no interpreter that runs")
            print(f"{name}: not found")
            continue
        yield done.stdout.strip(), str(path)


def tested(python: str, version: str, wheel: Path) -> str:
    """Install the wheel for an interpreter, use it, and return the version of its PyTorch.

    Raises:
        subprocess.CalledProcessError: a step failed; what it printed is on the terminal.

    """
    folder = FOLDER / version
    try:
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        own = folder / "bin" / "python"
        subprocess.run([own, *PIP, "install", "--no-cache-dir", wheel], check=True)
        work = folder / "work"
        work.mkdir()
        for command in COMMANDS:
            subprocess.run([own, "-m", "fitact", *command], cwd=work, check=True, stdout=subprocess.DEVNULL)
        assert (work / "own.png").read_bytes().startswith(b"\x89PNG")
        warned = [
            own,
            "-W",
            "error::SyntaxWarning",
            "-m",
            "compileall",
            "-q",
            "-f",
            *folder.glob("lib/*/*/fitact"),
        ]
        subprocess.run(warned, check=True)
        command = [own, "-c", TRAIN]
        return subprocess.run(command, cwd=work, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Build the wheel, and use it with each interpreter."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", metavar="PATH", help="interpreters")
    arguments = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # what an older build left would be packed too
    build = [sys.executable, *PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", FOLDER, ROOT]
    subprocess.run(build, check=True)
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
    (wheel,) = FOLDER.glob("*.whl")
    failed = []
    for version, python in interpreters(arguments.paths):
        try:
            print(f"Python {version}: passed, with PyTorch {tested(python, version, wheel)}", flush=True)
        except subprocess.CalledProcessError as error:
            print(f"Python {version}: failed: {error}", flush=True)
            failed.append(version)
    shutil.rmtree(FOLDER, ignore_errors=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
