"""The records of gates: their JSON, and every way in which a file can be wrong."""

import json

import pytest

from fitact.fitter.records.reading import from_json
from tests.support.gates import rebuilt
from tests.support.refusals import changed, refused

FITS = {
    "rebuild": rebuilt("swiglu", "swiglu_rebuild"),
    "own": rebuilt("2*tanh(g)*(u + 1)", "own"),
}
RECORDS = {name: json.loads(fit.to_json()) for name, fit in FITS.items()}


@pytest.mark.parametrize("name", FITS)
def test_round_trip(name):
    fit = FITS[name]
    text = fit.to_json()
    assert from_json(text) == fit
    assert from_json(text).to_json() == text
    assert RECORDS[name]["activation"] == {"name": fit.activation.name, "expression": fit.activation.expression}


WRONG = [
    ("rebuild", "activation.name", "silu", "activation.name: 'silu' is not in this catalog"),
    ("rebuild", "activation.name", ["swiglu"], "activation.name"),
    ("rebuild", "activation.expression", "gelu(g)*u", "activation.expression: 'gelu(g)*u' is not that of"),
    ("rebuild", "activation.parameters", {}, "activation"),
    ("rebuild", "activation", "swiglu", "activation: expected an object"),
    ("own", "activation.expression", "silu(g)", "got no factor of u"),
    ("own", "activation.expression", "silu(x)", "unknown name 'x'"),
    ("own", "activation.expression", 1, "activation.expression: expected text, got 1"),
    ("rebuild", "error", {"h_1": 0.0}, "error: expected , got"),
    ("rebuild", "code_g", None, "code_g: not a field of a fit of the method gate_rebuild"),
    (
        "rebuild",
        "method",
        "gate_coded",
        "method: gate_coded is not fitted any more: block codes, of fitact.saving",
    ),
    ("own", "method", "coded", "method: coded is not fitted any more"),
    ("rebuild", "method", "exact", "derivative: missing"),
    ("rebuild", "name", "for", "name: expected"),
]


@pytest.mark.parametrize(("name", "path", "value", "message"), WRONG)
def test_wrong(name, path, value, message):
    found = refused(from_json, changed(RECORDS[name], path, value))
    assert message in found
