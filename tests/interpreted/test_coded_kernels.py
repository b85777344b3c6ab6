"""The kernels of coded activations in Triton's interpreter: run with TRITON_INTERPRET=1.

As in test_kernels.py, bfloat16 is truncated there, and its subnormals are left out. Codes may not differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fitact.runtime.ops import autograd, registry
from tests.support.codes import Coded, coded, dense
from tests.support.generated import DTYPES, EACH_DTYPE, run, same

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ULP = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6, torch.float64: 1e-15}
SIZES = (0, 1, 1023, 1025, 8191, 8192, 8193, 20_000)
# a byte, words in which rows share bytes, and such in which the halves do not
QUICK = (8, 5, 6)


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.dtype != torch.bfloat16:
        return same(found, expected)
    off = (found.double() - expected.double()).abs()
    return bool((off <= 2**-7 * expected.double().abs()).all())


def check(one: Coded, x: torch.Tensor) -> None:
    key = one.key
    y, codes = torch.ops.fitact.forward(x, x.dtype, None, key)
    assert torch.equal(codes, autograd._forward_reference(x, x.dtype, None, key)[1])
    exact = one.stock(x.double())
    number = exact.to(x.dtype).isfinite()
    allowed = ULP[x.dtype] * exact.abs() + 5e-7 * x.double().abs() + torch.finfo(x.dtype).smallest_normal
    assert bool(((y.double() - exact).abs() <= allowed)[number].all())
    dy = torch.randn(x.shape).to(x.dtype)
    assert near(torch.ops.fitact.backward(dy, None, codes, dy.dtype, key), one.gradient(x, dy))
    assert near(torch.ops.fitact.decode(codes, x.shape, x.dtype, key), one.looked_up(x, "values", x.dtype))


@pytest.mark.parametrize(
    ("bits", "n"),
    [
        pytest.param(bits, n, marks=[] if bits in QUICK and n in (1025, 8193) else pytest.mark.full)
        for bits in range(3, 9)
        for n in SIZES
    ],
)
@EACH_DTYPE
def test_sizes_round_the_tile(bits: int, n: int, dtype: torch.dtype) -> None:
    check(coded(bits), torch.randn(n).to(dtype) * 3)


@pytest.mark.parametrize("bits", [8, *(pytest.param(bits, marks=pytest.mark.full) for bits in range(3, 8))])
@EACH_DTYPE
def test_every_number(bits: int, dtype: torch.dtype) -> None:
    """Of half precision; else borders with their neighbours."""
    x = coded(bits).numbers(dtype)
    if dtype == torch.bfloat16:
        x = x[(x == 0) | ~(x.abs() < torch.finfo(dtype).smallest_normal)]
    check(coded(bits), x)


def test_borders_next_to_each_other() -> None:
    """All in one bucket of float32, where eight comparisons are left; and NaN whose upper bits are infinity's."""
    for dtype in DTYPES:
        check(dense(), dense().numbers(dtype))
    odd = torch.tensor([0x7F800001, 0x7F80FFFF, -0x7FFFFF, 0x7F800000, -0x800000], dtype=torch.int32)
    check(dense(), odd.view(torch.float32))
    check(coded(8), odd.view(torch.float32))


def test_through_autograd() -> None:
    one = coded(8)
    for x in (torch.randn(50, 300).t(), torch.randn(2, 5, 30, 40).to(memory_format=torch.channels_last)):
        dy = torch.randn(x.shape)
        y, dx = run(one.function, x, dy)
        one.check_gradient(x, y, dy, dx)


def test_tables_are_there_before_compiled_code_runs() -> None:
    """Made by a kernel's first launch they might be in the memory of a CUDA graph."""
    one = coded(4, "silu")
    found: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        found.append(torch.device("cpu") in registry.find(one.key).argument._tables)
        return graph.forward

    x = torch.randn(9000, requires_grad=True)
    assert torch.device("cpu") not in registry.find(one.key).argument._tables
    torch.compile(one.function, fullgraph=True, backend=backend)(x)
    assert found == [True]


def test_tensors_without_numbers_make_no_tables() -> None:
    one = coded(4, "mish")
    with FakeTensorMode():
        y = one.function(torch.randn(100, requires_grad=True))
        y.sum().backward()
    assert not registry.find(one.key).argument._tables
    check(one, torch.randn(100))
