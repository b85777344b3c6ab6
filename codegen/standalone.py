"""One file out of a generated module and what it uses of the runtime, whose source text it takes over.

Names are followed through the runtime from the generated module on. Of each module of the runtime the statements
that bind them are kept, in their order, and as they are written there but for

- imports, which are gathered at the top;
- the prefix of a module's attribute, `eager.tiles_of` → `tiles_of`;
- names that something else has already, which get their module's name, `eager.encode` → `eager_encode`;
- the namespace of the ops, which is the file's own.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, NamedTuple

from fitact.errors import UsageError, quote

RUNTIME = "fitact.runtime"
ROOTS = ("language", "functions", "kernels", "composed", "ops")  # what they need is read too; the first keep names
OWN = ""  # in the place of a module's name: the generated module

DEFINE = "_define"  # makes the ops; the template says when, instead of the runtime
NAMESPACE = "fitact"  # of the ops
PLACEHOLDER = f"{NAMESPACE}_00000000"  # for that of a file, and as long
WIDTH = 113  # of a comment's text


class Global(NamedTuple):
    """A name that a module of the runtime, or the generated one, binds; with an empty name the module itself."""

    module: str
    name: str


class External(NamedTuple):
    """What is imported from elsewhere under the name `bound`: `name` from `module`, or the whole module."""

    module: str
    name: str
    bound: str


class Reference(NamedTuple):
    """A name in a text, with its module if that is before it; what it stands for; the names that are local there.

    A builtin name stands for itself.
    """

    node: ast.Name | ast.Attribute
    target: Global | External | str
    local: frozenset[str]


@dataclass(frozen=True)
class Source:
    """The text of a module, taken apart.

    Attributes:
        module: its name in the runtime, or `OWN`.
        data: the text, encoded, as the positions of nodes count bytes.
        starts: of its lines.
        docstring: the statement.
        statements: those that are neither imports nor the docstring nor `__all__`, in their order.
        bound: by name, the indices of the statements that bind it.
        imports: what it imports, by name, also what is imported for type checkers alone.
        uses: the modules of the runtime that it imports.

    """

    module: str
    data: bytes
    starts: list[int]
    docstring: ast.stmt
    statements: list[ast.stmt]
    bound: dict[str, list[int]]
    imports: dict[str, Global | External]
    uses: list[str]

    @classmethod
    def of(cls, module: str, text: str) -> Source:
        """Take a text apart."""
        data = text.encode()
        starts = [0]
        for line in data.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        docstring, *rest = ast.parse(text).body
        statements: list[ast.stmt] = []
        imports: dict[str, Global | External] = {}
        checked: dict[str, Global | External] = {}
        for statement in rest:
            match statement:
                case ast.Import() | ast.ImportFrom():
                    imports |= _imported(statement)
                case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=[*body]):
                    for one in body:
                        assert isinstance(one, ast.Import | ast.ImportFrom), "only imports are for type checkers"
                        checked |= _imported(one)
                case ast.Assign(targets=[ast.Name(id="__all__")]):
                    pass
                case _:
                    statements.append(statement)
        bound: dict[str, list[int]] = {}
        for i, statement in enumerate(statements):
            for name in _bound([statement]):
                bound.setdefault(name, []).append(i)
        uses = sorted({target.module for target in imports.values() if isinstance(target, Global)})
        return cls(module, data, starts, docstring, statements, bound, imports | checked, uses)

    def offset(self, line: int, column: int = 0) -> int:
        """Return the place of a line and a column, both as nodes count them."""
        return self.starts[line - 1] + column

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return the places of a node's start and end."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    @cached_property
    def references(self) -> list[list[Reference]]:
        """The names in each statement that are not local to it."""
        return [[*self._references(statement)] for statement in self.statements]

    def _references(self, statement: ast.stmt) -> Iterator[Reference]:
        for found, local in _globals(statement):
            base = found if isinstance(found, ast.Name) else found.value
            assert isinstance(base, ast.Name)
            target = Global(self.module, base.id) if base.id in self.bound else self.imports.get(base.id, base.id)
            if isinstance(target, Global) and not target.name:
                assert isinstance(found, ast.Attribute), f"{target.module} is used without an attribute"
                yield Reference(found, Global(target.module, found.attr), local)
            else:
                yield Reference(base, target, local)

    def text(self, start: int, end: int, edits: Iterable[tuple[int, int, str]]) -> str:
        """Return a part of the text with what lies between some places replaced."""
        parts, at = [], start
        for first, last, new in sorted(edits):
            if start <= first and last <= end:
                parts += [self.data[at:first], new.encode()]
                at = last
        return b"".join([*parts, self.data[at:end]]).decode()

    def lines(self, i: int) -> tuple[int, int]:
        """Return the first line of a statement, of its decorators or the comments above it, and the line after."""
        statement = self.statements[i]
        first = min([statement, *getattr(statement, "decorator_list", ())], key=lambda node: node.lineno).lineno
        while self.data[self.offset(first - 1) :].startswith(b"#"):
            first -= 1
        assert statement.end_lineno is not None
        return first, statement.end_lineno + 1


def _imported(statement: ast.Import | ast.ImportFrom) -> dict[str, Global | External]:
    """Return what an import binds."""
    found: dict[str, Global | External] = {}
    for alias in statement.names:
        bound = alias.asname or alias.name
        if isinstance(statement, ast.Import):
            found[bound.partition(".")[0]] = External(alias.name, "", bound)
            continue
        module = statement.module or ""
        if statement.level:
            module = f"{RUNTIME}.{module}".rstrip(".")
        if module == RUNTIME:
            found[bound] = Global(alias.name, "")
        elif module.startswith(f"{RUNTIME}."):
            found[bound] = Global(module.removeprefix(f"{RUNTIME}."), alias.name)
        elif module != "__future__":
            found[bound] = External(module, alias.name, bound)
    return found


def _bound(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that nodes bind in the scope that they stand in."""
    found: set[str] = set()
    elsewhere: set[str] = set()
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.ClassDef(name=name) | ast.arg(arg=name):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {(alias.asname or alias.name).partition(".")[0] for alias in names}
            case ast.Global(names=globals_):
                elsewhere |= {*globals_}
            case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                pass
            case _:
                if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name is not None:
                    found.add(node.name)
                found |= _bound(ast.iter_child_nodes(node))
    return found - elsewhere


