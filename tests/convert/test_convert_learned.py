"""Activations with learned numbers: which are recognised, what is kept, gradients, and training."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fitact
from fitact.errors import UsageError
from fitact.runtime.convert.detect import recognise
from fitact.runtime.learned.uses import Use
from fitact.runtime.memory.saved import count_saved
from fitact.runtime.models.prepare import imported
from fitact.runtime.records import Conversion
from tests.conftest import ROOT

WIDTH, ROWS = 64, 256


class DyT(nn.Module):
    """As most models write it."""

    def __init__(self, dim: int, channels_last: bool = True, **_: Any) -> None:
        super().__init__()
        self.normalized_shape, self.channels_last = (dim,), channels_last
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.alpha * x)
        if self.channels_last:
            return x * self.weight + self.bias
        return x * self.weight[:, None, None] + self.bias[:, None, None]


class Own(nn.Module):
    """A module of parameters of given sizes, and what it computes of x and these."""

    def __init__(self, function: str, **sizes: Sequence[int]) -> None:
        super().__init__()
        self.function = function
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.full(tuple(size), 0.4)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = eval(self.function, {"torch": torch, "F": F, "x": x, **dict(self.named_parameters())})
        return result


def mlp(act: nn.Module, *between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, WIDTH), act, *between, nn.Linear(WIDTH, 32))


def xielu(**given: Any) -> Any:
    return imported("transformers").activations.XIELUActivation(**given)


X = torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(0))


def gradients(model: nn.Module, *inputs: Tensor, autocast: bool = False) -> tuple[int, Tensor, list[Tensor]]:
    """Return the bytes that are kept, the output, and the gradients of inputs and parameters."""
    leaves = [one.detach().clone().requires_grad_(one.is_floating_point()) for one in inputs]
    with count_saved(model) as saved, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(*leaves)
    output = getattr(output, "last_hidden_state", output)
    loss = (output.float() * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum()
    wanted = [one for one in (*leaves, *model.parameters()) if one.requires_grad]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return saved.bytes, output.detach(), [one for one in found if one is not None]


def off(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the norm of the difference, as a share."""
    a, b = (torch.cat([one.double().flatten() for one in some]) for some in (found, expected))
    return float((a - b).norm() / b.norm())


def all_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


# -------------------------------------------------------------------------------------------------- recognising

