"""A grammar of formulas, gates, options and fits, and changes of them; all from one random generator."""

import itertools
import json
import random
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fitact.fitter.catalog import CATALOG
from fitact.fitter.expr import FUNCTIONS

FITS = [path.read_text("utf-8") for path in sorted((Path(__file__).parents[2] / "generated/fits").glob("*.json"))]
ORDINARY = ("0", "1", "2", "3", "-1", "0.5", "1/3", "1.702", "100", "pi", "e", "-4.999", "1e-5", "0.044715")
EXTREME = ("1e300", "1e-300", "1e38", "1e39", "1e-40", "1e200", "1e-200", "700", "7e2", "1e-9", "999", "1e16")
UNARY = [name for name, (arguments, _) in FUNCTIONS.items() if arguments == 1]
# Every form, with `@` for each part, and its weight.
FORMS: dict[str, float] = {
    **{f"{name}(@)": 1.0 for name in UNARY},
    **{f"{name}(@)": 0.5 for name in CATALOG if name not in FUNCTIONS},
    **{f"(@ {operator} @)": 6.0 for operator in "+-*"},
    "(@ / @)": 3.0,
    "(-@)": 2.0,
    **dict.fromkeys(("(@)**(@)", "2**(@)"), 0.5),
    "clamp(@, -2, 3)": 1.0,
    **{f"(@)**{power}": 1.0 for power in ("2", "3", "(-1)", "0.5", "(-0.5)", "7", "(-0.3)", "4")},
    **{f"(@)**{power}": 0.3 for power in ("1000", "(-1000)", "(1/7)", "40", "1e-9")},
    **{f"{name}(@, @)": 2.0 for name in ("min", "max")},
    **{f"where(@ {comparison} @, @, @)": 1.5 for comparison in ("<", "<=", ">", ">=")},
    **{f"where(x {comparison} {at}, @, @)": 1.0 for comparison in "<>" for at in ("0", "1", "-1.5")},
}


def filled(form: str, parts: Iterator[str]) -> str:
    return re.sub("@", lambda _: next(parts), form)


def tree(chance: random.Random, size: int, wild: bool = False) -> str:
    """Return a random formula of about that many forms, with numbers near the limits if `wild`."""
    if size <= 1:
        return chance.choice(("x", chance.choice(ORDINARY), *[chance.choice(EXTREME)] * wild, "x"))
    (form,) = chance.choices([*FORMS], [*FORMS.values()])
    ends = [0, *sorted(chance.randint(0, size - 1) for _ in range(form.count("@") - 1)), size - 1]
    parts = [tree(chance, b - a, wild) for a, b in itertools.pairwise(ends)]
    return filled(form, iter([parts[0]] * len(parts) if chance.random() < 0.1 else parts))


def formula(chance: random.Random) -> str:
    """Return a random formula: a plain one, a wild one, a nest or a row."""
    kind = chance.random()
    if kind < 0.1:
        return nest(chance)
    if kind < 0.2:
        return row(chance)
    return tree(chance, chance.randint(1, 8) if kind < 0.8 else chance.randint(4, 25), kind < 0.5)


def nest(chance: random.Random) -> str:
    """Return a formula wrapped again and again by the same few forms."""
    forms = chance.choices([*FORMS], [*FORMS.values()], k=chance.randint(1, 4))
    actual = tree(chance, 2)
    for i in range(chance.randint(2, 30)):
        form = forms[i % len(forms)]
        here = chance.randrange(form.count("@"))
        actual = filled(form, (actual if place == here else tree(chance, 1) for place in itertools.count()))
        if len(actual) > 1000:
            break
    return actual


def row(chance: random.Random) -> str:
    """Return many formulas joined by one operator, nested as little as possible."""
    some = [tree(chance, chance.randint(1, 4), chance.random() < 0.5) for _ in range(chance.randint(1, 4))]
    operator = chance.choice(("(@ + @)", "(@ - @)", "(@ * @)", "(@ / @)", "min(@, @)"))
    outer = chance.choice(("@", "@", "(1 / @)", "(-@)", "(@)**(-0.3)"))
    parts = [outer.replace("@", f"({some[i % len(some)]} + {i})") for i in range(chance.randint(2, 40))]
    while len(parts) > 1:
        pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
        parts = [filled(operator, iter(pair)) if len(pair) == 2 else pair[0] for pair in pairs]
    return parts[0]


def gate(chance: random.Random) -> str:
    """Return a random product of a formula in g and one in u, or what nearly is one."""
    a = "silu(x)" if chance.random() < 0.2 else tree(chance, chance.randint(1, 5))
    b = "x" if chance.random() < 0.4 else tree(chance, chance.randint(1, 5))
    form = chance.choices(["@*@", "-@*@", "@/@", "2*@*@", "(@ + @)"], [6, 1, 1, 1, 0.3])[0]
    return filled(form, iter([re.sub(r"\bx\b", "g", a), re.sub(r"\bx\b", "u", b)]))


LETTERS = sorted({*string.ascii_letters, *string.digits, *" _.,+-*/()<>=!|&%@~:[]{}"})
ODD = [
    *"\0\n\t\"'\\#^`$;?é×−π²\u200b\u2028\u202e\ufeff",
    *("\ud800", "\U0001f600", "**", "where(", "1e999", "1j", "lambda"),
]


