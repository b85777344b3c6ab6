"""What changes, or counts its changes otherwise, between a call and its backward: gradients are the baseline's."""

import gc
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from fitact import hooks, saving
from fitact.runtime.measure import count_saved
from fitact.runtime.saving import baseline

Context = Callable[[], AbstractContextManager[Any]]
Leaf = Callable[..., Tensor]  # makes a leaf of a shape
Program = Callable[[Context, Leaf], Tensor]  # returns what is differentiated
PROGRAMS: dict[str, Program] = {}


def checked(program: Program) -> Program:
    """Have `test_programs` check a program."""
    PROGRAMS[program.__name__] = program
    return program


def results(program: Program, context: Context, **options: Any) -> list[Tensor]:
    """Return the output and the gradients of all leaves."""
    torch.manual_seed(0)
    leaves: list[Tensor] = []

    def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        leaves.append(nn.Parameter(torch.randn(shape, dtype=dtype)))
        return leaves[-1]

    output = program(context, leaf)
    grad = options.pop("grad", torch.randn_like(output))
    return [output.detach(), *torch.autograd.grad(output, leaves, grad, **options)]


def check(program: Program, **options: Any) -> None:
    """Check that the context changes neither the output nor a gradient."""
    expected, got = (results(program, context, **options) for context in (nullcontext, saving))
    for one, other in zip(expected, got, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


# ------------------------------------------------------------------------------------------------ changes in place

WIDE = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).bfloat16()


@torch.library.custom_op("fitact_tests::decay", mutates_args=("x",))
def decay(factor: float, x: Tensor) -> None:
    x.mul_(factor)


# Each changes its argument in place.
CHANGES: dict[str, Callable[[Tensor], object]] = {
    "dropout1d": lambda x: F.dropout1d(x[0], 0.5, inplace=True),
    "dropout2d": lambda x: F.dropout2d(x, inplace=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, True, True),
    "rrelu": lambda x: F.rrelu(x, inplace=True),
    "several": lambda x: torch._foreach_mul_([x], 2.0),
    "operator": lambda x: torch.ops.aten.mul_.Scalar(x, 2.0),
    "product": lambda x: torch.matmul(x.detach(), WIDE, out=x.detach()),
    "without gradients": lambda x: torch.no_grad()(torch.mul)(x, 2, out=x),
    "checkpoint": lambda x: checkpoint(lambda x: x.mul_(2), x, use_reentrant=False),
    "hooks": lambda x: inside(save_on_cpu(), x),
    "baseline": lambda x: inside(baseline(), x),
    "operator of a library": lambda x: decay(0.9, x),
    "embedding": lambda x: torch.no_grad()(F.embedding)(torch.arange(8), x[0, 0].detach(), max_norm=0.5),
}


def inside(context: AbstractContextManager[Any], x: Tensor) -> None:
    with context:
        x.mul_(2)


@pytest.mark.parametrize("change", CHANGES)
def test_seen(change: str) -> None:
    """What is recomputed is recomputed from what was there before."""

    def program(context: Context, leaf: Leaf) -> Tensor:
        a = leaf(4, 16, 8, 8)
        with context():
            x = a.bfloat16() @ WIDE
            y = x.float().sin()
            CHANGES[change](x)
        return y

    check(program)


@checked
def by_name_from_a_wider_tensor(context: Context, leaf: Leaf) -> Tensor:
    """A product in place is rounded to the dtype of what it changes, whatever the other factor's."""
    a, b, c = leaf(32, 40), leaf(32, 40), leaf(32, 40)
    with context():
        x = a.bfloat16() + b.bfloat16()
        x.mul_(other=c)
        return x.sin()


@checked
def by_itself(context: Context, leaf: Leaf) -> Tensor:
    """A product with itself in place saves what was there before, which hooks may copy."""
    a = leaf(16, 24)
    with saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x), context():
        x = a * 1.0
        return x.mul_(x)


