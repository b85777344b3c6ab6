"""Formulas with learned numbers at run time: values, gradients, bytes, and what PyTorch does with an operation."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from contextlib import nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fitact.fitter.analysis.learned import USED
from fitact.runtime.measure.saved import count_saved
from fitact.runtime.saving import saving
from tests.support.generated import EACH_DTYPE, LAYOUTS, load, same, sizes
from tests.support.learned import CASES, Case, numbers_of, shaped

every = pytest.mark.parametrize("name", CASES)
C = 6


@cache
def module(name: str) -> ModuleType:
    return load(CASES[name].fit)


def call(name: str, x: torch.Tensor, numbers: list[torch.Tensor], dim: int = -1) -> torch.Tensor:
    function = getattr(module(name), CASES[name].fit.name)
    y: torch.Tensor = function(x, *numbers, dim) if CASES[name].wide else function(x, *numbers)
    return y


def made(name: str, channels: int = C, **options: Any) -> nn.Module:
    kind = getattr(module(name), module(name).__all__[0])
    built: nn.Module = kind(channels, **options) if CASES[name].wide else kind(**options)
    return built


def truth(
    case: Case, x: torch.Tensor, numbers: list[torch.Tensor], dy: torch.Tensor, dim: int = -1
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Value and gradients in float64, by PyTorch's autograd."""
    leaves = [one.detach().double().requires_grad_() for one in (x, *numbers)]
    y = case.baseline(leaves[0], *shaped(leaves[1:], x, dim))
    return y.detach(), list(torch.autograd.grad(y, leaves, dy.double()))


# ---------------------------------------------------------------------------------------------- values, gradients


@every
@EACH_DTYPE
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    """Within two roundings of float64; the gradients of numbers within those of a sum of float32."""
    case, eps = CASES[name], torch.finfo(dtype).eps
    x = (2 * torch.randn(300, 11, C)).to(dtype).requires_grad_()
    dy = torch.randn(x.shape).to(dtype)
    numbers = numbers_of(case, C, torch.float64 if dtype == torch.float64 else torch.float32)
    y = call(name, x, numbers)
    assert (y.dtype, y.shape) == (dtype, x.shape)
    assert same(call(name, x.detach(), [one.detach() for one in numbers]), y)
    expected, (dx_expected, *expected_numbers) = truth(case, x, numbers, dy)
    few = 4 if dtype in (torch.float32, torch.float64) else 1
    assert bool(((y.double() - expected).abs() <= few * eps * (1 + expected.abs())).all())
    dx, *found = torch.autograd.grad(y, [x, *numbers], dy)
    assert dx.dtype == dtype
    reach = few * eps * dy.abs().double() * (1 + (dx_expected / dy.double()).abs())
    assert bool(((dx.double() - dx_expected).abs() <= reach + torch.finfo(dtype).tiny).all())
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for one, other in zip(found, expected_numbers, strict=True):
        torch.testing.assert_close(
            one.double(), other, rtol=1e-5 if wide == torch.float32 else 1e-12,
            atol=1e-3 if wide == torch.float32 else 1e-10,
        )  # fmt: skip


@every
def test_gradients_by_finite_differences(name: str) -> None:
    case = CASES[name]
    x = torch.randn(3, 4, C, dtype=torch.float64)
    x = torch.where((x.abs() < 0.05) | ((x - 0.7).abs() < 0.2), 2.0, x).requires_grad_()  # away from breakpoints
    numbers = numbers_of(case, C, torch.float64)
    assert torch.autograd.gradcheck(lambda x, *numbers: call(name, x, [*numbers]), [x, *numbers])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["dyt", "xielu"])
def test_layouts(name: str, layout: str) -> None:
    case = CASES[name]
    x = LAYOUTS[layout]().double()
    for dim in range(-x.dim(), 0) if case.wide else (-1,):
        if case.wide and not x.numel():
            continue
        numbers = numbers_of(case, x.shape[dim] if x.dim() else 1, torch.float64)
        leaf = x.detach().requires_grad_()
        y = call(name, leaf, numbers, dim)
        assert y.stride() == torch.empty_like(x).stride() == call(name, x, numbers, dim).stride()
        dy = torch.randn(x.shape, dtype=torch.float64)
        expected, gradients = truth(case, x, numbers, dy, dim)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        for one, other in zip(torch.autograd.grad(y, [leaf, *numbers], dy), gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-9)


def test_zero_dimensions_have_no_channels() -> None:
    with pytest.raises(ValueError, match=r"own_dyt: expected a tensor with a dimension -1, got \(\)"):
        made("dyt")(torch.zeros(()))


