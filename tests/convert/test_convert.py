"""Converting small models: what is replaced, what is left alone and why, what is kept; nothing else changes."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import random
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fitact
from fitact.errors import UsageError
from fitact.generated.gelu_fewbit3 import GeluFewbit3
from fitact.generated.silu_fewbit3 import SiluFewbit3
from fitact.runtime.convert.choices import PIECEWISE
from fitact.runtime.convert.probe import computes
from fitact.runtime.memory.saved import count_saved
from fitact.runtime.models.prepare import imported
from fitact.runtime.records import Conversion

METHODS = ("fewbit", "relumix", "inverted", "exact")
HALF = torch.bfloat16


def mlp(activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 64), activation, nn.Linear(64, 16))


def auto(model: nn.Module, **given: Any) -> Conversion:
    """Convert by measuring, to whatever keeps least."""
    return fitact.convert(model, "auto", error="few-bit", **given)


def of_any_error(method: str) -> dict[str, Any]:
    return {"error": "few-bit"} if method == "auto" else {}


def sites(conversion: Conversion) -> dict[str, str | None]:
    return {site.name: site.after for site in conversion}


class Holds(nn.Module):
    """Holds an activation as an attribute."""

    def __init__(self, activation: Any, down: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 64), activation, down or nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x)))
        return y


class Product(torch.autograd.Function):
    """A product of someone's own, which keeps its factors, whatever they could be rebuilt from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return dy * weight, (dy * x).sum_to_size(weight.shape)


