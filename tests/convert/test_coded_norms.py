"""Norms that keep codes of their rows: outputs, bytes, gradients by the formulas, and what `auto` does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fitact
from fitact.runtime.memory.saved import count_saved
from tests.support.generated import same, sizes

from .test_coded_models import Table, equal, gradients, run_checkpointed

ROWS, WIDTH = 64, 128  # a whole tile
X = 3 * torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)) + 1


class Rms(nn.Module):
    """A norm of several operations, with a weight that counts from 0, or from 1 as in Gemma."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.zeros(WIDTH)), 1e-6, offset

    def forward(self, x: Tensor) -> Tensor:
        rows = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return rows * (self.offset + self.weight)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "without bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "without weight": lambda: nn.RMSNorm(WIDTH, eps=1e-5, elementwise_affine=False),
    "composed": lambda: Rms(0.0),
    "from 1": lambda: Rms(1.0),
}


def made(name: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), NORMS[name](), nn.Linear(WIDTH, 16, bias=False))
    with torch.no_grad():
        for one in model[1].parameters():
            one.copy_(torch.randn(one.shape))
    return model.to(dtype)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", NORMS)
def test_gradients_by_the_formulas(name: str, bits: int) -> None:
    """In float64, of rows whose normalised numbers the tables give; the output is stock's."""
    model, x = made(name, torch.float64), X.double()
    y = model(x)
    fitact.convert(model, "coded", bits_norms=bits)
    norm, linear = model[1], model[2]
    centred = isinstance(norm, nn.LayerNorm)
    rows = x - x.mean(-1, keepdim=True) if centred else x
    eps = norm.eps if norm.eps is not None else torch.finfo(torch.float64).eps
    scale = (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
    z = Table(f"identity_coded{bits}")(rows * scale)[0]
    x.requires_grad_()
    found = model(x)
    assert same(found.detach(), y.detach())
    dy = torch.randn_like(found)
    trained = [*norm.parameters(), linear.weight]
    dx, *others = torch.autograd.grad(found, [x, *trained], dy)
    with torch.no_grad():
        weight = getattr(norm, "weight", None)
        alpha = torch.ones(WIDTH) if weight is None else weight + getattr(norm, "offset", 0.0)
        bias = getattr(norm, "bias", None)
        grad = dy @ linear.weight
        dz = grad * alpha
        means = dz.mean(-1, keepdim=True) if centred else 0.0
        expected = (dz - means - z * (dz * z).mean(-1, keepdim=True)) * scale
        wanted = [(grad * z).sum(0)] * (weight is not None) + [grad.sum(0)] * (bias is not None)
        wanted.append(dy.t() @ (z * alpha + (0.0 if bias is None else bias)))
    if centred:  # PyTorch's backward takes rows whose mean is 0, as these nearly are
        assert (dx - expected).norm() < 0.02 * expected.norm()
    else:
        torch.testing.assert_close(dx, expected, rtol=1e-9, atol=1e-9)
    for one, other in zip(others, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["LayerNorm", "composed"])
def test_codes_and_a_number_for_each_row_are_kept(name: str, dtype: torch.dtype) -> None:
    model, x = made(name, dtype), X.to(dtype).clone().requires_grad_()
    fitact.convert(model, "coded", bits_norms=8)
    with count_saved(model) as saved:
        y = model(x)
    assert sizes(saved) == sorted([4 * ROWS, ROWS * WIDTH])
    leaves, dy = [x, *model.parameters()], torch.randn_like(y)
    near = torch.autograd.grad(y, leaves, dy)
    fitact.revert(model)
    stock = torch.autograd.grad(model(x), leaves, dy)
    for a, b in zip(near, stock, strict=True):
        assert (a.double() - b.double()).norm() < 0.02 * b.double().norm()


def test_situations() -> None:
    """Checkpointed, and put back; where nothing needs a gradient nothing is coded."""
    model = made("LayerNorm")
    keys, stock = [*model.state_dict()], gradients(model, x=X)
    report = fitact.convert(model, "coded", bits_norms=8)
    assert [(one.name, one.kind, one.after) for one in report] == [("1", "norm", "identity_coded8")]
    assert "value off by 0.85 %" in str(report)
    assert [*model.state_dict()] == keys
    coded = gradients(model, x=X)
    assert not equal(coded, stock)
    for reentrant in (False, True):
        assert equal(gradients(model, run_checkpointed(model, reentrant), x=X), coded)
    with torch.no_grad(), count_saved(model) as saved:
        model(X)
    assert sizes(saved) == []
    dy, found = torch.randn(ROWS, 16), []
    for one in (model, made("LayerNorm")):
        with torch.autocast("cpu", torch.bfloat16):
            y = one(X)
        found.append(torch.autograd.grad(y, [*one.parameters()], dy.to(y.dtype)))
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(model(X).sum(), model[1].weight, create_graph=True)[0].sum().backward()
    (back,) = fitact.revert(model)
    assert (back.before, back.after) == ("identity_coded8", "LayerNorm")
    assert equal(gradients(model, x=X), stock)


def test_what_auto_does() -> None:
    """It codes norms with `few-bit` alone, or where it is asked to, and not where a number of a row is far off."""

    def after(x: Tensor, error: str, bits: int | None = None) -> str | None:
        model = nn.Sequential(nn.Identity(), made("LayerNorm"))
        done = fitact.convert(model, error=error, bits_norms=bits, example_inputs=x.requires_grad_(), dry_run=True)
        return next(one.after for one in done)

    assert after(X.clone(), "few-bit") == after(X.clone(), "rounding", 8) == "identity_coded8"
    assert after(X.clone(), "few-bit", 6) == "identity_coded6"
    assert after(X.clone(), "rounding") == "rebuilt"
    assert after(X.clone(), "exact") == "rebuilt"


@pytest.mark.parametrize("autocast", [False, True])
def test_merging_does_not_take_the_place_of_codes(autocast: bool) -> None:
    """Whoever lets norms be merged, too, gets a model that keeps no more than without."""
    kept = []
    for norms in (False, True):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *made("LayerNorm"), nn.GELU(), nn.Linear(16, 16))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            kept.append(fitact.convert(model, error="few-bit", norms=norms, example_inputs=X).kept_after)
    assert kept[1] <= kept[0]


def test_auto_leaves_rows_with_outliers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8192), nn.Linear(8192, 4))
    x = torch.randn(4, 8192)
    assert [one.after for one in fitact.convert(model, error="few-bit", example_inputs=x, dry_run=True)] == [
        "identity_coded8"
    ]
    x[:, 0] = 1e6  # 90 times the deviation of its row
    assert [one.after for one in fitact.convert(model, error="few-bit", example_inputs=x, dry_run=True)] == [
        "rebuilt"
    ]