@every
def test_special_numbers(name: str) -> None:
    case = CASES[name]
    x = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e4, -1e4, torch.nan])[:, None].expand(-1, C).contiguous()
    numbers = numbers_of(case, C, torch.float32)
    leaf = x.requires_grad_()
    y = call(name, leaf, numbers)
    expected, (gradient, *_) = truth(case, x, numbers, torch.ones_like(x))
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    (dx,) = torch.autograd.grad(y.sum(), leaf)
    finite = gradient.isfinite()
    torch.testing.assert_close(dx.double()[finite], gradient[finite], rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------ the module


def test_parameters_are_named_and_start_as_declared() -> None:
    dyt = made("dyt", dim=1)
    assert {name: tuple(one.shape) for name, one in dyt.state_dict().items()} == {
        "alpha": (1,),
        "gamma": (C,),
        "beta": (C,),
    }
    assert repr(dyt) == "OwnDyt(6, dim=1)"
    assert [float(one[0].detach()) for one in dyt.parameters()] == [0.5, 1.0, 0.0]
    with torch.no_grad():
        dyt.alpha += 1
    other = made("dyt")
    other.load_state_dict(dyt.state_dict())
    assert float(other.alpha.detach()) == 1.5
    dyt.reset_parameters()
    assert float(dyt.alpha.detach()) == 0.5
    half = made("dyt", dtype=torch.bfloat16)
    assert {one.dtype for one in half.parameters()} == {torch.bfloat16}
    half(torch.randn(3, C, dtype=torch.bfloat16)).sum().backward()
    assert half.gamma.grad.dtype == torch.bfloat16


def test_no_name_of_modules_is_free() -> None:
    """A learned number cannot hide what a module has, nor the module's own."""
    # PyTorch's names from a process of their own: other libraries, once imported, give nn.Module more
    own = {*dir(made("dyt"))} - {*dir(torch.nn.Module())} - {"alpha", "gamma", "beta"}
    text = "import torch; print(*dir(torch.nn.Module()))"
    known = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in (*own, *known) if not name.startswith("_")} <= USED


def test_channels_are_asked_for() -> None:
    kind, plain = type(made("dyt")), type(made("xielu"))
    with pytest.raises(TypeError, match="own_dyt: expected channels, the size of gamma and beta"):
        kind()
    with pytest.raises(ValueError, match="own_dyt: channels: expected a positive number, got 0"):
        kind(0)
    with pytest.raises(TypeError, match="own_xielu: expected no channels, as it has one of each number, got 4"):
        plain(4)
    with pytest.raises(ValueError, match=r"own_dyt: gamma: expected 1 element or 5, the channels of \(2, 5\)"):
        kind(4)(torch.randn(2, 5))
    with pytest.raises(TypeError, match="own_dyt: expected a tensor of float16, bfloat16, float32 or"):
        kind(4)(torch.ones(2, 4, dtype=torch.int32))


@pytest.mark.parametrize("name", ["dyt", "xielu"])
def test_any_number_may_be_one_or_of_channels(name: str) -> None:
    """As functions take them, whatever the module's are; the last is of channels, then all but the last are."""
    case, x = CASES[name], torch.randn(30, 7, C, dtype=torch.float64)
    some = numbers_of(case, C, torch.float64)
    for wide in ({len(some) - 1}, {*range(len(some) - 1)}):
        numbers = [
            (one.detach().flatten()[0] + torch.linspace(0, 0.2, C if k in wide else 1)).double().requires_grad_()
            for k, one in enumerate(some)
        ]
        leaf, dy = x.clone().requires_grad_(), torch.randn_like(x)
        y = call(name, leaf, numbers)
        expected, gradients = truth(case, x, numbers, dy)
        torch.testing.assert_close(y.detach(), expected, rtol=1e-12, atol=1e-12)
        for one, other in zip(torch.autograd.grad(y, [leaf, *numbers], dy), gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("name", ["dyt", "swish_beta"])
def test_copies_and_files(name: str) -> None:
    one = made(name)
    for other in (copy.deepcopy(one), torch.load(_saved(one), weights_only=False)):
        x = torch.randn(2, C)
        assert torch.equal(one(x), other(x))


def _saved(one: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    return file


# -------------------------------------------------------------------------------------------- what PyTorch does


def test_kept() -> None:
    """x, and the numbers once more in float32."""
    x = torch.randn(64, 128, C, requires_grad=True)
    with count_saved() as saved:
        made("dyt")(x)
    assert sizes(saved) == [3 * C * 4, x.nbytes]


@every
def test_the_same_from_run_to_run(name: str) -> None:
    case, x = CASES[name], torch.randn(500, 37, C)
    numbers = numbers_of(case, C, torch.float32)
    runs = [torch.autograd.grad(call(name, x.requires_grad_(), numbers).square().sum(), numbers) for _ in range(3)]
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))