C = (WIDTH,)
XIELU = "torch.where(x > 0, F.softplus(p)*x*x, (torch.expm1(x.clamp(max=-1e-6)) - x)*(0.5 + F.softplus(n))) + x/2"
KNOWN: dict[str, tuple[Callable[[], nn.Module], str, tuple[str | float, ...], int]] = {
    "prelu": (nn.PReLU, "prelu", ("weight",), 1),
    "prelu of channels": (partial(nn.PReLU, WIDTH), "prelu", ("weight",), 1),
    "prelu of timm": (lambda: imported("timm").layers.activations.PReLU(), "prelu", ("weight",), 1),
    "xielu": (xielu, "xielu", ("alpha_p", "alpha_n"), -1),
    "xielu of its own beta": (partial(xielu, beta=0.4), "", ("alpha_p", "alpha_n"), -1),
    "dyt": (partial(DyT, WIDTH), "dyt", ("alpha", "weight", "bias"), -1),
    "dyt, channels first": (partial(DyT, WIDTH, False), "dyt", ("alpha", "weight", "bias"), -3),
    "dyt, other names": (partial(Own, "g*torch.tanh(x*a) + b", b=C, g=C, a=()), "dyt", ("a", "g", "b"), -1),
    "dyt without bias": (partial(Own, "g*torch.tanh(x*a)", g=C, a=(1,)), "dyt", ("a", "g", 0.0), -1),
    "derf": (
        partial(Own, "w*torch.erf(a*x + s) + b", a=(1,), w=C, b=C, s=(1,)), "derf", ("a", "s", "w", "b"), -1
    ),
    "derf without shift": (
        partial(Own, "w*torch.erf(a*x) + b", a=(1,), w=C, b=C), "derf", ("a", 0.0, "w", "b"), -1
    ),
    "swish": (partial(Own, "x*torch.sigmoid(x*slope)", slope=()), "swish_beta", ("slope",), -1),
    "dyt, alpha of channels": (partial(Own, "g*torch.tanh(x*a) + b", a=C, g=C, b=C), "dyt", ("a", "g", "b"), -1),
    "dyt, gamma alone of channels": (
        partial(Own, "g*torch.tanh(x*a) + b", a=(), g=C, b=(1,)), "dyt", ("a", "g", "b"), -1
    ),
    "dyt, beta alone of channels": (
        partial(Own, "g*torch.tanh(x*a) + b", a=(), g=(1,), b=C), "dyt", ("a", "g", "b"), -1
    ),
    "dyt, single numbers": (partial(Own, "g*torch.tanh(x*a) + b", b=(), a=(), g=()), "dyt", ("a", "g", "b"), -1),
    "dyt of alpha alone": (partial(Own, "torch.tanh(x*a)", a=C), "dyt", ("a", 1.0, 0.0), -1),
    "dyt of images, alpha of channels": (
        partial(Own, "g*torch.tanh(x*a)", g=(1, WIDTH, 1, 1), a=(WIDTH, 1, 1)), "dyt", ("a", "g", 0.0), -3
    ),
    "derf of channels": (
        partial(Own, "w*torch.erf(a*x + s)", a=C, w=(1,), s=C), "derf", ("a", "s", "w", 0.0), -1
    ),
    "swish of channels": (partial(Own, "x*torch.sigmoid(x*b)", b=C), "swish_beta", ("b",), -1),
    "swish of images": (
        partial(Own, "x*torch.sigmoid(x*b)", b=(1, WIDTH, 1, 1)), "swish_beta", ("b",), -3
    ),
    "swish of sequences": (partial(Own, "x*torch.sigmoid(x*b)", b=(WIDTH, 1)), "swish_beta", ("b",), -2),
    "own prelu of channels": (partial(Own, "torch.where(x > 0, x, w*x)", w=C), "prelu", ("w",), -1),
    "own xielu, one of channels": (partial(Own, XIELU, p=C, n=(1,)), "xielu", ("p", "n"), -1),
    "own prelu": (partial(Own, "torch.clamp(x, 0) + w*torch.clamp(x, max=0)", w=(1,)), "prelu", ("w",), -1),
}  # fmt: skip


def placed(module: nn.Module, dim: int) -> tuple[nn.Sequential, Tensor]:
    """Return a model of the module and a layer that follows, and what goes in."""
    if dim > -2:
        return mlp(module), X
    after = nn.Conv2d(WIDTH, 3, 1) if dim == -3 else nn.Conv1d(WIDTH, 3, 1)
    return nn.Sequential(module, after), torch.randn(2, WIDTH, *((8, 8) if dim == -3 else (64,)))


@pytest.mark.parametrize("name", KNOWN)
def test_known(name: str) -> None:
    make, formula, numbers, dim = KNOWN[name]
    module = make()
    found = recognise(module)
    assert found is not None
    assert (found.learned is not None) and not found.refusal
    assert (found.learned.formula, found.learned.numbers, found.learned.dim) == (formula, numbers, dim)
    model, x = placed(module, dim)
    stock, expected, ours = gradients(model, x)
    (site,) = (one for one in fitact.convert(model, error="exact") if one.kind == "activation")
    assert (site.before, site.after) == (type(module).__name__, "rebuilt")
    kept, output, found_gradients = gradients(model, x)
    assert torch.equal(output, expected) and all_equal(found_gradients, ours)
    tensor = 4 * WIDTH * (ROWS if dim > -2 else 2 * 64)
    assert kept <= stock - tensor


