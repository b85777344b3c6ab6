"""What every kind of activation promises: values, gradients, layouts, dtypes, and what is saved.

Cheap tests run for each shipped activation, the rest for one of each kind.
"""

import copy
import pickle
import random
from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from torch import nn

import fitact
from fitact.base import UsageError
from fitact.runtime.kernels import registry
from fitact.runtime.kernels.inputs import memory_order
from fitact.runtime.measure.saved import count_saved
from tests.support import generated
from tests.support.built import built
from tests.support.generated import DTYPES, EACH_DTYPE, EACH_HALF, LAYOUTS, Generated, run, same, sizes
from tests.support.inverses import SOME, unpacked
from tests.support.kinds import QUICK, USUAL, each, every_kind, kind
from tests.support.processes import python
from tests.support.rows import full, turning
from tests.support.steps import PIECEWISE_LINEAR


@each()
@EACH_DTYPE
def test_values_and_gradients(case: Generated, dtype: torch.dtype) -> None:
    """Of every number of half precision; values bit for bit PyTorch's, with a gradient and without."""
    x = case.numbers(dtype)
    for dy in (torch.randn(x.shape, dtype=torch.float64).to(dtype), torch.ones_like(x)):
        y, dx = run(case.function, x, dy)
        assert same(y, case.baseline(x))
        assert dx.dtype == dtype
        case.check_gradient(x, y, dy, dx)
    with torch.no_grad():
        assert same(case.function(x), y)


@each()
@EACH_HALF
def test_autocast(case: Generated, dtype: torch.dtype) -> None:
    """A saved output is of the autocast dtype, but float64 stays; a float32 gradient is not rounded on its way."""
    for inner in DTYPES:
        leaf = (torch.randn(3000) * 2).to(inner).requires_grad_()
        x, expected = leaf.detach(), dtype if case.saves_output and inner != torch.float64 else inner
        with torch.autocast("cpu", dtype=dtype), count_saved() as saved:
            y = case.function(leaf)
            with torch.no_grad():
                assert case.function(x).dtype == expected
            with torch.autocast("cpu", enabled=False):
                assert case.function(x).dtype == inner
        assert y.dtype == expected and same(y, case.baseline(x).to(expected)) and sizes(saved) == case.saved(y)
        dy = torch.randn(3000).to(y.dtype)
        (dx,) = torch.autograd.grad(y, leaf, dy)
        assert dx.dtype == inner
        case.check_gradient(x, y, dy, dx)
        assert inner != torch.float32 or case.plain in PIECEWISE_LINEAR or not same(dx, dx.to(dtype).float())


@each()
def test_modules(case: Generated) -> None:
    method = case.fit["method"]
    options = {} if method == "output" else {"bits": case.bits}
    module = fitact.activation(case.name)
    if not case.name.endswith("_published"):
        assert type(module) is type(fitact.activation(case.plain, method=method, **options))
    assert type(module).__module__ == f"fitact.generated.{case.name}"
    x = torch.randn(50)
    for copied in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(copied) is type(module)
        assert same(copied(x), case.baseline(x))
    assert not module.state_dict() and not [*module.parameters()]


def test_keys_differ() -> None:
    keys = {name: import_module(f"fitact.generated.{name}")._KEY for name in fitact.shipped()}
    assert len({*keys.values()}) == len(keys)
    assert all(registry.register(registry.find(key)) == key for key in keys.values()), "twice is harmless"


@pytest.mark.parametrize(("case", "layout", "autocast"), turning(USUAL, LAYOUTS, (False, True)), indirect=["case"])
def test_layouts(case: Generated, layout: str, autocast: bool) -> None:
    """Bit for bit and in the same order of memory, with a gradient and without, in every dtype."""
    for dtype in DTYPES:
        x = (LAYOUTS[layout]() * 2).to(dtype)
        leaf = x.detach().requires_grad_()
        assert leaf.stride() == x.stride()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), count_saved() as saved:
            y, plain = case.function(leaf), case.function(x)
            with torch.no_grad():
                without = case.function(leaf)
        assert sizes(saved) == case.saved(y)
        baseline = case.baseline(x.contiguous() if layout in ("expanded", "sliced", "overlapping") else x)
        assert y.requires_grad and not plain.requires_grad
        for other in (y, plain, without):
            assert same(other, baseline.to(y.dtype))
            assert (other.shape, other.stride()) == (x.shape, baseline.stride())
            assert other.data_ptr() != x.data_ptr() or not x.numel()
        turned = torch.randn(y.shape[::-1]).permute([*reversed(range(y.dim()))])
        for dy in (torch.randn(x.shape), torch.randn(()).expand_as(y), turned, torch.randn(*y.shape, 2)[..., 0]):
            gradient = dy.to(y.dtype)
            (dx,) = torch.autograd.grad(y, leaf, gradient, retain_graph=True)
            case.check_gradient(x, y, gradient, dx)


@every_kind
def test_dtypes_and_objects_refused(case: Generated) -> None:
    for wrong in (torch.arange(3), torch.ones(3, dtype=torch.complex64), torch.ones(3, dtype=torch.bool), 1.0):
        with pytest.raises(TypeError, match=rf"{case.name}: expected a tensor of float16.*, got "):
            case.function(wrong)


SHAPES = {
    "": lambda y: y,
    "view": lambda y: y.view(-1, y.shape[-1]),
    "reshape": lambda y: y.reshape(2 * y.shape[0], -1, y.shape[-1]),
}
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES)


