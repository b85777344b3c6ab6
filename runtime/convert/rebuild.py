"""Rebuilding the outputs of a model, and nothing else."""

from __future__ import annotations

from typing import Any

from torch import nn

from fitact.runtime.records import Conversion

from .convert import convert


def rebuild(
    model: nn.Module, *, dry_run: bool = False, example_inputs: Any = None, gradients: bool = False
) -> Conversion:
    """Change a model in place so that it keeps no output twice; its gradients stay the same bit for bit.

    This is `convert(model, "rebuild")`. Every operation keeps its own inputs, so an operation often keeps an
    output that could be computed again from what is kept anyway. Such outputs are those of activations, computed
    again from their inputs; of gates f(g)·u, from g and u; of LayerNorm, RMSNorm, GroupNorm and BatchNorm, from
    their inputs; and of dropout after one of these, from its mask. An activation after GroupNorm or BatchNorm is
    rebuilt with the norm. Trained linear layers and convolutions that follow, also those of transformers' GPT-2
    and peft's adapters, compute them in backward. Masks of dropout are kept as bits. No matrix product and no
    convolution is computed again; the statistics of a batch are.

    With `example_inputs` the model is also run to find modules that call PyTorch's functions in their own
    `forward` and keep less if the results are rebuilt: activations, products, experts that hold their weights in
    one tensor, rotary embeddings, casts, and attention. The model is then run with and without these changes, with
    real tensors. Unless its outputs are the same bit for bit, these modules are left alone.

    If anything else keeps an output, such as a product with another tensor, it is kept as before. An activation or
    a norm that is composed of several operations is computed again in backward, and gives one gradient for each
    time that it reads its input, so that sums round as stock's do. Attention that is not fused keeps one tensor of
    scores, from which softmax, dropout and casts are computed again. Linear layers and convolutions keep no copies
    of weights that autocast casts: these are cast again, so they must not change between forward and backward; if
    they do, backward raises. The compiler traces the stock model and itself chooses what to keep. A second
    derivative raises. Freeze layers and add adapters first. `fitact.revert` puts everything back.

    Args:
        model: the model, which is changed in place; the state dict stays the same.
        dry_run: whether to leave the model as it is and only report what would be done.
        example_inputs: inputs to run and measure the model with, as for `fitact.convert`.
        gradients: whether to compare the gradient of all parameters with stock's, by running the model and its
            backward pass twice with `example_inputs` and real tensors.

    Returns:
        The activations, gates and norms whose outputs are rebuilt, and the modules that call functions; with
        `example_inputs`, the bytes kept too.

    Raises:
        UsageError: it is no nn.Module, has nothing to rebuild, or cannot be run; it is then unchanged.

    """
    return convert(model, "rebuild", dry_run=dry_run, example_inputs=example_inputs, gradients=gradients)