class Scaled(nn.Module):
    """Multiplies by a weight, and keeps its input."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(columns))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Product.apply(x, self.weight)
        return y


# ----------------------------------------------------------------------------------------------- what is replaced

PLAIN = [
    (nn.CELU(), "celu_fewbit3"),
    (nn.ELU(), "elu_fewbit3"),
    (nn.GELU(), "gelu_fewbit3"),
    (nn.GELU(approximate="tanh"), "gelu_tanh_fewbit3"),
    (nn.Hardshrink(), "hardshrink_fewbit1"),
    (nn.Hardsigmoid(), "hardsigmoid_fewbit1"),
    (nn.Hardswish(), "hardswish_fewbit3"),
    (nn.Hardtanh(), "hardtanh_fewbit1"),
    (nn.LeakyReLU(), "leaky_relu_fewbit1"),
    (nn.LogSigmoid(), "logsigmoid_fewbit3"),
    (nn.Mish(), "mish_fewbit3"),
    (nn.ReLU(), "relu_fewbit1"),
    (nn.ReLU6(), "relu6_fewbit2"),
    (nn.SELU(), "selu_fewbit3"),
    (nn.SiLU(), "silu_fewbit3"),
    (nn.Sigmoid(), "sigmoid_fewbit3"),
    (nn.Softplus(), "softplus_fewbit3"),
    (nn.Softshrink(), "softshrink_fewbit1"),
    (nn.Softsign(), "softsign_fewbit3"),
    (nn.Tanh(), "tanh_fewbit3"),
    (nn.Tanhshrink(), "tanhshrink_fewbit3"),
    (nn.Threshold(1.0, 0.0), "threshold_fewbit1"),
]


@pytest.mark.parametrize(("activation", "name"), PLAIN, ids=[name for _, name in PLAIN])
def test_modules(activation: nn.Module, name: str) -> None:
    model = mlp(activation)
    x = 3 * torch.randn(50, 16)
    stock, state = model(x), model.state_dict()
    assert sites(fitact.convert(model, "fewbit")) == {"1": name}
    assert torch.equal(model(x), stock)
    assert model.state_dict().keys() == state.keys()
    assert sites(fitact.revert(model)) == {"1": type(activation).__name__}
    assert model[1] is activation


def of_library(home: str, name: str) -> nn.Module:
    imported(home.partition(".")[0])
    made: nn.Module = getattr(__import__(home, fromlist=[name]), name)()
    return made


LIBRARIES = [
    ("transformers.activations", "AccurateGELUActivation", "gelu_tanh"),
    ("transformers.activations", "FastGELUActivation", "gelu_tanh"),
    ("transformers.activations", "GELUActivation", "gelu"),
    ("transformers.activations", "GELUTanh", "gelu_tanh"),
    ("transformers.activations", "MishActivation", "mish"),
    ("transformers.activations", "NewGELUActivation", "gelu_tanh"),
    ("transformers.activations", "QuickGELUActivation", "quick_gelu"),
    ("transformers.activations", "ReLUSquaredActivation", "relu2"),
    ("transformers.activations", "SiLUActivation", "silu"),
    ("timm.layers.activations", "GELU", "gelu"),
    ("timm.layers.activations", "GELUTanh", "gelu_tanh"),
    ("timm.layers.activations", "HardSigmoid", "hardsigmoid"),
    ("timm.layers.activations", "HardSwish", "hardswish"),
    ("timm.layers.activations", "Mish", "mish"),
    ("timm.layers.activations", "QuickGELU", "quick_gelu"),
    ("timm.layers.activations", "Sigmoid", "sigmoid"),
    ("timm.layers.activations", "Swish", "silu"),
    ("timm.layers.activations", "Tanh", "tanh"),
]


@pytest.mark.parametrize(
    ("home", "kind", "name"), LIBRARIES, ids=[f"{home[:4]}-{kind}" for home, kind, _ in LIBRARIES]
)
def test_modules_of_libraries(home: str, kind: str, name: str) -> None:
    """Theirs are partly made of several operations, so that values agree up to their rounding."""
    model = mlp(of_library(home, kind))
    x = 3 * torch.randn(50, 16)
    stock = model(x)
    (site,) = fitact.convert(model, "fewbit")
    assert (site.before, site.after) == (kind, f"{name}_fewbit{1 if name == 'hardsigmoid' else 3}")
    torch.testing.assert_close(model(x), stock, rtol=1e-5, atol=2e-6)


FUNCTIONS = [
    (F.gelu, "gelu_fewbit3"),
    (functools.partial(F.gelu, approximate="tanh"), "gelu_tanh_fewbit3"),
    (F.silu, "silu_fewbit3"),
    (F.relu, "relu_fewbit1"),
    (torch.relu, "relu_fewbit1"),
    (torch.tanh, "tanh_fewbit3"),
    (F.tanh, "tanh_fewbit3"),
    (torch.sigmoid, "sigmoid_fewbit3"),
    (F.mish, "mish_fewbit3"),
    (F.softplus, "softplus_fewbit3"),
    (torch.Tensor.relu, "relu_fewbit1"),
]


@pytest.mark.parametrize(
    ("function", "name"), FUNCTIONS, ids=[f"{i}-{name}" for i, (_, name) in enumerate(FUNCTIONS)]
)
def test_functions_that_modules_hold(function: Callable[[Tensor], Tensor], name: str) -> None:
    model = Holds(function)
    x = torch.randn(50, 16)
    stock, children = model(x), list(model.named_modules())
    assert sites(fitact.convert(model, "fewbit")) == {"act": name}
    assert torch.equal(model(x), stock)
    assert list(model.named_modules()) == children
    fitact.revert(model)
    assert model.act is function


class HoldsFunction(nn.Module):
    """Calls a function that it holds in its own way."""

    def __init__(self, function: Callable[..., Tensor], *args: Any, **given: Any) -> None:
        super().__init__()
        self.linear, self.act, self.args, self.given = nn.Linear(16, 16), function, args, given

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        y: Tensor = self.act(input=x) if self.given == {"input": None} else self.act(x, *self.args, **self.given)
        return y


HELD: list[tuple[HoldsFunction, bool]] = [
    (HoldsFunction(F.gelu, approximate="tanh"), True),
    (HoldsFunction(F.leaky_relu, 0.3), True),
    (HoldsFunction(F.silu, inplace=True), True),
    (HoldsFunction(F.softplus, 2.0, threshold=1.0), True),
    (HoldsFunction(functools.partial(F.gelu, approximate="tanh"), approximate="none"), True),
    (HoldsFunction(F.gelu), False),
    (HoldsFunction(F.gelu, input=None), False),
    (HoldsFunction(functools.partial(F.silu, inplace=True)), False),
]


@pytest.mark.parametrize(("model", "stock"), HELD, ids=[f"{i}" for i in range(len(HELD))])
def test_functions_that_are_called_with_more_than_an_input(model: HoldsFunction, stock: bool) -> None:
    """Then they do what they did, gradient and all."""
    x = torch.randn(50, 16)
    expected = model(x)
    (gradient,) = torch.autograd.grad(expected.sum(), model.linear.bias)
    (site,) = fitact.convert(model, "fewbit")
    assert site.after
    y = model(x)
    assert torch.equal(y, expected)
    assert torch.equal(torch.autograd.grad(y.sum(), model.linear.bias)[0], gradient) == stock
    assert fitact.convert(model, "fewbit").sites[0].reason == f"already {site.after}"
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), expected)
    fitact.revert(twin)
    assert torch.equal(twin(x), expected) and not isinstance(twin.act, nn.Module)


def test_wherever_modules_are_held() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.listed = nn.ModuleList([nn.GELU(), nn.SiLU()])
            self.named = nn.ModuleDict({"a": nn.GELU(), "b": nn.Sequential(nn.Mish())})
            vars(self)["unregistered"] = nn.GELU()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            for act in (*self.listed, *self.named.values(), self.unregistered):
                x = act(self.linear(x))
            return x

    model = nn.Sequential(Hidden(), nn.Sequential(nn.Identity(), nn.Sequential(nn.GELU())))
    x = torch.randn(5, 4)
    stock = model(x)
    assert sites(fitact.convert(model, "fewbit")) == {
        "0.listed.0": "gelu_fewbit3",
        "0.listed.1": "silu_fewbit3",
        "0.named.a": "gelu_fewbit3",
        "0.named.b.0": "mish_fewbit3",
        "0.unregistered": "gelu_fewbit3",
        "1.1.0": "gelu_fewbit3",
    }
    assert torch.equal(model(x), stock)
    assert [type(child).__name__ for child in model[0].listed] == ["GeluFewbit3", "SiluFewbit3"]


def test_transformer_of_pytorch() -> None:
    """It holds F.relu as a function, and in evaluation mode takes a path of its own."""
    layer = nn.TransformerEncoderLayer(16, 2, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(3, 5, 16)
    stock = model(x)
    after = sites(fitact.convert(model, "fewbit"))
    assert after == {
        f"layers.{i}.{name}": None if name == "self_attn" else "relu_fewbit1"
        for i in range(2)
        for name in ("self_attn", "activation")
    }
    assert torch.equal(model(x), stock)
    torch.testing.assert_close(model.eval()(x), stock)


def test_one_module_at_several_places() -> None:
    act = nn.GELU()
    block = Holds(nn.SiLU())
    model = nn.Sequential(nn.Linear(16, 16), act, nn.Linear(16, 16), act, block, block)
    x = torch.randn(512, 16)
    stock = model(x)
    conversion = fitact.convert(model, "fewbit", example_inputs=x)
    assert sites(conversion) == {"1": "gelu_fewbit3", "3": "gelu_fewbit3", "4.act": "silu_fewbit3"}
    assert [site.reason for site in conversion] == ["", "the same module as 1", ""]
    assert conversion.sites[0].kept_before == 2 * 512 * 16 * 4
    assert conversion.sites[1].kept_before is None
    assert model[1] is model[3] and type(model[1]).__name__ == "GeluFewbit3"
    assert model[4] is model[5]
    assert torch.equal(model(x), stock)
    fitact.revert(model)
    assert model[1] is model[3] is act


IN_PLACE = [
    (nn.Hardswish(inplace=True), "hardswish_fewbit3, in place"),
    (nn.Hardsigmoid(inplace=True), "hardsigmoid_fewbit1, in place"),
    (nn.Hardtanh(inplace=True), "hardtanh_fewbit1, in place"),
    (nn.Mish(inplace=True), "mish_fewbit3, in place"),
    (nn.ReLU6(inplace=True), "relu6_fewbit2, in place"),
    (nn.SiLU(inplace=True), "silu_fewbit3, in place"),
    (nn.Threshold(1.0, 0.0, inplace=True), "threshold_fewbit1, in place"),
    (nn.CELU(inplace=True), None),
    (nn.ELU(inplace=True), None),
    (nn.LeakyReLU(inplace=True), None),
    (nn.ReLU(inplace=True), None),
    (nn.SELU(inplace=True), None),
]


@pytest.mark.parametrize(("activation", "name"), IN_PLACE, ids=[type(one).__name__ for one, _ in IN_PLACE])
def test_in_place(activation: nn.Module, name: str | None) -> None:
    """Those that keep a copy of their input are replaced, and still overwrite it; others keep their output."""
    holder = nn.Sequential(activation)
    start = torch.randn(5000, requires_grad=True)
    x = start * 1
    with count_saved() as saved:
        y = holder(x)
    alone = y.untyped_storage()._cdata not in saved.storages
    assert alone == (name is not None)
    (site,) = fitact.convert(holder, "fewbit")
    assert site.after == name
    assert name is not None or "in place" in site.reason
    again = start * 1
    with count_saved() as less:
        result = holder(again)
    assert result.data_ptr() == again.data_ptr()
    assert torch.equal(result, y)
    if name is not None:
        assert less.bytes < saved.bytes / 4
        (got,) = torch.autograd.grad(result.sum(), start)
        plain = type(activation)(1.0, 0.0) if isinstance(activation, nn.Threshold) else type(activation)()
        twin = nn.Sequential(plain)
        fitact.convert(twin, "fewbit")
        (expected,) = torch.autograd.grad(twin(start).sum(), start)
        assert torch.equal(got, expected)
        assert fitact.convert(holder, "fewbit").sites[0].reason == f"already {name}"
    fitact.revert(holder)
    assert holder[0] is activation


def test_in_place_has_no_use_for_methods_that_keep_the_output() -> None:
    (site,) = fitact.convert(nn.Sequential(nn.SiLU(inplace=True)), "inverted")
    assert site.after is None and "another tensor" in site.reason


# --------------------------------------------------------------------------------------------- what is left alone


@pytest.mark.parametrize("method", ["fewbit", "relumix", "inverted"])
def test_an_input_that_another_activation_keeps(method: str) -> None:
    """Where that one is left alone, codes would come beside its output; where it is replaced too, they pay."""
    model, x = mlp(nn.Sequential(nn.Tanh(), nn.GELU())), torch.randn(2000, 16)
    report = fitact.convert(model, method, exclude="*.0", example_inputs=x)
    with count_saved(model) as saved:
        model(x)
    assert report.kept_after == report.kept_before == saved.bytes
    assert [site.after for site in report] == [None, None] and "neighbouring" in report.sites[1].reason
    both = mlp(nn.Sequential(nn.SiLU(), nn.GELU()))
    pays = fitact.convert(both, method, example_inputs=x)
    assert pays.kept_before and pays.kept_after and pays.replaced and pays.kept_after < pays.kept_before


@pytest.mark.parametrize("given", [{"method": "fewbit"}, {"error": "few-bit"}, {"error": "exact"}])
def test_what_computes_a_parameter(given: dict[str, Any]) -> None:
    """Its gradient is not the model's to approximate, and its dtype not autocast's."""
    norm = nn.LayerNorm(64)
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Softplus())
    model, x = nn.Sequential(nn.Linear(64, 64), norm, nn.GELU(), nn.Linear(64, 64)), torch.randn(50, 64)
    with torch.autocast("cpu", torch.bfloat16):
        report = fitact.convert(model, example_inputs=x, **given)
        model(x).sum().backward()
    assert "parametrizations" not in str(report)


class Spectrum(nn.Module):
    """An activation of complex numbers, one of real ones, and one of indices."""

    def __init__(self) -> None:
        super().__init__()
        self.index, self.embedding, self.bend = nn.ReLU(), nn.Embedding(4, 64), nn.Tanh()
        self.act, self.out = nn.GELU(), nn.Linear(66, 64)

    def forward(self, i: Tensor) -> Tensor:
        wave = self.bend(torch.fft.rfft(self.embedding(self.index(i))))
        found: Tensor = self.out(self.act(torch.view_as_real(wave).flatten(-2)))
        return found


@pytest.mark.parametrize(
    "given",
    [{"method": "fewbit"}, {"method": "coded"}, *({"error": one} for one in ("exact", "rounding"))],
)
def test_numbers_that_are_not_real(given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, i = Spectrum(), torch.randint(0, 4, (500,))
    expected = model(i)
    report = fitact.convert(model, example_inputs=i, **given)
    reasons = {site.name: site.reason for site in report if site.name in ("index", "bend") and not site.after}
    assert reasons == {
        "index": "its output is torch.int64, which no replacement takes",
        "bend": "its output is torch.complex64, which no replacement takes",
    }
    assert report.kept_before and report.kept_after and report.kept_after <= report.kept_before
    assert torch.equal(model(i), expected)


class Learned(nn.GELU):
    pass


def hooked() -> nn.Module:
    act = nn.GELU()
    act.register_forward_hook(lambda *_: None)
    return act


def patched() -> nn.Module:
    act = nn.GELU()
    vars(act)["forward"] = F.silu
    return act


LEFT = [
    (nn.PReLU(), "parameters are learned"),
    (patched(), "its forward is not that of its class"),
    (nn.RReLU(), "random"),
    (nn.ReLU(inplace=True), "in place"),
    (nn.Softmax(-1), "whole row"),
    (nn.LogSoftmax(-1), "whole row"),
    (nn.Softmin(-1), "whole row"),
    (nn.Softmax2d(), "channels"),
    (nn.GLU(), "one half"),
    (nn.MultiheadAttention(8, 2), "softmax of attention"),
    (
        nn.LeakyReLU(0.2),
        "fitact fit --fn leaky_relu --param negative_slope=0.2 --bits 1 --name leaky_relu_0_2_fewbit1",
    ),
    (
        nn.Hardtanh(-2.0, 2.0),
        "--param min_val=-2.0 --param max_val=2.0 --bits 1 --name hardtanh_minus_2_2_fewbit1",
    ),
    (nn.Softplus(2.0), 'fitact fit --fn "softplus(2.0*x)/2.0" --bits 3 --name softplus_beta_2_fewbit3'),
    (nn.Softplus(threshold=1.0), "with a threshold other than 20 it is not softplus"),
    (nn.Softplus(2.0, 1.0), "with a threshold other than 20 it is not softplus"),
    (nn.GELU(approximate="asdf"), "approximate='asdf': expected none or tanh"),
    (nn.LeakyReLU("0.01"), "negative_slope='0.01': expected a number"),  # type: ignore[arg-type]
    (Learned(), "fitact does not know it"),
    (hooked(), "hooks"),
]


@pytest.mark.parametrize(
    ("activation", "reason"), LEFT, ids=[f"{i}-{type(one).__name__}" for i, (one, _) in enumerate(LEFT)]
)
def test_left_alone(activation: nn.Module, reason: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), activation, nn.GELU())
    alone, replaced = fitact.convert(model, "fewbit")
    assert (alone.name, alone.after) == ("1", None) and reason in alone.reason
    assert replaced.after == "gelu_fewbit3"
    assert model[1] is activation


def test_an_activation_with_another_forward_has_one_record() -> None:
    """Neither as an activation is it replaced, nor as a module that calls functions."""
    model = nn.Sequential(nn.Linear(4, 4), patched(), nn.Linear(4, 4))
    report = fitact.convert(model, error="exact", example_inputs=torch.randn(2, 4))
    assert [(one.name, one.after, one.reason) for one in report] == [
        ("1", None, "its forward is not that of its class")
    ]


class Slope(nn.Module):
    """Reads what its activation holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(16, 64), nn.LeakyReLU(), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.act(self.first(x)) * self.act.negative_slope)
        return y


