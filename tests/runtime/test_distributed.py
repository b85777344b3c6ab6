"""Training and tensors spread over two processes, over gloo; one pair of processes does everything in turn."""

from pathlib import Path

from tests.support.processes import run

IMPORTS = """
from itertools import product
import torch.nn.functional as F

from fitact.generated.dyt_recompute import DytRecompute, dyt_recompute
from fitact.generated.gelu_fewbit3 import gelu_fewbit3
from fitact.generated.silu_inverted1 import silu_inverted1
from fitact.generated.swiglu_recompute import swiglu_recompute
from fitact.generated.xielu_recompute import XieluRecompute, xielu_recompute
"""
# Values and gradients of a tensor in parts are those of the whole.
TENSORS = """
torch.manual_seed(0)
whole, dy = torch.randn(7, 5120), torch.randn(7, 5120)  # whole vectors in each part, as below
for function in (gelu_fewbit3, silu_inverted1):
    leaf = whole.clone().requires_grad_()
    expected = function(leaf)
    (gradient,) = torch.autograd.grad(expected, leaf, dy)
    for placement in (Replicate(), Shard(0), Shard(1)):
        x = distribute_tensor(whole, mesh, [placement]).requires_grad_()
        y = function(x)
        assert isinstance(y, DTensor) and y.placements == (placement,) and y.shape == whole.shape
        assert torch.equal(y.full_tensor(), expected)
        (dx,) = torch.autograd.grad(y, x, distribute_tensor(dy, mesh, [placement]))
        assert dx.placements == (placement,)
        assert torch.equal(dx.full_tensor(), gradient)
    half = DTensor.from_local(whole / 2, mesh, [Partial()], run_check=False)
    assert torch.equal(function(half).full_tensor(), expected)
"""
# So are those of gates; u may have other placements than g, but not be whole where g is in parts.
GATES = """
torch.manual_seed(0)
parts = [torch.randn(6, 5120) for _ in range(3)]  # whole vectors in each part: a CPU rounds the rest otherwise
g, u, dh = parts
placements = (Replicate(), Shard(0), Shard(1))
leaves = [one.clone().requires_grad_() for one in (g, u)]
expected = swiglu_recompute(*leaves)
gradients = torch.autograd.grad(expected, leaves, dh)
for of_g, of_u in [*zip(placements, placements), (Shard(0), Replicate())]:
    given = [distribute_tensor(one, mesh, [of]) for one, of in zip(parts, (of_g, of_u, of_g))]
    leaves = [one.requires_grad_() for one in given[:2]]
    h = swiglu_recompute(*leaves)
    assert h.placements == (of_g,) and h.shape == g.shape and h.stride() == g.stride()
    assert torch.equal(h.full_tensor(), expected)
    for found, of, gradient in zip(torch.autograd.grad(h, leaves, given[2]), (of_g, of_u), gradients):
        assert torch.equal(found.full_tensor(), gradient)
both = distribute_tensor(torch.cat([g, u], 1), mesh, [Shard(0)])
h = swiglu_recompute(*both.requires_grad_().chunk(2, -1))
assert torch.equal(h.full_tensor(), expected) and h.stride() == g.stride()
half = DTensor.from_local(g / 2, mesh, [Partial()], run_check=False)
assert torch.equal(swiglu_recompute(half, distribute_tensor(u, mesh, [Shard(1)])).full_tensor(), expected)
try:
    swiglu_recompute(distribute_tensor(g, mesh, [Shard(0)]), u)
    raise SystemExit("it was not refused")
except TypeError as error:
    assert "both DTensors of one mesh, or none, got a DTensor on " in str(error) and "\\n" not in str(error)
"""
# After three steps parameters and gradients are a single process's, which sees the whole batch; and what is saved
# of the batch is what one process saves, 3 bits an element.
TRAIN = """
x, target = torch.randn(8, 24, generator=torch.Generator().manual_seed(1)), torch.ones(8, 24)


def converted(given):
    torch.manual_seed(0)
    kinds = (nn.GELU, nn.SiLU, nn.Mish)
    model = nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 96), kind(), nn.Linear(96, 24)) for kind in kinds)
    )
    report = fitact.convert(model, **given, example_inputs=(x,))
    assert len(report.replaced) == (3 if "method" in given else 1), report
    return model


def train(model, x, target):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(x), target).backward()
        optimizer.step()


def saved_storages(model, x):
    # dtypes and sizes of the storages of activations and codes that autograd saves
    storages = {}

    def pack(tensor):
        if tensor.dtype == torch.uint8 or tensor.shape[:1] == x.shape[:1]:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = (storage, str(tensor.dtype), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = F.mse_loss(model(x), torch.ones_like(x))
    loss.backward()
    model.zero_grad()
    return sorted(one[1:] for one in storages.values())


def compare(kind, given):
    reference = converted(given)
    half = slice(4 * rank, 4 * rank + 4)
    expected = saved_storages(reference, x[half])
    if "method" in given:
        assert [size for dtype, size in expected if dtype == "torch.uint8"] == 3 * [3 * 1024]
    train(reference, x, target)
    model = converted(given)
    model = DistributedDataParallel(model) if kind == "ddp" else sharded(model, model)
    assert saved_storages(model, x[half]) == expected
    train(model, x[half], target[half])
    for own, reached in zip(model.parameters(), reference.parameters(), strict=True):
        for mine, theirs in ((own, reached), (own.grad, reached.grad)):
            torch.testing.assert_close(full(mine).detach(), theirs.detach(), rtol=1e-4, atol=1e-6)


for kind in ("ddp", "fsdp"):
    for given in ({"method": "fewbit"}, {"error": "exact"}):
        print(kind, given, file=sys.stderr)
        compare(kind, given)
"""
# Learned parameters are parameters like others: split between the processes, and summed over both.
LEARNED = """
def learned():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(24, 24), one) for one in (DytRecompute(24), XieluRecompute(), DytRecompute(24)))
    )


for kind in ("ddp", "fsdp"):
    half = slice(4 * rank, 4 * rank + 4)
    reference, model = learned(), learned()
    train(reference, x, target)
    assert all(bool(p.grad.abs().max() > 0) for p in reference.parameters())
    model = DistributedDataParallel(model) if kind == "ddp" else sharded(model, model)
    train(model, x[half], target[half])
    for own, reached in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(own).detach(), reached.detach(), rtol=1e-4, atol=1e-5)
"""
# Of DTensors, values and gradients are those of the whole, also where channels are split unevenly, or the numbers.
LEARNED_TENSORS = """
torch.manual_seed(0)
whole, dy = torch.randn(4, 7, 6), torch.randn(4, 7, 6)
for function, wide, dim in (
    (dyt_recompute, (0, 1, 1), 1), (dyt_recompute, (1, 0, 1), -1), (xielu_recompute, (0, 0), -1)
):
    numbers = [torch.rand(whole.shape[dim] if one else 1) for one in wide]
    of_dim = (dim,) if function is dyt_recompute else ()
    leaves = [one.clone().requires_grad_() for one in (whole, *numbers)]
    expected = function(*leaves, *of_dim)
    gradients = torch.autograd.grad(expected, leaves, dy)
    for placement, of_numbers in [*product((Replicate(), Shard(0), Shard(1), Shard(2)), (Replicate(), Shard(0)))]:
        given = [distribute_tensor(whole, mesh, [placement])]
        given += [distribute_tensor(one, mesh, [of_numbers]) for one in numbers]
        leaves = [one.requires_grad_() for one in given]
        y = function(*leaves, *of_dim)
        assert y.placements == (placement,) and y.shape == whole.shape and y.stride() == whole.stride()
        torch.testing.assert_close(y.full_tensor(), expected)
        found = torch.autograd.grad(y, leaves, distribute_tensor(dy, mesh, [placement]))
        for one, leaf, gradient in zip(found, leaves, gradients):
            assert one.placements == leaf.placements, (one.placements, leaf.placements)
            torch.testing.assert_close(one.full_tensor(), gradient, rtol=1e-5, atol=1e-5)
    half = DTensor.from_local(whole / 2, mesh, [Partial()], run_check=False)
    y = function(half, *(distribute_tensor(one, mesh, [Replicate()]) for one in numbers), *of_dim)
    torch.testing.assert_close(y.full_tensor(), expected)
    for one, others in ((half, numbers), (whole, given[1:])):
        try:
            function(one, *others, *of_dim)
            raise SystemExit("it was not refused")
        except TypeError as error:
            text = "expected x and the learned parameters to be all DTensors of one mesh, or none, got a "
            assert text in str(error) and "\\n" not in str(error)
"""


def test_in_two_processes(tmp_path: Path) -> None:
    run(IMPORTS + TENSORS + GATES + TRAIN + LEARNED + LEARNED_TENSORS, tmp_path)
