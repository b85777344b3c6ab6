"""What can go wrong unseen: changes in place, what lives on, copies, peaks, and tools that take a whole model."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import fitact
from fitact.runtime.measure.saved import count_saved
from tests.support.blocks import MLP, MODELS, SETTINGS, Gate, Own, Read, RMSNorm
from tests.support.lifetimes import HELD, lifetimes
from tests.support.peak import peak_memory
from tests.support.saving import HALF, X, agree, cast, differences, kept, loss_of, observed, pair, train


class Gemma(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        z = x.float()
        z = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + self.eps)
        return (z * (1.0 + self.weight.float())).to(x.dtype)


class Changed(nn.Module):
    """Something is changed in place, before a reader or after it."""

    def __init__(self, kind: Callable[[], nn.Module], what: str, when: str, frozen: bool) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(16, 16), kind(), nn.Linear(16, 16)
        self.what, self.when = what, when
        for one in self.act.parameters():
            one.requires_grad_(not frozen)

    def change(self, when: str, **tensors: Tensor) -> None:
        tensors |= {"parameter": next(self.act.parameters(), self.fc1.weight), "reader": self.fc2.weight}
        tensors["bias"] = getattr(self.act, "bias", self.fc2.bias)
        if when == self.when:
            with torch.no_grad():
                tensors[self.what].add_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        a = self.fc1(x)
        y = self.act(a)
        self.change("before", x=x, a=a, y=y)
        z: Tensor = self.fc2(y)
        self.change("after", x=x, a=a, y=y)
        return z


KINDS: dict[str, Callable[[], nn.Module]] = {
    "GELU": nn.GELU,
    "composed": Own,
    "LayerNorm": lambda: nn.LayerNorm(16),
    "RMSNorm": RMSNorm,
    "nn.RMSNorm": lambda: nn.RMSNorm(16),
    "Gemma": Gemma,
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # PyTorch's own
@pytest.mark.parametrize(
    "setting",
    ["float32", "float64", *(pytest.param(one, marks=pytest.mark.full) for one in ("bfloat16", "autocast"))],
)
@pytest.mark.parametrize("kind", KINDS)
def test_changes_in_place(kind: str, setting: str) -> None:
    """Nothing is recomputed from what was changed: gradients, or the error, are the baseline's."""
    dtype, autocast = SETTINGS[setting]

    def step(ask: str, model: Changed, x: Tensor) -> Any:
        with cast(autocast):
            z = model(x * 1)
        if ask == "all":
            loss_of(z).backward()
            return None
        return torch.autograd.grad(loss_of(z), model.fc2.weight)

    wrong = []
    for what, when, frozen, ask in product(
        ("a", "y", "parameter", "bias", "reader"), ("before", "after"), (False, True), ("all", "weight")
    ):
        try:
            agree(partial(Changed, KINDS[kind], what, when, frozen), partial(step, ask), dtype=dtype)
        except AssertionError:
            wrong.append(f"{what} changed {when} the reader, {frozen=}, {ask} asked for")
    assert not wrong


def test_detached_readers_do_not_keep_their_weight() -> None:
    """The baseline needs it for the gradient of the input alone, so a step between the passes does not matter."""

    def step(model: Any, x: Tensor) -> Tensor:
        y: Tensor = model(x)
        with torch.no_grad():
            model.fc2.weight.mul_(0.5)
        loss_of(y).backward()
        return y.detach()

    agree(partial(Read, lambda model, x, y: model.fc2(y.detach())), step)


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("name", ["mlp", "dropout", "composed", "qkv of LayerNorm", "adapters", "gate", "block"])
def test_nothing_lives_longer(name: str, held: str) -> None:
    """What the baseline has freed is freed, whatever of a step is held; with the graph, more is."""
    expected, expected_later, found, later = lifetimes(pair(MODELS[name]), held)
    assert found <= expected and later <= expected_later
    if held == "the graph":
        assert found < expected


