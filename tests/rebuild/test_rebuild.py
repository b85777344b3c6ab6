"""Outputs rebuilt: in every situation the output and all gradients are stock's, bit for bit, and less is kept.

Where stock raises, the rebuilt model is right or raises too; no gradient is silently another one.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fitact
from fitact.runtime.memory.saved import count_saved

HALF = torch.bfloat16


class MLP(nn.Module):
    def __init__(self, act: Callable[[], nn.Module] = nn.GELU, p: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.fc1, self.act, self.drop = nn.Linear(16, 32, bias=bias), act(), nn.Dropout(p)
        self.fc2 = nn.Linear(32, 16, bias=bias)

    def hidden(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.fc1(self.norm(x)))
        return y

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(self.drop(self.hidden(x)))
        return y


class Read(MLP):
    """What reads the activation's output is given; `reads` is of the model, of x and of the output."""

    def __init__(self, reads: Callable[[Any, Tensor, Tensor], Tensor], **given: Any) -> None:
        super().__init__(**given)
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        return self.reads(self, x, self.hidden(x))


class RMSNorm(nn.Module):
    """As LLaMA's: in float32, with the weight after the cast."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(16) + 0.5), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        z = x.float()
        return self.weight * (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class QKV(nn.Module):
    """Three readers of one norm, between a residual; `drop` is an adapter's dropout, of each reader its own."""

    def __init__(self, norm: Callable[[], nn.Module] = RMSNorm, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 16), norm()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=i > 1) for i in range(4))
        self.drops = nn.ModuleList(nn.Dropout(p) for _ in "qkv")

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.norm(x)
        q, k, v = (layer(drop(y)) for layer, drop in zip((self.q, self.k, self.v), self.drops, strict=True))
        z: Tensor = self.o(q.sin() * k.cos() + v)
        return x + z


class Gate(nn.Module):
    """down(drop(f(g) · u)), by names that nobody knows."""

    def __init__(self, act: Callable[[], nn.Module] = nn.SiLU, p: float = 0.0, halves: int = 0) -> None:
        super().__init__()
        self.pre, self.halves = RMSNorm(), halves
        self.inner = self.Inner(act, p, halves)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(self.pre(x))
        return y

    class Inner(nn.Module):
        def __init__(self, act: Callable[[], nn.Module], p: float, halves: int) -> None:
            super().__init__()
            self.halves, self.zap, self.sieve = halves, act(), nn.Dropout(p)
            self.wig = nn.Linear(16, 80 if halves else 40, bias=False)
            if not halves:
                self.wam = nn.Linear(16, 40, bias=False)
            self.out = nn.Linear(40, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            g = self.wig(x)
            if self.halves:
                g, u = g.chunk(2, dim=-1)[:: self.halves]
            else:
                u = self.wam(x)
            y: Tensor = self.out(self.sieve(self.zap(g) * u))
            return y


class Own(nn.Module):
    """GELU's approximation, as several operations."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": MLP,
    "dropout": lambda: MLP(p=0.3),
    "no bias": lambda: MLP(bias=False, act=nn.SiLU),
    "composed": lambda: MLP(Own),
    "qkv": QKV,
    "qkv of LayerNorm": lambda: QKV(lambda: nn.LayerNorm(16)),
    "qkv of nn.RMSNorm": lambda: QKV(lambda: nn.RMSNorm(16)),
    "plain norm": lambda: QKV(lambda: nn.LayerNorm(16, elementwise_affine=False)),
    "norm without bias": lambda: QKV(lambda: nn.LayerNorm(16, bias=False)),
    "adapters": lambda: QKV(p=0.1),
    "gate": Gate,
    "gate of GELU, dropout": lambda: Gate(nn.GELU, 0.2),
    "gate first": lambda: Gate(halves=1),
    "gate last": lambda: Gate(halves=-1, p=0.2),
    "block": lambda: nn.Sequential(QKV(), Gate(), MLP(p=0.1)),
}
SETTINGS: dict[str, tuple[torch.dtype, torch.dtype | None, bool]] = {  # dtype, autocast, also while it is rebuilt
    **{str(dtype)[6:]: (dtype, None, False) for dtype in (torch.float32, HALF, torch.float16, torch.float64)},
    "autocast": (torch.float32, HALF, True),
    "autocast later": (torch.float32, HALF, False),
    "float64 in autocast": (torch.float64, HALF, False),
}
X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))
Step = Callable[[Any, Tensor], Any]


def cast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype) if dtype else nullcontext()


def pair(make: Callable[[], Any], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return a model as it is and rebuilt."""
    torch.manual_seed(0)
    stock = make().to(dtype).train()
    rebuilt = copy.deepcopy(stock)
    assert len(fitact.rebuild(rebuilt).replaced)
    return stock, rebuilt


def loss_of(y: Tensor) -> Tensor:
    return (y.float() * torch.linspace(-1, 2, y.numel()).view(y.shape)).square().sum()


def train(model: nn.Module, x: Tensor, call: Step = lambda model, x: model(x)) -> Tensor:
    """Go forward and backward."""
    y: Tensor = call(model, x)
    loss_of(y).backward()
    return y.detach()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: one.grad for name, one in model.named_parameters()}