def _globals(
    node: ast.AST, local: frozenset[str] = frozenset(), enclosing: frozenset[str] = frozenset()
) -> Iterator[tuple[ast.Name | ast.Attribute, frozenset[str]]]:
    """Yield the names in a node that no scope within it binds, each with the names that those scopes do bind.

    Args:
        node: any; at the top a statement of a module.
        local: the names of the scope that the node stands in and of those around it.
        enclosing: those that functions in that scope see, without the ones of a class.

    Yields:
        The name, with an attribute where it has one, and the names that are local there.

    """
    children = [*ast.iter_child_nodes(node)]
    if isinstance(node, ast.Name | ast.Attribute):
        base = node if isinstance(node, ast.Name) else node.value
        if not isinstance(base, ast.Name):
            yield from _globals(base, local, enclosing)
        elif base.id not in local:
            yield node, local
        return
    inner: list[ast.AST] = []
    here = inside = local
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        inner = [*node.body] if isinstance(node.body, list) else [node.body]
        here = inside = enclosing | _bound([*ast.iter_child_nodes(node.args), *inner])
    elif isinstance(node, ast.ClassDef):
        inner = [*node.body]
        here, inside = enclosing | _bound(inner), enclosing
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        first = node.generators[0].iter
        loops = [part for generator in node.generators for part in ast.iter_child_nodes(generator)]
        children = [*loops, *(child for child in children if not isinstance(child, ast.comprehension))]
        inner = [child for child in children if child is not first]
        here = inside = local | _bound(generator.target for generator in node.generators)
    for child in children:
        if child in inner:
            yield from _globals(child, here, inside)
        else:
            yield from _globals(child, local, enclosing)


