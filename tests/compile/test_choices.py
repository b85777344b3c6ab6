"""What is stored in which bits, how far gradients are off, and the codes that graphs call, without kernels."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fitact
from benchmarks import compiled as benchmark
from benchmarks.compiled import run_graphs
from fitact.runtime.compile.report import SavedRecord
from fitact.runtime.measure.saved import count_saved
from fitact.runtime.saving import blocks
from tests.compile.test_compile import Gelu, SwiGLU, beside, made, off
from tests.support.blocks import built


def coded(
    block: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **arguments: Any
) -> tuple[float, list[SavedRecord]]:
    """Return the largest error of a gradient, and the records of what is saved and is not a parameter or small."""
    make = partial(made, block, dtype=dtype)
    (_, expected), (_, actual), records = beside(make, shape, **{"budget": 1.0} | arguments)
    return off(actual, expected), [record for record in records if record.reason not in ("a parameter", "small")]


def masked(direct: bool) -> nn.Module:
    """Return two layers of attention that share a mask of 0 and −∞."""

    def call(m: Any, x: Tensor) -> Tensor:
        seen = torch.ones(128, 128, dtype=torch.bool).tril()
        zero, never = torch.tensor(0.0, dtype=x.dtype), torch.tensor(-torch.inf, dtype=x.dtype)
        mask = torch.where(seen, zero, never) if direct else torch.where(seen, 0.0, -torch.inf).to(x.dtype)
        for layer in m.qkv:
            q, k, v = heads(layer(x))
            x = x + joined(F.scaled_dot_product_attention(q, k, v, mask))
        return m.out(x)

    qkv = nn.ModuleList(nn.Linear(64, 192, bias=False) for _ in range(2))
    return built(call, qkv=qkv, out=nn.Linear(64, 64, bias=False))


def heads(qkv: Tensor) -> Tensor:
    return qkv.view(2, 128, 3, 4, 16).permute(2, 0, 3, 1, 4)


def joined(y: Tensor) -> Tensor:
    return y.transpose(1, 2).reshape(2, 128, 64)


def test_masks_of_numbers() -> None:
    shape = (2, 128, 64)
    error, records = coded(partial(masked, True), shape, torch.bfloat16, error="exact")
    assert error == 0
    (mask,) = (record for record in records if record.operation == "where")
    assert (mask.kind, mask.bits, mask.before, mask.after) == ("mask", 1, 128 * 128 * 2, 128 * 128 // 8)
    error, records = coded(partial(masked, False), shape, torch.bfloat16, bits=8)
    assert error < 0.02
    assert {each.reason for each in records if each.operation == "convert_element_type"} == {"attention's mask"}


def scored() -> nn.Module:
    """Return attention by two batched products and a softmax of masked scores, a gated layer, and a loss."""

    def call(m: Any, x: Tensor) -> Tensor:
        q, k, v = heads(m.qkv(x))
        seen = torch.ones(128, 128, dtype=torch.bool).tril()
        weights = (q @ k.transpose(-1, -2) / 4).masked_fill(~seen, -torch.inf).softmax(-1)
        y = m.out(x + joined(weights @ v) * m.gate(x).sigmoid())
        return F.cross_entropy(y.view(256, 64), torch.arange(256) % 64)

    return built(call, qkv=nn.Linear(64, 192), gate=nn.Linear(64, 64), out=nn.Linear(64, 64))


def sharp() -> nn.Module:
    """Return attention whose queries and keys are normalised."""

    def call(m: Any, x: Tensor) -> Tensor:
        q, k, v = heads(m.qkv(x))
        return m.out(joined(F.scaled_dot_product_attention(m.norm(q), m.norm(k), v, is_causal=True)))

    return built(call, qkv=nn.Linear(64, 192), out=nn.Linear(64, 64), norm=nn.RMSNorm(16))


def convolved(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 64, 3), norm, nn.ReLU(), nn.Conv2d(64, 64, 3))


def scaled() -> nn.Module:
    """Return a factor for each channel, from a mean over the pixels."""
    parts = {"layer": nn.Linear(512, 512), "out": nn.Conv2d(512, 8, 1)}
    return built(lambda m, x: m.out(x * m.layer(x.mean((2, 3))).sigmoid()[:, :, None, None]), **parts)


SCORED = {"bmm: attention 8", "clone: attention 8", "addmm: activation 4"}
ALL_OF_IT = SCORED | {"div: of a softmax", "bitwise_not: mask 1", "add: linear 4", "addmm: saved by the loss"}
STEEP = {"addmm: of a quotient, logarithm, root or sine"}
SIZE, IMAGE = (2, 128, 64), (4, 8, 16, 16)
KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float, set[str]]] = {
    "scores": (scored, SIZE, 0.9, SCORED | {"bmm: of a softmax"}),
    "weights and a loss": (scored, SIZE, 1.0, ALL_OF_IT),
    # Attention reads what is computed from these queries and keys: 8 bits, not 4.
    "normalised": (
        sharp,
        SIZE,
        0.9,
        {"addmm: norm 8", "_scaled_dot_product_flash_attention_for_cpu: attention 8"},
    ),
    "batch norm": (lambda: convolved(nn.BatchNorm2d(64)), IMAGE, 0.9, {"convolution: of a norm over the batch"}),
    "group norm": (lambda: convolved(nn.GroupNorm(4, 64)), IMAGE, 0.9, {"convolution: norm 4"}),
    "statistic": (scaled, (32, 512, 8, 8), 1.0, {"mean: linear 4", "addmm: a statistic", "mul: linear 4"}),
    "sine": (lambda: Gelu(act=lambda x: torch.sin(30 * x) + F.gelu(x)), (128, 256), 0.9, STEEP),
    "log": (lambda: Gelu(act=lambda x: (x * x + 0.01).log()), (128, 256), 0.9, STEEP),
    "tanh": (lambda: Gelu(act=lambda x: torch.tanh(5 * x)), (128, 256), 1.0, {"tanh: linear 8", "add: linear 4"}),
    "quotient": (lambda: Gelu(act=lambda x: F.gelu(x) / (x * x + 0.1)), (128, 256), 0.9, STEEP),
    "remainder": (lambda: Gelu(act=lambda x: torch.remainder(5 * x, 1) * x), (128, 256), 0.9, STEEP),
    "abs": (lambda: Gelu(act=lambda x: x.abs() + F.gelu(x)), (128, 256), 0.9, STEEP),
    "pooling": (lambda: Gelu(act=lambda x: F.max_pool1d(x[None], 3, 1, 1)[0] + F.gelu(x)), (128, 256), 0.9, STEEP),
    "swiglu": (SwiGLU, (128, 256), 0.9, {"mm: activation 4", "mm: gate 4"}),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds(name: str) -> None:
    block, shape, budget, expected = KINDS[name]
    error, records = coded(block, shape, error="coarse", budget=budget)
    kinds = [(each.operation, each.kind, each.bits, each.reason) for each in records if each.operation != "input"]
    assert {f"{name}: {' '.join(str(part) for part in parts if part)}" for name, *parts in kinds} == expected
    assert error < 0.3


def test_fused_attention_reads_no_codes_with_rounding() -> None:
    error, records = coded(sharp, SIZE, error="rounding", budget=0.9)
    assert [record.reason for record in records if record.operation == "addmm"] == ["attention"]
    assert error < 0.01


def test_bits_by_kind() -> None:
    _, records = coded(SwiGLU, (128, 256), bits={"gate": 6, "attention": 8}, budget=0.9)
    assert {(record.kind, record.bits) for record in records if record.kind} == {("gate", 6), ("activation", 8)}
    errors = {record.bits: record.error for record in records if record.kind}
    assert 0.004 < errors[8] < 0.007 and 0.015 < errors[6] < 0.03


@pytest.mark.parametrize("error", ["exact", "rounding", pytest.param("coarse", marks=pytest.mark.full)])
def test_a_layer_saves_no_more_than_in_the_context(error: str) -> None:
    """A LLaMA layer: the difference between models of two layers and of one."""
    sizes: dict[bool, list[int]] = {False: [], True: []}
    for layers in (1, 2):
        for compiled in sizes:
            torch._dynamo.reset()
            torch.manual_seed(0)
            shape = benchmark.KINDS["llama"] | {"num_hidden_layers": layers}
            model = benchmark.LastHidden("llama", shape).bfloat16()
            call = run_graphs(model, fitact.compile_options(error=error), 1.0) if compiled else model
            with count_saved(model) as saved, nullcontext() if compiled else fitact.saving(error):
                y = call(torch.arange(256)[None])
            sizes[compiled].append(saved.bytes)
            del y
    layer = {compiled: two - size for compiled, (size, two) in sizes.items()}
    assert layer[True] <= layer[False] + 2 * 4 * 256  # statistics of the norms, which the context recomputes
    assert layer[True] / (256 * 256 * 2) < {"exact": 11.7, "rounding": 8.0, "coarse": 4.2}[error]  # of its input


COMPARED: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda z: z.clamp(-0.3, 0.3),
    "clipped": lambda z: F.hardtanh(z, -0.3, 0.3),
    "threshold": lambda z: F.threshold(z, 0.1, 20.0),
    "choice": lambda z: torch.where(z > 0.3, z * z, 2 * z),
    "largest of a row": lambda z: z.amax(-1, keepdim=True),
    "least of all": torch.min,
    "larger of two": lambda z: torch.maximum(z, z.flip(0)),
    "in two dimensions": lambda z: torch.where(z[None] > 0.3, z[None], 1.0)[0],
}


@pytest.mark.parametrize("name", COMPARED)
def test_what_is_compared(name: str) -> None:
    """Masks that backward would compute from codes come from the forward pass, in bits."""

    def block() -> nn.Module:
        return Gelu(act=lambda z: F.gelu(z) + COMPARED[name](z))

    error, records = coded(block, (128, 256), bits=8)
    assert error < 0.01
    (record,) = (record for record in records if record.operation == "addmm")
    assert 8.5 / 32 < record.after / record.before <= 11.5 / 32


def test_one_element_is_compared() -> None:
    error, _ = coded(lambda: Gelu(act=lambda z: F.gelu(z) + F.relu(z[0, 0])), (128, 256), bits=8)
    assert error < 0.01


@pytest.mark.parametrize(("error", "bits", "most"), [("rounding", 8, 0.005), ("coarse", 4, 0.07)])
def test_slopes_after_a_norm(error: str, bits: int, most: float) -> None:
    """Of a ReLU after a norm whose input has codes; the rows of images do not fill whole bytes."""
    off, records = coded(lambda: convolved(nn.GroupNorm(4, 64)), IMAGE, error=error, budget=0.9)
    assert off < most
    (record,) = (record for record in records if record.operation == "convolution")
    assert bits + 1 < 32 * record.after / record.before < bits + 2


@torch.library.custom_op("fitact_tests::steep", mutates_args=())
def steep(x: Tensor) -> Tensor:
    return (x.abs() + 1e-3).log()


@torch.library.custom_op("fitact_tests::steep_backward", mutates_args=())
def steep_backward(dy: Tensor, x: Tensor) -> Tensor:
    return dy * x.sign() / (x.abs() + 1e-3)


steep.register_fake(lambda x: torch.empty_like(x))
steep_backward.register_fake(lambda dy, x: torch.empty_like(x))
steep.register_autograd(
    lambda ctx, dy: steep_backward(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def test_operators_that_nobody_knows() -> None:
    error, records = coded(lambda: Gelu(act=lambda z: F.gelu(z) + steep(z)), (128, 256), bits=8)
    assert error < 0.01
    assert {each.reason for each in records if each.operation == "addmm"} == {"of an operator that is not known"}


def test_random_numbers_in_a_checkpoint() -> None:
    """The forward graph hands on the state of the generator under another name."""

    def call(m: Any, x: Tensor) -> Tensor:
        y: Any = checkpoint(lambda h: m.c(F.rrelu(m.b(h), training=True)), F.relu(m.a(x)), use_reentrant=False)
        return y

    model = built(call, **{name: nn.Linear(64, 64) for name in "abc"})
    run_graphs(model, fitact.compile_options(error="exact"), 0.9)(torch.randn(256, 64)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_signs_at_a_jump() -> None:
    """An element that is not 0 keeps its sign, where a slope jumps at 0, however small it is beside its block."""

    def rectified() -> nn.Module:
        parts = {"up": nn.Linear(256, 1024, bias=False), "down": nn.Linear(1024, 256)}
        with torch.no_grad():
            parts["up"].weight.mul_(1e-5)
            parts["up"].weight[::64] *= 1e5
        return built(lambda m, x: x + m.down(F.leaky_relu(m.up(x), -1.0)), **parts)

    (_, expected), (_, gradients), records = beside(partial(made, rectified, dtype=torch.float32), (128, 256))
    assert [record.kind for record in records if record.bits] == ["activation"]
    assert off(gradients[:1], expected[:1]) < 1e-5  # of the input, which the slopes alone decide


def test_views_of_one_storage() -> None:
    def split(m: Any, x: Tensor) -> Tensor:
        a, b = m.up(x).chunk(2, -1)
        return m.down(a.exp() * b.t().tanh().t())

    def make() -> nn.Module:
        return built(split, up=nn.Linear(64, 256), down=nn.Linear(128, 64))

    error, records = coded(make, (128, 64), budget=1.0)
    (record,) = (record for record in records if record.operation == "addmm")
    assert (record.before, record.after) == (4 * 128 * 256, blocks.nbytes((128, 256), 8))
    assert error < 0.02


def test_inputs() -> None:
    for inputs, bits in ((False, None), (True, 8)):
        torch._dynamo.reset()
        error, records = coded(Gelu, (128, 256), inputs=inputs, budget=0.9)
        assert {record.bits for record in records if record.operation == "input"} == {bits}
        assert error < 0.02


OPS = torch.ops.fitact


@pytest.mark.parametrize("shape", [(64, 128), (3, 77, 192), (130, 34), (65, 33), (4096,)])
@pytest.mark.parametrize("bits", [8, pytest.param(5, marks=pytest.mark.full), 4])
def test_the_ops_are_those_of_saving(shape: tuple[int, ...], bits: int) -> None:
    """With rows as long as the features, or of 64, as where sizes vary; and without numbers as with them."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    for columns in {blocks.columns_of(shape), blocks.BLOCK}:
        *parts, form = OPS.encode_blocks(x, columns, bits, False)
        assert sum(part.nbytes for part in parts) <= x.numel() * (bits + 0.3125) / 8 + 32 * columns + 64
        actual = OPS.decode_blocks(*parts, form, columns, x.dtype)
        assert form.nbytes == 0 and actual.shape == x.shape and actual.dtype == x.dtype
        if columns == blocks.columns_of(shape):
            expected = blocks.encode(x, bits)
            assert all(torch.equal(part, other) for part, other in zip(parts, expected, strict=True))
            assert sum(part.nbytes for part in parts) == blocks.nbytes(shape, bits)
            assert torch.equal(actual, blocks.decode(*expected, shape, x.dtype))
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(OPS.encode_blocks, (x, columns, bits, False), test_utils=checks)
        torch.library.opcheck(OPS.decode_blocks, (*parts, form, columns, x.dtype), test_utils=checks)