def observed(model: nn.Module, step: Step, x: Tensor, seed: int = 3) -> Any:
    """Return what a step returns, and all gradients; or, as a text, the error that it raises."""
    x = x.detach().requires_grad_(x.is_floating_point())
    torch.manual_seed(seed)
    try:
        result = step(model, x)
    except RuntimeError as error:
        return f"raises {error}"
    return result, x.grad, gradients(model)


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Return what is not the same to the last bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [path]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [one for key in a for one in differences(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)) and len(a) == len(b):
        return [one for i in range(len(a)) for one in differences(a[i], b[i], f"{path}.{i}")]
    return [] if type(a) is type(b) and a == b else [f"{path}: {a!r:.80}, {b!r:.80}"]


def agree(
    make: Callable[[], Any],
    step: Step = train,
    x: Tensor = X,
    dtype: torch.dtype = torch.float32,
    raises: bool = False,
) -> None:
    """Let a model and its rebuilt twin do the same; where stock raises, or if it may, the twin may raise too."""
    stock, rebuilt = pair(make, dtype)
    expected, found = (observed(one, step, x.to(dtype)) for one in (stock, rebuilt))
    if not (isinstance(expected, str) or (raises and isinstance(found, str))):
        assert not differences(expected, found)


def kept_of(model: nn.Module, call: Callable[[], Any]) -> int:
    """Return the bytes that autograd keeps of a call."""
    with count_saved(model) as saved:
        hold = call()
    assert hold is not None
    return saved.bytes


def kept(model: nn.Module, x: Tensor) -> int:
    return kept_of(model, lambda: model(x.detach().requires_grad_()))


# ------------------------------------------------------------------------------------- gradients and bytes


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # PyTorch's own
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_bytes(name: str, setting: str) -> None:
    dtype, autocast, early = SETTINGS[setting]
    with cast(autocast if early else None):
        stock, rebuilt = pair(MODELS[name], dtype)
    x = X.to(dtype)
    for seed in range(2):  # the second gradient is added to the first
        with cast(autocast):
            expected, found = (observed(one, train, x, seed) for one in (stock, rebuilt))
        assert not isinstance(expected, str)
        assert not differences(expected, found)
    wide = torch.randn(64, 16, 16).to(dtype)
    with cast(autocast):
        before, after = kept(stock, wide), kept(rebuilt, wide)
    assert after <= before and (
        dtype == torch.float64 or after < before
    )  # norms in float32 keep nothing of float64


_WIDE = torch.randn(6, 5, 4, 32, generator=torch.Generator().manual_seed(2))
SHAPES = {
    "1-D": _WIDE[0, 0, 0, :16],
    "2-D": _WIDE[0, 0, :, :16],
    "4-D": _WIDE[..., :16],
    "strided": _WIDE[0, ..., ::2],
    "turned": _WIDE[0, ..., :16].transpose(0, 1),
    "columns": _WIDE[0, :, 0, :16].t().contiguous().t(),
    "expanded": _WIDE[0, 0, 0, :16].expand(2, 3, 16),
    "one row": _WIDE[0, 0, :1, :16],
    "no rows": _WIDE[:0, 0, 0, :16],
    "no batch": _WIDE[:0, 0, :, :16],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str) -> None:
    for name in ("mlp", "no bias", "qkv", "gate last"):
        for dtype in (torch.float32, HALF):
            agree(MODELS[name], x=SHAPES[shape], dtype=dtype)
            agree(MODELS[name], lambda model, x: model(x).sum().backward(), SHAPES[shape], dtype)


