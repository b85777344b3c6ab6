"""What a block saved is freed as soon as its backward pass is done, without the garbage collector."""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import fitact
from fitact.runtime.saving import storage
from fitact.runtime.saving.recompute import Recompute
from fitact.runtime.torch_internals import mark_of
from tests.support.blocks import built
from tests.support.peak import peak_memory
from tests.support.saving import agree, off, peaks


def block() -> nn.Module:
    def call(m: Any, x: Tensor) -> Tensor:
        normed = m.norm(x)
        y = F.silu(m.gate(normed)) * m.up(normed)
        return x + m.down(y) * torch.sigmoid(m.more(y))

    sizes = {"gate": (64, 128), "up": (64, 128), "down": (128, 64), "more": (128, 64)}
    return built(call, norm=nn.LayerNorm(64), **{name: nn.Linear(*size) for name, size in sizes.items()})


CALLS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda block, x: block(x),
    "checkpointed": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
}


def heads() -> nn.Module:
    """Return a block with heads that read what it recomputes: before the block's own layer, and after it."""

    def call(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        normed = m.norm(x)
        y = F.gelu(m.up(normed))
        early = F.gelu(m.early(y))
        return x + m.down(y), early, F.gelu(m.late(normed))

    sizes = {"up": (64, 128), "down": (128, 64), "early": (128, 8), "late": (64, 8)}
    return built(call, norm=nn.LayerNorm(64), **{name: nn.Linear(*size) for name, size in sizes.items()})


def of_heads(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    """Return the sum of what the last block returns, and the outputs of all heads."""
    outputs = []
    for block in model:
        x, *others = block(x)
        outputs += others
    return [x.sum(), *outputs]


def of_input(model: nn.Sequential, x: Tensor) -> None:
    first = x * 2
    loss, *_heads = of_heads(model, first)
    torch.autograd.grad(loss, first)


PARTS: dict[str, Callable[[nn.Sequential, Tensor], object]] = {
    "heads that no loss reads": lambda model, x: (lambda loss, *_: loss.backward())(*of_heads(model, x)),
    "heads that are gone": lambda model, x: of_heads(model, x)[0].backward(),
    "the gradient of the input": of_input,
    "the gradient of a bias": lambda model, x: of_heads(model, x)[0].backward(inputs=[model[0].up.bias]),
    "the gradient of a head": lambda model, x: of_heads(model, x)[-2].sum().backward(),
}


@pytest.fixture
def by_counts_alone() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def still_there(model: nn.Module, x: Tensor) -> int:
    """Return how many outputs of linear layers are there when backward comes to the first; later none may be."""
    model(x).sum().backward()  # gradients are there from now on
    outputs, actual = list[StorageWeakRef](), list[bool]()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, __, y: outputs.append(StorageWeakRef(y.untyped_storage())))
    first = model.get_parameter("blocks.0.norm.weight")
    first.register_hook(lambda _: actual.extend(not each.expired() for each in outputs))
    model(x).sum().backward()
    assert all(each.expired() for each in outputs)
    return sum(actual)


@pytest.mark.usefixtures("by_counts_alone")
@pytest.mark.parametrize("error", ["exact", "rounding"])
@pytest.mark.parametrize("include", [None, "blocks.*"])
@pytest.mark.parametrize("call", CALLS)
def test_as_soon_as_by_pytorch(call: str, include: str | None, error: str) -> None:
    x = torch.randn(96, 64, requires_grad=True)

    def forward(m: Any, x: Tensor) -> Tensor:
        for each in m.blocks:
            x = CALLS[call](each, x)
        return x

    baseline = built(forward, blocks=nn.ModuleList(block() for _ in range(3)))
    model = copy.deepcopy(baseline)
    fitact.convert(model, include=include, error=error)
    assert still_there(model, x) <= still_there(baseline, x)


@pytest.mark.parametrize("error", ["exact", "rounding"])
@pytest.mark.parametrize("part", PARTS)
def test_peak_where_backward_runs_in_a_part(part: str, error: str) -> None:
    """What only nodes read whose backward does not run is not held for these."""
    x = torch.randn(512, 64, requires_grad=True)
    models = [nn.Sequential(*(heads() for _ in range(6))) for _ in range(2)]
    fitact.convert(models[1], error=error)
    results = []
    for model in models:
        results.append(peak_memory(partial(PARTS[part], model, x), model)["total"])
        x.grad = None
    assert results[1] <= results[0]


@pytest.mark.usefixtures("by_counts_alone")
def test_what_no_node_reads_is_not_held_below() -> None:
    trunk = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    x = torch.randn(512, 64, requires_grad=True)

    def check(_: Tensor) -> None:
        there = (ref() for ref in storage.held.tensors.values())
        assert not any(made is not None and made._made is not None for made in there)

    with fitact.saving():
        gate = F.silu(trunk(x))
        loss, unused = gate.square().sum(), gate.square().sum()
    trunk[0].weight.register_hook(check)
    loss.backward()
    assert unused.requires_grad


def test_what_is_cast_at_the_end_is_not_held_after_the_context() -> None:
    """PyTorch holds the wide copy alone, which the context could have computed from the narrow one."""
    narrow = list[StorageWeakRef]()
    with fitact.saving():
        logits = nn.Linear(32, 64, dtype=torch.bfloat16)(torch.randn(32, 32, dtype=torch.bfloat16))
        narrow.append(StorageWeakRef(logits.untyped_storage()))
        logits = logits.float()
        assert not narrow[0].expired()
    assert narrow[0].expired()


def test_a_state_that_goes_from_step_to_step_holds_few_before() -> None:
    layer, state = nn.Linear(8, 64), torch.zeros(64, 64)
    for _ in range(400):
        with fitact.saving():
            state = state.detach() + layer(torch.randn(64, 8))
    assert sum(type(each) is Recompute for each in gc.get_objects()) < 300


def test_few_of_many_parts_are_looked_through() -> None:
    h = torch.randn(1000, 64, requires_grad=True)
    with fitact.saving():
        h = h * 1
        outputs = [part.sin() for part in h.unbind()]
    assert len(mark_of(h.untyped_storage()).known) < 50 and len(outputs) == 1000


def test_peak_of_a_scan() -> None:
    """Each state is recomputed from the terms of all steps, which PyTorch does not save."""

    def scan(m: Any, x: Tensor) -> Tensor:
        step, inputs = F.softplus(m.layer(x)).chunk(2, -1)
        decay = torch.exp(-step[..., None] * torch.arange(1.0, 17.0))
        terms = step[..., None] * torch.tanh(inputs)[..., :16][:, :, None] * inputs[..., None]
        state, outputs = torch.zeros(4, 32, 16), []
        for i in range(x.shape[1]):
            state = decay[:, i] * state + terms[:, i]
            outputs.append(state.square().sum())
        return torch.stack(outputs)

    x = torch.randn(4, 64, 32)
    before, after = peaks(agree(lambda: built(scan, layer=nn.Linear(32, 64)), x=x), x)
    assert after <= before


class Twice(torch.autograd.Function):
    """The square. Its backward asks twice for what was saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        size = ctx.saved_tensors[0].numel()
        return grads[0] * 2 * ctx.saved_tensors[0].view(-1)[:size].view_as(grads[0])


def of_a_checkpoint(m: Any, x: Tensor) -> list[Tensor]:
    def part(y: Tensor) -> tuple[Tensor, Tensor]:
        z = F.silu(y)
        return m.a(z), m.b(z * 2)

    y = m.up(x)
    early = F.gelu(y).sum()
    return [*(part.square().sum() for part in checkpoint(part, y, use_reentrant=False)), early]


READ: dict[str, Callable[[Any, Tensor], list[Tensor]]] = {
    "in two passes": lambda m, x: (lambda y: [head(y).square().sum() for head in (m.a, m.b)])(F.gelu(m.up(x))),
    "twice in a function": lambda m, x: [(lambda y: m.a(F.gelu(y) + Twice.apply(y)).square().sum())(m.up(x))],
    "by a checkpoint in three passes": of_a_checkpoint,
}


@pytest.mark.parametrize("error", ["rounding", "coarse"])
@pytest.mark.parametrize("name", READ)
def test_codes_stay_for_all_who_read_them(name: str, error: str) -> None:
    """Each loss has a backward pass of its own, which frees the graph, to the layers that only it has."""
    sizes = {"up": (64, 256), "a": (256, 64), "b": (256, 64)}
    model = built(lambda m, x: READ[name](m, x), **{layer: nn.Linear(*size) for layer, size in sizes.items()})
    x, gradients = torch.randn(256, 64), []
    of = [[*model.a.parameters()], [*model.b.parameters()], [*model.up.parameters()]]
    of = of if name != "twice in a function" else [[*model.parameters()][:4]]
    for context in (nullcontext(), fitact.saving(error)):
        with context:
            losses = model(x)
        grads = (torch.autograd.grad(*both) for both in zip(losses, of, strict=False))
        gradients.append([grad for some in grads for grad in some])
    assert 0 < off(*reversed(gradients)) < 0.1
