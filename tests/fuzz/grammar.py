"""A grammar of formulas, gates, options and fits, and mutations of them; all from one random generator."""

from __future__ import annotations

import itertools
import json
import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitact.fitter.catalog import CATALOG
from fitact.fitter.expr.atoms import FUNCTIONS

FITS = [path.read_text("utf-8") for path in sorted((Path(__file__).parents[2] / "generated/fits").glob("*.json"))]


@dataclass(frozen=True)
class Tree:
    """A formula as its grammar sees it.

    Attributes:
        form: the text, with `@` for each part.
        parts: what stands there.

    """

    form: str
    parts: tuple[Tree, ...] = ()

    def __str__(self) -> str:
        pieces = self.form.split("@")
        return pieces[0] + "".join(f"{part}{piece}" for part, piece in zip(self.parts, pieces[1:], strict=True))

    @property
    def size(self) -> int:
        """How many forms the tree has."""
        return 1 + sum(part.size for part in self.parts)

    def nodes(self) -> Iterator[tuple[tuple[int, ...], Tree]]:
        """Yield every subtree with the way to it, the tree itself first."""
        yield (), self
        for i, part in enumerate(self.parts):
            for way, node in part.nodes():
                yield (i, *way), node

    def replaced(self, way: Sequence[int], new: Tree) -> Tree:
        """Return the tree with another subtree in one place."""
        if not way:
            return new
        i, *rest = way
        return Tree(self.form, (*self.parts[:i], self.parts[i].replaced(rest, new), *self.parts[i + 1 :]))


X = Tree("x")
ORDINARY = ("0", "1", "2", "3", "-1", "0.5", "1/3", "1.702", "100", "pi", "e", "-4.999", "1e-5", "0.044715")
EXTREME = ("1e300", "1e-300", "1e38", "1e39", "1e-40", "1e200", "1e-200", "700", "7e2", "1e-9", "999", "1e16")
UNARY = [name for name, (arguments, _) in FUNCTIONS.items() if arguments == 1]
# Every form with its weight.
FORMS: dict[str, float] = {
    **{f"{name}(@)": 1.0 for name in UNARY},
    **{f"{name}(@)": 0.5 for name in CATALOG if name not in FUNCTIONS},
    **{f"(@ {operator} @)": 6.0 for operator in "+-*"},
    "(@ / @)": 3.0,
    "(-@)": 2.0,
    **{f"(@)**{power}": 1.0 for power in ("2", "3", "(-1)", "0.5", "(-0.5)", "7", "(-0.3)", "4")},
    **{f"(@)**{power}": 0.3 for power in ("1000", "(-1000)", "(1/7)", "40", "1e-9")},
    "(@)**(@)": 0.5,
    "2**(@)": 0.5,
    "min(@, @)": 2.0,
    "max(@, @)": 2.0,
    "clamp(@, -2, 3)": 1.0,
    **{f"where(@ {comparison} @, @, @)": 1.5 for comparison in ("<", "<=", ">", ">=")},
    **{f"where(x {comparison} {at}, @, @)": 1.0 for comparison in "<>" for at in ("0", "1", "-1.5")},
}