@pytest.mark.parametrize("given", [{"method": "fewbit"}, {"method": "exact"}], ids=str)
def test_a_model_that_reads_what_its_activation_holds(given: dict[str, Any]) -> None:
    model, x = Slope(), torch.randn(64, 16)
    stock = model(x)
    assert fitact.convert(model, **given, example_inputs=x).replaced
    assert torch.equal(model(x), stock)
    assert model.act.negative_slope == 0.01 and model.act.training and not isinstance(model.act, nn.LeakyReLU)
    fitact.revert(model)
    assert torch.equal(model(x), stock)


def test_softplus_keeps_its_value() -> None:
    """It is linear from a threshold on; the shipped one has PyTorch's, 20, whatever else a model has."""
    x = torch.linspace(-30, 30, 1001)
    for activation in (nn.Softplus(), nn.Softplus(threshold=1.0), nn.Softplus(2.0), nn.Softplus(2.0, 0.5)):
        model = nn.Sequential(activation, nn.GELU())
        stock = model(x)
        fitact.convert(model, "fewbit")
        assert torch.equal(model(x), stock)


def test_a_class_of_the_same_name_is_not_taken_for_it() -> None:
    class Swish(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.beta = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(self.beta * x)

    assert sites(fitact.convert(nn.Sequential(Swish(), nn.GELU()), "fewbit")) == {"1": "gelu_fewbit3"}


def of_ones_own(compute: Callable[[Tensor], Tensor], **held: Any) -> nn.Module:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            vars(self).update(held)

        def forward(self, x: Tensor) -> Tensor:
            return compute(x)

    return Own()


def gelu_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def wrong_gradient(x: Tensor) -> Tensor:
    return x + (F.gelu(x) - x).detach()


OWN: dict[str, tuple[nn.Module, str | None]] = {
    "silu": (of_ones_own(lambda x: x * torch.sigmoid(x)), "silu_fewbit3"),
    "gelu": (of_ones_own(lambda x: x * 0.5 * (1.0 + torch.erf(x / 2**0.5))), "gelu_fewbit3"),
    "gelu_tanh": (of_ones_own(gelu_by_hand, scale=1.0, name="gelu", bias=None), "gelu_tanh_fewbit3"),
    "mish": (of_ones_own(lambda x: x * torch.tanh(F.softplus(x))), "mish_fewbit3"),
    "relu2": (of_ones_own(lambda x: torch.relu(x) ** 2), "relu2_fewbit3"),
    "exp": (of_ones_own(torch.exp), None),  # with Few-Bit there is none
    "another factor": (of_ones_own(lambda x: x * torch.sigmoid(1.01 * x)), None),
    "nearly": (of_ones_own(lambda x: F.gelu(x) + 1e-4), None),
    "far away": (of_ones_own(lambda x: F.silu(x.clamp(max=50))), None),
    "its gradient": (of_ones_own(wrong_gradient), None),
    "the identity": (of_ones_own(lambda x: x), None),
    "a row": (of_ones_own(lambda x: x.softmax(-1)), None),
    "a part of a row": (of_ones_own(lambda x: torch.cat([F.gelu(x[..., :1]), x[..., 1:]], -1)), None),
    "chance": (of_ones_own(lambda x: F.dropout(F.gelu(x), 0.1)), None),
    "another dtype": (of_ones_own(lambda x: F.gelu(x.float())), None),
    "its input": (of_ones_own(lambda x: F.relu(x) + 0 * x.detach().add_(1)), None),
    "state": (of_ones_own(F.gelu, calls=[]), None),
    "two tensors": (of_ones_own(lambda x: (F.gelu(x), x)), None),  # type: ignore[arg-type,return-value]
}


@pytest.mark.parametrize(("activation", "name"), OWN.values(), ids=OWN)
def test_modules_of_ones_own_are_known_by_what_they_compute(activation: nn.Module, name: str | None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), activation, nn.GELU())
    x, random_state = torch.randn(5, 4), torch.random.get_rng_state()
    conversion = fitact.convert(model, "fewbit")
    assert torch.equal(torch.random.get_rng_state(), random_state)
    found = {site.name: site.after for site in conversion}
    assert found.get("1") == name and found["2"] == "gelu_fewbit3"
    if name is not None:
        torch.testing.assert_close(model[1](x), activation(x), rtol=1e-5, atol=2e-6)
        assert conversion.sites[0].before == "Own"
    fitact.revert(model)
    assert model[1] is activation


def test_modules_of_ones_own_without_memory() -> None:
    """They are tried with numbers, wherever `convert` is called."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for context in (FakeTensorMode(), torch.device("meta"), fitact.converted_functions(), torch.inference_mode()):
        with context:
            model = nn.Sequential(nn.Linear(4, 4), of_ones_own(lambda x: x * torch.sigmoid(x)))
            assert sites(fitact.convert(model, "fewbit")) == {"1": "silu_fewbit3"}


class Experts(nn.Module):
    """Computes a clamped SwiGLU in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 128), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        gate = gate.clamp(max=7.0)
        y: Tensor = self.down((up + 1) * gate * torch.sigmoid(1.702 * gate))
        return y


def test_what_is_not_seen_is_named() -> None:
    model = nn.Sequential(Experts(), Holds(nn.GELU()), Experts())
    x = torch.randn(512, 16)
    conversion = fitact.convert(model, "inverted", example_inputs=x)
    (unseen,) = conversion.unseen
    assert unseen.name == "*" and {"sigmoid", "mul"} <= {*unseen.operations}
    with count_saved(model, detail=True) as saved:
        model(x)
    pointwise = ("mul", "sigmoid", "clamp", "add")
    kept = [one for one in saved.kept.values() if one.module in "02" and one.operation in pointwise]
    assert unseen.kept == sum(one.bytes for one in kept) > 2 * 512 * 64 * 4
    assert f"not seen: * keeps {unseen.kept / 2**20:.1f} MiB through" in str(conversion)
    with pytest.raises(UsageError, match=r"holds an activation; not seen: 0 keeps .* sigmoid.*; for calls of"):
        fitact.convert(nn.Sequential(Experts()), "fewbit", example_inputs=x)
    assert fitact.convert(Holds(nn.GELU()), "fewbit", example_inputs=x).unseen == ()


def test_fewer_bits_are_told() -> None:
    model = nn.Sequential(nn.GELU(), nn.Mish(), nn.ReLU())
    four = fitact.convert(model, "fewbit", bits=4, dry_run=True)
    assert [(site.after, site.reason) for site in four] == [
        ("gelu_fewbit4", ""),
        ("mish_fewbit3", "3 bits: none of 4 is shipped"),
        ("relu_fewbit1", "1 bit: none of 4 is shipped"),
    ]
    two = fitact.convert(model, "fewbit", bits=2, dry_run=True)
    assert [site.after for site in two] == ["gelu_fewbit2", None, "relu_fewbit1"]
    assert "fitact fit --fn mish --bits 2" in two.sites[1].reason


