"""Codes as they are documented, and what the runtime needs and orders."""

import random

import pytest
import torch

from fitact.runtime.kernels import registry
from fitact.runtime.kernels.inputs import memory_order
from tests.support.generated import EACH_DTYPE, forward_op
from tests.support.inverses import SOME, unpacked
from tests.support.kinds import kind
from tests.support.processes import python


@pytest.mark.parametrize("name", ["gelu_fewbit3", *sorted(SOME)])
@EACH_DTYPE
def test_codes_are_the_layout_that_is_documented(name, dtype):
    """Row r of column j in bits [k·r, k·r + k) of an 8k-bit word, in k planes of 1024 bytes; 0 beyond the end."""
    one = kind(name)
    known = one.fit["borders"]
    borders = torch.tensor(known["bfloat16"] if isinstance(known, dict) else known)
    x = torch.cat([torch.randn(10_000) * 2, borders, borders + 1e-6, borders - 1e-6]).to(dtype)
    x[5] = torch.nan
    y, codes = forward_op(x, dtype, one.key)
    assert (y.dtype, codes.dtype, codes.shape) == (dtype, torch.uint8, (2 * one.bits * 1024,))
    expected = torch.zeros(2 * 8192, dtype=torch.long)
    expected[: len(x)] = one.code(x, dtype)
    assert expected[5] == 0 and set(expected.tolist()) == set(range(2**one.bits))
    assert torch.equal(unpacked(codes, one.bits), expected)


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


def test_without_triton_and_what_is_not_needed():
    python(SCRIPT)


def test_registering_twice_is_harmless():
    step = registry.find(kind("gelu_fewbit3").key)
    assert registry.register(step) == step.key


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
