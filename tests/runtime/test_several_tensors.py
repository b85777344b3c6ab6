"""Gates and formulas with learned parameters at run time: values, gradients, bytes, and PyTorch around them."""

import copy
import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fitact.fitter.analysis.learned import USED
from fitact.runtime.kernels import Gate, apply_gate, register
from fitact.runtime.measure.saved import count_saved
from fitact.runtime.saving import saving
from tests.support.gates import FITS, Baseline, gate_module, halves, recomputed, special
from tests.support.generated import EACH_DTYPE, LAYOUTS, forward_op, load, same, sizes
from tests.support.kinds import SEVERAL, operation
from tests.support.learned import CASES, call, learned_module, numbers_of, shaped
from tests.support.processes import python

HALF = torch.bfloat16
C = 6
every_gate = pytest.mark.parametrize("name", FITS)
every_formula = pytest.mark.parametrize("name", CASES)


def gate(name: str) -> Baseline:
    function: Baseline = getattr(gate_module(name), FITS[name][0].name)
    return function


def made(name: str, channels: int = C, **options: Any) -> nn.Module:
    kind = getattr(learned_module(name), learned_module(name).__all__[0])
    built: nn.Module = kind(channels, **options) if CASES[name].wide else kind(**options)
    return built


def gradients(function: Callable[..., Tensor], tensors: Sequence[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(function(*leaves), leaves, dy)


def truth(name: str, x: Tensor, numbers: list[Tensor], dy: Tensor, dim: int = -1) -> tuple[Tensor, list[Tensor]]:
    leaves = [number.detach().double().requires_grad_() for number in (x, *numbers)]
    y = CASES[name].baseline(leaves[0], *shaped(leaves[1:], x, dim))
    return y.detach(), list(torch.autograd.grad(y, leaves, dy.double()))


@every_gate
@EACH_DTYPE
def test_gates_are_pytorch_s_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    """Gradients of a formula without a function in PyTorch are rounded once: near in float64."""
    function, baseline = gate(name), FITS[name][1]
    for g, u in (halves(dtype, 5, 1100), special(dtype), halves(dtype, 0, 3), halves(dtype, 9001)):
        expected, dh = baseline(g, u), torch.randn(g.shape).to(dtype)
        result = function(g.detach().requires_grad_(), u)
        assert result.requires_grad and not result.is_leaf
        assert all(h.dtype == dtype and same(h, expected) for h in (function(g, u), result))
        if name != "recompute_clamped":
            assert all(map(same, gradients(function, (g, u), dh), gradients(baseline, (g, u), dh)))
    g, u = halves(torch.float64, 50, 40)
    dh = torch.randn(g.shape, dtype=torch.float64)
    actual, exact = (gradients(each, (g, u), dh) for each in (function, baseline))
    torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_pieces_of_gates(dtype: torch.dtype) -> None:
    """A piece that is not taken has no part in a gradient, whatever its own is there."""
    function = load(recomputed("u*where(g > 0, g**1.5, 0.1*g)", "own_pieces")).own_pieces
    g = torch.tensor([-2.0, -1.0, 0.0, 0.5, 2.0], dtype=dtype)
    dg, du = gradients(function, (g, torch.full_like(g, 3.0)), torch.ones_like(g))
    expected, rtol = torch.where(g > 0, 4.5 * g.double().abs().sqrt(), 0.3), 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(dg.double(), expected, rtol=rtol, atol=0)
    assert torch.equal(du, function(g, torch.ones_like(g)))


@pytest.mark.parametrize("gradient", [False, True])
def test_gates_run_without_autocast(gradient: bool) -> None:
    """A GPU's would compute a softplus in float32."""

    def a(x: Tensor) -> Tensor:
        assert not torch.is_autocast_enabled("cpu")
        return x * 2

    key = register(Gate(key=f"own-autocast-{gradient}", name="own", a=a, b=a, forward=None, backward=None))
    g = torch.randn(8, dtype=HALF, requires_grad=gradient)
    with torch.autocast("cpu", HALF):
        assert same(apply_gate(g, g, key), 4 * g * g)


@every_formula
@EACH_DTYPE
def test_formulas(name: str, dtype: torch.dtype) -> None:
    """Within two roundings of float64; the gradients of numbers within those of a sum; the same in each run."""
    case, eps = CASES[name], torch.finfo(dtype).eps
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = (2 * torch.randn(300, 11, C)).to(dtype).requires_grad_()
    dy, numbers = torch.randn(x.shape).to(dtype), numbers_of(case, C, wide)
    y = call(name, x, numbers)
    assert (y.dtype, y.shape) == (dtype, x.shape)
    assert same(call(name, x.detach(), [number.detach() for number in numbers]), y)
    expected, (dx_expected, *expected_numbers) = truth(name, x, numbers, dy)
    few = 4 if dtype == wide else 1
    assert bool(((y.double() - expected).abs() <= few * eps * (1 + expected.abs())).all())
    dx, *actual = torch.autograd.grad(y, [x, *numbers], dy, retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(y, [x, *numbers], dy), (dx, *actual)))
    assert dx.dtype == dtype
    reach = few * eps * dy.abs().double() * (1 + (dx_expected / dy.double()).abs())
    assert bool(((dx.double() - dx_expected).abs() <= reach + torch.finfo(dtype).tiny).all())
    rtol, atol = (1e-5, 1e-3) if wide == torch.float32 else (1e-12, 1e-10)
    torch.testing.assert_close([each.double() for each in actual], expected_numbers, rtol=rtol, atol=atol)


@every_formula
def test_special_numbers(name: str) -> None:
    x = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e4, -1e4, torch.nan])[:, None].expand(-1, C).contiguous()
    numbers, leaf = numbers_of(CASES[name], C, torch.float32), x.requires_grad_()
    y = call(name, leaf, numbers)
    expected, (gradient, *_) = truth(name, x, numbers, torch.ones_like(x))
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    (dx,) = torch.autograd.grad(y.sum(), leaf)
    finite = gradient.isfinite()
    torch.testing.assert_close(dx.double()[finite], gradient[finite], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["recompute", "recompute_clamped", "dyt", "xielu"])
