"""The compiled kernels against the CPU's path, bit for bit where that is exact: on a GPU, or interpreted.

The whole file runs where there is a GPU. Elsewhere Triton's interpreter (tests/runtime/test_interpreted.py) runs
the tests that need none, with a few activations.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from itertools import cycle, product
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fitact
from fitact.runtime.choose import reproducibly, selectively
from fitact.runtime.kernels import gates
from fitact.runtime.kernels.launch import launch
from fitact.runtime.kernels.norms import LAYER, LONGEST, RMS, plan
from fitact.runtime.kernels.registry import find
from fitact.runtime.measure.saved import count_saved
from fitact.runtime.norms.modules import ms_layer_norm, ms_rms_norm
from fitact.runtime.saving import blocks, saving
from fitact.runtime.saving.blocks import BITS, decode, encode
from fitact.runtime.saving.offload import _made
from fitact.runtime.saving.rules import dropped
from tests.conftest import INTERPRETED
from tests.saving.test_blocks import hostile
from tests.support import values
from tests.support.gates import FITS, gate_module, halves, near, special
from tests.support.generated import Generated, backward_op, forward_op, patterns, same
from tests.support.inverses import LOST, inverses, made
from tests.support.learned import CASES, learned_module
from tests.support.outputs import outputs
from tests.support.rows import full, turning
from tests.support.steps import Shipped, shipped

if INTERPRETED:
    import tests.interpreted.conftest  # noqa: F401  rounds to bfloat16 as a GPU does

GPU = torch.cuda.is_available() and not INTERPRETED
pytestmark = [
    pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a GPU"),
    # NaN and infinity on purpose, in the interpreter's NumPy, which warns of them
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
if GPU:  # PyTorch's advice for this GPU or that is no failure
    pytestmark.append(pytest.mark.filterwarnings("default::UserWarning"))

DEVICE = "cuda" if GPU else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FEW = ("gelu_fewbit3", "gelu_inverted1", "tanh_output")
MANY = 2**22 if GPU else 2**14  # numbers of float32
SIZES = (0, 1, 1024, 8191, 8192, 8193, *([100_001] if GPU else []))  # the interpreter is slow
UNIT = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-22}  # two roundings
FORMULAS = {formula.name: formula for formula in values.FORMULAS}
STEP = next(each for each in shipped() if each.name == "gelu_fewbit3")

# Interpreted: each width, an even derivative, jumps, exact steps, quotients, published ones, closed forms.
SOME = {*FEW, "gelu_fewbit4", "hardtanh_fewbit1", "relu6_fewbit2", "tanh_fewbit3", "hardswish_inverted2"}
SOME |= {"silu_inverted_published", "relu_output", "relu2_output", "selu_output", "softplus_output"}
SHIPPED = {each.name: each for each in (*shipped(), *outputs(), *inverses()) if GPU or each.name in SOME}
# Radicals of order 3 on both sides of their anchor and on one; no codes, and four of three variables.
OWN = {"own, two radicals": (-1, 2), "own, three variables": (-3, 3)}
QUICK = {*FEW, "hardswish_inverted2", "tanh_fewbit3", "own, two radicals"}


def parametrised(names: Any, quick: Any, of: str = "name") -> pytest.MarkDecorator:
    """Parametrise by names; of the interpreted ones, those that are not quick run in the full product alone."""
    return pytest.mark.parametrize(of, full(names, names if GPU else quick), ids=str)


def with_dtypes(names: Any, quick: Any, of: str = "name") -> pytest.MarkDecorator:
    """Parametrise by names and dtypes; interpreted, by float32 and one of half precision in turn."""
    some = [*product(names, DTYPES if GPU else DTYPES[2:]), *([] if GPU else turning(names, DTYPES[:2]))]
    return pytest.mark.parametrize((of, "dtype"), full(some, lambda row: GPU or row[0] in quick), ids=str)


crossed = product if GPU else turning
every = parametrised(SHIPPED, QUICK)
few = pytest.mark.parametrize("name", FEW)
each_dtype = parametrised(DTYPES, (torch.bfloat16, torch.float32), "dtype")


def shipped_function(name: str) -> Callable[..., torch.Tensor]:
    function: Callable[..., torch.Tensor] = getattr(import_module(f"fitact.generated.{name}"), name)
    return function


def activation(name: str) -> Generated:
    return SHIPPED[name] if name in SHIPPED else made("x + sin(x)**2", OWN[name])


def anything() -> torch.Tensor:
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 2**32, MANY, dtype=np.uint32))
    return torch.cat([bits.view(torch.float32), 3 * torch.randn(MANY)])


def numbers(name: str, dtype: torch.dtype) -> torch.Tensor:
    """Every number of half precision; of float32 normal ones, any bits at all, and the neighbours of borders."""
    if name in OWN:
        low, high = OWN[name]
        return torch.cat([torch.linspace(low, high, MANY), torch.tensor([torch.nan])]).to(dtype)
    if dtype != torch.float32:
        return patterns(dtype)
    known = activation(name).fit.get("borders", [0.0])  # of an inverted fit by dtype
    borders = torch.tensor(known["float32"] if isinstance(known, dict) else known, dtype=dtype)
    beside = [torch.nextafter(borders, torch.full_like(borders, to)) for to in (-torch.inf, torch.inf)]
    return torch.cat([anything(), borders, -borders, *beside])


def forward(name: str, x: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    y, codes = forward_op(x.to(DEVICE), dtype or x.dtype, activation(name).key)
    return y.cpu(), codes.cpu()


def check_passes(name: str, x: torch.Tensor, dtype: torch.dtype) -> None:
    """Codes and gradients are those of the CPU's path, but for roundings where y, of a dtype, is needed."""
    key = activation(name).key
    y, codes = forward(name, x, dtype)
    assert y.dtype == dtype
    assert torch.equal(codes, forward_op(x, dtype, key, reference=True)[1])
    dy, output = torch.randn(x.shape).to(dtype), y if find(key).saves_output else None
    on_device = [None if part is None else part.to(DEVICE) for part in (dy, output, codes)]
    dx = backward_op(*on_device, x.dtype, key)[0].cpu()
    expected, _ = backward_op(dy, output, codes, x.dtype, key, reference=True)
    if output is None:
        assert same(dx, expected)
        return
    wide, known = expected.double(), expected.isfinite()
    allowed = UNIT[x.dtype] * wide.abs() + LOST[dtype] * dy.double().abs()
    assert bool(((dx.double() - wide).abs() <= allowed)[known].all())
    assert torch.equal(dx.isnan(), expected.isnan())


