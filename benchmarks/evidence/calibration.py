"""How far Few-Bit's gradients of AntiBERTy are off with the shipped fits, and with fits to its own inputs.

    python -m benchmarks.evidence.calibration

from the root of the repository; a minute, and the downloads of benchmarks/evidence/run. `fitact.calibrate` counts
what goes into GELU on sequences to train on. Few-Bit fits with that weight replace the shipped ones, which are for
[−10, 10]. The gradient of all parameters at held-out sequences is compared with the baseline's.
"""

from __future__ import annotations

import copy
import json
import tempfile
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
from torch import nn

import fitact
from fitact.codegen.generate import render
from fitact.fitter.analysis import Activation
from fitact.fitter.methods import fewbit
from fitact.fitter.numerics import Weight

from . import antibodies, gradients

RESULTS = Path(__file__).parents[1] / "results" / "calibration.json"
BITS = (1, 2, 3, 4)
SITE = "bert.encoder.layer.*.intermediate.intermediate_act_fn"


def own(weight: Weight, bits: int) -> type[nn.Module]:
    """Return GELU with a derivative that is fitted to a weight, as a generated class."""
    name = f"gelu_own{bits}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(render(fewbit.fit(Activation.of("gelu"), bits, name, weight=weight)), encoding="utf-8")
        spec = spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    kind: type[nn.Module] = getattr(module, f"GeluOwn{bits}")
    return kind


def main() -> None:
    """Calibrate, fit, measure, print and write."""
    torch.set_num_threads(1)
    genes = antibodies.split(antibodies.receptors(antibodies.fetch(antibodies.ANARCI)))
    model = antibodies.pretrained(antibodies.fetch(antibodies.ANTIBERTY))

    def masked(sequences: list[str], seed: int) -> antibodies.Batch:
        return antibodies.masked(sequences, 0.3, torch.Generator().manual_seed(seed))

    training = [masked(antibodies.evenly(genes.training, 16), seed) for seed in range(3)]
    runs = [partial(gradients.logits_of, batch=batch) for batch in training]
    weight = fitact.calibrate(model, runs, group=True).weight(SITE)
    batch = masked(antibodies.evenly(genes.held_out, 8), 1)

    def gradient(changed: nn.Module) -> torch.Tensor:
        gradients.loss_of(changed, batch).backward()
        return torch.cat([p.grad.double().flatten() for p in changed.parameters() if p.grad is not None])

    baseline = gradient(copy.deepcopy(model))
    kind = type(model.get_submodule(SITE.replace("*", "0")))
    rows = []
    for bits in BITS:
        shipped, fitted = copy.deepcopy(model), copy.deepcopy(model)
        fitact.convert(shipped, "fewbit", bits)
        fitact.convert(fitted, replace={kind: own(weight, bits)})
        off = [float((gradient(fit) - baseline).norm() / baseline.norm()) for fit in (shipped, fitted)]
        rows.append({"bits": bits, "shipped": round(off[0], 4), "calibrated": round(off[1], 4)})
        print(rows[-1], flush=True)
    RESULTS.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
