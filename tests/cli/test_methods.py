"""Every method from the command line: a fit, its module, its picture and its table are those that ship."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tests.conftest import ROOT, Command
from tests.support.refusals import written

DTYPES = ["bfloat16", "float16", "float32"]
STEPS = ["bits", "objective", "||f'-q||", "max|f'-q|", "rms", "||h-h~||", "max|h-h~|"]
# name → the options, the table's head, and its row or the beginning of it
MADE = {
    "gelu_fewbit3": ("--fn gelu --bits 3", STEPS, ["3", "0.01189827"]),  # L of the published 3-bit GELU
    "gelu_relumix2": ("--fn gelu --bits 2 --method relumix", STEPS, ["2", "0.009506935"]),
    "silu_inverted1": (
        "--fn silu --method inverted",
        ["bits", *DTYPES, *(f"floor {dtype}" for dtype in DTYPES)],
        ["1"],
    ),
    "tanh_exact": (
        "--fn tanh --method exact",
        [*DTYPES, "f'(x) as a function of y"],
        ["0.003875", "0.0004868", "8.839e-08", "1 - y**2"],
    ),
}


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


@pytest.mark.parametrize("name", MADE)
def test_as_it_ships(name: str, command: Command) -> None:
    options, head, row = MADE[name]
    fit, module = Path(f"generated/fits/{name}.json"), Path(f"generated/{name}.py")
    status, out, err = command(f"fit {options}")
    assert (status, err) == (0, "")
    *table, last = out.splitlines()
    assert cells(table[0]) == head
    assert cells(table[1])[: 1 + len(row)] == [name, *row]
    assert last == f"wrote {fit}"
    assert written() == [str(fit)]
    assert fit.read_bytes() == (ROOT / fit).read_bytes()
    assert command("codegen") == (0, f"wrote generated/__init__.py\nwrote {module}\n", "")
    assert module.read_bytes() == (ROOT / module).read_bytes()
    assert command("codegen --check")[0] == 0
    assert command(f"fit {options}")[0] == 0, "the same fit again"
    assert command("plot") == (0, f"wrote {name}.png\n", "")
    picture = Path(f"{name}.png").read_bytes()
    pixels = matplotlib.image.imread(f"{name}.png")
    assert min(pixels.shape[:2]) > 300
    assert 0.01 < np.mean(pixels[..., :3].min(axis=2) < 0.5) < 0.5, "lines on a light ground"
    assert command("plot")[0] == 0
    assert Path(f"{name}.png").read_bytes() == picture
    assert command(f"show {fit}") == (0, "\n".join(table) + "\n", "")
