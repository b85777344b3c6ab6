"""The context itself, and modules that run in it: compiled, nested, copied, turned back; what it leaves behind."""

import copy
import gc
import math
import operator
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad

import fitact
from fitact.base import UsageError
from fitact.runtime.measure.saved import count_saved
from fitact.runtime.saving import nbytes
from tests.support import saving
from tests.support.blocks import CALLS, MLP, MODELS, Read, built
from tests.support.saving import X, both_ways, cast, differences, observed, pair, saved_bytes, train

WIDE = torch.randn(64, 16, 16)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
def test_compiled() -> None:
    """The context in a compiled function breaks its graph."""
    model = MODELS["mlp"]()

    def within(x: Tensor) -> Tensor:
        with fitact.saving():
            return model(x)

    compiled = torch.compile(within, backend="aot_eager")
    expected = observed(model, train, X)
    model.zero_grad()
    assert not differences(expected, observed(model, lambda _, x: train(model, x, lambda _, x: compiled(x)), X))
    torch.compiler.reset()
    for name, call in ("saving", within), ("checkpoint", partial(fitact.checkpoint, torch.sin)):
        with pytest.raises(RuntimeError, match=f"{name} is for eager code"):
            torch.compile(call, backend="aot_eager", fullgraph=True)(X)


def test_nested_as_a_decorator_and_left_by_an_exception() -> None:
    model = MODELS["mlp"]()
    before = saved_bytes(model, WIDE)
    with pytest.raises(ZeroDivisionError), fitact.saving():
        model(WIDE).fill_(1 / 0)
    assert saved_bytes(model, WIDE) == before
    calls = fitact.saving()(model), fitact.saving()(fitact.saving()(model))
    once, twice = (saving.saved_bytes_of(model, lambda call=call: call(WIDE)) for call in calls)
    assert once == twice < before
    with fitact.saving():
        assert saved_bytes(model, WIDE) == before  # other hooks win inside


def test_recomputed_once_a_backward() -> None:
    _, model = pair(partial(Read, lambda model, x, y: sum(model.fc2(y) * i for i in range(3))))
    y = model(X)
    for _ in range(2):
        with saving.Operators() as operators:
            saving.loss_of(y).backward(retain_graph=True)
        assert operators.names.count("aten.gelu.default") == 1


def test_outputs_can_be_copied() -> None:
    """They hold nothing but their numbers."""
    baseline, model = pair(partial(Read, lambda model, x, y: y))
    y = model(X).detach()
    for copied in (copy.deepcopy(y), pickle.loads(pickle.dumps(y)), y.clone()):
        assert torch.equal(copied, baseline(X))


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    """A context around an export sees nothing of it, nor does that of a converted model."""
    baseline, model = pair(MODELS["block"])
    graphs = []
    for each, context in (baseline, nullcontext()), (baseline, fitact.saving()), (model, nullcontext()):
        with context:
            graphs.append(torch.export.export(each.eval(), (X,), strict=strict))
    assert graphs[0].graph_module.code == graphs[1].graph_module.code == graphs[2].graph_module.code
    assert torch.equal(graphs[2].module()(X), model(X))


def test_peak_of_many_sums() -> None:
    """Of half precision that is added to a float32 stream: backward holds no more sums in a deep model."""

    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with saving.cast(saving.HALF):
                return x + super().forward(x)

    wide = torch.randn(1024, 16)
    over = []
    for blocks in (18, 36):
        parts = ((nn.LayerNorm(16), nn.Linear(16, 16, bias=False)) for _ in range(blocks))
        model = nn.Sequential(*(Residual(*part) for part in parts))
        fitact.convert(model)
        parameters = sum(parameter.nbytes for parameter in model.parameters())
        stored = saving.saved_bytes_of(model, lambda model=model: model(wide))
        over.append(saving.peaks((model, model), wide)[0] - stored - 2 * parameters)
    assert over[1] < over[0] + wide.nbytes