def test_layouts(name: str, layout: str) -> None:
    """The result has the strides of `empty_like`; learned parameters are of any dimension, one or of channels."""
    x = LAYOUTS[layout]()
    if name in FITS:
        for u in (LAYOUTS[layout](), torch.randn(x.shape)):
            h, dh = gate(name)(x.detach().requires_grad_(), u), torch.randn(x.shape)
            assert same(h, FITS[name][1](x, u))
            assert h.stride() == gate(name)(x, u).stride() == torch.empty_like(x).stride()
            dense = gradients(gate(name), (x.contiguous(), u.contiguous()), dh)
            torch.testing.assert_close(gradients(gate(name), (x, u), dh), dense, rtol=1e-6, atol=1e-6)
        return
    case, x = CASES[name], x.double()
    for dim in range(-x.dim(), 0) if case.wide else (-1,):
        channels = x.shape[dim] if x.dim() else 1
        if case.wide and not x.numel():
            continue
        some = numbers_of(case, channels, torch.float64)
        last = len(some) - 1
        for wide in (None, {last}, {*range(last)}) if channels else (None,):
            starts = [] if wide is None else [each.detach().flatten()[0] for each in some]
            spread = (torch.linspace(0, 0.2, channels if k in wide else 1).double() for k in range(len(starts)))
            numbers = [(each + more).requires_grad_() for each, more in zip(starts, spread, strict=True)] or some
            leaf, dy = x.detach().requires_grad_(), torch.randn(x.shape, dtype=torch.float64)
            y = call(name, leaf, numbers, dim)
            assert y.stride() == torch.empty_like(x).stride() == call(name, x, numbers, dim).stride()
            expected, grads = truth(name, x, numbers, dy, dim)
            torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
            actual = [*torch.autograd.grad(y, [leaf, *numbers], dy)]
            torch.testing.assert_close(actual, grads, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("name", SEVERAL)
def test_only_what_is_wanted(name: str) -> None:
    """In autocast too, which changes nothing."""
    each = operation(name)
    for dtype in (torch.float32, HALF):
        x, *others = each.tensors(torch.randn(4, C))
        tensors = [x.to(dtype), *(part.to(dtype) if name in FITS else part for part in others)]
        dy = torch.randn(x.shape).to(dtype)
        expected, every = each.function(*tensors), gradients(each.function, tensors, dy)
        for wanted in range(len(tensors)):
            leaves = [part.detach().requires_grad_(i == wanted) for i, part in enumerate(tensors)]
            with torch.autocast("cpu", torch.bfloat16):
                y, plain = each.function(*leaves), each.function(*tensors)
            assert y.dtype == dtype and same(y, expected) and same(y, plain)
            assert same(torch.autograd.grad(y, leaves[wanted], dy)[0], every[wanted])


@pytest.mark.parametrize("name", ["dyt", "swish_beta"])
def test_numbers_may_change_between_the_passes(name: str) -> None:
    """Backward is that of the numbers that forward had."""
    each = operation(name)
    leaves = [part.requires_grad_() for part in each.tensors(torch.randn(4, C))]
    y = each.function(*leaves)
    (expected,) = torch.autograd.grad(y.sum(), leaves[0], retain_graph=True)
    with torch.no_grad():
        leaves[1].mul_(3)
    assert same(torch.autograd.grad(y.sum(), leaves[0])[0], expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck reads it, and PyTorch hides it itself
@pytest.mark.parametrize("name", ["recompute", "recompute_clamped"])
def test_ops_are_what_they_say(name: str) -> None:
    g, u = (halve.detach().requires_grad_() for halve in halves(torch.float32, 4, 60))
    forward_op(g, g.dtype, gate_module(name)._KEY, u, check=True)


@every_gate
def test_bytes_of_storages(name: str) -> None:
    """Halves of one tensor are saved as the views that they are; learned numbers once more, in float32."""
    whole, x = torch.randn(16, 2 * 1024).to(HALF).requires_grad_(), torch.randn(64, 128, C, requires_grad=True)
    with count_saved() as of_gate:
        gate(name)(*whole.chunk(2, -1))
    with count_saved() as learned:
        made("dyt")(x)
    assert [size for size in sizes(of_gate) if size > 16] == [4 * 16 * 1024]
    assert sizes(learned) == [3 * C * 4, x.nbytes]


def test_the_linear_layer_after_a_gate_recomputes_its_input_bit_for_bit() -> None:
    """g and u are outputs of projections, which save no output of their own: 32 bits an element, not 64."""
    g, u = (halve.contiguous() for halve in halves(HALF, 64, 1024))
    down, dy, results = nn.Linear(1024, 8, bias=False, dtype=HALF), torch.randn(64, 8).to(HALF), []
    for function, context, bits in ((FITS["recompute"][1], nullcontext(), 64), (gate("recompute"), saving(), 32)):
        leaves = [each.detach().requires_grad_() for each in (g, u)]
        with count_saved() as saved, context:
            y = down(function(*leaves))
        assert 8 * (sum(sizes(saved)) - down.weight.nbytes) / g.numel() == bits
        results.append([y, *torch.autograd.grad(y, [down.weight, *leaves], dy)])
    assert all(map(same, *results))


def test_parameters_are_named_and_start_as_declared() -> None:
    dyt = made("dyt", dim=1)
    shapes = {name: tuple(each.shape) for name, each in dyt.state_dict().items()}
    assert shapes == {"alpha": (1,), "gamma": (C,), "beta": (C,)}
    assert repr(dyt) == "OwnDyt(6, dim=1)"
    assert [float(parameter[0].detach()) for parameter in dyt.parameters()] == [0.5, 1.0, 0.0]
    with torch.no_grad():
        dyt.alpha += 1
    dyt.reset_parameters()
    assert float(dyt.alpha.detach()) == 0.5
    with torch.no_grad():  # of a device that has no autocast
        assert made("dyt", device="meta")(torch.empty(3, C, device="meta")).shape == (3, C)
    half = made("dyt", dtype=HALF)
    half(torch.randn(3, C, dtype=HALF)).sum().backward()
    assert {parameter.dtype for parameter in half.parameters()} == {HALF} == {half.gamma.grad.dtype}


def test_no_name_of_modules_is_free() -> None:
    """A learned parameter cannot hide what a module has, nor the module's own."""
    # PyTorch's names from a process of their own: other libraries, once imported, give nn.Module more
    own = {*dir(made("dyt"))} - {*dir(nn.Module())} - {"alpha", "gamma", "beta"}
    known = python("import torch; print(*dir(torch.nn.Module()))").split()
    assert {name for name in (*own, *known) if not name.startswith("_")} <= USED


@pytest.mark.parametrize("name", ["dyt", "swish_beta"])
def test_modules_are_their_functions_copied_and_pickled(name: str) -> None:
    each, x = made(name), torch.randn(2, C)
    for other in (copy.deepcopy(each), pickle.loads(pickle.dumps(each))):
        assert torch.equal(each(x), other(x)) and torch.equal(each(x), call(name, x, [*each.parameters()]))
    g, u = halves(torch.float32, 3, 20)
    assert same(gate_module("recompute").OwnRecompute()(g, u), gate("recompute")(g, u))


def test_prelu_is_pytorch_s() -> None:
    """With its parameter's name and, in images, its channels; all but the sum of the weight's gradient exactly."""
    baseline, each = nn.PReLU(C), made("prelu_channel", dim=1)
    each.load_state_dict(baseline.state_dict())
    x = torch.randn(4, C, 9, 9, requires_grad=True)
    dy = torch.randn(x.shape)
    expected, actual = (torch.autograd.grad(kind(x), [x, kind.weight], dy) for kind in (baseline, each))
    assert same(baseline(x), each(x)) and same(expected[0], actual[0])
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=1e-5)


ONES = torch.ones(2)
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: gate("recompute")(ONES.long(), ONES), TypeError, "expected g to be a tensor of float16"),
    (lambda: gate("recompute")(ONES, None), TypeError, "expected u to be a tensor of float16, .*got NoneType"),
    (lambda: gate("recompute")(ONES, ONES.half()), TypeError, "expected g and u of one dtype and device, got"),
    (lambda: gate("recompute")(ONES, ONES.to("meta")), TypeError, ".*of one dtype and device"),
    (lambda: gate("recompute")(torch.ones(2, 3), torch.ones(3)), ValueError, "expected g and u of one shape"),
    (lambda: made("dyt")(torch.zeros(())), ValueError, r"expected a tensor with a dimension -1, got \(\)"),
    (lambda: type(made("dyt"))(), TypeError, "expected channels, the size of gamma and beta"),
    (lambda: made("dyt", 0), ValueError, "channels: expected a positive number, got 0"),
    (lambda: type(made("xielu"))(4), TypeError, "expected no channels, as it has one of each number"),
    (lambda: made("dyt", 4)(torch.randn(2, 5)), ValueError, r"gamma: expected 1 element or 5, the channels of"),
    (lambda: made("dyt", 4)(torch.ones(2, 4).int()), TypeError, "expected a tensor of float16, bfloat16, float32"),
]


@pytest.mark.parametrize(("act", "kind", "message"), REFUSED)
def test_refused(act: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=rf"^own_\w+: {message}") as refused:
        act()
    assert "\n" not in str(refused.value)