@checked
def replaced_and_then_changed(context: Context, leaf: Leaf) -> Tensor:
    """Hooks copy the sigmoid's result, which is computed from its input instead once that is stored."""
    a = leaf(16, 24)
    with saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x), context():
        x = torch.randn(8, 16) @ a
        s = torch.sigmoid(x)
        y = x * s
        s.mul_(2)
        return y


class Held:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_changes_of_what_hooks_hold_in_objects_of_their_own() -> None:
    weight = nn.Parameter(torch.randn(24, 24))
    with saved_tensors_hooks(Held, lambda held: held.tensor), saving():
        x = torch.randn(16, 24) @ weight
        y = F.gelu(x) @ weight
        x.mul_(2)
    with pytest.raises(RuntimeError, match="change a copy of it"):
        y.sum().backward()


def test_by_itself_without_a_copy() -> None:
    with saving():
        x = nn.Parameter(torch.randn(16, 24)) * 1.0
        x.mul_(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


def test_nowhere_to_write() -> None:
    """PyTorch hands on `out=None`; what is normalised is saved beside, and the result is recomputed."""

    def program(context: Context, leaf: Leaf) -> Tensor:
        a, b = leaf(32, 20), leaf(20, 24)
        with count_saved() as saved, context():
            x = a @ b
            y, z = x.double().cos(), F.normalize(x, dim=-1)
            z = z.sin()
        counts.append(saved.bytes)
        return y + z

    counts: list[int] = []
    check(program)
    assert counts[1] < counts[0] - (4 + 8) * 32 * 24 + 1024


def test_nothing_waits_for_the_garbage_collector() -> None:
    """What a tensor was computed from before it was changed is freed with it."""
    weight = torch.randn(24, 24, dtype=torch.bfloat16, requires_grad=True)
    gc.disable()
    try:
        with saving():
            x = torch.randn(16, 24, dtype=torch.bfloat16) @ weight
            source = StorageWeakRef(x.untyped_storage())
            y = x.float().add_(1)
        del x, y
        assert source.expired()
    finally:
        gc.enable()


@pytest.mark.parametrize("unchanged", ["requires_grad_", "share_memory_", "a failure"])
def test_not_changed(unchanged: str) -> None:
    """A tensor from which something is computed is saved after a call that might have changed it."""

    def program(context: Context, leaf: Leaf) -> Tensor:
        a, b = leaf(32, 20), leaf(20, 24)
        with context():
            x = a @ b
            y = x.double().sin()
            if unchanged == "a failure":
                with pytest.raises(RuntimeError, match="must match"):
                    x.add_(torch.ones(7, 7))
            else:
                getattr(x, unchanged)()
            return y + x.cos()

    check(program)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
@pytest.mark.parametrize("read", ["norm", "difference", "before"])
def test_running_statistics(norm: Any, read: str) -> None:
    """PyTorch does not count that training changes them: what was computed from them is so from what they were."""

    def program(context: Context, leaf: Leaf) -> Tensor:
        m, a, w = norm(16, track_running_stats=True), leaf(8, 16, 6, 6), leaf(16, 16, 3, 3)
        with context():
            m.eval()
            x = m(a * 1) if read == "norm" else a - m.running_mean[:, None, None]
            y = x if read == "before" else F.conv2d(x, w)
            m.train()
            m(a.detach() * 3 + 1)
            z = F.conv2d(a - m.running_mean[:, None, None], w)  # from what they are now
            return y.sin().sum() + F.conv2d(x, w).sin().sum() + z.sin().sum()

    check(program)


@checked
def data(context: Context, leaf: Leaf) -> Tensor:
    """The changes of a tensor are not those of its `data`, whose memory is the same."""
    a, b, w = leaf(32, 40), leaf(32, 40), leaf(32, 40)
    with context():
        h = a * b
        with torch.no_grad():
            h.fill_(3.0)
        return (w * h.data).sum() + a.sin().sum() + b.sin().sum()


# ------------------------------------------------------------------------------------ one memory, several meanings


@checked
def views_of_another_dtype(context: Context, leaf: Leaf) -> Tensor:
    h, b = torch.randn(16, 20).half(), leaf(16, 20)
    with context():
        return (b * h).sum() + (b * h.view(torch.bfloat16)).sum()


@pytest.mark.parametrize("recomputed", [False, True])
def test_views_with_another_sign(recomputed: bool) -> None:
    """The imaginary part of a conjugate has the memory of that of the number itself."""

    def program(context: Context, leaf: Leaf) -> Tensor:
        a, p, q = leaf(20, 20, 2), leaf(20, 20), leaf(20, 20)
        with context():
            z = torch.view_as_complex(a * 2)
            u, v = z.imag, z.conj().imag
            if recomputed:
                return ((v + 1).sin() * p + (u + 1).sin() * q).sum()
            return (u * p).sum() + (v * q).sum()

    check(program)


# ------------------------------------------------------------------------------------------------------- arguments


@checked
def index_that_changes(context: Context, leaf: Leaf) -> Tensor:
    a, index = leaf(50, 16), np.arange(20)
    with context():
        y = a[index].sin()
        index += 3
    return y


@checked
def slice_that_changes(context: Context, leaf: Leaf) -> Tensor:
    a, end, index = leaf(50, 16), torch.tensor(5), torch.arange(20)
    with context():
        y = a[index, :end].sin()
        end += 2
    return y


@checked
def without_a_dimension(context: Context, leaf: Leaf) -> Tensor:
    """Indices are those of all elements then."""
    a = leaf(24, 30)
    with context():
        return torch.take_along_dim(a * 1, torch.arange(256, 384)).sum()


@pytest.mark.parametrize(("shape", "again"), [((4096,), False), ((64, 64), True)])
def test_cumulative_sums(shape: Sequence[int], again: bool) -> None:
    """Of several rows they are recomputed; a GPU adds up a single one in any order."""
    x = nn.Parameter(torch.randn(shape))
    with count_saved(nn.ParameterList([x])) as saved, saving():
        y = x.cumsum(-1).sin()
    assert saved.bytes == (0 if again else y.nbytes)


@pytest.mark.parametrize("old", [{"size_average": False}, {"reduce": False}], ids=str)
def test_old_arguments_of_a_loss(old: Any) -> None:
    def program(context: Context, leaf: Leaf) -> Tensor:
        a, b = leaf(32, 40), leaf(32, 40)
        with context(), pytest.warns(UserWarning, match="size_average and reduce"):
            return F.cross_entropy(a * b, torch.arange(32), **old)

    check(program)


@checked
def nested(context: Context, leaf: Leaf) -> Tensor:
    a, b, w = leaf(5, 20), leaf(9, 20), leaf(24, 20)
    with context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype stage")
        x = torch.nested.as_nested_tensor([a, b], layout=torch.strided)
        y = F.gelu(F.linear(x, w)) * 2
        return torch.nested.to_padded_tensor(y, 0.0).sin()


@checked
def dropped(context: Context, leaf: Leaf) -> Tensor:
    a, b, c = leaf(40, 30), leaf(30, 60), leaf(40, 60)
    with context():
        x = (a @ b).bfloat16()
        wide = torch.native_dropout(c * 1, 0.45, True)[0].sin()  # whose factor is rounded after the mask
        return x.sin() + torch.native_dropout(x, 0.3, True)[0].sin() + wide


@checked
def larger_ones(context: Context, leaf: Leaf) -> Tensor:
    """Integers beside which a float is compared, which are no indices."""
    x, y = leaf(128), torch.randint(-1000, 1000, (128,))
    with context():
        return torch.max(300 * x, y).square() + torch.min(300 * x, y).sin()


@checked
def views_that_repeat(context: Context, leaf: Leaf) -> Tensor:
    """Indices in windows that overlap, and one of several masks for all rows, have the bytes of their memory."""
    x, y, index, masks = leaf(100, 4), leaf(2, 64), torch.randint(100, (64,)), torch.rand(2, 64) > 0.5
    with context():
        z = (y * 1).masked_fill(masks[1].expand(2, 64), 0)
        return x[index.unfold(0, 16, 4)[:4]].square().sum() + z.square()


@checked
def statistics(context: Context, leaf: Leaf) -> Tensor:
    """Running ones that change between a norm that reads them and backward, inside of the context and later."""
    x, w = leaf(8, 16, 20), leaf(20, 20)
    norms = nn.BatchNorm1d(16).eval(), nn.BatchNorm1d(16).eval()
    with context():
        y = sum((norm(x * 1) @ w).square() for norm in norms)
        torch.batch_norm(x, None, None, norms[0].running_mean, norms[0].running_var, True, 0.1, 1e-5, False)
    norms[1].train()(x.detach())
    return torch.as_tensor(y)


class Tripled(Tensor):
    """A tensor of the user's, whose products are others than PyTorch's, and no tensors of this class."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.mul:
                return torch.mul(*(arg.as_subclass(Tensor) for arg in args)) * 3
            return func(*args, **(kwargs or {}))


@checked
def products_of_a_class(context: Context, leaf: Leaf) -> Tensor:
    x, other = leaf(4, 100), torch.randn(4, 100).as_subclass(Tripled)
    with context():
        h = x * 1
        return torch.mul(h, other).sin() * h


@checked
def operators_in_place(context: Context, leaf: Leaf) -> Tensor:
    """What they change is copied for what is recomputed from it."""
    x, masks = leaf(32, 64), [torch.rand(32, 64) > 0.5 for _ in range(3)]
    counts = torch.randint(1, 4, (32, 64), dtype=torch.int8)
    with context():
        h = x * 2
        y = sum(((h + each).sin() for each in [*masks, counts]), h.sin())
        masks[0] |= ~masks[0]
        masks[1] &= False
        masks[2] ^= True
        counts <<= 1
        return torch.as_tensor(y)


def test_weights_of_another_device() -> None:
    """Under autocast, a parameter that is moved is no cast of autocast's."""
    w = nn.Parameter(torch.randn(64, 64))
    with saving(), torch.autocast("cpu", torch.bfloat16):
        y = torch.randn(64, 64, device="meta", requires_grad=True) * w.to("meta")
    node: Any = y.grad_fn
    assert node._saved_other.is_meta


class Half(Tensor):
    """A tensor of the user's that has no inverse."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.Tensor.reciprocal
        return super().__torch_function__(func, types, args, kwargs or {})


def test_calls_of_subclasses_stay() -> None:
    x: Any = torch.ones(16, 20, requires_grad=True).as_subclass(Half)
    with saving():
        assert type(2 / x) is Half


# -------------------------------------------------------------------------------------------------------- backward


class Overwriting(torch.autograd.Function):
    """A sine, whose backward writes over what it has saved, as is allowed where nothing else has saved it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.cos_().mul_(grads[0])


@checked
def written_over_in_backward(context: Context, leaf: Leaf) -> Tensor:
    """What a function has written over is computed again for its other readers."""
    a, b = leaf(32, 40), leaf(32, 40)
    with context():
        x = a * b
        return (x + b).sin() + Overwriting.apply(x)


def test_written_over_and_gone() -> None:
    """If it cannot be computed again, since a checkpoint outside gives each tensor once, it raises."""
    a, b = (torch.randn(32, 40, requires_grad=True) for _ in range(2))

    def block(a: Tensor) -> Tensor:
        with saving():
            x = (a @ b.T).exp()
            return (x + 1).sin() + Overwriting.apply(x)

    y = checkpoint(block, a, use_reentrant=False)
    with pytest.raises(RuntimeError, match="has written, in its backward, over a tensor"):
        y.sum().backward()


def test_casts_of_weights_that_change() -> None:
    """Autocast's cache has the copy from before the step, and the first call did not save it."""

    def program(context: Context, leaf: Leaf) -> Tensor:
        a, w = leaf(8, 16), leaf(16, 16)
        with context(), torch.autocast("cpu", torch.bfloat16):
            F.linear(a.detach(), w)
            with torch.no_grad():
                w.mul_(2)
            return F.linear(a, w)

    check(program)


@checked
def number_of_a_parameter(context: Context, leaf: Leaf) -> Tensor:
    """A temperature, whose parameter an optimizer has changed before it is read in backward."""
    a, logarithm = leaf(64, 4), leaf(1)
    with context():
        y = logarithm.exp() * a
    with torch.no_grad():
        logarithm.add_(1)
    return y


def test_vmap() -> None:
    """Changes in place of what a transform batches."""

    def row(x: Tensor) -> Tensor:
        y = x.clone()
        y.mul_(2)
        return y.sigmoid() * x

    def program(context: Context, leaf: Leaf) -> Tensor:
        with context():
            return torch.vmap(row)(leaf(8, 4))

    check(program)


def test_forward_mode_inside_of_hooks() -> None:
    """What a layer saves while a transform runs, as in MeanFlow, which checkpoints and counts of bytes store."""

    def row(weight: Tensor, x: Tensor) -> Tensor:
        return F.silu(F.linear(x, weight)).tanh()

    def program(context: Context, leaf: Leaf) -> Tensor:
        weight, x = leaf(16, 8), leaf(4, 8)
        with save_on_cpu(), context():
            value, slope = torch.func.jvp(partial(row, weight), (x,), (x.detach().cos(),))
            return value * slope + F.gelu(F.linear(x, weight))

    check(program)


def test_small_masks_in_a_checkpoint() -> None:
    """The checkpoint's second run holds the mask, its first one does not: both store the same."""

    def program(context: Context, leaf: Leaf) -> Tensor:
        def block(x: Tensor) -> Tensor:
            with context():
                v = x.cumsum(0)
                return v.masked_fill(v > 0.5, -100.0) / (v + 0)

        output: Tensor = checkpoint(block, leaf(8), use_reentrant=False)
        return output

    check(program)


def test_a_checkpoint_that_stops_in_a_change() -> None:
    """It has all that it needs once an argument is saved, before PyTorch's copy of what is changed."""

    def program(context: Context, leaf: Leaf) -> Tensor:
        a, b = leaf(8, 64), leaf(64)

        def block(x: Tensor) -> Tensor:
            with context():
                u = x * x
                return (u + b.abs()).pow_(u)

        output: Tensor = checkpoint(block, a, use_reentrant=False)
        return output

    check(program)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(8), nn.GroupNorm(4, 8)])
