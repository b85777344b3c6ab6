"""What every kind of activation promises under transforms: compilers, torch.func, checkpoints, opcheck."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fitact.runtime.kernels.ops import NUMBER
from fitact.runtime.measure.saved import count_saved
from tests.support.generated import (
    CHANGES,
    EACH_DTYPE,
    LAYOUTS,
    Generated,
    backward_op,
    forward_op,
    run,
    same,
    sizes,
)
from tests.support.kinds import QUICK, USUAL, each_kind, every_kind, kinds
from tests.support.rows import full

BACKENDS = [None, "eager", "aot_eager"]


def compiled(function: Callable, backend: str | None, **options: Any) -> Callable:
    torch._dynamo.reset()
    return function if backend is None else torch.compile(function, fullgraph=True, backend=backend, **options)


# backend, layout of the input, where autocast is entered
WAYS = [
    ("aot_eager", "contiguous", ""),
    ("aot_eager", "transposed", ""),
    ("aot_eager", "channels_last", "outside"),
    ("aot_eager", "transposed", "inside"),
    ("eager", "transposed", ""),
]


@every_kind
@pytest.mark.parametrize(("backend", "layout", "autocast"), WAYS)
def test_compiled(one: Generated, backend: str, layout: str, autocast: str) -> None:
    """In one graph, values, gradients and saved bytes are those of eager code."""
    f = one.function

    def casting(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast == "inside"):
            return f(x)

    function = compiled(casting if autocast == "inside" else f, backend)
    x = LAYOUTS[layout]().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast == "outside"), count_saved() as saved:
        y = function(x)
    assert same(y, one.baseline(x.detach()).to(torch.bfloat16 if autocast and one.saves_output else torch.float32))
    assert sizes(saved) == one.saved(y)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert dx.dtype == torch.float32
    one.check_gradient(x, y, dy, dx)
    if not autocast:
        assert same(dx, run(f, x, dy)[1])


BUDGETS = full(product(QUICK, (1.0, 0.5, 0.0)), [("gelu_fewbit3", 1.0)])


@pytest.mark.parametrize(("one", "budget"), BUDGETS, indirect=["one"])
def test_compile_with_the_default_backend(one: Generated, budget: float) -> None:
    """Between two operations that Inductor would like to fuse and recompute: gradients as without it."""

    function = one.function

    def f(x: torch.Tensor) -> torch.Tensor:
        return function(x * 2).sin() + 1

    x = torch.randn(64, 1024, requires_grad=True)
    with torch._functorch.config.patch(activation_memory_budget=budget), count_saved() as saved:
        y = compiled(f, "inductor")(x)
    torch.testing.assert_close(y, f(x))
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, torch.autograd.grad(f(x).sum(), x)[0])
    if budget == 1.0:  # and the input of sin, which may be the output that is saved
        assert set(sizes(saved)) == {x.numel() * 4, *one.saved(y)}


ORDERED = product(USUAL, ("contiguous", "transposed", "channels_last"))
ORDERS = full(ORDERED, lambda row: row[1] == "contiguous" or row[0] in QUICK)


@pytest.mark.parametrize(("one", "layout"), ORDERS, indirect=["one"])
def test_compile_dynamic_recompiles_once(one: Generated, layout: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(one.function, fullgraph=True, backend=counter)
    for n in (100, 8192, 9000, 7) if layout == "contiguous" else (8, 9, 30):
        x = torch.randn(n) if layout == "contiguous" else torch.randn(2, n, 4, 5)
        x = x.transpose(1, 2) if layout == "transposed" else x
        x = x.to(memory_format=torch.channels_last) if layout == "channels_last" else x
        y = function(x.requires_grad_())
        y.sum().backward()
        torch.testing.assert_close(y, one.baseline(x))
        one.check_gradient(x, y, torch.ones_like(y), x.grad)
    assert counter.frame_count <= 2


@each_kind
def test_compiled_code_asks_for_gradients_too(one: Generated) -> None:
    for needed in (False, True):
        torch._dynamo.reset()
        graphs = EagerAndRecordGraphs()
        function = torch.compile(one.function, fullgraph=True, backend=graphs)
        for some in (needed, not needed):
            x = torch.randn(30, requires_grad=some)
            assert function(x).requires_grad == some
            assert ("fitact.forward" in graphs.graphs[-1].code) == some
            assert "functorch" not in graphs.graphs[-1].code
    f, x = one.function, torch.randn(30, 10)
    changing = compiled(lambda t: f(t).mul_(2), "aot_eager")
    assert same(changing(x), 2 * one.baseline(x)), "without a gradient the output may change"
    with torch.no_grad():
        assert same(changing(x.clone().requires_grad_()), 2 * one.baseline(x))


@kinds("gelu_inverted1")
@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_a_change_inside_what_is_compiled(one: Generated, backend: str, change: str, layout: str) -> None:
    """PyTorch's error, in backward or already in the compiler; where codes are all that is saved, the gradient."""
    f = one.function
    function = compiled(lambda t: CHANGES[change](f(t)), backend)
    x = LAYOUTS[layout]().requires_grad_()
    if one.saves_output:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            function(x).sum().backward()
        return
    y = one.baseline(x.detach()).requires_grad_()
    (dy,) = torch.autograd.grad(CHANGES[change](y * 1).sum(), y)
    (dx,) = torch.autograd.grad(function(x).sum(), x)
    one.check_gradient(x, y, dy, dx)


