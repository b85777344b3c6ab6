"""Gates at run time: values, gradients, bytes, and all that PyTorch does with an operation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fitact.fitter.records.gate import CodedGateFit
from fitact.fitter.records.kinds import AnyGateFit
from fitact.runtime.memory.saved import count_saved
from fitact.runtime.saving import saving
from tests.support.gates import coded, rebuilt
from tests.support.generated import EACH_DTYPE, LAYOUTS, load, same, sizes

HALF = torch.bfloat16


def clamped(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    def wide(x: torch.Tensor) -> torch.Tensor:
        return x if x.dtype == torch.float64 else x.float()

    low = wide(g).clamp(max=7)
    a = (low * torch.sigmoid(1.702 * low)).to(g.dtype)
    return a * (wide(u).clamp(-7, 7) + 1).to(u.dtype)


Stock = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
FITS: dict[str, tuple[AnyGateFit, Stock]] = {
    "rebuild": (rebuilt("swiglu", "own_rebuild"), lambda g, u: F.silu(g) * u),
    "rebuild_gelu": (rebuilt("geglu", "own_gelu"), lambda g, u: F.gelu(g) * u),
    "rebuild_both": (rebuilt("tanh(g)*silu(u)", "own_both"), lambda g, u: torch.tanh(g) * F.silu(u)),
    "rebuild_clamped": (rebuilt("swiglu_clamped", "own_clamped"), clamped),
    "coded8": (coded("swiglu", "own_coded8", 8), lambda g, u: F.silu(g) * u),
    "coded8_8": (coded("swiglu", "own_coded8_8", 8, 8), lambda g, u: F.silu(g) * u),
    "coded6_8": (coded("geglu", "own_coded6_8", 6, 8), lambda g, u: F.gelu(g) * u),
    "coded3_6": (coded("swiglu_clamped", "own_coded3_6", 3, 6), clamped),
}
EXACT = ("rebuild", "rebuild_gelu", "rebuild_both")
CODED = ("coded8", "coded8_8", "coded6_8", "coded3_6")
every = pytest.mark.parametrize("name", FITS)
exact = pytest.mark.parametrize("name", EXACT)
by_codes = pytest.mark.parametrize("name", CODED)


@cache
def module(name: str) -> ModuleType:
    return load(FITS[name][0])


def gate(name: str) -> Stock:
    function: Stock = getattr(module(name), FITS[name][0].name)
    return function


def halves(dtype: torch.dtype, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of one tensor, as a fused projection gives them."""
    whole = (3 * torch.randn(*shape[:-1], 2 * shape[-1])).to(dtype)
    g, u = whole.chunk(2, -1)
    return g, u