def generated(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    name = path.parent.name if path.stem == "__init__" else path.stem
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("method", ["fewbit", "exact"])
@pytest.mark.parametrize("standalone", [False, True], ids=["", "standalone"])
def test_the_command_in_a_reason_makes_what_is_missing(
    command: Callable[[str], tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    standalone: bool,
) -> None:
    model = mlp(nn.LeakyReLU(0.2))
    (site,) = fitact.convert(nn.Sequential(model[1], nn.LeakyReLU()), method, dry_run=True).sites[:1]
    line = site.reason[site.reason.index("fitact fit") :].partition(";")[0]
    assert command(" ".join(map(shlex.quote, shlex.split(line)[1:])))[0] == 0
    assert command("codegen --standalone" if standalone else "codegen")[0] == 0
    name = shlex.split(line)[-1]
    folder = tmp_path / "standalone" / name / "__init__.py"
    module = generated(folder if standalone else tmp_path / "generated" / f"{name}.py", monkeypatch)
    kind = getattr(module, module.__all__[0])
    x = torch.randn(20, 16, requires_grad=True)
    stock = torch.autograd.grad(model(x).sum(), x)
    (site,) = fitact.convert(model, method, replace={nn.LeakyReLU: kind})
    assert site.after == name
    torch.testing.assert_close(torch.autograd.grad(model(x).sum(), x), stock)
    assert fitact.convert(model, "fewbit").sites[0].reason == f"already {name}"


def test_replace_comes_before_the_method() -> None:
    class Mine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(x)

    model = nn.Sequential(nn.GELU(), nn.SiLU(), Mine())
    conversion = fitact.convert(model, "inverted", replace={nn.SiLU: GeluFewbit3, Mine: GeluFewbit3})
    assert sites(conversion) == {"0": "gelu_inverted1", "1": "gelu_fewbit3", "2": "gelu_fewbit3"}
    assert [site.before for site in conversion] == ["GELU", "SiLU", "Mine"]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"include": "encoder.*"}, {"encoder.0.act", "encoder.1.act"}),
        ({"include": ["encoder.0.*", "head"]}, {"encoder.0.act", "head"}),
        ({"exclude": "head"}, {"encoder.0.act", "encoder.1.act"}),
        ({"include": "*.act", "exclude": ("*.1.*",)}, {"encoder.0.act"}),
    ],
)
def test_filters(given: dict[str, Any], names: set[str]) -> None:
    model = nn.Module()
    model.encoder, model.head = nn.Sequential(Holds(nn.GELU()), Holds(F.gelu)), nn.Tanh()
    conversion = fitact.convert(model, **given)
    assert {site.name for site in conversion.replaced} == names
    assert len(conversion) == 3
    assert {site.reason for site in conversion if site.after is None} <= {"not included", "excluded"}


# ---------------------------------------------------------------------------------------------------- wrong input

X = torch.zeros(2, 16)
BAD: list[tuple[str, dict[str, Any], str]] = [
    (
        "unknown method",
        {"method": "fewbits"},
        "no method 'fewbits': expected fewbit, relumix, inverted, exact, coded, rebuild or auto",
    ),
    ("bits", {"bits": 5}, "bits 5: expected 1, 2, 3 or 4"),
    ("bits of exact", {"method": "exact", "bits": 2}, "bits 2: expected none for exact"),
    ("nothing shipped", {"method": "exact"}, "nothing is replaced: exact: nothing is shipped for gelu"),
    ("include", {"include": "a.*"}, "include 'a.*': no activation has such a path; there are 1"),
    ("exclude", {"exclude": ["1", "b"]}, "exclude 'b': no activation has such a path; there are 1"),
    ("auto", {"method": "auto"}, 'method="auto" measures what each activation keeps: pass example_inputs'),
    ("norms", {"norms": True}, "pass example_inputs"),
    ("gradients", {"gradients": True}, "gradients=True runs the model: pass example_inputs"),
    ("error", {"method": "auto", "error": "some"}, "error 'some': expected exact, rounding or few-bit"),
    (
        "error of a method",
        {"method": "fewbit", "error": "rounding"},
        "expected only with method=\"auto\", got method='fewbit'",
    ),
    (
        "exact norms",
        {"method": "auto", "error": "exact", "norms": True, "example_inputs": torch.zeros(2, 16)},
        'error "exact": merged norms round differently from stock',
    ),
    ("norms", {"norms": "no"}, "norms: expected True or False, got 'no'"),
    ("dry run", {"dry_run": 1}, "dry_run: expected True or False, got 1"),
    (
        "replace by a layer",
        {"replace": {nn.GELU: nn.Linear}},
        "replace: Linear is not an activation or a gate that fitact codegen",
    ),
    (
        "replace by PyTorch's",
        {"replace": {nn.GELU: nn.SiLU}},
        "replace: SiLU is not an activation or a gate that fitact codegen",
    ),
    ("replace a layer", {"replace": {nn.Linear: GeluFewbit3}}, "Linear holds modules or parameters"),
    ("replace what is not there", {"replace": {nn.SiLU: GeluFewbit3}}, "replace: the model holds no SiLU"),
    ("replace an instance", {"replace": {nn.GELU: GeluFewbit3()}}, "replace: expected classes of modules"),
    ("inputs", {"example_inputs": 3}, "example_inputs 3: expected a tensor, a tuple or a mapping"),
    ("shape", {"example_inputs": torch.zeros(2, 3)}, "the model cannot be run with example_inputs: RuntimeError"),
    (
        "shape for auto",
        {"method": "auto", "example_inputs": {"y": X}},
        "the model cannot be run with example_inputs",
    ),
]


@pytest.mark.parametrize(("given", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_wrong_input(given: dict[str, Any], message: str) -> None:
    model = mlp(nn.GELU())
    before = dict(model.named_modules())
    with pytest.raises(UsageError) as error:
        fitact.convert(model, **given)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.GELU(), "the model is itself an activation, GELU: use fitact.activation"),
        (nn.Linear(2, 2), "no module holds an activation; for calls of functions such as F.gelu, use"),
        (nn.Sequential(nn.LazyLinear(4), nn.GELU()), "not initialised yet"),
        (nn.Sequential(nn.Linear(16, 2), nn.GELU()).requires_grad_(False), "nothing is saved"),
    ],
)
def test_wrong_model(model: nn.Module, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fitact.convert(model, "fewbit", example_inputs=X)


def test_lazy_models_are_not_rebuilt() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4), nn.GELU(), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    with pytest.raises(UsageError, match="not initialised yet: run it once"):
        fitact.convert(lazy, error="exact")
    assert fitact.convert(lazy, "fewbit").replaced


class Own(nn.Module):
    """Computes an activation itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


def test_inputs_that_only_fake_tensors_take() -> None:
    """PyTorch multiplies fake tensors of two dtypes."""
    with pytest.raises(UsageError, match="the model cannot be run with example_inputs: RuntimeError"):
        fitact.convert(Own(), error="exact", example_inputs=X.long())


def test_what_is_no_model() -> None:
    with pytest.raises(UsageError, match=r"expected a model, an nn\.Module, got list"):
        fitact.convert([nn.GELU()], "fewbit")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"expected a model, an nn\.Module, got function"):
        fitact.revert(mlp)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript() -> None:
    with pytest.raises(UsageError, match="TorchScript's modules cannot be changed"):
        fitact.convert(torch.jit.script(mlp(nn.GELU())), "fewbit")


def test_sharded_models_are_not_run() -> None:
    """A forward pass without a backward one would leave FSDP's parameters gathered, and the model broken."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = mlp(nn.GELU())
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UsageError, match="the model is sharded"):
            auto(model, example_inputs=X)
        assert sites(fitact.convert(model, "fewbit")) == {"1": "gelu_fewbit3"}
        model(X).sum().backward()
    finally:
        torch.distributed.destroy_process_group()


# ------------------------------------------------------------------------------------------- what does not change


def test_converting_twice() -> None:
    model = mlp(nn.GELU())
    fitact.convert(model, "fewbit")
    replacement = model[1]
    for method in ("fewbit", "inverted", "auto"):
        (site,) = fitact.convert(model, method, example_inputs=X)
        assert (site.before, site.after, site.reason) == ("gelu_fewbit3", None, "already gelu_fewbit3")
        assert site.kept_before == site.kept_after
        assert model[1] is replacement
    assert len(fitact.revert(model)) == 1
    assert len(fitact.revert(model)) == 0


def test_mode_is_kept() -> None:
    model = nn.Sequential(nn.GELU(), Holds(nn.SiLU()).eval())
    fitact.convert(model, "fewbit")
    assert [module.training for module in model.modules()] == [True, True, False, False, False, False]
    model.eval()
    fitact.revert(model)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("way", ["pickle", "deepcopy", "save"])
def test_copies(way: str, tmp_path: Path) -> None:
    act = nn.GELU()
    model = nn.Sequential(nn.Linear(16, 16), act, nn.Linear(16, 16), act, Holds(F.silu), nn.SiLU(inplace=True))
    x = torch.randn(4, 16)
    stock, text = model(x), repr(model)
    fitact.convert(model, "fewbit")
    if way == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    elif way == "save":
        torch.save(model, tmp_path / "model.pt")
        twin = torch.load(tmp_path / "model.pt", weights_only=False)
    else:
        twin = copy.deepcopy(model)
    assert twin[1] is twin[3] is not model[1]
    assert torch.equal(twin(x), stock)
    fitact.revert(twin)
    assert repr(twin) == text and twin[4].act is F.silu and twin[1] is twin[3]
    assert type(model[1]).__name__ == "GeluFewbit3"


