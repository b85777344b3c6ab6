"""Offloading by a simulated link: gradients, the order of copies and waits, bounds, and what is left behind."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fitact
from fitact import saving
from fitact.runtime.saving import offload
from fitact.runtime.saving.offload import DEPTH, Offload
from tests.support.around import AROUND
from tests.support.blocks import Layer
from tests.support.links import SimulatedLink
from tests.support.rows import full
from tests.support.saving import HALF, differences, gradients, loss_of, observed, stepped

CPU = torch.device("cpu")
FAST, SLOW = 1e9, 1e3  # bytes a second
WIDE = torch.randn(8, 64, 64, generator=torch.Generator().manual_seed(3))
SIZE = WIDE.nbytes
BYTES = 3 * SIZE


def stack(link: SimulatedLink | None = None, depth: int = 3) -> nn.Sequential:
    """Return layers whose modules take a second each."""
    model = nn.Sequential(*(Layer(p=0.1) for _ in range(depth)))
    for module in model.modules() if link else ():
        if not [*module.children()]:
            module.register_forward_hook(lambda *_: link.compute(1))
            module.register_full_backward_pre_hook(lambda *_: link.compute(1))
    return model


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], SimulatedLink]]:
    """Makes the CPU's link; at the end, nothing may be left and nothing may have gone wrong."""
    made: list[SimulatedLink] = []

    def link(bandwidth: float) -> SimulatedLink:
        made.append(SimulatedLink(bandwidth))
        monkeypatch.setitem(offload.LINKS, CPU, made[-1])
        return made[-1]

    monkeypatch.setattr(offload, "LEAST", 2**12)
    monkeypatch.setattr(offload, "_made", offload._Made())
    gc.collect()
    gc.disable()
    yield link
    for each in offload._made.offloads.values():
        assert each.bytes == 0 and not each._known and not each._numbered
    gc.enable()
    for each in made:
        each.compute(1e9)
        assert not each.violations and not each.alive("to host") and not each.alive("to device")


def step(model: nn.Module, context: AbstractContextManager[Any], x: Tensor = WIDE, dtype: Any = None) -> Any:
    return stepped(model, x, context=context, autocast=dtype)


GRADIENTS = list(product(("exact", "rounding"), ("all", True, 0.5, BYTES), (FAST, SLOW), (None, HALF)))


@pytest.mark.parametrize(("error", "amount", "bandwidth", "dtype"), full(GRADIENTS, GRADIENTS[::5]))
def test_gradients(links: Any, error: str, amount: Any, bandwidth: float, dtype: Any) -> None:
    link = links(bandwidth)
    model = stack(link)
    expected = step(model, saving(error), dtype=dtype)
    assert not link.log
    assert not differences(expected, step(model, saving(error, offload=amount), dtype=dtype))
    assert len({name for name, _ in link.log}) == 2


def test_order(links: Any) -> None:
    """All copies to the host come first; of the others hardly one is waited for, and few are back at a time."""
    link = links(FAST)
    step(stack(link), saving(offload="all"))
    names, sizes = zip(*link.log, strict=True)
    went, came = names.count("to host"), names.count("to device")
    assert [*names] == ["to host"] * went + ["to device"] * came
    assert 0 <= went - came <= DEPTH  # what was on its way at the end stayed
    assert sorted(sizes[went:]) == sorted(sizes[:came])
    assert link.stalls < 3.01 * max(sizes) / FAST  # one a layer is late, which dropout reads at once
    assert link.back <= DEPTH + 3  # what is read and DEPTH memories more; attention reads two


