"""Memory-sharing norms beside the formula in float64, their machine code, and norms merged into linear layers."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fitact.base import UsageError
from fitact.runtime.kernels.norms import LAYER, RMS
from fitact.runtime.measure.prepare import imported
from fitact.runtime.measure.saved import count_saved
from fitact.runtime.norms import MSLayerNorm, MSRMSNorm, ms_layer_norm, ms_rms_norm
from fitact.runtime.norms.merge import merge_norm
from tests.support.built import built
from tests.support.generated import EACH_DTYPE, EACH_HALF, backward_op, forward_op, sizes
from tests.support.rows import full, turning

EPS = 1e-5
KINDS: dict[str, Callable[..., Tensor]] = {"layer": ms_layer_norm, "rms": ms_rms_norm}
MODULES: dict[str, tuple[Any, Any]] = {"layer": (MSLayerNorm, nn.LayerNorm), "rms": (MSRMSNorm, nn.RMSNorm)}
KEYS = {"layer": LAYER, "rms": RMS}
every_kind = pytest.mark.parametrize("kind", KINDS)


def expected(x: Tensor, dy: Tensor, kind: str, eps: float = EPS, dims: int = 1) -> tuple[Tensor, Tensor]:
    """The norm of the last dimensions as it is defined, in operations that PyTorch differentiates."""
    leaf, over = x.detach().double().requires_grad_(), tuple(range(-dims, 0))
    centred = leaf - leaf.mean(over, keepdim=True) if kind == "layer" else leaf
    y = centred / (centred.square().mean(over, keepdim=True) + eps).sqrt()
    (dx,) = torch.autograd.grad(y, leaf, dy.double())
    return y.detach(), dx


def check(kind: str, x: Tensor, shape: tuple[int, ...], eps: float = EPS) -> None:
    """Within a few roundings of z and, of dx, of the largest dz/σ: what dx is computed from is the rounded z."""
    leaf = x.detach().requires_grad_()
    y = KINDS[kind](leaf, shape, eps)
    assert y.dtype == x.dtype and y.shape == x.shape and y.is_contiguous()
    unit, wide, over = torch.finfo(x.dtype).eps, x.detach().double(), tuple(range(-len(shape), 0))
    centre = wide.mean(over, keepdim=True) if kind == "layer" else 0.0
    sigma = ((wide - centre).square().mean(over, keepdim=True) + eps).sqrt()
    for dy in (torch.randn(x.shape), torch.randn(*x.shape, 2)[..., 0], torch.randn(x.shape[1:]).expand(x.shape)):
        (dx,) = torch.autograd.grad(y, leaf, dy.to(x.dtype), retain_graph=True)
        assert dx.dtype == x.dtype
        reference, gradient = expected(x, dy.to(x.dtype), kind, eps, len(shape))
        torch.testing.assert_close(y.double(), reference, rtol=unit, atol=4 * unit)
        largest = float((dy.abs().amax(over, keepdim=True) / sigma).max()) if x.numel() else 0.0
        error = (dx.double() - gradient).abs()
        assert not x.numel() or float(error.max()) <= 4 * unit * largest * max(1.0, float(reference.abs().max()))


# Inputs, and the dimensions that are normalised.
INPUTS: dict[str, tuple[Callable[[], Tensor], int]] = {
    **{f"{n} columns": (lambda n=n: torch.randn(5, 3, n) * 2 + 0.3, 1) for n in (1, 7, 768, 4096, 10_000)},
    "small": (lambda: torch.randn(6, 100) * 1e-3, 1),
    "large": (lambda: torch.randn(6, 100) * 1e4, 1),
    "two dimensions of four": (lambda: torch.randn(4, 3, 5, 7), 2),
    "all dimensions": (lambda: torch.randn(5, 7), 2),
    "no rows": (lambda: torch.randn(0, 7), 1),
    "transposed": (lambda: torch.randn(64, 30).t(), 1),
    "sliced": (lambda: torch.randn(30, 128)[::2, ::2], 1),
    "expanded": (lambda: torch.randn(1, 64).expand(10, 64), 1),
    "expanded row": (lambda: torch.randn(10, 1).expand(10, 64), 1),
    "rows of zeros and of 3": (lambda: torch.tensor([[0.0], [3.0]]).repeat(1, 64), 1),
    "image": (lambda: torch.randn(2, 64, 5, 5).flatten(2).transpose(1, 2), 1),
}


@every_kind
@EACH_DTYPE
@pytest.mark.parametrize("name", INPUTS)
def test_value_and_gradient(kind: str, name: str, dtype: torch.dtype) -> None:
    make, dims = INPUTS[name]
    x = make()
    if name != "large" or dtype != torch.float16:
        check(kind, x.to(dtype), tuple(x.shape[-dims:]))
    if dtype == torch.float32:
        for eps in (1e-12, 0.1, *([0.0] if "columns" not in name and "row" not in name else [])):
            check(kind, x, tuple(x.shape[-dims:]), eps)


def test_variance_does_not_cancel() -> None:
    """With mean 1e4 and variance 1 the mean square has in float32 an error of 6, as large as the variance."""
    x = torch.randn(4, 1000) + 1e4
    reference, _ = expected(x, torch.ones_like(x), "layer")
    torch.testing.assert_close(ms_layer_norm(x, 1000).double(), reference, rtol=0, atol=4e-3)


@every_kind
@EACH_HALF
def test_half_precision_has_statistics_in_float32(kind: str, dtype: torch.dtype) -> None:
    """A row's sum and squares leave float16; and 1/σ is kept to 24 bits."""
    x = (torch.randn(3, 5000) * 300 + 60).to(dtype)
    assert x.float().square().sum() > 65504
    check(kind, x, (5000,))
    _, scale = forward_op(x, dtype, KEYS[kind], inner=5000, eps=EPS)
    wide = x.double() - (x.double().mean(-1, keepdim=True) if kind == "layer" else 0)
    assert scale.dtype == torch.float32
    torch.testing.assert_close(scale.double(), (wide.square().mean(-1) + EPS).rsqrt(), rtol=1e-6, atol=0)


