"""The Triton kernels of gates in Triton's interpreter, against the PyTorch path: run with TRITON_INTERPRET=1.

The interpreter truncates float32 to bfloat16 where a GPU rounds, and here numbers are rounded up to three times.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fitact
from fitact.generated import swiglu_rebuild
from fitact.runtime.kernels import gates
from fitact.runtime.kernels.launch import launch
from tests.runtime.test_gates import FITS, halves, module, special
from tests.support.gates import near
from tests.support.generated import backward_op, forward_op

# NaN and infinity on purpose, in NumPy, which warns of them
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FULL = pytest.mark.full
NAMES = [pytest.param(name, marks=[] if name == "rebuild" else FULL) for name in FITS]


def check(name: str, g: torch.Tensor, u: torch.Tensor) -> None:
    key, dtype = module(name)._KEY, g.dtype
    reach = (1 + g.double().abs()) * (1 + u.double().abs())
    near(*(forward_op(g, dtype, key, u, reference=one)[0] for one in (False, True)), reach)
    dh = torch.randn(g.shape).to(dtype)
    for wants in ((True, True), (True, False), (False, True)):
        given = dh, g, None, dtype, key, u
        for pair in zip(*(backward_op(*given, wants=wants, reference=one) for one in (False, True)), strict=True):
            near(*pair, reach * (1 + dh.double().abs()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=FULL)], ids=str
)
def test_views_of_one_tensor(name: str, dtype: torch.dtype) -> None:
    """Rows of 1100 elements lie across those of a tile."""
    if name == "rebuild_both" and dtype != torch.float32:
        pytest.skip("PyTorch's derivative of tanh in half precision is that of the rounded value: no reference")
    check(name, *halves(dtype, 9, 1100))


@pytest.mark.parametrize("name", NAMES)
def test_sizes_and_layouts(name: str) -> None:
    for size in (0, 1, 1025, 8192):
        check(name, torch.randn(size), torch.randn(size))
    check(name, torch.randn(40, 30).t(), torch.randn(30, 40))
    check(name, *halves(torch.float32, 2, 3, 1024))


def test_a_pass_launches_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that in which a layer's input is computed again."""
    launched: list[str] = []

    def noting(kernel: Any, *arguments: Any) -> None:
        launched.append(kernel.fn.__name__.removeprefix("swiglu_rebuild_"))
        launch(kernel, *arguments)

    monkeypatch.setattr(gates, "launch", noting)
    gate, down = swiglu_rebuild.SwigluRebuild(), torch.nn.Linear(300, 8)
    g, u = torch.randn(2, 30, 300, requires_grad=True)
    with fitact.saving():
        y = down(gate(g, u))
    assert launched == ["forward"]
    y.sum().backward()
    assert launched[1:] == ["forward", "backward"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=FULL) for name in FITS])
def test_special_numbers(name: str) -> None:
    g, u = special(torch.float32)
    key = module(name)._KEY
    found, expected = (forward_op(g, g.dtype, key, u, reference=one)[0] for one in (False, True))
    # PyTorch's own gelu is NaN at the largest number too, where its formula is not
    assert not bool((found.isnan() & ~expected.isnan()).any())
    assert bool(found.isnan()[g.isnan() | u.isnan()].all())
