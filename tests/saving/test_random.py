"""Random programs: loss and gradients in the context are PyTorch's bit for bit, and errors where its are."""

import operator
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fitact import saving
from tests.support.blocks import BY_HAND
from tests.support.saving import HALF, differences

SHAPE = (4, 5, 16)
Pick = Callable[[], Tensor]


def _assigned(x: Tensor) -> Tensor:
    x[:, 0] = 0.25
    return x


def _largest(x: Tensor, dim: int) -> Tensor:
    x = x.round(decimals=1)  # some are equal
    return x.max(dim, keepdim=True).values + x.topk(3, dim, largest=False)[0].cos().sum(dim, keepdim=True)


def _divided(x: Tensor, by: Callable[[Tensor], Any], read: Callable[[Tensor], Tensor] = Tensor.detach) -> Tensor:
    """Divide in place; a view that is made before is read after it."""
    view = x[1:]
    x /= by(x)
    return x * read(view).sum()


def _convolved(x: Tensor) -> Tensor:
    return F.conv1d(x, torch.linspace(-0.4, 0.5, 75, dtype=x.dtype).view(5, 5, 3), padding=1)


def _pooled(x: Tensor, pool: Callable[..., Tensor]) -> Tensor:
    return pool(F.relu(x), 2).repeat_interleave(2, -1)


DIVIDE: list[Callable[[Tensor], Tensor]] = [
    partial(_divided, by=lambda x: x.sum(-1, keepdim=True)),
    partial(_divided, by=lambda x: x.sum(-1, keepdim=True), read=Tensor.clone),
    partial(_divided, by=lambda x: x.double().sum(-1, keepdim=True)),
    partial(_divided, by=lambda _: torch.linspace(1, 2, 5, requires_grad=True)[:, None]),
    partial(_divided, by=lambda _: 3),
    lambda x: x.div_(x.sum(-1, True)).div_(x.sum(-1, True)),
    lambda x: torch.cos(x) + x.div_(x.sum(-1, True)),  # PyTorch raises in backward
]


def operations(weight: Tensor, bias: Tensor) -> list[Callable[[Pick], Tensor]]:
    """Return functions of tensors that they pick; each may pick the same one several times."""

    def gated(x: Tensor) -> Tensor:
        s = torch.sigmoid(x)
        return s * x + (s.mT @ x).mean() * F.linear(s, weight.exp())

    plain = [F.gelu, F.silu, torch.tanh, torch.sigmoid, F.relu, F.leaky_relu, torch.exp, torch.clone]
    return [
        *(lambda pick, function=function: function(pick()) for function in plain),
        lambda pick: pick() + pick(),
        lambda pick: pick() - pick(),
        lambda pick: pick() * pick(),
        lambda pick: pick().pow(2),
        lambda pick: F.linear(pick(), weight, bias),
        lambda pick: F.linear(pick(), weight),
        lambda pick: F.layer_norm(pick(), (16,)),
        lambda pick: F.rms_norm(pick(), (16,)),
        lambda pick: pick() * torch.rsqrt(pick().float().pow(2).mean(-1, keepdim=True) + 1e-3),
        lambda pick: F.batch_norm(pick().transpose(1, 2), None, None, training=True).transpose(1, 2),
        lambda pick: F.softmax(pick(), -1),
        lambda pick: F.softmax(pick(), -1, dtype=torch.float32),
        lambda pick: F.dropout(pick(), 0.3),
        lambda pick: F.dropout(F.gelu(pick()), 0.5, inplace=True),
        lambda pick: pick().to(HALF),
        lambda pick: pick().to(torch.float32),
        lambda pick: pick().transpose(0, 1).contiguous().transpose(0, 1),
        lambda pick: pick()[torch.randperm(4)],
        lambda pick: pick().masked_fill(pick() > 0, 0.5),
        lambda pick: torch.where(pick() > 0, pick(), pick()),
        lambda pick: pick().clone().add_(1),
        lambda pick: (pick() * 2).mul_(pick()),
        lambda pick: (pick() + 1).relu_(),
        lambda pick: F.silu(pick() * 2, inplace=True),
        lambda pick: F.leaky_relu(pick() * 2, 0.2, inplace=True),
        lambda pick: _convolved(pick()),
        lambda pick: F.leaky_relu(_convolved(F.relu(_convolved(pick()))), 0.3),
        *(lambda pick, pool=pool: _pooled(pick(), pool) for pool in (F.max_pool1d, F.avg_pool1d)),
        lambda pick: torch.einsum("abc,bd->adc", pick().transpose(0, 1), torch.ones(4, 4)).transpose(0, 1),
        lambda pick: pick().gather(-1, torch.arange(16).flip(0).expand(SHAPE)),
        lambda pick: operator.iadd(pick() * 1.5, pick()),
        lambda pick: _assigned(pick() + 0.5),
        lambda pick: pick().add_(1),  # PyTorch may raise in backward
        *(
            lambda pick, p=p: F.scaled_dot_product_attention(*(pick()[None] for _ in "qkv"), dropout_p=p)[0]
            for p in (0.0, 0.2)
        ),
        lambda pick: (pick() @ pick().transpose(-1, -2)).softmax(-1) @ pick(),
        lambda pick: (lambda u, g: u * F.silu(g))(*torch.cat([pick(), pick()], -1).chunk(2, -1)),
        lambda pick: pick().detach() * pick(),
        lambda pick: pick().unsqueeze(2).expand(-1, -1, 3, -1).reshape(4, -1, 16)[:, :5],
        lambda pick: torch.stack([pick(), pick()]).mean(0),
        lambda pick: (lambda x: x * x * torch.sigmoid(x))(pick()),
        lambda pick: gated(pick()),
        *(lambda pick, function=function: function(pick()) for function in BY_HAND.values()),
        lambda pick: (lambda x: torch.lerp(x, x, 0.3) / (torch.atan2(x, x) + x.abs() + 2))(pick().float()),
        lambda pick: F.cosine_similarity(pick().float(), pick().exp().float(), -1)[..., None] * pick(),
        lambda pick: torch.stack([pick(), pick().sin(), pick()]).prod(0),
        lambda pick: pick().mT.sin().mT + pick()[..., :1] * pick().flip(0),
        lambda pick: _largest(pick(), 1).repeat(1, 5, 1),
        lambda pick: _largest(pick(), -1).expand(SHAPE) * pick(),
        *(
            lambda pick, divide=divide: divide(F.softmax(pick(), -1).topk(4, -1).values).repeat(1, 1, 4)
            for divide in DIVIDE
        ),
    ]