class _Count(TorchDispatchMode):
    """Counts the calls of GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.gelu.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("readers", [1, 3])
def test_recomputed_once_a_backward(readers: int) -> None:
    _, model = pair(partial(Read, lambda model, x, y: sum(model.fc2(y) * i for i in range(readers))))
    y = model(X)
    for _ in range(2):
        with _Count() as gelu:
            loss_of(y).backward(retain_graph=True)
        assert gelu.count == 1


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.slope * x)


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(x) * torch.rand_like(x) if self.training else F.silu(x)


@pytest.mark.parametrize(
    "act", [Learned, Noisy, nn.PReLU, nn.RReLU, partial(nn.SiLU, inplace=True), nn.ReLU, nn.Tanh]
)
def test_activations_that_are_more(act: Any) -> None:
    """Learned and random ones, and those in place, or that keep what they return."""
    agree(partial(MLP, act, 0.2))
    agree(partial(Gate, act))


def test_functional() -> None:
    for name in ("mlp", "qkv", "gate", "composed"):
        models = pair(MODELS[name])
        given = {key: 1.5 * one.detach() for key, one in models[0].named_parameters()}

        def value(one: nn.Module, given: dict[str, Tensor], x: Tensor) -> Tensor:
            return loss_of(functional_call(one, given, (x,)))

        for transform in (
            lambda f: grad(f),
            lambda f: vmap(grad(f), (None, 0)),
            lambda f: lambda *all: torch.func.jvp(lambda x: f(all[0], x), (all[1],), (all[1],)),
            lambda f: lambda *all: torch.func.vjp(f, *all)[1](torch.ones(())),
        ):
            assert not differences(*(transform(partial(value, one))(given, X) for one in models))
        leaves = {key: one.requires_grad_() for key, one in given.items()}
        found = (torch.autograd.grad(value(one, leaves, X), [*leaves.values()]) for one in models)
        assert not differences(*found)


def test_contexts_and_functional() -> None:
    """Gradients of `torch.func` take no saved-tensor hooks."""
    model = MODELS["mlp"]()
    given = dict(model.named_parameters())

    def value(given: dict[str, Tensor]) -> Tensor:
        with fitact.saving():
            return loss_of(functional_call(model, given, (X,)))

    found, expected = grad(value)(given), torch.autograd.grad(loss_of(model(X)), [*given.values()])
    assert all(torch.equal(*both) for both in zip(found.values(), expected, strict=True))
    with (
        pytest.raises(fitact.UsageError, match=r"^saving.*enter it in the function that torch.func"),
        fitact.saving(),
    ):
        grad(value)(given)


@pytest.mark.parametrize("name", MODELS)
def test_second_derivatives(name: str) -> None:
    def step(model: Any, x: Tensor) -> Any:
        wanted = [x, *model.parameters()]
        first = torch.autograd.grad(loss_of(model(x)), wanted, create_graph=True)
        sum(one.square().sum() for one in first).backward()
        return [one.detach() for one in first]

    agree(MODELS[name], step)


@pytest.mark.parametrize("name", ["dropout", "qkv", "gate last", "block"])
def test_copies(name: str) -> None:
    """Copies, pickles and files of a model save as little as it, and are independent of it."""
    baseline, model = pair(MODELS[name])
    train(model, X)
    model.zero_grad()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    fresh = MODELS[name]()
    fresh.load_state_dict(model.state_dict())
    assert [*model.state_dict()] == [*baseline.state_dict()] and repr(model) == repr(baseline)
    for one, other in zip(model.modules(), baseline.modules(), strict=True):
        assert isinstance(one, type(other)) and type(one).__name__ == type(other).__name__
    wide = torch.randn(64, 16, 16)
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert kept(one, wide) == kept(model, wide) < kept(baseline, wide)
        doubled = copy.deepcopy(baseline)
        with torch.no_grad():
            for own in (*one.parameters(), *doubled.parameters()):
                own.mul_(2)
        assert not differences(observed(doubled, train, X), observed(one, train, X))
    assert not differences(observed(baseline, train, X), observed(model, train, X))
    assert fitact.revert(loaded)
    assert [type(one) for one in loaded.modules()] == [type(one) for one in baseline.modules()]


def test_outputs_can_be_copied() -> None:
    baseline, model = pair(partial(Read, lambda model, x, y: y))
    y = model(X)
    for one in (copy.deepcopy(y.detach()), pickle.loads(pickle.dumps(y.detach())), y.detach().clone()):
        assert torch.equal(one, baseline(X))
        model.fc2(one.requires_grad_()).sum().backward()
        assert one.grad is not None


def test_without_gradient() -> None:
    models = pair(MODELS["block"])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not differences(*(observed(one, lambda one, x: one(x), X)[0] for one in models))
    assert not differences(*(observed(one, train, X) for one in models))
    assert not differences(*(observed(one.eval(), train, X) for one in models))


def test_two_models_and_an_exception() -> None:
    """Two models take turns; a third pass fails halfway through the forward or the backward pass."""
    pairs = [pair(MODELS[name]) for name in ("dropout", "adapters")]

    def turns(models: Any, x: Tensor) -> Any:
        outputs = [one(x) for one in models]
        for y in outputs:
            loss_of(y).backward(retain_graph=True)

        def fail(*_: Any) -> None:
            raise KeyError

        for model in models:
            layer = next(one for one in model.modules() if isinstance(one, nn.LayerNorm | RMSNorm))
            hook = layer.register_forward_hook(fail)
            with pytest.raises(KeyError):
                model(x)
            hook.remove()
            hook = layer.register_forward_hook(lambda _, __, y: y.register_hook(fail) and None)
            y = model(x)
            hook.remove()
            with pytest.raises(KeyError):
                loss_of(y).backward()
        loss_of(outputs[0] + outputs[1]).backward()
        return [one(x).detach() for one in models]

    sides: list[Any] = [nn.ModuleList(side) for side in zip(*pairs, strict=True)]
    assert not differences(*(observed(side, turns, X) for side in sides))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
@pytest.mark.parametrize(
    "name", ["dropout", "qkv", "gate", "composed", pytest.param("block", marks=pytest.mark.full)]
)
def test_compiled(name: str) -> None:
    def step(model: Any, x: Tensor) -> Any:
        torch._dynamo.reset()
        return train(torch.compile(model, backend="aot_eager", fullgraph=True), x)

    agree(MODELS[name], step)

    def alone(model: Any, x: Tensor) -> Any:
        """One layer is compiled, what is around it is not."""
        torch._dynamo.reset()
        for one in model.modules():
            if isinstance(one, (nn.GELU, RMSNorm, nn.SiLU)):
                one.compile(backend="aot_eager")
        return train(model, x)

    agree(MODELS[name], alone)


def test_exported() -> None:
    _, model = pair(MODELS["block"])
    model.eval()
    assert torch.equal(torch.export.export(model, (X,)).module()(X), model(X))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_peak(name: str, dtype: torch.dtype) -> None:
    """Not even a single block takes more, although it recomputes while its gradients are there."""
    wide = torch.randn(64, 32, 16).to(dtype)
    for blocks in (1, 2, 4):
        models = pair(lambda blocks=blocks: nn.Sequential(*(MODELS[name]() for _ in range(blocks))), dtype)
        before, after = (peak_memory(lambda one=one: one(wide).sum().backward(), one)["total"] for one in models)
        assert after <= before if blocks == 1 else after < before


class Residual(nn.Module):
    """Adds half precision to a float32 stream: only the sum of all branches takes less than each sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the branch."""
        with torch.autocast("cpu", torch.bfloat16):
            return x + self.linear(self.norm(x))


def test_peak_of_many_sums() -> None:
    """Backward holds no more sums that it computed in a deep model than in a shallow one."""
    wide = torch.randn(1024, 16)
    over = []
    for blocks in (18, 36):
        model = nn.Sequential(*(Residual() for _ in range(blocks)))
        with count_saved(model) as saved, fitact.saving():
            y = model(wide)
        del y

        def step(model: nn.Module = model) -> None:
            with fitact.saving():
                y = model(wide)
            y.sum().backward()

        parameters = sum(one.nbytes for one in model.parameters())
        over.append(peak_memory(step, model)["total"] - saved.bytes - 2 * parameters)
    assert over[1] < over[0] + wide.nbytes


@pytest.mark.parametrize("inputs", [None, X], ids=["unseen", "measured"])
@pytest.mark.parametrize("spectral", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_reading_a_parametrized_weight_changes_it(inputs: Tensor | None, spectral: Any) -> None:
    """Spectral norm iterates whenever a weight is read, or by a hook that calls functions: not in conversions."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(spectral(nn.Linear(16, 48)), nn.GELU(), spectral(nn.Linear(48, 16)), nn.LayerNorm(16))

    baseline, model = make(), make()
    fitact.convert(model, error="exact", example_inputs=inputs)
    expected, found = baseline.state_dict(), model.state_dict()
    assert any(key.endswith("_u") for key in expected)
    assert all(torch.equal(value, found[key]) for key, value in expected.items())
    assert not differences(*(observed(one, train, X) for one in (baseline, model)))


