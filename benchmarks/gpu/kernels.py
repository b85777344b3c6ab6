"""Kernels alone: forward and backward of each function, in replayed CUDA graphs, beside a copy of the same size.

Of block codes, coding is called forward, and decoding backward. `forward_share` and `backward_share` are shares of
the copy's bandwidth, for the bytes that a pass has to move: inputs, the output and what is saved besides these,
and in backward all that is saved and the gradients.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor

import fitact
from benchmarks.gpu.record import Record, Row
from benchmarks.gpu.timer import copy_bandwidth, milliseconds
from fitact.runtime.measure import count_saved
from fitact.runtime.norms import ms_layer_norm, ms_rms_norm
from fitact.runtime.saving import BITS, decode, encode, nbytes

Function = Callable[..., Tensor]
ACTIVATIONS: dict[str, Function] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "mish": F.mish,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "elu": F.elu,
}
GATES: dict[str, Function] = {"swiglu": lambda g, u: F.silu(g) * u, "geglu": lambda g, u: F.gelu(g) * u}
METHODS = "fewbit|relumix|inverted|output|recompute|regelu2|resilu2"
ALSO_FLOAT32 = ("gelu", "silu")
EPSILON = 1e-5


def run(record: Record, device: str, tiny: bool) -> None:
    """Add a row for each function, dtype and variant."""
    # graphs cannot be captured on the default stream, and a backward pass runs on its forward pass's
    stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext()
    # a backward pass is run again and again
    with stream, torch._functorch.config.patch(donated_buffer=False):
        for name, (function, variants, shapes) in cases(tiny).items():
            for dtype in (torch.bfloat16, torch.float32) if name in ALSO_FLOAT32 else (torch.bfloat16,):
                for variant, made in ({"eager": function} | variants).items():
                    row = {"function": name, "dtype": str(dtype)[6:], "variant": variant}
                    record.measure(row, partial(measured, made, shapes, dtype, device))
        for dtype, bits in product((torch.bfloat16, torch.float32), (8, 4) if tiny else BITS):
            row = {"function": "block codes", "dtype": str(dtype)[6:], "variant": f"{bits} bits"}
            record.measure(row, partial(coded, bits, (64, 256) if tiny else (16384, 4096), dtype, device))


Case = tuple[Function, dict[str, Function], list[tuple[int, ...]]]  # the baseline, variants, shapes of inputs


def cases(tiny: bool) -> dict[str, Case]:
    """Return what is measured by name of the function."""
    activation, gate, norm = [(2**14,), (8, 2048), (64, 256)] if tiny else [(2**26,), (8192, 11008), (16384, 4096)]
    cases: dict[str, Case] = {}
    for name in ("gelu",) if tiny else ACTIVATIONS:
        cases[name] = ACTIVATIONS[name], shipped(name) | by_compiler(ACTIVATIONS[name], tiny), [activation]
    for name in GATES:
        variants = shipped(name) | by_compiler(GATES[name], tiny) | {"Liger": partial(liger, f"liger_{name}")}
        cases[name] = GATES[name], variants, [gate, gate]
    width = norm[-1:]
    layer: Function = lambda x, weight, bias: F.layer_norm(x, width, weight, bias, EPSILON)  # noqa: E731
    rms: Function = lambda x, weight: F.rms_norm(x, width, weight, EPSILON)  # noqa: E731
    liger_layer = partial(liger, "liger_layer_norm", eps=EPSILON)
    ours = {"memory-sharing": lambda x, *_: ms_layer_norm(x, width, EPSILON)}
    cases["layer_norm"] = layer, ours | by_compiler(layer, tiny) | {"Liger": liger_layer}, [norm, width, width]
    liger_rms = partial(liger, "liger_rms_norm", eps=EPSILON)
    ours = {"memory-sharing": lambda x, *_: ms_rms_norm(x, width, EPSILON)}
    cases["rms_norm"] = rms, ours | by_compiler(rms, tiny) | {"Liger": liger_rms}, [norm, width]
    return cases


def shipped(name: str) -> dict[str, Function]:
    """Return the shipped modules' functions for an activation or a gate."""
    names = [each for each in fitact.shipped() if re.fullmatch(rf"{name}_({METHODS})[^a-z]*(_.*)?", each)]
    return {each: getattr(import_module(f"fitact.generated.{each}"), each) for each in names}


def by_compiler(function: Function, tiny: bool) -> dict[str, Function]:
    """Return the function compiled by PyTorch; not in the rehearsal, where that takes longer than all else."""
    return {} if tiny else {"torch.compile": torch.compile(lambda *tensors: function(*tensors), dynamic=False)}


def liger(name: str, *tensors: Tensor, **options: Any) -> Tensor:
    """Call a function of Liger's."""
    output: Tensor = getattr(import_module("liger_kernel.transformers.functional"), name)(*tensors, **options)
    return output


def coded(bits: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Row:
    """Return the bytes of an element's code, and the times of coding and decoding."""
    x = torch.randn(shape, device=device).to(dtype)
    parts = encode(x, bits)
    size = nbytes(shape, bits)
    forward = milliseconds(partial(encode, x, bits), device)
    backward = milliseconds(partial(decode, *parts, shape, dtype), device)
    copied = copy_bandwidth(x.numel(), dtype, device)
    return {
        "elements": x.numel(),
        "saved_bytes": size / x.numel(),
        "forward_ms": forward,
        "backward_ms": backward,
        "copy_gb_per_s": copied / 1e9,
        "forward_share": 1e3 * (x.nbytes + size) / forward / copied,
        "backward_share": 1e3 * (x.nbytes + size) / backward / copied,
    }


def measured(function: Function, shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str) -> Row:
    """Return the bytes that a function saves for an element of its output, and the times of its passes."""
    inputs = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    with count_saved() as saved:
        y = function(*inputs)
    dy = torch.randn_like(y)
    read = [
        each
        for each in inputs
        if torch.autograd.grad(y, each, dy, allow_unused=True, retain_graph=True)[0] is not None
    ]
    storages = {storage.data_ptr(): storage.nbytes() for storage in saved.storages.values()}
    given = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in (*read, y)}
    beside = sum(size for place, size in storages.items() if place not in given)
    forward = milliseconds(partial(function, *inputs), device)
    backward = milliseconds(partial(torch.autograd.grad, y, read, dy, retain_graph=True), device)
    copied = copy_bandwidth(y.numel(), dtype, device)
    gradients = dy.nbytes + sum(each.nbytes for each in read)
    return {
        "elements": y.numel(),
        "saved_bytes": sum(storages.values()) / y.numel(),
        "forward_ms": forward,
        "backward_ms": backward,
        "copy_gb_per_s": copied / 1e9,
        "forward_share": 1e3 * (sum(given.values()) + beside) / forward / copied,
        "backward_share": 1e3 * (sum(storages.values()) + gradients) / backward / copied,
    }
