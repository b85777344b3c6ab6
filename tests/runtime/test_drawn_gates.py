"""Gates whose codes are drawn at random: against a plain oracle, and in the mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fitact
from fitact.fitter.records.gate import KEPT, CodedGateFit
from fitact.fitter.records.stochastic import StochasticFit
from fitact.runtime.memory.saved import count_saved
from fitact.runtime.recipes import ATTRIBUTE
from tests.runtime.test_coded import laid_out
from tests.support import drawn
from tests.support.generated import same, sizes

KINDS = [(8, KEPT), (8, 8), (5, 6)]
ops: Any = torch.ops.fitact


def function(bits: int, bits_u: int) -> Callable[[Tensor, Tensor], Tensor]:
    found: Callable[[Tensor, Tensor], Tensor] = getattr(
        drawn.gate_module(bits, bits_u), drawn.gate(bits, bits_u).name
    )
    return found


def inputs(*size: int) -> tuple[Tensor, Tensor]:
    g, u = 2 * torch.randn(2, *size)
    return g.requires_grad_(), u.requires_grad_()


def forward(bits: int, bits_u: int, g: Tensor, u: Tensor, seed: int) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = ops.gate_forward(g, u, drawn.gate_module(bits, bits_u)._KEY, torch.tensor([seed]))
    return found


@pytest.mark.parametrize(("bits", "bits_u"), KINDS)
@pytest.mark.parametrize("n", [0, 1100, pytest.param(8200, marks=pytest.mark.full)])
def test_codes_and_layout(n: int, bits: int, bits_u: int) -> None:
    """Those of g by one stream of random numbers, those of u by another; the output is stock's."""
    fit, seed = drawn.gate(bits, bits_u), 2**62 + 12345
    g, u = (one.detach() for one in inputs(n))
    h, of_g, of_u = forward(bits, bits_u, g, u, seed)
    assert same(h, F.silu(g) * u)
    parts = [(fit.code_g, g, of_g, 0), *([(fit.code_u, u, of_u, 1)] if fit.code_u else [])]
    for part, x, codes, stream in parts:
        assert isinstance(part, StochasticFit)
        assert bytes(codes.tolist()) == laid_out(drawn.codes(part, x, seed, stream), part.bits)
    assert fit.code_u or not of_u.numel()


