"""Time and memory: of calls in replayed CUDA graphs, of steps by the clock. On a CPU all times are the clock's."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fitact.runtime.measure import count_saved

CALLS, REPLAYS = 10, 15  # calls in a graph, and how often it is replayed
WARM = 3  # calls before anything is measured
MIB = 2**20


def free() -> None:
    """Return unused memory to the device, and forget compiled functions; RuntimeError if the GPU is unusable."""
    gc.collect()
    if "torch._dynamo" in sys.modules:  # else there are none, and to import it takes seconds
        torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.rand((), device="cuda")  # after a broken capture there are no random numbers any more
        torch.cuda.empty_cache()


def synchronise(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(call: Callable[[], Any], device: str, calls: int = CALLS) -> float:
    """Return the median time of a call.

    On a GPU, the current stream must not be the default one: it captures `calls` calls. Backward passes run on the
    stream of their forward pass, so that must have been the same.
    """
    for _ in range(WARM):
        call()
    if device != "cuda":
        return statistics.median(_clocked(call) for _ in range(WARM))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(calls):
            call()
    for _ in range(WARM):
        graph.replay()
    return statistics.median(_between_events(graph.replay) for _ in range(REPLAYS)) / calls


def _clocked(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def _between_events(call: Callable[[], Any]) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    call()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last))


def copy_bandwidth(elements: int, dtype: torch.dtype, device: str) -> float:
    """Return the bytes a second that a copy reads and writes."""
    x = torch.randn(elements, device=device).to(dtype)
    y = torch.empty_like(x)
    return 2e3 * x.numel() * x.itemsize / milliseconds(partial(y.copy_, x), device)


def step_times(step: Callable[[], Any], device: str, steps: int, warm: int = WARM) -> dict[str, float]:
    """Return the median times of a step in milliseconds: `ms`, and on a GPU `host_ms`, until all is launched."""
    whole, host = [], []
    for i in range(warm + steps):
        synchronise(device)
        start = time.perf_counter()
        step()
        launched = time.perf_counter()
        synchronise(device)
        if i >= warm:
            host.append(1e3 * (launched - start))
            whole.append(1e3 * (time.perf_counter() - start))
    times = {"ms": statistics.median(whole)}
    return times | ({"host_ms": statistics.median(host)} if device == "cuda" else {})


def graphed(step: Callable[[], Any], device: str) -> dict[str, Any]:
    """Return the time of a step as one replayed CUDA graph, `graphed_ms`, or why it cannot be captured."""
    if device != "cuda":
        return {}
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            return {"graphed_ms": milliseconds(step, device, calls=1)}
    except RuntimeError as error:
        return {"graphed": f"{type(error).__name__}: {error}"[:300]}


def step_memory(model: nn.Module, forward: Callable[[], Tensor], device: str) -> dict[str, float]:
    """Run a step and return MiB: `saved` by the forward pass for backward, and on a GPU the `peak` above what was.

    On a GPU both are the allocator's, on a CPU the storages that autograd saves are counted.
    """
    model.zero_grad(set_to_none=True)
    if device != "cuda":
        with count_saved(model) as saved:
            forward()
        return {"saved_mib": saved.bytes / MIB}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = forward()
    torch.cuda.synchronize()
    saved_bytes = torch.cuda.memory_allocated() - before
    loss.backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    model.zero_grad(set_to_none=True)
    return {"saved_mib": saved_bytes / MIB, "peak_mib": peak / MIB}