@with_dtypes([*SHIPPED, *OWN], QUICK)
def test_codes_and_gradients(name: str, dtype: torch.dtype) -> None:
    check_passes(name, numbers(name, dtype), dtype)


@parametrised([*(name for name, each in SHIPPED.items() if each.saves_output), *OWN], QUICK)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_output_of_another_dtype(name: str, dtype: torch.dtype) -> None:
    """As autocast asks for: the borders and the approximant are those of y's dtype."""
    check_passes(name, numbers(name, torch.float32), dtype)


@few
@each_dtype
@pytest.mark.parametrize("n", SIZES)
def test_sizes_round_the_tile(name: str, dtype: torch.dtype, n: int) -> None:
    check_passes(name, torch.randn(n).to(dtype), dtype)


@every
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_values_of_half_precision(name: str, dtype: torch.dtype) -> None:
    """Everywhere within 3/4 of a unit of the float64 value, or as close as PyTorch's own on the same device."""
    x, baseline = patterns(dtype), SHIPPED[name].baseline
    y, own = forward(name, x)[0], baseline(x.to(DEVICE)).cpu()
    exact = baseline(x.double())
    info = torch.finfo(dtype)
    # of the last place; float64 has 1 + erf(x) cancel too
    unit = torch.maximum(exact.abs() * info.eps, info.smallest_normal * info.eps + 2.0**-49 * x.double().abs())
    limit = torch.maximum((own.double() - exact).abs(), 0.75 * unit)
    known = exact.to(dtype).isfinite()
    assert bool(((y.double() - exact).abs() <= limit)[known].all())
    assert torch.equal(y.isnan()[~x.isinf()], x.isnan()[~x.isinf()])


@every
def test_values_of_float32(name: str) -> None:
    """Within the roundings of f and of x that test_values.py allows; at infinity the limit; NaN for NaN."""
    formula = FORMULAS[SHIPPED[name].fit["activation"]["name"]]
    x = torch.cat([values.points(torch.float32)[:: 1 if GPU else 5], 3 * torch.randn(MANY)])
    values.check(formula, forward(name, x)[0], x)
    infinite = torch.tensor([torch.inf, -torch.inf])
    limit = torch.from_numpy(formula.activation.value(infinite.double().numpy()))
    known = limit.isfinite()
    y = forward(name, infinite)[0].double()
    torch.testing.assert_close(y[known], limit[known], rtol=1e-6, atol=1e-7)
    assert forward(name, torch.tensor([torch.nan]))[0].isnan().all()