@every_kind
@EACH_DTYPE
def test_modules_of_pytorch(kind: str, dtype: torch.dtype) -> None:
    """NaN and infinities are theirs, and the default epsilon: numbers so small that it decides."""
    x = (torch.randn(8, 32) * 1e-3).to(dtype)
    x[1:4, 2] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    ours, baseline = MODULES[kind]
    unit = 4 * torch.finfo(dtype).eps
    expected = baseline(32, elementwise_affine=False)(x)
    torch.testing.assert_close(ours(32)(x), expected, rtol=unit, atol=unit, equal_nan=True)


@every_kind
@EACH_DTYPE
def test_saved_is_what_is_returned_and_a_number_a_row(kind: str, dtype: torch.dtype) -> None:
    for shape in ((96,), (10, 96)):
        x = torch.randn(6, 10, 96, requires_grad=True, dtype=dtype)
        with count_saved() as saved:
            y = KINDS[kind](x, shape)
        rows = 60 if len(shape) == 1 else 6
        assert sizes(saved) == [rows * (8 if dtype == torch.float64 else 4), y.nbytes]
        assert y.untyped_storage()._cdata in saved.storages
    with count_saved() as saved:
        z = KINDS[kind](x.detach(), shape)
    assert not saved.storages and torch.equal(z, y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        KINDS[kind](x, shape).mul_(2).sum().backward()


@every_kind
@EACH_HALF
def test_autocast_saves_no_copy(kind: str, dtype: torch.dtype) -> None:
    """The autocast dtype is returned, so that the layer after it saves that very storage."""
    x = torch.randn(100, 64, requires_grad=True)
    layer = nn.Linear(64, 32)
    with torch.autocast("cpu", dtype=dtype), count_saved(layer) as saved:
        z = KINDS[kind](x, 64, EPS)
        y = layer(z)
    assert z.dtype == dtype
    assert saved.bytes == 100 * 64 * 2 + 100 * 4 + 64 * 32 * 2  # with autocast's copy of the weights
    y.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    reference, gradient = expected(x, (torch.ones(100, 32) @ layer.weight).to(dtype), kind)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(z.detach().double(), reference, rtol=unit, atol=unit)
    torch.testing.assert_close(x.grad.double(), gradient, rtol=4 * unit, atol=16 * unit)
    with torch.autocast("cpu", dtype=dtype):
        assert KINDS[kind](torch.randn(4, 64, dtype=torch.float64), 64).dtype == torch.float64


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # its own, which PyTorch hides itself
@every_kind
def test_opcheck(kind: str) -> None:
    for dtype, out in ((torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float64,) * 2):
        x = torch.randn(6, 4, 9, dtype=dtype, requires_grad=True)
        z, scale = (each.detach() for each in forward_op(x, out, KEYS[kind], inner=36, eps=EPS, check=True))
        backward_op(torch.randn_like(z), z, scale, dtype, KEYS[kind], inner=36, check=True)


@pytest.mark.parametrize("module", [MSLayerNorm, MSRMSNorm])
def test_modules(module: Any) -> None:
    norm = module(16, eps=1e-4)
    assert list(norm.parameters()) == [] and norm.state_dict() == {}
    assert repr(norm) == f"{module.__name__}((16,), eps=0.0001)"
    x = torch.randn(3, 16)
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert torch.equal(other(x), norm(x))
    assert norm.weight is None and norm.bias is None


@pytest.mark.parametrize("name", ["MSLayerNorm", "ms_rms_norm"])
def test_wrong_inputs(name: str) -> None:
    norm: Any = MSLayerNorm(4) if name == "MSLayerNorm" else lambda x: ms_rms_norm(x, 4)
    for wrong in (torch.arange(4), torch.ones(4, dtype=torch.complex64), 1.0):
        with pytest.raises(TypeError, match=rf"{name}: expected a tensor of float16.*, got "):
            norm(wrong)
    for shape in ((), (5,), (4, 1)):
        with pytest.raises(ValueError, match=rf"{name}: expected a tensor whose shape ends in \(4,\), got "):
            norm(torch.ones(shape))
    with pytest.raises(ValueError, match="at least one dimension"):
        MSRMSNorm(())


COLUMNS = {"short": 32, "several": 768, "block": 4096, "longest": 16384, "odd": 1003, "long": 50_000}
PAIRS = ("bf16 bf16", "fp16 fp16", "fp32 fp32", "fp32 bf16")  # dtypes of x and z
QUICK = {
    ("forward", "layer", "bf16 bf16", "several", "sm_90"),
    ("backward", "layer", "bf16 bf16", "several", "sm_90"),
    ("forward", "rms", "fp32 bf16", "block", "gfx942"),
    ("backward", "layer", "fp32 bf16", "block", "gfx942"),
    ("backward", "layer", "fp32 fp32", "longest", "sm_80"),
    ("forward", "layer", "fp16 fp16", "long", "sm_90"),
    ("backward", "layer", "bf16 bf16", "long", "gfx942"),
}
EVERY = turning(turning(("forward", "backward"), KINDS, COLUMNS, PAIRS), ("sm_80", "sm_90", "gfx942"))
EVERY = {(pass_, kind, dtypes, columns, target) for (pass_, kind, columns, dtypes), target in EVERY}


@pytest.mark.parametrize(("pass_", "kind", "dtypes", "columns", "target"), full(sorted(EVERY | QUICK), QUICK))
def test_compiled_without_spills(pass_: str, kind: str, dtypes: str, columns: str, target: str) -> None:
    """In vectors of 8 or 16 bytes where the rows are aligned."""
    pytest.importorskip("triton", reason="Triton is for Linux only")
    from tests.support.compiled import NormKernel, code

    x, z = dtypes.split()
    kernel = code(NormKernel(kind, pass_, COLUMNS[columns]).compile(x, target, z).asm)
    assert kernel.spills == 0 and kernel.registers < (256 if target == "gfx942" else 128)
    assert kernel.load >= 8 or columns == "odd"


SIZE = 24
OF_MODELS = "transformers.models.{0}.modeling_{0}"
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "LayerNorm": nn.LayerNorm,
    "RMSNorm": nn.RMSNorm,
    "LLaMA's": lambda width: imported(OF_MODELS.format("llama")).LlamaRMSNorm(width),
    "Gemma's": lambda width: imported(OF_MODELS.format("gemma")).GemmaRMSNorm(width),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", NORMS)
def test_the_same_function_from_fewer_bytes(kind: str, bias: bool) -> None:
    torch.manual_seed(0)
    norm = NORMS[kind](SIZE)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    layers = {name: nn.Linear(SIZE, 8, bias) for name in ("a", "b")}
    baseline = built(lambda m, x: torch.cat([m.a(z := m.norm(x)), m.b(z)], -1), norm=norm, **layers)
    model = copy.deepcopy(baseline)
    model.norm = merge_norm(model.norm, [model.a, model.b])
    assert type(model.norm) is (MSLayerNorm if kind == "LayerNorm" else MSRMSNorm)
    x = torch.randn(6, SIZE, requires_grad=True)
    results = []
    for each in (baseline, model):
        with count_saved(each) as saved:
            y = each(x)
        (gradient,) = torch.autograd.grad(F.softplus(y).sum(), x)
        results.append((y.detach(), gradient, saved.bytes))
    torch.testing.assert_close(results[1][:2], results[0][:2], rtol=1e-4, atol=1e-5)
    assert results[1][2] == x.nbytes + 6 * 4 and results[0][2] >= 2 * x.nbytes  # both layers save one tensor


def test_half_precision() -> None:
    norm = NORMS["LLaMA's"](SIZE).bfloat16()
    nn.init.normal_(norm.weight)
    layer = nn.Linear(SIZE, 8, bias=False, dtype=torch.bfloat16)
    expected = layer.weight * norm.weight
    assert type(merge_norm(norm, [layer, layer])) is MSRMSNorm  # a module of two names is one
    assert torch.equal(layer.weight, expected)


class Adapted(nn.Module):
    """A layer around a linear one whose weight cannot be set, as peft's are."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.in_features = nn.Linear(SIZE, 2), SIZE

    @property
    def weight(self) -> Tensor:
        return self.base.weight


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_what_is_trained_stays_trained(frozen: str) -> None:
    layer = nn.Linear(SIZE, 2)
    layer.get_parameter(frozen).requires_grad_(False)
    before = dict(layer.named_parameters())
    merge_norm(nn.LayerNorm(SIZE), [layer])
    assert all(layer.get_parameter(name) is parameter for name, parameter in before.items())
    assert [name for name, parameter in before.items() if not parameter.requires_grad] == [frozen]


class Epsilon(nn.Module):
    """A norm whose epsilon has a name of its own, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale, self.epsilon = nn.Parameter(torch.rand(SIZE) + 0.5), 4.0, 1e-4

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * self.weight


def test_epsilon() -> None:
    norm, layer, x = Epsilon(), nn.Linear(SIZE, 4), torch.randn(8, SIZE) * 1e-3
    before, state = layer(norm(x)), torch.get_rng_state()
    shared = merge_norm(norm, [layer])
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(layer(shared(x)), before, rtol=1e-4, atol=1e-5)


NORM, SIZES = "norm: expected a LayerNorm or RMSNorm", f"layers: expected linear layers of {SIZE} inputs, got "
Other = type("Other", (nn.LayerNorm,), {"forward": lambda self, x: x**3})
WRONG = {
    "another norm": (Other(SIZE), nn.Linear(SIZE, 2), rf"{NORM} .*, got Other"),
    "no weight": (nn.LayerNorm(SIZE, elementwise_affine=False), nn.Linear(SIZE, 2), NORM),
    "another size": (nn.LayerNorm(SIZE), nn.Linear(SIZE + 1, 2), f"{SIZES}Linear"),
    "an adapter": (nn.LayerNorm(SIZE), Adapted(), f"{SIZES}Adapted"),
    "no linear layer": (nn.LayerNorm(SIZE), nn.Bilinear(SIZE, 2, 2), f"{SIZES}Bili"),
}


@pytest.mark.parametrize(("norm", "layer", "message"), WRONG.values(), ids=WRONG)
def test_wrong_use(norm: nn.Module, layer: nn.Module, message: str) -> None:
    good = nn.Linear(SIZE, 2)
    state = copy.deepcopy(good.state_dict())
    with pytest.raises(UsageError, match=message):
        merge_norm(norm, [good, layer])
    torch.testing.assert_close(good.state_dict(), state, rtol=0, atol=0)
