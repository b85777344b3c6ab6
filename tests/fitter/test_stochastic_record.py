"""The record of codes drawn at random: read, refused, and made on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fitact.fitter.numerics.stochastic import position
from fitact.fitter.records.reading import from_json, read
from fitact.fitter.records.stochastic import StochasticFit
from tests.conftest import Command
from tests.support import drawn
from tests.support.refusals import GONE, changed, refused, written

GOOD = json.loads(drawn.record(3).to_json())


def test_round_trip() -> None:
    found = from_json(drawn.record(3).to_json())
    assert found == drawn.record(3)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        *((key, GONE, key) for key in GOOD),
        ("borders", [], "borders: not a field"),
        ("bits", 2, "bits: expected 3, 4, 5, 6, 7 or 8, got 2"),
        ("bits", 4, "nodes: expected 16 numbers, got 8"),
        ("nodes.0", -16.0625 - 2**-10, "nodes[0]: expected a number that bfloat16 holds exactly, got -16.06347"),
        ("nodes.7", 0.0, "nodes: expected increasing numbers"),
        ("nodes.7", 1e39, "nodes[7]: expected a number that float32 holds"),
        ("values.1", 0.3, "values[1]: expected a number that float32 holds exactly"),
        ("derivatives.1", True, "derivatives[1]: expected a number"),
        ("domain", [8.0, -8.0], "domain: expected increasing numbers"),
        ("weight", "student(0)", "degrees of freedom above 0"),
        ("error.value_bias_1", GONE, "error: expected derivative_0.5"),
        ("error.value_bias_1", -0.1, "error: expected no negative number"),
    ],
    ids=lambda part: str(part)[:40],
)
def test_wrong(path: str, value: object, reason: str) -> None:
    assert reason in refused(from_json, changed(GOOD, path, value))


def test_positions_are_those_of_whole_numbers() -> None:
    fit = drawn.record(4)
    x = np.float32(np.concatenate([np.linspace(-20, 20, 501), [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40]]))
    assert position(x, fit.positions).tolist() == [drawn.position(fit, float(number)) for number in x]


def test_fit_show_plot(command: Command) -> None:
    status, out, err = command("fit --fn silu --method coded --bits 3 --rounding stochastic")
    assert (status, err) == (0, "")
    assert written() == ["generated/fits/silu_coded3_stochastic.json"]
    fit = read(Path("generated/fits/silu_coded3_stochastic.json"))
    assert isinstance(fit, StochasticFit)
    row = out.splitlines()[1]
    for bias in ("", "_bias"):
        for deviation in ("0.5", "1", "2", "4"):
            pair = (fit.error[f"{what}{bias}_{deviation}"] for what in ("value", "derivative"))
            assert "/".join(f"{error:.3g}" for error in pair) in row
    assert row.endswith("-64 to 64")
    assert command("show generated/fits/silu_coded3_stochastic.json")[1].splitlines()[1] == row
    assert command("plot -o one.png")[0] == 0
    assert Path("one.png").read_bytes().startswith(b"\x89PNG")
    assert command("codegen")[0] == 0
    assert "_rt.Stochastic(" in Path("generated/silu_coded3_stochastic.py").read_text()


def test_nearest_is_the_default(command: Command) -> None:
    assert command("fit --fn tanh --method coded --bits 3 --rounding nearest")[0] == 0
    assert written() == ["generated/fits/tanh_coded3.json"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--fn swiglu --method rebuild", "--method rebuild has no --rounding"),
        ("--fn dyt --method coded --bits 8", "--method coded has no --rounding"),
        ("--fn gelu --method fewbit --bits 3", "--method fewbit has no --rounding"),
    ],
)
def test_refuses(refuses: Callable[[str], str], options: str, reason: str) -> None:
    assert reason in refuses(f"fit {options} --rounding stochastic")
