"""How far the gradient of a whole model is off when the inputs of checkpointed blocks are quantised, by depth.

    python -m benchmarks.evidence.checkpoints [--steps N] [-o RESULTS.json]

from the root of the repository; five minutes. The small transformer of benchmarks/convergence, with 4, 12 and 32
blocks, is trained on characters. Then each block is checkpointed, and the gradient of all parameters at a batch
that it has not seen is compared with that of PyTorch's checkpoints in the same dtype, as in
benchmarks/evidence/blocks: with *outliers*, four features of each norm are 30 to 100 times as large. The float8
codes from there stand in the same places.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fitact

from ..convergence.tasks import SMALL, Batch, Recipe
from ..convergence.training import loss_of
from ..rivals import RIVALS, in_place_of_block_codes
from .blocks import DTYPES, record, trained, with_outliers

RESULTS = Path(__file__).parents[1] / "results" / "checkpoints.json"
DEPTHS, STEPS = (4, 12, 32), 200
FLOAT8 = "e4m3, 1×128"
ERRORS: Mapping[str, str] = {"8 bits": "rounding", "4 bits": "coarse", FLOAT8: "rounding"}


def gradient(model: nn.Module, batch: Batch, error: str) -> Tensor:
    """Return the gradient of all parameters with each block checkpointed, float64 (parameters,)."""
    model = copy.deepcopy(model)
    for block in model.get_submodule("blocks").children():
        block.forward = partial(fitact.checkpoint, block.forward, error=error)
    loss_of(model, batch, SMALL).backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def errors(model: nn.Module, batch: Batch) -> Iterator[tuple[str, float]]:
    """Yield codes and relative errors of the gradient."""
    baseline = gradient(model, batch, "exact")
    for name, error in ERRORS.items():
        with in_place_of_block_codes(name) if name in RIVALS else nullcontext():
            changed = gradient(model, batch, error)
        yield name, float(f"{float((changed - baseline).norm() / baseline.norm()):.3g}")


def rows(recipe: Recipe, depths: tuple[int, ...] = DEPTHS) -> Iterator[dict[str, Any]]:
    """Yield the errors of each depth, with and without outliers, in each dtype."""
    for depth in depths:
        model, batch = trained("characters", replace(recipe, layers=depth))
        for variant, changed in {"trained": model, "outliers": with_outliers(model)}.items():
            for dtype, kind in DTYPES.items():
                measured = dict(errors(changed.to(kind), batch))
                yield {"blocks": depth, "inputs": variant, "dtype": dtype, "error": measured}
                print(depth, variant, dtype, measured, flush=True)
        model.float()


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the document's table."""
    lines = [f"| errors in % | {' | '.join(ERRORS)} |", f"|---|{'---:|' * len(ERRORS)}"]
    for row in rows:
        numbers = " | ".join(f"{100 * row['error'][name]:.2g}" for name in ERRORS)
        outliers = ", outliers" * (row["inputs"] == "outliers")
        lines.append(f"| {row['blocks']} blocks, {row['dtype']}{outliers} | {numbers} |")
    return lines


if __name__ == "__main__":
    record(__doc__, RESULTS, STEPS, {"rows": rows}, table)