@dataclass(frozen=True)
class Grammar:
    """What formulas are made of.

    Attributes:
        leaves: texts without parts, with their weights: the argument and numbers. What else stands for a number,
            such as one that is learned, is another leaf.
        forms: texts with parts, with their weights.

    """

    leaves: dict[str, float]
    forms: dict[str, float]

    def leaf(self, chance: random.Random) -> Tree:
        """Return an argument or a number."""
        return Tree(chance.choices([*self.leaves], [*self.leaves.values()])[0])

    def tree(self, chance: random.Random, size: int) -> Tree:
        """Return a random formula of about that many forms."""
        if size <= 1:
            return self.leaf(chance)
        form = chance.choices([*self.forms], [*self.forms.values()])[0]
        count = form.count("@")
        shares = sorted(chance.randint(0, size - 1) for _ in range(count - 1))
        ends = [0, *shares, size - 1]
        return Tree(form, tuple(self.tree(chance, b - a) for a, b in itertools.pairwise(ends)))

    def mutated(self, chance: random.Random, tree: Tree) -> Tree:
        """Return a formula with a part that is replaced, wrapped, unwrapped, doubled or put elsewhere."""
        nodes = [*tree.nodes()]
        way, node = chance.choice(nodes)
        match chance.choice(["replace", "wrap", "unwrap", "double", "move"]):
            case "replace":
                return tree.replaced(way, self.tree(chance, chance.randint(1, 4)))
            case "wrap":
                outer = self.tree(chance, chance.randint(2, 4))
                places = [place for place, leaf in outer.nodes() if not leaf.parts]
                return tree.replaced(way, outer.replaced(chance.choice(places), node))
            case "unwrap" if node.parts:
                return tree.replaced(way, chance.choice(node.parts))
            case "double":
                return tree.replaced(
                    way, Tree(chance.choice(("(@ * @)", "(@ + @)", "(@ - @)", "(@ / @)")), (node, node))
                )
            case _:
                return tree.replaced(way, chance.choice(nodes)[1])


def _leaves(numbers: Sequence[str], others: Sequence[str] = ()) -> dict[str, float]:
    return {"x": 1.5 * (len(numbers) + len(others)), **dict.fromkeys(numbers, 1.0), **dict.fromkeys(others, 0.5)}


PLAIN = Grammar(_leaves(ORDINARY), FORMS)
WILD = Grammar(_leaves(ORDINARY, EXTREME), FORMS)


def formula(chance: random.Random) -> Tree:
    """Return a random formula: a plain one, a wild one, one that was changed, a nest or a row."""
    kind = chance.random()
    if kind < 0.1:
        return nest(chance)
    if kind < 0.2:
        return row(chance)
    grammar = WILD if kind < 0.5 else PLAIN
    tree = grammar.tree(chance, chance.randint(1, 8) if kind < 0.8 else chance.randint(4, 25))
    for _ in range(chance.randint(0, 3)):
        tree = grammar.mutated(chance, tree)
    return tree


def nest(chance: random.Random) -> Tree:
    """Return a formula wrapped again and again by the same few forms."""
    forms = chance.choices([*FORMS], [*FORMS.values()], k=chance.randint(1, 4))
    tree = PLAIN.tree(chance, 2)
    for i in range(chance.randint(2, 30)):
        form = forms[i % len(forms)]
        places = form.count("@")
        here = chance.randrange(places)
        parts = (tree if i == here or chance.random() < 0.05 else PLAIN.leaf(chance) for i in range(places))
        wrapped = Tree(form, tuple(parts))
        if wrapped.size > 500:
            break
        tree = wrapped
    return tree


def row(chance: random.Random) -> Tree:
    """Return many formulas joined by one operator."""
    grammar = chance.choice((PLAIN, WILD))
    some = [grammar.tree(chance, chance.randint(1, 4)) for _ in range(chance.randint(1, 4))]
    operator = chance.choice(("(@ + @)", "(@ - @)", "(@ * @)", "(@ / @)", "min(@, @)"))
    outer = chance.choice(("@", "@", "(1 / @)", "(-@)", "(@)**(-0.3)"))
    count = chance.randint(2, 40)
    trees = [Tree(outer, (Tree("(@ + @)", (some[i % len(some)], Tree(str(i)))),)) for i in range(count)]
    while len(trees) > 1:
        pairs = [trees[i : i + 2] for i in range(0, len(trees), 2)]
        trees = [Tree(operator, tuple(pair)) if len(pair) == 2 else pair[0] for pair in pairs]
    return trees[0]