def program(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return a loss: the sum of the last results of random operations, drawn from the generator of Python."""
    results, made = [x], operations(weight, bias)
    for _ in range(random.randint(3, 14)):
        result = random.choice(made)(lambda: random.choice(results[-4:]))
        if result.shape == SHAPE:
            results.append(result)
    return torch.stack([(part.float() * torch.linspace(-1, 1, 16)).sum() for part in results[-2:]]).sum()


def outcome(seed: int, context: Callable[[], AbstractContextManager[Any]]) -> list[Tensor | None] | str:
    """Return the loss and the gradients of a program, or which error it raises.

    It may run in a checkpoint, where it draws the same operations when it runs again; in autocast; and in hooks.
    """
    torch.manual_seed(seed)
    weight, bias = torch.randn(16, 16) * 0.3, torch.randn(16)
    inputs = [each.requires_grad_() for each in (torch.randn(SHAPE), weight, bias)]

    def run(*inputs: Tensor) -> Tensor:
        random.seed(seed)
        return program(*inputs)

    try:
        outside = saved_tensors_hooks(_copy, Tensor.detach) if seed % 7 == 0 else nullcontext()
        with torch.autocast("cpu", HALF) if seed % 3 == 0 else nullcontext(), outside, context():
            loss = checkpoint(run, *inputs, use_reentrant=False) if seed % 5 == 0 else run(*inputs)
        loss.backward(retain_graph=seed % 4 == 1)
        if seed % 4 == 1:
            loss.backward()
    except RuntimeError as error:
        return type(error).__name__
    return [loss.detach(), *(tensor.grad for tensor in inputs)]


def _copy(x: Tensor) -> Tensor:
    """Return a copy with the same strides, as of what is stored elsewhere."""
    copied = x.untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype).set_(copied, x.storage_offset(), x.size(), x.stride())


@pytest.mark.parametrize(("first", "count"), [(0, 300), pytest.param(10_000, 600, marks=pytest.mark.full)])
def test_random_programs(first: int, count: int) -> None:
    raised = 0
    for seed in range(first, first + count):
        expected, actual = outcome(seed, nullcontext), outcome(seed, saving)
        raised += isinstance(expected, str)
        assert not differences(expected, actual), seed
    assert raised  # such programs are among them
