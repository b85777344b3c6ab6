"""Calls in a module's own `forward`: checkpoints, changes in place, other modes, failures, and the whole model."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import functional_call, grad, vmap
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import fitact
from fitact.errors import UsageError
from fitact.runtime.memory.peak import peak_memory
from fitact.runtime.rebuild.calls import DEEPEST, here
from fitact.runtime.torch_internals import innermost_mode

from .test_calls import MODELS, WIDE, Experts, Feed, agree, pair
from .test_rebuild import HALF, RMSNorm, X, differences, kept, loss_of, observed, train
from .test_rebuild_care import HELD, lifetimes


class Inside(Feed):
    """A checkpoint within a module's own forward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(p=0.3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        a = F.gelu(self.fc1(self.norm(x)))

        def rest(a: Tensor) -> Tensor:
            y: Tensor = self.fc2(F.dropout(F.gelu(a) * a, self.p))
            return F.linear(F.silu(y) * y, self.fc1.weight)

        return F.gelu(a) + checkpoint(rest, a, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside(reentrant: bool) -> None:
    agree(lambda: nn.Sequential(Inside(reentrant), nn.Linear(WIDE, 16), Inside(reentrant)))


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("name", ["gelu, dropout", "attention", "attention after LayerNorm", "adapter"])
def test_nothing_lives_longer(name: str, held: str) -> None:
    stock, stock_later, rebuilt, later = lifetimes(pair(MODELS[name]), held)
    shared = {"v"} if name == "attention after LayerNorm" else set()  # stock keeps a copy for each head instead
    assert rebuilt <= stock | shared and later <= stock_later


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_peak(name: str, dtype: torch.dtype) -> None:
    wide = torch.randn(16, 32, 16).to(dtype)
    stock, rebuilt = (
        peak_memory(lambda one=one: one(wide).sum().backward(), one)["total"]
        for one in pair(lambda: nn.Sequential(*(MODELS[name]() for _ in range(4))), dtype)
    )
    assert rebuilt <= stock


def tensors() -> int:
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


@pytest.mark.parametrize("name", MODELS)
def test_no_garbage(name: str) -> None:
    """Nothing waits for the collector of garbage, forward or backward."""
    found = []
    for model in pair(MODELS[name]):
        train(model, X)
        gc.collect()
        gc.disable()
        before = tensors()
        y = model(X)
        del y
        forward = tensors()
        train(model, X)
        found.append((forward - before, tensors() - before))
        gc.enable()
    assert found == [(0, 0), (0, 0)]


class Scaled(nn.Module):
    """A residual block, whose output is rebuilt from its input and so from all blocks before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(16, 16), nn.Parameter(torch.full((16,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x) * self.scale


@pytest.mark.parametrize("blocks", [3, 60, pytest.param(250, marks=pytest.mark.full)])
def test_chains(blocks: int) -> None:
    """A chain is rebuilt as a whole, unless it is too long for Python's stack."""

    def make() -> nn.Module:
        chain = (Scaled() for _ in range(blocks))
        return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), *chain, nn.Linear(16, 16))

    agree(make)
    stock, rebuilt = pair(make)
    wide = torch.randn(32, 16, 16)
    peaks = [peak_memory(lambda one=one: one(wide).sum().backward(), one)["total"] for one in (stock, rebuilt)]
    assert peaks[1] <= peaks[0]
    share = kept(rebuilt, wide) / kept(stock, wide)
    assert share < (0.6 if blocks < DEEPEST else 0.9)


class Changed(nn.Module):
    """Something is changed in place, before a reader or after it."""

    def __init__(self, what: str, after: bool) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, WIDE), nn.Linear(WIDE, 16)
        self.what, self.after, self.changes = what, after, False

    def forward(self, x: Tensor) -> Tensor:
        a = self.fc1(x)
        g, u = F.gelu(a), a.tanh()
        y = g * u
        tensors = {"a": a, "g": g, "u": u, "y": y, "weight": self.fc2.weight}
        z: Tensor = F.linear(y, self.fc2.weight) if self.after else torch.zeros(())
        if self.changes:
            with torch.no_grad():
                tensors[self.what].mul_(0.5)
        return z if self.after else F.linear(y, self.fc2.weight)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("what", ["a", "g", "u", "y", "weight"])
def test_changes_in_place(what: str, after: bool) -> None:
    """The gradient is right, or there is none; where stock raises, it may be right."""
    for ask in (lambda model: [*model.parameters()], lambda model: [model.fc2.weight]):

        def step(model: Any, x: Tensor, ask: Any = ask) -> Any:
            model.changes = True
            return torch.autograd.grad(loss_of(model(x)), ask(model))

        stock, rebuilt = pair(partial(Changed, what, after))
        expected, found = (observed(one, step, X) for one in (stock, rebuilt))
        assert isinstance(expected, str) or isinstance(found, str) or not differences(expected, found)


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        self.names += [name] if name in ("gelu", "mul", "scaled_dot_product_attention") else []
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inside", [False, True])
def test_other_modes(inside: bool) -> None:
    """Modes of one's own, around the model or in its forward, see what they saw."""

    class Moded(Feed):
        def forward(self, x: Tensor) -> Tensor:
            mode = self.mode = Seen()
            if not inside:
                return super().forward(x)
            with mode:
                return super().forward(x)

    def step(model: Any, x: Tensor) -> Any:
        with Seen() as seen:
            train(model, x)
        return seen.names, model.mode.names

    agree(partial(Moded, lambda x: F.gelu(x) * x), step)


