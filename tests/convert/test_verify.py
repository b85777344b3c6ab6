"""`fitact.verify`: what differs from the baseline is found and named; the rest is the same bit for bit."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import fitact
from fitact.base import UsageError
from fitact.runtime.choose.checkpoints import Checkpoint
from fitact.runtime.saving import attach
from tests.support.blocks import MLP
from tests.support.built import built
from tests.support.models import batch_of, model_of
from tests.support.saving import differences, gradients

X = torch.randn(640, 16, generator=torch.Generator().manual_seed(0))


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(MLP(p=0.1), MLP(p=0.1), nn.BatchNorm1d(16))


def halved(x: Tensor) -> Tensor:
    """Return what is given, with half the gradient."""
    x = x * 1
    x.register_hook(lambda gradient: gradient / 2)
    return x


def own(function: Callable[[Tensor], Any]) -> nn.Module:
    return built(lambda self, x: function(x))


EXACT: dict[str, Callable[[Any], object]] = {
    "as it is": lambda net: None,
    "converted": fitact.convert,
    "converted in parts": lambda net: fitact.convert(net, include="0.*"),
    "checkpointed by fitact": lambda net: attach(net[1], checkpoint=Checkpoint("checkpointed")),
    "checkpointed by PyTorch": lambda net: net.set_submodule("0", checkpoint_wrapper(net[0])),
    "checkpointed by its own": lambda net: net.set_submodule(
        "0", built(lambda self, x: checkpoint(self.block, x, use_reentrant=False), block=net[0])
    ),
    "compiled block": lambda net: net.set_submodule("1", torch.compile(net[1], backend="aot_eager")),
    "compiled in place": lambda net: net.compile(backend="aot_eager"),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at a block's input
@pytest.mark.parametrize("name", EXACT)
def test_same(name: str) -> None:
    net = model()
    EXACT[name](net)
    net[2].running_mean.fill_(0.5)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)

    def looks() -> Any:
        values = copy.deepcopy((net.state_dict(), gradients(net), torch.get_rng_state(), random.getstate()))
        return values, [type(module) for module in net.modules()]

    before = looks()
    actual = fitact.verify(net, X)
    assert actual.same and str(actual).endswith("are the baseline's, bit for bit"), actual
    assert actual.compared[1] == 14
    assert (actual.compared[0] > 0) == (not name.startswith("compiled"))
    assert not differences(before, looks())


@pytest.mark.parametrize("error", ["rounding", "coarse"])
def test_error_is_stated(error: str) -> None:
    """The loss and outputs are the baseline's, the gradient is off by what `convert` measures."""
    net = model()
    measured: Any = fitact.convert(net, error=error, example_inputs=X, gradients=True).gradient
    actual = fitact.verify(net, X)
    assert actual.loss[0] == actual.loss[1] and not actual.outputs and actual.random and not actual.same
    largest, worst = max((each, name) for name, each in actual.gradients.items())
    assert actual.passed and 0 < min(actual.gradients.values()) <= measured.error <= largest
    assert f"most that of {worst}, by {100 * largest:.3g} %" in str(actual)


def verified(path: str, function: Callable[[Tensor], Any], net: nn.Module | None = None) -> Any:
    """Compare a model with a wrong function in it with the right one."""
    net = net or model()
    spoilt = copy.deepcopy(net)
    spoilt.set_submodule(path, own(function))
    return fitact.verify(spoilt, X, baseline=net)


def test_wrong_forward() -> None:
    seen = verified("1.act", lambda x: F.gelu(x, approximate="tanh"))
    assert next(iter(seen.outputs)) == "1.act" and 0 < seen.outputs["1.act"] < 0.01
    assert not any(path.startswith("0") for path in seen.outputs)
    assert seen.loss[0] != seen.loss[1] and "first that of 1.act, by " in str(seen)


def test_wrong_backward() -> None:
    seen = verified("1.act", lambda x: F.gelu(halved(x)))
    assert not seen.outputs and next(iter(seen.passed)) == "1.fc1"
    assert seen.passed["1.fc1"] == pytest.approx(0.5)
    assert "1.fc2.weight" not in seen.gradients and seen.gradients["1.fc1.weight"] == pytest.approx(0.5)
    assert "the gradient at the output of 1.fc1, by 50 %" in str(seen)


def test_random_state() -> None:
    seen = verified("0.act", lambda x: F.gelu(x) + 0 * torch.rand(()))
    assert not seen.random and "random state: another" in str(seen)
    assert next(iter(seen.outputs)) == "0.drop"  # which draws other numbers


def test_a_module_that_is_called_twice() -> None:
    shared = nn.Linear(16, 16)
    seen = verified("1", F.silu, nn.Sequential(shared, own(F.relu), shared))
    assert [*seen.outputs] == ["1", "0 (call 2)", ""]


def test_transformers() -> None:
    """A model with a loss, in evaluation mode, whose checkpoints transformers makes."""
    net, batch = model_of("llama"), batch_of("llama")
    net.activation_checkpointing_enable()
    net.eval()
    assert fitact.verify(net, batch).same and net.is_activation_checkpointing and not net.training
    fitact.convert(net, "fewbit", bits=2)
    actual = fitact.verify(net, batch)
    assert not actual.outputs and "mlp" in next(iter(actual.passed))


def test_an_output_that_nothing_reads() -> None:
    both = built(lambda _, x: x.chunk(2, -1))
    parts = {"first": nn.Linear(16, 64), "both": both, "last": nn.Linear(32, 8)}
    net = built(lambda m, x: m.last(m.both(m.first(x))[0]), **parts)
    assert fitact.verify(net, X).same


class Own(nn.Parameter):
    """A parameter of the user's class."""


def test_gradients_stay() -> None:
    """Also of parameters that are not copied: they have theirs, and nothing is added."""
    net: Any = model()
    net[0].fc1.weight = Own(net[0].fc1.weight.data)
    for wanted in (None, torch.ones_like(net[0].fc1.weight)):
        net[0].fc1.weight.grad = wanted
        assert fitact.verify(net, X).same and net[0].fc1.weight.grad is wanted


def test_refusals() -> None:
    net = model()
    net.generator = (each for each in ())
    wrong: dict[str, tuple[Any, ...]] = {
        "have no values": (model().to("meta"), X, None),
        "its forward pass failed": (model(), X[:, :3], None),
        "no trained parameter of it has the name": (model(), X, nn.Linear(16, 16)),
        r"cannot be copied: TypeError.*give a baseline": (net, X, None),
        "expected a model": (None, X, None),
    }
    for message, (each, x, baseline) in wrong.items():
        with pytest.raises(UsageError, match=message):
            fitact.verify(each, x, baseline=baseline)
