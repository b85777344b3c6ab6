"""Fits that are readable JSON and odd: each is shown and drawn right."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fitact.base import literal, save
from fitact.fitter.plot import draw
from fitact.fitter.records import from_json
from tests.conftest import Command
from tests.support.generated import fits
from tests.support.refusals import refused
from tests.support.rows import full

SINGLE = float(np.float32(3e38))


def odd(shipped: str, **changes: Any) -> dict[str, Any]:
    return fits()[shipped] | {"name": "odd", **changes}


def own(expression: str) -> dict[str, Any]:
    return {"name": None, "expression": expression}


step = partial(odd, "tanh_fewbit3", bits=1, even=False, borders=[0.5], levels=[0.25, 1.0])
inverted = partial(odd, "gelu_inverted1")
ODD: dict[str, dict[str, Any]] = {
    "objective": step(method="relumix", options={"objective": "derivative"}),
    "as wide as may be": step(domain=[-1e30, 1e30]),
    "narrow": step(domain=[0.0, 1e-300]),
    "border outside": step(borders=[SINGLE]),
    "levels": step(levels=[-SINGLE, SINGLE]),
    "errors": step(error=dict.fromkeys(("max", "objective", "primitive_max", "primitive_norm", "rms"), 1e308)),
    "weight of a point": step(weight="normal(0.1, 1e-9)"),
    "tiny weight": step(weight="1e-35"),
    "exact, huge": odd("tanh_output", activation=own("exp(exp(x**2))"), derivative="1e300*y"),
    "exact, nowhere": odd("tanh_output", activation=own("log(x - 100)"), derivative="y"),
}
for formula in ("log(x)", "exp(exp(exp(x)))", "1e30*x"):
    ODD[f"inverted, {formula}"] = inverted(activation=own(formula))
for domain in ([1e6, 2e6], [-2e6, -1e6], [50.0, 61.0], [-3e38, -1e37], [-1e-300, 1e-300], [0.0, 3e38]):
    ODD[f"inverted on {domain}"] = inverted(domain=domain)
for formula in ("log(x)", "x**300", "exp(exp(x))", "log(x - 100)"):
    ODD[f"fewbit of {formula}"] = step(activation=own(formula), options={})
for formula in ("1/x", "1e30*x**3", "exp(exp(x))", "log(x - 100)"):
    ODD[f"relumix of {formula}"] = step(method="relumix", activation=own(formula), options={})


@pytest.mark.parametrize("what", full(ODD, [*ODD][::2]))
def test_odd(what: str, command: Command) -> None:
    Path("odd.json").write_text(json.dumps(ODD[what]))
    status, out, err = command("show odd.json")
    assert (status, err) == (0, "") and "\nodd " in out
    assert command("plot odd.json") == (0, "wrote odd.png\n", "")
    pixels = matplotlib.image.imread("odd.png")
    assert 0.002 < np.mean(pixels[..., :3].min(axis=2) < 0.5) < 0.5, "lines on a light ground"


def drawn(text: str, **style: Any) -> bytes:
    figure = Figure(figsize=(6, 1), dpi=100)
    FigureCanvasAgg(figure)
    figure.text(0.0, 0.5, text, **style)
    return save(figure, "png")


@pytest.mark.parametrize("text", ["$x^2$", "$\\frac$", "$", "a$b", "\\alpha", "$$", "x_1", "{}", "日本"])
def test_text_is_literal(text: str) -> None:
    """Drawn as matplotlib draws it when it is told to parse nothing."""
    assert drawn(literal(text)) == drawn(text, parse_math=False)


@pytest.mark.parametrize(("text", "shown"), [("a\nb", "a\\nb"), ("x" * 41, "x" * 37 + "..."), ("\0", "\\x00")])
def test_text_is_one_short_line(text: str, shown: str) -> None:
    assert literal(text) == shown


def test_nothing_to_draw() -> None:
    assert "nothing to draw" in refused(draw, [])
    fit = from_json(json.dumps(step()))
    assert "format: expected png, svg or pdf, got 'jpeg'" in refused(draw, [fit], "jpeg")
