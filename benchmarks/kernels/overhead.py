"""What a call costs on a tiny tensor on a CPU, where all is overhead, beside the same call of ops that do nothing.

    python -m benchmarks.kernels.overhead [-o RESULTS.json]

Forward and backward of 16 elements: of shipped activations, of one that is registered as they are but computes
nothing, and of PyTorch's own. Medians in microseconds of one run, and the ratio to the one that computes nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fitact.runtime.kernels import Backward, Forward, Kernel, apply, register

ELEMENTS = 16
ROUNDS = 40
CALLS = 100  # a round
SHIPPED = ("gelu_fewbit1", "gelu_fewbit3", "silu_fewbit3", "gelu_inverted1", "tanh_output")


@dataclass(frozen=True, kw_only=True)
class Nothing(Kernel):
    """Saves codes of 3 bits that nobody writes, and returns what was in memory."""

    saves_input = False

    def compute(self, given: Forward) -> tuple[Tensor, Tensor]:
        return torch.empty_like(given.x), self.codes(given)

    def gradients(self, given: Backward) -> tuple[Tensor, None]:
        return torch.empty_like(given.dy), None

    def launch(self, given: Forward, y: Tensor, codes: Tensor) -> None:
        pass

    def launch_backward(self, given: Backward, dx: Tensor | None, d_other: Tensor | None) -> None:
        pass


def rivals() -> dict[str, Callable[[Tensor], Tensor]]:
    """Return what is measured, the one that computes nothing first."""
    nothing = Nothing(key="nothing", name="nothing", bits=3, forward=None, backward=None)
    shipped = {name: getattr(import_module(f"fitact.generated.{name}"), name) for name in SHIPPED}
    return {"nothing": partial(apply, key=register(nothing)), **shipped, "F.gelu": F.gelu}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(ELEMENTS, requires_grad=True)
    dy = torch.ones_like(x)
    functions = rivals()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):  # turn by turn, so that what else the machine does meets all
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                function(x).backward(dy)
            times[name].append((time.perf_counter() - start) / CALLS * 1e6)
    medians = {name: statistics.median(every) for name, every in times.items()}
    record = {
        "machine": f"{platform.machine()}, {platform.system()}",
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "elements": ELEMENTS,
        "microseconds": {name: round(value, 1) for name, value in medians.items()},
        "ratio": {name: round(value / medians["nothing"], 2) for name, value in medians.items()},
    }
    for name, value in medians.items():
        print(f"{name:16} {value:8.1f} us {value / medians['nothing']:6.2f} times")
    path = arguments.output or Path(__file__).parents[1] / "results" / "overhead_cpu.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
