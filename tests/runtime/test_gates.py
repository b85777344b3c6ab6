"""Gates at run time: values, gradients, bytes, and all that PyTorch does with an operation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fitact.fitter.records.fit import GateFit
from fitact.runtime.measure.saved import count_saved
from fitact.runtime.saving import saving
from tests.support.gates import rebuilt
from tests.support.generated import EACH_DTYPE, LAYOUTS, forward_op, load, same, sizes

HALF = torch.bfloat16


def clamped(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    def wide(x: torch.Tensor) -> torch.Tensor:
        return x if x.dtype == torch.float64 else x.float()

    low = wide(g).clamp(max=7)
    a = (low * torch.sigmoid(1.702 * low)).to(g.dtype)
    return a * (wide(u).clamp(-7, 7) + 1).to(u.dtype)


Baseline = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
FITS: dict[str, tuple[GateFit, Baseline]] = {
    "rebuild": (rebuilt("swiglu", "own_rebuild"), lambda g, u: F.silu(g) * u),
    "rebuild_gelu": (rebuilt("geglu", "own_gelu"), lambda g, u: F.gelu(g) * u),
    "rebuild_both": (rebuilt("tanh(g)*silu(u)", "own_both"), lambda g, u: torch.tanh(g) * F.silu(u)),
    "rebuild_clamped": (rebuilt("swiglu_clamped", "own_clamped"), clamped),
}
EXACT = ("rebuild", "rebuild_gelu", "rebuild_both")
every = pytest.mark.parametrize("name", FITS)
of_both = pytest.mark.parametrize("name", ["rebuild", "rebuild_clamped"])  # PyTorch's functions, and not
exact = pytest.mark.parametrize("name", EXACT)


@cache
def module(name: str) -> ModuleType:
    return load(FITS[name][0])


def gate(name: str) -> Baseline:
    function: Baseline = getattr(module(name), FITS[name][0].name)
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


def gradients(function: Baseline, g: torch.Tensor, u: torch.Tensor, dh: torch.Tensor) -> tuple[torch.Tensor, ...]:
    g, u = g.detach().requires_grad_(), u.detach().requires_grad_()
    return torch.autograd.grad(function(g, u), (g, u), dh)


# ---------------------------------------------------------------------------------------------- values, gradients


@every
@EACH_DTYPE
def test_values_are_pytorch_s(name: str, dtype: torch.dtype) -> None:
    function, baseline = gate(name), FITS[name][1]
    for g, u in (halves(dtype, 5, 1100), special(dtype), halves(dtype, 0, 3)):
        expected = baseline(g, u)
        kept = function(g.detach().requires_grad_(), u)
        assert kept.requires_grad and not kept.is_leaf
        for h in (function(g, u), kept):
            assert h.dtype == dtype
            assert same(h, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@of_both
def test_layouts(name: str, layout: str) -> None:
    function, baseline = gate(name), FITS[name][1]
    g = LAYOUTS[layout]()
    for u in (LAYOUTS[layout](), torch.randn(g.shape)):
        expected = baseline(g, u)
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
    function, baseline = gate(name), FITS[name][1]
    for g, u in (halves(dtype, 7, 300), special(dtype), halves(dtype, 0, 3), halves(dtype, 9001)):
        dh = torch.randn(g.shape).to(dtype)
        for found, expected in zip(gradients(function, g, u, dh), gradients(baseline, g, u, dh), strict=True):
            assert same(found, expected)


def test_composed_gradients_are_near() -> None:
    """Of a formula without a function in PyTorch, rounded once."""
    g, u = halves(torch.float64, 50, 40)
    dh = torch.randn(g.shape, dtype=torch.float64)
    found, expected = gradients(gate("rebuild_clamped"), g, u, dh), gradients(clamped, g, u, dh)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


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


@every
def test_bytes_of_storages(name: str) -> None:
    """Halves of one tensor are kept as the views that they are."""
    whole = torch.randn(16, 2 * 1024).to(HALF).requires_grad_()
    with count_saved() as saved:
        g, u = whole.chunk(2, -1)
        gate(name)(g, u).sum()
    assert [size for size in sizes(saved) if size > 16] == [4 * 16 * 1024]


class Part(torch.nn.Module):
    """The part of an MLP between its projections, and the last of these, in a context if its error is given."""

    def __init__(self, function: Baseline, error: str | None) -> None:
        super().__init__()
        self.function, self.error = function, error
        self.down = torch.nn.Linear(1024, 8, bias=False, dtype=HALF)

    def forward(self, g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        with nullcontext() if self.error is None else saving(self.error):
            y: torch.Tensor = self.down(self.function(g, u))
        return y


@pytest.mark.parametrize(("error", "expected"), [(None, 64), ("exact", 32)])
def test_bits_an_element_of_an_mlp(error: str | None, expected: int) -> None:
    """g and u are outputs of projections, which keep no output of their own."""
    g, u = (torch.randn(32, 1024).to(HALF).requires_grad_() for _ in range(2))
    baseline = FITS["rebuild"][1]
    part = Part(baseline if error is None else gate("rebuild"), error)
    with count_saved() as saved:
        part(g, u)
    weight = part.down.weight.untyped_storage().nbytes()
    assert 8 * (sum(sizes(saved)) - weight) / g.numel() == expected


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


@of_both
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


@of_both
def test_no_grad_keeps_nothing(name: str) -> None:
    g, u = (one.requires_grad_() for one in halves(torch.float32, 4, 300))
    with torch.no_grad(), count_saved() as saved:
        h = gate(name)(g, u)
    assert not h.requires_grad and not saved.storages
    with torch.inference_mode():
        assert same(gate(name)(g, u), h)


@of_both
def test_checkpoint(name: str) -> None:
    g, u = halves(torch.float32, 4, 300)
    dh = torch.randn(4, 300)
    function = gate(name)
    found = gradients(lambda g, u: checkpoint(function, g, u, use_reentrant=False), g, u, dh)
    assert all(map(same, found, gradients(function, g, u, dh)))


@of_both
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


@of_both
def test_second_derivatives_raise(name: str) -> None:
    g, u = (one.detach().requires_grad_() for one in halves(torch.float32, 4, 30))
    dg, _ = torch.autograd.grad(gate(name)(g, u).sum(), (g, u), create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative was requested"):
        dg.sum().backward()


@of_both
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
    for name in ("rebuild", "rebuild_clamped"):
        key = module(name)._KEY
        g, u = (one.detach().requires_grad_() for one in halves(torch.float32, 4, 60))
        forward_op(g, g.dtype, key, u, check=True)


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
    with pytest.raises(kind, match=f"^own_rebuild: {message}") as refused:
        gate("rebuild")(g, u)
    assert "\n" not in str(refused.value)


def test_the_module_is_the_function() -> None:
    g, u = halves(torch.float32, 3, 20)
    assert same(module("rebuild").OwnRebuild()(g, u), gate("rebuild")(g, u))
