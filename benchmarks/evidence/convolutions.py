"""What convolutional networks save in `fitact.saving`, and how far their gradients are off.

    python -m benchmarks.evidence.convolutions [-o RESULTS.json]

Networks of timm with random weights, in training mode, in float32, with a batch of random images. Bytes are those
that autograd saves, and an error is that of the gradient of all parameters (Frobenius).
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fitact
from fitact.runtime.measure import count_saved, imported

RESULTS = Path(__file__).parents[1] / "results" / "convolutions.json"
NETWORKS = {
    "VGG-16": "vgg16",
    "ResNet-18": "resnet18",
    "RegNetX": "regnetx_002",
    "DenseNet-121": "densenet121",
    "MobileNetV2": "mobilenetv2_050",
    "EfficientNet-B0": "efficientnet_b0",
    "MobileNetV3": "mobilenetv3_small_050",
}
BATCH, SIZE, CLASSES = 8, 64, 10
Policy = Mapping[str, Any]  # arguments of fitact.saving
POLICIES: Mapping[str, Policy] = {
    "exact": {},
    "rounding": {"error": "rounding"},
    "rounding, batch norms too": {"error": "rounding", "bits": {"batch_norm": 8}},
    "coarse": {"error": "coarse"},
}


def step(model: nn.Module, images: Tensor, answers: Tensor, policy: Policy | None) -> tuple[int, Tensor]:
    """Return the bytes that are saved and the gradient, with a policy, or as PyTorch does it."""
    model.zero_grad()
    with count_saved(model) as saved, nullcontext() if policy is None else fitact.saving(**policy):
        scores = model(images)
    F.cross_entropy(scores, answers).backward()
    return saved.bytes, torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def rows(batch: int, size: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each network."""
    for name, kind in NETWORKS.items():
        torch.manual_seed(0)
        model = imported("timm").create_model(kind, num_classes=CLASSES).train()
        images, answers = torch.randn(batch, 3, size, size), torch.randint(0, CLASSES, (batch,))
        before, baseline = step(model, images, answers, None)
        row: dict[str, Any] = {"network": name, "saved": {}, "error": {}}
        for label, policy in POLICIES.items():
            after, gradient = step(model, images, answers, policy)
            row["saved"][label] = float(f"{after / before:.3g}")
            row["error"][label] = float(f"{float((gradient - baseline).norm() / baseline.norm()):.3g}")
        yield row


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the document's table."""
    lines = [f"| | exact | {' | error | '.join([*POLICIES][1:])} | error |", f"|---|{'---:|' * 7}"]
    for row in rows:
        saved, error = ({key: f"{100 * of:.2g}" for key, of in row[part].items()} for part in ("saved", "error"))
        pairs = [text for name in [*POLICIES][1:] for text in (saved[name], error[name])]
        lines.append(f"| {' | '.join((row['network'], saved['exact'], *pairs))} |")
    return lines


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=BATCH, help="images")
    parser.add_argument("--size", type=int, default=SIZE, help="pixels")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record = {
        "machine": f"{platform.machine()}, {platform.system()}",
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "timm": imported("timm").__version__,
        "batch": arguments.batch,
        "size": arguments.size,
        "rows": list(rows(arguments.batch, arguments.size)),
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(record["rows"])))
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
