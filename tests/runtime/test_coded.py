"""Coded activations: the layout of codes of 3 to 8 bits, and values that are looked up by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fitact.runtime.ops import reference
from tests.support.codes import Coded, coded, dense
from tests.support.generated import DTYPES, EACH_DTYPE, HALVES, patterns, run, same

FORWARD, BACKWARD, DECODE = torch.ops.fitact.forward, torch.ops.fitact.backward, torch.ops.fitact.decode
SIZES = (0, 1, 7, 1023, 1024, 1025, 8191, 8192, 8193, 8192 * 3 + 1)
BITS = pytest.mark.parametrize(
    "bits", [3, 5, 8, *(pytest.param(bits, marks=pytest.mark.full) for bits in (4, 6, 7))]
)


def laid_out(code: list[int], bits: int) -> bytes:
    """The layout by its definition: words of a tile's columns in whole numbers, plane by plane."""
    if bits == 8:
        return bytes(code)
    found = b""
    for start in range(0, len(code), 8192):
        tile = code[start : start + 8192]
        tile += [0] * (8192 - len(tile))
        words = [sum(tile[row * 1024 + column] << (bits * row) for row in range(8)) for column in range(1024)]
        found += b"".join(bytes(word >> (8 * plane) & 255 for word in words) for plane in range(bits))
    return found


@BITS
@pytest.mark.parametrize("n", SIZES)
def test_layout(bits: int, n: int) -> None:
    one, x = coded(bits), torch.randn(n) * 3
    codes = FORWARD(x, x.dtype, None, one.key)[1]
    assert codes.dtype == torch.uint8
    assert bytes(codes.tolist()) == laid_out(one.code(x).tolist(), bits)


@BITS
@EACH_DTYPE
def test_every_number(bits: int, dtype: torch.dtype) -> None:
    """Of half precision; else borders with their neighbours. Values are PyTorch's; NaN has the first code."""
    one = coded(bits)
    x = one.numbers(dtype)
    dy = torch.randn(x.shape, dtype=torch.float64).to(dtype)
    y, dx = run(one.function, x, dy)
    assert same(y, one.stock(x))
    one.check_gradient(x, y, dy, dx)
    codes = FORWARD(x, dtype, None, one.key)[1]
    for out in DTYPES:
        assert same(DECODE(codes, x.shape, out, one.key), one.looked_up(x, "values", out))
    assert bool((one.code(x[x.isnan()]) == 0).all())


@pytest.mark.parametrize("n", SIZES)
@EACH_DTYPE
def test_sizes(dtype: torch.dtype, n: int) -> None:
    for bits in (4, 6, 8):
        one, x, dy = coded(bits), (torch.randn(n) * 3).to(dtype), torch.randn(n).to(dtype)
        y, dx = run(one.function, x, dy)
        one.check_gradient(x, y, dy, dx)
        codes = FORWARD(x, dtype, None, one.key)[1]
        assert codes.numel() == sum(one.kept(y))
        assert same(DECODE(codes, [n], dtype, one.key), one.looked_up(x, "values", dtype))


def test_borders_next_to_each_other() -> None:
    """255 neighbouring floats, between which there is no number of half precision."""
    one = dense()
    for dtype in DTYPES:
        x = one.numbers(dtype)
        y, dx = run(one.function, x)
        one.check_gradient(x, y, torch.ones_like(y), dx)


@pytest.mark.parametrize("one", [coded(8), coded(5)], ids=["8", "5"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 1700)], ids=str)
@EACH_DTYPE
def test_decode(one: Coded, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype) * 3
    codes = FORWARD(x, dtype, None, one.key)[1]
    torch.library.opcheck(DECODE.default, (codes, shape, dtype, one.key))
    y = DECODE(codes, shape, dtype, one.key)
    assert (y.shape, y.is_contiguous(), y.requires_grad) == (x.shape, True, False)
    assert same(y, one.looked_up(x, "values", dtype))