def test_originals_are_kept_once() -> None:
    """As what they are, in the pickle too: a model grows by some bytes a replacement, and has no state more."""
    act = nn.GELU()
    many = nn.Sequential(*[act] * 50)
    one = nn.Sequential(act)
    fitact.convert(many, "fewbit"), fitact.convert(one, "fewbit")
    assert [*many.state_dict()] == []
    assert len(list(many.modules())) == 2
    assert len(pickle.dumps(many)) - len(pickle.dumps(one)) < 50 * 20


def test_state_goes_to_and_fro() -> None:
    stock, converted = Holds(nn.GELU()), Holds(nn.GELU())
    fitact.convert(converted, "fewbit")
    converted.load_state_dict(stock.state_dict())
    x = torch.randn(3, 16)
    assert torch.equal(converted(x), stock(x))
    Holds(nn.GELU()).load_state_dict(converted.state_dict())


class Stateful(nn.Module):
    """All that a forward pass may change."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.drop, self.act = (
            nn.Linear(16, 16),
            nn.BatchNorm1d(16),
            nn.Dropout(0.5),
            nn.GELU(),
        )
        self.looks = looks
        self.calls, self.cache = 0, {}
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.cache["x"] = self.last = x
        self.seen += x.detach().sum(0)
        y = self.drop(self.act(self.norm(self.linear(x))))
        if self.looks and y.sum().item() > 1e9:  # which fake tensors cannot do
            raise ValueError
        return y


@pytest.mark.parametrize("looks", [False, True], ids=["fake", "real"])
@pytest.mark.parametrize("method", ["fewbit", "auto"])
def test_a_dry_run_changes_nothing(looks: bool, method: str) -> None:
    model = Stateful(looks)
    x = torch.randn(1000, 16)
    state, members = copy.deepcopy(model.state_dict()), dict(vars(model))
    random_state = torch.random.get_rng_state()
    conversion = fitact.convert(model, method, dry_run=True, example_inputs=x, **of_any_error(method))
    assert conversion.dry_run and conversion.replaced
    assert vars(model).keys() == members.keys() and all(vars(model)[key] is members[key] for key in members)
    assert model.cache == {} and type(model.act) is nn.GELU
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_fake_and_real_runs_agree() -> None:
    x = torch.randn(1000, 16)
    first, second = (auto(Stateful(looks), example_inputs=x) for looks in (False, True))
    assert first == second


def test_inputs_are_not_overwritten() -> None:
    model = nn.Sequential(nn.SiLU(inplace=True), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    before = x.clone()
    looking = nn.Sequential(model, Stateful(True).eval())
    looking[1].linear = nn.Linear(4, 16)
    looking[1].forward = lambda y: y if y.sum().item() < 1e9 else -y
    fitact.convert(looking, "fewbit", dry_run=True, example_inputs=x)
    assert torch.equal(x, before)


def test_expanded_buffers() -> None:
    """Buffers are put back after a real run; of those that are expanded, many elements are one."""
    model = Stateful(looks=True)
    model.register_buffer("ones", torch.ones(1).expand(16))
    assert fitact.convert(
        model, "auto", error="few-bit", dry_run=True, example_inputs=torch.randn(1000, 16)
    ).replaced
    assert torch.equal(model.ones, torch.ones(16)) and model.ones.stride() == (0,)


@pytest.mark.parametrize("of", ["parameters on meta", "fake parameters"])
def test_models_without_memory(of: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    with torch.device("meta") if of == "parameters on meta" else mode:
        model, x = mlp(nn.GELU()), torch.empty(1000, 16)
    real = auto(mlp(nn.GELU()), example_inputs=torch.randn(1000, 16))
    assert auto(model, example_inputs=x) == real


# --------------------------------------------------------------------------------------- what is kept, and shared


class Consumer(nn.Module):
    """GELU and what comes after it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.act, self.down, self.drop = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Dropout(0.1)
        if kind == "frozen":
            self.down.requires_grad_(False)
        if kind == "transposed":
            self.down = nn.Linear(96, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.up(x))
        match self.kind:
            case "dropout":
                y = self.drop(y)
            case "transposed":
                y = y.mT
            case "gate":
                y = y * self.up(x)
        z: Tensor = self.down(y)
        return z


class Itself(nn.Module):
    """Multiplies by what it applies an activation to, which the product keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(x) * x
        return y


ROWS = 96
ELEMENTS = 8 * ROWS * 64  # of GELU's output: several whole tiles, so that k bits are exactly that
CONSUMERS = {
    "linear": (True, "rebuilt"),
    "gate": (True, "rebuilt"),
    "dropout": (False, "rebuilt"),
    "frozen": (False, "gelu_fewbit3"),
    "transposed": (False, "gelu_fewbit3"),
}


def keepers(model: nn.Module, act: nn.Module, x: Tensor) -> bool:
    """Return whether, of real tensors, anything but the activation keeps its output's memory."""
    kept: list[tuple[bool, int]] = []
    inside, outputs = [False], []

    def enter(*_: Any) -> None:
        inside[0] = True

    def leave(_: Any, __: Any, output: Tensor) -> None:
        inside[0] = False
        outputs.append(output)

    def pack(tensor: Tensor) -> Tensor:
        kept.append((inside[0], tensor.data_ptr()))
        return tensor

    hooks = act.register_forward_pre_hook(enter), act.register_forward_hook(leave)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(x)
    for hook in hooks:
        hook.remove()
    del result
    return (False, outputs[0].data_ptr()) in kept


@pytest.mark.parametrize(
    ("kind", "shared", "best"), [(kind, *row) for kind, row in CONSUMERS.items()], ids=CONSUMERS
)
def test_consumers(kind: str, shared: bool, best: str) -> None:
    x = torch.randn(8, ROWS, 32)
    model = Consumer(kind)
    kept = {}
    for method in ("fewbit", "inverted", "auto"):
        bits = 3 if method == "auto" else None
        conversion = fitact.convert(model, method, bits, example_inputs=x, **of_any_error(method))
        (site,) = conversion
        with count_saved(model) as saved:
            model(x)
        assert conversion.kept_after == saved.bytes == kept.setdefault(method, saved.bytes)
        fitact.revert(model)
        with count_saved(model) as saved:
            model(x)
        assert conversion.kept_before == saved.bytes
        if site.after == "rebuilt":
            continue
        assert site.shared == shared == keepers(model, model.act, x)
        assert site.kept_before == 4 * ELEMENTS
        assert saved.bytes - kept[method] == site.kept_before - site.kept_after
        assert (site.after is None) == (method == "inverted" and not shared)
        expected = {"gelu_fewbit3": 3 * ELEMENTS // 8, "gelu_inverted1": ELEMENTS // 8, "None": 4 * ELEMENTS}
        assert site.kept_after == expected[str(site.after)]
    assert site.after == best
    assert kept["auto"] == min(kept.values()) and (best != "rebuilt" or kept["auto"] < kept["inverted"])


MORE: dict[str, tuple[list[nn.Module], str, str | None, str]] = {
    "its output is kept": ([nn.ReLU(), nn.Linear(64, 8)], "fewbit", None, "neighbouring operations keep"),
    "its input is kept": ([nn.Linear(64, 8), nn.GELU()], "fewbit", "gelu_fewbit3", ""),
    "its input is kept by a product": ([Itself(), nn.Linear(64, 8)], "fewbit", None, "keep its tensor anyway"),
    "its output is not kept": (
        [nn.GELU(), nn.Dropout(), nn.Linear(64, 8)],
        "inverted",
        None,
        "nothing that follows",
    ),
    "its output is kept, and wanted": ([nn.GELU(), nn.Linear(64, 8)], "inverted", "gelu_inverted1", ""),
}


@pytest.mark.parametrize(("layers", "method", "name", "reason"), MORE.values(), ids=MORE)
def test_no_method_keeps_more_than_stock(
    layers: list[nn.Module], method: str, name: str | None, reason: str
) -> None:
    """Known with example inputs; without them what is asked for is done."""
    model, x = nn.Sequential(nn.Linear(64, 64), *layers), torch.randn(8 * ROWS, 64)
    with count_saved(model) as stock:
        model(x)
    conversion = fitact.convert(model, method, example_inputs=x)
    (site,) = conversion
    assert site.after == name and reason in site.reason
    with count_saved(model) as saved:
        model(x)
    assert conversion.kept_after == saved.bytes <= stock.bytes == conversion.kept_before
    fitact.revert(model)
    assert fitact.convert(model, method).sites[0].after


def test_codes_of_few_elements_are_padded() -> None:
    (site,) = fitact.convert(nn.Sequential(nn.Linear(4, 4), nn.GELU()), "fewbit", example_inputs=torch.randn(2, 4))
    assert site.after is None and "it has few elements, and codes are padded to 8192" in site.reason


def test_a_replacement_of_ones_own_may_keep_more() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    (site,) = fitact.convert(
        model, "fewbit", replace={nn.ReLU: GeluFewbit3}, example_inputs=torch.randn(8 * ROWS, 64)
    )
    assert site.after == "gelu_fewbit3" and site.kept_after > site.kept_before


def test_autocast_keeps_one_storage() -> None:
    """float32 into GELU: PyTorch keeps 4 bytes of it, and 2 of the copy that is cast for the linear layer."""
    model = nn.Sequential(nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64, bias=False))
    x = torch.randn(8, ROWS, 64)
    with torch.autocast("cpu", dtype=HALF):
        stock = fitact.convert(model, "fewbit", dry_run=True, example_inputs=x)
        conversion = fitact.convert(model, "inverted", example_inputs=x)
        assert (stock.sites[0].shared, conversion.sites[0].shared) == (False, True)
        assert conversion.sites[0].after == "gelu_inverted1"
        with count_saved(model) as saved:
            result = model(x)
    weight = 2 * 64 * 64
    statistics = 2 * 8 * ROWS * 4
    assert conversion.kept_before == (4 + 2) * ELEMENTS + weight + statistics + x.nbytes
    assert conversion.kept_after == saved.bytes == 2 * ELEMENTS + ELEMENTS // 8 + weight + statistics + x.nbytes
    result.sum().backward()


