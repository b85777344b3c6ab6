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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from fitact.errors import UsageError
from fitact.runtime.records import SiteRecord
from fitact.runtime.restore import untouched
from fitact.runtime.torch_internals import FakeTensor, has_hooks

from .dataflow import Graph, NormUsage, observe, storage, without_autocast
from .linear import Norm, ambiguous, blocker, is_layer, range_trouble, recognise, width, wrappers
from .rewrite import is_merged, merge, present, unmerge

Owners = dict[int | None, list[nn.Module]]
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
    names = {module: name for name, module in model.named_modules()}
    layers = {module for module in model.modules() if is_layer(module)}

    def run() -> Any:
        return _run(model, example_inputs)

    # tensors made in inference mode could not be trained
    with torch.inference_mode(False):
        with without_autocast(model):
            found = {module: known for module in model.modules() if (known := recognise(module)) is not None}
        graph = Graph({module: NormUsage(known) for module, known in found.items() if isinstance(known, Norm)})
        if graph.usages:
            _observe(graph, layers, model, run)
        owners, idle, around = _owners(model), _idle(graph, layers, model), wrappers(model)
        with without_autocast(model):
            reasons = {
                module: known
                if isinstance(known, str)
                else _left_out(names[module], include, exclude)
                or _reason(graph, graph.usages[module], names, owners)
                or _unknown(graph, graph.usages[module], names, idle, around)
                for module, known in found.items()
            }
        chosen = [graph.usages[module] for module, reason in reasons.items() if not reason]
        if chosen and not dry_run:
            merge(model, run, chosen)
    return [_record(names, graph, module, reasons) for module in found]


def _observe(graph: Graph, layers: set[nn.Module], model: nn.Module, run: Callable[[], Any]) -> None:
    """Run a model in the caller's autocast, in training and evaluation mode, and note what is seen."""
    with untouched(model):
        model.train()
        with torch.enable_grad(), _explained("training"):
            observe(graph, layers, model, run)
    for mode in (True, False):  # without gradients, what holds an output is not autograd
        with untouched(model):
            model.train(mode)
            with torch.no_grad(), _explained("training" if mode else "evaluation"):
                observe(graph, layers, model, run)


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
    with torch.inference_mode(False), torch.no_grad(), without_autocast(model):
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


def _run(model: nn.Module, inputs: Inputs) -> Any:
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    if callable(inputs):
        return inputs(model)
    raise UsageError(
        f"example_inputs: expected a tensor, tuple, dictionary or function, got {type(inputs).__name__}"
    )


@contextmanager
def _explained(mode: str) -> Iterator[None]:
    """Name the mode in which a model could not be run."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UsageError(f"the model does not run on the example inputs in {mode}: {line}") from error


# ------------------------------------------------------------------------------------------- what cannot be merged


def _left_out(name: str, include: str | Sequence[str] | None, exclude: str | Sequence[str] | None) -> str:
    if include is not None and not _fits(name, include):
        return "left out: no pattern of include matches"
    return "left out: a pattern of exclude matches" if exclude is not None and _fits(name, exclude) else ""


def _fits(name: str, patterns: str | Sequence[str]) -> bool:
    return any(fnmatchcase(name, one) for one in ([patterns] if isinstance(patterns, str) else patterns))


def _reason(graph: Graph, usage: NormUsage, names: Mapping[nn.Module, str], owners: Owners) -> str:
    """Return why a norm cannot be merged; `""` if it can."""
    module = usage.norm.module
    own = _own_blocker(usage.norm, names)
    if own or usage.blocker:
        return own or usage.blocker
    if not names[module]:
        return "it is the model itself"
    if other := _tied(owners, module):
        return f"its parameters are shared with {names[other]}"
    if module in graph.outside:
        return "its parameters are read outside of it too"
    if not usage.layers:
        return "no linear layer reads its output, or it does not run"
    for layer in usage.layers:
        if why := _layer_reason(graph, usage, layer, names, owners):
            return f"{names[layer]}: {why}"
    if not usage.keepers:
        return f"nothing would be shared: {_list(usage, names)} frozen, or keeping a copy of its output"
    return ""


def _idle(graph: Graph, layers: set[nn.Module], model: nn.Module) -> dict[nn.Module, int | None]:
    """Return the layers and norms that did not run, in the model's order, and their widths."""
    parts = {part for layer in layers for part in layer.modules() if part is not layer}
    unseen = layers - parts - set(graph.sources)
    unseen |= {module for module, usage in graph.usages.items() if not usage.unit}
    unseen -= graph.outside
    return {
        module: graph.usages[module].norm.columns if module in graph.usages else width(module)
        for module in model.modules()
        if module in unseen
    }


