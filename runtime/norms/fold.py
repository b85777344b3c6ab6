"""Merging the α and β of norms into the next linear layers (Approx-BP, section 5, App. G).

    from fitact.runtime.norms.fold import merge_norms, unmerge_norms
    sites = merge_norms(model, (inputs,))

A norm z·α + β becomes a memory-sharing norm, which returns z. Each linear layer W·x + b that reads it becomes
W·diag(α)·z + (Wβ + b). In peft's adapters B·A·x, A becomes A·diag(α), and b also gains scale·B·A·β. In real
arithmetic the model computes the same, but z is kept once, for norm and layers, and x is no longer kept.

Merging changes three things. α and β are no longer parameters: they are not trained and not in the state dict, so
training takes another path (the paper finds a slightly faster one). A layer without a bias gets one if there is a
β; it is trained if β was. A frozen weight changes too, if an adapter or another layer keeps z.

So load the weights first, and merge before you make the optimizer, compile the model or spread it over processes.
Weights or adapters of the original model do not fit the merged one: unmerge, load, and merge again.

Merging sees only what the example runs. If a branch that it does not run reads the norm's output with anything but
a linear layer, or gives these layers another input, its result is silently wrong: have the example run every
branch, or exclude the norm. Values taken from inside the model, such as a transformer's last hidden state without
its head, are z. If an adapter has B ≠ 0 and the norm has a β, its scale·B·A·β stays in the layer's bias when the
adapter is disabled, scaled or unloaded: unmerge before that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fitact.errors import UsageError
from fitact.runtime.records import SiteRecord
from fitact.runtime.restore import runner
from fitact.runtime.torch_internals import FakeTensor

from .dataflow import outside_autocast
from .linear import Norm
from .rewrite import is_merged, merge, present, unmerge
from .structure import Seen, listed, look

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any] | Callable[[nn.Module], Any]


def merge_norms(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    dry_run: bool = False,
) -> list[SiteRecord]:
    """Replace norms by memory-sharing ones, in place, and merge α and β into the linear layers that read them.

    The model is run on the example inputs to see what reads and keeps the output of each norm: in training mode
    (first with gradients, which takes the memory of a forward pass, then without) and in evaluation mode. Norms
    are `nn.LayerNorm`, `nn.RMSNorm`, and any module that computes the same, with its weight as it is or counted
    from 1. A norm is left alone, and the record says why, if

    - anything but a linear layer reads its output (a residual sum, dropout, a convolution, a copy, the caller), or
      such a layer also reads something else;
    - no layer keeps its output, because all are frozen, so that nothing would be shared;
    - a weight is tied, quantised, computed, or spread over processes;
    - something holds its output after the run;
    - an α is 0, or a weight times α would leave the range of its dtype;
    - the innermost module that holds the norm and its layers has another linear layer or norm of the same width
      that the example does not run (another expert or head, the original of one of peft's `modules_to_save`).

    Then the outputs in evaluation mode are compared. Their difference, in the 2-norm relative to each output, may
    be 16 times as large as when the same weights are changed by one rounding (of their dtype, or of the norm's
    output if that is coarser), plus 16 roundings. The effect of rounding depends on the model, so it is measured.
    If the difference is larger, or above a half, or if there is an error, everything is undone. In float32 the
    limit is about 1e-5; in half precision only gross errors exceed it. So outputs are compared without the
    caller's autocast, unless the model needs it to run, and weights are changed in their own dtype. Meanwhile the
    CPU holds a copy of these weights. Training flags, buffers, gradients and the random state of PyTorch and
    Python stay as they are.

    Args:
        model: a model of real tensors, not compiled.
        example_inputs: a tensor, a tuple of positional or a dictionary of named arguments, or a function that is
            called with the model, runs it (for example under autocast) and returns its outputs.
        include: patterns of paths, such as `encoder.*`; only norms that match one are merged.
        exclude: patterns of paths of norms that are not merged.
        dry_run: whether to change nothing.

    Returns:
        A record of each norm, in the model's order. `reason` says which layers took up its α and β, or why it is
        left alone. `kept_before` and `kept_after` are the bytes that autograd keeps for this norm alone in a
        forward pass of the example. Storage shared by merged norms is attributed to the first of them. Copies of
        the norm's output that layers keep under autocast disappear too, but are not counted.

    Raises:
        UsageError: the model cannot be run, returns no tensors, is compiled or distributed, or its tensors are not
            real.
        JobError: the outputs differed, or the model does not run with the norms replaced.

    """
    _check(model)
    run = partial(runner(example_inputs), model)
    # tensors made in inference mode could not be trained
    with torch.inference_mode(False):
        seen = look(model, run)
        with outside_autocast(model):
            reasons = {
                module: (_left_out(seen.names[module], include, exclude) if isinstance(known, Norm) else "")
                or seen.reason(module)
                for module, known in seen.found.items()
            }
        chosen = [seen.graph.usages[module] for module, reason in reasons.items() if not reason]
        if chosen and not dry_run:
            merge(model, run, chosen)
    return [_record(seen, module, reasons) for module in seen.found]


def merge_exactly(model: nn.Module, example_inputs: Inputs, paths: Sequence[str]) -> Callable[[], None]:
    """Merge some norms as `merge_norms` does, or none of them.

    Args:
        model: as for `merge_norms`.
        example_inputs: as for `merge_norms`.
        paths: the paths of the norms, at least one.

    Returns:
        A function that undoes this, bit for bit, from copies of the weights on the CPU.

    Raises:
        UsageError: one of them cannot be merged, or as in `merge_norms`; the model is then unchanged.
        JobError: as in `merge_norms`; the model is then unchanged.

    """
    _check(model)
    run = partial(runner(example_inputs), model)
    with torch.inference_mode(False):
        seen = look(model, run)
        norms = {seen.names[module]: module for module in seen.found}
        with outside_autocast(model):
            for path in paths:
                reason = seen.reason(norms[path]) if path in norms else "it is no norm, or it is merged already"
                if reason:
                    raise UsageError(f"{path}: {reason}")
        return merge(model, run, [seen.graph.usages[norms[path]] for path in paths])


def unmerge_norms(model: nn.Module) -> list[str]:
    """Put back the norms that `merge_norms` has replaced, in place, and take α and β out of the layers again.

    The weights are divided by α. So a model that was trained in between computes the same as before: its norms
    have their old α and β, and its layers hold what was trained. No copy of the weights is needed. Weights that
    were not trained are restored up to two roundings of their dtype. A bias that merging added is removed, unless
    it was trained. LoRA adapters that were added in between are divided too.

    Returns:
        The paths of these norms.

    Raises:
        UsageError: a layer was replaced in between (for example by quantising), or has an adapter other than
            peft's LoRA; then nothing is changed.

    """
    places = [
        (name, module, present(model, name, module.merged))
        for name, module in model.named_modules()
        if is_merged(module)
    ]
    with torch.inference_mode(False), torch.no_grad(), outside_autocast(model):
        for _, module, layers in places:
            unmerge(model, module, module.merged, layers)
    torch.clear_autocast_cache()  # it holds casts of the old weights
    return [name for name, _, _ in places]


def _check(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule":
            raise UsageError(
                f"expected a model that is not compiled, got one ({name or 'the model'}): merge before"
            )
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise UsageError(
                f"expected a model not yet spread over processes, got one ({name or 'the model'}): merge before"
            )
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta" or isinstance(parameter, FakeTensor):
            raise UsageError(
                f"expected parameters with values, got {name} without: load the weights before merging"
            )


def _left_out(name: str, include: str | Sequence[str] | None, exclude: str | Sequence[str] | None) -> str:
    if include is not None and not _fits(name, include):
        return "left out: no pattern of include matches"
    return "left out: a pattern of exclude matches" if exclude is not None and _fits(name, exclude) else ""


def _fits(name: str, patterns: str | Sequence[str]) -> bool:
    return any(fnmatchcase(name, one) for one in ([patterns] if isinstance(patterns, str) else patterns))


def _record(seen: Seen, module: nn.Module, reasons: Mapping[nn.Module, str]) -> SiteRecord:
    """Return the record of a norm: merged if there is no reason against it."""
    graph, name, kind, reason = seen.graph, seen.names[module], type(module).__name__, reasons[module]
    merged = {one for one, why in reasons.items() if not why}
    before = graph.kept_for(module, merged | {module})
    if reason:
        return SiteRecord(name, "norm", kind, None, reason, before, before)
    usage = graph.usages[module]
    number = 8 if usage.unit == torch.finfo(torch.float64).eps else 4
    return SiteRecord(
        name,
        "norm",
        kind,
        "MSLayerNorm" if usage.norm.centred else "MSRMSNorm",
        f"merged into {listed(usage, seen.names)}",
        before,
        usage.rows * number,
        shared=True,
    )
