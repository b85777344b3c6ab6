"""Converting small models: what is replaced, what is left alone and why, what is saved; nothing else changes."""

import copy
import pickle
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fitact
from fitact.base import UsageError
from fitact.generated.gelu_fewbit3 import GeluFewbit3
from fitact.runtime.choose import Conversion
from fitact.runtime.measure import count_saved, imported
from tests.conftest import Command
from tests.support.blocks import BY_HAND
from tests.support.built import built
from tests.support.package import load
from tests.support.processes import python
from tests.support.rows import listed
from tests.support.saving import differences, saved_bytes_of

from .test_context import MODELS, made

HALF = torch.bfloat16


def sites(conversion: Conversion) -> dict[str, str | None]:
    return {site.name: site.after for site in conversion}


class Holds(nn.Module):
    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 64), activation, nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


MODULES = """
    CELU  ELU  GELU  Hardshrink  Hardsigmoid  Hardswish  Hardtanh  LeakyReLU  LogSigmoid  Mish  ReLU  ReLU6  SELU
    SiLU  Sigmoid  Softplus  Softshrink  Softsign  Tanh  Tanhshrink
"""
PLAIN: list[Any] = [
    *(getattr(nn, kind)() for kind in listed(MODULES)),
    *(nn.GELU(approximate="tanh"), nn.Threshold(1.0, 0.0)),
    *(F.gelu, F.silu, F.tanh, F.mish, F.softplus, F.relu, torch.relu, torch.Tensor.relu, torch.sigmoid),
    partial(F.gelu, approximate="tanh"),
]
OF_TIMM = ("GELU", "GELUTanh", "HardSigmoid", "HardSwish", "Mish", "QuickGELU", "Sigmoid", "Swish", "Tanh")
REASONS = dict.fromkeys(("gelu_10", "laplace", "sqrtsoftplus", "linear"), "nothing is shipped for it")
REASONS |= dict.fromkeys(("prelu", "xielu"), "its parameters are learned")


def check_replaced(activation: Any) -> tuple[Tensor, Tensor]:
    """Convert a model, and return its output before and after; all else is as it was, in the end too."""
    model, x = Holds(activation), 10 * torch.randn(50, 16)
    baseline, state, paths = model(x), [*model.state_dict()], [path for path, _ in model.named_modules()]
    (site,) = fitact.convert(model, "fewbit")
    assert site.name == "act" and site.after
    assert not isinstance(activation, nn.Module) or site.before == type(activation).__name__
    actual = model(x)
    assert [*model.state_dict()] == state
    assert isinstance(activation, nn.Module) or [path for path, _ in model.named_modules()] == paths
    assert sites(fitact.revert(model)) == {"act": site.before}
    assert model.act is activation
    return baseline, actual


@pytest.mark.parametrize("activation", PLAIN, ids=lambda x: getattr(x, "__name__", str(x)[:40]))
def test_modules_and_functions_of_pytorch(activation: Any) -> None:
    assert torch.equal(*check_replaced(activation))


def test_activations_of_libraries() -> None:
    """Some are made of several operations, so that values agree up to their rounding; others have a reason."""
    known, timm = dict(imported("transformers").activations.ACT2FN), imported("timm").layers.activations
    for name, reason in REASONS.items():
        site, _ = fitact.convert(nn.Sequential(known.pop(name), nn.GELU()), "fewbit")
        assert site.after is None and reason in site.reason
    for activation in (*known.values(), *(getattr(timm, name)() for name in OF_TIMM)):
        torch.testing.assert_close(*check_replaced(activation), rtol=1e-5, atol=2e-6)


class Named(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return F.gelu(hidden)


# What is held, how it is called, and whether its gradient stays.
HELD: list[tuple[Any, Callable[..., Tensor], bool]] = [
    (F.gelu, lambda self, x: self.act(self.linear(x), approximate="tanh"), True),
    (F.silu, lambda self, x: self.act(self.linear(x), inplace=True), True),
    (F.softplus, lambda self, x: self.act(self.linear(x), 2.0, threshold=1.0), True),
    (F.gelu, lambda self, x: self.act(input=self.linear(x)), False),
    (partial(F.silu, inplace=True), lambda self, x: self.act(self.linear(x)), False),
    (Named(), lambda self, x: self.act(hidden=self.linear(x)), False),
]


@pytest.mark.parametrize(("held", "call", "baseline"), HELD, ids=map(str, range(len(HELD))))
def test_how_activations_are_called(held: Any, call: Any, baseline: bool) -> None:
    """With more than an input they do what they did, gradient and all; modules are called by their names."""
    model, x = built(call, linear=nn.Linear(16, 16), act=held), torch.randn(50, 16)
    expected = model(x)
    (gradient,) = torch.autograd.grad(expected.sum(), model.linear.bias)
    for given in ({"method": "inverted"}, {"method": "fewbit", "example_inputs": x}, {"method": "fewbit"}):
        fitact.revert(model)
        (site,) = fitact.convert(model, **given)
    y = model(x)
    assert site.after and torch.equal(y, expected)
    assert torch.equal(torch.autograd.grad(y.sum(), model.linear.bias)[0], gradient) == baseline
    assert fitact.convert(model, "fewbit").sites[0].reason == f"already {site.after}"
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), expected)
    pickled = SimpleNamespace(linear=model.linear, act=pickle.loads(pickle.dumps(model.act)))
    assert torch.equal(call(pickled, x), expected)
    if isinstance(held, Named):
        with pytest.raises(TypeError, match=r"Named\.forward"):
            copied.act(x=x)
    fitact.revert(copied)
    assert torch.equal(copied(x), expected) and type(copied.act) is type(held)