def _unknown(
    graph: Graph,
    usage: NormUsage,
    names: Mapping[nn.Module, str],
    idle: Mapping[nn.Module, int | None],
    around: Mapping[nn.Module, nn.Module],
) -> str:
    """Return a module that the example does not run but that may read the norm or feed its layers; `""` if none.

    Only the innermost module that holds the norm and all of its layers is searched.
    """
    if usage.norm.weight is None and usage.norm.bias is None:
        return ""
    for layer in usage.layers:
        if layer in around:
            return f"{names[layer]}: it is in a {type(around[layer]).__name__}, which may change what it computes"
    paths = [names[module].split(".")[:-1] for module in (usage.norm.module, *usage.layers)]
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
    for module, columns in idle.items():
        if columns == usage.norm.columns and names[module].split(".")[: len(shared)] == shared:
            use = "feed the same layers" if module in graph.usages else "read its output"
            return f"{names[module]} does not run on the example inputs, but may {use} in another run"
    return ""


def _own_blocker(norm: Norm, names: Mapping[nn.Module, str]) -> str:
    module = norm.module
    if has_hooks(module):
        return "it has hooks, which would be lost"
    if "forward" in vars(module):
        return "its forward is replaced"
    for parameter in module.parameters():
        if type(parameter) is not nn.Parameter:
            return f"its parameters are {type(parameter).__name__}"
        if not bool(parameter.isfinite().all()):
            return "its parameters are not all finite"
    zeros = 0 if norm.alpha is None else int((norm.alpha == 0).sum())
    return f"α is 0 in {zeros} of {norm.columns} places: merged weights would be lost there" if zeros else ""


def _layer_reason(
    graph: Graph, usage: NormUsage, layer: nn.Module, names: Mapping[nn.Module, str], owners: Owners
) -> str:
    """Return why a layer that reads a norm cannot take up its α and β."""
    sources = graph.sources[layer]
    if None in sources:
        return "it reads something else too"
    if len(sources) > 1:
        return f"several norms meet there: {', '.join(sorted(names[one] for one in sources if one is not None))}"
    if layer in graph.crossed:
        return "its inputs are not the rows that the norm normalises"
    if why := blocker(layer):
        return why
    for part in layer.modules():
        if other := _tied(owners, part):
            return f"its weight is tied to {names[other]}"
        if part in graph.outside:
            return "its parameters are read outside of it too"
    alpha, beta = usage.norm.alpha, usage.norm.beta
    if alpha is not None and (why := range_trouble(layer, alpha, usage.largest)):
        return why
    if beta is not None and ambiguous(layer, beta):
        return "it has several adapters, and β would give each of them another bias"
    return ""


def _tied(owners: Owners, module: nn.Module) -> nn.Module | None:
    """Return another module that has a parameter of this one."""
    for parameter in module.parameters(recurse=False):
        for other in owners.get(storage(parameter), ()):
            if other is not module:
                return other
    return None


def _owners(model: nn.Module) -> Owners:
    """Return the modules that have parameters in a storage, by its identity."""
    owners: Owners = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(storage(parameter), []).append(module)
    return owners


def _list(usage: NormUsage, names: Mapping[nn.Module, str]) -> str:
    return ", ".join(names[layer] for layer in usage.layers)


def _record(
    names: Mapping[nn.Module, str], graph: Graph, module: nn.Module, reasons: Mapping[nn.Module, str]
) -> SiteRecord:
    """Return the record of a norm: merged if there is no reason against it."""
    name, kind, reason = names[module], type(module).__name__, reasons[module]
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
        f"merged into {_list(usage, names)}",
        before,
        usage.rows * number,
        shared=True,
    )
