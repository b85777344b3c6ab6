"""Formulas with learned numbers that keep their output: gradients from it, bytes, and what overwrites it."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import nn

import fitact
from fitact.runtime.measure.saved import count_saved
from tests.runtime.test_learned import C, module, truth
from tests.support.generated import EACH_DTYPE, LAYOUTS, sizes
from tests.support.learned import FROM_OUTPUT, numbers_of, shaped

each = pytest.mark.parametrize("name", FROM_OUTPUT)


def call(name: str, x: torch.Tensor, numbers: list[torch.Tensor], dim: int = -1) -> torch.Tensor:
    function = getattr(module(name), FROM_OUTPUT[name].fit.name)
    y: torch.Tensor = function(x, *numbers, dim) if FROM_OUTPUT[name].wide else function(x, *numbers)
    return y


def made(name: str) -> nn.Module:
    kind = getattr(module(name), module(name).__all__[0])
    built: nn.Module = kind(C) if FROM_OUTPUT[name].wide else kind()
    return built


@each
@EACH_DTYPE
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    """Each element's within the stated share of the larger of itself and 1, and so within sums of these."""
    case, eps = FROM_OUTPUT[name], torch.finfo(dtype).eps
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = (3 * torch.randn(300, 11, C)).to(dtype)
    x[0, 0] = 40  # there y is 1
    x.requires_grad_()
    dy, numbers = torch.randn(x.shape).to(dtype), numbers_of(case, C, wide)
    y = call(name, x, numbers)
    dx, *found = torch.autograd.grad(y, [x, *numbers], dy)
    expected, (dx_expected, *_) = truth(case, x, numbers, dy)
    assert (y.dtype, y.shape, dx.dtype) == (dtype, x.shape, dtype)
    assert bool(((y.double() - expected).abs() <= 4 * eps).all())
    share = 0.05 if dtype in (torch.bfloat16, torch.float16) else 20 * eps
    slope = (dx_expected / dy.double()).abs()
    assert bool(((dx.double() - dx_expected).abs() <= share * dy.abs().double() * slope.clamp(min=1)).all())
    for k, one in enumerate(found):
        leaves = [other.detach().double().expand(C).clone() for other in numbers]
        leaves[k] = leaves[k].expand(x.shape).clone().requires_grad_()  # one for each element
        (each,) = torch.autograd.grad(case.stock(x.detach().double(), *leaves).sum(), leaves[k])
        reach, shares = share * dy.abs().double() * each.abs().clamp(min=1), dy.double() * each
        over = (0, 1) if one.numel() > 1 else (0, 1, 2)
        # roundings of y are as often up as down, so that their sum grows as the root of their number
        allowed = 8 * reach.square().sum(over).sqrt() + 1e-5 * shares.abs().sum(over) * (wide == torch.float32)
        assert bool(((one.double() - shares.sum(over)).abs() <= allowed).all())


@each
def test_gradients_by_finite_differences(name: str) -> None:
    x = torch.randn(3, 4, C, dtype=torch.float64, requires_grad=True)
    numbers = numbers_of(FROM_OUTPUT[name], C, torch.float64)
    assert torch.autograd.gradcheck(lambda x, *numbers: call(name, x, [*numbers]), [x, *numbers])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    x = LAYOUTS[layout]().double()
    for dim in range(-x.dim(), 0) if x.numel() else ():
        numbers = numbers_of(FROM_OUTPUT["sigmoid"], x.shape[dim], torch.float64)
        leaf, dy = x.detach().requires_grad_(), torch.randn(x.shape, dtype=torch.float64)
        y = call("sigmoid", leaf, numbers, dim)
        assert y.stride() == torch.empty_like(x).stride()
        expected = torch.sigmoid(shaped(numbers, x, dim)[0] * x + numbers[1])
        torch.testing.assert_close(y, expected)
        _, gradients = truth(FROM_OUTPUT["sigmoid"], x, numbers, dy, dim)
        for one, other in zip(torch.autograd.grad(y, [leaf, *numbers], dy), gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_kept() -> None:
    """y, which the next layer keeps too, and the number once more; stock keeps x beside it."""
    torch.manual_seed(0)
    first, act, last = nn.Linear(8, C, bias=False), made("tanh"), nn.Linear(C, 2, bias=False)
    x = torch.randn(64, 8)
    with count_saved() as saved:
        y = last(act(first(x)))
    of_weights = 4 * C * 2
    assert sizes(saved) == sorted([x.nbytes, 4 * 64 * C, of_weights, 4])
    with count_saved() as stock:
        last(torch.tanh(act.a * first(x)))
    assert stock.bytes - saved.bytes == 4 * 64 * C
    y.sum().backward()


def test_models_in_the_context_keep_the_output_and_nothing_else() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, C), made("tanh"), nn.Linear(C, 2)), torch.randn(64, 8)
    other = copy.deepcopy(model)
    fitact.convert(other)
    kept = []
    for one in (model, other):
        with count_saved() as saved:
            y = one(x)
        y.square().sum().backward()
        kept.append(saved.bytes)
    assert kept[0] == kept[1]
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_an_output_that_is_overwritten() -> None:
    y = made("tanh")(torch.randn(3, C, requires_grad=True))
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(("name", "compiled"), [*product(FROM_OUTPUT, (False, True))])
def test_compiled_and_by_samples(name: str, compiled: bool) -> None:
    one, x = made(name), torch.randn(4, 5, C)
    parameters = {key: p.detach() for key, p in one.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(one, parameters, (x,)).square().sum()

    if compiled:
        torch.compile(one, backend="aot_eager", fullgraph=True)(x).square().sum().backward()
        found = {key: p.grad.clone() for key, p in one.named_parameters()}
    else:
        by_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        found = {key: each.sum(0) for key, each in by_sample.items()}
    one.zero_grad()
    one(x).square().sum().backward()
    for key, p in one.named_parameters():
        torch.testing.assert_close(found[key], p.grad)


def test_a_number_that_is_exactly_0() -> None:
    """The output says nothing about x then: the gradient in that number is NaN, and that in x is right."""
    x, a = torch.randn(3, requires_grad=True), torch.zeros(1, requires_grad=True)
    dx, da = torch.autograd.grad(call("tanh", x, [a]).sum(), [x, a])
    assert torch.equal(dx, torch.zeros(3)) and bool(da.isnan())