def reshaped(function: Callable, shape: str) -> nn.Module:
    return built(lambda self, x: SHAPES[shape](function(x)))


SMALL = full(turning(QUICK, ("eager", "aot_eager", "inductor"), SHAPES), lambda row: row[1] != "inductor")


@pytest.mark.parametrize(("case", "backend", "shape"), SMALL, indirect=["case"])
def test_saved_by_a_small_mlp_that_is_compiled(case: Generated, backend: str, shape: str) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 128), reshaped(case.function, shape), nn.Linear(128, 32)).bfloat16()
    x = torch.randn(2, 128, 32, dtype=torch.bfloat16)
    with count_saved(model) as saved:
        y = torch.compile(model, fullgraph=True, backend=backend)(x)
    output = torch.empty(2, 128, 128, dtype=torch.bfloat16)
    added = case.saved(output) if case.saves_output else [2 * output.numel(), *case.saved(output)]
    assert sizes(saved) == sorted([2 * x.numel(), *added])
    y.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@every_kind
@EACH_SHAPE
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
def test_the_next_layer_saves_the_output(case: Generated, shape: str, autocast: bool, norm: bool) -> None:
    """After a layer norm too, which autocast leaves in float32; and each parameter gets its gradient."""
    outputs, packed = list[torch.Tensor](), list[torch.Tensor]()
    first = nn.LayerNorm(128) if norm else nn.Linear(32, 128)
    noted = reshaped(lambda x: outputs.append(case.function(x)) or outputs[-1], shape)
    model = nn.Sequential(first, noted, nn.Linear(128, 32))
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), hooks:
        result = model(torch.randn(2, 128, 128 if norm else 32))
    (y,) = outputs
    wide = norm and not case.saves_output  # where codes are all that is saved, the dtype is the input's
    assert y.dtype == (torch.bfloat16 if autocast and not wide else torch.float32)
    saved = [t.data_ptr() for t in packed if t.numel() == y.numel() and t.is_floating_point()]
    # the next layer saves its copy, or the output that the activation saves, if it does
    assert saved.count(y.data_ptr()) == (0 if autocast and wide else 1 + case.saves_output)
    assert len(saved) == 1 + case.saves_output + norm
    result.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_activations_by_name() -> None:
    """With the bits that are usual; or what was looked for and the nearest that there are."""
    names = [type(fitact.activation("hardswish", **given)).__name__ for given in ({}, {"method": "inverted"})]
    assert names == ["HardswishFewbit3", "HardswishInverted2"]
    for name, options, expected in (
        ("gelu", {"bits": 7}, "gelu_fewbit7"),
        ("tanh", {"method": "output", "bits": 3}, "tanh_output3"),
        ("tanh_output", {"method": "relumix"}, "tanh_output_relumix3"),
    ):
        with pytest.raises(UsageError, match=rf"'{expected}' is shipped; near it are \w+_\w+, "):
            fitact.activation(name, **options)


@pytest.mark.parametrize("name", ["gelu_fewbit3", *sorted(SOME)])
@EACH_DTYPE
def test_codes_are_the_layout_that_is_documented(name, dtype):
    """Row r of column j in bits [k·r, k·r + k) of an 8k-bit word, in k planes of 1024 bytes; 0 beyond the end."""
    each = kind(name)
    known = each.fit["borders"]
    borders = torch.tensor(known["bfloat16"] if isinstance(known, dict) else known)
    x = torch.cat([torch.randn(10_000) * 2, borders, borders + 1e-6, borders - 1e-6]).to(dtype)
    x[5] = torch.nan
    y, codes = generated.forward_op(x, dtype, each.key)
    assert (y.dtype, codes.dtype, codes.shape) == (dtype, torch.uint8, (2 * each.bits * 1024,))
    expected = torch.zeros(2 * 8192, dtype=torch.long)
    expected[: len(x)] = each.code(x, dtype)
    assert expected[5] == 0 and set(expected.tolist()) == set(range(2**each.bits))
    assert torch.equal(unpacked(codes, each.bits), expected)


def test_without_triton_and_what_is_not_needed() -> None:
    python("""
import sys
sys.modules["triton"] = None
import torch
from fitact.generated.gelu_fewbit3 import gelu_fewbit3
from fitact.runtime.kernels.ops import HAS_TRITON
heavy = {"scipy", "sympy", "jinja2", "matplotlib", "fitact.fitter", "fitact.codegen"} & set(sys.modules)
assert not heavy, heavy
assert not HAS_TRITON
x = torch.randn(10, requires_grad=True)
gelu_fewbit3(x).sum().backward()
assert x.grad is not None and torch.equal(gelu_fewbit3(x), torch.nn.functional.gelu(x))
""")


def test_memory_order_is_that_of_empty_like():
    """Of tensors that are permuted, sliced, expanded, overlapping, and with dimensions of one or no element."""
    draw = random.Random(0)
    for _ in range(2000):
        dims = draw.randrange(5)
        sizes = [draw.choice((0, 1, 1, 2, 3, 4)) for _ in range(dims)]
        strides = [draw.choice((0, 1, 1, 2, 3, 4, 6, 12)) for _ in range(dims)]
        x = torch.empty_strided(sizes, strides, device="meta")
        if draw.random() < 0.5:
            x = torch.empty(sizes, device="meta").permute(draw.sample(range(dims), dims))
        assert torch.empty_like(x).permute(memory_order(x)).is_contiguous(), (x.shape, x.stride())