@cache
def runtime() -> dict[str, Source]:
    """Return the modules of the runtime that generated modules use, by name, each after those that it uses."""
    sources: dict[str, Source] = {}

    def add(module: str) -> None:
        if module not in sources:
            source = Source.of(module, files(RUNTIME).joinpath(f"{module}.py").read_text(encoding="utf-8"))
            for used in source.uses:
                add(used)
            sources[module] = source

    for module in ROOTS:
        add(module)
    return sources


def parts(text: str, name: str) -> dict[str, Any]:
    """Return what the template of standalone files needs, with `PLACEHOLDER` for the namespace of the ops.

    Args:
        text: of the generated module.
        name: of its fit.

    Raises:
        UsageError: what the module defines under the fit's name would hide what the runtime needs.

    """
    own = Source.of(OWN, text)
    sources = {**runtime(), OWN: own}
    needed, externals, basics = _needed(sources)
    imported = {external.bound.partition(".")[0]: external for external in externals}
    assert len(imported) == len(externals), "a name is imported from two places"
    taken = {*own.bound} & {*imported, *basics, "hasattr"}  # the last is in the template
    if taken:
        raise UsageError(
            f"name: standalone modules use {quote(min(taken))} themselves; make {quote(name)} under another --name"
        )
    names = _names(sources)
    edits = {module: [*_edits(source, names)] for module, source in sources.items()}
    start, end = own.span(own.docstring)
    exports = re.search(r"^__all__ = .*\n", text, re.MULTILINE)
    assert exports is not None
    return {
        "name": name,
        "facts": [line for line in own.text(0, start, ()).splitlines()[1:] if line != "#"],
        "docstring": own.text(start, end, ()),
        "imports": _import_lines(externals),
        "exports": exports[0].rstrip(),
        "sections": [
            {
                "module": module,
                "about": _about(sources[module]),
                "text": _section(sources[module], sorted(needed[module]), edits[module]),
            }
            for module in runtime()
            if needed[module]
        ],
        "define": names.get(Global("ops", DEFINE), DEFINE),
        "namespace": PLACEHOLDER,
        "own": own.text(len(text[: exports.end()].encode()), len(own.data), edits[OWN]).strip("\n"),
    }


def _needed(sources: dict[str, Source]) -> tuple[dict[str, set[int]], set[External], set[str]]:
    """Return the statements that are needed, by module; what they import; the builtin names they use."""
    needed: dict[str, set[int]] = {module: set() for module in sources}
    externals: set[External] = set()
    basics: set[str] = set()
    todo = [(OWN, i) for i in range(len(sources[OWN].statements))]
    todo += [("ops", i) for i in sources["ops"].bound[DEFINE]]
    while todo:
        module, i = todo.pop()
        if i in needed[module]:
            continue
        needed[module].add(i)
        for _, target, _ in sources[module].references[i]:
            if isinstance(target, Global):
                todo += [(target.module, one) for one in sources[target.module].bound[target.name]]
            elif isinstance(target, External):
                externals.add(target)
            elif module != OWN:
                basics.add(target)
    return needed, externals, basics


def _names(sources: dict[str, Source]) -> dict[Global, str]:
    """Return the new names of what cannot keep its own.

    They are those of the whole runtime, whatever of it is needed, so that its text is the same in every file.
    """
    taken = {*dir(builtins), *sources[OWN].bound}
    hidden: set[Global] = set()  # without its module, the name would mean something local
    words: set[str] = set()
    for source in sources.values():
        taken |= {name for name, target in source.imports.items() if isinstance(target, External)}
        words |= {*re.findall(r"\w+", source.data.decode())}
        for _, target, local in itertools.chain(*source.references):
            if isinstance(target, Global) and target.name in local:
                hidden.add(target)
    names: dict[Global, str] = {}
    for module in runtime():
        for name in sources[module].bound:
            one = Global(module, name)
            if name in taken or one in hidden:
                names[one] = _prefixed(module, name)
                while names[one] in words:
                    names[one] += "_"
            taken.add(names.get(one, name))
    return names


