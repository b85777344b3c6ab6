"""Codes under the compiler: what is saved, how far gradients are off, what is left alone."""

import re
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch._inductor.utils import run_and_get_code

import fitact
from benchmarks.compiled import run_graphs
from fitact.generated.gelu_fewbit3 import GeluFewbit3
from fitact.runtime.compile.report import SavedRecord
from fitact.runtime.saving import blocks
from fitact.runtime.torch_internals import storage_id
from tests.support.blocks import built
from tests.support.compilers import needs_compiler
from tests.support.processes import python
from tests.support.refusals import refused

pytestmark = needs_compiler
TOKENS = 512
BYTES = 8.3125 / 8  # of an element in codes of 8 bits


def Gelu(width: int = 256, hidden: int = 1024, act: Callable[[Tensor], Tensor] = F.gelu) -> nn.Module:
    parts = {"up": nn.Linear(width, hidden), "down": nn.Linear(hidden, width), "norm": nn.LayerNorm(width)}
    return built(lambda m, x: x + m.down(act(m.up(m.norm(x)))), **parts)


def SwiGLU(width: int = 256, hidden: int = 704) -> nn.Module:
    parts = {name: nn.Linear(width, hidden, bias=False) for name in ("gate", "up")}
    parts |= {"down": nn.Linear(hidden, width, bias=False), "norm": nn.RMSNorm(width)}
    return built(lambda m, x: x + m.down(F.silu(m.gate(z := m.norm(x))) * m.up(z)), **parts)


def dropped() -> nn.Module:
    parts = {"linear": nn.Linear(256, 256), "last": nn.Linear(256, 256)}
    return built(lambda m, x: m.last(F.layer_norm(x + F.dropout(m.linear(x), 0.25), (256,))), **parts)


def made(*blocks: Callable[[], nn.Module], dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for block in blocks)).to(dtype)


def step(model: nn.Module, run: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> tuple[int, list[Tensor]]:
    """Bytes saved besides parameters and the input, and all gradients, in float32."""
    torch.manual_seed(1)
    x = torch.randn(shape, dtype=next(model.parameters()).dtype).requires_grad_()
    leaves = [x, *model.parameters()]
    model.zero_grad()
    y = run(x)
    saved = {storage_id(x): x.untyped_storage().nbytes() for x in y.grad_fn.saved_tensors if x is not None}
    y.float().square().mean().backward()
    gradients = [leaf.grad.float() for leaf in leaves if leaf.grad is not None]
    return sum(saved[key] for key in saved.keys() - {storage_id(leaf) for leaf in leaves}), gradients


def plain(budget: float, model: nn.Module, shape: tuple[int, ...]) -> tuple[int, list[Tensor]]:
    with functorch.patch(activation_memory_budget=budget):
        return step(model, torch.compile(model, fullgraph=True), shape)


def beside(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...] = (TOKENS, 256),
    autocast: torch.dtype | None = None,
    budget: float = 0.9,
    **given: Any,
) -> tuple[Any, Any, list[SavedRecord]]:
    """Return what `step` does of a model's graphs as they are and with codes, and the records of what is saved."""
    options, results = fitact.compile_options(budget=budget, **given), []
    for each in ({}, options):
        torch._dynamo.reset()
        model = make()
        run = run_graphs(model, each, budget)
        cast = torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None)
        results.append(step(model, cast(run), shape))
    (records,) = options.report.graphs
    return *results, records


def fused(texts: list[str]) -> int:
    return sum(len(re.findall(r"^        cpp_fused\w*\(", text, re.MULTILINE)) for text in texts)


def off(actual: list[Tensor], baseline: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(actual, baseline, strict=True) if b.norm() > 1e-6)


@pytest.mark.long
def test_blocks() -> None:
    """Half of what the compiler's best saves, with as many kernels, the whole gradient less than 1 % off."""
    (saved, expected), texts = run_and_get_code(lambda: plain(0.9, made(Gelu, SwiGLU), (TOKENS, 256)))
    kernels = fused(texts)
    assert saved == TOKENS * (2312 + 3076)
    torch._dynamo.reset()
    model = made(Gelu, SwiGLU)
    compiled = fitact.compile(model, fullgraph=True)
    (less, actual), texts = run_and_get_code(lambda: step(model, compiled, (TOKENS, 256)))
    # one activation, two gates, and what lies between the blocks
    assert saved - less == TOKENS * (1024 + 2 * 704 + 256) * (2 - BYTES)
    whole = [torch.cat([each.flatten() for each in every]) for every in (actual, expected)]
    assert off(whole[:1], whole[1:]) < 0.01
    assert fused(texts) == kernels
    report = fitact.compile_report(compiled)
    (records,) = report.graphs
    assert sum(record.bits is not None for record in records) == 4
    assert report.before - report.after == saved - less


