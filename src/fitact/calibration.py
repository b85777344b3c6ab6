"""Weights from data: a model is run, and what goes into its activations becomes a weight for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fitact.base import LISTED, UsageError, starred
from fitact.fitter.records import Calibration, Site, site
from fitact.runtime.choose import Gathered, gather
from fitact.runtime.measure import Sketch

if TYPE_CHECKING:
    from torch import nn


def calibrate(model: nn.Module, batches: Iterable[Any], *, group: bool = False) -> Calibration:
    """Run a model on batches, and return what goes into each of its activations as a weight for fits.

    Activations are modules, functions that modules hold, and calls of PyTorch's functions such as `F.silu` in a
    `forward`. Those that are called in place (`torch.relu_`), or composed of other operations, are not seen.

        calibration = fitact.calibrate(model, [(tokens,) for tokens in samples], group=True)
        Path("weights.json").write_text(calibration.to_json())

    No tensor is stored. Inputs are counted in fixed cells, even steps of asinh(1024 x): each is at most 7.6e-6 or
    1/128 of x wide. A weight is 95 % a histogram of about 128 cells, whose edges are quantiles, closer in the
    tails; and 5 % Student's t with 3 degrees of freedom and the inputs' mean and deviation, for what was not seen.

    Args:
        model: the model, with values. It is run in the mode it is in, without gradients, and is left as it was, as
            are the generators of random numbers.
        batches: each is a tensor, a tuple or list of positional arguments, a mapping of named ones, or a function
            that takes the model and runs it.
        group: whether activations whose paths differ only in numbers share one weight.

    Returns:
        The sites; `weight(path)` is what `fit` of `fitter.methods.fewbit` takes.

    Raises:
        UsageError: the model cannot be run with a batch, or no activation was seen.

    """
    inputs, notes = gather(model, batches)
    if group:
        inputs, notes = list(_grouped(inputs)), list(dict.fromkeys(map(starred, notes)))
    for path, _, sketch in inputs:
        if sketch.left_out:
            notes.append(f"{path}: {sketch.left_out:,} numbers are NaN, infinite or huge, and not counted")
    sites = [_site(*gathered) for gathered in inputs if gathered[-1].count]
    if not sites:
        raise UsageError("; ".join(["no input of an activation was seen in the model", *notes[:LISTED]]))
    return Calibration(tuple(sites), tuple(notes))


def _grouped(inputs: Iterable[Gathered]) -> Iterator[Gathered]:
    """Merge what was gathered at paths that differ only in numbers, for the same activation."""
    groups: dict[tuple[str, str], Sketch] = {}
    for path, activation, sketch in inputs:
        first = groups.setdefault((starred(path), activation), sketch)
        if first is not sketch:
            first.merge(sketch)
    activations = Counter(path for path, _ in groups)
    for (path, activation), sketch in groups.items():
        yield path if activations[path] == 1 else f"{path} ({activation})", activation, sketch


def _site(path: str, activation: str, sketch: Sketch) -> Site:
    return site(
        path,
        activation,
        left_out=sketch.left_out,
        mean=sketch.mean,
        deviation=sketch.deviation,
        extremes=(sketch.least, sketch.largest),
        cells=sketch.cells(),
    )