def special(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Every pair of some numbers."""
    largest = torch.finfo(dtype).max
    numbers = [0.0, -0.0, 1.0, -1.0, 0.3, -7.0, 7.0, 30.0, -90.0, 1e-30, largest, -largest]
    numbers += [float("inf"), float("-inf"), float("nan")]
    x = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    return x.repeat(len(x)), x.repeat_interleave(len(x))


def gradients(function: Stock, g: torch.Tensor, u: torch.Tensor, dh: torch.Tensor) -> tuple[torch.Tensor, ...]:
    g, u = g.detach().requires_grad_(), u.detach().requires_grad_()
    return torch.autograd.grad(function(g, u), (g, u), dh)


# ---------------------------------------------------------------------------------------------- values, gradients


@every
@EACH_DTYPE
def test_values_are_pytorch_s(name: str, dtype: torch.dtype) -> None:
    function, stock = gate(name), FITS[name][1]
    for g, u in (halves(dtype, 5, 1100), special(dtype), halves(dtype, 0, 3)):
        expected = stock(g, u)
        kept = function(g.detach().requires_grad_(), u)
        assert kept.requires_grad and not kept.is_leaf
        for h in (function(g, u), kept):
            assert h.dtype == dtype
            assert same(h, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["rebuild", "coded8_8", "coded3_6"])
def test_layouts(name: str, layout: str) -> None:
    function, stock = gate(name), FITS[name][1]
    g = LAYOUTS[layout]()
    for u in (LAYOUTS[layout](), torch.randn(g.shape)):
        expected = stock(g, u)
        h = function(g.detach().requires_grad_(), u)
        assert same(h, expected)
        assert h.stride() == function(g, u).stride() == torch.empty_like(g).stride()
        dh = torch.randn(g.shape)
        one = gradients(function, g, u, dh)
        other = gradients(function, g.contiguous(), u.contiguous(), dh)
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@exact
@EACH_DTYPE
def test_gradients_are_pytorch_s_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    function, stock = gate(name), FITS[name][1]
    for g, u in (halves(dtype, 7, 300), special(dtype), halves(dtype, 0, 3), halves(dtype, 9001)):
        dh = torch.randn(g.shape).to(dtype)
        for found, expected in zip(gradients(function, g, u, dh), gradients(stock, g, u, dh), strict=True):
            assert same(found, expected)


def test_composed_gradients_are_near() -> None:
    """Of a formula without a function in PyTorch, rounded once."""
    g, u = halves(torch.float64, 50, 40)
    dh = torch.randn(g.shape, dtype=torch.float64)
    found, expected = gradients(gate("rebuild_clamped"), g, u, dh), gradients(clamped, g, u, dh)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def looked_up(fit: CodedGateFit, x: torch.Tensor, which: str) -> tuple[np.ndarray, np.ndarray]:
    """Value and derivative of a factor as backward has them, in float64; the codes by brute force."""
    code = fit.code_g if which == "g" else fit.code_u
    at = x.detach().double().numpy()
    if code is None:
        assert fit.activation.b.expression == "x"
        return at, np.ones_like(at)
    codes = sum((at > border).astype(int) for border in code.borders)
    return np.asarray(code.values)[codes], np.asarray(code.derivatives)[codes]


@by_codes
@EACH_DTYPE
def test_gradients_are_those_of_the_tables(name: str, dtype: torch.dtype) -> None:
    fit = FITS[name][0]
    assert isinstance(fit, CodedGateFit)
    eps = torch.finfo(dtype).eps
    for g, u in (halves(dtype, 3, 300), halves(dtype, 9001), halves(dtype, 20_000)):
        dh = torch.randn(g.shape).to(dtype)
        (a, da), (b, db) = looked_up(fit, g, "g"), looked_up(fit, u, "u")
        expected = (dh.double().numpy() * b * da, dh.double().numpy() * a * db)
        for one, other in zip(gradients(gate(name), g, u, dh), expected, strict=True):
            assert one.dtype == dtype
            tiny = torch.finfo(dtype).tiny * 4 if dtype != torch.float16 else 1e-6
            np.testing.assert_allclose(one.double().numpy(), other, rtol=3 * max(eps, 1e-7), atol=tiny)


@by_codes
def test_nan_and_infinities_have_codes(name: str) -> None:
    """NaN has the first code, as every kind has it."""
    fit = FITS[name][0]
    assert isinstance(fit, CodedGateFit)
    g = torch.tensor([float("nan"), float("inf"), float("-inf")])
    u = torch.ones(3)
    dg, _ = gradients(gate(name), g, u, torch.ones(3))
    _, derivatives = looked_up(fit, g, "g")
    b, _ = looked_up(fit, u, "u")
    assert derivatives.tolist() == [fit.code_g.derivatives[i] for i in (0, -1, 0)]
    np.testing.assert_allclose(dg.numpy(), derivatives * b, rtol=1e-6)


@every
def test_only_what_is_wanted(name: str) -> None:
    function = gate(name)
    g, u = halves(torch.float32, 4, 50)
    dh = torch.randn(4, 50)
    both = gradients(function, g, u, dh)
    for wanted in (0, 1):
        leaves = [one.detach().requires_grad_(i == wanted) for i, one in enumerate((g, u))]
        (found,) = torch.autograd.grad(function(*leaves), leaves[wanted], dh)
        assert same(found, both[wanted])


# ------------------------------------------------------------------------------------------------ what is kept


def bits(name: str, elements: int) -> list[int]:
    """The bytes of each storage of a gate whose argument halves are of bfloat16."""
    fit = FITS[name][0]
    if not isinstance(fit, CodedGateFit):
        return [4 * elements]  # one storage, of which both are views
    kept = []
    for code, whole in ((fit.code_g, 0), (fit.code_u, 2 * elements)):
        tiles = -(-elements // 8192)
        size = whole if code is None else elements if code.bits == 8 else tiles * 1024 * code.bits
        kept.append(size)
    return sorted(kept)


@every
def test_bytes_of_storages(name: str) -> None:
    """Halves of one tensor are kept as the views that they are, but beside codes of one, a copy of the other."""
    whole = torch.randn(16, 2 * 1024).to(HALF).requires_grad_()
    with count_saved() as saved:
        g, u = whole.chunk(2, -1)
        gate(name)(g, u).sum()
    expected = bits(name, 16 * 1024)
    assert [size for size in sizes(saved) if size > 16] == expected


class Part(torch.nn.Module):
    """The part of an MLP between its projections, and the last of these, in a context if its error is given."""

    def __init__(self, function: Stock, error: str | None) -> None:
        super().__init__()
        self.function, self.error = function, error
        self.down = torch.nn.Linear(1024, 8, bias=False, dtype=HALF)

    def forward(self, g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        with nullcontext() if self.error is None else saving(self.error):
            y: torch.Tensor = self.down(self.function(g, u))
        return y


@pytest.mark.parametrize(
    ("name", "error", "expected"),
    [
        (None, None, 64),
        ("rebuild", "exact", 32),
        ("coded8", "rounding", 24),
        ("coded8_8", "rounding", 16),
        ("coded6_8", "rounding", 14),
        ("coded8_8", "exact", 32),  # which keeps the output beside the codes
    ],
)
def test_bits_an_element_of_an_mlp(name: str | None, error: str | None, expected: int) -> None:
    """g and u are outputs of projections, which keep no output of their own."""
    torch.manual_seed(0)
    g, u = (torch.randn(32, 1024).to(HALF).requires_grad_() for _ in range(2))
    stock = FITS[name or "rebuild"][1]
    part = Part(stock if name is None else gate(name), error)
    with count_saved() as saved:
        y = part(g, u)
    weight = part.down.weight.untyped_storage().nbytes()
    assert 8 * (sum(sizes(saved)) - weight) / g.numel() == expected
    y.sum().backward()
    h = stock(g.detach(), u.detach())
    reference = h.sum(0, dtype=torch.float32).expand(8, -1)
    grad = part.down.weight.grad
    assert grad is not None
    off = (grad.float() - reference).norm() / reference.norm()
    assert off < (0.1 if error == "rounding" else 0.01)


def test_the_output_is_recomputed_bit_for_bit() -> None:
    g, u = halves(HALF, 64, 1024)
    found = []
    for function, error in ((FITS["rebuild"][1], None), (gate("rebuild"), "exact")):
        torch.manual_seed(1)
        part = Part(function, error)
        leaves = [one.detach().requires_grad_() for one in (g, u)]
        y = part(*leaves)
        y.backward(torch.randn(y.shape).to(HALF))
        found.append([y, part.down.weight.grad, *(leaf.grad for leaf in leaves)])
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None
        assert same(one, other)


# --------------------------------------------------------------------------------------- what PyTorch does with it


@pytest.mark.parametrize("name", ["rebuild", "coded8", "coded3_6"])
def test_autocast(name: str) -> None:
    function = gate(name)
    g, u = halves(torch.float32, 4, 300)
    for dtype in (torch.float32, HALF):
        a, b = (one.to(dtype).detach().requires_grad_() for one in (g, u))
        with torch.autocast("cpu", torch.bfloat16):
            h = function(a, b)
        assert h.dtype == dtype
        assert same(h, function(a, b))
        one, other = (
            torch.autograd.grad(h, (a, b), torch.ones_like(h)),
            gradients(function, a, b, torch.ones_like(h)),
        )
        assert all(map(same, one, other))


@pytest.mark.parametrize("name", ["rebuild", "coded8"])
def test_no_grad_keeps_nothing(name: str) -> None:
    g, u = (one.requires_grad_() for one in halves(torch.float32, 4, 300))
    with torch.no_grad(), count_saved() as saved:
        h = gate(name)(g, u)
    assert not h.requires_grad and not saved.storages
    with torch.inference_mode():
        assert same(gate(name)(g, u), h)


@pytest.mark.parametrize("name", ["rebuild", "coded8_8", "coded6_8"])
def test_checkpoint(name: str) -> None:
    g, u = halves(torch.float32, 4, 300)
    dh = torch.randn(4, 300)
    function = gate(name)
    found = gradients(lambda g, u: checkpoint(function, g, u, use_reentrant=False), g, u, dh)
    assert all(map(same, found, gradients(function, g, u, dh)))


@pytest.mark.parametrize("name", ["rebuild", "coded8", "coded6_8"])
def test_vmap(name: str) -> None:
    function = gate(name)
    g, u = torch.randn(3, 5, 64), torch.randn(5, 3, 64)
    expected = torch.stack([function(g[i], u[:, i]) for i in range(3)])
    assert same(torch.func.vmap(function, in_dims=(0, 1))(g, u), expected)
    assert same(torch.func.vmap(function, in_dims=(0, None))(g, u[:, 0]), function(g, u[:, 0].expand(3, 5, 64)))

    def loss(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return (function(g, u) * g.detach().cos()).sum()

    found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, 1))(g, u)
    for i in range(3):
        for one, other in zip(found, gradients(function, g[i], u[:, i], g[i].cos()), strict=True):
            assert same(one[i], other)


@pytest.mark.parametrize("name", ["rebuild", "coded8", "coded6_8"])
def test_second_derivatives_raise(name: str) -> None:
    g, u = (one.detach().requires_grad_() for one in halves(torch.float32, 4, 30))
    dg, _ = torch.autograd.grad(gate(name)(g, u).sum(), (g, u), create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative was requested"):
        dg.sum().backward()


@pytest.mark.parametrize("name", ["rebuild", "coded8_8", "coded3_6"])
def test_compiled(name: str) -> None:
    """In one graph, forward and backward, with the same numbers."""
    torch._dynamo.reset()
    function = gate(name)

    def part(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return function(g * 2, u)

    compiled = torch.compile(part, fullgraph=True, backend="aot_eager")
    for shape in ((4, 300), (5, 200)):
        g, u = halves(torch.float32, *shape)
        dh = torch.randn(shape)
        found, expected = gradients(compiled, g, u, dh), gradients(part, g, u, dh)
        assert all(map(same, found, expected))
        assert same(compiled(g, u), part(g, u))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck reads it, and PyTorch hides it itself
def test_ops_are_what_they_say() -> None:
    """Schema, fake tensors, autograd registration, and AOT dispatch, as PyTorch checks them."""
    for name in ("rebuild", "coded8", "coded6_8"):
        key = module(name)._KEY
        g, u = (one.detach().requires_grad_() for one in halves(torch.float32, 4, 60))
        torch.library.opcheck(torch.ops.fitact.gate_forward, (g, u, key))


@pytest.mark.parametrize(
    ("g", "u", "kind", "message"),
    [
        (torch.ones(2, dtype=torch.int64), torch.ones(2), TypeError, "expected g to be a tensor of float16"),
        (torch.ones(2), None, TypeError, "expected u to be a tensor of float16, .*got NoneType"),
        (
            torch.ones(2),
            torch.ones(2).half(),
            TypeError,
            "expected g and u of one dtype and device, got torch.float32",
        ),
        (torch.ones(2), torch.ones(2, device="meta"), TypeError, ".*of one dtype and device"),
        (torch.ones(2, 3), torch.ones(3), ValueError, r"expected g and u of one shape, got \(2, 3\) and \(3,\)"),
    ],
)
def test_refused(g: Any, u: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^own_coded8: {message}") as refused:
        gate("coded8")(g, u)
    assert "\n" not in str(refused.value)


def test_the_module_is_the_function() -> None:
    g, u = halves(torch.float32, 3, 20)
    assert same(module("coded8").OwnCoded8()(g, u), gate("coded8")(g, u))
