"""The record of a fit: its calls, its JSON, and every way in which a file can be wrong."""

import copy
import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fitact.errors import UsageError
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.methods import fewbit
from fitact.fitter.numerics.weight import Weight
from fitact.fitter.records.fit import SCHEMA, StepFit
from fitact.fitter.records.reading import MAX_BYTES, from_json, read
from tests.support.refusals import GONE, changed, refused, within

GOOD: dict[str, Any] = {
    "schema": SCHEMA,
    "name": "tanh_fewbit2",
    "method": "fewbit",
    "activation": {"name": "tanh", "expression": "tanh(x)"},
    "bits": 2,
    "domain": [-10.0, 10.0],
    "weight": "normal(0, 2)",
    "even": True,
    "borders": [0.25, 0.75, 1.5],
    "levels": [1.0, 0.75, 0.25, -0.0625],
    "error": {"max": 0.25, "objective": 0.1, "primitive_max": 0.0, "primitive_norm": 0.0, "rms": 1e-30},
    "options": {"cells": 4000, "seed": 0},
}
TEXT = json.dumps(GOOD, indent=2, sort_keys=True) + "\n"


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """A text that takes for ever fails its test, and does not hold up the run."""
    with within(120):
        yield


# ------------------------------------------------------------------------------------------------ the file


def test_round_trip():
    fit = from_json(TEXT)
    assert fit.to_json() == TEXT
    assert from_json(fit.to_json()) == fit
    assert fit.digest() == hashlib.sha256(TEXT.encode()).hexdigest()


def test_layout_and_order_of_the_text_do_not_matter():
    shuffled = {key: GOOD[key] for key in sorted(GOOD, reverse=True)}
    assert from_json("\n" + json.dumps(shuffled, indent="\t") + "\n\n") == from_json(TEXT)


def test_integers_are_numbers():
    fit = from_json(changed(GOOD, "domain", [-10, 10]))
    assert fit.to_json() == TEXT
    assert all(isinstance(number, float) for number in fit.domain)


def test_same_fit_same_bytes():
    texts = {
        fewbit.fit(
            Activation.of("x*sigmoid(2*x)"),
            2,
            "again",
            domain=(-4.0, 5.0),
            weight=Weight("normal"),
            cells=200,
        ).to_json()
        for _ in range(2)
    }
    assert len(texts) == 1
    (text,) = texts
    assert from_json(text).to_json() == text


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fewbit", {"cells": 4000, "seed": 0}),
        ("relumix", {"objective": "primitive", "restarts": 4, "seed": 0}),
        ("relumix", {"objective": "derivative", "source": "arXiv 2406.16282"}),
    ],
)
def test_methods(method, options):
    fit = from_json(json.dumps(GOOD | {"method": method, "options": options}))
    assert (fit.method, fit.options) == (method, options)


@pytest.mark.parametrize("value", ["sum", "$\\frac$", "", 1, None])
def test_objective(value):
    record = GOOD | {"method": "relumix", "options": {"objective": value}}
    assert "options.objective" in refused(from_json, json.dumps(record))


@pytest.mark.parametrize("value", ["a'b", 'a"b', "a\\b", "a`b", "a\nb", "\x7f", "\u00b5", "", "a" * 201, 1, None])
def test_source(value):
    record = GOOD | {"method": "relumix", "options": {"source": value}}
    assert "options.source" in refused(from_json, json.dumps(record))


# ----------------------------------------------------------------------------------------------- its fields