@pytest.mark.parametrize("inputs", [None, X], ids=["unseen", "measured"])
@pytest.mark.parametrize("spectral", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_reading_a_parametrized_weight_changes_it(inputs: Tensor | None, spectral: Any) -> None:
    """Spectral norm iterates whenever a weight is read, or by a hook that calls functions: not in conversions."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(spectral(nn.Linear(16, 48)), nn.GELU(), spectral(nn.Linear(48, 16)), nn.LayerNorm(16))

    baseline, model = make(), make()
    fitact.convert(model, error="exact", example_inputs=inputs)
    assert any(key.endswith("_u") for key in baseline.state_dict())
    assert not differences(baseline.state_dict(), model.state_dict())
    assert not differences(*(observed(each, train, X) for each in (baseline, model)))


def tensors() -> int:
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


@pytest.mark.parametrize("name", CALLS)
def test_no_garbage(name: str) -> None:
    results = []
    for model in pair(CALLS[name]):
        train(model, X)
        gc.collect()
        gc.disable()
        before = tensors()
        model(X)
        forward = tensors()
        train(model, X)
        results.append((forward - before, tensors() - before))
        gc.enable()
    assert results == [(0, 0), (0, 0)]


# What changes a tensor in place, and the number of tensors that are stored in 8 bits and as they are.
CHANGED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int, int]] = {
    "product": (lambda h, u: h.mul_(u), 1, 1),  # PyTorch copies h, which is about to be changed
    "activation": (lambda h, u: (h + u).relu_(), 1, 0),
    "by keyword": (lambda h, u: torch.pow(input=h + u, exponent=2), 1, 0),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_quantised(name: str) -> None:
    """Functions that change a tensor have the kinds of those that do not."""
    call, quantised, whole = CHANGED[name]
    x, *weights = torch.randn(64, 32), *(torch.randn(32, 128, requires_grad=True) for _ in "vw")
    _, after = both_ways(lambda v, w: call(x @ v, x @ w), *weights, error="rounding", most=0.02)
    numbers, scales = 64 * 128, 5 * 64
    assert after == x.nbytes + quantised * (numbers + scales) + whole * 4 * numbers


@pytest.mark.parametrize(("kind", "bits"), [(nn.Parameter, 8), (Tensor.requires_grad_, 32)])
def test_products_with_parameters_are_linear_layers(kind: Callable[[Tensor], Tensor], bits: int) -> None:
    x, w, v = torch.randn(64, 32), torch.randn(32, 128, requires_grad=True), kind(torch.randn(128, 8))
    _, after = both_ways(lambda w, v: x @ w @ v, w, v, bits={"linear": 8}, most=0.02)
    assert after - x.nbytes - v.nbytes == (nbytes((64, 128), 8) if bits == 8 else 4 * 64 * 128)


def test_statistics_are_stored_exactly() -> None:
    """One number for each row of 64, though they are many."""
    x, w, v = (torch.randn(shape, requires_grad=shape[0] == 32) for shape in ((4096, 32), (32, 1), (32, 64)))
    _, after = both_ways(lambda w, v: (x @ w) * (x @ v), w, v, error="rounding", most=0.02)
    assert after - x.nbytes == 4 * 4096 + nbytes((4096, 64), 8)


def test_slopes_of_changed_inputs() -> None:
    """A ReLU that stores the slope of codes in bits raises as PyTorch does, which saved the input."""
    w = torch.randn(64, 128, requires_grad=True)
    with fitact.saving("rounding"):
        h = torch.randn(64, 64) @ w
        y = F.gelu(h) + F.relu6(h)
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.grad_fn.next_functions[1][0](torch.ones_like(y))


def test_saved_tensors_read_by_hand() -> None:
    """Outside of a backward pass; a tensor that two functions read is then computed for each reading."""
    x = torch.randn(8, requires_grad=True)
    with fitact.saving():
        y = (z := F.gelu(x)).sin() * z
    first, second = y.grad_fn._saved_other, y.grad_fn._saved_other
    assert torch.equal(first, z) and torch.equal(second, z) and first.data_ptr() != second.data_ptr()
    expected = torch.autograd.grad((z := F.gelu(x)).sin() * z, x, torch.ones(8))
    assert not differences(expected, torch.autograd.grad(y, x, torch.ones(8)))


# What a logarithm, a root, an inverse or a quotient reads of a sigmoid.
STEEP: dict[str, Callable[[Tensor], Tensor]] = {
    "log": lambda x: torch.log(torch.sigmoid(x)),
    "of a part": lambda x: (lambda s: torch.cat([torch.log(s[:, :128]), s[:, 128:]], 1))(torch.sigmoid(x)),
    "and a product": lambda x: (lambda s: (s * x) * torch.log(s))(torch.sigmoid(x)),
    "in place": lambda x: torch.sigmoid(x).add(0).sqrt_(),
    "rsqrt": lambda x: torch.rsqrt(torch.sigmoid(x)),
    "inverse as a power": lambda x: (x * x + 0.5) ** -1,
    "power": lambda x: torch.sigmoid(x) ** 0.3,
    "inverse": lambda x: 1 / torch.tanh(x),
    "quotient": lambda x: torch.tanh(x) / (torch.sigmoid(x) + 0.01),
    "two": lambda x: torch.log(torch.sigmoid(x) + 1e-8) + torch.log(1 - torch.sigmoid(x) + 1e-8),
}


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize(("error", "most"), [("rounding", 0.03), ("coarse", 0.14)])
@pytest.mark.parametrize("name", STEEP)
def test_what_is_steep_reads_no_code(name: str, error: str, most: float, outside: bool) -> None:
    """Of a residual layer with large numbers before its activation: a code of a sigmoid may be 0."""
    up, x = nn.Linear(64, 256), torch.randn(256, 64)
    up.weight.data.mul_(6)
    model = built(lambda m, x: x + m.down(STEEP[name](m.up(x))), up=up, down=nn.Linear(256, 64))
    hooks = saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor)
    with hooks if outside else nullcontext():
        before, after = both_ways(model, x, error=error, most=most)
    assert outside or after < before


@pytest.mark.parametrize("error", ["rounding", "coarse"])
def test_an_inverse_reads_no_code(error: str) -> None:
    """Of a layer with small numbers among large ones, whose codes would be 0."""
    up, down, x = nn.Linear(64, 256), nn.Linear(256, 64), torch.randn(256, 64)
    up.weight.data.mul_(1e-4)
    up.bias.data.copy_(torch.logspace(-3, 1, 256).view(4, 64).mT.flatten())
    both_ways(built(lambda m, x: m.down(m.up(x) ** -1), up=up, down=down), x, error=error, most=0.14)


# What reads a tensor that an activation has had coded.
EXACTLY: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "clamp": lambda z: z.clamp(-0.5, 0.7),
    "least": lambda z: torch.min(z, torch.tensor(-1e-6)),
    "largest of a row": lambda z: z.amax(-1),
    "softshrink": F.softshrink,
    "threshold": lambda z: F.threshold(z, 0.1, 20),
    "root": lambda z: (z.abs() + 0.1).sqrt(),
    "angle": lambda z: torch.atan2(z, z.flip(-1)),
    "grid": lambda z: F.grid_sample(torch.rand(64, 2, 16, 16), z.view(64, 8, 16, 2), align_corners=False),
    "expanded": lambda z: torch.special.i0(z[:, None].expand(-1, 3, -1)),
    "clip": lambda z: z.clip(-0.5, 0.7),
    "tangent": torch.tan,
    "logarithm of more": lambda z: torch.log1p(z.abs()),
    "quotient": lambda z: torch.ones_like(z) / z,
    "quotient, added": lambda z: torch.addcdiv(torch.ones_like(z), torch.ones_like(z), z),
    "root as a power": lambda z: (z.abs() + 0.1) ** 0.5,
    "trained power": lambda z: (z.abs() + 0.1) ** torch.full((256,), 0.5, requires_grad=True),
    "largest norm": lambda z: z.norm(math.inf, dim=1),
    "largest norm, normalised": lambda z: F.normalize(z, p=math.inf),
    "largest norm in torch.linalg": lambda z: torch.linalg.vector_norm(z, math.inf, dim=1),
    "sum of sizes": lambda z: z.norm(p=1, dim=1),
    "product of all": lambda z: (z + 1).view(64, 16, 16).prod(-1),
    "quotient with an option": lambda z: torch.div(torch.ones_like(z), z + 9, rounding_mode=None),
    "softmax of large logits": lambda z: (30 * z).softmax(-1) * torch.arange(256.0),
}


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("error", ["rounding", "coarse"])
@pytest.mark.parametrize("name", EXACTLY)
def test_functions_that_read_no_codes(name: str, error: str, outside: bool) -> None:
    """They compare, are steep or not listed. What is stored for them takes the place of the codes."""
    hooks = saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor)
    with hooks if outside else nullcontext():
        before, after = both_ways(
            lambda x: (z := x * 2, 1e-6 * F.gelu(z).sum() + EXACTLY[name](z).mean())[1],
            torch.randn(64, 256, requires_grad=True),
            error=error,
            most=1e-4,
        )
    assert after <= before


# What is quantised, and then read by a function that reads no codes: it had better be stored as it is.
CAPPED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax of capped logits": lambda x, w: (50 * torch.tanh(x @ w / 50)).softmax(-1) @ w.mT,
    "loss of scaled logits": lambda x, w: F.cross_entropy((x @ w) * w.mean().exp(), torch.arange(64)),
}


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("name", CAPPED)
def test_no_codes_beside_what_is_computed_from_them(name: str, autocast: torch.dtype | None) -> None:
    leaves = [torch.randn(64, 32, requires_grad=True), torch.randn(32, 256, requires_grad=True)]
    exact, rounding = (
        both_ways(CAPPED[name], *leaves, autocast=autocast, error=error, most=most)[1]
        for error, most in (("exact", 0.0), ("rounding", 0.02))
    )
    assert rounding <= exact


# What reads the codes that another function has had made, or a mean that is computed from them.
SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "norm of a vector": lambda z: z.norm(dim=-1),
    "norm in torch.linalg": lambda z: torch.linalg.vector_norm(z, dim=-1),
    "quotient": lambda z: z / torch.full((32,), 2.0),
    "RMSNorm by hand": lambda z: z * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-6),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_functions_that_read_codes(name: str) -> None:
    """A number takes 8 bits, and the scales of its block; nothing is stored beside these but few numbers."""
    x, weight = torch.randn(1024, 32), torch.randn(32, 32, requires_grad=True)
    call = SMOOTH[name]
    _, after = both_ways(lambda w: (z := x @ w, F.gelu(z) + call(z).sum())[1], weight, error="rounding", most=0.02)
    norms = 0 if name == "RMSNorm by hand" else 4 * len(x)  # which PyTorch saves
    assert after - x.nbytes - norms < 1.1 * x.numel()


JUMPS: dict[str, Callable[[Tensor], Tensor]] = {
    "selu": F.selu,
    "prelu": lambda z: F.prelu(z, torch.full((256,), 0.1)),
    "clamp in place": lambda z: (z * 1.0).clamp_(-0.5, 0.7),
}


@pytest.mark.parametrize("name", JUMPS)
def test_slopes_that_jump(name: str) -> None:
    """Such a function reads codes of its own, where signs stay, and none that another has had made."""
    x, call = torch.randn(64, 256, requires_grad=True), JUMPS[name]
    both_ways(lambda x: (z := x * 2, 1e-6 * F.gelu(z).sum() + call(z).sum())[1], x, error="rounding", most=0.01)


def test_a_softmax_of_large_logits() -> None:
    """With "coarse" it reads 8 bits, where its logits are computed from what was coded in 4 for another."""
    x, w = torch.randn(64, 256, requires_grad=True), torch.randn(64, 256)

    def call(x: Tensor) -> Tensor:
        z = x * 2
        return 1e-6 * F.gelu(z).sum() + ((6 * z).softmax(-1) * w).sum()

    both_ways(call, x, error="coarse", most=0.1)


def test_a_small_difference() -> None:
    """Of two views of one batch; it has codes of its own: its terms' may be as far off as it is large."""
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64))
    x = torch.randn(128, 64)
    noise = 0.1 * torch.randn(128, 64)
    whole = built(lambda m, x: (m.model(x) - m.model(x + noise)).square().mean(), model=model)
    both_ways(whole, x, error="coarse", most=0.6)


