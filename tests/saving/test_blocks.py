"""Block codes against their definition, in NumPy and float64."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from fitact.runtime.saving.blocks import BITS, columns_of, decode, encode, nbytes
from fitact.runtime.torch_internals import FakeTensorMode
from tests.support.peak import peak_memory

DTYPES = torch.float32, torch.bfloat16, torch.float16
SHAPES = [(128, 256), (100, 192), (3, 5, 64), (64, 96), (70, 97), (33, 130), (1000,), (200, 1), (1, 1), (0, 64)]


def hostile(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return numbers with outlier channels, zeros of both signs, a row of zeros and sparse channels."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = x.view(-1, shape[-1])
    if len(rows) > 3 and shape[-1] > 20:
        rows[:, 3] *= 50
        rows[:, 7] *= 1e-3
        rows[::2, 9] = -0.0
        rows[1:, 11] = 0
        rows[2] = 0
        rows[3, 13] = 1000
        rows[:, 15] *= 300
        rows[::3, 17:40] *= 1e-7
    return x.to(dtype)


def tiles_of(x: np.ndarray) -> list[np.ndarray]:
    """Return the tiles, (rows, 64), in the order of their shifts: those of 64 rows from left to right."""
    columns = columns_of(x.shape)
    rows, rest = divmod(x.size, columns)
    flat = x.reshape(-1)
    table = flat[: rows * columns].reshape(rows, columns)
    tiles = [table[i : i + 64, j : j + 64] for i in range(0, rows, 64) for j in range(0, columns, 64)]
    return [*tiles, np.pad(flat[-rest:], (0, 64 - rest))[None]] if rest else tiles


def shifts_of(tile: np.ndarray) -> np.ndarray:
    """Return how far each channel's mean and largest exponents are above the tile's, from 2 to 15, else 0."""
    exponents = [[int(e) for e in np.floor(np.log2(np.abs(each[each != 0])))] for each in tile.T]
    every = [e for exponent in exponents for e in exponent]
    mean = Fraction(sum(every), max(len(every), 1))
    tops = [max(exponent) for exponent in exponents if exponent]
    top = Fraction(sum(tops), max(len(tops), 1))
    above = [min(Fraction(sum(own), len(own)) - mean, max(own) - top) if own else 0 for own in exponents]
    rounded = np.array([math.floor(each + Fraction(1, 2)) for each in above])
    return np.where(rounded >= 2, np.minimum(rounded, 15), 0)


def unpacked(codes: Tensor) -> np.ndarray:
    """Return q of each block: the highest bits first, in parts of 8, 4, 2 and 1 bits."""
    blocks, bits = codes.shape
    raw = codes.numpy().view(np.uint8).reshape(blocks, 8 * bits)
    q, left, first = np.zeros((blocks, 8, 8), np.int64), bits, 0
    for part in (8, 4, 2, 1):
        if part <= left:
            left -= part
            words = raw[:, first : first + 8 * part].reshape(blocks, 8, part)  # of eight elements each
            for place in range(8 // part):
                values = words >> place * part & 2**part - 1
                q[:, :, place * part : (place + 1) * part] += values.astype(np.int64) << left
            first += 8 * part
    q = q.reshape(blocks, 64)
    return np.where(q < 2 ** (bits - 1), q, q - 2**bits)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_definition(dtype: torch.dtype, bits: int) -> None:
    levels = 2 ** (bits - 1) - (bits > 4)
    for shape in SHAPES:
        x = hostile(shape, dtype)
        codes, scales, shifts = parts = encode(x, bits)
        assert sum(part.untyped_storage().nbytes() for part in parts) == nbytes(shape, bits)
        y = decode(*parts, shape, dtype)
        assert y.shape == x.shape and y.dtype == dtype
        tiles, decoded = tiles_of(x.double().numpy()), tiles_of(y.double().numpy())
        numbers = tiles_of(np.arange(math.prod(shape)).reshape(shape))
        actual = unpacked(shifts) & 15
        q = unpacked(codes)
        for tile, after, number, values in zip(tiles, decoded, numbers, actual, strict=True):
            d = shifts_of(tile)
            assert np.array_equal(values, d), shape
            blocks = number[:, 0] // 64
            low = tile / 2**d
            largest = np.abs(low).max(1)
            if bits < 5:
                largest = -np.where(low.max(1) > -low.min(1), low.max(1), low.min(1))
            s = torch.from_numpy(largest).float().bfloat16().double().numpy()
            assert np.array_equal(s, scales[blocks].double().numpy())
            z = low / np.where(s == 0, 1, s)[:, None]
            exact = np.sign(z) * levels * (np.sqrt(0.25 + 2 * abs(z)) - 0.5)
            exact = np.clip(exact, -levels, levels - (bits < 5))
            assert (abs(q[blocks] - exact) < 0.5 + 1e-4).all(), shape
            part = q[blocks] / levels
            value = part * (1 + abs(part)) / 2 * s[:, None] * 2**d
            rounding = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
            assert (abs(after - value) <= rounding * abs(value) + 1e-7).all(), shape


@pytest.mark.parametrize("signs", [False, True])
def test_channels_of_numbers_large_and_tiny(signs: bool) -> None:
    """Features of a ReLU under weights of attention near 0 and 1: all channels have the same largest numbers."""
    h = 0.8 * torch.randn(70, 64, generator=torch.Generator().manual_seed(0))
    x = (h @ h.T).softmax(-1) @ h.relu()
    for bits, most in ((8, 0.01), (4, 0.15)):
        y = decode(*encode(x, bits, signs), x.shape, x.dtype)
        assert (y - x).norm() < most * (1 + signs) * x.norm()
        assert y.abs().max() < 1.01 * x.abs().max()


@pytest.mark.parametrize("bits", BITS)
def test_bytes(bits: int) -> None:
    """Whole tiles take k bits and 5/16 of one; others little more, also where the features are few."""
    assert nbytes((4, 128, 320), bits) * 8 == (bits + 0.3125) * 4 * 128 * 320
    for features in (1, 7, 48, 97, 1000):
        assert nbytes((4096, features), bits) * 8 <= (bits + 0.3125) * 4096 * features
    assert nbytes((4099, 17), bits) * 8 <= (bits + 0.33) * 4099 * 17


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_half_precision(dtype: torch.dtype, bits: int) -> None:
    """What is not finite never comes back finite; finite blocks come back finite, within their levels."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    shuffled = patterns[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    finite = torch.where(shuffled.isfinite(), shuffled, 1.0)
    for x in (patterns, shuffled, finite, finite.view(-1, 64).sort(0)[0].contiguous(), finite.view(-1, 256)):
        y = decode(*encode(x, bits), x.shape, dtype)
        before, after = x.reshape(-1, 64), y.reshape(-1, 64)
        whole = before.isfinite().all(1)
        assert after[whole].isfinite().all() and not after[~whole].isfinite().any()
        no_nan = ~before.isnan().any(1)
        assert torch.equal(after[no_nan][before[no_nan].isinf()], before[no_nan][before[no_nan].isinf()])
    small = torch.where(finite.abs() < 2.0**-10, finite, 0.0).sort()[0]
    y = decode(*encode(small, bits), small.shape, dtype)
    step = {3: 0.2, 4: 0.1, 5: 0.06, 6: 0.03, 8: 0.01}[bits]
    largest = small.view(-1, 64).abs().amax(1, keepdim=True).float()
    error = (y.float() - small.float()).view(-1, 64).abs()
    assert (error <= step * largest + 2.0**-112 + (2.0**-24 if dtype == torch.float16 else 0)).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_largest_numbers(dtype: torch.dtype, bits: int) -> None:
    most = torch.finfo(dtype).max
    x = torch.rand(128, 64).mul(0.3).add(0.7).to(dtype).mul(most)
    x[:, ::2] *= -1
    x[0], x[1, 0] = most, -most
    for scale in (torch.ones(64), torch.full((64,), 2.0**-9).index_fill(0, torch.tensor([5, 6]), 1)):
        wide = x * scale.to(dtype)
        y = decode(*encode(wide, bits), x.shape, dtype)
        assert y.isfinite().all()
        assert (y[:, 5:7].double() / wide[:, 5:7].double() - 1).abs().max() < 0.4