# a change of the good record, the field that the message names
WRONG = [
    *((key, GONE, key) for key in GOOD),
    ("colour", "red", "colour"),
    ("version", 1, "version"),
    # schema
    ("schema", "fitact.fit/2", "upgrade fitact"),
    ("schema", "fitact.fit/99999", "upgrade fitact"),
    ("schema", "fitact.fit/0", "schema: expected fitact.fit/1"),
    ("schema", "fitact.fit/1\n", "schema: expected"),
    ("schema", "other.thing/1", "not a fitact fit"),
    ("schema", 1, "schema: expected"),
    ("schema", None, "schema: expected"),
    ("schema", [SCHEMA], "schema: expected"),
    ("schema", {}, "schema: expected"),
    # name
    *(("name", name, "name: expected") for name in ("", "1a", "a b", "a-b", "a.b", "_a", "class", "None", "True")),
    *(
        ("name", name, "name: expected")
        for name in ("../a", "a/b", "/a", "a\\b", "a\0", "a\n", "\n", "é", "a" * 81)
    ),
    *(
        ("name", name, "name: expected")
        for name in ("\N{FULLWIDTH LATIN SMALL LETTER A}", None, 1, True, ["a"], {})
    ),
    # method
    *(("method", method, "method: expected") for method in ("", "Fewbit", "exakt", None, 1, ["fewbit"], {})),
    # activation
    *(("activation", value, "activation: expected") for value in (None, "tanh", 1, [], {}, {"name": "tanh"})),
    ("activation.expression", GONE, "activation: expected"),
    ("activation.name", GONE, "activation: expected"),
    ("activation.kind", "smooth", "activation: expected"),
    ("activation.name", 1, "activation.name"),
    ("activation.name", True, "activation.name"),
    ("activation.name", "gelu", "activation.expression"),
    ("activation.name", "tanhh", "activation.name"),
    ("activation.expression", "x", "activation.expression"),
    ("activation.expression", "tanh( x)", "activation.expression"),
    ("activation.expression", None, "activation.expression"),
    ("activation.parameters", {"alpha": 1.0}, "unknown parameter 'alpha'"),
    ("activation.parameters", {}, "activation.parameters"),
    ("activation.parameters", 1, "activation.parameters"),
    ("activation.parameters", {"alpha": "1"}, "activation.parameters.alpha"),
    ("activation.expression", 1, "activation.expression"),
    ("activation.expression", ["x"], "activation.expression"),
    *(
        ("activation", {"name": None, "expression": text}, "activation")
        for text in (
            "",
            "1",
            "y",
            "__import__('os')",
            "x.__class__",
            "10**10**10",
            "x" * 3000,
            "(" * 9000,
            "x\n",
            "\0",
        )
    ),
    # bits
    *(("bits", bits, "bits: expected") for bits in (0, 5, -1, 1.5, 2.0, True, "2", None, [2], {}, 10**400)),
    ("bits", 3, "borders: expected 7"),
    ("bits", 1, "borders: expected 1"),
    # domain
    *(("domain", value, "domain: expected") for value in (None, 1, "12", [], [1], [1, 2, 3], {"0": 1}, True)),
    *(("domain", value, "domain: expected increasing") for value in ([1.0, 1.0], [2, 1], [0.0, -0.0])),
    ("domain.0", "-10", "domain[0]"),
    ("domain.1", True, "domain[1]"),
    ("domain.1", None, "domain[1]"),
    ("domain.1", [10], "domain[1]"),
    ("domain.0", -(10**400), "domain[0]"),
    # weight
    *(("weight", value, "weight: expected text") for value in (None, 1, True, ["uniform"], {})),
    *(("weight", text, "weight") for text in ("", "gauss", "normal(0, -1)", "__import__('os')", "10**10**10")),
    ("weight", "normal(" + "1" * 100_000, "weight"),
    # even
    *(("even", value, "even: expected") for value in (0, 1, None, "true", [], {})),
    # borders
    *(("borders", value, "borders: expected") for value in (None, 1, "abc", {}, [], [0.25, 0.5], [0.1] * 4)),
    *(("borders", value, "borders: expected incr") for value in ([1, 1, 2], [3, 2, 1], [0.25, 0.75, 0.5])),
    ("borders.0", -0.25, "borders: an even fit"),
    ("borders.0", 0.1, "borders[0]: expected a number that float32 holds"),
    ("borders.1", math.nextafter(0.75, 1), "borders[1]: expected a number that float32 holds"),
    ("borders.2", 1e39, "borders[2]: expected a number that float32 holds"),
    ("borders.2", 10**400, "borders[2]"),
    ("borders.1", False, "borders[1]"),
    ("borders.1", "0.75", "borders[1]"),
    ("borders.1", None, "borders[1]"),
    # levels
    *(("levels", value, "levels: expected") for value in (None, 1, "abcd", {}, [], [1.0] * 3, [1.0] * 5)),
    ("levels.0", 0.1, "levels[0]: expected a number that float32 holds"),
    ("levels.3", 1e-50, "levels[3]: expected a number that float32 holds"),
    ("levels.3", -(10**400), "levels[3]"),
    ("levels.1", True, "levels[1]"),
    ("levels.1", [0.75], "levels[1]"),
    # error
    *(("error", value, "error: expected") for value in (None, 1, "abc", [], {}, {"max": 1})),
    ("error.rms", GONE, "error: expected"),
    ("error.more", 1.0, "error: expected"),
    ("error.rms", -1e-9, "error: expected no negative"),
    ("error.rms", "0", "error.rms"),
    ("error.rms", True, "error.rms"),
    ("error.rms", None, "error.rms"),
    ("error.rms", 10**400, "error"),
    # options
    *(("options", value, "options: expected") for value in (None, 1, "abc", [])),
    ("options.seed", None, "options.seed"),
    ("options.seed", True, "options.seed"),
    ("options.seed", [1], "options.seed"),
    ("options.seed", {"a": 1}, "options.seed"),
    ("options.seed", "0", "options.seed"),
    ("options.seed", 0.5, "options.seed"),
    ("options.seed", 2**63, "options.seed"),
    ("options.note", "free", "options.note: unknown option"),
    ("options.source", "the methods of other fits have it", "options.source: unknown option"),
]


