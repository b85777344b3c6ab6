"""Time and saved bytes of shipped activations beside PyTorch's own, in one run on a CPU.

    python -m benchmarks.kernels.activations [--size N ...] [--dtype float32 bfloat16] [-o RESULTS.json]

For each size and dtype: forward, backward and both, medians in milliseconds, all taking turns; the ratio to the
same activation of PyTorch; the bytes autograd saves for each element. Beside the shipped modules: PyTorch's
activation under torch.compile, the same with a memory budget of 0.7. glibc keeps what is freed, as the
allocators do that PyTorch's tuning guide recommends (jemalloc, tcmalloc): otherwise giving pages back and asking
for them again takes as long as the work, for some rows and not for others.
An interrupt keeps what is finished. The picture is beside the JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fitact.runtime.measure import count_saved

REPEATS = 15
SECONDS = 0.2  # of warming up
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
BASELINE: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu}
SHIPPED = {
    "gelu": ("gelu_fewbit1", "gelu_fewbit2", "gelu_fewbit3", "gelu_fewbit4", "gelu_inverted1", "gelu_inverted2"),
    "silu": ("silu_fewbit3", "silu_inverted1"),
}
Row = dict[str, Any]


def keep_freed_memory() -> None:
    """Have glibc's allocator keep blocks up to 32 MiB, its limit, and never give memory back."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for option, value in ((M_MMAP_THRESHOLD, 32 << 20), (M_TRIM_THRESHOLD, 2**31 - 1)):
            if not libc.mallopt(option, value):
                raise OSError(f"mallopt({option}, {value}) was refused")


def rivals(name: str) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Yield what is measured of an activation, PyTorch's own first."""
    baseline = BASELINE[name]
    yield "eager", baseline
    for shipped in SHIPPED[name]:
        yield shipped, getattr(import_module(f"fitact.generated.{shipped}"), shipped)
    yield "torch.compile", torch.compile(baseline)

    def budgeted(x: Tensor) -> Tensor:
        with torch._functorch.config.patch(activation_memory_budget=0.7):
            return compiled(x)

    compiled = torch.compile(lambda x: baseline(x), dynamic=False)
    yield "torch.compile, budget 0.7", budgeted


def measured(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median times of calls in milliseconds; they take turns, so that what else happens meets all."""
    for call in calls.values():
        start = time.perf_counter()
        while time.perf_counter() - start < SECONDS:
            call()
    times: dict[str, list[float]] = {label: [] for label in calls}
    for _ in range(REPEATS):
        for label, call in calls.items():
            call()  # so that the one before leaves nothing in the caches that matters
            start = time.perf_counter()
            call()
            times[label].append((time.perf_counter() - start) * 1e3)
    return {label: statistics.median(every) for label, every in times.items()}


def rows(functions: dict[str, Callable[[Tensor], Tensor]], x: Tensor) -> list[Row]:
    """Measure activations, the first of which is what the others are compared with."""
    dy = torch.randn_like(x)
    sizes, forward, backward, both = {}, {}, {}, {}
    for label, function in functions.items():
        leaf = x.detach().requires_grad_()
        with count_saved() as saved:
            y = function(leaf)
        y.backward(dy)
        sizes[label] = saved.bytes / x.numel()
        forward[label] = partial(forwards, function, x)
        backward[label] = partial(torch.autograd.grad, function(leaf), leaf, dy, retain_graph=True)
        both[label] = partial(forwards_and_backwards, function, x, dy)
    passes = {"forward_ms": forward, "backward_ms": backward, "both_ms": both}
    times = {name: measured(calls) for name, calls in passes.items()}
    first = next(iter(functions))
    return [
        {"label": label, "saved_bytes_an_element": round(sizes[label], 4)}
        | {name: times[name][label] for name in passes}
        | {"ratio": round(times["both_ms"][label] / times["both_ms"][first], 3)}
        for label in functions
    ]


def forwards(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run forward, saving for backward what there is to save."""
    return function(x.detach().requires_grad_())


def forwards_and_backwards(function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> None:
    """Run forward and backward."""
    forwards(function, x).backward(dy)


def draw(groups: list[dict[str, Any]], path: Path) -> None:
    """Draw forward and backward beside each other, a bar for each row, relative to PyTorch's own."""
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(9, 0.6 + 0.27 * sum(len(group["rows"]) + 2 for group in groups)), layout="constrained"
    )
    panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for axes, group in zip(panels, groups, strict=True):
        base = group["rows"][0]["forward_ms"] + group["rows"][0]["backward_ms"]
        for i, row in enumerate(reversed(group["rows"])):
            axes.barh(i, row["forward_ms"] / base, color="#1f4e79", label="forward" if not i else "")
            left = row["forward_ms"] / base
            axes.barh(i, row["backward_ms"] / base, left=left, color="#d1495b", label="backward" if not i else "")
        labels = [f"{row['label']} ({row['saved_bytes_an_element']:g} B)" for row in reversed(group["rows"])]
        axes.set_yticks(range(len(labels)), labels, fontsize=8)
        axes.axvline(1.0, color="black", linewidth=0.7)
        axes.set_title(f"{group['activation']}, {group['elements']:,} elements, {group['dtype']}", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8)
    panels[-1].set_xlabel(
        "time, PyTorch's own forward and backward = 1; in brackets: bytes saved for each element"
    )
    figure.savefig(path, dpi=130)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--size",
        type=int,
        nargs="+",
        default=[1 << 22],
        help="elements; by default 2^22; glibc keeps no blocks above 32 MiB",
    )
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    keep_freed_memory()
    results = Path(__file__).parents[1] / "results" / "activations_cpu.json"
    path = arguments.output or results
    record: dict[str, Any] = {
        "machine": f"{platform.machine()}, {platform.system()}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "groups": [],
    }
    try:
        for dtype in arguments.dtype:
            for size in arguments.size:
                for name in BASELINE:
                    x = torch.randn(size).to(getattr(torch, dtype))
                    print(f"\n{name}, {size:,} elements, {dtype}", flush=True)
                    measurements = rows(dict(rivals(name)), x)
                    record["groups"].append(
                        {"activation": name, "elements": size, "dtype": dtype, "rows": measurements}
                    )
                    for row in measurements:
                        times = " ".join(f"{row[f'{pass_}_ms']:9.3f}" for pass_ in ("forward", "backward", "both"))
                        ratio, size = row["ratio"], row["saved_bytes_an_element"]
                        print(f"{row['label']:28} {times} ms  {ratio:6.2f} times  {size:6.3f} B", flush=True)
    except KeyboardInterrupt:
        print("interrupted: what is finished is kept", file=sys.stderr)
    finally:
        for group in record["groups"]:
            for row in group["rows"]:
                row.update({key: round(value, 4) for key, value in row.items() if key.endswith("_ms")})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=2) + "\n")
        if record["groups"]:
            draw(record["groups"], path.with_suffix(".png"))
    print(f"\nwrote {path} and {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
