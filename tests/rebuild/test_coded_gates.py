"""Gates of models that keep codes: those that ship run the ops of the shipped modules, others the activations'."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fitact
from fitact.runtime.memory.saved import count_saved
from fitact.runtime.ops.registry import registered
from fitact.runtime.rebuild import codes as coded_gates
from fitact.runtime.rebuild.codes import Codes, gate
from fitact.runtime.recipes import ATTRIBUTE
from tests.support.generated import same, sizes

FUNCTIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
SHIPPED = {("silu", 8, None), ("silu", 8, 8), ("silu", 6, 8), ("gelu", 8, None), ("gelu", 8, 8), ("gelu", 6, 8)}
CASES = [*product(FUNCTIONS, (8, 6), (None, 8)), ("silu", 4, 4)]
ops: Any = torch.ops.fitact


def key_of(name: str, bits: int) -> str:
    return registered(type(fitact.activation(name, method="coded", bits=bits))).key


def inputs(dtype: torch.dtype, layout: str) -> tuple[Tensor, Tensor]:
    if layout == "halves":
        whole = (2 * torch.randn(40, 2, 700)).to(dtype).requires_grad_()
        return whole[:, 0], whole[:, 1]
    g, u = (2 * torch.randn(2, 40, 700)).to(dtype)
    return g.clone().requires_grad_(), u.clone().requires_grad_()


def composed(codes: Codes, g: Tensor, u: Tensor, dh: Tensor) -> list[Tensor]:
    """The gradients of g and u, and what stands for the output in backward, by the activations' ops alone."""
    with torch.no_grad():
        of_g = ops.forward(g.contiguous(), g.dtype, None, codes.g)[1]
        again = u
        if codes.u is not None:
            of_u = ops.forward(u.contiguous(), u.dtype, None, codes.u)[1]
            again = ops.decode(of_u, u.shape, u.dtype, codes.u)
        f = ops.decode(of_g, g.shape, g.dtype, codes.g)
        dg = ops.backward((dh * again).contiguous(), None, of_g, dh.dtype, codes.g)
        return [dg, dh * f, f * again]


@pytest.mark.parametrize("layout", ["apart", "halves"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "bits", "bits_u"), CASES)
def test_the_same_bytes_as_composed(
    name: str, bits: int, bits_u: int | None, dtype: torch.dtype, layout: str
) -> None:
    codes = Codes(key_of(name, bits), None if bits_u is None else key_of("identity", bits_u))
    g, u = inputs(dtype, layout)
    dh = torch.randn(g.shape).to(dtype)
    with count_saved() as saved:
        h = gate(codes, FUNCTIONS[name], g, u)
    of_u = g.nbytes if bits_u is None else _bytes(g, bits_u)
    assert [one for one in sizes(saved) if one] == sorted([_bytes(g, bits), of_u])
    noted = getattr(h.untyped_storage(), ATTRIBUTE)
    assert not noted.recipe.exact
    with torch.no_grad():
        again = noted.recipe.function(*noted.state)
    assert same(h, FUNCTIONS[name](g) * u)
    found = [*torch.autograd.grad(h, (g, u), dh), again]
    assert all(map(same, found, composed(codes, g.detach(), u.detach(), dh)))


def _bytes(x: Tensor, bits: int) -> int:
    return x.numel() if bits == 8 else -(-x.numel() // 8192) * 1024 * bits


@pytest.mark.parametrize(("name", "bits", "bits_u"), CASES)
def test_those_that_ship_have_kernels(name: str, bits: int, bits_u: int | None) -> None:
    codes = Codes(key_of(name, bits), None if bits_u is None else key_of("identity", bits_u))
    found = coded_gates.gate_of(codes)
    assert found is coded_gates.gate_of(codes)
    ships = (name, bits, bits_u) in SHIPPED
    assert all((kernel is not None) == ships for kernel in (found.forward, found.backward, found.again))
    glu = {"silu": "swiglu", "gelu": "geglu"}
    if ships:
        assert found.name == f"{glu[name]}_coded{bits}" + ("" if bits_u is None else f"_{bits_u}")
