"""What can go wrong unseen: changes in place, what lives on, what is taken for a gate; and the whole model."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import fitact
from fitact.errors import UsageError
from fitact.runtime.memory.peak import peak_memory

from .test_rebuild import (
    HALF,
    MLP,
    MODELS,
    SETTINGS,
    Gate,
    Own,
    Read,
    RMSNorm,
    X,
    agree,
    cast,
    differences,
    kept,
    loss_of,
    observed,
    pair,
    train,
)


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


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(
    "setting",
    ["float32", "float64", *(pytest.param(one, marks=pytest.mark.full) for one in ("bfloat16", "autocast"))],
)
@pytest.mark.parametrize("kind", KINDS)
def test_changes_in_place(kind: str, setting: str) -> None:
    """What is changed after it was noted is not rebuilt from: the gradient is right, or there is none."""

    def step(ask: str, model: Changed, x: Tensor) -> Any:
        with cast(HALF if setting == "autocast" else None):
            z = model(x * 1)
        if ask == "all":
            loss_of(z).backward()
            return None
        return torch.autograd.grad(loss_of(z), model.fc2.weight)

    wrong = []
    for what, when, frozen, ask in product(
        ("a", "y", "parameter", "bias", "reader"), ("before", "after"), (False, True), ("all", "weight")
    ):
        make = partial(Changed, KINDS[kind], what, when, frozen)
        try:
            agree(make, partial(step, ask), dtype=SETTINGS[setting][0], raises=True)
        except AssertionError:
            wrong.append(f"{what} changed {when} the reader, {frozen=}, {ask} asked for")
    assert not wrong


def test_detached_readers_do_not_keep_their_weight() -> None:
    """Stock needs the weight for the gradient of the input alone; so a step between the passes is no matter."""

    def step(model: Any, x: Tensor) -> Tensor:
        y: Tensor = model(x)
        with torch.no_grad():
            model.fc2.weight.mul_(0.5)
        loss_of(y).backward()
        return y.detach()

    agree(partial(Read, lambda model, x, y: model.fc2(y.detach())), step)


# ------------------------------------------------------------------------------------------------ what lives on


@contextmanager
def alive(model: nn.Module) -> Iterator[Callable[[], set[str]]]:
    """Yield what returns the modules whose outputs are still in memory."""
    storages: list[tuple[str, Any]] = []

    def note(name: str, _: Any, __: Any, y: Tensor) -> None:
        storages.append((name, weakref.ref(y.untyped_storage())))

    hooks = [one.register_forward_hook(partial(note, name)) for name, one in model.named_modules() if name]
    yield lambda: {name for name, storage in storages if storage() is not None}
    for hook in hooks:
        hook.remove()


def _offloaded(model: Any, x: Tensor) -> Any:
    with save_on_cpu():
        return model(x)


def _detached(model: Any, x: Tensor) -> Any:
    """Hold all outputs without what made them, as one does who gathers hidden states."""
    held: list[Tensor] = []
    hooks = [one.register_forward_hook(lambda _, __, y: held.append(y.detach())) for one in _rebuilt(model)]
    model(x)
    for hook in hooks:
        hook.remove()
    return held


def _rebuilt(model: nn.Module) -> list[nn.Module]:
    return [one for one in model.modules() if type(one).__name__ in ("GELU", "Own", "LayerNorm")]


def _after(model: Any, x: Tensor) -> Any:
    held: list[Tensor] = []
    hooks = [one.register_forward_hook(lambda _, __, y: held.append(y)) for one in _rebuilt(model)]
    y = model(x)
    for hook in hooks:
        hook.remove()
    loss_of(y).backward()
    return held, y


def _asked(model: Any, x: Tensor) -> Any:
    y = model(x)
    torch.autograd.grad(loss_of(y), next(one for one in model.parameters() if one.ndim == 2))
    return y.detach()


HELD: dict[str, Callable[[Any, Tensor], Any]] = {
    "the graph": lambda model, x: model(x),
    "the graph of a checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "the graph, all offloaded": _offloaded,
    "the outputs without their graph": _detached,
    "the outputs after backward": _after,
    "the loss after a partial backward": _asked,
    "nothing": lambda model, x: train(model, x).sum().item(),
}


def lifetimes(models: tuple[Any, Any], held: str) -> Iterator[set[str]]:
    """Yield what lives while something of a step is held, and afterwards, for each model."""
    for model in models:
        with alive(model) as living:
            x = X.clone().requires_grad_()
            hold = HELD[held](model, x)
            gc.collect()
            yield living()
            del hold
            gc.collect()
            yield living()  # PyTorch's own hooks on an output that its operation keeps never let go of it


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("name", ["mlp", "dropout", "composed", "qkv of LayerNorm", "adapters", "gate", "block"])
def test_nothing_lives_longer(name: str, held: str) -> None:
    """What stock has freed is freed, whatever of a step is held; and outputs are, while the graph is there."""
    stock, stock_later, rebuilt, later = lifetimes(pair(MODELS[name]), held)
    assert rebuilt <= stock and later <= stock_later
    if held == "the graph":
        assert rebuilt < stock


def test_rebuilt_once_a_backward() -> None:
    calls = []

    class Counted(nn.GELU):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(torch.is_grad_enabled())
            return super().forward(x)

    for readers in (1, 3):

        def reads(model: Any, x: Tensor, y: Tensor, readers: int = readers) -> Tensor:
            return torch.stack([model.fc2(y) * i for i in range(readers)]).sum(0)

        _, model = pair(partial(Read, reads, act=Counted, p=0.0))
        y = model(X)
        before = len(calls)
        for passes in (1, 2):
            loss_of(y).backward(retain_graph=True)
            assert len(calls) == before + passes


# ------------------------------------------------------------------------------------------ what is no gate


class Almost(nn.Module):
    """A gate and one thing more, which the first numbers may not show."""

    def __init__(self, more: str) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.act, self.drop, self.more = nn.SiLU(), nn.Dropout(0.0), more
        if more == "parameter":
            self.scale = nn.Parameter(torch.ones(32))
        self.register_buffer("mask", torch.ones(32) if more == "buffer" else None)
        self.multiplier = 1.0

    def forward(self, x: Tensor) -> Tensor:
        g, u = self.gate(x), self.up(x)
        if self.more == "clamp":
            g, u = g.clamp(max=7.0), u.clamp(-7.0, 7.0)
        h = self.act(g) * u
        if self.more == "parameter":
            h = h * self.scale
        if self.mask is not None:
            h = h * self.mask
        if self.more == "evaluation" and not self.training:
            h = h * 2
        y: Tensor = self.down(self.drop(h * self.multiplier))
        return y


@pytest.mark.parametrize("more", ["clamp", "parameter", "buffer", "evaluation", "multiplier", "dropout"])
def test_almost_a_gate(more: str) -> None:
    def step(model: Any, x: Tensor) -> Any:
        if more == "multiplier":
            model.multiplier = 2.0
        if more == "dropout":
            model.drop.p = 0.5
        if more == "buffer":
            model.mask[3] = 0
        if more == "evaluation":
            model.eval()
        return train(model, 50 * x if more == "clamp" else x)

    agree(partial(Almost, more), step)


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


# --------------------------------------------------------------------------------------------- the whole model


def test_functional() -> None:
    for name in ("mlp", "qkv", "gate", "composed"):
        stock, model = pair(MODELS[name])

        def value(one: nn.Module, given: dict[str, Tensor], x: Tensor) -> Tensor:
            return loss_of(functional_call(one, given, (x,)))

        given = {key: 1.5 * one.detach() for key, one in model.named_parameters()}
        for transform in (
            lambda f: grad(f),
            lambda f: vmap(grad(f), (None, 0)),
            lambda f: lambda *all: torch.func.jvp(lambda x: f(all[0], x), (all[1],), (all[1],)),
            lambda f: lambda *all: torch.func.vjp(f, *all)[1](torch.ones(())),
        ):
            expected = transform(partial(value, stock))(given, X)
            try:
                found = transform(partial(value, model))(given, X)
            except RuntimeError as error:  # at least it says so
                assert "derivative" in str(error) or "vmap" in str(error)
                continue
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        leaves = {key: one.requires_grad_() for key, one in given.items()}
        for one in (stock, model):
            expected, found = (
                torch.autograd.grad(value(one, leaves, X), [*leaves.values()]) for one in (stock, model)
            )
            assert not differences(expected, found)


def test_second_derivatives() -> None:
    for name in MODELS:
        _, model = pair(MODELS[name])
        loss = loss_of(model(X))
        with pytest.raises(RuntimeError, match="derivative"):
            torch.autograd.grad(loss, [*model.parameters()], create_graph=True)


@pytest.mark.parametrize("name", ["dropout", "qkv", "gate last", "block"])
def test_copies(name: str) -> None:
    """Copies, pickles and files of a model, rebuilt like it and independent of it."""
    stock, model = pair(MODELS[name])
    train(model, X)
    model.zero_grad()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    fresh = MODELS[name]()
    fresh.load_state_dict(model.state_dict())
    assert [*model.state_dict()] == [*stock.state_dict()] and repr(model) == repr(stock)
    for one, other in zip(model.modules(), stock.modules(), strict=True):
        assert isinstance(one, type(other)) and type(one).__name__ == type(other).__name__
    wide = torch.randn(64, 16, 16)
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert kept(one, wide) == kept(model, wide) < kept(stock, wide)
        with torch.no_grad():
            for own in one.parameters():
                own.mul_(2)
            for own in (twin := copy.deepcopy(stock)).parameters():
                own.mul_(2)
        assert not differences(observed(twin, train, X), observed(one, train, X))
    assert not differences(observed(stock, train, X), observed(model, train, X))
    assert fitact.revert(loaded) and all(
        type(a) is type(b) for a, b in zip(loaded.modules(), stock.modules(), strict=True)
    )


def test_outputs_can_be_copied() -> None:
    _, model = pair(MLP)
    y = model.hidden(X)
    for one in (copy.deepcopy(y.detach()), pickle.loads(pickle.dumps(y.detach())), y.detach().clone()):
        assert torch.equal(one, y)
        one = one.requires_grad_()
        model.fc2(one).sum().backward()
        assert one.grad is not None


def test_without_gradient() -> None:
    stock, model = pair(MODELS["block"])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not differences(*(observed(one, lambda one, x: one(x), X)[0] for one in (stock, model)))
    assert not differences(observed(stock, train, X), observed(model, train, X))
    assert not differences(*(observed(one.eval(), train, X) for one in (stock, model)))


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


def test_exported_and_traced() -> None:
    _, model = pair(MODELS["block"])
    model.eval()
    assert torch.equal(torch.export.export(model, (X,)).module()(X), model(X))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_peak(name: str, dtype: torch.dtype) -> None:
    """Not even a single block takes more, although it is rebuilt while its gradients are there."""
    wide = torch.randn(64, 32, 16).to(dtype)
    for blocks in (1, 2, 4):
        stock, rebuilt = (
            peak_memory(lambda one=one: one(wide).sum().backward(), one)["total"]
            for one in pair(lambda blocks=blocks: nn.Sequential(*(MODELS[name]() for _ in range(blocks))), dtype)
        )
        assert rebuilt <= stock if blocks == 1 else rebuilt < stock


@pytest.mark.parametrize("inputs", [None, X], ids=["unseen", "measured"])
@pytest.mark.parametrize("spectral", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_reading_a_parametrized_weight_changes_it(inputs: Tensor | None, spectral: Any) -> None:
    """Spectral norm iterates whenever a weight is read, or by a hook that calls functions: not in conversions."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(spectral(nn.Linear(16, 48)), nn.GELU(), spectral(nn.Linear(48, 16)), nn.LayerNorm(16))

    stock, rebuilt = make(), make()
    fitact.convert(rebuilt, error="exact", example_inputs=inputs)
    expected, found = stock.state_dict(), rebuilt.state_dict()
    assert any(key.endswith("_u") for key in expected)
    assert all(torch.equal(value, found[key]) for key, value in expected.items())
    assert not differences(*(observed(one, train, X) for one in (stock, rebuilt)))