def test_exact() -> None:
    saved, expected = plain(0.9, made(dropped), (TOKENS, 256))
    torch._dynamo.reset()
    model = made(dropped)
    compiled = fitact.compile(model, error="exact", fullgraph=True)
    less, actual = step(model, compiled, (TOKENS, 256))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    (mask,) = (record for record in fitact.compile_report(compiled).graphs[0] if record.bits)
    assert (mask.kind, mask.bits, mask.before, mask.after, mask.error) == ("mask", 1, TOKENS * 256, TOKENS * 32, 0)
    assert saved - less == TOKENS * 224


def peak(step: Callable[[], object]) -> int:
    """The most bytes of the CPU's allocator during a step, as PyTorch's profiler sees it allocate and free."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


@pytest.mark.long
@pytest.mark.full
def test_peak() -> None:
    """Codes lower the peak of a compiled step, though each is decoded whole; fewer bits never raise it again."""
    model = made(*[Gelu] * 3, dtype=torch.float32)
    peaks = []
    for error in (None, "rounding", "coarse"):
        torch._dynamo.reset()
        with functorch.patch(activation_memory_budget=0.9):
            run = torch.compile(model) if error is None else fitact.compile(model, error=error)
            step(model, run, (2048, 256))
            _, second = (peak(partial(step, model, run, (2048, 256))) for _ in range(2))
            peaks.append(second)  # a first profile sees memory of before freed
    assert peaks[2] <= peaks[1] < 0.8 * peaks[0]


def test_dynamic_shapes() -> None:
    """The number of tokens varies, and nothing is compiled again; rows may be no multiple of 64."""
    model = made(partial(Gelu, hidden=170))
    compiled = fitact.compile(model, fullgraph=True, dynamic=True)
    for tokens in (128, 200, 77):
        saved, actual = step(model, compiled, (tokens, 256))
        whole, rest = divmod(tokens * 170, 64)
        assert saved == 8 * tokens + blocks.nbytes((whole, 64), 8) + (rest > 0) * blocks.nbytes((64,), 8)
        x = torch.randn((tokens, 256), generator=torch.manual_seed(1), dtype=torch.bfloat16)
        model.zero_grad()
        model(x).float().square().mean().backward()
        expected = [parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None]
        assert off(actual[1:], expected) < 0.02
    assert len(fitact.compile_report(compiled).graphs) == 1


def test_outputs_are_left_alone() -> None:
    layers = {"layer": nn.Linear(64, 64), "head": nn.Linear(64, 99)}
    model = built(lambda m, x: (m.head(y := m.layer(x).tanh()), y), **layers)
    options = fitact.compile_options(budget=1.0)
    run_graphs(model, options, 1.0)(torch.randn(256, 64))
    reasons = {graph.operation: graph.reason for graph in options.report.graphs[0]}
    assert reasons["tanh"] == "an output of the model"


def test_huge_and_tiny_numbers() -> None:
    """A residual sum may have elements a thousand times as large as the rest, and a model may begin tiny."""

    def block(factor: float) -> nn.Module:
        block = SwiGLU()
        block.down.weight.data.mul_(factor)
        block.gate.weight.data.mul_(0.1)
        return block

    for factor in (1e-3, 1e3):
        (_, expected), (_, actual), _ = beside(partial(made, *[partial(block, factor)] * 2, dtype=torch.float32))
        assert off(actual, expected) < 0.02, factor


def test_not_finite() -> None:
    """NaN and infinities in a forward pass leave the others' gradients finite, and show in the loss."""
    model = made(Gelu)
    x = torch.randn(TOKENS, 256, dtype=torch.bfloat16)
    x[0, 0], x[1, 0] = torch.nan, torch.inf
    y = run_graphs(model, fitact.compile_options(), 0.9)(x.requires_grad_())
    assert not y[:2].isfinite().any()
    y[2:].float().square().sum().backward()
    assert x.grad[2:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)])