@pytest.mark.parametrize("name", ["dyt", "swish_beta"])
def test_autocast_changes_nothing(name: str) -> None:
    one, x = made(name), torch.randn(5, C, dtype=torch.bfloat16, requires_grad=True)
    expected = one(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = one(x)
        plain = one(x.detach())
    assert same(y, expected) and same(plain, expected)
    with torch.autocast("cpu", torch.float16):
        assert one(torch.randn(5, C)).dtype == torch.float32


@pytest.mark.parametrize("name", ["dyt", "swish_beta"])
def test_compiled_without_breaks(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, C), made(name), nn.Linear(C, 2))
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, dynamic=True)
    for rows in (7, 30):
        x = torch.randn(rows, 3, 4)
        for one in (model, compiled):
            one.zero_grad()
            one(x).square().sum().backward()
        for a, b in zip(model.parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["dyt", "swish_beta"])
def test_gradients_of_samples(name: str) -> None:
    """By torch.func: each sample's own gradient of each number."""
    one, x = made(name), torch.randn(4, 5, C)

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(one, parameters, (x,)).square().sum()

    parameters = {name: p.detach() for name, p in one.named_parameters()}
    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for i in range(4):
        one.zero_grad()
        one(x[i]).square().sum().backward()
        for key, p in one.named_parameters():
            torch.testing.assert_close(found[key][i], p.grad)


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(3, C, requires_grad=True)
    (dx,) = torch.autograd.grad(made("dyt")(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="own_dyt: a second derivative was requested"):
        dx.sum().backward()


@pytest.mark.parametrize("frozen", ["x", "numbers", "some"])
def test_only_what_is_wanted(frozen: str) -> None:
    one, x = made("dyt"), torch.randn(3, C, requires_grad=frozen != "x")
    for name, p in one.named_parameters():
        p.requires_grad_(frozen == "x" or (frozen == "some" and name == "gamma"))
    one(x).sum().backward()
    assert (x.grad is not None) == (frozen != "x")
    assert {name for name, p in one.named_parameters() if p.grad is not None} == {
        "x": {"alpha", "gamma", "beta"},
        "numbers": set(),
        "some": {"gamma"},
    }[frozen]


def test_checkpointing() -> None:
    one, x = made("dyt"), torch.randn(3, C, requires_grad=True)
    expected = torch.autograd.grad(one(x).square().sum(), [x, *one.parameters()])
    y: Any = checkpoint(one, x, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(y.square().sum(), [x, *one.parameters()]), expected))


def test_numbers_changed_between_the_passes() -> None:
    """Backward is that of the numbers that forward had."""
    one, x = made("dyt"), torch.randn(3, C, requires_grad=True)
    (expected,) = torch.autograd.grad(one(x).sum(), x)
    y = one(x)
    with torch.no_grad():
        one.alpha.mul_(3)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


def test_a_linear_layer_that_follows_recomputes_the_output() -> None:
    model = nn.Sequential(nn.Linear(16, C), made("dyt"), nn.Linear(C, 16))
    x = torch.randn(256, 16)
    kept, gradients = [], []
    for context in (nullcontext(), saving()):
        with count_saved(model) as saved, context:
            y = model(x)
        kept.append(sum(sizes(saved)))
        gradients.append(torch.autograd.grad(y.square().sum(), [*model.parameters()]))
    assert kept[0] - kept[1] == (256 + 3) * C * 4  # the three numbers are laid side by side again, too
    assert all(map(torch.equal, *gradients))


def test_prelu_is_pytorch_s() -> None:
    """With its parameter's name and, in images, its channels; all but the sum of the weight's gradient exactly."""
    baseline, one = nn.PReLU(C), made("prelu_channel", dim=1)
    one.load_state_dict(baseline.state_dict())
    x = torch.randn(4, C, 9, 9, requires_grad=True)
    dy = torch.randn(x.shape)
    expected, found = (torch.autograd.grad(kind(x), [x, kind.weight], dy) for kind in (baseline, one))
    assert same(baseline(x), one(x)) and same(expected[0], found[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------------------- by commands


@pytest.mark.long
def test_from_text_to_a_trained_model_in_an_empty_folder(tmp_path: Any) -> None:
    """A formula of two learned numbers that nobody has thought of."""
    text = "where(x > 0, p*x + log1p(q**2*x), sin(p*x)/(1 + q**2))"
    fitact = [sys.executable, "-m", "fitact"]
    for command in (
        [*fitact, "fit", "--fn", text, "--learn", "p=0.7", "--learn", "q:channel=1.1",
         "--method", "rebuild", "--name", "nobody"],
        [*fitact, "codegen"],
        [sys.executable, "-c", TRAINING],
    ):  # fmt: skip
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    first, last, p, q = map(float, done.stdout.split())
    assert last < first / 2 and p != pytest.approx(0.7, abs=1e-4) and q != pytest.approx(1.1, abs=1e-4)


TRAINING = """
import torch
from torch import nn
from generated.nobody import Nobody

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), Nobody(16), nn.Linear(16, 1))
x = torch.randn(256, 4)
target = (x[:, :1] * x[:, 1:2]).tanh()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
losses = []
for _ in range(100):
    optimizer.zero_grad()
    loss = (model(x) - target).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(losses[0], losses[-1], model[1].p.item(), model[1].q.mean().item())
"""
