"""Codes under the compiler with what training adds: checkpoints, scaled losses, converted models, processes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fitact
from benchmarks.compiled import run_graphs
from tests.compile.test_compile import BYTES, TOKENS, Gelu, made, off, plain, step
from tests.support.around import policy
from tests.support.blocks import built
from tests.support.compilers import needs_compiler
from tests.support.processes import run

pytestmark = [needs_compiler, pytest.mark.full, pytest.mark.long]
AGAIN: dict[str, dict[str, Any]] = {
    "everything": {},
    "all but products": {"context_fn": partial(create_selective_checkpoint_contexts, policy)},
}


@pytest.mark.parametrize("again", AGAIN)
def test_checkpoints(again: str) -> None:
    """What a checkpoint saves becomes codes, and what it computes again is not saved, dropout's masks included."""

    def run(x: Tensor, block: nn.Module) -> Tensor:
        return F.dropout(block(x), 0.1)

    def call(m: Any, x: Tensor) -> Tensor:
        for block in m.blocks:
            x = checkpoint(run, x, block, use_reentrant=False, **AGAIN[again])
        return x

    model = made(lambda: built(call, blocks=nn.ModuleList((Gelu(), Gelu()))))
    saved, expected = plain(0.9, model, (TOKENS, 256))
    ways = [("rounding", 0.012, int(saved / 2 * BYTES)), ("exact", 0.0, saved)]
    for error, limit, size in ways[: 1 if again == "everything" else 2]:
        torch._dynamo.reset()
        less, actual = step(model, fitact.compile(model, error=error, fullgraph=True), (TOKENS, 256))
        assert off(actual, expected) <= limit
        assert less == size


def half() -> nn.Module:
    """Return layers that compute in float16, with activations of 10⁻⁵ or so before the first norm."""
    first, last = nn.Linear(64, 256), nn.Linear(256, 64)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.mul_(1e-4)
    return built(lambda m, x: m.last(m.block(torch.tanh(m.first(x)) * 1e4)), first=first, block=Gelu(), last=last)


def test_scaled_losses() -> None:
    """In float16 the same steps overflow and are skipped, and gradients too small for float16 unscaled survive."""

    def trained(options: dict[str, Any]) -> list[list[Tensor]]:
        torch._dynamo.reset()
        model = made(half, dtype=torch.float32)
        compiled = run_graphs(model, options, 0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**36, growth_interval=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
        gradients = []
        for _ in range(24):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                y = compiled(x)
            scaler.scale(1e-6 * y.float().square().mean()).backward()
            scaler.unscale_(optimizer)
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
            scaler.step(optimizer)
            scaler.update()
        return gradients

    expected, actual = trained({}), trained(fitact.compile_options())
    finite, same = ([all(x.isfinite().all() for x in step) for step in steps] for steps in (expected, actual))
    assert finite == same and {*finite} == {False, True}
    assert all(off(b, a) < 0.012 for a, b, known in zip(expected, actual, finite, strict=True) if known)


def test_accelerate() -> None:
    model = made(Gelu, dtype=torch.float32)
    compiled = fitact.compile(model, fullgraph=True)
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True, mixed_precision="bf16")
    prepared, optimizer = accelerator.prepare(compiled, torch.optim.SGD(model.parameters()))
    accelerator.backward(prepared(torch.randn(TOKENS, 256)).square().mean())
    optimizer.step()
    (records,) = fitact.compile_report(compiled).graphs
    assert [record.bits for record in records if record.bits] == [8]


# What is saved of half a batch, and the mean of both halves' gradients, are those of a single process.
TRAIN = """
from tests.compile.test_compile import Gelu, off

halves = torch.randn(2, 320, 64, generator=torch.Generator().manual_seed(1))


def made(blocks):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Gelu(64, 256) for _ in range(blocks)))


def blocks(model, **options):
    for block in model:
        block.compile(fullgraph=True, options=fitact.compile_options(**options))
    return model


def step(model, run, x):
    # sizes of what is saved of a batch, by rows or by blocks of them, and the gradients
    sizes = {}

    def pack(tensor):
        if tensor.numel() and tensor.shape[0] % len(x) == 0:
            sizes[tensor.untyped_storage()._cdata] = (tensor.untyped_storage(), str(tensor.dtype))
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = run(x)
    y.square().mean().backward()
    gradients = [full(one.grad).clone() for one in model.parameters()]
    return sorted((dtype, storage.nbytes()) for storage, dtype in sizes.values()), gradients


def whole(model):
    return fitact.compile(model, fullgraph=True)


for name, compiled, count in (("ddp", whole, 1), ("fsdp", blocks, 2)):
    reference = made(count)
    run = compiled(reference)
    found = [step(reference, run, half) for half in halves]
    expected = found[rank][0]
    gradients = [(one + other) / 2 for one, other in zip(found[0][1], found[1][1], strict=True)]
    assert expected.count(("torch.int64", 320 * 256)) == count, expected  # codes of 8 bits of each block
    model = made(count)
    run = compiled(model)
    run = DistributedDataParallel(run) if name == "ddp" else sharded(model, model)
    saved, found = step(model, run, halves[rank])
    assert saved == expected, (name, saved, expected)
    assert off(found, gradients) < 1e-5, (name, off(found, gradients))
    torch._dynamo.reset()
"""


def test_in_two_processes(tmp_path: Path) -> None:
    run(TRAIN, tmp_path, warnings="ignore", seconds=600)