def test_wherever_modules_are_held() -> None:
    """In lists, dictionaries, modules inside, and as an attribute of the object alone."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for act in (*self.listed, *self.named.values(), self.unregistered):
            x = act(self.linear(x))
        return x

    named = nn.ModuleDict({"a": nn.GELU(), "b": nn.Sequential(nn.Mish())})
    hidden = built(forward, linear=nn.Linear(4, 4), listed=nn.ModuleList([nn.GELU(), nn.SiLU()]), named=named)
    vars(hidden)["unregistered"] = nn.GELU()
    model, x = nn.Sequential(hidden, nn.Sequential(nn.Identity(), nn.Sequential(nn.GELU()))), torch.randn(5, 4)
    baseline, gelu = model(x), ("0.listed.0", "0.named.a", "0.unregistered", "1.1.0")
    actual = sites(fitact.convert(model, "fewbit"))
    others = {"0.listed.1": "silu_fewbit3", "0.named.b.0": "mish_fewbit3"}
    assert actual == dict.fromkeys(gelu, "gelu_fewbit3") | others
    assert torch.equal(model(x), baseline)


def test_one_module_at_several_places() -> None:
    act = nn.GELU()
    block = Holds(nn.SiLU())
    model = nn.Sequential(nn.Linear(16, 16), act, nn.Linear(16, 16), act, block, block)
    x = torch.randn(512, 16)
    baseline = model(x)
    conversion = fitact.convert(model, "fewbit", example_inputs=x)
    assert sites(conversion) == {"1": "gelu_fewbit3", "3": "gelu_fewbit3", "4.act": "silu_fewbit3"}
    assert [site.reason for site in conversion] == ["", "the same module as 1", ""]
    rows = {module.name: (module.before, module.after) for module in conversion.modules}
    assert rows["1"][0] - rows["1"][1] == 2 * 512 * 16 * 4 - 2 * 512 * 16 * 3 // 8
    assert model[1] is model[3] and type(model[1]).__name__ == "GeluFewbit3"
    assert model[4] is model[5]
    assert torch.equal(model(x), baseline)
    fitact.revert(model)
    assert model[1] is model[3] is act


OVERWRITING = (nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Mish, nn.ReLU6, nn.SiLU)
OVERWRITING += (partial(nn.Threshold, 1.0, 0.0),)


@pytest.mark.parametrize("kind", [*OVERWRITING, nn.CELU, nn.ELU, nn.LeakyReLU, nn.ReLU, nn.SELU])
def test_in_place(kind: Callable[..., nn.Module]) -> None:
    """Those that save a copy of their input are replaced, and still overwrite it; others save their output."""
    replaced, activation = kind in OVERWRITING, kind(inplace=True)
    holder, start = nn.Sequential(activation), torch.randn(5000, requires_grad=True)
    again = start * 1
    with count_saved() as saved:
        y = holder(start * 1)
    assert (y.untyped_storage()._cdata in saved.storages) != replaced
    (site,) = fitact.convert(holder, "fewbit")
    assert bool(site.after) == replaced == ("in place" not in site.reason)
    with count_saved() as less:
        result = holder(again)
    assert result.data_ptr() == again.data_ptr() and torch.equal(result, y)
    if replaced:
        assert less.bytes < saved.bytes / 4
        plain = fitact.activation(site.after.removesuffix(", in place"))
        gradients = (torch.autograd.grad(z.sum(), start)[0] for z in (result, plain(start)))
        assert torch.equal(*gradients)
        assert fitact.convert(holder, "fewbit").sites[0].reason == f"already {site.after}"
    fitact.revert(holder)
    assert holder[0] is activation


@pytest.mark.parametrize("method", ["fewbit", "relumix", "inverted"])
def test_an_input_that_another_activation_keeps(method: str) -> None:
    """Where that one is left alone, codes would come beside its output; where it is replaced too, they pay."""
    model, x = Holds(nn.Sequential(nn.Tanh(), nn.GELU())), torch.randn(2000, 16)
    report = fitact.convert(model, method, exclude="*.0", example_inputs=x)
    assert report.saved_after == report.saved_before == saved_bytes_of(model, lambda: model(x))
    assert [site.after for site in report] == [None, None] and "bytes more with it" in report.sites[1].reason
    pays = fitact.convert(Holds(nn.Sequential(nn.SiLU(), nn.GELU())), method, example_inputs=x)
    assert pays.replaced and pays.saved_after < pays.saved_before


@pytest.mark.parametrize("name", ["parametrised", "complex", "calls", "calls by output", "transformer"])
def test_unusual_models(name: str) -> None:
    """What computes a parameter is no activation of the model; complex numbers are left alone.

    PyTorch's transformer holds F.relu as a function, and in evaluation mode takes a path of its own.
    """

    def outputs() -> list[Tensor]:
        torch.manual_seed(0)
        with torch.no_grad():
            return [model.train(mode)(x) for mode in (False, True)]

    model, x = made(MODELS[name.partition(" ")[0]]), torch.randn(500, 32)
    baseline = outputs()
    report = fitact.convert(model, "output" if "output" in name else "fewbit", example_inputs=x)
    assert not differences(outputs(), baseline) and report.saved_after <= report.saved_before
    assert "parametrizations" not in str(report) and bool(report.replaced) == (name != "complex")
    reasons = [site.reason for site in report if site.name != "act"]
    assert name != "complex" or all(each.startswith("its replacement cannot be run: ") for each in reasons)
    if name.startswith("calls"):  # and reads what its activation holds
        assert model.act.negative_slope == 0.01 and model.act.training and not isinstance(model.act, nn.LeakyReLU)
    fitact.revert(model)
    assert not differences(outputs(), baseline)


def hooked(kind: str) -> nn.Module:
    activation = nn.GELU()
    getattr(activation, f"register_{kind}_hook")(lambda *_: None)
    return activation


PATCHED = nn.GELU()
vars(PATCHED)["forward"] = F.silu
UNKNOWN = "nothing is shipped for it: fit its formula, and pass replace={its class: yours}"
LEFT: list[tuple[nn.Module, str | None]] = [
    (nn.PReLU(), "parameters are learned"),
    (PATCHED, "its forward is not that of its class"),
    *((hooked(kind), "hooks") for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre")),
    (nn.ReLU(inplace=True), "in place"),
    *((each, UNKNOWN) for each in (nn.RReLU(), nn.LeakyReLU(0.2), nn.LeakyReLU("0.01"), nn.Hardtanh(-2.0, 2.0))),
    *((each, UNKNOWN) for each in (nn.Softplus(2.0), nn.Softplus(threshold=1.0), nn.GELU(approximate="asdf"))),
    # no function of a single element, random, or nothing
    *((kind(-1), None) for kind in (nn.Softmax, nn.LogSoftmax, nn.Softmin)),
    *((kind(), None) for kind in (nn.Softmax2d, nn.GLU, nn.Dropout, nn.Identity)),
    (nn.MultiheadAttention(8, 2), None),
]


@pytest.mark.parametrize(("activation", "reason"), LEFT, ids=[f"{i}-{each}" for i, (each, _) in enumerate(LEFT)])
def test_left_alone(activation: nn.Module, reason: str | None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), activation, nn.GELU())
    *named, replaced = fitact.convert(model, "fewbit")
    assert [(site.name, site.after) for site in named] == [("1", None)] * (reason is not None)
    assert all(reason in site.reason for site in named)
    assert replaced.after == "gelu_fewbit3"
    assert model[1] is activation


def of_ones_own(compute: Callable[[Tensor], Any], named: str = "Own", **held: Any) -> nn.Module:
    own = built(lambda self, x: compute(x))
    type(own).__name__ = named
    vars(own).update(held)
    return own


OWN: dict[str, tuple[nn.Module, str | None]] = {
    **{name: (of_ones_own(BY_HAND[name]), f"{name}_fewbit3") for name in ("silu", "gelu")},
    "gelu_tanh": (of_ones_own(BY_HAND["tanh"], scale=1.0, name="gelu", bias=None), "gelu_tanh_fewbit3"),
    "mish": (of_ones_own(lambda x: x * torch.tanh(F.softplus(x))), "mish_fewbit3"),
    "relu2": (of_ones_own(lambda x: torch.relu(x) ** 2), "relu2_fewbit3"),
    "squareplus": (of_ones_own(lambda x: (x + torch.sqrt(x**2 + 4)) / 2), "squareplus_fewbit3"),
    "nearly": (of_ones_own(lambda x: F.gelu(x) + 1e-4), None),
    "a known name": (of_ones_own(lambda x: x * torch.sigmoid(2 * x), "Swish"), None),
    "far away": (of_ones_own(lambda x: F.silu(x.clamp(max=50))), None),
    "its gradient": (of_ones_own(lambda x: x + (F.gelu(x) - x).detach()), None),
    "a part of a row": (of_ones_own(lambda x: torch.cat([F.gelu(x[..., :1]), x[..., 1:]], -1)), None),
    "chance": (of_ones_own(lambda x: F.dropout(F.gelu(x), 0.1)), None),
    "another dtype": (of_ones_own(lambda x: F.gelu(x.float())), None),
    "its input": (of_ones_own(lambda x: F.relu(x) + 0 * x.detach().add_(1)), None),
    "state": (of_ones_own(F.gelu, calls=[]), None),
    "two tensors": (of_ones_own(lambda x: (F.gelu(x), x)), None),
}


@pytest.mark.parametrize(("activation", "name"), OWN.values(), ids=OWN)
def test_modules_of_ones_own_are_known_by_what_they_compute(activation: nn.Module, name: str | None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), activation, nn.GELU())
    x, random_state = torch.randn(5, 4), torch.random.get_rng_state()
    conversion = fitact.convert(model, "fewbit")
    assert torch.equal(torch.random.get_rng_state(), random_state)
    actual = {site.name: site.after for site in conversion}
    assert actual.get("1") == name and actual["2"] == "gelu_fewbit3"
    if name is not None:
        torch.testing.assert_close(model[1](x), activation(x), rtol=1e-5, atol=2e-6)
        assert conversion.sites[0].before == "Own"
    fitact.revert(model)
    assert model[1] is activation


def test_modules_of_ones_own_without_memory() -> None:
    """They are tried with numbers, wherever `convert` is called."""
    for context in (FakeTensorMode(), torch.device("meta"), fitact.saving(), torch.inference_mode()):
        with context:
            model = nn.Sequential(nn.Linear(4, 4), of_ones_own(lambda x: x * torch.sigmoid(x)))
            assert sites(fitact.convert(model, "fewbit")) == {"1": "silu_fewbit3"}


def test_bits_and_classes_that_are_given() -> None:
    model = nn.Sequential(nn.GELU(), nn.Mish(), nn.ReLU())
    four = fitact.convert(model, "fewbit", bits=4, dry_run=True)
    assert [site.after for site in four] == ["gelu_fewbit4", "mish_fewbit3", "relu_fewbit1"]
    few = [f"{bits}: none of 4 is shipped" for bits in ("3 bits", "1 bit")]
    assert [site.reason for site in four] == ["", *few]
    two = fitact.convert(model, "fewbit", bits=2, dry_run=True)
    assert [site.after for site in two] == ["gelu_fewbit2", None, "relu_fewbit1"]
    assert "fitact fit --fn mish --method fewbit --bits 2" in two.sites[1].reason
    own = of_ones_own(F.gelu, "Mine")
    model = nn.Sequential(nn.GELU(), nn.SiLU(), own, nn.SiLU(inplace=True))
    given = dict.fromkeys((nn.SiLU, type(own)), GeluFewbit3)  # which come before the method
    report = fitact.convert(model[:3], "inverted", replace=given, dry_run=True)
    actual = [(site.before, site.after) for site in report]
    assert actual == [("GELU", "gelu_inverted1"), ("SiLU", "gelu_fewbit3"), ("Mine", "gelu_fewbit3")]
    assert "another tensor" in fitact.convert(model, "inverted", dry_run=True).sites[3].reason
    assert sites(fitact.convert(model[:3], replace=given)) == {"0": None, "1": "gelu_fewbit3", "2": "gelu_fewbit3"}


@pytest.mark.parametrize("method", ["fewbit", "output"])
@pytest.mark.parametrize("standalone", [False, True], ids=["", "standalone"])
def test_what_is_not_shipped_is_fitted_and_given(command: Command, method: str, standalone: bool) -> None:
    model, name = Holds(nn.LeakyReLU(0.2)), f"leaky_relu_{method}"
    line = f"fit --fn leaky_relu --param negative_slope=0.2 --method {method} --name {name}"
    assert command(f"{line}{' --bits 1' * (method == 'fewbit')}")[0] == 0
    assert command("codegen --standalone" if standalone else "codegen")[0] == 0
    module = load(Path(f"standalone/{name}" if standalone else f"generated/{name}.py"), name)
    kind = getattr(module, module.__all__[0])
    x = torch.randn(20, 16, requires_grad=True)
    baseline = torch.autograd.grad(model(x).sum(), x)
    (site,) = fitact.convert(model, method, replace={nn.LeakyReLU: kind})
    assert site.after == name
    torch.testing.assert_close(torch.autograd.grad(model(x).sum(), x), baseline)
    assert fitact.convert(model, "fewbit").sites[0].reason == f"already {name}"


def test_filters() -> None:
    model = nn.Sequential(nn.Sequential(Holds(nn.GELU()), Holds(F.gelu)), nn.Tanh())
    actual = fitact.convert(model, "fewbit", include="*.act", exclude=("*.1.*",))
    assert [site.reason for site in actual] == ["", "excluded", "not included"] and len(actual.replaced) == 1


X = torch.zeros(2, 16)
BAD: list[tuple[dict[str, Any], str]] = [  # with Few-Bit, unless another method is given, or none
    ({"method": None, "include": "a.*"}, "include 'a.*': no module has such a path; there are"),
    ({"method": "rebuild"}, "method 'rebuild': it is now error='exact', without a method"),
    ({"method": "auto"}, "method 'auto': it is now error='rounding', without a method"),
    ({"method": None, "bits": 9}, "bits: expected 3, 4, 5, 6 or 8, got 9"),
    ({"method": None, "bits": {"gates": 8}}, "activation, norm, batch_norm, linear or attention, got 'gates'"),
    ({"gradients": True}, "gradients=True runs the model: pass example_inputs"),
    ({"gradients": "no"}, "gradients: expected True or False, got 'no'"),
    ({"method": None, "example_inputs": X[:, :3]}, "the model cannot be run with example_inputs: RuntimeError"),
    ({"method": "fewbits"}, "no method 'fewbits': expected fewbit, relumix, inverted, output, or none"),
    ({"bits": 5}, "bits 5: expected 1, 2, 3 or 4"),
    ({"method": "output", "bits": 2}, "bits 2: expected none for output"),
    ({"include": "a.*"}, "include 'a.*': no activation has such a path; there are act"),
    ({"error": "rounding"}, "error 'rounding': expected no method and no replace, which have their own errors"),
    ({"recompute_attention": True}, "recompute_attention: expected no method and no replace"),
    ({"method": None, "replace": {nn.GELU: GeluFewbit3}, "bits": 2}, "bits 2: expected none with replace alone"),
    ({"replace": {nn.GELU: nn.Linear}}, "replace: Linear is not an activation of one input"),
    ({"replace": {nn.Linear: GeluFewbit3}}, "Linear holds modules or parameters"),
    ({"replace": {nn.SiLU: GeluFewbit3}}, "replace: the model holds no SiLU"),
    ({"replace": {nn.GELU: GeluFewbit3()}}, "replace: expected classes of modules"),
    ({"example_inputs": 3}, "example_inputs 3: expected a tensor, a tuple or a mapping"),
    ({"model": nn.GELU()}, "the model is itself an activation, GELU: use fitact.activation"),
    ({"model": []}, "expected a model, an nn.Module, got list"),
    ({"model": torch.jit.script(nn.Sequential(nn.GELU()))}, "TorchScript's modules cannot be changed"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_wrong_input(given: dict[str, Any], message: str) -> None:
    """One line, which for an argument of former times has the words of now."""
    model = Holds(nn.GELU())
    before = dict(model.named_modules())
    with pytest.raises(UsageError) as error:
        fitact.convert(**{"model": model, "method": "fewbit", **given})
    assert message in str(error.value) and "\n" not in str(error.value)
    assert dict(model.named_modules()) == before and type(model) is Holds
    if "model" in given and not isinstance(given["model"], nn.GELU):
        with pytest.raises(UsageError, match=message):
            fitact.revert(given["model"])


def test_nothing_to_replace_or_to_save() -> None:
    # what looks like GELU if it is called with its input alone
    more = built(lambda self, x, scale=1.0: scale * F.gelu(x))
    for model in (nn.Linear(2, 2), Holds(more)):
        report = fitact.convert(model, "fewbit")
        assert not report.sites and "no module holds an activation" in str(report)
    model = Holds(nn.GELU())
    report = fitact.convert(model, "output", example_inputs=X)
    assert not report.replaced and report.sites[0].reason.startswith("output: nothing is shipped for gelu; if ")
    assert str(report).endswith("0 of 1 replaced; the model saves 1,152 bytes for backward as before, 0 % less")
    report = fitact.convert(model.requires_grad_(False), "fewbit", example_inputs=X)
    assert (report.saved_before, report.saved_after) == (0, 0) and "0 % less" in str(report)


def test_converting_twice() -> None:
    model, other = nn.Sequential(Holds(nn.GELU()), Holds(nn.SiLU()).eval()), Holds(nn.GELU())
    original = model[0].act
    fitact.convert(model, "fewbit")
    assert not any(module.training for module in model[1].modules()) and model[0].act.training
    replacement = other.act = model[0].act
    for method in ("fewbit", "inverted"):
        site, _ = fitact.convert(model, method, example_inputs=X)
        assert (site.before, site.after, site.reason) == ("gelu_fewbit3", None, "already gelu_fewbit3")
        assert model[0].act is replacement
    fitact.revert(other)
    assert other.act is original and model[0].act is replacement  # in another model, too, it knows its original
    model.eval()
    assert len(fitact.revert(model)) == 2 and not any(module.training for module in model.modules())
    assert len(fitact.revert(model)) == 0


@pytest.mark.parametrize("copies", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(copies: Callable[[Any], Any]) -> None:
    """Originals are in them once, and no state is added."""
    act = nn.GELU()
    model = nn.Sequential(nn.Linear(16, 16), act, nn.Linear(16, 16), act, Holds(F.silu), nn.SiLU(inplace=True))
    x = torch.randn(4, 16)
    baseline, text, state = model(x), repr(model), model.state_dict()
    size = len(pickle.dumps(nn.Sequential(*[model] * 50)))
    fitact.convert(model, "fewbit")
    assert len(pickle.dumps(nn.Sequential(*[model] * 50))) < size + 6000
    copied = copies(model)
    assert copied[1] is copied[3] is not model[1]
    copied.load_state_dict(state)
    assert torch.equal(copied(x), baseline) and [*copied.state_dict()] == [*state]
    fitact.revert(copied)
    assert repr(copied) == text and copied[4].act is F.silu and copied[1] is copied[3]
    assert type(model[1]).__name__ == "GeluFewbit3"


RUNS: dict[str, tuple[Callable[[Tensor], Any], Callable[[], Any]]] = {  # what is read, and where tensors are
    "a value is read": (lambda x: x.sum().item() < 1e9, nullcontext),
    "an address is used": (Tensor.data_ptr, nullcontext),  # as by a kernel of the model's own
    "on meta": (lambda _: True, lambda: torch.device("meta")),
    "fake": (lambda _: True, FakeTensorMode),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("given", [{"method": "fewbit"}, {"error": "exact"}, {"error": "rounding"}], ids=str)
def test_fake_and_real_runs_agree(given: dict[str, Any], run: str, recwarn: Any) -> None:
    """Also for models without memory. Kernels never get the address of a fake tensor."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.layers(x)
        assert self.read(y)
        return y

    reports = []
    for read, where in (RUNS["on meta"][0], nullcontext), RUNS[run]:
        with where():
            layers = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.5))
            model, x = built(forward, layers=layers, read=read), torch.randn(1000, 16)
        reports.append(fitact.convert(model, **given, example_inputs=x))
    first, second = ((each.sites, each.saved_after, each.modules) for each in reports)
    assert first == second and reports[0].saved_after < reports[0].saved_before
    assert not [each for each in recwarn if "data pointer" in str(each.message)]