def test_reverting_and_dry_runs() -> None:
    stock, model = pair(MODELS["block"])
    with pytest.raises(UsageError, match="nothing to rebuild"):
        fitact.rebuild(model)
    done = fitact.revert(model)
    assert {site.name for site in done} == {"0.norm", "1.pre", "1.inner", "2.norm", "2.act"}
    assert [type(one) for one in model.modules()] == [type(one) for one in stock.modules()]
    assert [vars(one).keys() for one in model.modules()] == [vars(one).keys() for one in stock.modules()]
    before = torch.get_rng_state()
    plan = fitact.rebuild(model, dry_run=True, example_inputs=(X,), gradients=True)
    assert plan.dry_run and torch.equal(torch.get_rng_state(), before)
    assert [type(one) for one in model.modules()] == [type(one) for one in stock.modules()]
    assert all(one.grad is None for one in model.parameters())
    assert plan.gradient is not None and plan.gradient.error == 0 and "bit for bit" in str(plan)
    made = fitact.rebuild(model, example_inputs=(X,), gradients=True)
    assert (made.kept_before, made.kept_after) == (plan.kept_before, plan.kept_after)
    assert (made.kept_before, made.kept_after) == (kept(stock, X), kept(model, X))
    assert [site.name for site in made.replaced] == [site.name for site in plan.replaced]
    assert all(site.after == "rebuilt" for site in made.replaced)
    assert model.training and not differences(observed(stock, train, X), observed(model, train, X))