@pytest.mark.parametrize("last", [nn.Conv2d(8, 8, 1), nn.Identity()])
def test_changes_in_a_context_inside(norm: nn.Module, last: nn.Module) -> None:
    """The context outside, which also sees the call, forgets nothing that the inner one knows."""
    block = nn.Sequential(norm, nn.SiLU(inplace=True), nn.Conv2d(8, 8, 1), norm, nn.ReLU(inplace=True), last)

    def program(context: Context, leaf: Leaf) -> Tensor:
        def inside(x: Tensor) -> Tensor:
            with context():
                result: Tensor = block(x)
            return result

        with context():  # of the checkpoint, which runs again without it
            output: Tensor = checkpoint(inside, leaf(2, 8, 4, 4).sin(), use_reentrant=False)
        return output

    check(program)
    with count_saved(block) as once, saving():
        block(torch.randn(2, 8, 4, 4))
    with count_saved(block) as twice, saving(), saving():
        block(torch.randn(2, 8, 4, 4))
    assert twice.bytes == once.bytes


def test_changes_in_hooks_inside() -> None:
    """A pair of hooks sees no call, so the context outside copies what it recomputes from."""

    def program(context: Context, leaf: Leaf) -> Tensor:
        x = leaf(8, 8) * 1
        with context():
            stores_x = F.gelu(x)
            y = (x * 2).sin()
            with saved_tensors_hooks(*hooks(None)):
                x.mul_(3)
        y.beside = stores_x
        return y

    check(program)


