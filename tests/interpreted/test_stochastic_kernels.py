"""The kernel that draws codes at random in Triton's interpreter: run with TRITON_INTERPRET=1; codes are equal."""

from __future__ import annotations

import pytest
import torch

from fitact.runtime.ops import autograd, gate_ops
from tests.support import drawn
from tests.support.generated import DTYPES, HALVES, patterns

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ODD = torch.tensor([0x7F800001, 0x7FFFFFFF, -0x7FFFFF, 0x7F800000, -0x800000, 0x7F7FFFFF, 1], dtype=torch.int32)


@pytest.mark.parametrize("bits", [8, 5, *(pytest.param(bits, marks=pytest.mark.full) for bits in (3, 4, 6, 7))])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_are_those_of_the_reference(bits: int, dtype: torch.dtype) -> None:
    """Of every number of half precision; else of NaN, infinities, and a tensor of more than a tile."""
    x = (
        patterns(dtype)
        if dtype in HALVES
        else torch.cat([ODD.view(torch.float32), torch.randn(9000) * 3]).to(dtype)
    )
    key = drawn.module(bits)._KEY
    for number in (0, 2**62 + 12345678901):
        seed = torch.tensor([number])
        for part in (x, x[:1000], x[:8192], x[:0]):
            codes = torch.ops.fitact.forward(part, None, dtype, key, seed)[1]
            assert torch.equal(codes, autograd._forward_reference(part, None, dtype, key, seed)[1])


def test_through_autograd() -> None:
    function = getattr(drawn.module(8), drawn.record(8).name)
    x = torch.randn(50, 300).t()
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        found.append(torch.autograd.grad(function(leaf).sum(), leaf)[0])
    assert torch.equal(*found)
    assert bool(torch.isin(found[0], torch.tensor(drawn.record(8).derivatives)).all())


@pytest.mark.parametrize(("bits", "bits_u"), [(8, 16), (5, 6), pytest.param(8, 8, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_codes_of_gates_are_those_of_the_reference(bits: int, bits_u: int, dtype: torch.dtype) -> None:
    """Of a tensor of more than a tile, of its halves, and of none."""
    key = drawn.gate_module(bits, bits_u)._KEY
    whole = (3 * torch.randn(5, 2 * 1700)).to(dtype)
    seed = torch.tensor([2**62 + 12345678901])
    flat = whole.flatten()
    for g, u in (whole.chunk(2, -1), (flat[:8500], flat[-8500:]), (flat[:0], flat[:0])):
        h, *codes = torch.ops.fitact.gate_forward(g, u, key, seed)
        expected, *others = gate_ops._forward_reference(g, u, key, seed)
        assert all(map(torch.equal, codes, others))
        assert (h.double() - expected.double()).abs().le(2**-6 * (1 + expected.double().abs())).all()