AUTO = [
    ("GELU and linear", [nn.GELU(), nn.Linear(64, 8)], ["gelu_coded6"]),
    ("GELU, dropout and linear", [nn.GELU(), nn.Dropout(), nn.Linear(64, 8)], ["gelu_coded6"]),
    ("GELU and frozen linear", [nn.GELU(), nn.Linear(64, 8).requires_grad_(False)], ["gelu_fewbit3"]),
    ("norm, GELU and product", [nn.LayerNorm(64), nn.GELU(), Scaled(64)], ["rebuilt", "identity_coded8"]),
    (
        "norm, GELU and two",
        [nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), Scaled(64)],
        ["gelu_inverted1", "identity_coded8"],
    ),
    ("ReLU and product", [nn.ReLU(), Scaled(64)], [None]),
    ("Tanh and product", [nn.Tanh(), Scaled(64)], [None]),
    ("Softplus and product", [nn.Softplus(), Scaled(64)], ["softplus_exact"]),
    ("Softplus and dropout", [nn.Softplus(), nn.Dropout(), Scaled(64)], ["softplus_fewbit3"]),
    ("ReLU and dropout", [nn.ReLU(), nn.Dropout(), Scaled(64)], ["relu_fewbit1"]),
    (
        "ReLU in place and dropout",
        [nn.ReLU(inplace=True), nn.Dropout(), Scaled(64)],
        ["relu_fewbit1, in place"],
    ),
    ("ReLU in place and product", [nn.ReLU(inplace=True), Scaled(64)], [None]),
    ("SiLU in place and product", [nn.SiLU(inplace=True), Scaled(64)], ["silu_fewbit3, in place"]),
    (
        "two",
        [nn.GELU(), nn.Dropout(), Scaled(64), nn.Mish(), Scaled(64)],
        ["gelu_fewbit3", "mish_inverted1"],
    ),
    ("one after the other", [nn.GELU(), nn.SiLU(), Scaled(64)], ["gelu_fewbit3", "silu_inverted1"]),
]


@pytest.mark.parametrize(("layers", "after"), [row[1:] for row in AUTO], ids=[row[0] for row in AUTO])
def test_auto(layers: list[nn.Module], after: list[str | None]) -> None:
    model = nn.Sequential(nn.Linear(64, 64), *layers)
    x = torch.randn(8 * ROWS, 64)
    conversion = auto(model, example_inputs=x)
    assert [site.after for site in conversion] == after
    assert all(site.reason.startswith("nothing to gain") for site in conversion if site.after is None)
    with count_saved(model) as saved:
        model(x)
    assert conversion.kept_after == saved.bytes


class Overwriting(nn.Module):
    """Changes the output of its activation in place, as a residual sum may."""

    def __init__(self, cast: torch.dtype | None = None) -> None:
        super().__init__()
        self.norm, self.act, self.down = nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)
        self.cast = cast

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(x)).to(self.cast)
        y += 1
        result: Tensor = self.down(y)
        return result


@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
def test_overwritten_outputs_are_not_kept(real: bool) -> None:
    """The linear layer keeps the storage of the output, but not what backward would need there."""
    x = torch.randn(8, ROWS, 64)

    def run(model: nn.Module) -> object:
        return model(x).mean() if float(x[0, 0, 0]) else None

    model = Overwriting()
    inputs = run if real else x
    (site,) = fitact.convert(model, "inverted", example_inputs=inputs)
    assert (site.after, site.shared, site.kept_after) == (None, True, site.kept_before)
    assert site.reason.startswith("a later operation overwrites its output")
    conversion = auto(model, example_inputs=inputs)
    assert sites(conversion) == {"act": "silu_fewbit3"}
    model(x).sum().backward()
    fitact.revert(model)
    fitact.convert(model, "inverted")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x).sum().backward()


def test_overwritten_casts_are_not_kept() -> None:
    """Under autocast an inverted activation returns what PyTorch's own is cast to: then that is overwritten."""
    model, x = Overwriting(HALF), torch.randn(8, ROWS, 64)
    with torch.autocast("cpu", dtype=HALF):
        assert sites(auto(model, example_inputs=x)) == {"act": "silu_fewbit3"}
        result = model(x)
    result.sum().backward()


class Down(nn.Module):
    """A linear layer after a product, which keeps its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = Scaled(64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.scale(x))
        return y


class Sometimes(nn.Module):
    """Leaves out blocks at random."""

    def __init__(self, draw: Callable[[], Any], blocks: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Holds(nn.GELU(), Down()) for _ in range(blocks))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.draw() < 0.5:
                x = x + block(x)
        return x * self.blocks[0].down.linear.bias


numpy_random: Any = imported("numpy").random  # its old interface, which models use
DRAWS: dict[str, Callable[[], Any]] = {
    "fake": random.random,
    "real": lambda: torch.rand([]),
    "numpy": lambda: numpy_random.random(),
}


def states() -> str:
    return repr((random.getstate(), numpy_random.get_state(legacy=False), torch.get_rng_state().tolist()))


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy_random.seed(seed)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_what_chance_leaves_out_is_treated_as_its_likes(draw: Callable[[], Any]) -> None:
    x = torch.randn(1024, 16)
    for seed in range(5):
        seed_all(seed)
        conversion = auto(Sometimes(draw), example_inputs=x)
        assert [site.after for site in conversion] == ["gelu_inverted1"] * 8
        missed = [site for site in conversion if site.kept_before is None]
        assert 0 < len(missed) < 8
        (reached,) = {site.name for site in conversion if site.kept_before} & {missed[0].reason.split()[-1]}
        assert {site.reason for site in missed} == {f"example_inputs do not reach it: treated as {reached}"}
        kept = {(site.kept_before, site.kept_after) for site in conversion if site not in missed}
        assert kept == {(4 * 64 * 1024, 64 * 1024 // 8)}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_what_has_no_likes_is_measured_until_chance_takes_it(draw: Callable[[], Any]) -> None:
    x = torch.randn(1024, 16)
    for seed in range(8):
        seed_all(seed)
        model, before = Sometimes(draw, 1), states()
        (site,) = auto(model, example_inputs=x)
        assert (site.after, site.kept_before) == ("gelu_inverted1", 4 * 64 * 1024)
        assert states() == before


def test_what_is_left_alone_leaves_its_likes_alone() -> None:
    random.seed(1)
    conversion = fitact.convert(
        Sometimes(random.random),
        "fewbit",
        exclude=["blocks.0.*", "blocks.7.*"],
        example_inputs=torch.randn(1024, 16),
    )
    assert [site.after for site in conversion] == [None, *["gelu_fewbit3"] * 6, None]
    assert [site.reason for site in conversion][::7] == ["excluded", "excluded"]


def test_a_model_that_keeps_more_each_time() -> None:
    """Then the first run, as it was, keeps least; and nothing is left alone without a reason."""

    class Growing(Holds):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(8 * next(runs)):
                x = Product.apply(x, torch.ones(16))
            return super().forward(x)

    runs = itertools.count(1)
    site, *_ = fitact.convert(
        Growing(nn.GELU()), "auto", error="few-bit", example_inputs=torch.zeros(4096, 16, requires_grad=True)
    )
    assert site.after is None and site.reason.startswith("nothing to gain")


class Twice(nn.Module):
    """Two activations of one tensor: replacing either alone gains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.a, self.b, self.drop = nn.Linear(16, 64), nn.GELU(), nn.SiLU(), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        y: Tensor = self.drop(self.a(x)) + self.drop(self.b(x))
        return y


def test_auto_of_two_activations_of_one_tensor() -> None:
    conversion = auto(Twice(), example_inputs=torch.randn(8 * ROWS, 16))
    assert sites(conversion) == {"a": "gelu_fewbit3", "b": "silu_fewbit3"}
    assert [site.kept_before for site in conversion] == [2 * ELEMENTS, 2 * ELEMENTS]  # of 4 each would keep alone


