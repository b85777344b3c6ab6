"""The documentation and its site: generated pages are up to date, pages are in the menu, links lead somewhere."""

import json
import posixpath
import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import yaml

from fitact.__main__ import main
from tests.conftest import ROOT
from tests.support.package import load


def script(name: str) -> Any:
    return load(ROOT / "docs" / f"{name}.py", f"docs_{name}")


@pytest.fixture(scope="module")
def hooks() -> Any:
    module = script("hooks")
    module.mathml = lambda formula, display: f"<math {display}>{formula}</math>"  # what makes it is an extra
    return module


@pytest.fixture(scope="module")
def pages(hooks: Any) -> dict[str, bytes]:
    return hooks.pages()


def test_menu() -> None:
    """It has each page once; and pages load nothing from elsewhere."""
    configured, _, menu = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")
    guides = {path.name for path in (ROOT / "docs").glob("*.md")}
    notebooks = {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}
    others = {"index.md", "project/CONTRIBUTING.md", "project/CHANGELOG.md"}
    assert sorted(re.findall(r"(\S+[^:\s])$", menu, re.MULTILINE)) == sorted(guides | notebooks | others)
    assert re.findall(r"^extra_\w+: .*$", configured, re.MULTILINE) == ["extra_css: [site.css]"]
    assert "\n  font: false " in configured


def test_links_lead_to_pages(pages: dict[str, bytes]) -> None:
    targets = []
    for name in (name for name in pages if name.endswith(".md") and "/tests/" not in name):
        prose = re.sub(r"^ *```.*?^ *```|`[^`\n]+`", "", pages[name].decode(), flags=re.DOTALL | re.MULTILINE)
        links = re.findall(r"\]\((?!https:)([^)\s#]+)", prose)
        targets += [posixpath.normpath(posixpath.join(posixpath.dirname(name), link)) for link in links]
    assert len(targets) > 200 and not {*targets} - pages.keys()


@pytest.mark.parametrize("target", ["nowhere.md", "../tests"])
def test_a_link_that_leads_nowhere(target: str, hooks: Any) -> None:
    with pytest.raises(ValueError, match=rf"docs/storage.md: links to {target}, which is no file"):
        hooks.relinked(f"[a]({target})", "docs/storage.md")


def test_notebooks_as_pages(pages: dict[str, bytes]) -> None:
    """Code, what it printed, tables, pictures and formulas, in order."""
    page = pages["notebooks/relu_mixtures.md"].decode()
    pictures = re.findall(r"!\[picture (\d+)\]\((\S+)\)", page)
    assert [int(number) for number, _ in pictures] == list(range(1, len(pictures) + 1)) and len(pictures) > 2
    assert all(pages[f"notebooks/{path}"].startswith(b"\x89PNG") for _, path in pictures)
    assert page.index("# ReLU mixtures") < page.index("<math block>") < page.index("```python\nimport matplotlib")
    assert "<span><math inline>" in page
    assert not re.search(r"^<math inline>", page, re.MULTILINE)  # it would be a paragraph of its own
    assert re.search(r"^\|:---\|---:", page, re.MULTILINE)
    assert "$" not in re.sub(r"```.*?```|`[^`]*`", "", page, flags=re.DOTALL)


def test_pictures_of_the_explanation() -> None:
    """What they show as text is what is counted."""
    drawn = script("pictures")
    assert {path.stem for path in (ROOT / "docs" / "explained").iterdir()} == {*drawn.PICTURES}
    pages = "".join((ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("explained", "storage"))
    assert {*re.findall(r"\(explained/(\w+)\.png\)", pages)} == {*drawn.PICTURES}
    sizes = [sum(drawn.saved(each)) // 2**20 for _, each in drawn.WAYS]
    said = "As it is {} MiB, steps {}, inverted {}, recomputed {}, in 8 bits {}, in 4 bits {}"
    assert said.format(*sizes) in pages


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_conda_recipe() -> None:
    """The recipe has the project's version, dependencies and lower bounds; conda-forge has other names for two."""
    recipe = yaml.safe_load((ROOT / ".github/conda/recipe.yaml").read_text("utf-8"))
    least = PROJECT["requires-python"].removeprefix(">=")
    assert recipe["context"] == {"version": PROJECT["version"], "python_min": least}
    names = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
    pairs = [each.partition(";")[0].split(">=") for each in PROJECT["dependencies"]]
    expected = [f"{names.get(name, name)} >={least}" for name, least in pairs]
    needs = recipe["requirements"]
    assert sorted(needs["run"][1:] + needs["run_constraints"]) == sorted(expected)
    assert recipe["build"]["python"]["entry_points"] == [f"{k} = {v}" for k, v in PROJECT["scripts"].items()]
    assert resolve_name(PROJECT["scripts"]["fitact"]) is main


def test_extras_are_pinned() -> None:
    """Each package that an extra or the project itself names has a version in constraints.txt."""
    requirements = sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])
    named = {re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower() for requirement in requirements}
    lines = (ROOT / "constraints.txt").read_text("utf-8").lower().replace("_", "-").splitlines()
    assert named - {"fitact", "wheel"} <= {line.partition("==")[0] for line in lines if "==" in line}


def test_generated_pages() -> None:
    build = script("build")
    for path, text in build.pages().items():
        assert path.read_text("utf-8") == text, "run python docs/build.py"
    pictures = {path.stem for path in (ROOT / "docs" / "gallery").iterdir()}
    assert pictures == {fit.name for fit in build.shipped()}


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_headings_that_are_linked_to(page: Path) -> None:
    """The page's own and those of other pages; that files exist, `pages` checks."""
    for path, anchor in re.findall(r"\]\((?!https:)([^)\s#]*)#([^)\s]+)\)", _prose(page)):
        assert anchor in _anchors(page.parent / path if path else page), (path, anchor)


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
    actual: Counter[str] = Counter()
    anchors = set()
    for heading in re.findall(r"^#+ (.*)$", _prose(page), flags=re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        anchors.add(f"{name}-{actual[name]}" if actual[name] else name)
        actual[name] += 1
    return anchors
