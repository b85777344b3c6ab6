"""What `fitact.saving` costs in time on a CPU, beside PyTorch as it is and selective checkpointing.

    python -m benchmarks.saving [-o RESULTS.json]

Forward and backward, in eager mode, of one layer of a LLaMA and of a GPT-2 of transformers: as they are, in the
context with each error, and under PyTorch's selective checkpointing, which saves the results of matrix products
and of attention and runs the rest again. They take turns. A time is the least of all rounds, and rounds are added
until the ratios of the odd and of the even ones agree. There is one thread, and its own time counts, not the
clock's: so other programs on the machine matter less. Then the same of layers on few numbers, where all time is
overhead: a LayerNorm with a SwiGLU MLP on one row of 64, and a linear layer, of which nothing can be saved.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fitact
from benchmarks.kernels.activations import keep_freed_memory
from fitact.runtime.choose import SELECTIVE, changed
from fitact.runtime.measure import Saved, count_saved, imported
from fitact.runtime.saving import ERRORS

ROUNDS = 24, 80  # at least and at most
AGREE = 0.02  # how near the ratios of odd and even rounds have to be
CALLS = 200  # of a tiny layer in a round
TINY, WIDE = 64, 172
MODELS: dict[str, Callable[[int], dict[str, Any]]] = {
    "llama": lambda width: {
        "hidden_size": width,
        "intermediate_size": 8 * width // 3 // 16 * 16,
        "num_attention_heads": width // 64,
        "num_hidden_layers": 1,
    },
    "gpt2": lambda width: {
        "n_embd": width,
        "n_head": width // 64,
        "n_layer": 1,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),  # a CPU's fused attention has none
    },
}
Step = Callable[[], None]
Around = Callable[[Saved], AbstractContextManager[Any]]  # of the forward pass


def layer(name: str, width: int, dtype: torch.dtype) -> nn.Module:
    """Return a model of one layer."""
    transformers = imported("transformers")
    config = transformers.AutoConfig.for_model(name, vocab_size=64, **MODELS[name](width))
    config.use_cache = False
    model: nn.Module = transformers.AutoModel.from_config(config)
    return model.to(dtype).train()


def step(model: nn.Module, x: Tensor, around: Around = nullcontext) -> None:
    """Run forward and backward."""
    model.zero_grad()
    with around(Saved()):
        y = model(inputs_embeds=x).last_hidden_state
    y.sum().backward()


def bytes_saved(model: nn.Module, x: Tensor, around: Around = nullcontext) -> int:
    """Return the bytes that are saved for backward."""
    with count_saved(model) as saved, around(saved):
        y = model(inputs_embeds=x)
    del y
    return saved.bytes


def saving(error: str) -> Around:
    """Return what enters `fitact.saving`."""
    return lambda saved: fitact.saving(error)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model."""
    return [*(model.get_submodule("layers" if hasattr(model, "layers") else "h").children())]


def seconds(call: Step) -> float:
    """Return the time of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def measured(calls: dict[str, Step]) -> dict[str, float]:
    """Return the least times of calls, which take turns, in seconds; the others are compared with the first."""
    first = next(iter(calls))
    times: dict[str, list[float]] = {label: [] for label in calls}
    for call in calls.values():
        call()
    for number in range(ROUNDS[1]):
        for label, call in calls.items():
            times[label].append(seconds(call))
        if number + 1 >= ROUNDS[0] and number % 2:
            halves = [{label: min(every[half::2]) for label, every in times.items()} for half in (0, 1)]
            ratios = [{label: seconds / half[first] for label, seconds in half.items()} for half in halves]
            if all(abs(ratios[0][label] / ratios[1][label] - 1) < AGREE for label in calls):
                break
    return {label: min(every) for label, every in times.items()}


def layers(width: int, tokens: int) -> list[dict[str, Any]]:
    """Measure a layer of each model in each dtype."""
    rows = []
    for name in MODELS:
        for dtype in (torch.float32, torch.bfloat16):
            model = layer(name, width, dtype)
            x = torch.randn(2, tokens // 2, width).to(dtype)
            own = blocks(model)
            ways: dict[str, Around] = {
                "baseline": nullcontext,
                **{error: saving(error) for error in ERRORS},
                "selective checkpointing": lambda _, own=own: changed(own, [SELECTIVE] * len(own)),
            }
            times = measured({variant: partial(step, model, x, around) for variant, around in ways.items()})
            sizes = {variant: bytes_saved(model, x, around) for variant, around in ways.items()}
            rows.append(
                {"model": name, "dtype": str(dtype)[6:], "width": width, "tokens": tokens}
                | {"ms": {variant: round(1e3 * seconds, 2) for variant, seconds in times.items()}}
                | {"time": {variant: round(seconds / times["baseline"], 3) for variant, seconds in times.items()}}
                | {"saved": {variant: round(size / sizes["baseline"], 3) for variant, size in sizes.items()}}
            )
            print(rows[-1], flush=True)
    return rows


class Tiny(nn.Module):
    """LayerNorm and a SwiGLU MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(TINY), nn.Linear(WIDE, TINY)
        self.gate, self.up = nn.Linear(TINY, WIDE), nn.Linear(TINY, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        """Return x with what the MLP adds."""
        z = self.norm(x)
        y: Tensor = x + self.down(F.silu(self.gate(z)) * self.up(z))
        return y


def tiny() -> dict[str, Any]:
    """Measure layers on few numbers, in microseconds a call."""
    rows: dict[str, Any] = {}
    for name, model in {"LayerNorm, SwiGLU": Tiny(), "linear": nn.Linear(TINY, TINY)}.items():
        x = torch.randn(1, TINY, requires_grad=True)
        converted = deepcopy(model)
        fitact.convert(converted)

        def calls(model: nn.Module, x: Tensor = x) -> None:
            for _ in range(CALLS):
                model(x).sum().backward()

        times = measured({"baseline": partial(calls, model), "exact": partial(calls, converted)})
        rows[name] = {variant: round(1e6 * every / CALLS, 1) for variant, every in times.items()}
        rows[name]["ratio"] = round(times["exact"] / times["baseline"], 2)
        print(name, rows[name], flush=True)
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    record = {
        "machine": f"{platform.machine()}, {platform.system()}",
        "threads": 1,
        "torch": torch.__version__,
        "transformers": imported("transformers").__version__,
        "date": date.today().isoformat(),
        "layers": layers(512, 1024),
        "microseconds": tiny(),
    }
    path = arguments.output or Path(__file__).parent / "results" / "saving_cpu.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
