"""Layers whose inputs are recomputed: convolutions and norms, with activations after them and sums before them."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import fitact
from fitact.runtime.measure.prepare import imported
from fitact.runtime.measure.saved import count_saved
from tests.support.blocks import CONVOLUTIONS, UNITS, Gemma, RMSNorm, built, unit
from tests.support.blocks import IMAGES as X
from tests.support.rows import full
from tests.support.saving import HALF, SETTINGS, agree, both_ways, observed, pair, peaks, saves, saving_less

SLOPES = nn.ReLU(), nn.ReLU(True), nn.ReLU6(True), nn.LeakyReLU(), nn.LeakyReLU(0.01, True)
CLIPPED = (
    *(nn.Hardtanh(*ends) for ends in ((), (0, 0.5), (-2, 3), (0.2, 0.5))),
    nn.Hardtanh(inplace=True),
    nn.ReLU6(),
)


@pytest.mark.parametrize("act", SLOPES)
def test_slopes_in_bits(act: nn.Module) -> None:
    """No decoded number changes a slope: biases of norms are off by what follows alone, which here is nothing."""
    torch.manual_seed(0)
    x = torch.randn(4, 16, 32, 32)
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), act, nn.Conv2d(16, 4, 1))
    expected = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    with count_saved(model) as saved, fitact.saving("rounding", bits={"batch_norm": 8}):
        y = model(x)
    actual = torch.autograd.grad(y.square().sum(), [*model.parameters()])
    pairs = zip(dict(model.named_parameters()), actual, expected, strict=True)
    error = {name: float((a - b).norm() / b.norm()) for name, a, b in pairs}
    assert error["1.bias"] == 0
    assert all(error[name] < 0.01 for name in ("0.weight", "1.weight", "3.weight"))
    codes, slopes, shifts = x.numel() + x.numel() // 64 * 2, x.numel() // 8, 4 * x.shape[1] * 4
    assert 0 < saved.bytes - x.nbytes - codes - slopes < 2 * shifts + 1024


@pytest.mark.parametrize("act", [*SLOPES, *CLIPPED])
def test_slopes_without_norms(act: nn.Module) -> None:
    """The first bias has the baseline's gradient, bit for bit: it depends on slopes alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 16, 3), act, nn.Conv2d(16, 4, 1))
    x, weights = 3 * torch.randn(4, 16, 32, 32), torch.randn(4, 4, 30, 30)
    gradients = []
    for context in (nullcontext(), fitact.saving("coarse")):
        with context:
            loss = (model(x) * weights).sum()
        gradients.append(torch.autograd.grad(loss, [*model.parameters()]))
    (_, bias, last, _), (_, actual, coarse, _) = gradients
    assert torch.equal(actual, bias)
    assert 0 < (coarse - last).norm() < 0.15 * last.norm()


@pytest.mark.parametrize("act", [nn.ReLU6(), nn.Hardtanh(-0.2, 0.2)])
def test_slopes_of_a_part(act: nn.Module) -> None:
    """An activation of half of the channels saves its slope, too, where the whole has codes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 32, 3), built(lambda _, y: act(y.chunk(2, 1)[0])), nn.Conv2d(16, 4, 1))
    x, weights, gradients = torch.randn(4, 16, 32, 32), torch.randn(4, 4, 30, 30), []
    for context in (nullcontext(), fitact.saving("rounding")):
        with context:
            loss = (model(x) * weights).sum()
        gradients.append(torch.autograd.grad(loss, [*model.parameters()])[1])  # of the first bias
    assert torch.equal(*gradients)


def frozen(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers).requires_grad_(False)


CONVOLUTION = nn.Conv2d(16, 16, 3, padding=1)
# Layers whose backward reads only the slope of an activation, and bytes of indices beside it.
ALONE: dict[str, tuple[nn.Module, int]] = {
    "a linear layer": (frozen(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)), 0),
    "in place": (frozen(CONVOLUTION, nn.ReLU(True), CONVOLUTION), 0),
    "leaky": (frozen(CONVOLUTION, nn.LeakyReLU(0.2), CONVOLUTION), 0),
    "leaky, in place": (frozen(CONVOLUTION, nn.LeakyReLU(0.2, True), CONVOLUTION), 0),
    "max pooling": (frozen(CONVOLUTION, nn.ReLU(), nn.MaxPool2d(2)), 2),
    "average pooling": (frozen(nn.ReLU(), nn.AvgPool2d(4)), 0),
    "the largest": (frozen(nn.ReLU(), built(lambda _, y: y.max(0)[0] + y.sum(0))), 1),
}


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("error", ["exact", "coarse"])
@pytest.mark.parametrize("name", ALONE)
def test_slopes_alone(name: str, error: str, order: torch.memory_format) -> None:
    """What only a kind of ReLU reads is stored in bits, and gradients are the baseline's."""
    x = torch.randn(4, 16, 32, 32).contiguous(memory_format=order)
    x[0, :, 0, 0] = 0
    if error == "exact":  # codes of a block know no number beside a NaN
        x[0, 0, 2, 3] = torch.nan
    model, index = ALONE[name]
    before, after = both_ways(model, x.requires_grad_(), error=error)
    assert before >= x.nbytes and after == x.numel() // 8 + index * x.numel() // 4