def test_converted_too() -> None:
    """What `convert` has replaced is left alone, and `revert` puts both back."""
    model = MODELS["block"]()
    before = [type(one) for one in model.modules()]
    fitact.convert(model, "fewbit")
    twin = copy.deepcopy(model)
    fitact.rebuild(model)
    assert not differences(observed(twin, train, X), observed(model, train, X))
    fitact.revert(model)
    assert [type(one) for one in model.modules()] == before


def test_errors() -> None:
    for model, match in ((F.gelu, "expected a model"), (nn.Linear(2, 2), "nothing to rebuild")):
        with pytest.raises(UsageError, match=match):
            fitact.rebuild(model)  # type: ignore[arg-type]
    frozen = MLP().requires_grad_(False)
    for one in (nn.Sequential(nn.GELU()), frozen, torch.jit.trace(MLP().eval(), X)):
        with pytest.raises(UsageError):
            fitact.rebuild(one)
    with pytest.raises(UsageError, match="pass example_inputs"):
        fitact.rebuild(MLP(), gradients=True)
    model = MLP()
    with pytest.raises(UsageError):
        fitact.rebuild(model, example_inputs=(torch.randn(3, 7),))
    assert type(model.fc2) is nn.Linear and type(model.act) is nn.GELU


@pytest.mark.parametrize("name", MODELS)
def test_sizes_without_numbers(name: str) -> None:
    """On the meta device, which has no autocast, as much is kept as on a CPU, and gradients have their shapes."""
    _, rebuilt = pair(MODELS[name])
    expected = kept(rebuilt, X)
    assert kept(rebuilt.to("meta"), X.to("meta")) == expected
    rebuilt(X.to("meta")).square().sum().backward()
    assert all(one.grad is not None and one.grad.shape == one.shape for one in rebuilt.parameters())