def text(chance: random.Random) -> str:
    kind = chance.random()
    if kind < 0.3:
        return "".join(chance.choices([*LETTERS, *ODD * (kind < 0.1)], k=chance.randint(0, 60)))
    if kind < 0.35:
        return "".join(chr(chance.randrange(chance.choice((0x110000, 0x3000)))) for _ in range(20))
    whole = formula(chance)
    for _ in range(chance.randint(1, 4)):
        at = chance.randint(0, len(whole))
        inserted = chance.choice(("", chance.choice(LETTERS), chance.choice(ODD), chance.choice(UNARY)))
        whole = whole[:at] + inserted + whole[at + chance.randint(0, 3) :]
    return whole


NUMBERS = (
    *("-1", "0", "1", "2", "3", "4", "5", "8", "99", "1e999", "nan", "-0", "1e-300", "3.5", "x", "", "1e30"),
    "9" * 400,
)
VALUES = {
    "--bits": NUMBERS,
    "--method": ("fewbit", "output", "recompute", "none"),
    "--weight": (
        *("uniform", "normal", "normal(0, 2)", "student(2)", "normal(0, 0)", "x", "1/x", "a.json#b"),
        "exp(-abs(x))",
    ),
    "--param": ("negative_slope=0.2", "alpha=1e999", "alpha", "=", "alpha=nan", "beta=2"),
    "--objective": ("primitive", "derivative", ""),
    "--tol": NUMBERS,
    "--derivative": ("1 - y**2", "y", "x", "1e39"),
    "--seed": NUMBERS,
    "--name": ("a", "b_1", "if", "1a", "", "../a", "a" * 200, "_a", "numpy"),
    "-o": ("out.json", "", "-", "/dev/null/x", "a/b.json", "."),
}


def command(chance: random.Random) -> list[str]:
    texts = [chance.choice([*CATALOG]), formula(chance), gate(chance), text(chance).replace("\0", "")]
    what = chance.choices(texts, [3, 3, 2, 1])[0].encode(errors="replace").decode()
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
PIECES = (
    *("NaN", "Infinity", "1e999", "1e-999", "-0", "5e-324", "1e39", "9" * 400, "9" * 5000, "0." + "3" * 10_000),
    *("", "nan", "True", "'x'", "0x10", "01", "+1", ".5", "{", "]", "//", '"\\x"', "[" * 300, '{"a":' * 5000),
)
TEXTS = (*CATALOG, "uniform", "normal(0, 1)", "x" * 1000, "../x", "{0}", "%s", "__class__")


def value(chance: random.Random, depth: int = 0) -> Any:
    """Return anything that JSON may hold, and what it may not."""
    kind = chance.randrange(10 if depth < 3 else 8)
    if kind > 7:
        parts = [value(chance, depth + 1) for _ in range(chance.randint(0, 4))]
        return parts if kind == 8 else {text(chance)[:8]: part for part in parts}
    number = chance.gauss(0, 1) * 10.0 ** chance.choice((0, chance.randint(-300, 300)))
    integer = chance.choice((chance.randint(-9, 9), chance.randint(-(10**30), 10**30)))
    words = text(chance), formula(chance), chance.choice(TEXTS), RAW + chance.choice(PIECES)
    return (None, chance.random() < 0.5, number, integer, *words)[kind]


def written(record: object) -> str:
    """Return the JSON of a record whose raw pieces are written as they are."""
    whole = json.dumps(record)
    while (start := whole.find(f'"{RAW}')) >= 0:
        piece, end = json.decoder.py_scanstring(whole, start + 1)
        whole = whole[:start] + piece.removeprefix(RAW) + whole[end:]
    return whole


def containers(record: object) -> Iterator[Any]:
    if isinstance(record, dict | list) and record:
        yield record
        for item in record.values() if isinstance(record, dict) else record:
            yield from containers(item)


def fit(chance: random.Random) -> str:
    """Return the JSON of a shipped fit with some values changed, or with some bytes changed."""
    source = chance.choice(FITS)
    if chance.random() < 0.3:
        data = bytearray(source.encode())
        for _ in range(chance.randint(1, 4)):
            at, length = chance.randrange(len(data)), chance.randint(0, 40)
            put = chance.choice((b"", data[at : at + length] * 1000, chance.choice(PIECES).encode(), b"\xef\0,"))
            data[at : at + length * chance.randint(0, 1)] = put
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        return bytes(data).decode(errors=chance.choice(("replace", "surrogateescape", "backslashreplace")))
    record = json.loads(source)
    for _ in range(chance.randint(1, 3)):
        target = chance.choice([*containers(record)])
        place, other = (chance.choice([*target] if isinstance(target, dict) else range(len(target))) for _ in "12")
        match chance.choice(["replace", "replace", "replace", "swap", "remove", "insert"]):
            case "swap":
                target[place], target[other] = target[other], target[place]
            case "remove":
                del target[place]
            case "insert" if isinstance(target, list):
                target.insert(place, value(chance))
            case "insert":
                target[text(chance)[:8]] = chance.choice((target[place], value(chance)))
            case _:
                target[place] = value(chance)
    return written(record)
