"""A stranger's fit: whatever its texts hold, generated code has the statements of its template and no others."""

import ast
import json
import re
from itertools import product
from typing import Any

import pytest

from fitact.codegen import bundle, safety
from fitact.codegen.dialects import Code
from fitact.codegen.generate import render
from fitact.fitter.records import from_json
from tests.fitter.test_records import entries
from tests.support import gates, learned
from tests.support.generated import fits
from tests.support.refusals import changed, refused

# A fit of every method and every form, with every optional field.
SHIPPED = ["gelu_fewbit3", "gelu_regelu2_published", "silu_inverted1", "gelu_inverted_published", "tanh_output"]
RECORDS: dict[str, dict[str, Any]] = {name: fits()[name] for name in SHIPPED}
OWN = {"name": None, "expression": "x*sigmoid(1.5*x)"}
RECORDS["own"] = RECORDS["gelu_fewbit3"] | {"name": "own", "activation": OWN, "weight": "normal(0, 2)"}
SLOPE = {"name": "leaky_relu", "expression": "where(x > 0, x, 0.2*x)", "parameters": {"negative_slope": 0.2}}
RECORDS["leaky"] = RECORDS["gelu_fewbit3"] | {"name": "leaky", "activation": SLOPE}
NUMBERS = {"a": (1.0, True), "b": (0.5, False)}
RECORDS["gate"] = json.loads(gates.recomputed("tanh(g)*(u + 1)", "tanh_gate").to_json())
RECORDS["learned"] = json.loads(learned.recomputed("a*x + tanh(b*x)", "own_learned", NUMBERS).to_json())

CALL = '__import__("os").system("touch ran")'
HOSTILE = (
    f'x"""\nimport os; {CALL}\n"""',
    f'x"""\n__all__ = [{CALL}]\n"""',
    f"x'''\n{CALL}\n'''",
    *(f"x\n{CALL}\n", f"x\r{CALL}\r", f"x\u2028{CALL}", f"x\x0c{CALL}", f"x; {CALL}", f"x) or {CALL} or (x"),
    *(f"{{{{ {CALL} }}}}", "{% include 'module.py.j2' %}", '"""', '"', "'", "\\", 'x\\"""', "x # ", "x; exit(3)"),
    *("{{ exit(3) }}", "x\nexit(3)\n", "\0", "\ud800", "\u202e", "x" * 100_000, "$\\frac$", "$x$", "../x"),
    *("os.system", "", " "),
)
# Printable ASCII without quotes, # and backslashes is accepted where a text is nothing but text.
HARMLESS = {t for t in HOSTILE if t.isascii() and t.isprintable() and not {*"\"'\\#"} & {*t} and 0 < len(t) <= 200}


def structure(text: str) -> str:
    """Return the syntax tree of a module without its docstring, its key and the namespace of its ops."""
    tree = ast.parse(re.sub("(?m)^__ops__ = .*", "", text))
    assert isinstance(tree.body[0], ast.Expr)
    del tree.body[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "key":
            node.value = ast.Constant("")
    return ast.dump(tree)


@pytest.mark.parametrize("name", RECORDS)
def test_every_text_of_every_record(name):
    """Importing what is generated runs none of it, in the package and in standalone folders."""
    record = RECORDS[name]
    clean = from_json(json.dumps(record))
    paths = [path for path, part in entries(record) if isinstance(part, str)]
    assert {"name", "activation.expression"} <= {*paths}
    for path, text in product(paths, HOSTILE):
        if path != "options.source" or text not in HARMLESS:
            refused(from_json, changed(record, path, text))
            continue
        for module in (render, lambda each: bundle.plan([each])[f"{each.name}/__init__.py"]):
            assert structure(module(from_json(changed(record, path, text)))) == structure(module(clean))


def test_what_reading_let_pass_is_not_admitted_to_a_template():
    fit = from_json(json.dumps(RECORDS["gelu_regelu2_published"]))
    for text in (t for t in HOSTILE if {*'"\\#'} & {*t} or not t.isprintable() or not t.isascii()):
        object.__setattr__(fit, "options", {"objective": "primitive", "source": text})
        assert "expected printable ASCII without" in refused(render, fit)
    safety.admitted({"a": [1, True, None, "f'(x)", Code((("u0", "x"),), '_F.gelu(x, approximate="tanh")')]})
    assert "u0" in refused(safety.admitted, Code((("u0\n", "x"),), "x"))
    with pytest.raises(TypeError, match="float"):
        safety.admitted({"a": 1.0})


CLEAN = render(from_json(json.dumps(RECORDS["own"])))
BODY = "@_tiles.jit\ndef _value(x):\n"
# a place in the generated module, and what is put there
INTRUDERS = [
    ("import torch as _torch\n", "import torch as _torch, os\n"),
    ('__all__ = ["', f'__all__ = [{CALL}, "'),
    (BODY, "@_tiles.jit\n@open\ndef value(x):\n"),
    (BODY, "@jit\ndef _value(x=eval):\n"),
]
LINES = [CALL, f"u0 = {CALL}", "import os", "u0 = x.__class__", "u0 = (lambda: x)()", "u0 = [x for x in x]"]
INTRUDERS += [(BODY, f"{BODY}    {line}\n") for line in [*LINES, "(u0 := x)", "return x", ")", "\0"]]
LINES = ["import os", CALL, "owned = 1", "with _torch.no_grad(): x"]
INTRUDERS += [("\n\n_KEY =", f"\n\n{line}\n\n\n_KEY =") for line in LINES]


@pytest.mark.parametrize(("place", "put"), INTRUDERS)
def test_generated_text_holds_no_statement_that_the_template_has_not(place, put):
    assert CLEAN.count(place) >= 1
    assert safety.checked(CLEAN, CLEAN, "own") == CLEAN
    message = refused(safety.checked, CLEAN.replace(place, put, 1), CLEAN, "own")
    assert "'own': its generated module would" in message
