"""The notebooks are clean as committed, and executed again they print the same."""

import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from fitact.fitter.records import read
from tests.conftest import ROOT
from tests.support.package import load

FOLDER = ROOT / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
LARGEST = 600_000  # bytes of a notebook
VARIES = "varies"  # the tag of cells whose numbers depend on the machine, such as a training's losses
MACHINE = re.compile(r"(?<![\w.:/~])/(home|root|tmp|usr|opt|var|mnt|work|Users|private)/|[A-Z]:\\|site-packages")


def script(name: str, folder: Path = FOLDER) -> Any:
    return load(folder / f"{name}.py", f"notebooks_{name}")


def notebook(name: str, folder: Path = FOLDER) -> Any:
    return nbformat.read(folder / f"{name}.ipynb", as_version=4)


def code(book: Any) -> list[Any]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def texts(cell: Any) -> Iterator[tuple[str, str]]:
    """Yield what a cell has printed and shown, but for pictures, by kind."""
    for output in cell.outputs:
        if output.output_type == "stream":
            yield output.name, output.text
        elif output.output_type == "error":
            yield "error", f"{output.ename}: {output.evalue}"
        elif not any(kind.startswith("image/") for kind in output.data):
            yield from sorted(output.data.items())


@pytest.mark.parametrize("name", NAMES)
def test_is_clean(name: str) -> None:
    book = notebook(name)
    nbformat.validate(book)
    assert (FOLDER / f"{name}.ipynb").stat().st_size < LARGEST
    assert book.metadata == script("execute").METADATA
    assert all(set(cell.metadata) <= {"tags"} for cell in book.cells)
    cells = code(book)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [kind for cell in cells for kind, _ in texts(cell)]
    assert "text/markdown" in kinds, "no table"
    assert not {"stderr", "error"} & set(kinds)
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs), "no picture"
    for text in [*(cell.source for cell in book.cells), *(text for cell in cells for _, text in texts(cell))]:
        assert not MACHINE.search(text), MACHINE.search(text)


@pytest.mark.long
@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_executed_again_prints_the_same(name: str, tmp_path: Path) -> None:
    """In a copy of what a notebook reads, in a kernel of this interpreter, by `notebooks/execute.py`."""
    shutil.copytree(FOLDER, tmp_path / "notebooks", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (Path("tests") / "reference", Path("benchmarks") / "results"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    script("execute", tmp_path / "notebooks").main([f"{name}.ipynb"])
    again = code(notebook(name, tmp_path / "notebooks"))
    assert not [text for cell in again for kind, text in texts(cell) if kind in ("stderr", "error")]
    for before, after in zip(code(notebook(name)), again, strict=True):
        assert VARIES in before.metadata.get("tags", ()) or [*texts(before)] == [*texts(after)], before.source


FITS = {path.stem: path for path in sorted((FOLDER / "fits").glob("*.json"))}


def test_every_fit_has_its_command() -> None:
    assert FITS.keys() == script("refit").COMMANDS.keys()
    assert [read(path).name for path in FITS.values()] == [*FITS]


NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in FITS if name not in ("gelu_relumix3", "silu_relumix4")])
def test_the_command_makes_the_fit(name: str, tmp_path: Path) -> None:
    script("refit").refit(name, tmp_path)
    committed, made = ((folder / f"{name}.json").read_text() for folder in (FOLDER / "fits", tmp_path))
    assert NUMBER.sub("", committed) == NUMBER.sub("", made)
    for old, new in zip(NUMBER.findall(committed), NUMBER.findall(made), strict=True):
        assert math.isclose(float(old), float(new), rel_tol=1e-5, abs_tol=1e-7)
