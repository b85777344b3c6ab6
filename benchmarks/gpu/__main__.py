"""The command: `python -m benchmarks.gpu PART...`, in a checkout, with fitact installed or not.

The sources become the package fitact by a folder of links, which comes first on the path.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
TREE = ROOT / "build" / "gpu" / "tree"
WHEELS = ROOT / "build" / "carry"  # packages that the machine may lack, such as Liger's
FOLDERS = ("base", "fitter", "codegen", "runtime", "generated")  # as pyproject.toml maps them
PARTS = ("correctness", "steps", "kernels", "batch", "training")  # what matters most comes first


def main() -> None:
    """Measure one part here, or several in processes of their own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "parts", nargs="+", choices=[*PARTS, "all"], metavar="PART", help=f"{', '.join(PARTS)}, all"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the JSON files; by default benchmarks/results/gpu, with --tiny build/gpu",
    )
    parser.add_argument("--seconds", type=float, default=480, help="no row of a part begins later; by default 480")
    parser.add_argument(
        "--only", action="append", default=[], help="measure only rows whose names have this in them"
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, as a rehearsal")
    parser.add_argument("--cpu", action="store_true", help="rehearse on the CPU; needs --tiny")
    parser.add_argument(
        "--resume", action="store_true", help="keep the rows that are there, and measure the others"
    )
    arguments = parser.parse_args()
    if arguments.cpu and not arguments.tiny:
        parser.error("--cpu is a rehearsal: add --tiny")
    parts = list(PARTS if "all" in arguments.parts else dict.fromkeys(arguments.parts))
    if len(parts) > 1:  # an end of one, by the GPU's fault or the system's, is not the end of all
        options = [each for each in sys.argv[1:] if each not in arguments.parts]
        ends = [
            subprocess.run(
                [sys.executable, "-m", "benchmarks.gpu", part, *options], cwd=ROOT, check=False
            ).returncode
            for part in parts
        ]
        sys.exit(max(map(abs, ends)))
    measure(parts[0], arguments)


def measure(part: str, arguments: argparse.Namespace) -> None:
    """Measure a part."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic products, before CUDA starts
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # what fits does not depend on history
    use_tree()
    import torch

    from benchmarks.gpu.record import Record

    if arguments.cpu:
        device = "cpu"
    elif torch.cuda.is_available():
        device = "cuda"
    else:
        sys.exit("PyTorch finds no GPU: rehearse with --tiny --cpu")
    folder = arguments.out or ROOT / ("build/gpu" if arguments.tiny else "benchmarks/results/gpu")
    folder.mkdir(parents=True, exist_ok=True)
    record = Record(
        part,
        folder,
        seconds=arguments.seconds,
        only=arguments.only,
        resume=arguments.resume,
        device=device,
        tiny=arguments.tiny,
    )
    import_module(f"benchmarks.gpu.{part}").run(record, device, arguments.tiny)
    print(f"wrote {record.path}")


def use_tree() -> None:
    """Let this process and those that it starts import fitact from the tree, and carried wheels after all else."""
    package = TREE / "fitact"
    package.mkdir(parents=True, exist_ok=True)
    for source in [*(ROOT / "src" / "fitact").iterdir(), *(ROOT / name for name in FOLDERS)]:
        if source.name != "__pycache__":
            new = package / f"{source.name}.{os.getpid()}"
            new.symlink_to(source)
            new.replace(package / source.name)  # at once, for others may be importing it
    wheels = [unpacked(wheel) for wheel in sorted(WHEELS.glob("*.whl"))]
    sys.path[:] = [str(TREE), *sys.path, *wheels]
    before = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TREE), *before, *wheels])


def unpacked(wheel: Path) -> str:
    """Return the folder with a wheel's contents; Triton reads kernels' sources from files."""
    folder = WHEELS / wheel.stem
    if not folder.exists():
        new = WHEELS / f"{wheel.stem}.{os.getpid()}"
        zipfile.ZipFile(wheel).extractall(new)
        new.rename(folder)
    return str(folder)


if __name__ == "__main__":
    main()
