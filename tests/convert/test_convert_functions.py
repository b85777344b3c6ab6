"""Activations that are called as functions; and those that transformers makes by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fitact
from fitact.errors import UsageError
from fitact.runtime.memory.saved import count_saved

N = 8192 * 4  # whole tiles, so that k bits are exactly that
Call = Callable[[Tensor], Tensor]

# A call, and the fit that stands for it; None if it is PyTorch's.
CALLS: dict[str, tuple[Call, str | None]] = {
    "F.gelu": (F.gelu, "gelu_fewbit3"),
    "F.gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), "gelu_tanh_fewbit3"),
    "F.silu": (F.silu, "silu_fewbit3"),
    "F.silu, not in place": (lambda x: F.silu(x, False), "silu_fewbit3"),
    "F.silu, named": (lambda x: F.silu(input=x), "silu_fewbit3"),
    "F.mish": (F.mish, "mish_fewbit3"),
    "F.relu": (F.relu, "relu_fewbit1"),
    "torch.relu": (torch.relu, "relu_fewbit1"),
    "Tensor.relu": (lambda x: x.relu(), "relu_fewbit1"),
    "F.relu6": (F.relu6, "relu6_fewbit2"),
    "torch.tanh": (torch.tanh, "tanh_fewbit3"),
    "F.tanh": (F.tanh, "tanh_fewbit3"),
    "Tensor.tanh": (lambda x: x.tanh(), "tanh_fewbit3"),
    "torch.sigmoid": (torch.sigmoid, "sigmoid_fewbit3"),
    "Tensor.sigmoid": (lambda x: x.sigmoid(), "sigmoid_fewbit3"),
    "torch.special.expit": (torch.special.expit, "sigmoid_fewbit3"),
    "F.elu": (F.elu, "elu_fewbit3"),
    "F.celu": (F.celu, "celu_fewbit3"),
    "torch.celu": (torch.celu, "celu_fewbit3"),
    "F.selu": (F.selu, "selu_fewbit3"),
    "F.softplus": (F.softplus, "softplus_fewbit3"),
    "F.softsign": (F.softsign, "softsign_fewbit3"),
    "F.logsigmoid": (F.logsigmoid, "logsigmoid_fewbit3"),
    "F.tanhshrink": (F.tanhshrink, "tanhshrink_fewbit3"),
    "F.hardswish": (F.hardswish, "hardswish_fewbit3"),
    "F.hardsigmoid": (F.hardsigmoid, "hardsigmoid_fewbit1"),
    "F.hardtanh": (lambda x: F.hardtanh(x, -1.0, 1.0), "hardtanh_fewbit1"),
    "F.hardshrink": (F.hardshrink, "hardshrink_fewbit1"),
    "F.softshrink": (lambda x: F.softshrink(x, lambd=0.5), "softshrink_fewbit1"),
    "F.leaky_relu": (lambda x: F.leaky_relu(x, 0.01), "leaky_relu_fewbit1"),
    "F.threshold": (lambda x: F.threshold(x, 1.0, 0.0), "threshold_fewbit1"),
    "nn.GELU": (nn.GELU(), "gelu_fewbit3"),
    "F.leaky_relu, steep": (lambda x: F.leaky_relu(x, 0.2), None),
    "F.elu, alpha": (lambda x: F.elu(x, alpha=0.5), None),
    "F.softplus, beta": (lambda x: F.softplus(x, 2.0), None),
    "F.softplus, threshold": (lambda x: F.softplus(x, 1, 1.0), None),
    "F.softplus, named threshold": (lambda x: F.softplus(x, threshold=0.5), None),
    "F.softplus, beta and threshold": (lambda x: F.softplus(x, 2.0, 1.0), None),
    "F.softplus, as it is by default": (lambda x: F.softplus(x, 1, 20), "softplus_fewbit3"),
    "F.threshold, else": (lambda x: F.threshold(x, 0.1, 20.0), None),
    "F.relu, in place": (lambda x: F.relu(x, inplace=True), None),
    "Tensor.relu_": (lambda x: x.relu_(), None),
    "torch.tanh_": (torch.tanh_, None),
    "torch.exp": (torch.exp, None),
}


@pytest.mark.parametrize(("call", "name"), CALLS.values(), ids=CALLS)
def test_calls(call: Call, name: str | None) -> None:
    start = torch.randn(N, requires_grad=True)
    stock = call(start * 1)
    stock_gradient = torch.autograd.grad(stock.sum(), start)[0]
    with fitact.converted_functions(), count_saved() as saved:
        y = call(start * 1)
    gradient = torch.autograd.grad(y.sum(), start)[0]
    assert torch.equal(y, stock)
    if name is None:
        assert torch.equal(gradient, stock_gradient)
    else:
        module = fitact.activation(name)
        expected = torch.autograd.grad(module(start).sum(), start)[0]
        assert torch.equal(gradient, expected)
        assert saved.bytes == int(name[-1]) * N // 8


WRONG: dict[str, Call] = {
    "no such approximation": lambda x: F.gelu(x, approximate="asdf"),
    "an approximation of another type": lambda x: F.gelu(x, approximate=3),  # type: ignore[arg-type]
    "by position": lambda x: F.gelu(x, "tanh"),  # type: ignore[call-arg]
    "no number": lambda x: F.leaky_relu(x, "0.01"),  # type: ignore[arg-type]
    "no number, nor a text of one": lambda x: F.softplus(x, beta="a"),  # type: ignore[arg-type]
    "None": lambda x: F.elu(x, None),  # type: ignore[arg-type]
    "twice": lambda x: F.silu(x, False, inplace=False),  # type: ignore[misc]
    "not in place": lambda x: torch.relu(x, inplace=False),  # type: ignore[call-arg]
    "a method": lambda x: x.relu(False),  # type: ignore[call-arg]
    "too many": lambda x: torch.celu(x, 1.0, False),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_calls_that_pytorch_refuses(call: Call) -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.raises((RuntimeError, TypeError)) as stock:
        call(x)
    with pytest.raises(stock.type) as raised, fitact.converted_functions():
        call(x)
    assert str(raised.value) == str(stock.value)


@pytest.mark.parametrize(
    ("function", "name"), [(F.silu, "silu_fewbit3"), (F.hardswish, "hardswish_fewbit3"), (F.mish, "mish_fewbit3")]
)
def test_calls_in_place(function: Callable[..., Tensor], name: str) -> None:
    start = torch.randn(N, requires_grad=True)
    stock = function(start)
    x = start * 1
    with fitact.converted_functions(), count_saved() as saved:
        y = function(x, inplace=True)
    assert y.data_ptr() == x.data_ptr() and torch.equal(x, stock)
    assert saved.bytes == 3 * N // 8
    gradient = torch.autograd.grad(y.sum(), start)[0]
    assert torch.equal(gradient, torch.autograd.grad(fitact.activation(name)(start).sum(), start)[0])
    x = start * 1
    with fitact.converted_functions("inverted", names=[name[:4]] if name[:4] != "hard" else ["hardswish"]):
        y = function(x, inplace=True)  # as PyTorch has it: an output that is kept needs memory of its own
    assert y.data_ptr() == x.data_ptr()
    stock_gradient = torch.autograd.grad(function(start).sum(), start)[0]
    assert torch.equal(torch.autograd.grad(y.sum(), start)[0], stock_gradient)


def recorded(y: Tensor) -> str:
    return type(y.grad_fn).__name__


def test_methods() -> None:
    x = torch.randn(N, requires_grad=True)
    sizes = {}
    for method in ("fewbit", "relumix", "inverted"):
        with fitact.converted_functions(method), count_saved() as saved:
            y = F.silu(x)
        sizes[method] = saved.bytes - y.nbytes * (method == "inverted")
    assert sizes == {"fewbit": 3 * N // 8, "relumix": 2 * N // 8, "inverted": N // 8}
    with fitact.converted_functions("exact"):
        assert recorded(F.softplus(x)) == "_PointwiseBackward"
        assert recorded(F.silu(x)) == "SiluBackward0"
    with fitact.converted_functions(bits=4), count_saved() as saved:
        F.gelu(x)
    assert saved.bytes == 4 * N // 8


def test_names() -> None:
    x = torch.randn(10, requires_grad=True)
    with fitact.converted_functions(names=("gelu", "gelu_tanh")):
        assert recorded(F.gelu(x)) == recorded(F.gelu(x, approximate="tanh")) == "_PointwiseBackward"
        assert recorded(torch.tanh(x)) == "TanhBackward0"


@pytest.mark.parametrize(
    ("given", "dtype"),
    [(torch.ones(3), None), (torch.arange(3), torch.int64), (torch.ones(3, dtype=torch.cfloat), torch.cfloat)],
)
def test_what_is_not_differentiated(given: Tensor, dtype: torch.dtype | None) -> None:
    with fitact.converted_functions():
        assert torch.relu(given.real if given.is_complex() else given).grad_fn is None
        if dtype == torch.cfloat:
            assert recorded(torch.tanh(given.requires_grad_())) == "TanhBackward0"
    x = torch.randn(3, requires_grad=True)
    with fitact.converted_functions(), torch.no_grad():
        assert F.gelu(x).grad_fn is None


def test_nothing_is_left_behind() -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(ZeroDivisionError), fitact.converted_functions():
        raise ZeroDivisionError
    assert recorded(F.gelu(x)) == "GeluBackward0"


def test_of_a_model_that_calls_functions() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 512), nn.Linear(512, 16)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    model, x = Calls(), torch.randn(64, 16)
    with count_saved(model) as stock:
        y = model(x)
    with fitact.converted_functions("inverted"), count_saved(model) as less:
        assert torch.equal(model(x), y)
    assert stock.bytes - less.bytes == N * 4 - N // 8


@pytest.mark.parametrize("inside", [False, True], ids=["around the call", "inside the function"])
def test_compiled_functions(inside: bool) -> None:
    torch._dynamo.reset()
    x = torch.randn(100, requires_grad=True)

    def plain(x: Tensor) -> Tensor:
        return F.gelu(x) * torch.tanh(x)

    context = fitact.converted_functions()

    def own(x: Tensor) -> Tensor:
        with context:
            return plain(x)

    expected = torch.autograd.grad(own(x).sum(), x)[0]
    if inside:
        compiled = torch.compile(own, backend="aot_eager", fullgraph=True)
        y = compiled(x)
    else:
        compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
        with fitact.converted_functions():
            y = compiled(x)
    assert torch.equal(y, plain(x))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"method": "auto"},
            "no method 'auto': expected fewbit, relumix, inverted, exact; auto is for fitact.convert",
        ),
        ({"bits": 9}, "bits 9: expected 1, 2, 3 or 4"),
        ({"names": ["glu"]}, "'glu': expected names of celu, elu, gelu"),
        ({"names": "glu"}, "'glu': expected names of celu, elu, gelu"),
        ({"names": []}, r"names \[\]: expected at least one"),
        ({"method": "exact", "names": ["gelu"]}, "exact: nothing is shipped for gelu"),
    ],
)
def test_wrong_input(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fitact.converted_functions(**given)


def test_one_name() -> None:
    assert list(fitact.converted_functions(names="gelu").modules) == ["gelu"]


@pytest.mark.parametrize("way", ["within", "within, reentrant", "context_fn"])
def test_checkpointed_functions(way: str) -> None:
    """What runs again in backward is converted too: gradients are as without checkpointing."""
    linear = nn.Linear(16, 16)

    def plain(x: Tensor) -> Tensor:
        return F.gelu(linear(x))

    def own(x: Tensor) -> Tensor:
        with fitact.converted_functions():
            return plain(x)

    def again() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), fitact.converted_functions()

    x = torch.randn(32, 16, requires_grad=True)
    (expected,) = torch.autograd.grad(own(x).sum(), x)
    (exact,) = torch.autograd.grad(plain(x).sum(), x)
    if way == "context_fn":
        with fitact.converted_functions():
            y = checkpoint(plain, x, use_reentrant=False, context_fn=again)
    else:
        y = checkpoint(own, x, use_reentrant=way == "within, reentrant")
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, expected) and not torch.equal(expected, exact)


# --------------------------------------------------------------------------------------------------- transformers


def test_names_in_transformers() -> None:
    from fitact.runtime.convert.transformers import register
    from fitact.runtime.models.prepare import imported

    transformers = imported("transformers")
    known = dict(transformers.activations.ACT2FN)
    try:
        names = register()
        gates = {name for name in fitact.shipped() if name.startswith(("swiglu_", "geglu_"))}
        assert register() == names == tuple(name for name in fitact.shipped() if name not in gates)
        for name in ("gelu_fewbit3", "silu_inverted1", "softplus_exact", "gelu_regelu2_published"):
            made = transformers.activations.ACT2FN[name]
            assert type(made).__module__ == f"fitact.generated.{name}"
        sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 1}
        config = partial(transformers.AutoConfig.for_model, "bert", **sizes, vocab_size=9)
        model = transformers.AutoModel.from_config(config(hidden_act="gelu_fewbit3"))
        twin = transformers.AutoModel.from_config(config(hidden_act="gelu"))
        twin.load_state_dict(model.state_dict())
        ids = torch.arange(8)[None]
        assert torch.equal(model.eval()(ids).pooler_output, twin.eval()(ids).pooler_output)
        assert {**known} == {name: known[name] for name in known if name not in names}
    finally:
        for name in set(transformers.activations.ACT2FN) - set(known):
            del transformers.activations.ACT2FN[name]