def test_reverting_and_dry_runs() -> None:
    baseline, model = pair(MODELS["block"])

    def unchanged() -> bool:
        modules = [*zip(model.modules(), baseline.modules(), strict=True)]
        return all(type(a) is type(b) and vars(a).keys() == vars(b).keys() for a, b in modules)

    assert not unchanged()
    assert [site.name for site in fitact.revert(model)] == [""] and unchanged()
    before = torch.get_rng_state()
    plan = fitact.convert(model, dry_run=True, example_inputs=(X,))
    assert plan.dry_run and unchanged() and torch.equal(torch.get_rng_state(), before)
    assert all(one.grad is None for one in model.parameters())
    assert plan.gradient is not None and plan.gradient.error == 0 and "bit for bit" in str(plan)
    done = fitact.convert(model, example_inputs=(X,))
    assert (done.saved_before, done.saved_after) == (plan.saved_before, plan.saved_after)
    assert (done.saved_before, done.saved_after) == (kept(baseline, X), kept(model, X))
    assert model.training and not differences(*(observed(one, train, X) for one in (baseline, model)))


def test_activations_replaced_too() -> None:
    """A model whose activations are replaced saves less too, and `revert` puts all back."""
    model = MODELS["block"]()
    before = [type(one) for one in model.modules()]
    fitact.convert(model, "fewbit")
    replaced = copy.deepcopy(model)
    fitact.convert(model)
    assert kept(model, X) < kept(replaced, X)
    assert not differences(observed(replaced, train, X), observed(model, train, X))
    fitact.revert(model)
    assert [type(one) for one in model.modules()] == before


@pytest.mark.parametrize("name", MODELS)
def test_sizes_without_numbers(name: str) -> None:
    """On the meta device, which has no autocast, as much is saved as on a CPU, and gradients have their shapes."""
    _, model = pair(MODELS[name])
    expected = kept(model, X)
    assert kept(model.to("meta"), X.to("meta")) == expected
    model(X.to("meta")).square().sum().backward()
    assert all(one.grad is not None and one.grad.shape == one.shape for one in model.parameters())
