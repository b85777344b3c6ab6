"""The documentation: its generated pages are up to date, its links lead somewhere."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support.package import load

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")])


@pytest.fixture(scope="module")
def build() -> Any:
    return load(ROOT / "docs" / "build.py", "docs_build")


@pytest.mark.parametrize("page", ["commands", "api", "gallery"])
def test_generated_pages(page: str, build: Any) -> None:
    text = {"commands": build.commands, "api": build.api, "gallery": lambda: build.gallery(build.shipped())}[
        page
    ]()
    assert (ROOT / "docs" / f"{page}.md").read_text("utf-8") == text, "run python docs/build.py"


def test_pages_with_results_of_a_gpu(build: Any) -> None:
    for path, text in build.with_results().items():
        assert path.read_text("utf-8") == text, "run python docs/build.py"


def test_every_shipped_fit_has_a_picture(build: Any) -> None:
    pictures = {path.stem for path in (ROOT / "docs" / "gallery").iterdir()}
    assert pictures == {fit.name for fit in build.shipped()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links(page: Path) -> None:
    """Files exist, and headings too: the page's own and those of other pages."""
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        other = page.parent / path if path else page
        assert other.exists(), target
        assert not anchor or anchor in _anchors(other), target


@cache
def _prose(page: Path) -> str:
    """Return the text of a page, or of a notebook, without code."""
    text = page.read_text("utf-8")
    if page.suffix == ".ipynb":
        cells = (cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)


@cache
def _anchors(page: Path) -> set[str]:
    found: Counter[str] = Counter()
    anchors = set()
    for heading in re.findall(r"^#+ (.*)$", _prose(page), flags=re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        anchors.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return anchors
