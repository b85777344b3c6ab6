"""Codes drawn at random: random numbers, codes and layout against plain whole numbers; means against SiLU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fitact.runtime import philox
from fitact.runtime.memory.saved import count_saved
from tests.runtime.test_coded import laid_out
from tests.support import drawn
from tests.support.generated import DENSE, DTYPES, EACH_DTYPE, HALVES, LAYOUTS, patterns, same, sizes

FORWARD, DECODE = torch.ops.fitact.forward, torch.ops.fitact.decode
BITS = pytest.mark.parametrize(
    "bits", [3, 8, *(pytest.param(bits, marks=pytest.mark.full) for bits in (4, 5, 6, 7))]
)
SEEDS = (0, 12345678901, 2**63 - 1)
EDGES = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 16.0, -16.0, 17.0, 3e38, 1e-40])


def seed(number: int) -> torch.Tensor:
    return torch.tensor([number])


def draw(bits: int, x: torch.Tensor, number: int) -> torch.Tensor:
    codes: torch.Tensor = FORWARD(x, None, x.dtype, drawn.module(bits)._KEY, seed(number))[1]
    return codes


def function(bits: int) -> Callable[[torch.Tensor], torch.Tensor]:
    found: Callable[[torch.Tensor], torch.Tensor] = getattr(drawn.module(bits), drawn.record(bits).name)
    return found


def test_philox_gives_the_published_numbers() -> None:
    """The known answers that come with Random123."""
    zeros = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(word) for word in philox.words(seed(0), torch.tensor(0))] == zeros
    assert drawn.philox(0, 0) == zeros
    pi = sum(word << (32 * i) for i, word in enumerate((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)))
    found = drawn.philox(0xA4093822 | 0x299F31D0 << 32, pi)
    assert found == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("number", [*SEEDS, -1, -(2**63)])
def test_philox_gives_those_of_its_paper(number: int) -> None:
    counters = [0, 1, 2**31, 2**32 - 1, 2**32, 2**40 + 7]
    found = torch.stack(philox.words(seed(number), torch.tensor(counters)), 1)
    assert found.tolist() == [drawn.philox(number & (2**64 - 1), counter) for counter in counters]


@BITS
@pytest.mark.parametrize("n", [0, 7, 1025, 8193, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 1024))])
def test_codes_and_layout(bits: int, n: int) -> None:
    x = torch.randn(n) * 3
    x[: len(EDGES)] = EDGES[:n]
    for number in SEEDS[:2]:
        expected = drawn.codes(drawn.record(bits), x, number)
        assert bytes(draw(bits, x, number).tolist()) == laid_out(expected, bits)


@EACH_DTYPE
def test_codes_of_every_dtype(dtype: torch.dtype) -> None:
    """Of half precision every number, in one seed's random numbers; a float64 is rounded to float32."""
    fit = drawn.record(8)
    x = patterns(dtype) if dtype in HALVES else torch.cat([torch.randn(3000) * 3, EDGES]).to(dtype)
    some = torch.arange(0, len(x), 7 if dtype in HALVES else 1)
    codes = draw(8, x, 5)
    expected = drawn.codes(fit, x, 5) if len(x) < 5000 else None
    if expected is not None:
        assert codes.tolist() == expected
        return
    position = torch.tensor([drawn.position(fit, value) for value in x[some].float().tolist()])
    row, counter = some % 8192 // 1024, some // 8192 * 1024 + some % 1024
    words = torch.stack(philox.words(seed(5), counter))
    random = words.gather(0, (row % 4)[None])[0] >> (16 * (row // 4)) & 0xFFFF
    assert torch.equal(codes[some].long(), position + random >> 16)
    assert bool((codes[x.isnan()] == 0).all())


@BITS
def test_the_value_is_the_activation_in_the_mean(bits: int) -> None:
    """From the first node to the last, for numbers of bfloat16 and between them: by the chance of each code."""
    fit = drawn.record(bits)
    halves = patterns(torch.bfloat16).double()
    inside = halves[(halves.abs() <= 16) & ((halves.abs() > 2**-10) | (halves == 0))]
    for x, bound in ((inside, 1e-5), (torch.linspace(-16, 16, 4001).double(), 1e-4)):
        position = torch.tensor([drawn.position(fit, value) for value in x.tolist()])
        code = (position // 65536).clamp(max=2**bits - 2)
        share = (position - 65536 * code) / 65536
        values = torch.tensor(fit.values, dtype=torch.float64)
        low, high = values[code], values[code + 1]
        bias = low + share * (high - low) - F.silu(x.float().double())
        rounding = (high - low).abs() / 65536 + 2e-7  # of a position, and of the values to float32
        assert bool((bias.abs() <= rounding + bound * x.abs()).all())


@BITS
def test_means_and_deviations_over_many_seeds(bits: int) -> None:
    """Sums over seeds and elements, within five deviations; the variance is (f − F_i)(F_{i+1} − f)."""
    torch.manual_seed(0)
    count, fit, x = 200, drawn.record(bits), torch.randn(4096) * 2
    key = drawn.module(bits)._KEY
    found = torch.stack([DECODE(draw(bits, x, number), x.shape, torch.float64, key) for number in range(count)])
    f = F.silu(x.double())
    nodes, values = (torch.tensor(row, dtype=torch.float64) for row in (fit.nodes, fit.values))
    cell = torch.bucketize(x.double().contiguous(), nodes, right=True) - 1
    variance = ((f - values[cell]) * (values[cell + 1] - f)).clamp(min=0)
    assert abs(float((found.mean(0) - f).sum())) < 5 * float((variance.sum() / count).sqrt())
    off = (found - f).square()
    # of a sum of squares; the fourth moment is at most that of the gap
    deviation = (variance * (values[cell + 1] - values[cell]).square()).sum().div(count).sqrt()
    assert abs(float((off.mean(0) - variance).sum())) < 5 * float(deviation)
    drift = found.mean(0) - f
    assert float(drift.square().sum() * count / variance.sum()) == pytest.approx(1, abs=0.25)


def test_seeds_come_from_the_generator() -> None:
    x = torch.randn(9000)

    def gradient() -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(function(8)(leaf).sum(), leaf)
        return found

    torch.manual_seed(3)
    first, second = gradient(), gradient()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(gradient(), first)
    with torch.no_grad():  # draws as well
        assert same(function(8)(x), F.silu(x))
    torch.manual_seed(3)
    with torch.no_grad():
        function(8)(x)
    assert torch.equal(gradient(), second)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_draws_the_same(reentrant: bool) -> None:
    x = torch.randn(3, 3000)

    def block(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(function(8)(x * 2), 0.5)

    found = []
    for run in (block, lambda leaf: checkpoint(block, leaf, use_reentrant=reentrant)):
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.sum().backward()
        assert leaf.grad is not None
        found.append((y, leaf.grad))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiled(backend: str) -> None:
    """In one graph; each call draws other codes, and manual_seed the same again."""
    compiled = torch.compile(function(5), fullgraph=True, backend=backend)
    x = torch.randn(9000)

    def gradient() -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(compiled(leaf).sum(), leaf)
        return found

    torch.manual_seed(3)
    first, second = gradient(), gradient()
    torch.manual_seed(3)
    assert torch.equal(gradient(), first)
    assert not torch.equal(first, second)
    numbers = torch.tensor(drawn.record(5).derivatives)
    assert bool(torch.isin(first, numbers).all())
    if backend == "aot_eager":
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        assert torch.equal(torch.autograd.grad(function(5)(leaf).sum(), leaf)[0], first)


@pytest.mark.full
@pytest.mark.parametrize("bits", [5, 8])
@EACH_DTYPE
def test_the_op_is_a_good_one(bits: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, 700).to(dtype).requires_grad_()
    torch.library.opcheck(FORWARD.default, (x, None, dtype, drawn.module(bits)._KEY, seed(1)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    """The gradient is that of one of the two nodes beside x, whatever the order in memory; y is exact."""
    fit, x = drawn.record(8), LAYOUTS[layout]()
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = function(8)(leaf)
    dy = torch.randn(y.shape)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    assert same(y.detach(), F.silu(x if layout in DENSE else x.contiguous()))
    cell = torch.bucketize(x.double().contiguous(), torch.tensor(fit.nodes, dtype=torch.float64), right=True) - 1
    table = torch.tensor(fit.derivatives)
    either = [dy * table[(cell + step).clamp(0, 255)] for step in (0, 1)]
    assert bool(((dx == either[0]) | (dx == either[1])).all())


@pytest.mark.parametrize("bits", [5, 8])
def test_only_codes_are_kept(bits: int) -> None:
    x = torch.randn(8192 * 2, requires_grad=True)
    with count_saved() as saved:
        function(bits)(x * 1)
    assert sizes(saved) == [8192 * 2 * bits // 8]


def test_refuses() -> None:
    key = drawn.module(8)._KEY
    x = torch.randn(4, 100, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"silu_coded8_stochastic: expected a seed, int64 \(1,\), .* got none"):
        FORWARD(x, None, x.dtype, key)
    with pytest.raises(RuntimeError, match="silu_coded8_stochastic: vmap cannot draw codes at random: call it on"):
        torch.func.vmap(function(8), randomness="different")(x)
    with pytest.raises(RuntimeError, match="called random operation"):
        torch.func.vmap(function(8))(x)
    (dx,) = torch.autograd.grad(function(8)(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative was requested"):
        torch.autograd.grad(dx.sum(), x)


def test_a_linear_layer_is_rebuilt_from_the_codes() -> None:
    """The gradient of its weight is right in the mean: over 400 seeds within five deviations."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 16) * 2, torch.randn(8, 16)
    dz = torch.randn(64, 8)
    key = drawn.module(4)._KEY
    exact = dz.double().t() @ F.silu(x.double())
    found = torch.stack(
        [dz.double().t() @ DECODE(draw(4, x, number), x.shape, torch.float64, key) for number in range(400)]
    )
    z = (found.mean(0) - exact) / (found.std(0) / 20)
    assert weight.shape == exact.shape
    assert float(z.abs().max()) < 5
    assert abs(float(z.mean())) < 5 / len(z.flatten()) ** 0.5


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="there is no C++ compiler")
@pytest.mark.full
def test_the_compiled_path_draws_the_same(tmp_path: Path) -> None:
    """FITACT_CPU=inductor, in a process of its own."""
    script = """
import sys, torch
from tests.support import drawn
found = []
for bits in (5, 8):
    torch.manual_seed(0)
    x = (torch.randn(8192 * 3 + 5) * 3).requires_grad_()
    y = getattr(drawn.module(bits), drawn.record(bits).name)(x)
    found.append(torch.autograd.grad(y.sum(), x)[0])
torch.save(found, sys.argv[1])
"""
    results = []
    for value in ("", "inductor"):
        path = tmp_path / f"found{value}.pt"
        environment = os.environ | {"FITACT_CPU": value, "TRITON_INTERPRET": "0"}
        subprocess.run([sys.executable, "-c", script, str(path)], check=True, env=environment)
        results.append(torch.load(path))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_under_autocast(dtype: torch.dtype) -> None:
    x = torch.randn(3000, requires_grad=True)
    with torch.autocast("cpu", dtype):
        y = function(8)(x)
    assert y.dtype == torch.float32
    assert same(y.detach(), F.silu(x).detach())
