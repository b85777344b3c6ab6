"""What every kind of activation promises under transforms: compilers, torch.func, checkpoints, opcheck."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fitact.runtime.kernels.ops import NUMBER
from fitact.runtime.measure.saved import count_saved
from tests.support import generated
from tests.support.generated import CHANGES, DTYPES, LAYOUTS, Generated, run, same, sizes
from tests.support.kinds import NORMS, OPERATIONS, QUICK, USUAL, each_kind, every_kind, operation, passes
from tests.support.learned import CASES
from tests.support.rows import full, turning
from tests.support.saving import Operators

BACKENDS = ["eager", "aot_eager"]
each_operation = pytest.mark.parametrize("name", OPERATIONS)
# a formula that PyTorch lacks rounds differently with and without vectors
close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)


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


@pytest.mark.parametrize(("name", "variant"), sorted({*product(QUICK, WAYS), *turning(OPERATIONS, WAYS)}))
def test_compiled(name, variant):
    """In one graph, values, gradients, strides and saved bytes are those of eager code."""
    each, (backend, layout, autocast) = operation(name), variant

    def casting(*given):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return each.function(*given)

    function = casting if autocast == "inside" else each.function
    x = LAYOUTS[layout]()
    tensors, dy, calls = each.tensors(x), torch.randn(x.shape), (function, compiled(function, backend))
    (expected, before), (result, saved) = (passes(f, tensors, dy, autocast=autocast == "outside") for f in calls)
    assert all(map(same, result, expected)) and result[0].stride() == expected[0].stride()
    assert saved == before or name in CASES


BUDGETS = sorted({*product(QUICK, (1.0, 0.0)), *turning((*QUICK, *NORMS), (1.0, 0.5, 0.0))})


@pytest.mark.parametrize(("name", "budget"), full(BUDGETS, [("gelu_fewbit3", 1.0)]))
def test_compile_with_the_default_backend(name, budget):
    """Between two operations that Inductor would like to fuse and recompute: gradients as without it."""
    function, x = operation(name).function, torch.randn(64, 1024, requires_grad=True)

    def f(x):
        return function(x * 2).sin() + 1

    with torch._functorch.config.patch(activation_memory_budget=budget), count_saved() as saved:
        y = compiled(f, "inductor")(x)
    torch.testing.assert_close(y, f(x))
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, torch.autograd.grad(f(x).sum(), x)[0])
    if budget == 1.0:  # and the input of sin, which may be the output that is saved
        assert set(sizes(saved)) == {y.nbytes, *passes(function, [x])[1]}


ORDERS = ("contiguous", "transposed", "channels_last")


@pytest.mark.parametrize(("name", "layout"), sorted({*product(QUICK, ORDERS), *turning(OPERATIONS, ORDERS)}))
def test_compile_dynamic_recompiles_once(name, layout):
    torch._dynamo.reset()
    each, counter = operation(name), CompileCounterWithBackend("aot_eager")
    function = torch.compile(each.function, fullgraph=True, backend=counter)
    for n in (100, 1366, 1500, 7) if layout == "contiguous" else (8, 9, 30):
        x = torch.randn(n, 6) if layout == "contiguous" else torch.randn(2, n, 4, 5)
        x = x.transpose(1, 2) if layout == "transposed" else x
        x = x.to(memory_format=torch.channels_last) if layout == "channels_last" else x
        tensors = each.tensors(x)
        assert all(map(same, passes(function, tensors)[0], passes(each.function, tensors)[0]))
    assert counter.frame_count <= 2


@each_kind
def test_compiled_code_asks_for_gradients_too(case: Generated) -> None:
    for needed in (False, True):
        torch._dynamo.reset()
        graphs = EagerAndRecordGraphs()
        function = torch.compile(case.function, fullgraph=True, backend=graphs)
        for some in (needed, not needed):
            x = torch.randn(30, requires_grad=some)
            assert function(x).requires_grad == some
            assert ("fitact.forward" in graphs.graphs[-1].code) == some
            assert "functorch" not in graphs.graphs[-1].code
    f, x = case.function, torch.randn(30, 10)
    changing = compiled(lambda t: f(t).mul_(2), "aot_eager")
    assert same(changing(x), 2 * case.baseline(x)), "without a gradient the output may change"
    with torch.no_grad():
        assert same(changing(x.clone().requires_grad_()), 2 * case.baseline(x))


CHANGED = turning(USUAL, [layout for layout in LAYOUTS if layout != "empty"], CHANGES)
CHANGED = {(name, change, layout, None) for name, layout, change in CHANGED}
ALSO = {(*row, *way) for *row, way in turning(USUAL, CHANGES, [*product(("contiguous", "transposed"), BACKENDS)])}
CHANGED = full(sorted(CHANGED, key=str) + sorted(ALSO), lambda row: row[3] is None or row[0] == "gelu_inverted1")


@pytest.mark.parametrize(("case", "change", "layout", "backend"), CHANGED, indirect=["case"])
def test_a_change_of_the_output(case: Generated, change: str, layout: str, backend: str | None) -> None:
    """PyTorch's error, in backward or already in the compiler; where codes are all that is saved, the gradient."""
    f, x = case.function, LAYOUTS[layout]().requires_grad_()
    function = compiled(lambda t: CHANGES[change](f(t)), backend)
    if case.saves_output:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            function(x).sum().backward()
        return
    y, before = function(x), f(x).detach()
    assert same(y, CHANGES[change](before.clone()))
    leaf = before.requires_grad_()
    (dy,) = torch.autograd.grad(CHANGES[change](leaf * 1).sum(), leaf)
    (dx,) = torch.autograd.grad(y.sum(), x)
    case.check_gradient(x, before, dy, dx)