def test_an_inverse_of_picked_elements() -> None:
    """It is no mean, though it has few elements."""
    index = torch.arange(512)[:, None] % 64

    def call(m: Any, x: Tensor) -> Tensor:
        y = F.gelu(m.one(x)) * m.other(x)
        return (1 / y.gather(1, index)).tanh().mean() + y.mean()

    model = built(call, one=nn.Linear(64, 64), other=nn.Linear(64, 64))
    both_ways(model, torch.randn(512, 64), error="rounding", most=0.03)


def test_small_tensors_are_stored_exactly_in_place_of_large_ones() -> None:
    """As in graph attention, where each pair of nodes has a logit, from one number of each."""
    h, w = torch.randn(256, 32), torch.randn(32, 32, requires_grad=True)

    def call(w: Tensor) -> Tensor:
        z = h @ w
        y, logits = F.elu(z), z[:, :16].sum(-1)[:, None] + z[:, 16:].sum(-1)
        return torch.softmax(F.leaky_relu(logits, 0.2), -1) @ y

    before, after = both_ways(call, w, error="rounding", most=0.02)
    assert after < before / 4


def test_a_tanh_of_large_numbers() -> None:
    x = 6 * torch.randn(64, 256)
    before, after = both_ways(lambda x: torch.tanh(x * 1), x.requires_grad_(), error="coarse", most=0.02)
    assert after - x.nbytes < 0.3 * (before - x.nbytes)