@kinds(*QUICK, "own_inverted")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # its own, which PyTorch hides itself
@pytest.mark.parametrize("shape", [(), (0,), (4, 2500), pytest.param((8192,), marks=pytest.mark.full)], ids=str)
@EACH_DTYPE
def test_opcheck(one: Generated, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, key = torch.randn(shape).to(dtype), one.key
    for out in {dtype, torch.bfloat16} if one.saves_output and dtype != torch.float64 else {dtype}:
        turned = x, None, 1, 0.0, list(reversed(range(x.dim()))), NUMBER[out], key
        torch.library.opcheck(torch.ops.fitact.forward.default, turned)
        y, codes = forward_op(x, out, key, check=True)
        assert (y.dtype, y.shape) == (out, x.shape)
        assert codes.numel() == sum(one.saved(y)) - (y.nbytes if one.saves_output else 0)
        saved = y if one.saves_output else None
        backward_op(torch.ones_like(y), saved, codes, dtype, key, check=True)


def test_no_schema_ends_with_an_optional_argument() -> None:
    """Inductor's cache on disk leaves a trailing None out of its keys: it would find graphs of an older schema."""
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("fitact::")]
    assert len(schemas) >= 2
    for schema in schemas:
        last = schema.arguments[-1]
        assert not last.has_default_value() and last.type.kind() != "OptionalType", schema


@every_kind
def test_torch_func(one: Generated) -> None:
    f, x = one.function, torch.randn(5, 70) * 2
    derivative = run(f, x)[1]
    grad, vmap = torch.func.grad(lambda t: f(t).sum()), torch.func.vmap
    # a formula that PyTorch lacks rounds differently with and without vectors
    rtol, atol = (0.0, 0.0) if one.own is None else (1e-6, 1e-6)
    for found, expected in (
        (grad(x), derivative),
        (vmap(grad)(x), derivative),
        (vmap(grad, in_dims=1)(x), derivative.t()),
        (vmap(vmap(grad))(x), derivative),
        (vmap(f)(x), torch.stack([f(row) for row in x])),
        (vmap(f, in_dims=1, out_dims=1)(x), torch.stack([f(column) for column in x.t()], 1)),
        (torch.func.jacrev(f)(x[0]), torch.diag(derivative[0])),
        (vmap(torch.func.jacrev(f))(x), torch.diag_embed(derivative)),
    ):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    y, pullback = torch.func.vjp(f, x)
    assert same(y, one.baseline(x))
    assert same(pullback(torch.ones_like(y))[0], derivative)
    for empty in (torch.randn(0, 7), torch.randn(7, 0)):
        assert vmap(f)(empty).shape == empty.shape
    for n in (1, 8192, 2 * 8192 + 77):
        x = torch.randn(3, n)
        squares = vmap(torch.func.grad(lambda t: (f(t) ** 2).sum()))(x)
        torch.testing.assert_close(squares, run(f, x, 2 * one.baseline(x))[1], rtol=1e-4, atol=1e-6)


@every_kind
def test_torch_func_where_the_input_does_not_tell(one: Generated) -> None:
    """A gradient at an outer level, of a tensor that requires none at its own."""
    f, x = one.function, torch.randn(5, 70)
    derivatives = run(f, x)[1]
    outer = torch.func.grad(lambda t: torch.func.vmap(f)(t).sum())
    assert same(outer(x), derivatives)
    assert same(torch.func.vmap(outer)(x[:, None])[:, 0], derivatives)
    leaf = x.clone().requires_grad_()
    torch.func.vmap(f)(leaf).sum().backward()
    assert same(leaf.grad, derivatives)
    inner = torch.func.grad(lambda t: (f(x) * t).sum())
    assert same(inner(x), f(x))


