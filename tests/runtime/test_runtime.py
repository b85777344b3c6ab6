"""What only shipped step activations promise, on the PyTorch path."""

import random

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fitact
from fitact.runtime.kernels import registry
from fitact.runtime.kernels.inputs import memory_order
from tests.support.generated import forward_op, run
from tests.support.inverses import unpacked
from tests.support.processes import python
from tests.support.steps import Shipped, each, shipped

GELU3 = next(one for one in shipped() if one.name == "gelu_fewbit3")
gelu_fewbit3 = GELU3.function


@each()
def test_nan_has_the_first_level(one: Shipped) -> None:
    y, dx = run(one.function, torch.tensor([float("nan")]))
    assert y.isnan().all()
    assert dx.item() == one.fit["levels"][0]


class Called(TorchDispatchMode):
    """Counts the calls of fitact's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fitact":
            self.ops.append(func.name())
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("frozen", [False, True], ids=["input", "frozen layer"])
def test_what_needs_no_gradient_is_not_coded(frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), fitact.activation("gelu"), nn.Linear(8, 4))
    x = torch.randn(3, 8)
    with Called() as called:
        y = model(x) if frozen else gelu_fewbit3(x)
    assert not called.ops
    assert y.requires_grad == frozen
    with Called() as called:
        model(x.requires_grad_()).sum().backward()
    assert called.ops == ["fitact::forward", "fitact::backward"]


def test_codes_are_the_layout_that_is_documented() -> None:
    """Row r of column j in bits [k·r, k·r + k) of an 8k-bit word, stored as k planes of 1024 bytes."""
    x = torch.randn(10_000)
    x[5] = float("nan")
    _, codes = forward_op(x, x.dtype, GELU3.key)
    expected = torch.zeros(2 * 8192, dtype=torch.long)
    expected[:10_000] = sum((x > border).long() for border in GELU3.fit["borders"])
    assert codes.dtype == torch.uint8 and torch.equal(unpacked(codes, 3), expected)


SCRIPT = """
import sys
sys.modules["triton"] = None
import torch
from fitact.generated.gelu_fewbit3 import gelu_fewbit3
from fitact.runtime.kernels.triton_compat import HAS_TRITON
heavy = {"scipy", "sympy", "jinja2", "matplotlib", "fitact.fitter", "fitact.codegen"} & set(sys.modules)
assert not heavy, heavy
assert not HAS_TRITON
x = torch.randn(10, requires_grad=True)
gelu_fewbit3(x).sum().backward()
assert x.grad is not None and torch.equal(gelu_fewbit3(x), torch.nn.functional.gelu(x))
"""


def test_without_triton_and_what_is_not_needed() -> None:
    python(SCRIPT)


def test_keys() -> None:
    """A missing one is named in the error, and registering twice is harmless."""
    with pytest.raises(RuntimeError, match="import the generated module"):
        registry.find("nothing-0")
    step = registry.find(GELU3.key)
    assert registry.register(step) == step.key


def test_memory_order_is_that_of_empty_like() -> None:
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