@pytest.mark.parametrize("two", [lambda f, h: f(h, 2), lambda f, h: f(2, h), lambda f, h: f(h, h)], ids="hlb")
@pytest.mark.parametrize("function", [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow])
def test_operators_are_recomputed(function: Callable[[Any, Any], Any], two: Callable[..., Tensor]) -> None:
    """Of what a layer is given, nothing is saved but what it is computed from."""
    first, second, x = nn.Linear(16, 32), nn.Linear(32, 4), torch.randn(8, 16)
    with count_saved(first, second) as saved, fitact.saving():
        h = first(x)
        y = h.sin(), second(two(function, h))
    assert saved.bytes == x.nbytes + h.nbytes, y


@pytest.mark.parametrize(("error", "atol"), [("exact", 0.0), ("rounding", 1e-3), ("coarse", 1e-2)])
def test_gradients_of_gradients_save_no_more(error: str, atol: float) -> None:
    """What backward decodes is saved again by the graph of the gradient: in the same codes."""
    net, x = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64), nn.Tanh()), torch.randn(128, 8)
    x.requires_grad_()
    sizes, gradients = [], []
    for context in (nullcontext(), fitact.saving(error)):
        with count_saved(net) as saved, context:
            (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
            loss = gradient.square().mean()
        sizes.append(saved.bytes)
        gradients.append(torch.autograd.grad(loss, [*net.parameters()][:3]))
    before, after = sizes
    assert after < before - (error != "exact") * 128 * 64 * 4
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=atol)