UNKNOWN = {
    "hardtanh": Own("g*F.hardtanh(x*a) + b", a=(1,), g=C, b=C),
    "a bounded number": Own("x*torch.sigmoid(x*b.abs())", b=()),
    "numbers of different channels": Own("g*torch.tanh(x[..., :1]*a) + b[..., :1]", a=C, g=C, b=(2,)),
    "a table": Own("x*torch.sigmoid(x*b.mean())", b=(2, 3)),
    "scale": Own("x*g", g=C),
    "norm": Own("x*(x*x).mean(-1, keepdim=True).rsqrt()*g", g=(1,)),
    "random": Own("torch.rand_like(x)*x*torch.sigmoid(x*b)", b=()),
    "in place": Own("x.mul_(torch.sigmoid(x*b))", b=()),
    "another shape": Own("(x*torch.sigmoid(x*b))[..., :2]", b=()),
    "linear": nn.Linear(1, 1),
    "layer norm": nn.LayerNorm(1),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown(name: str) -> None:
    assert recognise(UNKNOWN[name]) is None


def test_modules_of_one_class_that_compute_something_else() -> None:
    assert recognise(Own("g*torch.tanh(x*a) + b", a=(1,), g=C, b=C)) is not None
    assert recognise(Own("g*F.hardtanh(x*a) + b", a=(1,), g=C, b=C)) is None


def test_kernels_of_another_package() -> None:
    act = xielu()
    act._xielu_cuda_obj = SimpleNamespace()
    (site, *_) = fitact.convert(mlp(act), "coded", dry_run=True)
    assert (site.after, site.reason) == (None, "it runs the CUDA kernels of the package xielu")


def test_other_methods_leave_them_alone() -> None:
    for method in ("fewbit", "relumix", "inverted", "exact"):
        site, other = fitact.convert(mlp(nn.PReLU(), nn.ReLU() if method == "exact" else nn.GELU()), method)
        assert (site.after, site.reason) == (None, "its parameters are learned: only rebuild and coded keep less")
        assert other.after is not None


# ------------------------------------------------------------------------------------------------ what is kept


def apertus() -> tuple[nn.Module, Tensor]:
    transformers = imported("transformers")
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 128}
    model: nn.Module = transformers.ApertusModel(transformers.ApertusConfig(**sizes, **heads, **ids))
    return model, torch.randint(0, 128, (2, 128))


def vit() -> tuple[nn.Module, Tensor]:
    sizes = {"img_size": 64, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 10}
    model: nn.Module = imported("timm").models.VisionTransformer(**sizes, norm_layer=DyT)
    return model, torch.randn(4, 3, 64, 64)


def cnn(norm: Callable[[int], nn.Module] = nn.BatchNorm2d, scale: float = 1.0) -> tuple[nn.Module, Tensor]:
    first = (nn.Conv2d(3, 16, 3, padding=1), norm(16), nn.PReLU(16))
    second = (nn.Conv2d(16, 16, 3, padding=1), norm(16), nn.PReLU())
    return nn.Sequential(*first, *second, nn.Conv2d(16, 8, 3)), scale * torch.randn(4, 3, 32, 32)