ACTS: list[Callable[[], nn.Module]] = [
    *(nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh, nn.Softplus, nn.Mish, nn.Hardswish, nn.ELU, nn.LeakyReLU),
    functools.partial(nn.SiLU, inplace=True),
    functools.partial(nn.ReLU, inplace=True),
    functools.partial(nn.LeakyReLU, 0.3),
]


def stack(seed: int) -> nn.Sequential:
    """Return layers at random."""
    generator = torch.Generator().manual_seed(seed)

    def pick(options: list[Any]) -> Any:
        return options[int(torch.randint(len(options), (), generator=generator))]

    frozen = functools.partial(lambda: nn.Linear(64, 64).requires_grad_(False))
    between = [
        functools.partial(nn.Linear, 64, 64),
        nn.Dropout,
        frozen,
        functools.partial(nn.LayerNorm, 64),
        nn.Identity,
    ]
    return nn.Sequential(nn.Linear(64, 64), *(pick(options)() for _ in range(5) for options in (ACTS, between)))


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("seed", range(6))
def test_auto_keeps_least(seed: int, autocast: bool) -> None:
    model = stack(seed)
    x = torch.randn(4 * ROWS, 64)
    for bits in (1, 2, 3):
        kept = {}
        for method in ("stock", *METHODS, "auto"):
            twin = copy.deepcopy(model)
            with torch.autocast("cpu", dtype=HALF, enabled=autocast):
                if method == "exact":
                    convert(twin, method, x)
                elif method != "stock" and not (method == "relumix" and bits != 2):
                    convert(twin, method, x, bits=bits)
                with count_saved(twin) as saved:
                    twin(x)
            kept[method] = saved.bytes
        assert kept["auto"] == min(kept.values())


def convert(model: nn.Module, method: str, x: Tensor, **given: Any) -> None:
    try:
        fitact.convert(model, method, example_inputs=x, **of_any_error(method), **given)
    except UsageError as error:  # a method need have nothing for any activation of a random model
        assert "nothing is shipped" in str(error)


@pytest.mark.parametrize(
    "inputs",
    [X, (X,), [X], {"input": X}, lambda model: model(X)],
    ids=["tensor", "tuple", "list", "mapping", "function"],
)
def test_kinds_of_inputs(inputs: Any) -> None:
    (site,) = fitact.convert(mlp(nn.GELU()), "fewbit", example_inputs=inputs)
    assert site.kept_before == 2 * 64 * 4


def test_measured_as_it_trains() -> None:
    """A model in evaluation mode, as when it is loaded, has its dropout measured; one that is in part stays so."""
    model = Consumer("dropout")
    model.down = nn.Sequential(Scaled(64), model.down)
    x = torch.randn(8, ROWS, 32)
    assert auto(model.eval(), dry_run=True, example_inputs=x).sites[0].after == "gelu_fewbit3"
    assert not model.training
    model.train()
    model.drop.eval()
    assert auto(model, dry_run=True, example_inputs=x).sites[0].after == "gelu_inverted1"


def test_what_is_not_reached() -> None:
    class Unused(Holds):
        def __init__(self) -> None:
            super().__init__(nn.GELU())
            self.other = nn.SiLU()

    conversion = auto(Unused(), example_inputs=torch.zeros(2, 16))
    assert conversion.sites[1].reason == "example_inputs do not reach it"
    assert conversion.sites[1].kept_before is None


def test_checkpointed_activations_keep_nothing() -> None:
    class Block(Holds):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
            return y

    conversion = auto(Block(nn.GELU()), example_inputs=torch.zeros(2, 16))
    assert (conversion.sites[0].after, conversion.sites[0].kept_before) == (None, 0)
    assert conversion.sites[0].reason == "nothing to gain: other operations keep all that it keeps"


def test_table() -> None:
    model = nn.Sequential(*(Holds(nn.GELU()) for _ in range(3)), nn.PReLU())
    x = torch.randn(2048, 16)
    assert str(fitact.convert(model, "fewbit", dry_run=True)).splitlines() == [
        "site       was    would be      note",
        "*.act  ×3  GELU   gelu_fewbit3",
        "3          PReLU  left alone    its parameters are learned: only rebuild and coded keep less",
        "3 of 4 would be replaced",
    ]
    assert str(fitact.convert(model, "fewbit", example_inputs=x)).splitlines() == [
        "site       was    is                     kept           then  shared  note",
        "*.act  ×3  GELU   gelu_fewbit3        1.5 MiB  147,456 bytes  yes",
        "3          PReLU  left alone    131,072 bytes  131,072 bytes  no      "
        "its parameters are learned: only rebuild and coded keep less",
        "3 of 4 replaced; the model keeps 2.1 MiB for backward instead of 3.5 MiB, 61.2 %",
    ]


# --------------------------------------------------------------------------------------------------- the compiler


@pytest.mark.parametrize(
    "activation", [nn.GELU, lambda: F.gelu, lambda: nn.SiLU(inplace=True)], ids=["", "held", "in place"]
)
@pytest.mark.parametrize("method", ["fewbit", "inverted"])
def test_compiled(activation: Callable[[], Any], method: str) -> None:
    torch._dynamo.reset()
    model = Holds(activation())
    x = torch.randn(5, 16, requires_grad=True)
    fitact.convert(model, method)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    eager, traced = model(x), compiled(x)
    assert torch.equal(eager, traced)
    for got, expected in zip(*(torch.autograd.grad(y.sum(), x) for y in (traced, eager)), strict=True):
        torch.testing.assert_close(got, expected)


def test_converted_after_compiling() -> None:
    torch._dynamo.reset()
    model = mlp(nn.GELU())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(500, 16)
    stock = compiled(x)
    assert sites(fitact.convert(compiled, "fewbit", example_inputs=x)) == {"1": "gelu_fewbit3"}
    with count_saved(model) as saved:
        assert torch.equal(compiled(x), stock)
    assert saved.bytes < x.nbytes + 500 * 64 * 4 * 1.2
    fitact.revert(compiled)
    assert type(model[1]) is nn.GELU


@pytest.mark.parametrize("how", ["wrapped", "in place", "a part"])
def test_auto_leaves_rebuilding_to_the_compiler(how: str) -> None:
    """The compiler traces the stock model, so only replaced activations keep less in it."""
    x = torch.randn(512, 16)
    model = nn.Sequential(Holds(nn.GELU()), nn.Linear(16, 4))
    assert sites(auto(copy.deepcopy(model), example_inputs=x)) == {"0.act": "gelu_coded6"}
    if how == "wrapped":
        given = torch.compile(model, backend="aot_eager")
    else:
        given = model
        (model if how == "in place" else model[0]).compile(backend="aot_eager")
    assert sites(fitact.convert(given, "auto", dry_run=True, example_inputs=x)) == {"0.act": "gelu_inverted1"}
    report = fitact.rebuild(given, dry_run=True)
    assert sites(report) == {"0.act": "rebuilt"}


@pytest.mark.parametrize("whole", [False, True], ids=["torch.compile", "compile"])
def test_models_with_compiled_modules(whole: bool) -> None:
    """They are measured without a warning; of what is computed in them nothing is told."""
    torch._dynamo.reset()
    inner = Experts()
    if whole:
        inner.compile(backend="aot_eager")
    model = nn.Sequential(
        Holds(nn.GELU()), inner if whole else torch.compile(inner, backend="aot_eager"), nn.Linear(16, 4)
    )
    conversion = fitact.convert(model, "inverted", example_inputs=torch.randn(512, 16))
    assert sites(conversion) == {"0.act": "gelu_inverted1"} and not conversion.unseen