def test_a_slow_link(links: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed waits, and no more than DEPTH copies run, with the newest memory beside them."""
    link, there = links(SLOW), list[int]()
    model, send = stack(link), Offload._send

    def counted(self: Offload) -> None:
        send(self)
        there.append(sum(each.bytes is not None for each in self._numbered.values()))

    monkeypatch.setattr(Offload, "_send", counted)
    step(model, saving(offload="all"))
    assert max(there) == DEPTH + 1
    assert link.stalls > 0


def test_copies_end_with_the_step(links: Any) -> None:
    """As a CUDA graph demands; also those of memory that stays, since backward needs it at once."""
    link = links(SLOW)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(DEPTH + 1)))
    with saving(offload="all"):
        y = model(WIDE)
    assert [name for name, _ in link.log] == ["to host"] * DEPTH and link.running
    y.sum().backward()
    assert len(link.log) == DEPTH and not link.running


def test_views_go_once(links: Any) -> None:
    link, x, w = links(FAST), WIDE.clone().requires_grad_(), torch.randn(192, 64, requires_grad=True)
    with saving(offload="all"):
        q, k, v = F.linear(x, w).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).sin().mul(2).cos()
    y.sum().backward()
    sizes = [size for name, size in link.log if name == "to host"]
    assert sizes.count(3 * SIZE) == 1 and max(sizes) == 3 * SIZE


@pytest.mark.parametrize("share", [0.25, 0.37, 0.5])
def test_share(links: Any, share: float) -> None:
    """It is one of each context: so all steps, and all modules that have contexts of their own, send the same."""
    sent = []
    for amount in ("all", share, share, share):
        link = links(FAST)
        step(stack(link, depth=6), saving(offload=amount))
        sent.append([size for name, size in link.log if name == "to host"])
    whole, *parts = sent
    assert share - 0.1 < sum(parts[0]) / sum(whole) <= share + 0.02
    assert parts == parts[:1] * 3


def test_fifty_steps(links: Any) -> None:
    """Nothing grows, and no more lies on the host than was said."""
    link = links(FAST)
    model, made, lengths = stack(link, depth=2), offload.offload_hooks(BYTES).pack.__self__, set[int]()
    first = step(model, saving(offload=BYTES))
    for _ in range(49):
        link.log.clear()
        assert not differences(first, step(model, saving(offload=BYTES)))
        assert made.bytes == 0 and not made._known and not made._numbered and len(made._leaving) <= DEPTH + 1
        lengths.add(len(link.log))
    assert 0 < link.most <= BYTES and len(lengths) == 1


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("bandwidth", [FAST, SLOW])
def test_an_exception_leaves_nothing_behind(links: Any, where: str, bandwidth: float) -> None:
    model = stack(links(bandwidth))
    layer = model[1]
    register = layer.register_forward_hook if where == "forward" else layer.register_full_backward_hook
    with register(lambda *_: 1 / 0):
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                step(model, saving(offload="all"))
    assert not differences(step(model, nullcontext()), step(model, saving(offload="all")))


@pytest.mark.parametrize("around", ["accumulated", "retained", "partial", "threaded", "checkpoint"])
def test_what_users_do(links: Any, around: str) -> None:
    """A converted model's forward offloads, but what a checkpoint around it drops; gradients are PyTorch's."""
    link, model = links(FAST), stack()
    expected = observed(model, AROUND[around], WIDE)
    fitact.convert(model, offload="all")
    model.zero_grad()
    assert not differences(expected, observed(model, AROUND[around], WIDE))
    assert bool(link.log) == (around != "checkpoint")


def test_a_part_of_a_graph_and_an_older_graph(links: Any) -> None:
    """What came ahead for a partial backward is gone after it; the older graph is read first."""
    link, model, results = links(FAST), stack(), []
    for context in (nullcontext(), saving(offload="all")):
        model.zero_grad()
        torch.manual_seed(1)
        losses = []
        for factor in (1, 2):
            with context:
                losses.append(loss_of(model(WIDE * factor)))
        (part,) = torch.autograd.grad(losses[1], model[2].down.weight, retain_graph=True)
        assert not link.alive("to device")
        while losses:
            losses.pop(0).backward()
        results.append((part, gradients(model)))
    assert not differences(*results)


@pytest.mark.parametrize("bandwidth", [FAST, SLOW])
@pytest.mark.parametrize("later", [0, 1, 3, 6])
def test_a_change_that_pytorch_allows(links: Any, bandwidth: float, later: int) -> None:
    """Scores in half precision are stored in place of their softmax in float32, then changed, and saved again."""
    link, results = links(bandwidth), []
    for context in (nullcontext(), saving(offload="all")):
        x = WIDE.to(HALF).requires_grad_()
        with context:
            scores = x * 3
            y = F.softmax(scores, -1, dtype=torch.float32).square()
            for _ in range(later):
                y = layer(y).exp().sin()
            scores.add_(1)
            link.compute(1e-5)
            z = scores.square().float()
        (y.square() + z).sum().backward()
        results.append(x.grad)
    assert not differences(*results)


def layer(x: Tensor) -> Tensor:
    return F.linear(x, torch.ones(64, 64, requires_grad=True))


@pytest.mark.parametrize(("error", "later"), [*product(["exact"], [0, 1, 3, 6, None]), ("rounding", None)])
def test_a_change_that_pytorch_forbids(links: Any, error: str, later: int | None) -> None:
    """Of what is stored, and of what is recomputed."""
    links(SLOW if later else FAST)
    with saving(error, offload="all"):
        y = changed = layer(WIDE.clone().requires_grad_())
        if later is None:
            changed = F.gelu(y)
            y = layer(changed).exp()
        for _ in range(1 + (later or 0)):
            y = layer(y)
    changed.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    del changed, y


def test_hooks(links: Any) -> None:
    link, model, results = links(FAST), stack(), []
    pairs = fitact.hooks(None, offload="all"), fitact.hooks(8), fitact.hooks(8, offload="all")
    for context in (nullcontext(), *(saved_tensors_hooks(*pair) for pair in pairs)):
        results.append((step(model, context), sum(size for _, size in link.log)))
        link.log.clear()
    (exact, nothing), (same, whole), (coded, none), (sent, codes) = results
    assert not differences(exact, same) and not differences(coded, sent)
    assert nothing == none == 0 < codes < 0.5 * whole  # the factors of dropout are no codes


def each(check: Callable[..., Tensor], **given: Any) -> Callable[[Any, Tensor], Tensor]:
    """Return a run of a model with a checkpoint of each layer."""
    return lambda model, x: reduce(lambda x, layer: check(layer, x, **given), model, x)


EACH = each(checkpoint, use_reentrant=False)


@pytest.mark.parametrize("error", ["exact", "rounding"])
def test_checkpoints(links: Any, error: str) -> None:
    """Inputs of blocks go, but for the last ones; each comes back while the block after it runs again."""
    link = links(FAST)
    model = stack(link, depth=8)
    expected = stepped(model, WIDE, EACH if error == "exact" else each(fitact.checkpoint, error=error))
    assert not link.log
    assert not differences(expected, stepped(model, WIDE, each(fitact.checkpoint, error=error, offload="all")))
    assert [name for name, _ in link.log] == ["to host"] * 7 + ["to device"] * (7 - DEPTH)
    assert {size for _, size in link.log} == {SIZE if error == "exact" else WIDE.numel()}
    assert link.stalls == 0


def test_pytorchs_checkpoints_inside(links: Any) -> None:
    link, model = links(FAST), stack(depth=6)
    assert not differences(stepped(model, WIDE, EACH), stepped(model, WIDE, EACH, saving(offload="all")))
    assert [name for name, _ in link.log] == ["to host"] * 5 + ["to device"] * 3


def test_leaves_and_small_tensors_stay(links: Any) -> None:
    link = links(FAST)
    x, w = WIDE.clone().requires_grad_(), torch.randn(64, 64, requires_grad=True)
    with saved_tensors_hooks(*fitact.hooks(None, offload="all")):
        y = (x * w).square().sum((0, 1)).exp() * F.linear(x[0, 0], nn.Parameter(w.detach())).exp()
    y.sum().backward()
    assert not link.log  # the product was the newest, the others are leaves or small
    del y


def test_without_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, and gradients as without offloading; below a MiB nothing would move, so nothing is said."""
    monkeypatch.setattr(offload, "_made", offload._Made())
    model = stack()
    assert not differences(step(model, saving()), step(model, saving(offload="all")))
    wide = torch.cat([WIDE] * 8)
    with pytest.warns(UserWarning, match="offload moves nothing: tensors of the device cpu stay where they are"):
        step(model, saving(offload="all"), wide)
    step(model, saving(offload="all"), wide)  # warnings are errors