MODELS = {
    "Apertus (xIELU)": (apertus, "xielu_coded8"),
    "ViT with DyT": (vit, "dyt_coded8"),
    "CNN (BatchNorm, PReLU)": (cnn, "rebuilt"),
    "CNN (PReLU)": (partial(cnn, nn.Identity, 4.0), "prelu_coded8"),
}
PRECISIONS = {"bfloat16": (torch.bfloat16, False), "autocast": (torch.float32, True)}
WAYS: dict[str, Callable[[nn.Module, Any], Conversion]] = {
    '`error="exact"`': lambda model, x: fitact.convert(model, error="exact", example_inputs=x),
    '`error="rounding"`': lambda model, x: fitact.convert(model, error="rounding", example_inputs=x),
}
DOCUMENT = (ROOT / "docs" / "learned.md").read_text("utf-8")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_the_documents_table(name: str, precision: str) -> None:
    """Bytes are counted here as the model runs; gradients are stock's, bit for bit or nearly."""
    make, codes = MODELS[name]
    dtype, autocast = PRECISIONS[precision]
    torch.manual_seed(0)
    model, x = make()
    model, x = model.to(dtype).train(), x.to(dtype) if x.is_floating_point() else x
    stock, expected, ours = gradients(copy.deepcopy(model), x, autocast=autocast)
    row = [name, precision, f"{stock:,}"]
    for way, change in WAYS.items():
        changed = copy.deepcopy(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            conversion = change(changed, x)
        kept, output, found = gradients(changed, x, autocast=autocast)
        assert kept <= stock
        assert conversion.kept_after is not None
        exact = "exact" in way or codes == "rebuilt"
        assert (torch.equal(output, expected) and all_equal(found, ours)) if exact else off(found, ours) < 0.03
        learned = {site.after for site in conversion if site.before in ("XIELUActivation", "DyT", "PReLU")}
        # the last norm may be rebuilt, for the head reads the first token alone, which is not looked up
        assert learned == {"rebuilt"} if exact else codes in learned <= {codes, "rebuilt"}
        row.append(f"{100 * kept / stock:.1f} %")
    assert f"| {' | '.join(row)} |" in DOCUMENT


def test_batch_norm_prelu_convolution_keep_one_tensor() -> None:
    """Between two convolutions stock keeps three: what BatchNorm, PReLU and the convolution read."""
    model, x = cnn()
    stock, *_ = gradients(copy.deepcopy(model), x)
    fitact.convert(model, error="exact")
    kept, *_ = gradients(model, x)
    tensor = 4 * 16 * 32 * 32 * 4
    assert stock - kept == 2 * 2 * tensor


def test_nothing_is_kept_for_frozen_numbers() -> None:
    model = mlp(DyT(WIDTH))
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    stock, expected, ours = gradients(model, X)
    fitact.convert(model, error="exact")
    kept, output, found = gradients(model, X)
    assert kept < stock and torch.equal(output, expected) and all_equal(found, ours)


@pytest.mark.parametrize("act", [nn.PReLU, xielu, partial(DyT, WIDTH)])
def test_before_a_frozen_layer(act: Callable[[], nn.Module]) -> None:
    """PReLU alone has nothing to gain there: it keeps its input, and nothing else is kept."""
    model = mlp(act())
    model[2].requires_grad_(False)
    stock, _, ours = gradients(model, X)
    conversion = fitact.convert(model, error="exact", example_inputs=X)
    kept, _, found = gradients(model, X)
    assert all_equal(found, ours) and kept <= stock
    assert (kept < stock) == (conversion.sites[0].after is not None) == (act is not nn.PReLU)


def test_codes_where_they_do_not_suit() -> None:
    """Inputs beyond the reach of codes, and modules that return another dtype than they take."""
    model = mlp(xielu(dtype=torch.float32))
    conversion = fitact.convert(model, error="rounding", example_inputs=3000 * X, dry_run=True)
    assert conversion.sites[0].after == "rebuilt"
    act = DyT(WIDTH)
    model = nn.Sequential(act, nn.Linear(WIDTH, 32))
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    _, expected, ours = gradients(model, x)
    fitact.convert(model, "coded")
    _, output, found = gradients(model, x)
    assert output.dtype == torch.float32 and torch.equal(output, expected) and all_equal(found, ours)


@pytest.mark.parametrize(
    "name",
    [one for one in KNOWN if one not in ("xielu of its own beta", "dyt, other names")],
)
def test_codes_of_8_bits(name: str) -> None:
    make, formula, _, dim = KNOWN[name]
    model, x = placed(make().float(), dim)
    if dim > -2:
        model, x = model[1:], torch.randn(ROWS, WIDTH)
    _, expected, ours = gradients(copy.deepcopy(model), x)
    (site,) = fitact.convert(model, "coded")
    assert site.after == f"{formula}_coded8" and site.reason.startswith("value off by")
    kept, output, found = gradients(model, x)
    assert kept == x.numel() or x.numel() < kept < x.numel() + 6 * 4 * WIDTH  # and the numbers, side by side
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert 0 < off(found, ours) < 0.02


def test_channels_elsewhere_than_where_the_module_was_tried() -> None:
    """It computes those itself, also where another dimension has as many elements as there are channels."""
    act = Own("x*torch.sigmoid(torch.einsum('nc...,c->nc...', x, b))", b=C)
    act.b.data.copy_(torch.linspace(-1, 2, WIDTH))
    model = nn.Sequential(act, nn.Conv1d(WIDTH, 3, 1))
    stock = copy.deepcopy(model)
    (site,) = fitact.convert(model, "coded")
    assert site.after == "swish_beta_coded8"
    for shape in ((2, WIDTH, 5), (WIDTH, WIDTH)):
        x = torch.randn(shape)
        _, expected, ours = gradients(stock, x)
        _, output, found = gradients(model, x)
        if len(shape) == 3:
            torch.testing.assert_close(output, expected)
            assert 0 < off(found, ours) < 0.02
        else:
            assert torch.equal(output, expected) and all_equal(found, ours)


# ----------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("method", ["rebuild", "coded"])
def test_the_parameters_are_the_same_objects(method: str) -> None:
    """So an optimizer that was made before still trains them; names, order and the state stay."""
    model = mlp(DyT(WIDTH), xielu(dtype=torch.float32))
    stock = copy.deepcopy(model)
    before, keys = dict(model.named_parameters()), [*model.state_dict()]
    classes = [type(one) for one in model]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert len(fitact.convert(model, method, dry_run=True).replaced) == 2
    assert [type(one) for one in model] == classes
    conversion = fitact.convert(model, method)
    assert [site.name for site in conversion.replaced] == ["1", "2"]
    told = [site.after for site in conversion]
    if method == "coded":  # twice is as once
        assert [site.reason for site in fitact.convert(model, method)] == [f"already {one}" for one in told]
    after = dict(model.named_parameters())
    assert [*model.state_dict()] == keys and all(after[key] is one for key, one in before.items())
    model.load_state_dict(stock.state_dict())
    starts = [one.detach().clone() for one in model[1].parameters()]
    model(X).square().mean().backward()
    optimizer.step()
    assert not any(map(torch.equal, starts, model[1].parameters()))
    back = fitact.revert(model)
    names = {"rebuild": ["rebuilt"] * 2, "coded": ["dyt_coded8", "xielu_coded8"]}[method]
    assert [site.before for site in back] == names
    assert [type(one) for one in model] == classes
    assert all(dict(model.named_parameters())[key] is one for key, one in before.items())


@pytest.mark.parametrize("method", ["rebuild", "coded"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(method: str, copied: Callable[[nn.Module], nn.Module]) -> None:
    model = mlp(DyT(WIDTH))
    fitact.convert(model, method)
    twin = copied(model)
    kept, output, found = gradients(twin, X)
    expected = gradients(model, X)
    assert (kept, True) == (expected[0], torch.equal(output, expected[1])) and all_equal(found, expected[2])
    with torch.no_grad():
        twin[1].alpha.mul_(2)
    assert not torch.equal(twin(X), model(X))
    fitact.revert(twin)
    assert type(twin[1]) is DyT


def test_patterns() -> None:
    model = mlp(DyT(WIDTH), nn.PReLU(), xielu())

    def names(**given: str) -> list[str]:
        return [one.name for one in fitact.convert(model, "rebuild", dry_run=True, **given).replaced]

    assert names() == ["1", "2", "3"]
    assert names(include="[12]") == ["1", "2"]
    assert names(exclude="2") == ["1", "3"]
    with pytest.raises(UsageError, match="include 'act': no activation has such a path"):
        names(include="act")


def test_the_table() -> None:
    model = mlp(DyT(WIDTH), nn.PReLU())
    assert str(fitact.convert(model, "coded")).splitlines() == [
        "site    was    is            note",
        "1       DyT    dyt_coded8    value off by 0.73 %, derivative by 0.3 %",
        "2       PReLU  prelu_coded8  value off by 0.85 %",
        "2 of 2 replaced",
    ]


def test_a_second_derivative_is_refused() -> None:
    model = mlp(DyT(WIDTH))
    fitact.convert(model, "rebuild")
    x = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)


def test_the_compiler_traces_the_module_itself() -> None:
    torch._dynamo.reset()
    model = mlp(DyT(WIDTH), nn.PReLU())
    _, expected, ours = gradients(torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True), X)
    fitact.convert(model, "coded")
    _, output, found = gradients(torch.compile(model, backend="aot_eager", fullgraph=True), X)
    assert torch.equal(output, expected) and all_equal(found, ours)


def test_without_memory() -> None:
    """A model of fake tensors is recognised by running a real copy of the module."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model, x = mlp(DyT(WIDTH), xielu(), nn.PReLU(WIDTH)), torch.randn(ROWS, 32)
        conversion = fitact.convert(model, error="exact", example_inputs=x)
    assert [site.after for site in conversion] == ["rebuilt"] * 3


def test_a_gate_calls_its_activation() -> None:
    """Its parameters get their gradients: it is none of those gates of which g and u alone are kept."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.up, self.gate = Own("x*torch.sigmoid(x*b)", b=()), nn.Linear(32, 64), nn.Linear(32, 64)
            self.down = nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
            return y

    model = Gate()
    _, expected, ours = gradients(model, X)
    for method in ("rebuild", "coded"):
        (site, *_) = fitact.convert(model, method)
        assert site.name == "act"
        _, output, found = gradients(model, X)
        assert torch.allclose(output, expected) and off(found, ours) < (0.01 if method == "coded" else 1e-9)
        fitact.revert(model)


def test_uses_say_what_ships() -> None:
    assert Use("dyt", ("a", "g", "b"), -1, (3, 5)).coded(8) is not None
    assert Use("dyt", ("a", "g", "b"), -1, (3, 5)).coded(7) is None
    assert Use("", (), -1, (3,)).coded(8) is None


# --------------------------------------------------------------------------------- the names of transformers

NAMES = """
gelu gelu_10 gelu_accurate gelu_fast gelu_new gelu_python gelu_python_tanh gelu_pytorch_tanh hardswish laplace
leaky_relu linear mish prelu quick_gelu relu relu2 relu6 sigmoid silu sqrtsoftplus swish tanh xielu
"""
COMMANDS = {"gelu_10": "clamp(gelu(x), -10, 10)", "laplace": "0.5*(1 + erf(", "sqrtsoftplus": "sqrt(softplus(x))"}


def test_every_name_of_transformers() -> None:
    """Each is converted, or the report says why not: with the command that makes it, where there is a formula."""
    names = imported("transformers").activations.ACT2FN
    assert {*NAMES.split()} <= {*names}
    for name in names:
        (site,) = fitact.convert(mlp(names[name]), "fewbit")
        (rebuilt,) = fitact.convert(mlp(names[name]), error="exact")
        if name in COMMANDS:
            assert site.after is None and f'fitact fit --fn "{COMMANDS[name]}' in site.reason
            assert rebuilt.after == "rebuilt"
        elif name in ("prelu", "xielu"):
            assert site.after is None and "only rebuild and coded keep less" in site.reason
            assert rebuilt.after == "rebuilt"
        elif name == "linear":
            assert site.after is None and site.reason == "it returns its input and keeps nothing"
        else:
            assert site.after is not None, (name, site.reason)


def test_relu2_keeps_its_output_alone() -> None:
    """By `exact`, which the next layer keeps anyway; stock keeps that of ReLU too."""
    model = mlp(imported("transformers").activations.ACT2FN["relu2"])
    stock, *_ = gradients(copy.deepcopy(model), X)
    (site,) = fitact.convert(model, "exact")
    kept, *_ = gradients(model, X)
    output = ROWS * WIDTH * 4
    assert site.after == "relu2_exact"
    assert (stock - X.nbytes, kept - X.nbytes) == (2 * output, output)