def gate(chance: random.Random) -> Tree:
    """Return a random product of a formula in g and one in u, or what nearly is one."""
    a, b = (PLAIN.tree(chance, chance.randint(1, 5)) for _ in range(2))
    if chance.random() < 0.2:
        a = Tree("silu(x)")
    if chance.random() < 0.4:
        b = X
    a, b = (_renamed(tree, name) for tree, name in ((a, "g"), (b, "u")))
    form = chance.choices(["@*@", "-@*@", "@/@", "2*@*@", "(@ + @)"], [6, 1, 1, 1, 0.3])[0]
    return Tree(form, (a, b))


def _renamed(tree: Tree, name: str) -> Tree:
    """Return a formula of an argument of another name."""
    form = name if tree.form == "x" else tree.form.replace("(x ", f"({name} ").replace("(x)", f"({name})")
    return Tree(form, tuple(_renamed(part, name) for part in tree.parts))


LETTERS = sorted({*string.ascii_letters, *string.digits, *" _.,+-*/()<>=!|&%@~:[]{}"})
ODD = [
    *"\0\n\t\"'\\#^`$;?é×−π²\u200b\u2028\u202e\ufeff",
    *("\ud800", "\U0001f600", "**", "where(", "1e999", "1j", "lambda"),
]


def text(chance: random.Random) -> str:
    """Return a text that is nearly a formula, or none at all."""
    kind = chance.random()
    if kind < 0.2:
        return "".join(chance.choices(LETTERS, k=chance.randint(0, 60)))
    if kind < 0.3:
        return "".join(chance.choices([*LETTERS, *ODD * 3], k=chance.randint(1, 30)))
    if kind < 0.35:
        return "".join(
            chr(chance.choice((chance.randrange(0x110000), chance.randrange(0x3000)))) for _ in range(20)
        )
    whole = str(formula(chance))
    for _ in range(chance.randint(1, 4)):
        at = chance.randint(0, len(whole))
        inserted = chance.choice(("", chance.choice(LETTERS), chance.choice(ODD), chance.choice(UNARY)))
        whole = whole[:at] + inserted + whole[at + chance.randint(0, 3) :]
    return whole


NUMBERS = (
    *("-1", "0", "1", "2", "3", "4", "5", "8", "99", "1e999", "nan", "-0", "1e-300", "3.5", "x", "", "1e30"),
    "9" * 400,
)
WEIGHTS = (
    "uniform",
    "normal",
    "normal(0, 2)",
    "student(2)",
    "normal(0, 0)",
    "x",
    "1/x",
    "a.json#b",
    "exp(-abs(x))",
)
VALUES = {
    "--bits": NUMBERS,
    "--method": ("fewbit", "output", "recompute", "none"),
    "--weight": WEIGHTS,
    "--param": ("negative_slope=0.2", "alpha=1e999", "alpha", "=", "alpha=nan", "beta=2"),
    "--objective": ("primitive", "derivative", ""),
    "--tol": NUMBERS,
    "--derivative": ("1 - y**2", "y", "x", "1e39"),
    "--seed": NUMBERS,
    "--name": ("a", "b_1", "if", "1a", "", "../a", "a" * 200, "_a", "numpy"),
    "-o": ("out.json", "", "-", "/dev/null/x", "a/b.json", "."),
}


def command(chance: random.Random) -> list[str]:
    """Return the arguments of a command `fitact fit` or `fitact show`."""
    what = chance.choices(
        [chance.choice([*CATALOG]), str(formula(chance)), str(gate(chance)), text(chance).replace("\0", "")],
        [3, 3, 2, 1],
    )[0]
    what = what.encode(errors="replace").decode()
    if chance.random() < 0.2:
        return ["show", "--", what]
    words = ["fit", f"--fn={what}"]
    if chance.random() < 0.8:
        words += ["--bits", chance.choice("1234"), "--name", "a"]
    for option in chance.sample([*VALUES], chance.choice((0, 0, 1, 1, 2, 4))):
        words += [option, chance.choice(VALUES[option])]
    if chance.random() < 0.15:
        words += ["--domain", chance.choice(NUMBERS), chance.choice(NUMBERS)]
    return words


