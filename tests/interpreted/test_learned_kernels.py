"""The Triton kernels of formulas with learned numbers in Triton's interpreter, against the PyTorch path."""

from __future__ import annotations

import pytest
import torch

from fitact.runtime.kernels.registry import find
from tests.runtime.test_learned import module
from tests.support.generated import backward_op, forward_op
from tests.support.learned import CASES

# NaN and infinity on purpose, in NumPy, which warns of them
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FULL = pytest.mark.full
EPS = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-6}  # the interpreter truncates
QUICK = ("dyt", "xielu")
NAMES = [pytest.param(name, marks=[] if name in QUICK else FULL) for name in CASES]
# Sizes as (rows, channels, inner): rows of channels, images, one channel; whole blocks, and blocks that the tensor
# ends in.
SIZES = ((130, 150, 1), (3, 5, 49), (2, 2, 8200), (70, 3, 1), (1, 2, 1), (0, 4, 1))


def check(name: str, rows: int, channels: int, inner: int, dtype: torch.dtype) -> None:
    case, key = CASES[name], module(name)._KEY
    formula = find(key)
    size = rows * channels * inner
    shape = (len(formula.numbers), channels if case.wide else 1)
    start = torch.tensor([number.start for number in formula.numbers])[:, None]
    numbers = (start + 0.1 * torch.randn(shape)).contiguous()
    x, dy = (2 * torch.randn(size)).to(dtype), torch.randn(size).to(dtype)
    y, expected = (forward_op(x, dtype, key, numbers, inner=inner, reference=one)[0] for one in (False, True))
    tolerance = {"rtol": 2 * EPS[dtype], "atol": 2 * EPS[dtype]}
    torch.testing.assert_close(y, expected, **tolerance)
    given = dy, x, None, dtype, key, numbers
    for wants in ((True, True), (True, False), (False, True)):
        dx, found = backward_op(*given, inner=inner, wants=wants)
        dx_expected, sums = backward_op(*given, inner=inner, wants=wants, reference=True)
        torch.testing.assert_close(dx, dx_expected, **tolerance)
        torch.testing.assert_close(found, sums, rtol=1e-5, atol=1e-6 * max(size, 1))
    runs = [backward_op(*given, inner=inner, wants=(False, True))[1] for _ in range(2)]
    assert torch.equal(*runs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(name: str, size: tuple[int, int, int]) -> None:
    check(name, *size, torch.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=FULL)], ids=str)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    check(name, 130, 150, 1, dtype)