def test_backward_in_autocast() -> None:
    """What ran without autocast is recomputed without it."""
    a, b = nn.Parameter(torch.randn(8, 2, 20)), nn.Parameter(torch.randn(8, 2, 20))

    def gradients(context: Context) -> Sequence[Tensor]:
        with context():
            y = (a.bfloat16() * b.bfloat16()).prod(1).sin()
        with torch.autocast("cpu", torch.bfloat16):
            return torch.autograd.grad(y.sum(), (a, b))

    assert all(map(torch.equal, gradients(nullcontext), gradients(saving)))


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_many_gradients_of_a_loss(reduction: str) -> None:
    def program(context: Context, leaf: Leaf) -> Tensor:
        a, b = leaf(16, 20), leaf(16, 20)
        with context():
            return F.cross_entropy(a * b, torch.arange(16), reduction=reduction)

    check(program, grad=torch.eye(16) if reduction == "none" else torch.randn(5), is_grads_batched=True)


def test_some_rows_of_wide_logits() -> None:
    """The logarithms of a few rows take less than all logits in half precision."""

    def program(context: Context, leaf: Leaf) -> Tensor:
        a, b = (leaf(*shape, dtype=torch.bfloat16) for shape in ((256, 20), (20, 500)))
        with count_saved() as saved, context():
            loss = F.cross_entropy((a @ b).float()[:8], torch.arange(8))
        counts.append(saved.bytes)
        return loss

    counts: list[int] = []
    check(program)
    assert counts[1] <= counts[0]


