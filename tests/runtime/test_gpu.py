"""The compiled kernels on a GPU, against the CPU's path, bit for bit where that is exact.

The whole file runs where there is a GPU. Elsewhere Triton's interpreter (tests/runtime/test_interpreted.py)
rehearses the tests that need none, with a few activations; it truncates float32 to bfloat16 where a GPU rounds, so
it leaves out bfloat16.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fitact.runtime.kernels.norm_tiles import LONGEST
from fitact.runtime.kernels.norms import LAYER, RMS
from fitact.runtime.kernels.registry import find
from fitact.runtime.measure.saved import count_saved
from fitact.runtime.norms.modules import ms_layer_norm, ms_rms_norm
from fitact.runtime.saving import blocks, saving
from fitact.runtime.saving.blocks import BITS, decode, encode
from fitact.runtime.saving.offload import _made
from tests.conftest import INTERPRETED
from tests.support import values
from tests.support.gates import near
from tests.support.generated import backward_op, forward_op, patterns, same
from tests.support.inverses import LOST, inverses
from tests.support.outputs import outputs
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
DTYPES = (torch.bfloat16, torch.float16, torch.float32) if GPU else (torch.float16, torch.float32)
FEW = ("gelu_fewbit3", "gelu_inverted1", "tanh_exact")
MANY = 2**22 if GPU else 2**14  # numbers of float32
SIZES = (0, 1, 1024, 8191, 8192, 8193, *([100_001] if GPU else []))  # the interpreter is slow
UNIT = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-22}  # two roundings
FORMULAS = {formula.name: formula for formula in values.FORMULAS}

EVERY = {one.name: one for one in (*shipped(), *outputs(), *inverses()) if GPU or one.name in FEW}
every = pytest.mark.parametrize("name", EVERY)
# the rehearsal of `make test` has float32 alone
OF_TESTS = DTYPES if GPU else (pytest.param(torch.float16, marks=pytest.mark.full), torch.float32)
each_dtype = pytest.mark.parametrize("dtype", OF_TESTS, ids=str)


def numbers(name: str, dtype: torch.dtype) -> torch.Tensor:
    """Every number of half precision; of float32 normal ones, any bits at all, and the neighbours of borders."""
    if dtype != torch.float32:
        return patterns(dtype)
    anything = torch.from_numpy(
        np.random.default_rng(0).integers(0, 2**32, MANY, dtype=np.uint32).view(np.float32)
    )
    fit = EVERY[name].fit
    known = fit.get("borders", [0.0])  # of an inverted fit by dtype
    borders = torch.tensor(known["float32"] if isinstance(known, dict) else known, dtype=dtype)
    near = [torch.nextafter(borders, torch.full_like(borders, to)) for to in (-torch.inf, torch.inf)]
    return torch.cat([anything, 3 * torch.randn(MANY), borders, -borders, *near])


def forward(name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The op on the device: y and codes, on the CPU."""
    y, codes = forward_op(x.to(DEVICE), x.dtype, EVERY[name].module._KEY)
    return y.cpu(), codes.cpu()


def check_gradient(name: str, dy: torch.Tensor, y: torch.Tensor, codes: torch.Tensor) -> None:
    """The op on the device beside the CPU's path: equal for levels, else up to roundings."""
    key = EVERY[name].module._KEY
    output = y if find(key).keeps_output else None
    on_device = [None if part is None else part.to(DEVICE) for part in (dy, output, codes)]
    dx = backward_op(*on_device, dy.dtype, key)[0].cpu()
    expected, _ = backward_op(dy, output, codes, dy.dtype, key, reference=True)
    if output is None:
        assert same(dx, expected)
        return
    wide, known = expected.double(), expected.isfinite()
    allowed = UNIT[dy.dtype] * wide.abs() + LOST[dy.dtype] * dy.double().abs()
    assert bool(((dx.double() - wide).abs() <= allowed)[known].all())
    assert torch.equal(dx.isnan(), expected.isnan())