@pytest.mark.parametrize(
    ("path", "value", "field"),
    WRONG,
    ids=[f"{path}={value!a:.20}" for path, value, _ in WRONG],
)
def test_wrong_field(path, value, field):
    assert field in refused(from_json, changed(GOOD, path, value))


@pytest.mark.parametrize("key", ["a\nb", "\x1b[31m", "\u2028", "\ud800", "k" * 100_000, ""])
def test_hostile_keys(key):
    for place in ("", "activation", "error", "options"):
        record = copy.deepcopy(GOOD)
        (record[place] if place else record)[key] = [None]
        refused(from_json, json.dumps(record))
    refused(from_json, f"{{{json.dumps(key)}: 1, {json.dumps(key)}: 2}}")


# the text of a file, part of the message
NO_RECORD = [
    ("", "not JSON"),
    ("{", "not JSON"),
    ("nonsense", "not JSON"),
    ("\ufeff" + TEXT, "not JSON"),
    (TEXT + TEXT, "not JSON"),
    (TEXT.replace(",", ",,", 1), "not JSON"),
    (TEXT.replace('"', "'"), "not JSON"),
    (TEXT.replace("0.25,", "NaN,", 1), "NaN"),
    (TEXT.replace("0.25,", "Infinity,", 1), "Infinity"),
    (TEXT.replace("-10.0,", "-Infinity,", 1), "-Infinity"),
    ("null", "expected a JSON object"),
    ("[]", "expected a JSON object"),
    ("3", "expected a JSON object"),
    (json.dumps(TEXT), "expected a JSON object"),
    ("{}", "schema"),
    ("9" * 5000, "not JSON"),
    ("[" * 100_000, "not JSON"),
    ('{"a":' * 100_000, "not JSON"),
    ('{"schema":' + "[" * 100_000 + "]" * 100_000 + "}", "not JSON"),
    (TEXT.replace('"bits": 2', '"bits": 2, "bits": 2'), "bits"),
    (TEXT.replace('"seed": 0', '"seed": 0, "seed": 0'), "seed"),
    (TEXT.replace("1e-30", "1e999"), "error"),
    (TEXT.replace("10.0", "1e999"), "domain"),
    (TEXT.replace("0.75,", "1e999,", 1), "borders[1]"),
    (TEXT.replace("-0.0625", "-1e999"), "levels[3]"),
    (TEXT.replace('"seed": 0', '"seed": 1e999'), "options.seed"),
    (TEXT.replace('"seed": 0', '"seed": -1e999'), "options.seed"),
    ("{" + ",".join(f'"{i}":0' for i in range(100_000)) + ',"7":1}', "7"),
]