def later(h: Tensor) -> Tensor:
    y = F.leaky_relu(h, 0.3)
    del h
    F.relu(torch.ones(1))
    return y.square()


# What else reads what a kind of ReLU saves of h, which is then stored once.
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "before": lambda h: F.gelu(h) + F.leaky_relu(h),
    "the output, later": later,
    "parts": lambda h: (lambda y: y[:, ::2] * y[:, 1::2])(F.relu(h)).repeat(1, 2),
    "nothing, but many rows are one": lambda h: F.leaky_relu(h[:1].expand(4096, -1)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_slopes_beside_other_readers(name: str) -> None:
    x, weight = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    before, after = both_ways(lambda x: OTHERS[name](x @ weight) @ weight, x)
    assert after == weight.nbytes + x.nbytes <= before


@pytest.mark.parametrize("error", ["exact", "coarse"])
def test_slopes_inside_of_other_hooks(error: str) -> None:
    """What is stored elsewhere stays there."""
    model, x = frozen(CONVOLUTION, nn.ReLU(), CONVOLUTION, nn.ReLU()), torch.randn(4, 16, 32, 32).requires_grad_()
    with save_on_cpu(), fitact.saving(error):
        y = model(x) * 1
    assert torch.autograd.grad(y.sum(), x)[0].equal(torch.autograd.grad(model(x).sum(), x)[0])


def test_slopes_of_what_is_changed() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    for context in (nullcontext(), fitact.saving()):
        with context:
            y = F.relu(x * 2)
            z = y.sum()
            y.mul_(2)
            del y
            F.relu(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.backward()


@pytest.mark.parametrize("read", ["nothing", "a sum", "a layer", "a layer in the end"])
def test_pooling_after_a_relu(read: str) -> None:
    """Of a ReLU's output its slope and what is pooled are stored; or the output alone, if something reads that."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        z = self.second(F.avg_pool2d(y, 2))
        if read == "a layer":
            z = z + self.third(y).sum()
        z = F.relu(z)
        if read == "a layer in the end":
            z = z + self.third(y).sum()
        return z + (y.sum() if read == "a sum" else 1)

    x, layers = torch.randn(4, 16, 32, 32), {name: nn.Conv2d(16, 16, 1) for name in ("first", "second", "third")}
    model = built(forward, **layers)
    if "layer" not in read:
        del model.third
    _, after = both_ways(model, x)
    last = x.nbytes // 4
    assert after == x.nbytes + (x.nbytes if "layer" in read else last + x.numel() // 8) + last // 32


def test_slopes_see_changes() -> None:
    for context in (nullcontext(), fitact.saving(bits=8)):
        with context:
            y = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU())(torch.randn(4, 16, 32, 32).requires_grad_())
            z = y.sum()
        y.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.backward()


OPTIONS: dict[str, dict[str, Any]] = {
    "padded": {"padding": 1},
    "no bias": {"bias": False, "padding": 2},
    "strided": {"stride": 2, "padding": 1},
    "dilated": {"dilation": 2, "padding": 2},
    "depthwise": {"groups": 8, "padding": 1},
    "grouped": {"groups": 4, "stride": 2},
    "pointwise": {"kernel_size": 1},
    "same": {"padding": "same", "dilation": 2},
    "same, even": {"padding": "same", "kernel_size": 4},
    "valid": {"padding": "valid"},
    "circular": {"padding": 2, "padding_mode": "circular"},
    "reflected": {"padding": 2, "padding_mode": "reflect"},
    "replicated": {"padding": "same", "kernel_size": 4, "padding_mode": "replicate"},
}


def convolutions(n: int, act: Callable[[], nn.Module] = nn.GELU, **options: Any) -> nn.Module:
    first = CONVOLUTIONS[n](8, 8, 3, padding=1)
    return nn.Sequential(first, act(), CONVOLUTIONS[n](8, 16, **({"kernel_size": 3} | options)))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("n", full([1, 2, 3], [2]))
def test_options(n: int, options: str) -> None:
    make = partial(convolutions, n, **OPTIONS[options])
    for x, dtype in ((X[n][0], torch.float32), (X[n], HALF)):
        agree(make, x=x, dtype=dtype)
    before, after = saving_less(make, X[n], X[n].repeat(8, *(1 for _ in range(n + 1))))
    # with an even kernel, PyTorch pads in the convolution, and saves the copy that it makes
    assert after <= before if options == "same, even" else after < before


@pytest.mark.parametrize("norm", [partial(nn.BatchNorm2d, 16), partial(nn.GroupNorm, 4, 16)])
@pytest.mark.parametrize("act", [nn.SiLU, nn.ReLU, partial(nn.SiLU, inplace=True)])
def test_bytes(norm: Callable[[], nn.Module], act: Callable[[], nn.Module]) -> None:
    """The inputs of the first convolution and the norm; a mean and 1/σ of each of 16 channels or groups."""
    x = torch.randn(4, 8, 12, 12)
    assert saves(pair(partial(unit, norm, act)), x)[1] == 4 * (x.numel() + 2 * x.numel() + 2 * 16)


@pytest.mark.parametrize("act", [nn.ReLU, nn.SiLU, nn.Hardswish, nn.ELU, nn.Hardtanh, nn.ReLU6, nn.Mish])
def test_activations_in_place(act: Callable[..., nn.Module]) -> None:
    def call(m: Any, x: Tensor) -> Any:
        y = m.conv(x)
        z = m.act(y)
        a = m.norm(z)
        b = m.act(a)
        assert y is z and a is b
        return m.last(b) + b.sum() + y.mean()

    layers = {"conv": nn.Conv2d(8, 8, 1), "norm": nn.BatchNorm2d(8), "last": nn.Conv2d(8, 4, 1)}
    agree(lambda: built(call, **layers, act=act(inplace=True)), x=X[2])


def test_transposed_and_frozen() -> None:
    """Their inputs are recomputed too; of a frozen convolution's, the shape is stored."""
    last, wide = nn.Conv2d(8, 8, 1).requires_grad_(False), X[2].repeat(8, 1, 1, 1)
    layers = nn.Conv2d(8, 8, 1), nn.GELU(), nn.ConvTranspose2d(8, 8, 1), nn.GELU(), last
    assert saving_less(lambda: nn.Sequential(*layers), X[2], wide)[1] == 3 * wide.nbytes


def test_errors_are_pytorchs() -> None:
    for sizes in (8, 9), (2, 7, 9, 8), (1, 2, 8, 9, 8):
        models, x = pair(partial(convolutions, 2)), torch.randn(sizes).relu()
        actual = [observed(each, lambda model, x: model[2](model[1](x)), x) for each in models]
        assert isinstance(actual[0], str) and actual[0] == actual[1]


BETWEEN = [nn.ReLU, nn.SiLU, nn.Hardswish, nn.Tanh, nn.ELU]
OVER = [nn.ReLU, nn.SiLU, nn.Hardswish, nn.Mish, nn.Hardsigmoid, nn.ReLU6, nn.Hardtanh, nn.ELU, nn.CELU]
PEAKS: dict[str, Callable[[], nn.Module]] = {
    **{name: make for name, make in UNITS.items() if name != "turned"},
    **{
        f"{name} norm, {i}, {getattr(act, 'func', act).__name__}": partial(
            lambda norm, act: nn.Sequential(nn.Conv2d(8, 64, 3), norm(64), act(), nn.Conv2d(64, 8, 3)), norm, act
        )
        for name, norm in (("batch", nn.BatchNorm2d), ("group", partial(nn.GroupNorm, 4)))
        for i, act in enumerate([*BETWEEN, *(partial(each, inplace=True) for each in OVER)])
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("name", PEAKS)
def test_peak(name: str, dtype: torch.dtype) -> None:
    """Of a unit alone, too: what is recomputed for an activation is freed before its gradient if it can be."""
    for count in (1, 2):
        models = pair(lambda n=count: nn.Sequential(*(PEAKS[name]() for _ in range(n))), dtype)
        before, after = peaks(models, torch.randn(8, 8, 16, 16).to(dtype))
        assert after <= before


# Shares of the baseline's bytes, a little above what was measured.
SHARES = {"convnext_atto": 0.51, "mobilenetv3_small_100": 0.41, "resnet18": 0.59, "efficientnet_b0": 0.33}


@pytest.mark.parametrize("name", full(SHARES, ["mobilenetv3_small_100"]))
def test_timm(name: str) -> None:
    timm = imported("timm")
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    for dtype, order in ((torch.float32, torch.channels_last), (HALF, torch.contiguous_format)):
        make = partial(lambda order: timm.create_model(name, num_classes=10).to(memory_format=order), order)
        before, after = saving_less(make, x.contiguous(memory_format=order), dtype=dtype)
        assert after <= SHARES[name] * before


WIDTH = 16


def block(norm: Callable[[], nn.Module], after: bool, turned: bool, p: float) -> nn.Module:
    def call(m: Any, x: Tensor) -> Tensor:
        for before, layer, after in zip(m.before, m.layers, m.after, strict=True):
            y = after(F.dropout(layer(before(x)), p, m.training))
            x = y + x if turned else x + y
        return x

    kinds = {"before": norm, "layers": partial(nn.Linear, WIDTH, WIDTH), "after": norm if after else nn.Identity}
    return built(call, **{name: nn.ModuleList(make() for _ in range(2)) for name, make in kinds.items()})


def last() -> nn.Module:
    """Return a sum that is normed, as BERT's; the next block reads what the norm makes of it."""
    parts = {"dense": nn.Linear(WIDTH, WIDTH), "drop": nn.Dropout(0.1), "norm": nn.LayerNorm(WIDTH)}
    return built(lambda m, x: m.norm(m.drop(m.dense(x)) + x), **parts)


def stack(make: Callable[[], nn.Module]) -> nn.Module:
    """Return blocks after the beginning of a residual stream, which under autocast is in float32."""
    scale = built(lambda m, x: x * m.weight, weight=nn.Parameter(torch.linspace(0.5, 2, WIDTH)))
    return nn.Sequential(scale, make(), make(), last())


LAYER_NORM = partial(nn.LayerNorm, WIDTH)
# Bytes an element of x that are saved, by precision. A CPU composes nn.RMSNorm of operations that are not seen.
BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[float, ...]]] = {
    "LayerNorm": (partial(block, LAYER_NORM, False, False, 0.0), (26.7, 13.4, 13.4, 18.7)),
    "RMSNorm": (partial(block, partial(nn.RMSNorm, WIDTH), False, True, 0.0), (41.7, 45.4, 45.4, 33.7)),
    "composed": (partial(block, RMSNorm, False, False, 0.0), (24.7, 12.4, 12.4, 16.7)),
    "composed, dropout": (partial(block, RMSNorm, False, True, 0.1), (25.2, 12.9, 12.9, 17.2)),
    "norms of what is added": (partial(block, RMSNorm, True, False, 0.0), (24.9, 14.7, 14.7, 15.2)),
    "LayerNorm of what is added": (partial(block, LAYER_NORM, True, True, 0.1), (29.2, 14.9, 14.9, 19.2)),
    "last": (last, (17.9, 9.2, 9.2, 11.9)),
}


@pytest.mark.parametrize(("place", "precision"), [*enumerate(("float32", "bfloat16", "float16", "autocast"))])
@pytest.mark.parametrize("name", BLOCKS)
def test_sums_under_norms(name: str, place: int, precision: str) -> None:
    """The same bits; where it takes fewer bytes, what a norm's input is a sum of is saved."""
    (dtype, autocast), (make, most) = SETTINGS[precision], BLOCKS[name]
    wide = torch.randn(32, 128, WIDTH)
    before, after = saving_less(partial(stack, make), wide=wide, dtype=dtype, autocast=autocast)
    assert after <= most[place] * wide.numel() < before


def centred() -> nn.Module:
    def call(m: Any, x: Tensor) -> Tensor:
        z = x - x.mean(-1, keepdim=True)
        return m.weight * (z / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()) + m.bias

    return built(call, weight=nn.Parameter(torch.rand(WIDTH)), bias=nn.Parameter(torch.rand(WIDTH)))


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("make", [RMSNorm, Gemma, centred])
def test_a_norm_saves_its_input(make: Callable[[], nn.Module], dtype: torch.dtype, trained: bool) -> None:
    """And nothing else, whether its parameters are trained or not."""
    models = pair(lambda: nn.Sequential(make().requires_grad_(trained), nn.Linear(WIDTH, WIDTH)), dtype)
    x = torch.randn(64, WIDTH).to(dtype)
    assert saves(models, x)[1] == x.nbytes + 4 * WIDTH * (make is Gemma and not trained)  # 1 + weight