@pytest.mark.parametrize(
    "function",
    [
        nn.GELU(),
        nn.Sequential(nn.LayerNorm(64), nn.ReLU(inplace=True)),
        nn.Dropout(0.2),
        nn.MaxPool1d(3, 1, 1),
        lambda x: x * torch.sigmoid(x),
        lambda x: F.silu((x.sin() * 1).mul_(2), inplace=True),
        lambda x: F.conv1d(x.tanh(), torch.eye(128)[..., None]).square(),
    ],
    ids=["GELU", "ReLU in place", "Dropout", "MaxPool", "SiLU by hand", "in place", "frozen"],
)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_several_gradients_save_no_more(function: Callable[..., Tensor], autocast: torch.dtype | None) -> None:
    """As in GradNorm: each has a graph of its own, which reads what backward computes."""
    first, second, x = nn.Linear(8, 64), nn.Linear(64, 4), torch.randn(128, 8, requires_grad=True)
    sizes, gradients = [], []
    for context, counted in product((nullcontext, fitact.saving), (True, False)):
        torch.manual_seed(0)
        with count_saved(first, second) if counted else nullcontext() as saved, cast(autocast), context():
            y = second(function(first(x)) * 1).float()
            norms = [torch.autograd.grad(y[:, i].sum(), x, create_graph=True)[0].norm() for i in range(4)]
        sizes += [] if saved is None else [saved.bytes]
        gradients.append(torch.autograd.grad(sum(norms) + y.square().mean(), [first.weight, second.weight]))
    assert sizes[1] <= sizes[0]
    assert not any(differences(gradients[0], each) for each in gradients)