@pytest.mark.parametrize("at", ["forward", "hook", "backward"])
def test_exceptions(at: str) -> None:
    """What fails halfway leaves nothing behind, and the next pass is right."""

    class Failing(Feed):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            if self.fails:
                raise KeyError
            return y

    def fail(*_: Any) -> None:
        raise KeyError

    def step(model: Any, x: Tensor) -> Tensor:
        model.fails = at == "forward"
        hook = model.fc1.register_forward_hook(
            (lambda *_: fail()) if at == "hook" else lambda _, __, y: y.register_hook(fail) and None
        )
        with pytest.raises(KeyError):
            train(model, x)
        assert not here.on and not here.pushed and innermost_mode() is None
        hook.remove()
        model.fails = False
        model.zero_grad()
        return train(model, x)

    agree(Failing, step)


def test_threads() -> None:
    def step(model: Any, x: Tensor) -> Any:
        found: dict[int, Tensor] = {}

        def run(i: int) -> None:
            y = model(x + i)
            found[i] = torch.autograd.grad(loss_of(y), model.fc1.weight)[0]

        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        return [found[i] for i in range(4)]

    agree(Feed, step)


# --------------------------------------------------------------------------------------------- the whole model


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
@pytest.mark.parametrize("name", ["gelu", "attention"])
def test_compiled(name: str) -> None:
    def whole(model: Any, x: Tensor) -> Any:
        torch._dynamo.reset()
        return train(torch.compile(model, backend="aot_eager", fullgraph=True), x)

    def alone(model: Any, x: Tensor) -> Any:
        """Some layers are compiled, what is around them is not."""
        torch._dynamo.reset()
        for one in model.modules():
            if isinstance(one, (nn.LayerNorm, nn.Linear, RMSNorm)):
                one.compile(backend="aot_eager")
        return train(model, x)

    agree(MODELS[name], whole)
    agree(MODELS[name], alone)


def test_functional() -> None:
    stock, model = pair(Feed)
    given = {key: 1.5 * one.detach() for key, one in model.named_parameters()}

    def value(one: nn.Module, given: dict[str, Tensor], x: Tensor) -> Tensor:
        return loss_of(functional_call(one, given, (x,)))

    for transform in (grad, lambda f: vmap(grad(f), (None, 0))):
        expected, found = (transform(partial(value, one))(given, X) for one in (stock, model))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with disable_saved_tensors_hooks("none here"):
        y = model(X)
    assert torch.equal(y, stock(X))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(X), y)
    with pytest.raises(RuntimeError, match="derivative"):
        torch.autograd.grad(loss_of(model(X)), [*model.parameters()], create_graph=True)


def test_copies_and_reverting() -> None:
    stock, model = pair(MODELS["block"])
    buffer = io.BytesIO()
    torch.save(model[0], buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    wide = torch.randn(16, 32, 16)
    for one in (copy.deepcopy(model[0]), loaded):
        assert kept(one, wide) == kept(model[0], wide) < kept(stock[0], wide)
        assert not differences(*(observed(twin, train, X) for twin in (copy.deepcopy(stock[0]), one)))
    assert [*model.state_dict()] == [*stock.state_dict()] and repr(model) == repr(stock)
    assert inspect.signature(model[0].forward) == inspect.signature(stock[0].forward)
    done = fitact.revert(model)
    assert {site.name for site in done if site.kind == "calls"} >= {"0", "1", "2"}
    assert [type(one) for one in model.modules()] == [type(one) for one in stock.modules()]
    assert [vars(one).keys() for one in model.modules()] == [vars(one).keys() for one in stock.modules()]


def test_what_is_refused() -> None:
    class Asks(Feed):
        """It asks which operation made its output."""

        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(F.gelu(self.fc1(x)), self.fc2.weight)
            return y * 2 if type(y.grad_fn).__name__ != "UnsafeViewBackward0" else y

    class Both(nn.Sequential):
        """Two of which one is refused."""

    torch.manual_seed(0)
    model = Both(Asks(), Feed())
    stock = copy.deepcopy(model)
    before = torch.get_rng_state()
    found = {site.name: site for site in fitact.rebuild(model, example_inputs=(X,), gradients=True)}
    assert torch.equal(torch.get_rng_state(), before)
    assert found["0"].after is None and "bit for bit" in found["0"].reason and found["1"].after == "rebuilt"
    assert type(model[0]) is Asks and type(model[1]) is not Feed
    assert not differences(*(observed(one, train, X) for one in (stock, model)))
    own = Feed()
    own.forward = partial(Feed.forward, own)  # type: ignore[method-assign]
    (refused,) = (site for site in fitact.rebuild(own, example_inputs=(X,)) if site.kind == "calls")
    assert refused.after is None and "forward" in refused.reason
    with torch.device("meta"):
        fake = Feed()
    (refused,) = (site for site in fitact.rebuild(fake, example_inputs=(X.to("meta"),)) if site.kind == "calls")
    assert refused.after is None and "no values" in refused.reason


def test_without_inputs() -> None:
    """Calls are found by running alone; where nothing but calls could be rebuilt, that is said."""
    model = Feed()
    assert not [site for site in fitact.rebuild(model) if site.kind == "calls"]
    experts = MODELS["experts"]()
    with pytest.raises(UsageError, match="example_inputs"):
        fitact.rebuild(experts)
    assert fitact.rebuild(experts, example_inputs=(X,), dry_run=True).kept_after
    assert type(experts) is Experts