@every
@each_dtype
def test_codes_and_gradients(name: str, dtype: torch.dtype) -> None:
    """The codes are those of the CPU for every number, and so are the gradients for every code."""
    x = numbers(name, dtype)
    y, codes = forward(name, x)
    assert torch.equal(codes, forward_op(x, dtype, EVERY[name].module._KEY, reference=True)[1])
    check_gradient(name, torch.randn(x.shape).to(dtype), y, codes)


@every
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32], ids=str)
def test_values_of_half_precision(name: str, dtype: torch.dtype) -> None:
    """Everywhere within 3/4 of a unit of the float64 value, or as close as PyTorch's own on the same device."""
    x = patterns(dtype)
    y, own = forward(name, x)[0], EVERY[name].baseline(x.to(DEVICE)).cpu()
    exact = EVERY[name].baseline(x.double())
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
    formula = FORMULAS[EVERY[name].fit["activation"]["name"]]
    x = torch.cat([values.points(torch.float32), 3 * torch.randn(MANY)])
    lines = values.misses(formula, forward(name, x)[0], x)
    assert not lines, values.report(formula, lines)
    infinite = torch.tensor([torch.inf, -torch.inf])
    limit = torch.from_numpy(values.truth(formula, infinite.double().numpy()))
    known = limit.isfinite()
    y = forward(name, infinite)[0].double()
    torch.testing.assert_close(y[known], limit[known], rtol=1e-6, atol=1e-7)
    assert forward(name, torch.tensor([torch.nan]))[0].isnan().all()


@pytest.mark.parametrize("name", [name for name in EVERY if name in FEW])
@each_dtype
@pytest.mark.parametrize("n", SIZES)
def test_sizes_round_the_tile(name: str, dtype: torch.dtype, n: int) -> None:
    x = torch.randn(n).to(dtype)
    y, codes = forward(name, x)
    assert torch.equal(codes, forward_op(x, dtype, EVERY[name].module._KEY, reference=True)[1])
    check_gradient(name, torch.randn(n).to(dtype), y, codes)


def step() -> Shipped:
    one = EVERY["gelu_fewbit3"]
    assert isinstance(one, Shipped)
    return one


