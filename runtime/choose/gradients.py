"""How far gradients are from the baseline's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fitact.base import one_line
from fitact.runtime.restore import Runner, generators, has_no_values, loss_of, real, unchanged
from fitact.runtime.torch_internals import tree_leaves

from .records import Gradient
from .replacement import Change

Gradients = Sequence[Tensor | None]


def gradient_error(model: nn.Module, run: Runner, baseline: Change, change: Change) -> Gradient:
    """Run a model forward and backward, as the baseline and with a change, from the same random numbers.

    The output's `loss` is differentiated, or an output of one number, or else the sum of all outputs times normal
    random numbers. The parameters' `grad` stays as it is.

    Args:
        model: the model, which is unchanged in the end.
        run: runs it.
        baseline: makes it what it is compared with.
        change: what is compared.

    Returns:
        The error, or why it could not be measured.

    """
    if has_no_values(model):
        return Gradient(note="the model's tensors have no values")
    try:
        return compared(*(_gradients(model, run, context) for context in (baseline, change)))
    except Exception as error:  # the conversion is valid without this measurement
        return Gradient(note=one_line(error))


def _gradients(model: nn.Module, run: Runner, change: Change) -> Gradients:
    with torch.inference_mode(False), torch.enable_grad(), generators(model), unchanged(model):
        if not model.training:
            model.train()
        with change(model):
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
    gradient = gradient.detach().cpu()
    return (torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient).double()


def compared(expected: Gradients, changed: Gradients) -> Gradient:
    """Compare two gradients of all parameters, each as one vector; None counts as zeros."""
    squares = torch.zeros(4, dtype=torch.float64)
    for first, second in zip(expected, changed, strict=True):
        if first is None and second is None:
            continue
        a, b = map(numbers, (first, second))
        squares += torch.stack([(a - b).square().sum(), a.square().sum(), b.square().sum(), (a * b).sum()])
    difference, norm, other, product = squares.tolist()
    if not squares.isfinite().all() or not norm or not other:
        return Gradient(note="the gradient is zero or not finite")
    return Gradient((difference / norm) ** 0.5, product / (norm * other) ** 0.5)
