"""How far the gradients of each layer are off, from what the layers really compute."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor, nn

import fitact
from fitact.base import JobError

from .antibodies import IGNORED, Batch

Options = dict[str, Any] | None  # of fitact.convert; None leaves the model as it is
BASELINE, EXACT = "baseline", "exact"
PARTS = {  # of a layer of BERT → what is differentiated by
    "attention": "weights of attention",
    "intermediate": "weights of intermediate.dense",
    "output": "weights of output.dense",
    "input": "input of the layer",
}
COLORS = {
    "baseline": "#222222",
    "rounding": "#3182bd",
    "bits8": "#756bb1",
    "coarse": "#e6ab02",
    "fewbit3": "#d94701",
    "inverted1": "#1b9e77",
}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy of the masked residues in nats."""
    return F.cross_entropy(logits_of(model, batch).flatten(0, 1), batch[2].flatten(), ignore_index=IGNORED)


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits, (sequences, length, tokens)."""
    logits: Tensor = model(input_ids=batch[0], attention_mask=batch[1]).logits
    return logits


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a BERT, from the first on."""
    return list(model.get_submodule("bert.encoder.layer").children())


def gradients(model: nn.Module, batch: Batch) -> dict[tuple[int, str], Tensor]:
    """Return the gradients of the loss, by layer and part, flat and in float64."""
    inputs: dict[int, Tensor] = {}

    def note(i: int) -> Any:
        def hook(_module: Any, arguments: tuple[Tensor, ...]) -> None:
            arguments[0].retain_grad()
            inputs[i] = arguments[0]

        return hook

    layers = layers_of(model)
    hooks = [layer.register_forward_pre_hook(note(i)) for i, layer in enumerate(layers)]
    model.zero_grad()
    loss_of(model, batch).backward()
    for hook in hooks:
        hook.remove()
    measured: dict[tuple[int, str], Tensor] = {}
    for i, layer in enumerate(layers):
        weights: dict[str, list[Tensor]] = {}
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                assert module.weight.grad is not None
                weights.setdefault(name.partition(".")[0], []).append(module.weight.grad)
        weights["input"] = [_there(inputs[i].grad)]
        for part in PARTS:
            measured[i, part] = torch.cat([grad.double().flatten() for grad in weights[part]])
    return measured


def errors(model: nn.Module, batch: Batch, methods: dict[str, Options]) -> Iterator[dict[str, Any]]:
    """Yield the relative errors (Frobenius) of gradients: a row for each method and each layer, from 1 on.

    The model computes in float32, as it is or converted; what they are compared with, in float64. `bits` says
    whether all gradients of the layer are bit for bit those of the baseline in float32.

    Raises:
        JobError: `exact` does not have the gradients of the baseline.

    """
    exact = gradients(copy.deepcopy(model).double(), batch)
    baseline = gradients(copy.deepcopy(model), batch)
    for method, options in methods.items():
        changed = copy.deepcopy(model)
        if options is not None:
            fitact.convert(changed, **options)
        measured = gradients(changed, batch)
        for i in range(len(layers_of(model))):
            same = all(torch.equal(measured[i, part], baseline[i, part]) for part in PARTS)
            if method in (BASELINE, EXACT) and not same:
                raise JobError(f"layer {i + 1}, {method}: expected the gradients of the baseline, bit for bit")
            off = {part: (measured[i, part] - exact[i, part]).norm() / exact[i, part].norm() for part in PARTS}
            yield (
                {"method": method, "layer": i + 1}
                | {part: float(f"{float(value):.4g}") for part, value in off.items()}
                | {"bits": same}
            )


def pre_activations(model: nn.Module, batch: Batch) -> list[dict[str, float]]:
    """Return deviation and ends of what goes into each layer's activation, padding counted."""
    seen: list[Tensor] = []
    dense = [layer.get_submodule("intermediate.dense") for layer in layers_of(model)]
    hooks = [each.register_forward_hook(lambda _module, _arguments, output: seen.append(output)) for each in dense]
    with torch.no_grad():
        logits_of(model, batch)
    for hook in hooks:
        hook.remove()
    return [
        {"layer": i, **{key: float(f"{float(value):.4g}") for key, value in _described(x).items()}}
        for i, x in enumerate(seen, 1)
    ]


def _described(x: Tensor) -> dict[str, Tensor]:
    return {"deviation": x.std(), "least": x.min(), "most": x.max()}


def draw(rows: list[dict[str, Any]], labels: dict[str, str], path: Path) -> None:
    """Draw the errors by depth, a panel for each part, as PNG; `exact` lies on the baseline's line."""
    figure = Figure(figsize=(7, 5.4), layout="constrained")
    grid = figure.subplots(2, 2, sharex=True, sharey=True)
    methods = [method for method in COLORS if any(row["method"] == method for row in rows)]
    for axes, (part, title) in zip(grid.flat, PARTS.items(), strict=True):
        for method in methods:
            of = [row for row in rows if row["method"] == method]
            # an error of 0 has no place on a logarithmic axis
            y = [row[part] or math.nan for row in of]
            axes.plot(
                [row["layer"] for row in of], y, marker="o", markersize=3, color=COLORS[method], linewidth=1.3
            )
        axes.set_yscale("log")
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(axis="y", color="#e5e5e5", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[1]:
        axes.set_xlabel("layer, from the input on", fontsize=9)
    figure.supylabel("relative error of the gradient", fontsize=9)
    lines = [Line2D([], [], color=COLORS[method], linewidth=1.8, label=labels[method]) for method in methods]
    figure.legend(handles=lines, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.suptitle("AntiBERTy: gradients of one batch in float32, against float64", fontsize=10)
    figure.savefig(path, dpi=130)


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
