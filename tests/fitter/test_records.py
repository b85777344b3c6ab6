"""The records of fits and calibrations: their JSON, and every way in which a file can be wrong."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fitact.fitter.files import FIT
from fitact.fitter.records import StepFit, from_json, read, weights
from tests.support.commands import record
from tests.support.gates import recomputed
from tests.support.generated import fits
from tests.support.learned import CASES
from tests.support.refusals import GONE, changed, refused, within

LEVELS = {"bits": 2, "even": True, "borders": [0.25, 0.75, 1.5], "levels": [1.0, 0.75, 0.25, -0.0625]}
STEP = json.loads(record("tanh_fewbit2", weight="normal(0, 2)", options={"cells": 4000, "seed": 0}, **LEVELS))
SITE: dict[str, Any] = {"path": "act", "activation": "gelu", "count": 100, "left_out": 0, "mean": -0.5}
SITE |= {"deviation": 1.25, "least": -3.5, "largest": 2.5, "quantiles": [-3.0, 2.25]}
SITE |= {"weight": "0.95*histogram(-4, 0, 3; 60, 40) + 0.05*student(3, -0.5, 1.25)"}
RECORDS: dict[str, dict[str, Any]] = {
    "step": STEP,
    "relumix": STEP | {"method": "relumix", "options": {"objective": "primitive", "restarts": 4, "seed": 0}},
    "source": STEP | {"method": "relumix", "options": {"objective": "derivative", "source": "arXiv 2406.16282"}},
    "output": fits()["tanh_output"],
    "inverted": fits()["gelu_inverted1"],
    "published": fits()["silu_inverted_published"],
    "gate": json.loads(recomputed("swiglu", "swiglu_recompute").to_json()),
    "own gate": json.loads(recomputed("2*tanh(g)*(u + 1)", "own").to_json()),
    "learned": json.loads(CASES["dyt"].fit.to_json()),
    "own learned": json.loads(CASES["own"].fit.to_json()),
    "weights": {"schema": "fitact.weights/1", "sites": [SITE]},
}
TEXT = json.dumps(STEP, indent=2, sort_keys=True) + "\n"


def reader(name: str) -> Callable[[str], Any]:
    return weights.from_json if name == "weights" else from_json


@pytest.mark.parametrize("name", RECORDS)
def test_round_trip(name: str) -> None:
    text = json.dumps(RECORDS[name], indent=2, sort_keys=True) + "\n"
    actual = reader(name)(text)
    assert actual.to_json() == text
    shuffled = {key: RECORDS[name][key] for key in sorted(RECORDS[name], reverse=True)}
    assert reader(name)("\n" + json.dumps(shuffled, indent="\t") + "\n\n") == actual
    assert name == "weights" or actual.digest() == hashlib.sha256(text.encode()).hexdigest()


def test_integers_are_numbers_and_infinite_errors_are_refused() -> None:
    fit = from_json(changed(STEP, "domain", [-10, 10]))
    assert fit.to_json() == TEXT
    assert "expected 0 or more, got inf" in refused(replace, fit, error=dict.fromkeys(fit.error, math.inf))


def entries(record: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """The path of each part of a record, of a list that of its first, with what is there."""
    for key, part in record.items() if isinstance(record, dict) else [*enumerate(record)][:1]:
        yield f"{at}{key}", part
        yield from entries(part, f"{at}{key}.") if isinstance(part, dict | list) else ()


@pytest.mark.parametrize("name", RECORDS)
def test_a_part_of_another_kind_or_none_is_named(name: str) -> None:
    for path, here in entries(RECORDS[name]):
        names = [part for part in path.split(".") if not part.isdigit()]
        if isinstance(here, dict):
            assert "colour" in refused(reader(name), changed(RECORDS[name], f"{path}.colour", 1)), path
        for other in (None, True, "", 0.3, "1", 2.0, [], {}, GONE, 10**400, -(10**400)):
            of_a_kind = type(other) is type(here) and type(other) is not int
            unnamed = path == "activation.name" and other is None  # the name of a formula that has none
            free = other is GONE and (names[0] == "options" != path or path[-1].isdigit())
            if not (of_a_kind or unnamed or free):
                assert names[-1] in refused(reader(name), changed(RECORDS[name], path, other)), (path, other)


NAMED = ",1a,a b,a-b,a.b,_a,class,None,True,../a,a/b,/a,a\\b,a\0,a\n,\n,é,\N{FULLWIDTH LATIN SMALL LETTER A}"
NO_DERIVATIVE = "x,1 - x**2,y + x,z,Y,yy,y +,[y],y > 0,nonsense(y),1e400,1/0,y ^ 2,y; 1,y\0,y\n,10**10**10"
FREE = ("a'b", 'a"b', "a\\b", "a`b", "a\nb", "\x7f", "\u00b5", "", "a" * 201)
UNKNOWN = {"bits": 1, "domain": [-10.0, 10.0], "weight": "uniform", "even": False, "borders": [0.5], "options": {}}
FIRST = "approximants.float32.0"
HOLDS = "expected a number that float32 holds"
# Of a record: what is changed, a part of the message, and the values that are put there.
WRONG: dict[str, list[tuple[Any, ...]]] = {
    "step": [
        ("colour", "colour", "red"),
        ("schema", "upgrade fitact", "fitact.fit/2", "fitact.fit/99999"),
        ("schema", "schema: expected", "fitact.fit/0", "fitact.fit/1\n"),
        ("schema", "not a fitact fit", "other.thing/1"),
        ("name", "name: expected", *NAMED.split(","), "a" * 81),
        ("method", "method: expected", "Fewbit", "exakt"),
        ("activation", "activation", *({"name": None, "expression": text} for text in ("1", "y", "x\n"))),
        ("activation.expression", "activation.expression", "x", "tanh( x)"),
        ("activation.name", "activation.name", "tanhh"),
        ("activation.name", "activation.expression", "gelu"),
        ("activation.parameters", "unknown parameter 'alpha'", {"alpha": 1.0}),
        ("bits", "bits: expected", 0, 5, -1),
        ("bits", "borders: expected 7", 3),
        ("domain", "domain: expected", [1], [1, 2, 3]),
        ("domain", "domain: expected increasing", [1.0, 1.0], [2, 1], [0.0, -0.0]),
        ("weight", "weight", "gauss", "normal(0, -1)"),
        ("weight", " at x = ", "-1", "x", "1/x", "log(x)", "1e300", "exp(x**2*20)", "1/(x-1)**2"),
        ("weight", ": it is zero all over", "0*x", "normal(1e300,1)"),
        ("weight", ": it is infinite at a point of", "1/sqrt(abs(x-0.77))"),
        ("domain", "of at most 1e+30", [-1.7e308, 1.7e308], [0.0, 1e31], [1e300, 1.1e300]),
        ("borders", "borders: expected", [0.25, 0.5], [0.1] * 4),
        ("borders", "borders: expected increasing", [1, 1, 2], [3, 2, 1], [0.25, 0.75, 0.5]),
        ("borders.0", "borders: an even fit", -0.25),
        ("borders.0", f"borders[0]: {HOLDS}", 0.1),
        ("borders.2", f"borders[2]: {HOLDS}", 1e39),
        ("levels", "levels: expected", [1.0] * 3, [1.0] * 5),
        ("levels.0", f"levels[0]: {HOLDS}", 0.1),
        ("error.rms", "error.rms of 'tanh(x)': expected 0 or more", -1e-9),
        ("options.seed", "options.seed", 2**63),
        ("options.note", "options.note: unknown option", "free"),
    ],
    "relumix": [
        ("options.objective", "options.objective", "sum", "$\\frac$"),
        ("options.source", "options.source", *FREE),
    ],
    "output": [
        *((key, f"{key}: not a field, expected activation", value) for key, value in UNKNOWN.items()),
        ("activation.expression", "activation.expression", "tanh(y)"),
        ("derivative", "derivative", *NO_DERIVATIVE.split(","), "where(x > 0, 1, 0)", "y" * 3000, "(" * 9000),
        ("error.float64", "error: expected", 0.0),
    ],
    "inverted": [
        ("bits", "bits: expected 0, 1, 2, 3 or 4, got 5", 5),
        ("bits", "approximants.bfloat16: expected 1 to 1 approximants, got 2", 0),
        ("domain", "domain: expected numbers of at most 3.4", [-1e308, 1.0]),
        ("borders.float32", "borders.float32: expected 1 numbers, got 0", []),
        ("borders.float32", f"borders.float32[0]: {HOLDS} exactly", [0.1]),
        ("approximants", "approximants.bfloat16: missing", {}),
        ("approximants.float32", "approximants.float32: expected 1 to 2 approximants, got 0", []),
        (f"{FIRST}.kind", "expected", "spline"),
        (f"{FIRST}.approximates", "approximates: expected derivative", "sigmoid"),
        (f"{FIRST}.low", "low: expected at most high", 5.0),
        (f"{FIRST}.numerator", "numerator: expected 1 numbers, got 0", []),
        (f"{FIRST}.denominator", "denominator: expected no root", [0.0], [-0.25, 1.0]),
        (f"{FIRST}.radicals", "radicals: expected 1 to 3, got 0", []),
        (f"{FIRST}.radicals.0.side", "side: expected an integer, one of -1, 0, 1, got 2", 2),
        (f"{FIRST}.error", "error.float32: expected that of the worst approximant, 1.0", 1.0),
        ("error.float32", "error.float32 of 'x*(1 + erf(x/sqrt(2)))/2': expected 0 or more", -1.0),
    ],
    "published": [
        (f"{FIRST}.kind", "expected approximates, denominator", "quotient"),
        (f"{FIRST}.approximates", "expected quotients, or approximants of one anchor", "derivative"),
        (f"{FIRST}.anchor", "anchor: expected a number below 0", 0.5),
        (f"{FIRST}.anchor", "approximants.float32: expected quotients, or approximants of one anchor", -0.5),
        (f"{FIRST}.coefficients", "coefficients: expected 4 numbers", [1.0]),
    ],
    "gate": [
        ("activation.name", "activation.name: 'silu' is not in this catalog", "silu"),
        ("activation.expression", "activation.expression: 'gelu(g)*u' is not that of", "gelu(g)*u"),
        ("error", "error: expected , got", {"h_1": 0.0}),
        ("method", "gate_coded is not fitted any more: block codes, of fitact.saving", "gate_coded"),
    ],
    "own gate": [("activation.expression", "got no factor of u", "silu(g)")],
    "learned": [
        ("activation.learned", "is not that of 'dyt' in", [], [{"name": "alpha", "start": 0.5, "channel": True}]),
        ("activation.name", "prelu has no learned parameter 'alpha'", "prelu"),
        ("activation.expression", "'alpha*x' is not that of 'dyt' in this catalog", "alpha*x"),
    ],
    "own learned": [
        ("activation.learned", "expected 1 to 8 learned parameters, got 0", []),
        ("activation.learned.1.name", "two learned parameters have one name", "a"),
        ("activation.learned.0.start", "expected a start that float32 holds", 1e300, 1e-300),
        ("activation.expression", "the learned parameter b is used nowhere", "a*x"),
    ],
    "weights": [
        ("schema", "schema: expected fitact.weights/1, got 'fitact.fit/1': this is not a file of", FIT.schema),
        ("more", "more: not a field, expected sites", 1),
        ("sites", "sites: expected at least one activation", []),
        ("sites", "sites[1].path: 'act' appears twice", [SITE, SITE]),
        ("sites.0.path", "sites[0].path: expected 1 to 500 printable characters", "", "a\x1b[2J", "a" * 501),
        ("sites.0.activation", "sites[0].activation: expected 1 to 500 printable characters", "a\nb"),
        ("sites.0.count", "sites[0].count: expected 1 or more", 0),
        ("sites.0.deviation", "sites[0].deviation: expected no negative number", -1.0),
        ("sites.0.least", "sites[0].least, quantiles: expected no more than largest", 1e6),
        ("sites.0.quantiles", "sites[0].quantiles: expected 2 numbers", [0.0]),
        ("sites.0.weight", "sites[0].weight 'histogram(0, 0; 1)': edge 1: expected more", "histogram(0, 0; 1)"),
        ("sites.0.weight", "sites[0].weight", "__import__('os')", "x\x00"),
    ],
}
CHANGES = [
    pytest.param(name, path, message, value, id=f"{name}: {path}={value!a:.20}")
    for name, rows in WRONG.items()
    for path, message, *values in rows
    for value in values
]


@pytest.mark.parametrize(("name", "path", "message", "value"), CHANGES)
def test_what_is_wrong_is_named(name: str, path: str, message: str, value: object) -> None:
    with within(120):
        assert message in refused(reader(name), changed(RECORDS[name], path, value))


@pytest.mark.parametrize("key", ["a\nb", "\x1b[31m", "\u2028", "\ud800", "k" * 100_000, ""])
def test_hostile_keys(key: str) -> None:
    for wrong in (STEP, *(STEP | {place: STEP[place] | {key: [None]}} for place in ("activation", "error"))):
        refused(from_json, json.dumps(wrong | {key: [None]}))
    refused(from_json, f"{{{json.dumps(key)}: 1, {json.dumps(key)}: 2}}")


# a part of the message → what files hold
BAD_FILES: dict[str, list[str | bytes | None]] = {
    "no such file": [None],
    "not JSON": ["", "none", "\ufeff" + TEXT, TEXT * 2, TEXT.replace(",", ",,", 1), "9" * 5000, '{"a":' * 10**5],
    "expected a JSON object": ["null", "[]", "3", json.dumps(TEXT)],
    "UTF-8": [b"\xff\xfe{}", TEXT.encode("utf-16")],
    "larger than": [b" " * (1 << 25) + b"{}", b"9" * (1 + (1 << 25))],
    "NaN": [TEXT.replace("0.25,", "NaN,", 1)],
    "Infinity": [TEXT.replace("0.25,", "Infinity,", 1), TEXT.replace("-10.0,", "-Infinity,", 1)],
    "schema: appears twice": ['{"schema": 1, "schema": 2}'],
    "seed": [TEXT.replace('"seed": 0', f'"seed": {seed}') for seed in ('0, "seed": 0', "-1e999")],
    "borders[1]": [TEXT.replace("0.75,", "1e999,", 1)],
    "7": ["{" + ",".join(f'"{i}":0' for i in range(100_000)) + ',"7":1}'],
    "bits: expected": [changed(STEP, "bits", value) for value in (7, [0.5] * 200_000, "x" * 1_000_000)],
}


@pytest.mark.parametrize(("part", "content"), [(part, each) for part, some in BAD_FILES.items() for each in some])
def test_file_and_field_are_named(part: str, content: str | bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    for reads in (read, weights.read_weights) if part in [*BAD_FILES][:5] else (read,):
        with within(120):
            message = refused(reads, path)
        assert message.startswith(f"{path}: ") and part in message and message.count(str(path)) == 1


@pytest.mark.parametrize("changes", [{}, {"even": False, "borders": [-1.5, 0.0, 0.75]}], ids=["even", "plain"])
def test_levels_of_a_step_function(changes: dict[str, Any]) -> None:
    """A border belongs to the level below; NaN gets the first level."""
    fit = from_json(json.dumps(STEP | changes))
    assert isinstance(fit, StepFit)
    first, *_, last = levels = fit.levels
    for i, border in enumerate(fit.borders):
        x = np.array([math.nextafter(border, -math.inf), border, math.nextafter(border, math.inf)])
        for side in (1, -1) if fit.even else (1,):
            assert fit(side * x).tolist() == [levels[i], levels[i], levels[i + 1]]
    assert fit(np.array([np.nan, np.inf, -np.inf])).tolist() == [first, last, last if fit.even else first]
    if not fit.even:
        assert fit(np.array([0.0, -0.0])).tolist() == [0.75, 0.75]