@every_kind
def test_vmap_under_autocast(one: Generated) -> None:
    x, f = torch.randn(4, 9), one.function
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.func.vmap(f)(x)
        derivative = torch.func.vmap(torch.func.grad(lambda t: f(t).float().sum()))(x)
    assert same(y, one.baseline(x).to(torch.bfloat16 if one.saves_output else torch.float32))
    assert derivative.dtype == torch.float32
    one.check_gradient(x, y, torch.ones_like(y), derivative)


def penalty(x: torch.Tensor, function: Callable) -> None:
    y = function(x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.sum() + dx.square().sum()).backward()


def power(x: torch.Tensor, function: Callable) -> None:
    (dx,) = torch.autograd.grad(function(x).pow(2).sum(), x, create_graph=True)
    torch.autograd.grad(dx.sum(), x)


def of_dy(x: torch.Tensor, function: Callable) -> None:
    dy = torch.randn_like(x, requires_grad=True)
    (dx,) = torch.autograd.grad(function(x), x, dy, create_graph=True)
    torch.autograd.grad(dx.sum(), dy)


def twice(x: torch.Tensor, function: Callable) -> None:
    torch.autograd.grad(function(x).sum(), x, create_graph=True)[0].sum().backward()


@each_kind
@pytest.mark.parametrize("derive", [penalty, power, of_dy, twice])
@pytest.mark.parametrize("backend", BACKENDS)
def test_double_backward_raises(
    one: Generated, derive: Callable, backend: str | None, request: pytest.FixtureRequest
) -> None:
    """The activation's own error, or that of a compiler that has none."""
    if backend == "eager" and not one.saves_output and derive in (penalty, twice):
        reason = "in a graph that is not compiled further nothing ties the gradient of codes to x: 0, silently"
        request.applymarker(pytest.mark.xfail(reason=reason))
    if backend == "aot_eager" and torch.__version__ < (2, 13) and derive in (penalty, twice):
        reason = "before PyTorch 2.13 compiled code lets second derivatives pass as 0, also those of torch.tanh"
        request.applymarker(pytest.mark.xfail(reason=reason))
    own = f"{one.name}: a second derivative was requested"
    message = "does not currently support double backward" if backend == "aot_eager" else own
    with pytest.raises(RuntimeError, match=message):
        derive(torch.randn(3, requires_grad=True), compiled(one.function, backend))


@every_kind
@pytest.mark.parametrize(
    "derive",
    [
        lambda f, x: torch.func.grad(torch.func.grad(lambda t: f(t).sum()))(x[0]),
        lambda f, x: torch.func.jacrev(torch.func.jacrev(f))(x),
        lambda f, x: torch.autograd.functional.hessian(lambda t: f(t).sum(), x),
    ],
    ids=["func.grad", "jacrev", "hessian"],
)
def test_second_derivatives_by_transforms_raise(one: Generated, derive: Callable) -> None:
    with pytest.raises(RuntimeError, match=f"{one.name}: a second derivative was requested"):
        derive(one.function, torch.randn(3, requires_grad=True))
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(one.function, (torch.randn(3),), (torch.randn(3),))


def selective(f: Callable, x: torch.Tensor) -> torch.Tensor:
    """What is saved of the activation is saved, and the rest recomputed."""

    def keep(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        ours = op == torch.ops.fitact.forward.default
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, keep)
    y: torch.Tensor = checkpoint(f, x, use_reentrant=False, context_fn=contexts)
    return y


def on_cpu(f: Callable, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        y: torch.Tensor = f(x)
    return y


CHECKPOINTS: dict[str, Callable] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "selective": selective,
    "on the CPU": on_cpu,
}


@every_kind
@pytest.mark.parametrize("way", CHECKPOINTS)
@pytest.mark.parametrize("autocast", [True, False])
def test_checkpoints(one: Generated, way: str, autocast: bool) -> None:
    def f(t: torch.Tensor) -> torch.Tensor:
        return one.function(t.sin()).cos()

    x = torch.randn(5000, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = CHECKPOINTS[way](f, x)
        expected = run(f, x)[1]
    assert y.dtype == (torch.bfloat16 if autocast and one.saves_output else torch.float32)
    y.sum().backward()
    assert same(x.grad, expected)
