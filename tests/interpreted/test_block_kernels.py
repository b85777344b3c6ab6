"""The kernels of block codes in Triton's interpreter: they write and read the bytes of PyTorch's operators."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from fitact.runtime.saving import blocks
from fitact.runtime.saving.blocks import BITS, decode, encode
from tests.saving.test_blocks import DTYPES, hostile

# NaN and infinity on purpose, in NumPy, which warns of them
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SHAPES = [(128, 256), (3, 5, 64), (35, 96), (9, 97), (33, 130), (1000,), (200, 1), (1, 1), (0, 64)]
all_bits = pytest.mark.parametrize("bits", BITS)


def check(x: Tensor, bits: int, signs: bool = False) -> None:
    """Both directions, bit for bit; only a NaN has no bits of its own."""
    found = encode(x, bits, signs)
    y = decode(*found, x.shape, x.dtype)
    with mock.patch.object(blocks, "KERNEL_DEVICES", ()):
        parts = encode(x, bits, signs)
        expected = decode(*parts, x.shape, x.dtype)
    for name, one, other in zip(("codes", "scales", "shifts"), found, parts, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (name, x.shape, x.dtype)
    assert y.shape == x.shape and y.dtype == x.dtype
    integers = torch.int32 if x.dtype == torch.float32 else torch.int16
    known = ~expected.isnan()
    assert torch.equal(y[known].view(integers), expected[known].view(integers)) and y[~known].isnan().all()


@all_bits
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes(dtype: torch.dtype, bits: int) -> None:
    """With outlier channels, zeros of both signs, and sparse channels; rows that end within a tile or a block."""
    for shape in SHAPES:
        check(hostile(shape, dtype), bits)
    check(hostile((100, 192), dtype).relu(), bits, signs=True)
    check(hostile((100, 192), dtype).neg(), bits)


@pytest.mark.parametrize("bits", [3, *(pytest.param(bits, marks=pytest.mark.full) for bits in (4, 5, 6)), 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_half_precision(dtype: torch.dtype, bits: int) -> None:
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    shuffled = patterns[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    finite = torch.where(shuffled.isfinite(), shuffled, 1.0)
    for x in (patterns, shuffled.view(-1, 256), finite.sort()[0].view(-1, 128)):
        check(x, bits, signs=bits % 2 == 0)


@all_bits
def test_every_kind_of_float32(bits: int) -> None:
    """Any bits, denormal numbers, the largest, and scales of which the inverse is none."""
    any_bits = torch.randint(-(2**31), 2**31, (128, 128), generator=torch.Generator().manual_seed(0))
    x = any_bits.int().view(torch.float32)
    check(x, bits)
    check(torch.where(x.isfinite(), x, 0), bits, signs=True)
    ordinary = torch.randn(128, 128, generator=torch.Generator().manual_seed(1))
    for factor in (2.0**-149, 2.0**-140, 2.0**-126, 2.0**-115, 2.0**-100, 2.0**125):
        check(ordinary * factor, bits)
    check((ordinary * torch.logspace(-40, 38, 128)).clamp(-3.4e38, 3.4e38), bits)


@all_bits
def test_not_finite(bits: int) -> None:
    """In blocks of zeros, of one sign, of both infinities, and beside an outlier."""
    x = hostile((64, 128), torch.float32)
    x[::3, 40], x[1::6, 41], x[4::6, 41] = torch.inf, -torch.inf, torch.nan
    x[2], x[5] = 0, -0.0
    x[2, 5] = torch.inf
    check(x, bits)
    check(x, bits, signs=True)


@all_bits
def test_borders(bits: int) -> None:
    """At and beside each border between two codes, where the inverse of the scale is exact and where it is not."""
    n = blocks._levels(bits)
    y = (torch.arange(n) + 0.5).double() / n
    border, step = y * (1 + y) / 2, 2.0 ** (bits - 14) / (2 * n**2)
    near = [border + i * step / 8 for i in range(-8, 9)]
    near += [border.float() + i * border.float() * 2**-23 for i in range(-4, 5)]
    x = torch.cat(near).clamp(max=1).float()
    x = torch.cat([x, -x, torch.zeros(-2 * len(x) % 63)]).view(-1, 63)
    for scale in (1.0, 1.9921875):
        check(torch.cat([x, torch.ones(len(x), 1)], 1) * scale, bits)
        check(torch.cat([-torch.ones(len(x), 1), x], 1) * scale, bits)


@all_bits
def test_exponents_at_the_threshold(bits: int) -> None:
    """Channels whose mean exponent is a little below, at and above 3/2 over that of the tile."""
    rows = torch.full((64, 64), 1.0)
    for i, channel in enumerate(range(0, 64, 4)):
        rows[: 32 + i - 8, channel] = 8.0 if channel % 8 else 2.0**13
        rows[60:, channel + 1] = 0
    check(rows, bits)
    check(torch.cat([rows[:7], rows[:, torch.randperm(64)], rows]), bits)