def test_import_is_lazy() -> None:
    program = (
        "import fitact, sys; assert 'torch' not in sys.modules; fitact.convert; assert 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert {"convert", "revert", "converted_functions"} <= set(dir(fitact))
    with pytest.raises(AttributeError, match="absent"):
        _ = fitact.absent


def test_generated_classes_are_no_longer_needed_to_revert() -> None:
    """A replacement that was moved to another model knows its original."""
    model, other = mlp(nn.GELU()), mlp(nn.GELU())
    original = model[1]
    fitact.convert(model, "fewbit")
    other[1] = model[1]
    fitact.revert(other)
    assert other[1] is original and isinstance(model[1], GeluFewbit3)
    assert not isinstance(model[1], SiluFewbit3)


def test_a_dry_run_with_norms_foretells_what_is_done() -> None:
    """Where a merged norm no longer keeps an activation's output, codes are taken, in the dry run too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.LayerNorm(64), nn.Linear(64, 8))
    x = torch.randn(512, 32)
    before = copy.deepcopy(model.state_dict())
    with torch.autocast("cpu", dtype=HALF):  # else no norm is merged, because its output can be rebuilt
        plan = fitact.convert(model, error="rounding", norms=True, dry_run=True, example_inputs=x)
    assert plan.dry_run and type(model[2]) is nn.LayerNorm and type(model[1]) is nn.SiLU
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    with torch.autocast("cpu", dtype=HALF):
        done = fitact.convert(model, error="rounding", norms=True, example_inputs=x)
    assert plan.sites == done.sites and plan.kept_after == done.kept_after
    assert done.sites[0].after == "silu_coded8"


# --------------------------------------------------------------------------------------- what gradients may suffer

# What `auto` takes before dropout, which does not keep an activation's output, and before a layer, which does.
ERRORS: dict[str, tuple[nn.Module, dict[str, tuple[str | None, str | None]]]] = {
    "GELU": (
        nn.GELU(),
        {"rounding": ("gelu_coded8", "gelu_inverted1"), "few-bit": ("gelu_fewbit3", "gelu_inverted1")},
    ),
    "Softplus": (
        nn.Softplus(),
        {"rounding": (None, "softplus_exact"), "few-bit": ("softplus_fewbit3", "softplus_exact")},
    ),
    "ReLU": (nn.ReLU(), dict.fromkeys(("exact", "rounding", "few-bit"), ("relu_fewbit1", None))),
    "Hardtanh": (
        nn.Hardtanh(),
        dict.fromkeys(("exact", "rounding", "few-bit"), ("hardtanh_fewbit1", "hardtanh_exact")),
    ),
    "own": (
        of_ones_own(lambda x: torch.where(x > 0, x, 0.01 * x)),
        {"exact": (None, None), "rounding": ("leaky_relu_fewbit1", "leaky_relu_exact")},
    ),
}


@pytest.mark.parametrize(("activation", "wanted"), ERRORS.values(), ids=ERRORS)
def test_what_gradients_may_suffer(
    activation: nn.Module, wanted: dict[str, tuple[str | None, str | None]]
) -> None:
    x = torch.randn(8 * ROWS, 64)
    for error in ("exact", "rounding", "few-bit"):
        if error not in wanted and error != "exact":
            continue
        for follows, name in zip(([nn.Dropout()], []), wanted.get(error, (None, None)), strict=True):
            model = nn.Sequential(nn.Linear(64, 64), activation, *follows, Scaled(64))
            (site,) = fitact.convert(model, "auto", error=error, example_inputs=x)
            assert site.after == name, (error, follows)
            fitact.revert(model)
            (default,) = fitact.convert(model, "auto", example_inputs=x)
            assert (default.after == name) or error != "rounding"
    model = nn.Sequential(nn.Linear(64, 64), nn.Softplus(), nn.Dropout())  # for which no codes ship
    (alone,) = fitact.convert(model, "auto", example_inputs=x)
    assert alone.reason == 'nothing to gain: no replacement with error="rounding" keeps less'


NUMBERS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
EXACT: dict[str, nn.Module] = {
    "hardshrink": nn.Hardshrink(),
    "hardsigmoid": nn.Hardsigmoid(),
    "hardtanh": nn.Hardtanh(),
    "leaky_relu": nn.LeakyReLU(),
    "relu": nn.ReLU(),
    "relu6": nn.ReLU6(),
    "softshrink": nn.Softshrink(),
    "threshold": nn.Threshold(1.0, 0.0),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_is_called_exact_has_the_gradient_of_pytorch(name: str) -> None:
    """At every number of half precision, and in float32 at the breakpoints, beside them and at random."""
    assert EXACT.keys() == PIECEWISE
    points = torch.tensor([0.0, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 6.0, 1e-40, -1e-40, 1e30, -1e30])
    others = [torch.nextafter(points, torch.full_like(points, to)) for to in (-torch.inf, torch.inf)]
    wide = torch.cat([points, *others, 3 * torch.randn(20000)])
    fits = [fit for fit in fitact.shipped() if fit.rpartition("_")[0] == name]
    assert {fit.rpartition("_")[2][:5] for fit in fits} <= {"fewbi", "exact"} and fits
    for fit in fits:
        for x in (NUMBERS.view(torch.bfloat16), NUMBERS.view(torch.float16), wide):
            numbers = x[~x.isnan()]
            dy = torch.randn(len(numbers)).to(x.dtype)
            found = []
            for module in (EXACT[name], fitact.activation(fit)):
                leaf = numbers.clone().requires_grad_()
                y = module(leaf)
                found.append((y, torch.autograd.grad(y, leaf, dy)[0]))
            assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.drop, self.down = nn.Linear(64, 256), nn.GELU(), nn.Dropout(), nn.Linear(256, 4)
        self.norm = nn.BatchNorm1d(256)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.down(self.drop(self.act(self.norm(self.up(x)))))
        return {"loss": y.square().mean(), "y": y}


@pytest.mark.parametrize("dry_run", [False, True])
def test_the_error_of_the_gradient(dry_run: bool) -> None:
    """Beside one that is computed here: with the same dropout, of all parameters as one vector."""
    torch.manual_seed(0)
    model, x = TwoLayers(), torch.randn(512, 64)
    state, members = (
        copy.deepcopy(model.state_dict()),
        {path: dict(vars(one)) for path, one in model.named_modules()},
    )
    random_state = torch.random.get_rng_state()
    conversion = fitact.convert(model, "fewbit", bits=3, dry_run=dry_run, example_inputs=x, gradients=True)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not dry_run or {path: dict(vars(one)) for path, one in model.named_modules()} == members
    vectors = []
    for activation in (nn.GELU(), GeluFewbit3()):
        twin = copy.deepcopy(model)
        twin.act = activation
        torch.random.set_rng_state(random_state)
        twin(x)["loss"].backward()
        vectors.append(
            torch.cat([one.grad.double().flatten() for one in twin.parameters() if one.grad is not None])
        )
    stock, found = vectors
    gradient = conversion.gradient
    assert gradient is not None and gradient.error is not None and gradient.note == ""
    assert gradient.error == pytest.approx(float((found - stock).norm() / stock.norm()), rel=1e-6)
    assert gradient.cosine == pytest.approx(float(found @ stock / found.norm() / stock.norm()), rel=1e-9)
    assert 1e-3 < gradient.error < 0.2
    assert (
        str(conversion).splitlines()[-1].startswith(f"the gradient is off by {100 * gradient.error:.3g} % of its")
    )
    assert fitact.convert(TwoLayers(), "fewbit", example_inputs=x).gradient is None


def test_gradients_that_are_stocks_or_cannot_be_measured() -> None:
    x = torch.randn(512, 16)
    hard = mlp(nn.Hardtanh())
    conversion = fitact.convert(hard, "auto", error="exact", example_inputs=x, gradients=True)
    assert conversion.replaced and conversion.gradient is not None and conversion.gradient.error == 0
    assert str(conversion).endswith("the gradient equals stock's, bit for bit")
    with torch.device("meta"):
        model, empty = mlp(nn.GELU()), torch.empty(512, 16)
    without = fitact.convert(model, "fewbit", example_inputs=empty, gradients=True)
    assert str(without).endswith("the gradient could not be measured: the model's tensors have no values")

    def run(model: nn.Module) -> object:
        model(x)
        return None

    nothing = fitact.convert(Holds(nn.GELU()), "fewbit", example_inputs=run, gradients=True).gradient
    assert nothing is not None and nothing.error is None and nothing.note


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("follows", [nn.LayerNorm, lambda width: nn.Linear(width, 1)], ids=["norm", "linear"])
@pytest.mark.parametrize("act", [nn.ReLU, nn.Hardtanh, nn.ReLU6, nn.LeakyReLU])
def test_exact_is_exact_where_autocast_would_round(
    act: type[nn.Module], follows: Callable[[int], nn.Module], dtype: torch.dtype
) -> None:
    """A fit that keeps its output rounds a float32 input: the value, and the gradient near a bound."""
    torch.manual_seed(0)
    model = nn.Sequential(act(), follows(64))
    data = 3 * torch.randn(8192, 64)

    def results() -> list[Tensor]:
        x = data.detach().clone().requires_grad_()
        with torch.autocast("cpu", dtype):
            y = model(x)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()])]

    stock = results()
    with torch.autocast("cpu", dtype):
        fitact.convert(model, error="exact", example_inputs=data.requires_grad_())
    torch.testing.assert_close(results(), stock, rtol=0, atol=0)


class Named(nn.Module):
    """An activation of one's own, called by the name that it gives to its input."""

    def forward(self, hidden: Tensor) -> Tensor:
        return F.gelu(hidden)


class NamedCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 512), Named(), nn.Linear(512, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(hidden=self.up(x)))
        return y


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("method", ["fewbit", "coded", "inverted"])
def test_own_activations_are_called_by_their_names(method: str, measured: bool) -> None:
    torch.manual_seed(0)
    model, x = NamedCall(), torch.randn(64, 16)
    stock, original = model(x), model.act
    conversion = fitact.convert(model, method, example_inputs=x if measured else None)
    assert [site.before for site in conversion.replaced if site.kind == "activation"] == ["Named"]
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(one(x), stock, rtol=0, atol=0)
    with pytest.raises(TypeError, match=r"Named\.forward"):
        model.act(x=x)
    fitact.revert(model)
    assert model.act is original


class MayTakeMore(nn.Module):
    """What looks like GELU if it is called with its input alone."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return scale * F.gelu(x)


def test_activations_that_may_take_more_are_not_replaced() -> None:
    assert computes(Named()) == "gelu"
    assert computes(MayTakeMore()) is None
    with pytest.raises(UsageError, match="no module holds an activation"):
        fitact.convert(mlp(MayTakeMore()), "fewbit")