NESTED = fitact.saving()(grad(lambda x: x.tanh().sum()))
ERROR = "error: expected 'exact', 'rounding' or 'coarse', got 'none'"
OFFLOAD = r'offload: expected "all", a share up to 1.0, or bytes from 1,04'
CHECKPOINT = partial(fitact.checkpoint, torch.sin, X)
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    *((call, {"error": "none"}, ERROR) for call in (fitact.saving, CHECKPOINT)),
    *(
        (call, {"offload": amount}, OFFLOAD)
        for amount in ("some", 0, 4096, -1, 1.5, 0.0, None, float("nan"))
        for call in (fitact.saving, CHECKPOINT, fitact.hooks)
    ),
    (fitact.hooks, {"bits": 7}, "bits: expected 3, 4, 5, 6 or 8, got 7"),
    (partial(NESTED, X), {}, r"^saving.*enter it in the function that torch.func"),
    (partial(fitact.convert, MLP(), "fewbit"), {"offload": "all"}, "offload: expected no method"),
]


@pytest.mark.parametrize(("call", "given", "message"), REFUSED)
def test_refused(call: Callable[..., Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(**given)


class Locked(MLP):
    """It cannot be copied but by what it says of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.lock: Any = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"lock": None}


class Registered(MLP):
    """Its subclasses have to give their names."""

    def __init_subclass__(cls, name: str) -> None:
        cls.name = name


class Own(Registered, name="own"):
    pass


@pytest.mark.parametrize("given", [{}, {"error": "rounding", "exclude": "fc1"}], ids=str)
@pytest.mark.parametrize("copies", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("kind", [MLP, Locked, Own])
def test_copies(kind: type[nn.Module], copies: Callable[[Any], Any], given: dict[str, Any]) -> None:
    """The class is a subclass of the same name; copies save as little, are independent, and are turned back."""
    model, doubled = kind(), kind()

    def looks() -> Any:
        return repr(model), [*model.state_dict()], dict(model.named_modules())

    looked, before = looks(), saved_bytes(model, WIDE)
    for _ in range(2):
        fitact.convert(model, **given)
    assert isinstance(model, kind) and type(model) is not kind and type(model).__name__ == kind.__name__
    assert looks() == looked
    copied = copies(model)
    assert type(copied) is type(model) and saved_bytes(copied, WIDE) == saved_bytes(model, WIDE) < before
    expected = observed(model, train, X)
    doubled.load_state_dict({name: 2 * each for name, each in model.state_dict().items()})
    copied.load_state_dict(doubled.state_dict())
    fitact.convert(doubled, **given)
    assert not differences(observed(doubled, train, X), observed(copied, train, X))
    model.zero_grad()
    assert not differences(expected, observed(model, train, X))
    fresh = type(model)()
    assert saved_bytes(fresh, WIDE) == before and not fitact.revert(fresh) and type(fresh) is kind
    assert fitact.revert(copied) and not fitact.revert(copied)
    assert type(copied) is kind and vars(copied).keys() == vars(kind()).keys()
    assert saved_bytes(model, WIDE) < saved_bytes(copied, WIDE) == before


def test_a_forward_of_the_module_s_own() -> None:
    """accelerate sets one, for example for autocast or to move the weights of parts."""
    model = MLP()
    forward = model.forward = partial(MLP.hidden, model)
    expected, before = observed(copy.deepcopy(model), train, X), saved_bytes(model, WIDE)
    fitact.convert(model)
    assert saved_bytes(model, WIDE) < before
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        each.zero_grad()
        assert not differences(expected, observed(each, train, X))
    fitact.revert(model)
    assert vars(model)["forward"] is forward and saved_bytes(model, WIDE) == before


def named(m: Any, x: Tensor) -> Tensor:
    """Return attention and a layer whose tensors are given by name."""
    q, k, v = m.qkv(x).view(4, 64, 3, 64).unbind(2)
    y = F.scaled_dot_product_attention(query=q, key=k, value=v)
    y = torch.matmul(input=y, other=F.gelu(q).mT)
    return F.linear(input=F.gelu(y), weight=m.out.weight)


@pytest.mark.parametrize(("error", "most"), [("rounding", 0.05), ("coarse", 0.15)])
def test_tensors_by_name(error: str, most: float) -> None:
    model = built(named, qkv=nn.Linear(64, 192), out=nn.Linear(64, 64, bias=False))
    both_ways(model, torch.randn(4, 64, 64), error=error, most=most)