def test_forward_mode_of_a_loss() -> None:
    a, b, t = torch.randn(16, 20), nn.Parameter(torch.randn(16, 20)), torch.randn(16, 20)

    def tangent(context: Context) -> Tensor:
        with forward_ad.dual_level(), context():
            x = forward_ad.make_dual(a.clone().requires_grad_(), t)
            made: Tensor = forward_ad.unpack_dual(F.cross_entropy(x * b, torch.arange(16))).tangent
            return made

    assert torch.equal(tangent(nullcontext), tangent(saving))


def test_logits_in_memory_of_hooks() -> None:
    """The gradient of logits is not written over what the user's hooks hand out."""
    w, x = torch.randn(64, 20, requires_grad=True), torch.randn(256, 20, requires_grad=True)

    def pack(tensor: Tensor) -> Any:
        contents = bytearray(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        return contents, tensor.dtype, tensor.shape

    def unpack(packed: Any) -> Tensor:
        contents, dtype, shape = packed
        return torch.frombuffer(contents, dtype=dtype).view(shape)

    def gradients(context: Context) -> Sequence[Tensor]:
        with saved_tensors_hooks(pack, unpack), context(), torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(F.linear(x, w), torch.arange(256) % 64)
        return [torch.autograd.grad(loss, w, retain_graph=True)[0] for _ in range(2)]

    assert all(map(torch.equal, gradients(nullcontext), gradients(saving)))


class Inner(torch.autograd.Function):
    """Runs a graph of its own in both passes, in backward before it reads what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.inner = x.detach().clone().requires_grad_()
            ctx.outer = ctx.inner.sin().square()
        ctx.save_for_backward(x)
        return Tensor.detach(ctx.outer)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(ctx.outer, ctx.inner, grads[0])
        return gradient * ctx.saved_tensors[0]


@checked
def graphs_of_a_function(context: Context, leaf: Leaf) -> Tensor:
    """A checkpoint gives each tensor once, so what two nodes read is held until the function's own reads it."""
    x = torch.randn(8, 16) @ leaf(16, 24)

    def call(x: Tensor) -> Tensor:
        with context():
            y: Tensor = Inner.apply(x) + x.sin()
            return y

    y: Tensor = checkpoint(call, x, use_reentrant=False)
    return y


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    check(PROGRAMS[name])