RAW = "<raw>"  # begins a piece of text that json.dumps would not write
ODD_NUMBERS = (
    *("NaN", "Infinity", "1e999", "1e-999", "-0", "5e-324", "1e39"),
    *("9" * 400, "9" * 5000, "0." + "3" * 10_000),
)
BROKEN = ("", "nan", "True", "'x'", "0x10", "01", "+1", ".5", "{", "]", "//", '"\\x"', "[" * 300, '{"a":' * 5000)


def value(chance: random.Random, depth: int = 0) -> Any:
    """Return anything that JSON may hold, and what it may not."""
    kind = chance.randrange(12 if depth < 3 else 9)
    match kind:
        case 0:
            return None
        case 1:
            return chance.random() < 0.5
        case 2:
            return chance.choice((chance.randint(-9, 9), chance.randint(-(10**30), 10**30)))
        case 3:
            return chance.choice((chance.gauss(0, 1), chance.gauss(0, 1) * 10.0 ** chance.randint(-300, 300)))
        case 4:
            return text(chance)
        case 5:
            return str(formula(chance))
        case 6:
            return RAW + chance.choice(ODD_NUMBERS)
        case 7:
            return RAW + chance.choice(BROKEN)
        case 8:
            return chance.choice(
                (*CATALOG, "uniform", "normal(0, 1)", "x" * 1000, "../x", "{0}", "%s", "__class__")
            )
        case 9 | 10:
            return [value(chance, depth + 1) for _ in range(chance.randint(0, 4))]
        case _:
            return {text(chance)[:8]: value(chance, depth + 1) for _ in range(chance.randint(0, 4))}


def written(record: object) -> str:
    """Return the JSON of a record whose raw pieces are written as they are."""
    whole = json.dumps(record)
    while (start := whole.find(f'"{RAW}')) >= 0:
        piece, end = json.decoder.py_scanstring(whole, start + 1)
        whole = whole[:start] + piece.removeprefix(RAW) + whole[end:]
    return whole


def containers(record: object) -> Iterator[Any]:
    """Go through the objects and lists of a record, itself first."""
    if isinstance(record, dict | list):
        yield record
        for item in record.values() if isinstance(record, dict) else record:
            yield from containers(item)


def fit(chance: random.Random) -> str:
    """Return the JSON of a shipped fit with some values changed, or with some bytes changed."""
    source = chance.choice(FITS)
    if chance.random() < 0.3:
        return _changed_bytes(chance, source)
    record = json.loads(source)
    for _ in range(chance.randint(1, 3)):
        target = chance.choice([*containers(record)])
        places = [*target] if isinstance(target, dict) else [*range(len(target))]
        if not places:
            continue
        place = chance.choice(places)
        match chance.choice(["replace", "replace", "replace", "swap", "remove", "insert", "rename"]):
            case "replace":
                target[place] = value(chance)
            case "swap":
                other = chance.choice(places)
                target[place], target[other] = target[other], target[place]
            case "remove":
                del target[place]
            case "insert" if isinstance(target, list):
                target.insert(place, value(chance))
            case _ if isinstance(target, dict):
                target[text(chance)[:8]] = target.pop(place) if chance.random() < 0.5 else value(chance)
            case _:
                target += target
    return written(record)


def _changed_bytes(chance: random.Random, source: str) -> str:
    data = bytearray(source.encode())
    for _ in range(chance.randint(1, 4)):
        at, length = chance.randrange(len(data)), chance.randint(1, 40)
        match chance.choice(["flip", "flip", "cut", "repeat", "insert"]):
            case "flip":
                data[at] ^= 1 << chance.randrange(8)
            case "cut":
                del data[at : at + length]
            case "repeat":
                data[at:at] = data[at : at + length] * chance.choice((1, 2, 1000))
            case _:
                data[at:at] = chance.choice((*ODD_NUMBERS, *BROKEN, "\ufeff", "\0", "{}", "[]", ",")).encode()
    return bytes(data).decode(errors=chance.choice(("replace", "surrogateescape", "backslashreplace")))