READS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "slice": lambda model, x, y: model.fc2(y[:, 1:3]),
    "first": lambda model, x, y: model.fc2(y[:, 0]),
    "first, turned": lambda model, x, y: model.fc2(y[:, 0].t().contiguous().t()),
    "turned": lambda model, x, y: model.fc2(y.transpose(0, 1)),
    "turned slice": lambda model, x, y: model.fc2(y[1:].transpose(0, 1)),
    "flat": lambda model, x, y: model.fc2(y.flatten(0, 1)),
    "strided": lambda model, x, y: model.fc2(y[:, ::2]),
    "detached": lambda model, x, y: model.fc2(y.detach()) + y.sum(),
    "residual": lambda model, x, y: model.fc2(y) + (y * y).sum() + y.exp().mean(),
    "twice": lambda model, x, y: model.fc2(y).sin() * model.fc2(y).cos() + model.fc2(y),
    "keyword": lambda model, x, y: model.fc2(input=y),
    "again": lambda model, x, y: model.fc2(model.act(model.fc1(model.fc2(y)))),
    "in place before": lambda model, x, y: model.fc2(y.mul_(2)),
    "in place before, unseen": lambda model, x, y: model.fc2(_unseen(y)),
    "in place, a part before": lambda model, x, y: model.fc2(_part(y)),
    "result in place": lambda model, x, y: model.fc2(y).mul_(2).relu_(),
    "to float64": lambda model, x, y: model.fc2(y.double().to(y)),
}


def _unseen(y: Tensor) -> Tensor:
    with torch.no_grad():
        y.clamp_(min=0.1)
    return y


def _part(y: Tensor) -> Tensor:
    y[:, 1].zero_()
    return y


@pytest.mark.parametrize("dtype", [torch.float32, HALF, None])
@pytest.mark.parametrize("reads", READS)
def test_readers(reads: str, dtype: torch.dtype | None) -> None:
    """None is bfloat16 by autocast."""
    for act in (nn.GELU, Own):

        def step(model: Any, x: Tensor) -> Any:
            with cast(None if dtype else HALF):
                y = model(x)
            loss_of(y).backward()
            return y.detach()

        make = partial(Read, READS[reads], act=act)
        agree(make, step, dtype=dtype or torch.float32)