def _prefixed(module: str, name: str) -> str:
    """Return a name with that of its module before it, in the style of the name."""
    bare = name.lstrip("_")
    lead = name[: len(name) - len(bare)]
    if bare.isupper():
        return f"{lead}{module.upper()}_{bare}"
    return f"{lead}{module.capitalize()}{bare}" if bare[0].isupper() else f"{lead}{module}_{bare}"


_DEFINITION = re.compile(rb"(?:async\s+)?(?:def|class)\s+")


def _edits(source: Source, names: dict[Global, str]) -> Iterator[tuple[int, int, str]]:
    """Yield what changes in the text of a module: from one place to another, and the new text."""
    for statement, references in zip(source.statements, source.references, strict=True):
        for node, target, _ in references:
            start, end = source.span(node)
            if isinstance(target, Global):
                new = names.get(target, target.name)
                if new.encode() != source.data[start:end]:
                    yield start, end, new
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            new = names.get(Global(source.module, statement.name), statement.name)
            definition = _DEFINITION.match(source.data, source.span(statement)[0])
            if new != statement.name and definition:
                yield definition.end(), definition.end() + len(statement.name), new
        if source.module == "ops":
            yield from _namespace_edits(source, statement)


def _namespace_edits(source: Source, statement: ast.stmt) -> Iterator[tuple[int, int, str]]:
    """Yield the places of the ops' namespace: in `torch.ops.fitact` and in texts such as "fitact::forward"."""
    for node in ast.walk(statement):
        match node:
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="torch"), attr="ops"), attr=attr):
                assert attr == NAMESPACE
                end = source.span(node)[1]
                yield end - len(NAMESPACE), end, PLACEHOLDER
            case ast.Constant(value=str(text)) if re.fullmatch(rf"{NAMESPACE}(::\w+)?", text):
                start = source.span(node)[0] + 1
                yield start, start + len(NAMESPACE), PLACEHOLDER


def _about(source: Source) -> list[str]:
    """Return the lines of a module's docstring, of which a paragraph too long for a comment is wrapped anew."""
    text = source.text(*source.span(source.docstring), ()).strip('"').strip()
    paragraphs = [p.splitlines() for p in text.replace(f"{NAMESPACE}::", f"{PLACEHOLDER}::").split("\n\n")]
    wrapped = [p if max(map(len, p)) <= WIDTH else textwrap.wrap(" ".join(p), WIDTH) for p in paragraphs]
    return "\n\n".join("\n".join(p) for p in wrapped).splitlines()


def _section(source: Source, needed: list[int], edits: list[tuple[int, int, str]]) -> str:
    """Return the text of some statements of a module, as far apart as formatters set them."""
    text = ""
    for i, j in zip([None, *needed], needed, strict=False):
        first, end = source.lines(j)
        if i is not None:
            definitions = any(isinstance(source.statements[k], ast.FunctionDef | ast.ClassDef) for k in (i, j))
            above = first - source.lines(j - 1)[1]  # what was skipped has no say
            text += "\n" * (2 if definitions else min(above, 1))
        text += source.text(source.offset(first), source.offset(end), edits)
    return text.rstrip("\n")


def _import_lines(externals: set[External]) -> list[str]:
    """Return import statements in the order of formatters, with an empty line after the standard library's."""
    lines: list[str] = []
    for standard in (True, False):
        some = [one for one in externals if (one.module.partition(".")[0] in sys.stdlib_module_names) == standard]
        lines += sorted(f"import {one.module}{_as(one, one.module)}" for one in some if not one.name)
        for module in sorted({one.module for one in some if one.name}):
            members = sorted((one for one in some if one.name and one.module == module), key=_member)
            lines.append(f"from {module} import {', '.join(one.name + _as(one, one.name) for one in members)}")
        lines += [""] if standard else []
    return lines


def _as(external: External, name: str) -> str:
    return f" as {external.bound}" if external.bound != name else ""


def _member(external: External) -> tuple[int, str]:
    """Sort key of what is imported from one module: constants, classes, functions."""
    name = external.name
    return (0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2), name