@pytest.mark.parametrize(
    ("text", "part"), NO_RECORD, ids=[f"{i}-{text[:20]!a}" for i, (text, _) in enumerate(NO_RECORD)]
)
def test_no_record(text, part):
    assert text != TEXT
    assert part in refused(from_json, text)


def test_huge_integers_are_kept_or_refused():
    for digits in (300, 4000):
        try:
            fit = from_json(changed(GOOD, "options.seed", 10**digits))
        except UsageError as error:
            assert "options.seed" in str(error)
        else:
            assert from_json(fit.to_json()) == fit


# ------------------------------------------------------------------------------------------------ on the disk


def test_read(tmp_path):
    path = tmp_path / "fit.json"
    path.write_text(TEXT, encoding="utf-8")
    assert read(path) == from_json(TEXT)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "no such file"),
        (b"", "not JSON"),
        (b"\xff\xfe{}", "UTF-8"),
        (TEXT.encode("utf-16"), "UTF-8"),
        (b" " * (MAX_BYTES + 1), f"larger than the {MAX_BYTES} bytes"),
        (b"9" * (MAX_BYTES + 1), "larger than"),
        (changed(GOOD, "bits", 7).encode(), "bits: expected"),
        (changed(GOOD, "borders.1", 0.1).encode(), "borders[1]: expected"),
        (changed(GOOD, "weight", "gauss").encode(), "weight 'gauss'"),
        (b'{"schema": "fitact.fit/7"}', "schema: expected"),
    ],
)
def test_read_names_file_and_field(content, part, tmp_path):
    path = tmp_path / "some.json"
    if content is not None:
        path.write_bytes(content)
    message = refused(read, path)
    assert message.startswith(f"{path}: ")
    assert part in message
    assert message.count(str(path)) == 1


# ---------------------------------------------------------------------------------------------------- calls

PLAIN = {**GOOD, "name": "p", "even": False, "borders": [-1.5, 0.0, 0.75]}


def plain() -> StepFit:
    return from_json(json.dumps(PLAIN))


@pytest.mark.parametrize("i", range(3))
def test_levels_around_a_border(i):
    fit, border = plain(), PLAIN["borders"][i]
    below, at, above = math.nextafter(border, -math.inf), border, math.nextafter(border, math.inf)
    assert fit(np.array([below, at, above])).tolist() == [fit.levels[i], fit.levels[i], fit.levels[i + 1]]


@pytest.mark.parametrize("i", range(3))
@pytest.mark.parametrize("side", [1, -1])
def test_levels_around_a_border_of_an_even_fit(i, side):
    fit, border = from_json(TEXT), GOOD["borders"][i]
    x = side * np.array([math.nextafter(border, 0), border, math.nextafter(border, math.inf)])
    assert fit(x).tolist() == [fit.levels[i], fit.levels[i], fit.levels[i + 1]]


@pytest.mark.parametrize("record", [GOOD, PLAIN], ids=["even", "plain"])
def test_what_is_no_number_or_infinite(record):
    fit = from_json(json.dumps(record))
    first, last = fit.levels[0], fit.levels[-1]
    assert fit(np.array([np.nan, np.inf, -np.inf])).tolist() == [first, last, last if fit.even else first]


def test_minus_zero_is_zero():
    assert plain()(np.array([0.0, -0.0])).tolist() == [0.75, 0.75]