def looked_up(fit: CodedGateFit, g: Tensor, u: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """What stands for silu(g), for its derivative, and for u, by the oracle's codes, in float64."""
    of_g = torch.tensor(drawn.codes(fit.code_g, g.flatten(), seed))
    a, da = (torch.tensor(one).double()[of_g].view(g.shape) for one in (fit.code_g.values, fit.code_g.derivatives))
    if fit.code_u is None:
        return a, da, u.double()
    of_u = torch.tensor(drawn.codes(fit.code_u, u.flatten(), seed, 1))
    return a, da, torch.tensor(fit.code_u.values).double()[of_u].view(u.shape)


@pytest.mark.parametrize(("bits", "bits_u"), KINDS)
def test_backward_reads_the_codes(bits: int, bits_u: int) -> None:
    """Gradients, and what a layer that follows gets; only codes are kept, and u where it has none."""
    fit, (g, u) = drawn.gate(bits, bits_u), inputs(3, 400)
    torch.manual_seed(5)
    seed = int(torch.randint((1 << 63) - 1, (1,)))
    torch.manual_seed(5)
    with count_saved() as saved:
        h = function(bits, bits_u)(g, u)
    kept = [1200 if one == 8 else 1024 * one for one in (bits, bits_u) if one < KEPT]
    assert [one for one in sizes(saved) if one] == sorted([*kept, *([u.nbytes] if bits_u == KEPT else [])])
    noted = getattr(h.untyped_storage(), ATTRIBUTE).recipe
    assert not noted.exact
    again = noted.function(*getattr(h.untyped_storage(), ATTRIBUTE).state)
    dh = torch.randn(h.shape)
    dg, du = torch.autograd.grad(h, (g, u), dh)
    a, da, b = looked_up(fit, g.detach(), u.detach(), seed)
    for found, expected in ((again, a * b), (dg, dh * b * da), (du, dh * a)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_what_is_right_in_the_mean() -> None:
    """The output for the next layer and du, over 400 seeds: so the two streams are independent."""
    torch.manual_seed(0)
    count, (g, u) = 400, (one.detach() for one in inputs(2048))
    key = drawn.gate_module(4, 6)._KEY
    dh = torch.randn(2048)
    values, gradients = [], []
    for seed in range(count):
        _, *codes = forward(4, 6, g, u, seed)
        values.append(ops.gate_value(*codes, g.shape, torch.float64, key))
        gradients.append(ops.gate_backward(dh, *codes, False, True, key)[1].double())
    for found, exact in ((values, F.silu(g.double()) * u.double()), (gradients, dh.double() * F.silu(g.double()))):
        off = torch.stack(found) - exact
        z = off.mean() / (off.mean(1).std() / count**0.5)
        assert abs(float(z)) < 5
        drift = off.mean(0).square().sum() * count / off.var(0).sum()
        assert float(drift) == pytest.approx(1, abs=0.25)


def test_the_streams_differ() -> None:
    g, u = (one.detach() for one in inputs(500))
    _, of_g, of_u = forward(8, 8, g, g, 3)
    record = drawn.record(8, "identity")
    assert of_u.tolist() == drawn.codes(record, g, 3, 1) != drawn.codes(record, g, 3)
    assert not torch.equal(of_g, forward(8, 8, g, u, 4)[1])


def test_seeds_come_from_the_generator() -> None:
    g, u = inputs(3, 500)
    run = function(8, 8)

    def gradient(call: Callable[[Tensor, Tensor], Tensor] = run) -> Tensor:
        return torch.autograd.grad(call(g, u).sum(), g)[0]

    torch.manual_seed(3)
    first, second = gradient(), gradient()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(gradient(), first)
    torch.manual_seed(3)
    with torch.no_grad():  # draws as well
        assert same(run(g, u), F.silu(g) * u)
    assert torch.equal(gradient(), second)
    torch.manual_seed(3)
    assert torch.equal(gradient(lambda g, u: checkpoint(run, g, u, use_reentrant=False)), first)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    assert torch.equal(gradient(compiled), first)


def test_views_and_layouts() -> None:
    """Halves of one tensor, and transposed ones: codes are in the order of the elements."""
    whole = 2 * torch.randn(40, 600)
    g, u = whole.chunk(2, -1)
    for x, y in ((g, u), (g.t(), u.t())):
        _, *codes = forward(8, 8, x, y, 1)
        _, *expected = forward(8, 8, x.contiguous(), y.contiguous(), 1)
        assert all(map(torch.equal, codes, expected))


def test_refuses() -> None:
    g, u = inputs(4, 100)
    key = drawn.gate_module(8, 8)._KEY
    with pytest.raises(
        RuntimeError, match=r"expected a seed, int64 \(1,\), as codes are drawn at random, got none"
    ):
        ops.gate_forward(g.detach(), u.detach(), key)
    with pytest.raises(RuntimeError, match="swiglu_coded8_8_stochastic: vmap cannot draw codes at random"):
        torch.func.vmap(function(8, 8), randomness="different")(g, u)
    (dg,) = torch.autograd.grad(function(8, 8)(g, u).sum(), g, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(dg.sum(), u)


@pytest.mark.parametrize(("bits", "bits_u"), [KINDS[0], KINDS[2]])
@pytest.mark.full
def test_the_op_is_a_good_one(bits: int, bits_u: int) -> None:
    key = drawn.gate_module(bits, bits_u)._KEY
    torch.library.opcheck(ops.gate_forward.default, (*inputs(3, 700), key, torch.tensor([1])))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.gate, self.up = nn.SiLU(), nn.Linear(16, 512), nn.Linear(16, 512)
        self.down = nn.Linear(512, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return y


def test_in_a_model() -> None:
    """Given to `convert`: each step draws others, and the gradients of `down` are right in the mean."""
    torch.manual_seed(0)
    model, x = MLP(), torch.randn(16, 16)
    y = model(x)
    dy = torch.randn_like(y)
    (exact,) = torch.autograd.grad(y, model.down.weight, dy)
    kind = drawn.gate_module(5, 6).SwigluCoded56Stochastic
    (site,) = fitact.convert(model, "coded", replace={nn.SiLU: kind})
    assert site.after == "swiglu_coded5_6_stochastic"
    found = []
    for _ in range(100):
        again = model(x)
        assert same(again.detach(), y.detach())
        found.append(torch.autograd.grad(again, model.down.weight, dy)[0])
    each = torch.stack(found).double()
    z = (each.mean(0) - exact) / (each.std(0) / 10)
    assert float(each.std(0).min()) > 0
    assert float(z.abs().max()) < 6
    assert float(z.square().mean()) == pytest.approx(1, abs=0.25)
