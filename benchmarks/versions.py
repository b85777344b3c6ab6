"""The tests on PyTorch 2.9, the oldest supported, on 2.11, on the one of development, and on the newest.

Run by `make test-versions`, with the options that `make test` gives pytest, which come after this script's own;
writes benchmarks/results/versions.json. Each version has an environment of its own in build/versions: PyTorch,
what belongs to it (Triton, torchvision), and all else from the environment that this runs in. It takes 6 GB, and
is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
FOLDER = ROOT / "build" / "versions"
OLDEST = "2.9.1"  # as pyproject.toml has it, with Triton 3.5
BEFORE = "2.11.0"  # the last before 2.12, which differs most; with Triton 3.6
OWN, NEWEST = "own", "newest"  # the one of this environment; the newest release that pip finds


def environment(wanted: str) -> Path:
    """Make an environment with a version of PyTorch, and return its interpreter."""
    if wanted == OWN:
        return Path(sys.executable)
    folder = FOLDER / wanted
    python = folder / "bin" / "python"
    if python.exists() and wanted != NEWEST:
        return python
    venv.create(folder, clear=True, with_pip=True)
    torch = "torch" if wanted == NEWEST else f"torch=={wanted}"
    options = ["-q", "--disable-pip-version-check", "--no-cache-dir"]
    subprocess.run([python, "-m", "pip", "install", *options, torch, "torchvision"], check=True)
    # The other environment's builds packages; the one that comes with Python is too old for that.
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "setuptools"], check=True)
    # Added when PyTorch is there, or pip would take that of the other environment for it; last on the path.
    (library,) = folder.glob("lib/python*/site-packages")
    (library / "zz_rest.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def tested(python: Path, options: Sequence[str]) -> dict[str, str | int]:
    """Run pytest and return a row of the record."""
    ask = "from importlib.metadata import version; print(version('torch'), version('triton'))"
    torch, triton = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.split()
    print(f"PyTorch {torch}, Triton {triton}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *options]
        subprocess.run(command, cwd=ROOT, check=False)
        if not report.exists():
            sys.exit(f"PyTorch {torch}: pytest wrote no report, see above")
        suites = [*ElementTree.parse(report).getroot().iter("testsuite")]
    ran, failures, errors, skipped = (
        sum(int(suite.attrib[key]) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    return {
        "version": torch,
        "triton": triton,
        "passed": ran - failed - skipped,
        "failed": failed,
        "skipped": skipped,
        "python": platform.python_version(),
        "machine": f"{platform.processor() or platform.machine()}, {platform.system()}",
        "tests": " ".join(options),
        "date": date.today().isoformat(),
    }


def write(row: dict[str, str | int]) -> None:
    """Put a row into the record, in the place of an older one of its version."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    rows = [*(other for other in rows if other["version"] != row["version"]), row]
    rows.sort(key=lambda row: [int(number) for number in re.findall(r"\d+", row["version"])])
    RESULTS.write_text(json.dumps(rows, indent=2) + "\n")


def main() -> None:
    """Test the versions one after another, and exit with status 1 if a test failed on any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="append", help=f"a version, {OWN!r} or {NEWEST!r}; may be repeated")
    parser.add_argument("--keep", action="store_true", help="leave the environments, to be used again")
    given, options = parser.parse_known_args()
    failed = 0
    for wanted in given.torch or (OLDEST, BEFORE, OWN, NEWEST):
        try:
            row = tested(environment(wanted), options)
        finally:
            if not given.keep:
                shutil.rmtree(FOLDER / wanted, ignore_errors=True)
        write(row)
        failed += int(row["failed"])
        print(
            f"PyTorch {row['version']}: {row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped"
        )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