@each_dtype
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_gpu)])
def test_through_autograd(dtype: torch.dtype, compiled: bool) -> None:
    """Any layout; 3 bits an element are kept and nothing else; no value is fetched from the device."""
    torch._dynamo.reset()
    function = torch.compile(step().function, fullgraph=True) if compiled else step().function
    for x in (torch.randn(3, 64, 32), torch.randn(50, 300).t(), torch.randn(2, 8, 9, 10).permute(0, 2, 3, 1)):
        leaf = x.to(DEVICE, dtype).requires_grad_()
        dy = torch.randn(x.shape).to(DEVICE, dtype)
        function(leaf)  # compiles
        with count_saved() as saved, no_synchronising():
            y = function(leaf)
        assert y.stride() == leaf.stride()
        assert saved.bytes == -(-x.numel() // 8192) * 3072
        (dx,) = torch.autograd.grad(y, leaf, dy)
        assert same(dx.cpu(), step().gradient(leaf.cpu(), dy.cpu()))
        torch.testing.assert_close(y, F.gelu(leaf), rtol=UNIT[dtype], atol=1e-6)


@contextmanager
def no_synchronising() -> Iterator[None]:
    """Raise where the host waits for the GPU."""
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


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # its own, which PyTorch hides itself
@pytest.mark.parametrize("name", [name for name in EVERY if name in FEW])
@each_dtype
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    key = EVERY[name].module._KEY
    x = torch.randn(33, 5).to(DEVICE, dtype).requires_grad_()
    y, codes = forward_op(x, dtype, key, check=True)
    output = y.detach() if find(key).keeps_output else None
    backward_op(torch.ones_like(y), output, codes, dtype, key, check=True)


@needs_gpu
@pytest.mark.parametrize("name", FEW)
def test_autocast(name: str) -> None:
    """Where the output is kept it is the one that autocast makes, at half the bytes."""
    x = torch.randn(64, 512, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y = EVERY[name].function(x)
    assert y.dtype == (torch.bfloat16 if find(EVERY[name].module._KEY).keeps_output else torch.float32)
    (dx,) = torch.autograd.grad(y.float().sum(), x)
    leaf = x.detach().requires_grad_()
    (expected,) = torch.autograd.grad(EVERY[name].baseline(leaf).sum(), leaf)
    step_error = step().fit["error"]["max"] + 1e-4  # of f' itself, whatever the dtype
    tolerance = {"gelu_fewbit3": step_error, "gelu_inverted1": 0.02, "tanh_exact": 0.01}[name]
    torch.testing.assert_close(dx, expected, rtol=0, atol=tolerance)


@needs_gpu
@pytest.mark.parametrize("name", FEW)
def test_cuda_graphs(name: str) -> None:
    """A captured forward and backward, replayed with other numbers, is what eager computes of these."""
    function = EVERY[name].function
    x = torch.randn(100_000, device="cuda", requires_grad=True)
    dy = torch.randn(100_000, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(function(x), x, dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = function(x)
        (dx,) = torch.autograd.grad(y, x, dy)
    with torch.no_grad():
        x.copy_(torch.randn(100_000))
        dy.copy_(torch.randn(100_000))
    graph.replay()
    expected_y = function(x)
    (expected_dx,) = torch.autograd.grad(expected_y, x, dy)
    assert same(y, expected_y)
    assert same(dx, expected_dx)


@needs_gpu
@pytest.mark.parametrize("name", FEW)
def test_streams(name: str) -> None:
    """The kernels run on the current stream: what is written before on it is read."""
    function = EVERY[name].function
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
    found = []
    for device in ("cuda:1", "cuda:0"):
        leaf = x.to(device).requires_grad_()
        y = step().function(leaf)
        (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
        assert y.device == dx.device == torch.device(device)
        found.append((y.cpu(), dx.cpu()))
    assert all(same(a, b) for a, b in zip(*found, strict=True))


@needs_gpu
def test_more_elements_than_an_int32_counts() -> None:
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB")
    tail = 3 * 8192 + 5
    x = torch.zeros(2**31 + tail, dtype=torch.bfloat16, device="cuda")
    end = torch.randn(tail).bfloat16()
    x[-tail:] = end.cuda()
    key = step().module._KEY
    y, codes = forward_op(x, x.dtype, key)
    expected_y, expected_codes = forward_op(end.cuda(), x.dtype, key)
    assert same(y[-tail:], expected_y)
    assert torch.equal(codes[-expected_codes.numel() :], expected_codes)
    dx = backward_op(x, None, codes, x.dtype, key)[0]
    assert same(dx[-tail:].cpu(), step().gradient(end, end))
    assert not dx[:-tail].any()


@needs_gpu
def test_memory_that_is_taken() -> None:
    """Forward takes the output and 3 bits an element, backward the gradient; there is nothing beside."""
    n = 2**24
    x = torch.randn(n, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    torch.autograd.grad(step().function(x), x, dy)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = step().function(x)
    assert torch.cuda.memory_allocated() - before <= 2 * n + 3 * n // 8 + 2 * 2**20  # the allocator rounds
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.cuda.max_memory_allocated() - before <= 4 * n + 3 * n // 8 + 3 * 2**20
    assert dx.dtype == torch.bfloat16


GATES = ("swiglu_rebuild", "geglu_rebuild")


def halves(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of one tensor on the device: every number of half precision; of float32 any bits, and normal ones."""
    anything = torch.randint(-(2**31), 2**31, (MANY,)).int().view(torch.float32)
    x = patterns(dtype) if dtype != torch.float32 else torch.cat([anything, 3 * torch.randn(MANY)])
    rows = torch.cat([x.view(-1, 2048), x[torch.randperm(len(x))].view(-1, 2048)], 1)
    g, u = rows.to(DEVICE).chunk(2, -1)
    return g, u


@pytest.mark.parametrize("name", GATES)
@each_dtype
def test_gates(name: str, dtype: torch.dtype) -> None:
    key = import_module(f"fitact.generated.{name}")._KEY
    g, u = halves(dtype)
    dh = torch.randn(g.shape).to(dtype)
    found = forward_op(g, dtype, key, u)[0], *backward_op(dh.to(DEVICE), g, None, dtype, key, u)
    g, u = g.cpu(), u.cpu()
    expected = (
        forward_op(g, dtype, key, u, reference=True)[0],
        *backward_op(dh, g, None, dtype, key, u, reference=True),
    )
    # where the formula of a derivative overflows or cancels, PyTorch's own does so elsewhere
    ordinary = (g.abs() < 20) & (u.abs() < 20)
    reach = (1 + g.double().abs()) * (1 + u.double().abs()) * (1 + dh.double().abs())
    for one, other in zip(found, expected, strict=True):
        near(one.cpu()[ordinary], other[ordinary], reach[ordinary])


@needs_gpu
@pytest.mark.parametrize("name", GATES)
def test_gates_in_a_cuda_graph(name: str) -> None:
    function = getattr(import_module(f"fitact.generated.{name}"), name)
    g, u = (torch.randn(64, 3000, device="cuda", requires_grad=True) for _ in range(2))
    dh = torch.randn_like(g)
    torch.autograd.grad(function(g, u), (g, u), dh)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h = function(g, u)
        captured = torch.autograd.grad(h, (g, u), dh)
    with torch.no_grad():
        g.copy_(torch.randn(64, 3000))
    graph.replay()
    expected = function(g, u)
    assert same(h, expected)
    assert all(map(same, captured, torch.autograd.grad(expected, (g, u), dh)))


@needs_gpu
@pytest.mark.parametrize("name", GATES)
def test_memory_that_gates_take(name: str) -> None:
    """Forward takes the output, backward both gradients."""
    function, n = getattr(import_module(f"fitact.generated.{name}"), name), 2**24
    g, u = (torch.randn(n, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    dh = torch.randn_like(g)
    torch.autograd.grad(function(g, u), (g, u), dh)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    h = function(g, u)
    assert torch.cuda.memory_allocated() - before <= 2 * n + 2**21
    torch.autograd.grad(h, (g, u), dh)
    assert torch.cuda.max_memory_allocated() - before <= 6 * n + 2**22


COLUMNS = [1, 100, 768, 4096, 5000, LONGEST + 1]


@pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])
@each_dtype
@pytest.mark.parametrize("columns", COLUMNS)
def test_norms(centred: bool, dtype: torch.dtype, columns: int) -> None:
    """Both passes of the memory-sharing norms beside the CPU's path."""
    rows = 300 if GPU and columns < 10_000 else 9
    x = (torch.randn(rows, columns) * 2 + 0.3).to(dtype)
    key, given = LAYER if centred else RMS, {"inner": columns, "eps": 1e-5}
    z, scale = forward_op(x.to(DEVICE), dtype, key, **given)
    expected_z, expected_scale = forward_op(x, dtype, key, **given, reference=True)
    unit = max(UNIT[dtype], 4e-6)
    torch.testing.assert_close(z.cpu(), expected_z, rtol=unit, atol=unit)
    torch.testing.assert_close(scale.cpu(), expected_scale, rtol=2e-6, atol=0)
    dz = torch.randn(x.shape).to(dtype)
    kept = dz, expected_z, expected_scale
    dx, _ = backward_op(*(part.to(DEVICE) for part in kept), dtype, key, inner=columns)
    expected_dx, _ = backward_op(*kept, dtype, key, inner=columns, reference=True)
    size = float((expected_scale[..., None] * dz.abs()).max())
    torch.testing.assert_close(dx.cpu(), expected_dx, rtol=unit, atol=4e-6 * size)


@needs_gpu
@pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])
def test_norms_in_a_cuda_graph(centred: bool) -> None:
    norm: Any = ms_layer_norm if centred else ms_rms_norm
    x = torch.randn(512, 768, device="cuda", requires_grad=True)
    dz = torch.randn_like(x)
    torch.autograd.grad(norm(x, 768, 1e-5), x, dz)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = norm(x, 768, 1e-5)
        (dx,) = torch.autograd.grad(z, x, dz)
    with torch.no_grad():
        x.copy_(torch.randn(512, 768))
    graph.replay()
    expected = norm(x, 768, 1e-5)
    assert same(z, expected)
    assert same(dx, torch.autograd.grad(expected, x, dz)[0])


@needs_gpu
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize(("rows", "classes"), [(37, 1000), (8192, 1000), (520, 50257)])
def test_losses(rows: int, classes: int, autocast: bool, reduction: str) -> None:
    """A loss of which logits are saved, and its gradient, have the bits of PyTorch's."""
    x = torch.randn(rows, classes, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(classes, (rows,), device="cuda")
    target[::5] = -100
    found = []
    for context in (nullcontext(), saving()):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast), context:
            logits = x * 1.5
            loss = F.cross_entropy(logits if autocast else logits.float(), target, reduction=reduction)
        found.append((loss, *torch.autograd.grad(loss, x, torch.full_like(loss, 1.7))))
    assert "CrossEntropy" in type(loss.grad_fn).__name__
    assert all(same(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("bits", BITS if GPU else (3, 8))
@each_dtype
def test_block_codes(dtype: torch.dtype, bits: int) -> None:
    """The kernels write the bytes of PyTorch's operators on a CPU, and read them."""
    anything = torch.randint(-(2**31), 2**31, (MANY,)).int().view(torch.float32)
    every = patterns(dtype) if dtype != torch.float32 else torch.cat([anything, 3 * torch.randn(MANY)])
    few = every[:: 1 if GPU else 16]
    finite = torch.where(few.isfinite(), few, 1)
    outliers = torch.randn(200, 192) * torch.where(torch.arange(192) % 50 == 7, 100, 1)
    odd = torch.randn(65, 70), torch.randn(1000), torch.randn(0, 64)
    for x in (
        few,
        finite.view(-1, 128),
        outliers.to(dtype),
        outliers.relu().to(dtype),
        *(one.to(dtype) for one in odd),
    ):
        parts = encode(x.to(DEVICE), bits, signs=bits % 2 == 1)
        y = decode(*parts, x.shape, dtype).cpu()
        with mock.patch.object(blocks, "KERNEL_DEVICES", ()):
            expected = encode(x, bits, signs=bits % 2 == 1)
            assert same(y, decode(*expected, x.shape, dtype))
        for one, other in zip(parts, expected, strict=True):
            assert torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8))


@needs_gpu
def test_block_codes_of_more_elements_than_an_int32_counts() -> None:
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB")
    tail = torch.randn(3 * 64, 4096).bfloat16()
    x = torch.zeros(2**19 + len(tail), 4096, dtype=torch.bfloat16, device="cuda")
    x[-len(tail) :] = tail.cuda()
    codes, scales, shifts = encode(x, 8)
    for one, other in zip((codes, scales, shifts), encode(tail, 8), strict=True):
        assert torch.equal(one[-len(other) :].cpu(), other)
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

    found, sizes = [], []
    for offload in (False, "all", "all", 0.5, 2**26):
        for layer in layers:
            layer.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = forward(offload)
        torch.cuda.synchronize()
        sizes.append(torch.cuda.memory_allocated() - before)
        y.square().sum().backward()
        found.append([layer.weight.grad.clone() for layer in layers])
        del y
    assert all(torch.equal(*pair) for one in found[1:] for pair in zip(one, found[0], strict=True))
    assert sizes[1] < 0.6 * sizes[0] and sizes[2] == sizes[1]
    assert all(one.bytes == 0 for one in _made.offloads.values())