OPCHECKED = full(
    turning(((4, 2500), (), (0,), (8192,)), (*QUICK, "own_inverted"), DTYPES), lambda row: row[0] != (8192,)
)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # its own, which PyTorch hides itself
@pytest.mark.parametrize(("shape", "case", "dtype"), OPCHECKED, ids=str, indirect=["case"])
def test_opcheck(shape: tuple[int, ...], case: Generated, dtype: torch.dtype) -> None:
    x, key = torch.randn(shape).to(dtype), case.key
    for out in {dtype, torch.bfloat16} if case.saves_output and dtype != torch.float64 else {dtype}:
        turned = x, None, 1, 0.0, list(reversed(range(x.dim()))), NUMBER[out], key
        torch.library.opcheck(torch.ops.fitact.forward.default, turned)
        y, codes = generated.forward_op(x, out, key, check=True)
        assert (y.dtype, y.shape) == (out, x.shape)
        assert codes.numel() == sum(case.saved(y)) - (y.nbytes if case.saves_output else 0)
        saved = y if case.saves_output else None
        generated.backward_op(torch.ones_like(y), saved, codes, dtype, key, check=True)


def test_no_schema_ends_with_an_optional_argument() -> None:
    """Inductor's cache on disk leaves a trailing None out of its keys: it would find graphs of an older schema."""
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("fitact::")]
    assert len(schemas) >= 2
    for schema in schemas:
        last = schema.arguments[-1]
        assert not last.has_default_value() and last.type.kind() != "OptionalType", schema


@each_operation
def test_vmap(name):
    """Values, and each sample's own gradient of each tensor; under autocast too, and nested."""
    each, vmap = operation(name), torch.func.vmap
    for dims in each.batched:
        given = each.tensors(2 * torch.randn(5, 70))
        pairs = zip(given, dims, strict=True)
        tensors = [part if dim is None else torch.stack([part, part + 0.5, 2 * part], dim) for part, dim in pairs]
        alone = [
            [part if dim is None else part.select(dim, i) for part, dim in zip(tensors, dims, strict=True)]
            for i in range(3)
        ]

        def loss(*parts):
            return (each.function(*parts).float() * parts[0].detach().cos()).sum()

        mapped, derive = vmap(each.function, dims), torch.func.grad(loss, tuple(range(len(tensors))))
        for autocast in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                close(mapped(*tensors), torch.stack([each.function(*parts) for parts in alone]))
                samples = vmap(derive, dims)(*tensors)
                nested = [sample[0] for sample in vmap(vmap(derive, dims))(*(part[None] for part in tensors))]
            for i, parts in enumerate(alone):
                own = passes(each.function, parts, parts[0].cos(), autocast=autocast)[0][1:]
                close([sample[i] for sample in samples], own)
                close([sample[i] for sample in nested], own)
        # a gradient at an outer level, of a tensor that requires none at its own
        outer = torch.func.grad(lambda *parts, mapped=mapped: mapped(*parts).sum())
        close(outer(*tensors), passes(mapped, tensors)[0][1])
        close(vmap(outer)(*(part[None] for part in tensors))[0], passes(mapped, tensors)[0][1])
    assert same(torch.func.grad(lambda t: (each.function(*given) * t).sum())(given[0]), each.function(*given))


