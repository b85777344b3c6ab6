"""The documentation: its generated pages are up to date, its links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["commands", "api", "gallery"])
def test_generated_pages(page: str, build: ModuleType) -> None:
    text = {"commands": build.commands, "api": build.api, "gallery": lambda: build.gallery(build.shipped())}[
        page
    ]()
    assert (ROOT / "docs" / f"{page}.md").read_text("utf-8") == text, "run python docs/build.py"


def test_every_shipped_fit_has_a_picture(build: ModuleType) -> None:
    pictures = {path.stem for path in (ROOT / "docs" / "gallery").iterdir()}
    assert pictures == {fit.name for fit in build.shipped()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links(page: Path) -> None:
    text = page.read_text("utf-8")
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _headings(text)}
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif not target.startswith("https://"):
            assert (page.parent / target.partition("#")[0]).exists(), target


def _headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
