"""Merging the α and β of norms into the linear layers that follow (Approx-BP, section 5, App. G).

    from fitact.runtime.merge import merge_norms, unmerge_norms
    sites = merge_norms(model, (inputs,))

A norm z·α + β becomes a memory-sharing one, which returns z, and each linear layer W·x + b that reads it becomes
W·diag(α)·z + (Wβ + b); of an adapter B·A·x of peft, A becomes A·diag(α) and b gains scale·B·A·β too. In real
arithmetic the model computes what it did, but z is kept once, for norm and layers, and x no more.

What changes: α and β are no parameters any more, neither trained nor in the state dict, so training goes another
way (the paper finds a slightly faster one); a layer without a bias gets one if there is a β, trained if β was. A
frozen weight is changed too, if an adapter or another layer keeps z.

So: load the weights before; merge before the optimizer is made and the model is compiled or spread over processes.
Weights or adapters of the model as it was do not fit the merged one: unmerge, load, and merge again.

What the example does not run is not seen. A branch that in another run reads the norm's output with something else
than a linear layer, or gives these layers something else, is then silently wrong: have the example run every
branch, or exclude the norm. What is taken from inside of the model, as the last hidden state of a transformer
without its head, is z. And an adapter whose B is not 0 when the norm has a β leaves its scale·B·A·β in the layer's
bias when it is disabled, scaled or unloaded: unmerge before that.
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

from .conversion import Site
from .merge_apply import Merged, merge, present, unmerge
from .merge_graph import Graph, Reading, observe, storage, untouched
from .merge_layers import Norm, ambiguous, is_layer, overflows, recognise, trouble, width, wrappers

Owners = dict[int | None, list[nn.Module]]
Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any] | Callable[[nn.Module], Any]


def merge_norms(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    dry_run: bool = False,
) -> list[Site]:
    """Replace norms by memory-sharing ones, in place, and merge α and β into the linear layers that read them.

    The model is run on the example inputs, in training (with gradients enabled: it takes the memory of a forward
    pass; then without) and in evaluation, to see what reads and keeps the output of each norm: `nn.LayerNorm`,
    `nn.RMSNorm`, and any module that is found to compute as they do, with its weight as it is or counted from 1. A
    norm is left alone, and the reason given, if anything but linear layers reads its output (a residual sum,
    dropout, a convolution, a copy, the caller), or a layer that reads something else too; if no layer keeps it,
    all being frozen, so that nothing would be shared; if a weight is tied, quantised, computed, or spread over
    processes; if its output is held after the run; if an α is 0, or a weight times α would overflow; or if the
    innermost module that has the norm and its layers has another linear layer or norm of that width that the
    example does not run (another expert or head, the original of one of peft's `modules_to_save`).

    Then the outputs in evaluation are compared. They may differ, in the 2-norm relative to each output, by 16
    times as much as when the same weights are changed by one rounding (of their dtype, or of the norm's output if
    that is coarser), plus 16 roundings: how far rounding carries depends on the model, so it is measured on it. If
    they differ more, or by a half, or if there is an error, everything is as it was. In float32 the limit is some
    1e-5; in half precision only gross errors exceed it. Meanwhile the CPU holds a copy of the weights concerned.
    Training flags, buffers, gradients and the random state of PyTorch and Python stay as they are.

    Args:
        model: of real tensors, not compiled.
        example_inputs: a tensor, a tuple of positional or a dictionary of named arguments, or a function that is
            called with the model, runs it (under autocast, say) and returns its outputs.
        include: patterns of paths, as `encoder.*`; only norms of which one fits are merged.
        exclude: patterns of paths of norms that are not merged.
        dry_run: whether nothing is changed.

    Returns:
        A record of each norm, in the model's order: `reason` says which layers took up its α and β, or why it is
        left alone; `kept_before` and `kept_after` are the bytes that autograd keeps in a forward pass of the
        example for the norm and nothing else (of what several merged norms keep, the first has it all; what
        each layer keeps under autocast as its own copy of the norm's output goes too, and is not counted).

    Raises:
        UsageError: the model cannot be run, returns no tensors, is compiled or distributed, or its tensors are not
            real ones.
        JobError: the outputs differed.

    """
    _check(model)
    names = {module: name for name, module in model.named_modules()}
    found = {module: form for module in model.modules() if (form := recognise(module)) is not None}
    layers = {module for module in model.modules() if is_layer(module)}
    graph = Graph({module: Reading(form) for module, form in found.items() if isinstance(form, Norm)})

    def run() -> Any:
        return _run(model, example_inputs)

    if graph.readings:
        with untouched(model):
            model.train()
            with torch.enable_grad(), _explained("training"):
                observe(graph, layers, model, run)
        for mode in (True, False):  # without gradients, what holds an output is not autograd
            with untouched(model):
                model.train(mode)
                with torch.no_grad(), _explained("training" if mode else "evaluation"):
                    observe(graph, layers, model, run)
    owners, idle, around = _owners(model), _idle(graph, layers, model), wrappers(model)
    reasons = {
        module: form
        if isinstance(form, str)
        else _left_out(names[module], include, exclude)
        or _reason(graph, graph.readings[module], names, owners)
        or _unknown(graph, graph.readings[module], names, idle, around)
        for module, form in found.items()
    }
    chosen = [graph.readings[module] for module, reason in reasons.items() if not reason]
    if chosen and not dry_run:
        merge(model, run, chosen)
    return [_site(names, graph, module, reasons) for module in found]


def unmerge_norms(model: nn.Module) -> list[str]:
    """Put back the norms that `merge_norms` has replaced, in place, and take α and β out of the layers again.

    By division: so a model that was trained meanwhile computes what it did as merged; its norms have the α and β
    of old, its layers what was trained. It costs no memory in between, and where nothing was trained the weights
    are as they were but for two roundings of their dtype. A bias that merging added goes, unless it was trained.
    LoRA adapters that were added meanwhile are divided too.

    Returns:
        The paths of these norms.

    Raises:
        UsageError: a layer was replaced meanwhile (as by quantising), or has an adapter other than peft's LoRA;
            nothing is changed then.

    """
    places = [
        (name, module, present(model, name, module.merged))
        for name, module in model.named_modules()
        if isinstance(getattr(module, "merged", None), Merged)
    ]
    with torch.no_grad():
        for _, module, layers in places:
            unmerge(model, module, module.merged, layers)
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
        if parameter.device.type == "meta" or isinstance(parameter, torch._subclasses.FakeTensor):
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
        return "left out: no pattern of include fits"
    return "left out: a pattern of exclude fits" if exclude is not None and _fits(name, exclude) else ""


def _fits(name: str, patterns: str | Sequence[str]) -> bool:
    return any(fnmatchcase(name, one) for one in ([patterns] if isinstance(patterns, str) else patterns))


def _reason(graph: Graph, reading: Reading, names: Mapping[nn.Module, str], owners: Owners) -> str:
    """Return why a norm cannot be merged, `""` if it can."""
    module = reading.norm.module
    own = _own_trouble(reading.norm, names)
    if own or reading.trouble:
        return own or reading.trouble
    if not names[module]:
        return "it is the model itself"
    if other := _tied(owners, module):
        return f"its parameters are shared with {names[other]}"
    if module in graph.outside:
        return "its parameters are read outside of it too"
    if not reading.layers:
        return "no linear layer reads its output, or it does not run"
    for layer in reading.layers:
        if why := _layer_reason(graph, reading, layer, names, owners):
            return f"{names[layer]}: {why}"
    if not reading.keepers:
        return f"nothing would be shared: {_list(reading, names)} frozen, or keeping a copy of its output"
    return ""


def _idle(graph: Graph, layers: set[nn.Module], model: nn.Module) -> dict[nn.Module, int | None]:
    """Return the layers and norms of which nothing was seen, in the model's order, and their widths."""
    parts = {part for layer in layers for part in layer.modules() if part is not layer}
    unseen = layers - parts - set(graph.sources)
    unseen |= {module for module, reading in graph.readings.items() if not reading.unit}
    unseen -= graph.outside
    return {
        module: graph.readings[module].norm.columns if module in graph.readings else width(module)
        for module in model.modules()
        if module in unseen
    }


def _unknown(
    graph: Graph,
    reading: Reading,
    names: Mapping[nn.Module, str],
    idle: Mapping[nn.Module, int | None],
    around: Mapping[nn.Module, nn.Module],
) -> str:
    """Return what may read a norm or feed its layers when the example does not run it, `""` if nothing.

    What is looked at is the innermost module that holds the norm and all of its layers.
    """
    if reading.norm.weight is None and reading.norm.bias is None:
        return ""
    for layer in reading.layers:
        if layer in around:
            return f"{names[layer]}: it is in a {type(around[layer]).__name__}, which may change what it computes"
    paths = [names[module].split(".")[:-1] for module in (reading.norm.module, *reading.layers)]
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
    for module, columns in idle.items():
        if columns == reading.norm.columns and names[module].split(".")[: len(shared)] == shared:
            use = "feed the same layers" if module in graph.readings else "read its output"
            return f"{names[module]} does not run on the example inputs, but may {use} in another run"
    return ""


def _own_trouble(norm: Norm, names: Mapping[nn.Module, str]) -> str:
    module = norm.module
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
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
    graph: Graph, reading: Reading, layer: nn.Module, names: Mapping[nn.Module, str], owners: Owners
) -> str:
    """Return why a layer that reads a norm cannot take up its α and β."""
    sources = graph.sources[layer]
    if None in sources:
        return "it reads something else too"
    if len(sources) > 1:
        return f"several norms meet there: {', '.join(sorted(names[one] for one in sources if one is not None))}"
    if layer in graph.crossed:
        return "its inputs are not the rows that the norm normalises"
    if why := trouble(layer):
        return why
    for part in layer.modules():
        if other := _tied(owners, part):
            return f"its weight is tied to {names[other]}"
        if part in graph.outside:
            return "its parameters are read outside of it too"
    alpha, beta = reading.norm.alpha, reading.norm.beta
    if alpha is not None and overflows(layer, alpha):
        return "its weight times α would overflow"
    if beta is not None and ambiguous(layer, beta):
        return "it has several adapters, each of which β would give another bias"
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


def _list(reading: Reading, names: Mapping[nn.Module, str]) -> str:
    return ", ".join(names[layer] for layer in reading.layers)


def _site(
    names: Mapping[nn.Module, str], graph: Graph, module: nn.Module, reasons: Mapping[nn.Module, str]
) -> Site:
    """Return the record of a norm: merged if there is no reason against it."""
    name, kind, reason = names[module], type(module).__name__, reasons[module]
    merged = {one for one, why in reasons.items() if not why}
    before = graph.kept_for(module, merged | {module})
    if reason:
        return Site(name, "norm", kind, None, reason, before, before)
    reading = graph.readings[module]
    number = 8 if reading.unit == torch.finfo(torch.float64).eps else 4
    return Site(
        name,
        "norm",
        kind,
        "MSLayerNorm" if reading.norm.centred else "MSRMSNorm",
        f"merged into {_list(reading, names)}",
        before,
        reading.rows * number,
        shared=True,
    )
