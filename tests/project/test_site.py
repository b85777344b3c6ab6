"""The site: its pages are those of the repository, each is in its menu, and links lead where they led before."""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.support.package import load


def script(name: str) -> Any:
    """Import a script of docs/."""
    return load(ROOT / "docs" / f"{name}.py", f"docs_{name}")


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    module = script("hooks")
    # what makes MathML is an extra
    module.__dict__["mathml"] = lambda formula, display: f"<math {display}>{formula}</math>"
    return module


@pytest.fixture(scope="module")
def pages(hooks: ModuleType) -> dict[str, bytes]:
    found: dict[str, bytes] = hooks.pages()
    return found


class Loader(yaml.SafeLoader):
    """Reads the configuration without making the objects that it names."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, tag, node: tag)


def configuration() -> dict[str, Any]:
    found: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)
    return found


def entries(menu: Any) -> Iterator[str]:
    for one in menu if isinstance(menu, list) else menu.values():
        if isinstance(one, str):
            yield one
        else:
            yield from entries(one)


def test_menu() -> None:
    listed = list(entries(configuration()["nav"]))
    guides = {path.name for path in (ROOT / "docs").glob("*.md")}
    notebooks = {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert len(listed) == len(set(listed))
    assert set(listed) == guides | notebooks | {"index.md", "project/CONTRIBUTING.md", "project/CHANGELOG.md"}


def test_nothing_is_loaded_from_elsewhere() -> None:
    found = configuration()
    assert found["theme"]["font"] is False
    assert not any("//" in one for one in [*found["extra_css"], *found.get("extra_javascript", [])])


def links(text: str) -> list[str]:
    prose = re.sub(r"^ *```.*?^ *```|`[^`\n]+`", "", text, flags=re.DOTALL | re.MULTILINE)
    return [link for link in re.findall(r"\]\(([^)\s#]+)", prose) if not link.startswith("https:")]


def test_links_lead_to_pages(pages: dict[str, bytes]) -> None:
    count = 0
    for name, content in pages.items():
        for link in links(content.decode()) if name.endswith(".md") and "/tests/" not in name else ():
            count += 1
            assert posixpath.normpath(posixpath.join(posixpath.dirname(name), link)) in pages, (name, link)
    assert count > 200


@pytest.mark.parametrize("target", ["nowhere.md", "../tests"])
def test_a_link_that_leads_nowhere(target: str, hooks: ModuleType) -> None:
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
    drawn = script("pictures").PICTURES
    assert {path.stem for path in (ROOT / "docs" / "explained").iterdir()} == set(drawn)
    pages = "".join((ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("explained", "storage"))
    assert set(re.findall(r"\(explained/(\w+)\.png\)", pages)) == set(drawn)


def test_counts_of_the_explanation() -> None:
    """What the pictures show as text is what is counted."""
    page = (ROOT / "docs" / "explained.md").read_text("utf-8")
    module = script("pictures")
    sizes = [sum(module.saved(way)) // 2**20 for _, way in module.WAYS]
    said = "As it is {} MiB, steps {}, inverted {}, recomputed {}, in 8 bits {}, in 4 bits {}"
    assert said.format(*sizes) in page


def test_conda_recipe() -> None:
    """The recipe has the project's version, dependencies and lower bounds; conda-forge has other names for two."""
    recipe = yaml.safe_load((ROOT / ".github/conda/recipe.yaml").read_text("utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    least = project["requires-python"].removeprefix(">=")
    assert recipe["context"] == {"version": project["version"], "python_min": least}
    names = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
    pairs = [one.partition(";")[0].split(">=") for one in project["dependencies"]]
    expected = [f"{names.get(name, name)} >={least}" for name, least in pairs]
    needs = recipe["requirements"]
    assert sorted(needs["run"][1:] + needs["run_constraints"]) == sorted(expected)
    assert recipe["build"]["python"]["entry_points"] == [f"{k} = {v}" for k, v in project["scripts"].items()]


def test_extras_are_pinned() -> None:
    """Each package that an extra or the project itself names has a version in constraints.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    requirements = [one for group in (project["dependencies"], *extras.values()) for one in group]
    named = {re.split(r"[^\w.-]", one, maxsplit=1)[0] for one in requirements}
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    assert {name.lower() for name in named} - {"fitact", "wheel"} <= pinned
