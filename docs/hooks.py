"""The pages of the site, put together for MkDocs: `docs/`, the notebooks, and every file that they link to.

On GitHub the pages link to each other, to notebooks, to sources and to results by their places in the repository.
The site has them elsewhere: the README and `docs/` at its top, a notebook as a page in `notebooks/`, all else in
`project/`, with sources as pages. So links are written anew, and a link that leads nowhere ends the build.

MkDocs calls `on_config`; nothing else here needs it. Notebooks are shown as committed, not executed.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STAGED = ROOT / "build" / "pages"
ALWAYS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")  # and docs/*.md, notebooks/*.ipynb, docs/*.css
SOURCES = {".py": "python", ".cff": "yaml", ".toml": "toml", "": "text"}  # shown as pages, by their endings
FENCED = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
MATH = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", re.DOTALL)
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"


def on_config(config: Any) -> Any:
    """Put the pages together, and let MkDocs read them from there."""
    write(pages())
    config.docs_dir = str(STAGED)
    return config


def write(contents: dict[str, bytes]) -> None:
    """Write the pages into `build/pages`: only what has changed, or `mkdocs serve` would build for ever."""
    for name, content in contents.items():
        path = STAGED / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    for path in [*STAGED.rglob("*")]:
        if path.is_file() and path.relative_to(STAGED).as_posix() not in contents:
            path.unlink()


def place(path: str) -> str:
    """Return where the site has a file of the repository, by its path there; the README is its first page."""
    if path == "README.md":
        return "index.md"
    folder, _, rest = path.partition("/")
    if folder == "docs" and not rest.endswith(".py"):
        return rest
    if path.endswith(".ipynb"):
        return f"{path.removesuffix('.ipynb')}.md"
    return f"project/{path}.md" if Path(path).suffix in SOURCES else f"project/{path}"


def pages() -> dict[str, bytes]:
    """Return what the site is made of, by place.

    Raises:
        ValueError: a page links to a file that does not exist, or to a folder.

    """
    first = [*ALWAYS, *(path.relative_to(ROOT).as_posix() for path in _own())]
    waiting, contents = list(first), {}
    while waiting:
        path = waiting.pop()
        if place(path) in contents:
            continue
        contents.update(_read(path))
        if path.endswith((".md", ".ipynb")):
            text, linked = relinked(contents[place(path)].decode(), path, contents)
            contents[place(path)] = text.encode()
            waiting += linked
    return contents


def _own() -> Iterator[Path]:
    yield from sorted((ROOT / "docs").glob("*.md"))
    yield from sorted((ROOT / "docs").glob("*.css"))
    yield from sorted((ROOT / "notebooks").glob("*.ipynb"))


def _read(path: str) -> Iterator[tuple[str, bytes]]:
    """Yield what a file of the repository becomes on the site, by place."""
    file = ROOT / path
    if path.endswith(".ipynb"):
        yield from _notebook(file, place(path))
    elif file.suffix in SOURCES:
        text = (
            f'{HIDDEN}# {file.name}\n\n```{SOURCES[file.suffix]} title="{path}"\n{file.read_text("utf-8")}\n```\n'
        )
        yield place(path), text.encode()
    else:
        yield place(path), file.read_bytes()


def relinked(text: str, path: str, made: Container[str] = ()) -> tuple[str, list[str]]:
    """Return a page's text with its links as the site needs them, and the files that it links to.

    Args:
        text: the page's text.
        path: of the file in the repository that the page shows.
        made: what the site has already; a notebook's pictures are made with its page, and are no files.

    """
    linked: list[str] = []
    here = posixpath.dirname(place(path))

    def link(match: re.Match[str]) -> str:
        target, mark, anchor = match[1].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[1]
        if posixpath.join(here, target) in made and path.endswith(".ipynb"):
            return match[1]
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if not (ROOT / wanted).is_file():
            raise ValueError(f"{path}: links to {target}, which is no file of the repository")
        linked.append(wanted)
        return posixpath.relpath(place(wanted), here or ".") + mark + anchor

    return outside_code(text, lambda part: LINK.sub(link, part)), linked


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Return a text in Markdown, changed wherever it is not code."""
    parts = FENCED.split(text)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))


# ------------------------------------------------------------------------------------------------------- notebooks


def _notebook(file: Path, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield a notebook as a page in Markdown, and its pictures; formulas become MathML, which browsers draw."""
    parts: list[str] = []
    pictures = 0
    for cell in json.loads(file.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(outside_code(source, lambda part: MATH.sub(_formula, part)))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                pictures += 1
                picture = f"{file.stem}/{pictures}.png"
                yield posixpath.join(posixpath.dirname(name), picture), base64.b64decode(data["image/png"])
                parts.append(f"![picture {pictures}]({picture})")
            elif "text/markdown" in data:
                parts.append(outside_code("".join(data["text/markdown"]), lambda part: MATH.sub(_formula, part)))
            else:
                text = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"```text\n{text.rstrip()}\n```")
    yield name, ("\n\n".join(parts) + "\n").encode()


def _formula(match: re.Match[str]) -> str:
    if match[1]:
        return mathml(match[1], "block")
    # a line that begins with <math> would be a paragraph of its own
    return f"<span>{mathml(match[2], 'inline')}</span>"


def mathml(formula: str, display: str) -> str:
    """Return a formula in LaTeX as MathML; `display` is `block` or `inline`."""
    from latex2mathml.converter import convert

    return convert(formula, display=display)
