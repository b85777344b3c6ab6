"""The kernels that PyTorch's compiler would write for a GPU, as text; no GPU is needed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._functorch import config as functorch
from torch._inductor import compile_fx
from torch._inductor import config as inductor
from torch._inductor.codegen.common import init_backend_registration
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

H100 = SimpleNamespace(
    name="H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    regs_per_multiprocessor=65536,
    shared_memory_per_block_optin=227 * 1024,
    shared_memory_per_multiprocessor=228 * 1024,
    L2_cache_size=50 * 2**20,
    total_memory=80 * 2**30,
    clock_rate=1,
    gcnArchName="",
)
DEVICE = torch.device("cuda", 0)


def gpu_kernels(model: nn.Module, options: dict[str, Any], budget: float, x: Tensor) -> list[dict[str, str]]:
    """Return the fused kernels of the forward and of the backward graph, texts by name.

    The graphs are traced on a CPU, and said to be of a GPU then.
    """
    graphs = []

    def partition(joint: Any, inputs: Any, **more: Any) -> Any:
        with inductor.patch(options), functorch.patch(activation_memory_budget=budget):
            return compile_fx.partition_fn(joint, inputs, **more)

    def keep(graph: fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=partition, decompositions=select_decomp_table()
    )
    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(x).float().sum().backward()
    with _gpu():
        return [_kernels(graph, backward) for graph, backward in zip(graphs, (False, True), strict=True)]


def loads(text: str) -> int:
    """Return how many tensors, or places of a tensor, a kernel reads."""
    return text.count("tl.load(")


def _kernels(graph: fx.GraphModule, backward: bool) -> dict[str, str]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = _to_gpu(graph, mode)
    with V.set_fake_mode(mode):
        post_grad_passes(graph, not backward)
        lowered = GraphLowering(graph, inputs, is_backward=backward)
        with V.set_graph_handler(lowered), V.set_debug_handler(mock.MagicMock()), mode:
            lowered.run(*inputs)
            text = lowered.codegen()[0].value
    return dict(re.findall(r"def (triton_\w+)\((.*?)\n'''", text, re.DOTALL))


def _to_gpu(graph: fx.GraphModule, mode: FakeTensorMode) -> list[Any]:
    """Let a graph's fake tensors and its operators name the GPU, and return the tensors of its inputs."""

    def moved(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(moved, value))
        if not isinstance(value, Tensor):
            return value
        with mode:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=DEVICE)

    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = moved(node.meta["val"])
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": DEVICE}
    graph.recompile()
    return [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]


@contextmanager
def _gpu() -> Iterator[None]:
    """Let PyTorch and Triton believe in an H100 while kernels are written, not compiled."""
    driver = mock.MagicMock()
    driver.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    answers: dict[str, Any] = {
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_capability": (9, 0),
        "get_device_properties": H100,
        "_get_device_properties": H100,
        "_lazy_init": None,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            patched = mock.patch.object(torch.cuda, name, lambda *_, answer=answer: answer, create=True)
            stack.enter_context(patched)
        for owner, name, answer in (
            (CudaInterface.Worker, "get_device_properties", H100),
            (CudaInterface, "get_device_properties", H100),
            (CudaInterface, "current_device", 0),
            (CudaInterface, "is_available", True),
            (CudaInterface, "get_compute_capability", 90),
        ):
            static = staticmethod(lambda *_, answer=answer: answer)
            stack.enter_context(mock.patch.object(owner, name, static))
        stack.enter_context(mock.patch("torch._inductor.scheduler.has_triton", return_value=True))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        init_backend_registration()
        yield