@pytest.mark.parametrize("bits", BITS)
def test_signs(bits: int) -> None:
    x = torch.randn(64, 128).relu()
    x[0, 0], x[0, 1] = 1e-20, 0
    assert torch.equal(decode(*encode(x, bits, signs=True), x.shape, x.dtype) > 0, x > 0)
    assert torch.equal(decode(*encode(x - 0.5, bits, signs=True), x.shape, x.dtype).sign(), (x - 0.5).sign())
    assert (decode(*encode(x, bits), x.shape, x.dtype) == 0).sum() > (x == 0).sum()


def test_temporaries_are_small() -> None:
    x = torch.randn(2**13, 2**10)
    parts = encode(x, 4)
    size = x.nbytes + nbytes(x.shape, 4)
    for call in (lambda: encode(x, 4), lambda: decode(*parts, x.shape, x.dtype)):
        assert peak_memory(call)["total"] < size + 1.5 * 2**20


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tensors_without_numbers(device: str) -> None:
    """Plans code them; on a GPU, nothing is launched."""
    with FakeTensorMode():
        x = torch.empty(100, 192, device=device)
        parts = encode(x, 3, signs=True)
        y = decode(*parts, x.shape, x.dtype)
        assert y.shape == x.shape and y.device == x.device
        assert sum(part.nbytes for part in parts) == nbytes(x.shape, 3)
