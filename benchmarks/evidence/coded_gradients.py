"""How far gradients are off when an MLP keeps codes of its activation's input, beside float8 and int8.

    python -m benchmarks.evidence.coded_gradients [--steps N] [-o RESULTS.json]

from the root of the repository; a minute. The small transformers of benchmarks/convergence are trained on
characters, one with GELU, one with SwiGLU. Of a batch that they have not seen, each MLP's pre-activations,
weights and gradient of the output are taken. Then the gradients of down(f(x)) or down(f(x) · u) are computed in
float64, from x and u themselves and from what was kept of them. An error is the norm of the difference over that
of the gradient (Frobenius), its root mean square over the layers. The same follows for pre-activations of which
four channels of x and four others of u are multiplied by 30 to 100, or by 3 to 10, and for pre-activations
multiplied to have a given standard deviation.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..convergence.keeping import EXACT, KEEPERS, Keeper, backward
from ..convergence.models import Block
from ..convergence.tasks import SMALL, TASKS, Recipe
from ..convergence.training import loss_of

STEPS = 300
RATE = 4e-3
DEVIATIONS = (0.05, 0.1, 0.3, 0.5, 1.0, 2.0, 4.0)
FACTORS = {"outliers": (30.0, 50.0, 70.0, 100.0), "mild outliers": (3.0, 5.0, 7.0, 10.0)}  # of channels
MODELS = {"gelu": "characters", "silu": "gated"}  # function → task
BOTH = (
    "coded8",
    "coded8_wide",
    "e4m3",
    "e4m3_scaled",
    "e5m2",
    "e5m2_scaled",
    "int8_row",
    "int8_block",
    "bfloat16",
)


@dataclass(frozen=True)
class Site:
    """An MLP after its first layer, in float64.

    Attributes:
        function: name of f.
        x: input of f, (rows, width).
        u: the other factor, (rows, width); None if the MLP is not gated.
        weight: of the layer that follows, (outputs, width).
        dz: gradient of its output, (rows, outputs).

    """

    function: str
    x: Tensor
    u: Tensor | None
    weight: Tensor
    dz: Tensor


def sites(task: str, recipe: Recipe, seed: int = 0) -> list[Site]:
    """Train a model and return its MLPs at one batch more."""
    torch.manual_seed(seed)
    model = TASKS[task].model(recipe)
    data = TASKS[task].data(recipe, seed, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.rate, recipe.steps, pct_start=0.1)
    for _ in range(recipe.steps):
        optimizer.zero_grad()
        loss_of(model, next(data.training), SMALL).backward()
        optimizer.step()
        schedule.step()

    outputs: dict[tuple[int, str], Tensor] = {}
    blocks = [block for block in model.blocks if isinstance(block, Block)]

    def note(place: tuple[int, str]) -> Any:
        def hook(_module: Any, _arguments: Any, output: Tensor) -> None:
            output.retain_grad()
            outputs[place] = output

        return hook

    for i, block in enumerate(blocks):
        for name in ("up", "gate", "down"):
            layer = getattr(block, name)
            if layer is not None:
                layer.register_forward_hook(note((i, name)))
    loss_of(model, data.validation[0], SMALL).backward()

    def rows(tensor: Tensor | None) -> Tensor:
        assert tensor is not None
        return tensor.detach().double().flatten(0, -2)

    found = []
    for i, block in enumerate(blocks):
        weight, dz = block.down.weight.detach().double(), rows(outputs[i, "down"].grad)
        if block.gate is None:
            found.append(Site("gelu", rows(outputs[i, "up"]), None, weight, dz))
        else:
            found.append(Site("silu", rows(outputs[i, "gate"]), rows(outputs[i, "up"]), weight, dz))
    return found


def with_outliers(site: Site, factors: tuple[float, ...]) -> Site:
    """Return a site of which as many channels of x, and as many others of u, are multiplied by factors."""
    width = site.x.shape[1]
    chosen = torch.randperm(width, generator=torch.Generator().manual_seed(1))[: 2 * len(factors)]
    scales = torch.ones(2, width, dtype=torch.float64)
    for scale, channels in zip(scales, chosen.view(2, -1), strict=True):
        scale[channels] = torch.tensor(factors, dtype=torch.float64)
    return replace(site, x=site.x * scales[0], u=None if site.u is None else site.u * scales[1])


def with_deviation(site: Site, deviation: float) -> Site:
    """Return a site whose x, and u, are multiplied to have a standard deviation."""
    x, u = (None if t is None else t * (deviation / t.std()) for t in (site.x, site.u))
    assert x is not None
    return replace(site, x=x, u=u)


def errors(site: Site, keep_x: Keeper, keep_u: Keeper) -> dict[str, float]:
    """Return the relative errors of dx, du and dW when this is kept of x and of u."""
    exact = backward(site.dz, site.weight, EXACT.stand_ins(site.function, site.x), site.u)
    u = None if site.u is None else keep_u.stand_ins("identity", site.u)[0]
    near = backward(site.dz, site.weight, keep_x.stand_ins(site.function, site.x), u)
    return {
        name: float((b - a).norm() / a.norm())
        for name, a, b in zip(("dx", "du", "dw"), exact, near, strict=True)
        if a is not None and b is not None
    }


def pairs(function: str) -> Iterator[tuple[Keeper, Keeper]]:
    """Yield what is kept of x and of u."""
    for keeper in KEEPERS.values():
        yield keeper, EXACT
    if function == "silu":
        for name in BOTH:
            yield KEEPERS[name], KEEPERS[name]
        yield KEEPERS["coded6"], KEEPERS["coded8"]


def variants(found: list[Site]) -> Iterator[tuple[str, list[Site]]]:
    """Yield names and sites: as trained, with outlier channels, of given deviations."""
    yield "trained", found
    for name, factors in FACTORS.items():
        yield name, [with_outliers(site, factors) for site in found]
    for deviation in DEVIATIONS:
        yield f"deviation {deviation:g}", [with_deviation(site, deviation) for site in found]


def measured(found: list[Site]) -> Iterator[dict[str, Any]]:
    """Yield a row for each variant and for each way to keep x and u."""
    for variant, changed in variants(found):
        for keep_x, keep_u in pairs(found[0].function):
            each = [errors(site, keep_x, keep_u) for site in changed]
            means = {name: (sum(one[name] ** 2 for one in each) / len(each)) ** 0.5 for name in each[0]}
            row = {"function": found[0].function, "inputs": variant, "x": keep_x.name}
            yield (
                row
                | ({"u": keep_u.name} if found[0].u is not None else {})
                | {name: float(f"{mean:.4g}") for name, mean in means.items()}
            )


def described(found: list[Site]) -> list[dict[str, Any]]:
    """Return mean, deviation and ends of the pre-activations of each layer."""
    return [
        {"function": site.function, "layer": i, "factor": name}
        | {
            key: float(f"{float(value):.4g}")
            for key, value in {"mean": t.mean(), "std": t.std(), "least": t.min(), "most": t.max()}.items()
        }
        for i, site in enumerate(found)
        for name, t in (("x", site.x), ("u", site.u))
        if t is not None
    ]


def table(rows: list[dict[str, Any]], variant: str) -> str:
    """Return the rows of a variant as text."""
    lines = [f"{variant}: relative errors", f"{'':6}{'x':34}{'u':34}{'dx':>10}{'du':>10}{'dW':>10}"]
    labels = {name: keeper.label for name, keeper in (KEEPERS | {EXACT.name: EXACT}).items()}
    for row in rows:
        if row["inputs"] == variant:
            numbers = "".join(f"{row[key]:10.5f}" if key in row else f"{'':10}" for key in ("dx", "du", "dw"))
            lines.append(f"{row['function']:6}{labels[row['x']]:34}{labels.get(row.get('u', ''), ''):34}{numbers}")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=STEPS, help="of training")
    default = Path(__file__).parents[1] / "results" / "coded_gradients.json"
    parser.add_argument("-o", "--output", type=Path, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recipe = replace(SMALL.recipes["characters"], steps=arguments.steps, rate=RATE, validation=8)
    found = {function: sites(task, recipe) for function, task in MODELS.items()}
    rows = [row for each in found.values() for row in measured(each)]
    record = {
        "machine": f"{platform.machine()}, {platform.system()}",
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "steps": arguments.steps,
        "channels multiplied by": FACTORS,
        "inputs": [one for each in found.values() for one in described(each)],
    }
    head = json.dumps(record, indent=1).removesuffix("\n}")
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    arguments.output.write_text(f'{head},\n "rows": [\n  {lines}\n ]\n}}\n', encoding="utf-8")
    print("\n\n".join(table(rows, variant) for variant in dict.fromkeys(row["inputs"] for row in rows)))
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
