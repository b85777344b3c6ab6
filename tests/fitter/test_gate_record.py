"""The records of gates: their JSON, and every way in which a file can be wrong."""

import json
import math

import numpy as np
import pytest

from fitact.fitter.records.reading import from_json
from tests.support.gates import coded, rebuilt
from tests.support.refusals import GONE, changed, refused

FITS = {
    "rebuild": rebuilt("swiglu", "swiglu_rebuild"),
    "own": rebuilt("2*tanh(g)*(u + 1)", "own"),
    "coded": coded("silu(g)*u", "own_coded", 3),
    "both": coded("swiglu", "swiglu_coded8_6", 8, 6),
}
RECORDS = {name: json.loads(fit.to_json()) for name, fit in FITS.items()}


@pytest.mark.parametrize("name", FITS)
def test_round_trip(name):
    fit = FITS[name]
    text = fit.to_json()
    assert from_json(text) == fit
    assert from_json(text).to_json() == text
    assert RECORDS[name]["activation"] == {"name": fit.activation.name, "expression": fit.activation.expression}


def test_errors_are_those_of_products_of_independent_numbers():
    """To first order in the errors: the tables here are coarse, so a tenth apart is near."""
    fit = FITS["both"]
    rng = np.random.default_rng(1)
    g, u = 2 * rng.normal(size=(2, 400_000))
    a, b = fit.activation.a, fit.activation.b
    at_g, at_u = fit.code_g.code(g), fit.code_u.code(u)
    tables = {
        "h": (a.value(g) * b.value(u), np.take(fit.code_g.values, at_g) * np.take(fit.code_u.values, at_u)),
        "dg": (
            a.derivative(g) * b.value(u),
            np.take(fit.code_g.derivatives, at_g) * np.take(fit.code_u.values, at_u),
        ),
        "du": (
            a.value(g) * b.derivative(u),
            np.take(fit.code_g.values, at_g) * np.take(fit.code_u.derivatives, at_u),
        ),
    }
    for what, (exact, found) in tables.items():
        error = math.sqrt(np.mean((exact - found) ** 2) / np.mean(exact**2))
        assert fit.error[f"{what}_2"] == pytest.approx(error, rel=0.1)
    kept = FITS["coded"]
    assert kept.error["h_1"] == kept.error["du_1"] == kept.code_g.error["value_1"]
    assert kept.error["dg_4"] == kept.code_g.error["derivative_4"]


WRONG = [
    ("rebuild", "activation.name", "silu", "activation.name: 'silu' is not a gate"),
    ("rebuild", "activation.name", ["swiglu"], "activation.name"),
    ("rebuild", "activation.expression", "gelu(g)*u", "activation.expression: 'gelu(g)*u' is not that of"),
    ("rebuild", "activation.parameters", {}, "activation"),
    ("rebuild", "activation", "swiglu", "activation: expected an object"),
    ("own", "activation.expression", "silu(g)", "got no factor of u"),
    ("own", "activation.expression", "silu(x)", "unknown name 'x'"),
    ("own", "activation.expression", 1, "activation.expression: unexpected value 1"),
    ("rebuild", "error", {"h_1": 0.0}, "error: expected , got"),
    ("rebuild", "code_g", None, "code_g: not a field of a fit of the method gate_rebuild"),
    ("rebuild", "method", "gate_coded", "code_g: missing"),
    ("rebuild", "method", "exact", "derivative: missing"),
    ("rebuild", "name", "for", "name: expected"),
    ("both", "code_g", None, "code_g: expected an object"),
    ("both", "code_g", GONE, "code_g: missing"),
    ("both", "code_u", [], "code_u: expected an object or null"),
    ("both", "code_g.bits", 2, "code_g.bits: expected 3"),
    ("both", "code_g.bits", 7, "code_g.borders: expected 127 numbers"),
    ("both", "code_g.name", "other", "code_g.name: expected 'swiglu_coded8_6', as the gate's, got 'other'"),
    ("both", "code_u.name", "no no", "code_u.name: expected a Python identifier"),
    ("both", "code_g.method", "fewbit", "code_g.method: expected one of coded"),
    ("both", "code_g", {"method": "coded_stochastic"}, "code_g.method: expected one of coded, got 'coded_stoch"),
    ("both", "code_g.schema", "fitact.fit/1", "code_g.schema: not a field of a fit of the method coded"),
    ("both", "code_g.weight", "exec()", "code_g.weight"),
    ("both", "code_g.borders.3", 0.1, "code_g.borders[3]: expected a number that float32 holds"),
    ("both", "code_u.values.0", "1", "code_u.values[0]: expected a number"),
    ("both", "code_u.derivatives", GONE, "code_u.derivatives: missing"),
    ("both", "code_u.options", {"seed": 1}, "code_u.options.seed: unknown option"),
    ("both", "code_g.activation", {"name": "gelu", "expression": "gelu(x)"}, "code_g.activation.expression"),
    (
        "both",
        "code_g.activation",
        {"name": None, "expression": "x"},
        "code_g.activation: expected the factor 'x*sigm",
    ),
    (
        "both",
        "code_u.activation.expression",
        "2*x",
        "code_u.activation: expected the factor 'x' of gate 'silu(g)*u'",
    ),
    ("both", "code_u.error.value_1", 0.5, "error.dg_1: expected what its parts' errors give"),
    ("both", "code_u.error.value_1", -0.5, "code_u.error: expected no negative number"),
    ("both", "code_u", RECORDS["both"]["code_g"], "code_u.activation: expected the factor"),
    ("both", "code_u", None, "error.dg_0.5: expected what its parts' errors give"),
    ("both", "error.h_1", 0.0, "error.h_1: expected what its parts' errors give"),
    ("both", "method", "gate_rebuild", "code_g: not a field of a fit of the method gate_rebuild"),
    ("coded", "code_u", GONE, "code_u: missing"),
]


@pytest.mark.parametrize(("name", "path", "value", "message"), WRONG)
def test_wrong(name, path, value, message):
    found = refused(from_json, changed(RECORDS[name], path, value))
    assert message in found