@pytest.mark.parametrize("bits", [5, 8])
@pytest.mark.parametrize("shape", [(4, 0), (4, 7), (2, 8193), (3, 2, 50)], ids=str)
def test_decode_of_a_batch(bits: int, shape: tuple[int, ...]) -> None:
    one, x = coded(bits), torch.randn(shape) * 3

    def decoded(x: torch.Tensor) -> torch.Tensor:
        codes = FORWARD(x, x.dtype, None, one.key)[1]
        return DECODE(codes, x.shape, x.dtype, one.key)

    assert same(torch.func.vmap(decoded)(x), one.looked_up(x, "values", x.dtype))


def test_an_activation_without_values() -> None:
    from fitact.generated import gelu_fewbit3

    with pytest.raises(TypeError, match="gelu_fewbit3: expected an activation with values to look up, got a Step"):
        DECODE(torch.zeros(3072, dtype=torch.uint8), [5], torch.float32, gelu_fewbit3._KEY)


def test_compiled_code_may_decode() -> None:
    one = coded(6)

    def f(codes: torch.Tensor, n: int) -> torch.Tensor:
        return DECODE(codes, [n], torch.bfloat16, one.key) * 2

    function = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (9000, 8500, 30):
        codes = FORWARD(torch.randn(n) * 3, torch.float32, None, one.key)[1]
        assert same(function(codes, n), f(codes, n))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_tables_for_kernels(dtype: torch.dtype) -> None:
    """The code of each number of half precision; of float32 the least code of those with the same upper bits."""
    one = coded(8)
    table = reference.first_codes(tuple(one.fit["borders"]), dtype, torch.device("cpu")).long()
    if dtype != torch.float32:
        x = torch.arange(65536).to(torch.int16).view(dtype)
        assert torch.equal(table, one.code(x))
        return
    for lower in (0, 1, 0x8000, 0xFFFF):
        x = (torch.arange(65536) << 16 | lower).to(torch.int32).view(torch.float32)
        x = x[number := ~x.isnan()]
        above = one.code(x) - table[number]
        assert 0 <= int(above.min()) <= int(above.max()) <= 1, "one comparison is left"


class Searched(TorchDispatchMode):
    """Notes how many numbers are searched at a time."""

    sizes: tuple[int, ...] = ()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.bucketize.Tensor:
            self.sizes += (args[0].numel(),)
        return function(*args, **kwargs or {})


def exhaustive(borders: list[float]) -> torch.Tensor:
    """float32 of all signs and sizes: by their bits at random, next to borders, infinite, no numbers, zeros."""
    near = torch.tensor(borders).view(torch.int32)[:, None] + torch.arange(-3, 4, dtype=torch.int32)
    drawn = torch.randint(-(2**31), 2**31 - 1, (1 << 18,), dtype=torch.int32)
    edges = torch.arange(1 << 16, dtype=torch.int32)[:, None] << 16 | torch.tensor([0, 1, 0x7FFF, 0xFFFF]).int()
    return torch.cat([drawn, near.view(-1), edges.view(-1)]).view(torch.float32)


@pytest.mark.parametrize("borders", [coded(8).fit["borders"], coded(5).fit["borders"], dense().fit["borders"]])
@pytest.mark.parametrize("zero", [None, 0.0, -0.0])
@EACH_DTYPE
def test_codes_are_those_of_a_search(dtype: torch.dtype, zero: float | None, borders: list[float]) -> None:
    if zero is not None:
        borders = sorted([border for border in borders if border] + [zero])[-255:]
    x = exhaustive(borders)
    x = patterns(dtype) if dtype in HALVES else x.to(dtype)
    least = torch.where(x.isnan(), -torch.inf, x)
    found = torch.bucketize(least.double(), torch.tensor(borders, dtype=torch.float64))
    with Searched() as searched:
        codes = reference.encode(x, (*borders,), 8, even=False)
        few = reference.encode(x[-1000:], (*borders,), 8, even=False)
    assert torch.equal(codes.long(), found)
    assert torch.equal(few.long(), found[-1000:])
    assert dtype == torch.float64 or max(searched.sizes, default=0) <= 1 << 16  # tables, made once
