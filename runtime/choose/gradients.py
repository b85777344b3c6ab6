"""How far gradients are from the baseline's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fitact.base import one_line
from fitact.runtime.restore import Runner, generators, has_no_values, loss_of, real, unchanged
from fitact.runtime.saving import baseline
from fitact.runtime.torch_internals import tree_leaves

from .records import Gradient
from .replacement import Change

Gradients = Sequence[Tensor | None]
T = TypeVar("T")


def gradient_error(model: nn.Module, run: Runner, baseline: Change, change: Change) -> Gradient:
    """Run a model forward and backward, as the baseline and with a change, from the same random numbers.

    The output's `loss` is differentiated, or an output of one number, or else the sum of all outputs times normal
    random numbers. The model and its parameters' `grad` stay as they are.
    """
    if has_no_values(model):
        return Gradient(note="the model's tensors have no values")
    try:
        return reproducibly(lambda: compared(*(_gradients(model, run, each) for each in (baseline, change))))
    except Exception as error:  # the conversion is valid without this measurement
        return Gradient(note=one_line(error))


def reproducibly(call: Callable[[], T]) -> T:
    """Call with algorithms that give the same bits each time, as those of a GPU's attention do not by themselves.

    Where PyTorch has none for an operation, the usual ones are taken for all. A context around does nothing.
    """
    with baseline():
        try:
            with _deterministic():
                return call()
        except Exception as error:
            if "determinis" not in str(error).lower():
                raise
        return call()


@contextmanager
def _deterministic() -> Iterator[None]:
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    name = "CUBLAS_WORKSPACE_CONFIG"  # PyTorch asks for it; on one stream, products are the same without it
    before = os.environ.get(name)
    os.environ.setdefault(name, ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        if before is None:
            del os.environ[name]


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Let a model train until the context ends, which puts it and the random generators back as they were."""
    with torch.inference_mode(False), torch.enable_grad(), generators(model), unchanged(model):
        if not model.training:
            model.train()
        yield


def _gradients(model: nn.Module, run: Runner, change: Change) -> Gradients:
    with training(model), change(model):
        loss = scalar_of(real(run)(model))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.autograd.grad(loss, trained, allow_unused=True)


def scalar_of(output: Any) -> Tensor:
    """Return the scalar of an output that is differentiated."""
    loss = loss_of(output)
    if loss is not None and loss.numel() == 1:
        return loss.sum()
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if len(leaves) == 1 and leaves[0].numel() == 1:
        return leaves[0].sum()
    random = torch.Generator().manual_seed(0)
    weighed = [(leaf * torch.randn(leaf.shape, generator=random).to(leaf)).float().sum() for leaf in leaves]
    return torch.stack([share.cpu() for share in weighed]).sum()


def numbers(gradient: Tensor | None) -> Tensor:
    """Return real numbers in float64."""
    if gradient is None:
        return torch.zeros(())
    if hasattr(gradient, "full_tensor"):  # a DTensor's
        gradient = gradient.full_tensor()
    gradient = gradient.detach().cpu()
    return (torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient).double()


def compared(expected: Gradients, changed: Gradients) -> Gradient:
    """Compare two gradients of all parameters, each as one vector; None counts as zeros."""
    squares = torch.zeros(4, dtype=torch.float64)
    for first, second in zip(expected, changed, strict=True):
        a, b = map(numbers, (first, second))
        squares += torch.stack([(a - b).square().sum(), a.square().sum(), b.square().sum(), (a * b).sum()])
    difference, norm, other, product = squares.tolist()
    if not squares.isfinite().all() or not norm or not other:
        return Gradient(note="the gradient is zero or not finite")
    return Gradient((difference / norm) ** 0.5, product / (norm * other) ** 0.5)