def test_autocast(dtype: torch.dtype) -> None:
    (_, expected), (saved, actual), records = beside(partial(made, Gelu, dtype=torch.float32), autocast=dtype)
    assert off(actual, expected) < 0.012
    assert [(record.kind, record.bits) for record in records if record.bits] == [("activation", 8)]
    # The weights' casts may be saved; no code is made of a weight.
    assert saved <= TOKENS * (1024 * BYTES + 8) + 2 * 2 * 256 * 1024


# PyTorch's compiler looks at the gradient of a tensor that is no leaf.
NO_LEAF = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@NO_LEAF
def test_graph_breaks_and_accumulation() -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        x = m.block(x)
        torch._dynamo.graph_break()
        return m.block(x)

    model = made(lambda: built(call, block=Gelu()))
    compiled = fitact.compile(model)
    for _ in range(2):
        step(model, compiled, (TOKENS, 256))
    assert len(fitact.compile_report(compiled).graphs) == 2


@NO_LEAF
def test_regional_and_by_hand() -> None:
    """`module.compile` and `torch.compile` take the options."""
    model = made(Gelu, Gelu)
    options = fitact.compile_options()
    for block in model:
        block.compile(fullgraph=True, options=options)
    step(model, model, (TOKENS, 256))
    assert [record.bits for record in options.report.graphs[0] if record.kind == "activation"] == [8]
    assert "activation  8 bits" in str(options.report)


def test_mode_and_other_options() -> None:
    model = made(Gelu)
    compiled = fitact.compile(model, mode="max-autotune-no-cudagraphs", options={"max_autotune": False})
    saved, _ = step(model, compiled, (TOKENS, 256))
    assert saved == TOKENS * (1024 * BYTES + 8)


def test_beside_converted_activations() -> None:
    """What a converted activation saves is a code already, and stays; the rest becomes codes."""
    (whole, expected), (saved, actual), records = beside(partial(made, partial(Gelu, act=GeluFewbit3())))
    assert saved < 0.62 * whole and off(actual, expected) < 0.015
    (code,) = (record for record in records if record.dtype is torch.uint8)
    assert (code.bits, code.before, code.reason) == (None, TOKENS * 1024 * 3 // 8, "of uint8")
    others = {(record.dtype, record.bits, record.reason) for record in records if record.operation == "forward"}
    assert others == {(torch.uint8, None, "of uint8"), (torch.bfloat16, 8, "")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"error": "none"}, "error: expected 'exact', 'rounding' or 'coarse', got 'none'"),
        ({"bits": 7}, "bits: expected 3, 4, 5, 6 or 8, got 7"),
        ({"bits": {"logits": 8}}, "bits: expected the kinds gate, activation, norm, batch_norm, linear or att"),
        ({"budget": 1.5}, "budget: expected a number from 0 to 1, got 1.5"),
        ({"inputs": torch.ones(2)}, "inputs: expected True or False, got tensor"),
        ({"attention": True}, "attention: say in how many bits"),
        ({"backend": "eager"}, "backend: expected 'inductor'"),
        ({"options": {"custom_partitioner_fn": None}}, "custom_partitioner_fn is what fitact sets"),
    ],
)
def test_refuses(arguments: dict[str, Any], message: str) -> None:
    assert message in refused(fitact.compile, nn.Linear(2, 2), **arguments)


def test_report_of_others() -> None:
    assert "expected what fitact.compile returned" in refused(fitact.compile_report, nn.Linear(2, 2))
    assert "no graph was compiled" in str(fitact.compile_options().report)


CACHED = """
import torch, fitact
from tests.compile.test_compile import ERRORS, made, step
for error in ERRORS:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = made(lambda: torch.nn.Linear(256, 256), torch.nn.GELU, lambda: torch.nn.Linear(256, 256))
    saved, gradients = step(model, fitact.compile(model, error=error), (512, 256))
    hits = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
    print(error, saved, sum(float(one.double().abs().sum()) for one in gradients), hits)
"""
ERRORS = ("rounding", "coarse")


@pytest.mark.long
@pytest.mark.full
def test_caches_of_other_options(tmp_path: Path) -> None:
    """Options that share PyTorch's caches get graphs of their own, and in the next process those of the cache."""
    again = (python(CACHED, warnings="ignore", TORCHINDUCTOR_CACHE_DIR=str(tmp_path)) for _ in range(2))
    first, second = ([line.rsplit(maxsplit=1) for line in printed.splitlines()] for printed in again)
    assert [hits for _, hits in first] == ["0"] * len(ERRORS)
    assert second == [[what, "1"] for what, _ in first]
    assert len({what.split()[1] for what, _ in first}) == len(ERRORS)
