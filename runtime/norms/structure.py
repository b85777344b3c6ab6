"""Why each norm of a model cannot be merged: by the model's structure, seen when it runs, and by its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from fitact.errors import UsageError
from fitact.runtime.restore import untouched
from fitact.runtime.torch_internals import has_hooks
from fitact.text import one_line

from .dataflow import Graph, NormUsage, observe, outside_autocast, storage
from .linear import Norm, ambiguous, blocker, is_layer, is_plain, range_trouble, recognise, width, wrappers

Owners = dict[int | None, list[nn.Module]]


@dataclass(frozen=True)
class Seen:
    """What was seen of a model and its norms.

    Attributes:
        names: the paths of its modules.
        found: its norms, in the model's order; or why one is not a usable norm.
        graph: which layers read them.
        owners: the modules that have parameters in a storage.
        idle: layers and norms that did not run, and their widths.
        around: adapters that are not those of LoRA, by the layers that they wrap.

    """

    names: Mapping[nn.Module, str]
    found: Mapping[nn.Module, Norm | str]
    graph: Graph
    owners: Owners
    idle: Mapping[nn.Module, int | None]
    around: Mapping[nn.Module, nn.Module]

    def reason(self, module: nn.Module, *, values: bool = True) -> str:
        """Return why a norm cannot be merged; `""` if it can.

        Args:
            module: one of `found`.
            values: whether to look at the values of parameters, too; fake tensors have none.

        """
        known = self.found[module]
        if isinstance(known, str):
            return known
        usage = self.graph.usages[module]
        return _reason(self.graph, usage, self.names, self.owners, values) or _unknown(
            self.graph, usage, self.names, self.idle, self.around
        )


def look(model: nn.Module, run: Callable[[], Any]) -> Seen:
    """Run a model to see what reads and keeps the outputs of its norms; the model stays as it was.

    Args:
        model: the model; its tensors may be fake.
        run: runs it, and returns its outputs.

    Raises:
        UsageError: it cannot be run.

    """
    names = {module: name for name, module in model.named_modules()}
    layers = {module for module in model.modules() if is_layer(module)}
    with outside_autocast(model):
        found = {module: known for module in model.modules() if (known := recognise(module)) is not None}
    graph = Graph({module: NormUsage(known) for module, known in found.items() if isinstance(known, Norm)})
    if graph.usages:
        _observe(graph, layers, model, run)
    return Seen(names, found, graph, _owners(model), _idle(graph, layers, model), wrappers(model))


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


@contextmanager
def _explained(mode: str) -> Iterator[None]:
    """Name the mode in which a model could not be run."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"the model does not run on the example inputs in {mode}: {one_line(error)}") from error


def _reason(graph: Graph, usage: NormUsage, names: Mapping[nn.Module, str], owners: Owners, values: bool) -> str:
    """Return why a norm cannot be merged; `""` if it can."""
    module = usage.norm.module
    own = _own_blocker(usage.norm, values)
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
        if why := _layer_reason(graph, usage, layer, names, owners, values):
            return f"{names[layer]}: {why}"
    if not usage.keepers:
        return f"nothing would be shared: {listed(usage, names)} frozen, or keeping a copy of its output"
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
    """Return why a module that the example does not run may read the norm or feed its layers; `""` if none may.

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


def _own_blocker(norm: Norm, values: bool) -> str:
    module = norm.module
    if has_hooks(module):
        return "it has hooks, which would be lost"
    if "forward" in vars(module):
        return "its forward is replaced"
    for parameter in module.parameters():
        if not is_plain(parameter):
            return f"its parameters are {type(parameter).__name__}"
        if values and not bool(parameter.isfinite().all()):
            return "its parameters are not all finite"
    zeros = 0 if norm.alpha is None or not values else int((norm.alpha == 0).sum())
    return f"α is 0 in {zeros} of {norm.columns} places: merged weights would be lost there" if zeros else ""


def _layer_reason(
    graph: Graph,
    usage: NormUsage,
    layer: nn.Module,
    names: Mapping[nn.Module, str],
    owners: Owners,
    values: bool,
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
    alpha, beta = (usage.norm.alpha, usage.norm.beta) if values else (None, None)
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


def listed(usage: NormUsage, names: Mapping[nn.Module, str]) -> str:
    """Return the paths of the layers that read a norm."""
    return ", ".join(names[layer] for layer in usage.layers)