def test_the_first_of_each_text() -> None:
    """A head that reads it keeps nothing of the others."""
    stock, rebuilt = pair(partial(Read, READS["first"]))
    x = torch.randn(4, 50, 16)
    assert kept(stock, x) - kept(rebuilt, x) == 3 * x.nbytes  # of the norm and of the activation


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("kind", [nn.GELU, Own, RMSNorm, nn.LayerNorm])
def test_order_of_sums(kind: Any, dtype: torch.dtype) -> None:
    """The input of what is rebuilt is read by others too, whose gradients are added in stock's order."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(16, 16), nn.Linear(16, 16)
            self.act = kind(*([16] if kind is nn.LayerNorm else []))

        def forward(self, x: Tensor) -> Tensor:
            a = self.fc1(x)
            return a.exp() + self.fc2(self.act(a)) + self.act(a) * a.sin() + a.cos()

    agree(Sums, x=torch.randn(32, 16), dtype=dtype)


def test_frozen_parts() -> None:
    for names in (["fc2.weight"], ["fc2.bias"], ["fc1.weight", "fc1.bias", "norm.weight"], ["norm.bias"]):

        def make(names: list[str] = names) -> nn.Module:
            model = MLP()
            for name in names:
                model.get_parameter(name).requires_grad_(False)
            return model

        agree(make)
        stock, rebuilt = pair(MLP)
        for model in (stock, rebuilt):  # afterwards
            for name in names:
                model.get_parameter(name).requires_grad_(False)
        assert not differences(observed(stock, train, X), observed(rebuilt, train, X))


# ------------------------------------------------------------------------------------------- what surrounds it


def _policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


def _accumulated(model: Any, x: Tensor) -> Tensor:
    for part in (x, x.cos()):
        train(model, part)
    return train(model, x)


def _retained(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    loss = loss_of(y)
    loss.backward(retain_graph=True)
    loss.backward()
    return y.detach()


def _partial(model: Any, x: Tensor) -> Any:
    """Ask for one weight's gradient, then for another's, then for everything."""
    y: Tensor = model(x)
    weights = [one for one in model.parameters() if one.ndim == 2]
    first = [
        torch.autograd.grad(loss_of(y), one, retain_graph=True)[0]
        for one in (weights[-1], weights[0], weights[-1])
    ]
    loss_of(y).backward()
    return first


def _threaded(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    thread = threading.Thread(target=loss_of(y).backward)
    thread.start()
    thread.join()
    return y.detach()


def _inside(context: Callable[[], Any], model: Any, x: Tensor) -> Tensor:
    with context():
        return train(model, x)


def _backward_in_autocast(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    with cast(HALF):
        loss_of(y).backward()
    return y.detach()


def _evaluated_before_backward(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    model.eval()
    loss_of(y).backward()
    return y.detach()


def _hooked(model: Any, x: Tensor) -> Any:
    """Hooks see what they saw, forward and backward, and may replace outputs."""
    seen: list[Any] = []
    for name, one in model.named_modules():
        if type(one).__name__ in ("GELU", "SiLU", "Dropout", "LayerNorm", "RMSNorm", "Linear"):
            one.register_forward_hook(
                lambda _, given, y, name=name: seen.append((name, given[0].shape, y.detach()))
            )
            one.register_full_backward_hook(lambda _, dx, dy, name=name: seen.append((name, dx[0], dy[0])))
    norm = next(one for one in model.modules() if "Norm" in type(one).__name__)
    norm.register_forward_hook(lambda _, __, y: y * 1.5)
    return train(model, x), sorted(seen, key=lambda one: one[0])


def _checkpointed(model: Any, x: Tensor, **how: Any) -> Tensor:
    return train(model, x, lambda model, x: checkpoint(model, x, **how))


AROUND: dict[str, Step] = {
    "reentrant": partial(_checkpointed, use_reentrant=True),
    "checkpoint": partial(_checkpointed, use_reentrant=False),
    "selective": partial(
        _checkpointed, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, _policy)
    ),
    "save_on_cpu": partial(_inside, save_on_cpu),
    "autocast, backward inside": partial(_inside, partial(cast, HALF)),
    "backward in autocast": _backward_in_autocast,
    "anomalies": partial(_inside, torch.autograd.detect_anomaly),
    "accumulated": _accumulated,
    "retained": _retained,
    "partial": _partial,
    "threaded": _threaded,
    "evaluated": _evaluated_before_backward,
    "hooked": _hooked,
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", ["dropout", "composed", "adapters", "gate", "block"])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_surroundings(name: str, around: str) -> None:
    agree(MODELS[name], AROUND[around])


class Named(nn.Module):
    """A gated MLP whose children and attributes have names that the project uses for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stock, self.kind, self.activation, self.down = (
            *(nn.Linear(16, 32), nn.Linear(16, 32)),
            *(NamedActivation(), nn.Linear(32, 16)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.activation(self.stock(x)) * self.kind(x))
        return y


class NamedActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stock, self.kind, self.path, self.gate = 1.702, "quick", "a", 2

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.stock * x)


def test_names_of_a_module_s_own() -> None:
    x = torch.randn(8, 16)
    for make in (Named, lambda: nn.Sequential(nn.Linear(16, 32), NamedActivation(), nn.Linear(32, 16))):
        torch.manual_seed(0)
        model = make()
        stock = copy.deepcopy(model)
        report = fitact.rebuild(model, example_inputs=x, gradients=True)
        assert report.kept_after < report.kept_before and report.gradient.error == 0
        assert torch.equal(model(x), stock(x))


class ByName(MLP):
    """Its layers are given their inputs by name."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(input=self.act(input=self.fc1(input=self.norm(input=x))))
        return y


def test_inputs_given_by_name() -> None:
    x = torch.randn(64, 16)
    kept_after = []
    for make in (MLP, ByName):
        torch.manual_seed(0)
        model = make()
        report = fitact.rebuild(model, example_inputs=x, gradients=True)
        assert report.gradient.error == 0
        kept_after.append(report.kept_after)
        with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
            model.fc2(foo=x)
    assert kept_after[0] == kept_after[1]