@few
def test_nothing_is_written_beyond_the_end(name: str) -> None:
    """Nor left out: the codes of the last tile are written whole."""
    each, n = SHIPPED[name], 8192 + 5
    x, dy = torch.randn(n, device=DEVICE), torch.ones(n, device=DEVICE)
    expected, known = forward_op(x, x.dtype, each.key)
    y, dx = (torch.full((3 * 8192,), 7.0, device=DEVICE) for _ in range(2))
    codes = torch.full((3 * each.bits * 1024,), 0xAA, dtype=torch.uint8, device=DEVICE)
    arguments = {"x": x, "y": y, "codes": codes, "dy": dy, "dx": dx, "n": n}
    for pass_ in ("forward", "backward"):
        kernel = getattr(each.module, f"{name}_{pass_}")
        kernel[(2,)](*(arguments[argument] for argument in kernel.arg_names))
    assert same(y[:n], expected) and torch.equal(codes[: known.numel()], known)
    assert bool((y[n:] == 7).all()) and bool((codes[known.numel() :] == 0xAA).all())
    assert bool((dx[n:] == 7).all()) and not bool((dx[:n] == 7).any())


@pytest.mark.parametrize(("name", "dtype"), crossed(FEW, DTYPES), ids=str)
@parametrised((False, True), (False,), "compiled")
def test_through_autograd(name: str, dtype: torch.dtype, compiled: bool) -> None:
    """Any layout; the bytes that are stated are saved and no others; no value is fetched from the device."""
    torch._dynamo.reset()
    each, function = SHIPPED[name], SHIPPED[name].function
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    for x in (torch.randn(3, 64, 32), torch.randn(50, 300).t(), torch.randn(2, 8, 9, 10).permute(0, 2, 3, 1)):
        leaf = x.to(DEVICE, dtype).requires_grad_()
        dy = torch.randn(x.shape).to(DEVICE, dtype)
        function(leaf)  # compiles
        with count_saved() as saved, no_synchronising():
            y = function(leaf)
        assert y.stride() == leaf.stride()
        assert saved.bytes == sum(each.saved(y))
        (dx,) = torch.autograd.grad(y, leaf, dy)
        torch.testing.assert_close(y, each.baseline(leaf), rtol=UNIT[dtype], atol=1e-6)
        if isinstance(each, Shipped):
            assert same(dx.cpu(), each.gradient(leaf.cpu(), dy.cpu()))
        else:
            reference = each.baseline_gradient(leaf.double(), dy.double())
            torch.testing.assert_close(dx.double(), reference, rtol=0.05, atol=0.05)


@contextmanager
def no_synchronising() -> Iterator[None]:
    if not GPU:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)  # that it is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@few