@every_kind
def test_jacobians(case):
    f, x = case.function, torch.randn(5, 70) * 2
    derivative, vmap = run(f, x)[1], torch.func.vmap
    close(torch.func.jacrev(f)(x[0]), torch.diag(derivative[0]))
    close(vmap(torch.func.jacrev(f))(x), torch.diag_embed(derivative))
    y, pullback = torch.func.vjp(f, x)
    assert same(y, case.baseline(x)) and same(pullback(torch.ones_like(y))[0], derivative)
    for empty in (torch.randn(0, 7), torch.randn(7, 0)):
        assert vmap(f)(empty).shape == empty.shape
    for n in (1, 8192, 2 * 8192 + 77):
        x = torch.randn(3, n)
        squares = vmap(torch.func.grad(lambda t: (f(t) ** 2).sum()))(x)
        torch.testing.assert_close(squares, run(f, x, 2 * case.baseline(x))[1], rtol=1e-4, atol=1e-6)


def penalty(f, x):
    y = f(x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.sum() + dx.square().sum()).backward()


def power(f, x):
    (dx,) = torch.autograd.grad(f(x).pow(2).sum(), x, create_graph=True)
    torch.autograd.grad(dx.sum(), x)


def of_dy(f, x):
    dy = torch.randn_like(x, requires_grad=True)
    (dx,) = torch.autograd.grad(f(x), x, dy, create_graph=True)
    torch.autograd.grad(dx.sum(), dy)


DERIVED = [penalty, power, of_dy]
FUNCTIONAL = [
    lambda f, x: torch.func.grad(lambda t: torch.func.grad(lambda s: f(s).sum())(t).sum())(x),
    lambda f, x: torch.func.jacrev(torch.func.jacrev(f))(x),
    lambda f, x: torch.autograd.functional.hessian(lambda t: f(t).sum(), x),
]


@each_operation
def test_second_derivatives_raise(name):
    each = operation(name)
    x, *others = each.tensors(torch.randn(3))

    def f(t):
        return each.function(t, *others)

    for derive in (*DERIVED, *FUNCTIONAL):
        with pytest.raises(RuntimeError, match=f"{each.who}: a second derivative was requested"):
            derive(f, x.clone().requires_grad_())
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(f, (x,), (x,))


@each_kind
@pytest.mark.parametrize("derive", DERIVED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives_of_compiled_code_raise(case, derive, backend, request):
    """The activation's own error, or that of a compiler that has none."""
    if backend == "eager" and not case.saves_output and derive is penalty:
        reason = "in a graph that is not compiled further nothing ties the gradient of codes to x: 0, silently"
        request.applymarker(pytest.mark.xfail(reason=reason))
    if backend == "aot_eager" and torch.__version__ < (2, 13) and derive is penalty:
        reason = "before PyTorch 2.13 compiled code lets second derivatives pass as 0, also those of torch.tanh"
        request.applymarker(pytest.mark.xfail(reason=reason))
    own = f"{case.name}: a second derivative was requested"
    message = "does not currently support double backward" if backend == "aot_eager" else own
    with pytest.raises(RuntimeError, match=message):
        derive(compiled(case.function, backend), torch.randn(3, requires_grad=True))


def on_cpu(f, *given):
    with torch.autograd.graph.save_on_cpu():
        return f(*given)


# What is saved of an activation is saved, and the rest recomputed.
SELECTIVE = partial(create_selective_checkpoint_contexts, [torch.ops.fitact.forward.default])
CHECKPOINTS = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=SELECTIVE),
    "on the CPU": on_cpu,
}
CHECKED = product(OPERATIONS, CHECKPOINTS, (True, False))
CHECKED = full(CHECKED, lambda row: row[0] in USUAL or row[1:] == ("not reentrant", False))


@pytest.mark.parametrize(("name", "variant", "autocast"), CHECKED)
def test_checkpoints(name, variant, autocast):
    each = operation(name)

    def f(x, *others):
        return each.function(x.sin(), *others).cos()

    tensors = each.tensors(torch.randn(50, 100))
    calls = partial(CHECKPOINTS[variant], f), f
    actual, expected = (passes(call, tensors, autocast=autocast)[0] for call in calls)
    assert all(map(same, actual, expected))


@each_operation
def test_nothing_is_saved_without_gradient(name):
    """Nor where no tensor needs one: no activation makes a code, and the result may change in place."""
    each = operation(name)
    tensors = each.tensors(torch.randn(10, 12))
    expected = 2 * passes(each.function, tensors)[0][0]
    for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        needs = type(context) is not torch.enable_grad
        with context, count_saved() as saved, Operators() as operators:
            y = each.function(*(part.clone().requires_grad_(needs) for part in tensors))
            assert same(y.mul_(2), expected)
        assert not y.requires_grad and not saved.storages
        assert name not in USUAL or not any(called.startswith("fitact.") for called in operators.names)