ROWS = 96
ELEMENTS = 8 * ROWS * 64  # of GELU's output: several whole tiles, so that k bits are exactly that
CONSUMERS: dict[str, tuple[Callable[..., Tensor], bool]] = {  # what comes after GELU, and whether it saves that
    "linear": (lambda self, x: self.down(self.act(self.up(x))), True),
    "gate": (lambda self, x: self.down(self.act(self.up(x)) * self.up(x)), True),
    "dropout": (lambda self, x: self.down(self.drop(self.act(self.up(x)))), False),
    "frozen": (lambda self, x: self.frozen(self.act(self.up(x))), False),
    "transposed": (lambda self, x: self.wide(self.act(self.up(x)).mT), False),
}


def consumer(kind: str) -> Any:
    parts = {"up": nn.Linear(32, 64), "act": nn.GELU(), "drop": nn.Dropout(0.1), "down": nn.Linear(64, 32)}
    parts |= {"frozen": nn.Linear(64, 32).requires_grad_(False), "wide": nn.Linear(96, 32)}
    return built(CONSUMERS[kind][0], **parts)


@pytest.mark.parametrize("kind", CONSUMERS)
def test_consumers(kind: str) -> None:
    model, x = consumer(kind), torch.randn(8, ROWS, 32)
    for method in ("fewbit", "inverted"):
        conversion = fitact.convert(model, method, example_inputs=x)
        (site,) = conversion
        after = saved_bytes_of(model, lambda: model(x))
        fitact.revert(model)
        before = saved_bytes_of(model, lambda: model(x))
        assert (conversion.saved_before, conversion.saved_after) == (before, after)
        assert (site.after is None) == (method == "inverted" and not CONSUMERS[kind][1])
        expected = {"gelu_fewbit3": 3 * ELEMENTS // 8, "gelu_inverted1": ELEMENTS // 8, "None": 4 * ELEMENTS}
        assert before - after == 4 * ELEMENTS - expected[str(site.after)]
        assert fitact.convert(model, method, dry_run=True).sites[0].after  # without inputs, as is asked for
    given = {nn.GELU: type(fitact.activation("gelu", method="inverted"))}  # is put in, whatever it saves
    assert fitact.convert(model, replace=given, example_inputs=x).sites[0].after == "gelu_inverted1"


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
def test_overwritten_outputs_are_not_saved(real: bool, autocast: bool) -> None:
    """The linear layer saves the storage of the output, but not what backward would need there."""
    x = torch.randn(8, ROWS, 64)

    def forward(self: Any, x: Tensor) -> Tensor:
        # under autocast an inverted activation returns what PyTorch's own is cast to: then that is overwritten
        y = self.act(self.up(x)).to(HALF if autocast else None)
        y += 1
        return self.down(y)

    model = built(forward, up=nn.Linear(64, 64), act=nn.SiLU(), down=nn.Linear(64, 64))
    inputs = (lambda model: model(x).mean() if float(x[0, 0, 0]) else None) if real else x
    with torch.autocast("cpu", dtype=HALF, enabled=autocast):
        (site,) = fitact.convert(model, "inverted", example_inputs=inputs)
        assert site.after is None
        assert site.reason.startswith("a later operation overwrites its output")
        assert sites(fitact.convert(model, "fewbit", example_inputs=inputs)) == {"act": "silu_fewbit3"}
        y = model(x)
        y.sum().backward()
        fitact.revert(model)
        fitact.convert(model, "inverted")
        y = model(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


numpy_random: Any = imported("numpy").random  # its old interface, which models use
DRAWS: dict[str, Callable[[], Any]] = {
    "fake": random.random,
    "real": lambda: torch.rand([]),
    "numpy": lambda: numpy_random.random(),
}


def states() -> str:
    return repr((random.getstate(), numpy_random.get_state(legacy=False), torch.get_rng_state().tolist()))


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize(("blocks", "exclude"), [(8, []), (1, []), (8, ["blocks.0.*", "blocks.7.*"])], ids=str)
def test_what_chance_leaves_out(draw: Callable[[], Any], blocks: int, exclude: list[str]) -> None:
    """It is treated as its likes."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for block in self.blocks:
            if draw() < 0.5:
                x = x + block(x)
        return x * self.blocks[0].down.bias

    x = torch.randn(1024, 16)
    for seed in range(5):
        for start in (torch.manual_seed, random.seed, numpy_random.seed):
            start(seed)
        model = built(forward, blocks=nn.ModuleList(Holds(nn.GELU()) for _ in range(blocks)))
        before = states()
        conversion = fitact.convert(model, "inverted", exclude=exclude, example_inputs=x)
        assert states() == before
        converted = [site for site in conversion if site.reason != "excluded"]
        assert len(converted) == blocks - len(exclude) and {site.after for site in converted} == {"gelu_inverted1"}
        assert not any(site.after for site in conversion if site not in converted)


def test_two_activations_of_one_tensor() -> None:
    parts = {"up": nn.Linear(16, 64), "a": nn.GELU(), "b": nn.SiLU(), "drop": nn.Dropout()}
    model = built(lambda self, x: self.drop(self.a(y := self.up(x))) + self.drop(self.b(y)), **parts)
    conversion = fitact.convert(model, "fewbit", example_inputs=torch.randn(8 * ROWS, 16))
    assert sites(conversion) == {"a": "gelu_fewbit3", "b": "silu_fewbit3"}
    assert conversion.saved_before - conversion.saved_after == 4 * ELEMENTS - 2 * 3 * ELEMENTS // 8


def test_each_activation_is_decided_for_itself() -> None:
    """What pays is replaced, and what does not is left alone beside it."""
    model = nn.Sequential(consumer("linear"), nn.Sequential(consumer("frozen")))
    report = fitact.convert(model, "inverted", example_inputs=torch.randn(8, ROWS, 32))
    assert [site.after for site in report] == ["gelu_inverted1", None]


def test_measured_as_it_trains() -> None:
    """A model in evaluation mode, as when it is loaded, has its dropout measured; one that is in part stays so."""
    model, x = consumer("dropout"), torch.randn(8, ROWS, 32)
    (site,) = fitact.convert(model.eval(), "inverted", dry_run=True, example_inputs=x)
    assert site.after is None and not model.training
    model.train()
    model.drop.eval()
    assert fitact.convert(model, "inverted", dry_run=True, example_inputs=x).replaced


def test_what_saves_nothing() -> None:
    """What is not run, or saves nothing outside of a checkpoint, is replaced as asked."""
    block = built(lambda self, x: checkpoint(self.block, x, use_reentrant=False), block=Holds(nn.GELU()))
    block.unused = nn.SiLU()
    after = {"block.act": "gelu_fewbit3", "unused": "silu_fewbit3"}
    assert sites(fitact.convert(block, "fewbit", example_inputs=torch.randn(2048, 16))) == after


def test_table() -> None:
    model = nn.Sequential(*(Holds(nn.GELU()) for _ in range(3)), nn.PReLU())
    table = [
        "site       was    would be      note",
        "*.act  ×3  GELU   gelu_fewbit3",
        "3          PReLU  left alone    its parameters are learned",
    ]
    assert str(fitact.convert(model, "fewbit", dry_run=True)).splitlines() == [*table, "3 of 4 would be replaced"]
    assert str(fitact.convert(model, "fewbit", example_inputs=torch.randn(2048, 16))).splitlines() == [
        table[0].replace("would be", "is      "),
        *table[1:],
        "module              saved            now",
        "*.act   ×3        1.5 MiB  147,456 bytes",
        "*.down  ×3        1.5 MiB        1.5 MiB",
        "*.up    ×3  393,216 bytes  393,216 bytes",
        "3           131,072 bytes  131,072 bytes",
        "3 of 4 replaced; the model saves 2.1 MiB for backward instead of 3.5 MiB, 61.2 %",
    ]


@pytest.mark.parametrize("activation", [nn.GELU, lambda: F.gelu, lambda: nn.SiLU(inplace=True)])
@pytest.mark.parametrize("method", ["fewbit", "inverted"])
def test_compiled(activation: Callable[[], Any], method: str) -> None:
    """In one graph, converted before or after; parts that are compiled are measured without a warning."""
    torch._dynamo.reset()
    model, x = Holds(activation()), torch.randn(500, 16, requires_grad=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    baseline = compiled(x)
    assert method != "fewbit" or fitact.convert(compiled, method, example_inputs=x).replaced
    fitact.convert(compiled, method)
    eager, traced = model(x), compiled(x)
    assert torch.equal(eager, traced)
    torch.testing.assert_close(traced, baseline)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (traced, eager)))
    for inner in (nn.Linear(16, 16), torch.compile(nn.Linear(16, 16), backend="aot_eager")):
        inner.compile(backend="aot_eager")
        assert len(fitact.convert(nn.Sequential(model, inner), method, example_inputs=x)) == 1
    fitact.revert(compiled)
    assert sites(fitact.convert(compiled, method, dry_run=True)) != {}


def test_import_is_lazy() -> None:
    lazy = "assert 'torch' not in sys.modules; fitact.convert; assert 'sympy' not in sys.modules"
    python(f"import fitact, sys; {lazy}")
    python("import fitact, torch, sys; fitact.saving; assert 'triton' not in sys.modules")
    assert {"convert", "revert", "saving"} <= set(dir(fitact))
    for name, message in {
        "absent": "absent",
        "rebuild": r"^fitact\.rebuild is now fitact\.convert\(model\)$",
        "converted_functions": r"is now fitact\.saving\(\)$",
        "revert_plan": r"is now fitact\.revert\(model\)$",
    }.items():
        with pytest.raises(AttributeError, match=message):
            getattr(fitact, name)


def test_the_error_of_the_gradient() -> None:
    """Beside one that is computed here: with the same dropout, of all parameters as one vector."""

    def forward(self: Any, x: Tensor) -> dict[str, Tensor]:
        y = self.layers(x)
        return {"loss": y.square().mean(), "y": y}

    layers = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Dropout(), nn.Linear(256, 4))
    model, x = built(forward, layers=layers, unused=nn.Parameter(torch.ones(2))), torch.randn(512, 64)
    random_state, vectors = torch.random.get_rng_state(), []
    conversion = fitact.convert(model, "fewbit", bits=3, dry_run=True, example_inputs=x, gradients=True)
    for model.layers[2] in (nn.GELU(), GeluFewbit3()):
        torch.random.set_rng_state(random_state)
        gradients = torch.autograd.grad(model(x)["loss"], [*model.layers.parameters()])
        vectors.append(torch.cat([each.double().flatten() for each in gradients]))
    baseline, actual = vectors
    gradient = conversion.gradient
    assert gradient.note == ""
    assert gradient.error == pytest.approx(float((actual - baseline).norm() / baseline.norm()), rel=1e-6)
    assert gradient.cosine == pytest.approx(float(actual @ baseline / actual.norm() / baseline.norm()), rel=1e-9)
    assert 1e-3 < gradient.error < 0.2
    assert f"the gradient is off by {100 * gradient.error:.3g} % of its" in str(conversion)
    assert fitact.convert(Holds(nn.GELU()), "fewbit", example_inputs=X).gradient is None


def test_gradients_that_are_baselines_or_cannot_be_measured() -> None:
    x, given = torch.randn(512, 16), {"method": "fewbit", "gradients": True}
    conversion = fitact.convert(Holds(nn.Hardtanh()), **given, example_inputs=x)
    assert conversion.replaced and conversion.gradient.error == 0
    nothing = fitact.convert(Holds(nn.GELU()), **given, example_inputs=lambda model: [model(x)][:0]).gradient
    assert nothing.error is None and nothing.note