def test_autocast(name: str) -> None:
    """Where the output is saved it is the one that autocast makes, at half the bytes."""
    x = torch.randn(64, 512, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y = SHIPPED[name].function(x)
    assert y.dtype == (torch.bfloat16 if find(SHIPPED[name].key).saves_output else torch.float32)
    (dx,) = torch.autograd.grad(y.float().sum(), x)
    leaf = x.detach().requires_grad_()
    (expected,) = torch.autograd.grad(SHIPPED[name].baseline(leaf).sum(), leaf)
    step_error = STEP.fit["error"]["max"] + 1e-4  # of f' itself, whatever the dtype
    tolerance = {"gelu_fewbit3": step_error, "gelu_inverted1": 0.02, "tanh_output": 0.01}[name]
    torch.testing.assert_close(dx, expected, rtol=0, atol=tolerance)


GRAPHS: dict[str, Callable[..., torch.Tensor]] = {
    **{name: SHIPPED[name].function for name in FEW},
    "swiglu": shipped_function("swiglu_recompute"),
    "layer norm": lambda x: ms_layer_norm(x, 768, 1e-5),
    "rms norm": lambda x: ms_rms_norm(x, 768, 1e-5),
}


@needs_gpu
@pytest.mark.parametrize("what", GRAPHS)
def test_cuda_graphs(what: str) -> None:
    """A captured forward and backward, replayed with other numbers, is what eager computes of these."""
    function = GRAPHS[what]
    leaves = [torch.randn(512, 768, device="cuda", requires_grad=True) for _ in range(1 + (what == "swiglu"))]
    dy = torch.randn(512, 768, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(function(*leaves), leaves, dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = function(*leaves)
        captured = torch.autograd.grad(y, leaves, dy)
    with torch.no_grad():
        for leaf in (*leaves, dy):
            leaf.copy_(torch.randn(512, 768))
    graph.replay()
    expected = function(*leaves)
    assert same(y, expected)
    assert all(map(same, captured, torch.autograd.grad(expected, leaves, dy)))


@needs_gpu
@few
def test_streams(name: str) -> None:
    function = SHIPPED[name].function
    side = torch.cuda.Stream()
    source = torch.randn(2**24, device="cuda")
    compiles = torch.randn(2**14, device="cuda", requires_grad=True)
    function(compiles).sum().backward()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x = torch.zeros_like(source)
        torch.cuda._sleep(100_000_000)
        x.copy_(source)
        leaf = x.requires_grad_()
        y = function(leaf)
        (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    side.synchronize()
    leaf = source.requires_grad_()
    expected = function(leaf)
    assert same(y, expected)
    assert same(dx, torch.autograd.grad(expected, leaf, torch.ones_like(expected))[0])


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_several_gpus() -> None:
    """A tensor of another GPU than the current one is computed where it is."""
    x = torch.randn(30_000)
    results = []
    for device in ("cuda:1", "cuda:0"):
        leaf = x.to(device).requires_grad_()
        y = STEP.function(leaf)
        (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
        assert y.device == dx.device == torch.device(device)
        results.append((y.cpu(), dx.cpu()))
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@needs_gpu
def test_more_elements_than_an_int32_counts() -> None:
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB")
    tail = 3 * 8192 + 5
    x = torch.zeros(2**31 + tail, dtype=torch.bfloat16, device="cuda")
    end = torch.randn(tail).bfloat16()
    x[-tail:] = end.cuda()
    key = STEP.module._KEY
    y, codes = forward_op(x, x.dtype, key)
    expected_y, expected_codes = forward_op(end.cuda(), x.dtype, key)
    assert same(y[-tail:], expected_y)
    assert torch.equal(codes[-expected_codes.numel() :], expected_codes)
    dx = backward_op(x, None, codes, x.dtype, key)[0]
    assert same(dx[-tail:].cpu(), STEP.gradient(end, end))
    assert not dx[:-tail].any()


@needs_gpu
@pytest.mark.parametrize("name", ["gelu_fewbit3", "swiglu_recompute", "geglu_recompute"])
def test_memory_that_is_taken(name: str) -> None:
    """Forward takes the output and the codes, backward the gradients; there is nothing beside."""
    function, n = shipped_function(name), 2**24
    count, codes = (1, 3 / 8) if name == "gelu_fewbit3" else (2, 0)
    leaves = [torch.randn(n, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(count)]
    dy = torch.randn_like(leaves[0])
    torch.autograd.grad(function(*leaves), leaves, dy)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = function(*leaves)
    taken = (2 + codes) * n
    assert torch.cuda.memory_allocated() - before <= taken + 2 * 2**20  # the allocator rounds
    gradients = torch.autograd.grad(y, leaves, dy)
    assert torch.cuda.max_memory_allocated() - before <= taken + 2 * n * count + 4 * 2**20
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}


def pairs(dtype: torch.dtype, *, whole: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of one tensor, of every number, whose rows lie across those of a tile; other sizes and layouts."""
    if whole:
        x = patterns(dtype) if dtype != torch.float32 else anything()
        g, u = torch.cat([x.view(-1, 2048), x[torch.randperm(len(x))].view(-1, 2048)], 1).chunk(2, -1)
        yield g, u
    yield halves(dtype, 9, 1100)
    if dtype == torch.float32:
        for size in (0, 1, 1025, 8192):
            yield torch.randn(size), torch.randn(size)
        yield torch.randn(40, 30).t(), torch.randn(30, 40)
        yield halves(dtype, 2, 3, 1024)


WANTS = ((True, True), (True, False), (False, True))


def wanted(given: Iterable[Any]) -> Iterator[tuple[Any, tuple[bool, bool]]]:
    """Yield what is given with all that may be wanted of it; interpreted, with one of these in turn."""
    return product(given, WANTS) if GPU else zip(given, cycle(WANTS), strict=False)


def passes(x, dy, key, other, wants, inner=1):
    """The value and the gradients that are wanted, on the device and by PyTorch's operators on the CPU."""
    results = []
    for reference, device in ((False, DEVICE), (True, "cpu")):
        given = [part.to(device) for part in (x, dy, other)]
        y, _ = forward_op(given[0], x.dtype, key, given[2], inner=inner, reference=reference)
        saved = given[1], given[0], None, x.dtype, key, given[2]
        gradients = backward_op(*saved, inner=inner, wants=wants, reference=reference)
        results.append(
            [want.cpu() for want, wanted in zip((y, *gradients), (True, *wants), strict=True) if wanted]
        )
    return results


@with_dtypes(FITS, ["recompute"])
def test_gates(name: str, dtype: torch.dtype) -> None:
    if name == "recompute_both" and dtype != torch.float32:
        pytest.skip("PyTorch's derivative of tanh in half precision is that of the rounded value: no reference")
    for (g, u), wants in wanted(pairs(dtype, whole=name in ("recompute", "recompute_gelu"))):
        dh = torch.randn(g.shape).to(dtype)
        # where the formula of a derivative overflows or cancels, PyTorch's own does so elsewhere
        ordinary = (g.abs() < 20) & (u.abs() < 20)
        reach = (1 + g.double().abs()) * (1 + u.double().abs()) * (1 + dh.double().abs())
        for each, other in zip(*passes(g, dh, gate_module(name)._KEY, u, wants), strict=True):
            near(each[ordinary], other[ordinary], reach[ordinary])
            assert each.shape == other.shape and each.stride() == other.stride()


@parametrised(FITS, [])
def test_gates_of_special_numbers(name: str) -> None:
    g, u = special(torch.float32)
    key = gate_module(name)._KEY
    actual = forward_op(g.to(DEVICE), g.dtype, key, u.to(DEVICE))[0].cpu()
    expected = forward_op(g, g.dtype, key, u, reference=True)[0]
    # PyTorch's own gelu is NaN at the largest number too, where its formula is not
    assert not bool((actual.isnan() & ~expected.isnan()).any())
    assert bool(actual.isnan()[g.isnan() | u.isnan()].all())


def test_a_pass_launches_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    def noting(kernel: Any, *arguments: Any) -> None:
        launched.append(kernel.fn.__name__.removeprefix("swiglu_recompute_"))
        launch(kernel, *arguments)

    monkeypatch.setattr(gates, "launch", noting)
    down = torch.nn.Linear(300, 8, device=DEVICE)
    g, u = torch.randn(2, 30, 300, device=DEVICE).requires_grad_()
    with fitact.saving():
        y = down(shipped_function("swiglu_recompute")(g, u))
    assert launched == ["forward"]
    y.sum().backward()
    assert launched[1:] == ["forward", "backward"]


# Rows, channels, inner: rows of channels, images, one channel; whole blocks, and some that the tensor ends in.
SHAPES = ((130, 150, 1), (3, 5, 49), (2, 2, 8200), (70, 3, 1), (1, 2, 1), (0, 4, 1))


@with_dtypes(CASES, ["dyt", "xielu"])
def test_learned_numbers(name: str, dtype: torch.dtype) -> None:
    """Values and all gradients that are wanted; sums are the same from run to run."""
    case, key = CASES[name], learned_module(name)._KEY
    known = find(key).numbers
    for (rows, channels, inner), wants in wanted(SHAPES if dtype == torch.float32 else SHAPES[:1]):
        size = rows * channels * inner
        start = torch.tensor([number.start for number in known])[:, None]
        numbers = start + 0.1 * torch.randn(len(known), channels if case.wide else 1)
        x, dy = (2 * torch.randn(size)).to(dtype), torch.randn(size).to(dtype)
        actual, expected = passes(x, dy, key, numbers, wants, inner)
        for each, other in zip(actual, expected, strict=True):
            of_sums = wants[1] and each is actual[-1]
            rtol, atol = (1e-5, 1e-6 * max(size, 1)) if of_sums else (2 * UNIT[dtype], max(2 * UNIT[dtype], 2e-6))
            torch.testing.assert_close(each, other, rtol=rtol, atol=atol)
        assert not GPU or torch.equal(actual[-1], passes(x, dy, key, numbers, wants, inner)[0][-1])


# Several rows a block, one row a block, and rows that are longer than a block; none a power of two, and some.
COLUMNS = [1, 7, 100, 768, 4096, 5000, LONGEST, LONGEST + 1]


OF_NORMS = full(crossed(COLUMNS, DTYPES, (True, False)), lambda row: GPU or row[1] != torch.float16)


@pytest.mark.parametrize(("columns", "dtype", "centred"), OF_NORMS, ids=str)
def test_norms(columns: int, dtype: torch.dtype, centred: bool) -> None:
    """Both passes beside the CPU's path: numbers of rows about that of a block, and what is not finite."""
    height = plan(1000, columns).height
    for rows in {0, 1, 5, min(height + 1, 40), *([height, 129] if columns == 7 else [])}:
        x = torch.randn(rows, columns) * 2 + 0.3
        if rows == 5 and columns > 50 and dtype == torch.float32:
            x[0, 3], x[1, 40], x[2] = torch.nan, torch.inf, 0.0
        check_norm(centred, x.to(dtype), dtype)
    if columns == 100:
        check_norm(centred, torch.randn(9, columns), dtype)  # as under autocast


def check_norm(centred: bool, x: torch.Tensor, out: torch.dtype) -> None:
    key, given = LAYER if centred else RMS, {"inner": x.shape[-1], "eps": 1e-5}
    z, scale = forward_op(x.to(DEVICE), out, key, **given)
    expected_z, expected_scale = forward_op(x, out, key, **given, reference=True)
    close = partial(torch.testing.assert_close, equal_nan=True)
    unit, of_x = (max(UNIT[dtype], 4e-6) for dtype in (out, x.dtype))
    close(z.cpu(), expected_z, rtol=unit, atol=unit)
    close(scale.cpu(), expected_scale, rtol=2e-6, atol=0)
    dz = torch.randn(x.shape).to(out)
    saved = dz, expected_z, expected_scale
    dx, _ = backward_op(*(part.to(DEVICE) for part in saved), x.dtype, key, inner=x.shape[-1])
    expected_dx, _ = backward_op(*saved, x.dtype, key, inner=x.shape[-1], reference=True)
    size = float((expected_scale[..., None] * dz.abs()).nan_to_num(posinf=0).max()) if x.numel() else 0.0
    close(dx.cpu(), expected_dx, rtol=of_x, atol=4e-6 * size)


@pytest.mark.parametrize("columns", [1000, LONGEST + 30])
def test_variance_does_not_cancel(columns: int) -> None:
    x = torch.randn(3, columns) + 1e4
    z, _ = forward_op(x.to(DEVICE), torch.float32, LAYER, inner=columns, eps=1e-5)
    exact = F.layer_norm(x.double(), (columns,), eps=1e-5)
    torch.testing.assert_close(z.cpu().double(), exact, rtol=0, atol=4e-3)


@needs_gpu
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize(("rows", "classes"), [(37, 1000), (8192, 1000), (520, 50257)])
def test_losses(rows: int, classes: int, autocast: bool, reduction: str) -> None:
    """A loss of which logits are saved, and its gradient, have the bits of PyTorch's."""
    x = torch.randn(rows, classes, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(classes, (rows,), device="cuda")
    target[::5] = -100
    results = []
    for context in (nullcontext(), saving()):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast), context:
            logits = x * 1.5
            loss = F.cross_entropy(logits if autocast else logits.float(), target, reduction=reduction)
        results.append((loss, *torch.autograd.grad(loss, x, torch.full_like(loss, 1.7))))
    assert "CrossEntropy" in type(loss.grad_fn).__name__
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@needs_gpu
def test_selective_checkpoints_with_dropout() -> None:
    """Attention that drops draws its random numbers again, so what follows it gets its own."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, dropout=0.2, batch_first=True, device="cuda").bfloat16()
    x = torch.randn(4, 128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def gradient(**options: Any) -> torch.Tensor:
        torch.manual_seed(1)
        y = checkpoint(layer, x, use_reentrant=False, **options)
        return torch.autograd.grad(y.square().sum(), x)[0]

    expected, actual = reproducibly(lambda: (gradient(), gradient(context_fn=selectively)))
    assert same(actual, expected)


@needs_gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_dropout(dtype: torch.dtype) -> None:
    """What is recomputed from a mask has the bits of PyTorch's kernel."""
    x = (anything() if dtype.itemsize >= 4 else patterns(dtype)).to("cuda", dtype)
    for p in (0.1, 0.15, 0.3, 0.5, 1 - 1e-4):
        y, mask = torch.native_dropout(x, p, True)
        assert same(dropped(x, mask, p), y), p


@needs_gpu
@pytest.mark.parametrize("of", ["a step", "a model"])
@pytest.mark.parametrize("error", ["exact", "rounding", "coarse"])
def test_contexts_in_cuda_graphs(error: str, of: str) -> None:
    """A captured step, or a converted model that PyTorch captures, gives the gradients of eager steps."""
    torch.manual_seed(0)
    layers = torch.nn.LayerNorm(256), torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)
    model: Any = torch.nn.Sequential(*layers, torch.nn.RMSNorm(256)).to("cuda", torch.bfloat16)
    x, other = (torch.randn(8, 512, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    fitact.convert(model, error=error)

    def gradients(inputs: torch.Tensor) -> list[torch.Tensor]:
        loss = model(inputs).float().square().mean()
        return [*torch.autograd.grad(loss, [*model.parameters()])]

    with torch.cuda.stream(torch.cuda.Stream()):
        expected = [gradients(other) for _ in range(3)][-1]
        if of == "a step":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                actual = gradients(x)
            x.copy_(other)
            graph.replay()
        else:
            model = torch.cuda.make_graphed_callables(model, (x,))
            actual = gradients(other)
        torch.cuda.synchronize()
    assert all(map(same, actual, expected))


def hard(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Shapes that end within a tile or a block, outliers, zeros of both signs, sparse channels; every number."""
    shapes = [(128, 256), (3, 5, 64), (35, 96), (9, 97), (33, 130), (1000,), (200, 1), (1, 1), (0, 64)]
    yield from (hostile(shape, dtype) for shape in shapes)
    yield hostile((100, 192), dtype).relu()
    x = patterns(dtype)[:: 1 if GPU else 21] if dtype != torch.float32 else anything()[: 2**22 if GPU else 2**12]
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))][: len(x) // 128 * 128]
    yield x if GPU else x[:320]  # each block of a tensor of one dimension is interpreted alone
    yield from (shuffled.view(-1, 128), torch.where(shuffled.isfinite(), shuffled, 1).sort()[0].view(-1, 128))


def at_thresholds(bits: int) -> Iterator[torch.Tensor]:
    """Of float32: what is not finite among zeros, borders between codes, scales without inverse, exponents."""
    x = hostile((64, 128), torch.float32)
    x[::3, 40], x[1::6, 41], x[4::6, 41] = torch.inf, -torch.inf, torch.nan
    x[2], x[5], x[2, 5] = 0, -0.0, torch.inf
    yield x
    n = blocks._levels(bits)
    y = (torch.arange(n) + 0.5).double() / n
    border, step = y * (1 + y) / 2, 2.0 ** (bits - 14) / (2 * n**2)
    beside = [border + i * step / 8 for i in range(-8, 9)]
    beside += [border.float() + i * border.float() * 2**-23 for i in range(-4, 5)]
    x = torch.cat(beside).clamp(max=1).float()
    x = torch.cat([x, -x, torch.zeros(-2 * len(x) % 63)]).view(-1, 63)
    for scale in (1.0, 1.9921875):  # whose inverse is exact, and not
        yield torch.cat([x, torch.ones(len(x), 1)], 1) * scale
        yield torch.cat([-torch.ones(len(x), 1), x], 1) * scale
    ordinary = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    yield from (ordinary * 2.0**power for power in (-149, -140, -126, -115, -100, 125))
    yield (ordinary * torch.logspace(-40, 38, 128)).clamp(-3.4e38, 3.4e38)
    rows = torch.full((64, 64), 1.0)  # channels whose mean exponent is below, at and above 3/2 over the tile's
    for i, channel in enumerate(range(0, 64, 4)):
        rows[: 32 + i - 8, channel] = 8.0 if channel % 8 else 2.0**13
        rows[60:, channel + 1] = 0
    yield rows
    yield torch.cat([rows[:7], rows[:, torch.randperm(64)], rows])


@with_dtypes(BITS, (3, 8), "bits")
def test_block_codes(dtype: torch.dtype, bits: int) -> None:
    """The kernels write the bytes of PyTorch's operators on a CPU, and read them; only a NaN has no bits."""
    for i, x in enumerate([*hard(dtype), *(at_thresholds(bits) if dtype == torch.float32 else ())]):
        for signs in (False, True) if GPU and x.dim() == 2 else ((bits + i) % 2 == 1,):
            parts = encode(x.to(DEVICE), bits, signs=signs)
            y = decode(*parts, x.shape, dtype).cpu()
            with mock.patch.object(blocks, "KERNEL_DEVICES", ()):
                expected = encode(x, bits, signs=signs)
                assert same(y, decode(*expected, x.shape, dtype))
            for part, other in zip(parts, expected, strict=True):
                assert torch.equal(part.cpu().view(torch.uint8), other.view(torch.uint8)), (x.shape, signs)


@needs_gpu
def test_block_codes_of_more_elements_than_an_int32_counts() -> None:
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB")
    tail = torch.randn(3 * 64, 4096).bfloat16()
    x = torch.zeros(2**19 + len(tail), 4096, dtype=torch.bfloat16, device="cuda")
    x[-len(tail) :] = tail.cuda()
    codes, scales, shifts = encode(x, 8)
    for each, other in zip((codes, scales, shifts), encode(tail, 8), strict=True):
        assert torch.equal(each[-len(other) :].cpu(), other)
    y = decode(codes, scales, shifts, x.shape, x.dtype)
    assert same(y[-len(tail) :].cpu(), decode(*encode(tail, 8), tail.shape, tail.dtype))
    assert not y[: -len(tail)].any()


@needs_gpu
def test_block_codes_take_no_memory_beside() -> None:
    x = torch.randn(2**12, 2**12, device="cuda", dtype=torch.bfloat16)
    decode(*encode(x, 4), x.shape, x.dtype)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    parts = encode(x, 4)
    decode(*parts, x.shape, x.dtype)
    assert torch.cuda.max_memory_allocated() - before <= blocks.nbytes(x.shape, 4) + x.nbytes + 2**21


@needs_gpu
@pytest.mark.parametrize("error", ["exact", "rounding"])
def test_offload(error: str) -> None:
    """Gradients stay, bit for bit; what is saved takes a fraction of the memory, and nothing of it stays."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(1024, 1024, device="cuda") for _ in range(12)]
    x = torch.randn(8192, 1024, device="cuda")

    def forward(offload: bool | str) -> torch.Tensor:
        y = x * 1
        with saving(error, offload=offload):
            for layer in layers:
                y = F.softplus(layer(y)).sin()
        return y

    results, sizes = [], []
    for offload in (False, "all", "all", 0.5, 2**26):
        for layer in layers:
            layer.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = forward(offload)
        torch.cuda.synchronize()
        sizes.append(torch.cuda.memory_allocated() - before)
        y.square().sum().backward()
        results.append([layer.weight.grad.clone() for layer in layers])
        del y
    assert all(torch.equal(*pair) for each in results[1:] for pair in zip(each, results[0], strict=True))
    assert max(sizes[1:3]) < 0.6 * sizes[0]  # copies that were on their way at the last look are still there
    assert all(offload.bytes == 0 for offload in _made.offloads.values())


@needs_gpu
@pytest.mark.parametrize("error", ["exact", "rounding"])
def test_offload_in_cuda_graphs(error: str) -> None:
    """Replays of a captured step give the gradients of eager steps, and write over no pinned memory of others."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU()) for _ in range(8))
    )
    model.to("cuda", torch.bfloat16)
    x, other = (torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))

    def gradients(inputs: torch.Tensor, offload: bool) -> list[torch.Tensor]:
        with saving(error, offload=offload):
            loss = model(inputs).float().square().mean()
        return [*torch.autograd.grad(loss, [inputs, *model.parameters()])]

    with torch.cuda.stream(torch.cuda.Stream()):
        expected = [gradients(other, False), *(gradients(other, True) for _ in range(3))]
        assert all(all(map(same, each, expected[0])) for each in expected[1:])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            actual = gradients(x, True)
        with torch.no_grad():
            x.copy_(other)
        taken = [torch.full(x.shape, torch.nan, dtype=x.dtype).pin_memory() for _ in range(8)]
        for _ in range(3):
            graph.replay()
            gradients(other.detach().neg().requires_grad_(), True)
            graph.replay()
            torch.cuda.synchronize()
            assert all(map(same, actual, expected[0]))
        assert all(each.isnan().all() for each in taken)
    assert all(offload.bytes == 0 for offload in _made.offloads.values())
