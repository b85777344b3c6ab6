"""The Triton kernels of gates in Triton's interpreter, against the PyTorch path: run with TRITON_INTERPRET=1.

The interpreter truncates float32 to bfloat16 where a GPU rounds, and here numbers are rounded up to three times.
Codes may not differ.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fitact
from fitact.runtime.ops import gate_ops
from fitact.runtime.ops.launch import Launch
from tests.runtime.test_gates import FITS, halves, module, special
from tests.support.gates import near

# NaN and infinity on purpose, in NumPy, which warns of them
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FULL = pytest.mark.full
ORDINARY = ("rebuild", "coded8", "coded6_8", "coded3_6")
NAMES = [pytest.param(name, marks=[] if name in ORDINARY else FULL) for name in FITS]


def check(name: str, g: torch.Tensor, u: torch.Tensor) -> None:
    key, ops = module(name)._KEY, torch.ops.fitact
    gate = gate_ops.find(key)
    reach = (1 + g.double().abs()) * (1 + u.double().abs())
    h, *codes = ops.gate_forward(g, u, key)
    expected, *others = gate_ops._forward_reference(g, u, key)
    near(h, expected, reach)
    assert all(map(torch.equal, codes, others))
    kept = gate_ops.kept(gate, g, u, *codes)
    again = gate_ops._value_reference(*kept, h.shape, h.dtype, key)
    near(ops.gate_value(*kept, h.shape, h.dtype, key), again, reach)
    dh = torch.randn(g.shape).to(g.dtype)
    for wanted in ((True, True), (True, False), (False, True)):
        found = ops.gate_backward(dh, *kept, *wanted, key)
        for one, other in zip(found, gate_ops._backward_reference(dh, *kept, *wanted, key), strict=True):
            near(one, other, reach * (1 + dh.double().abs()))


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


class Gated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.gate, self.up = torch.nn.SiLU(), torch.nn.Linear(8, 300), torch.nn.Linear(8, 300)
        self.down = torch.nn.Linear(300, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return y


@pytest.mark.parametrize(("bits", "bits_u", "name"), [(8, None, "swiglu_coded8"), (6, 8, "swiglu_coded6_8")])
def test_a_model_launches_one_kernel_a_pass(
    bits: int, bits_u: int | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward writes output and codes; backward reads them for the gradients, and for what `down` had kept."""
    launched: list[str] = []
    launch = Launch.__call__

    def noting(self: Launch, kernel: Any, *arguments: Any) -> None:
        launched.append(kernel.fn.__name__)
        launch(self, kernel, *arguments)

    monkeypatch.setattr(Launch, "__call__", noting)
    model = Gated()
    fitact.convert(model, "coded", bits, bits_u=bits_u)
    y = model(torch.randn(30, 8))
    assert launched == [f"{name}_forward"]
    y.sum().backward()
    assert launched[1:] == [f"{name}_again", f"{name}_backward"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=FULL) for name in FITS])
def test_special_numbers(name: str) -> None:
    g, u = special(torch.float32)
    key = module(name)._KEY
    found, expected = torch.ops.fitact.gate_forward(g, u, key), gate_ops._forward_reference(g, u, key)
    assert all(map(torch.equal, found[1:], expected[1:]))
    # PyTorch's own gelu is NaN at the largest number too, where its formula is not
    assert not bool((found[0].isnan() & ~expected[0].isnan()).any())
    assert bool(found[0].isnan()[g.isnan() | u.isnan()].all())
