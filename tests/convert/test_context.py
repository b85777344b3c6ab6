"""`convert` without a method: what is reported, and that the model stays the same but for what it saves."""

import itertools
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fitact
from fitact.base import JobError, UsageError
from fitact.runtime.choose import reproducibly
from fitact.runtime.choose.records import Gradient
from fitact.runtime.measure import count_saved
from fitact.runtime.saving.modules import Attached
from tests.support.built import built
from tests.support.saving import differences, off

WIDTH, HIDDEN = 32, 128
X = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(0))


def linear(inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(inputs, outputs)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN), linear(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.mlp, self.drop = nn.LayerNorm(WIDTH), Gated(), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.mlp(self.norm(x)))


class Model(nn.Sequential):
    def __init__(self, dropout: float = 0.1) -> None:
        layers = nn.Sequential(*(Block(dropout) for _ in range(2)))
        super().__init__(OrderedDict(layers=layers, head=linear(outputs=4)))


def spectrum(self: Any, x: Tensor) -> Tensor:
    """Have activations of complex numbers, of real numbers and of indices."""
    wave = self.bend(torch.fft.rfft(self.embedding(self.index(x.argmax(-1) % 4))))
    return self.out(self.act(torch.view_as_real(wave).flatten(-2)))


def rotary(self: Any, x: Tensor) -> Tensor:
    """Read real numbers as complex ones, which a weight turns."""
    z = torch.view_as_complex(self.linear(x).bfloat16().float().unflatten(-1, (-1, 2)))
    return self.linear(F.gelu((z * self.weight).real.repeat(1, 2)))


def in_place(self: Any, x: Tensor) -> Tensor:
    """Change tensors in place, which are given by name."""
    x = self.linear(F.relu(input=self.norm(self.linear(x)), inplace=True))
    x = self.linear(torch.relu_(input=self.norm(x)))
    return self.linear(F.dropout(input=F.gelu(self.linear(x)), inplace=True))


def calls(self: Any, x: Tensor) -> Tensor:
    """Call an activation by name, and read what it holds."""
    return self.down(self.act(input=self.up(x)) * self.act.negative_slope)


def dyt() -> nn.Module:
    """Return a norm's replacement, whose numbers are learned."""
    numbers = {"alpha": torch.full((1,), 0.5), "weight": torch.ones(WIDTH), "bias": torch.zeros(WIDTH)}
    parts = {name: nn.Parameter(each) for name, each in numbers.items()}
    return built(lambda self, x: torch.tanh(self.alpha * x) * self.weight + self.bias, **parts)


def parametrised() -> nn.Module:
    norm = nn.LayerNorm(WIDTH)
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Softplus())
    return nn.Sequential(linear(), norm, nn.GELU(), linear())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gates": Model,
    "complex": lambda: built(
        spectrum, index=nn.ReLU(), embedding=nn.Embedding(4, 64), bend=nn.Tanh(), act=nn.GELU(), out=linear(66, 64)
    ),
    "calls": lambda: built(calls, act=nn.LeakyReLU(), up=linear(WIDTH, HIDDEN), down=linear(HIDDEN)),
    "parametrised": parametrised,
    "transformer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, batch_first=True),
    "rotary": lambda: built(rotary, linear=linear(), weight=nn.Parameter(torch.randn(16) + 0j)),
    "in place": lambda: built(in_place, norm=nn.LayerNorm(WIDTH), linear=linear()),
    "DyT": lambda: nn.Sequential(linear(), dyt(), linear(WIDTH, 64), nn.GELU(), linear(64, 4)),
    "learned": lambda: nn.Sequential(linear(WIDTH, 64), nn.PReLU(64), linear(64, 4)),
}
ERRORS = {"exact": 0.0, "rounding": 0.02, "coarse": 0.2}  # how far gradients may be off
SAVED = {"exact": 0.6, "rounding": 0.3, "coarse": 0.15}  # which share is saved at most
STORED = {"exact": "itself", "rounding": "8 bits", "coarse": "4 bits"}


def made(make: Callable[[], nn.Module] = Model) -> Any:
    torch.manual_seed(0)
    return make()


def step(model: nn.Module, autocast: bool = False) -> tuple[int, list[Tensor]]:
    """Return the bytes that are saved, and the output and gradients of X and the parameters."""
    torch.manual_seed(1)
    x = X.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), count_saved(model) as saved:
        y = model(x)
    wanted = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    gradients = torch.autograd.grad(y.float().square().sum(), wanted, allow_unused=True)
    return saved.bytes, [y.detach(), *(gradient for gradient in gradients if gradient is not None)]


def attached(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, Attached)]


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, autocast: bool) -> None:
    """By default the gradient is compared, and equal; the report says what is saved."""
    model = made(MODELS[name])
    model(X)  # which leaves running statistics and caches
    before, expected = step(model, autocast=autocast)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        report = fitact.convert(model, example_inputs=X.clone().requires_grad_())
    after, actual = step(model, autocast=autocast)
    assert not differences(actual, expected)
    assert report.gradient is not None and report.gradient.error == 0
    sums = tuple(sum(getattr(module, key) for module in report.modules) for key in ("before", "after"))
    assert sums == (report.saved_before, report.saved_after) == (before, after) and after < before


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("gradients", [None, True, False])
def test_classes_of_errors(error: str, gradients: bool | None) -> None:
    """The gradient is compared if one asks for that, or it is to be exact."""
    model = made()
    before, expected = step(model)
    report = fitact.convert(model, error=error, example_inputs=X, gradients=gradients)
    after, actual = step(model)
    assert after == report.saved_after < before * SAVED[error]
    assert (report.gradient is not None) == (error == "exact" if gradients is None else gradients)
    assert (not differences(actual, expected)) == (error == "exact") and off(actual, expected) <= ERRORS[error]
    if report.gradient is not None:
        assert 0 <= report.gradient.error <= ERRORS[error] and (report.gradient.error == 0) == (error == "exact")
    rows = {row.name: row.storages for row in report.modules}
    assert STORED[error] in rows["layers.*.mlp"] and STORED[error] in rows["layers.*.norm"]
    assert rows["layers.*.drop"] == ("mask in bits",)


def test_numbers_of_bits() -> None:
    """They are those of `saving`; with them nothing is exact."""
    model, in_context = made(), made()
    report = fitact.convert(model, bits={"gate": 6}, example_inputs=X)
    assert report.sites[0].after == "saving(\"exact\", bits={'gate': 6})" and report.gradient is None
    in_context.forward = fitact.saving("exact", {"gate": 6})(in_context.forward)
    _, actual = step(model)
    assert not differences(actual, step(in_context)[1]) and differences(actual, step(made())[1])
    four = fitact.convert(model, bits=4, example_inputs=X, gradients=True)
    assert four.saved_after < report.saved_after and four.gradient is not None and four.gradient.error


class Tells(Model):
    """Computes something else in a context."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + isinstance(self, Attached))


def test_to_count_nothing_is_coded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors of a large model would be for minutes."""
    monkeypatch.setattr("fitact.runtime.saving.blocks._encode", None)
    report = fitact.convert(Gated(), error="rounding", example_inputs=X)
    assert 0 < report.saved_after < 0.5 * report.saved_before


def test_gradients_that_are_not_exact() -> None:
    """The model then stays as it is. In a class of errors the difference is in the report."""
    model = made(Tells)
    with pytest.raises(JobError, match=r"the gradient is off by 100 %.* error='exact'.*; the model is unchanged"):
        fitact.convert(model, example_inputs=X)
    assert type(model) is Tells
    assert fitact.convert(model, example_inputs=X, gradients=False).replaced
    report = fitact.convert(model, error="rounding", example_inputs=X, gradients=True)
    assert report.gradient.error > 0.9


def test_gradients_are_compared_with_the_baseline_inside_of_a_context() -> None:
    model = Model()
    with fitact.saving("coarse"):
        assert fitact.convert(model, example_inputs=X).gradient.error == 0
        assert fitact.verify(model, X).same


def test_gradients_that_cannot_be_compared() -> None:
    count, empty = itertools.count(1), torch.empty(512, WIDTH, device="meta")
    counts = built(lambda self, x: self.mlp(x) * next(count), mlp=Gated())
    for model, x, note in (
        (counts, X, "two runs of the model as it is have different gradients"),
        (Model().to("meta"), empty, "the model's tensors have no values"),
        (Gated(), X.long(), "could not be measured: RuntimeError"),  # fake tensors take integers
    ):
        assert note in str(fitact.convert(model, example_inputs=x)).splitlines()[-1]


def test_a_first_run_that_differs_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first products of a GPU may: only a second difference counts."""
    actual = [Gradient(0.0, 1.0), Gradient(1e-3, 1.0)]
    monkeypatch.setattr(import_module("fitact.runtime.choose.convert"), "gradient_error", lambda *_: actual.pop())
    report = fitact.convert(nn.Sequential(linear(), nn.GELU(), linear()), example_inputs=X)
    assert report.gradient == Gradient(0.0, 1.0) and not actual


def test_gradients_are_compared_with_deterministic_algorithms() -> None:
    """Where PyTorch has them; other errors are the caller's."""

    def call(seen: list[bool], said: str) -> list[bool]:
        seen.append(torch.are_deterministic_algorithms_enabled())
        if seen[-1]:
            raise RuntimeError(said)
        return seen

    assert reproducibly(partial(call, [], "aten::x does not have a deterministic implementation")) == [True, False]
    with pytest.raises(RuntimeError, match="another error"):
        reproducibly(partial(call, [], "another error"))
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_report() -> None:
    model = made(lambda: Model(0.0))
    report = fitact.convert(model, example_inputs=X)
    (site,) = report
    assert (site.name, site.kind, site.before, site.after) == ("", "module", "Model", 'saving("exact")')
    assert str(report).splitlines() == [
        'the model, Model, runs in saving("exact")',
        "module                         saved            now  how it is stored now",
        "layers.*.mlp       ×2        1.5 MiB        1.0 MiB  itself, recomputed",
        "layers.*.mlp.down  ×2  524,288 bytes        0 bytes  recomputed",
        "layers.*.norm      ×2  139,264 bytes  139,264 bytes  itself",
        "layers.*.mlp.gate  ×2  131,072 bytes        0 bytes  recomputed",
        "head                    65,536 bytes   65,536 bytes  itself",
        "itself: nothing cheap gives it; inputs and products of matrices are not recomputed",
        "the model saves 1.2 MiB for backward instead of 2.3 MiB, 51.5 %",
        "the gradient equals the baseline's, bit for bit",
    ]
    assert str(fitact.convert(model, dry_run=True)) == 'the model, Model, would run in saving("exact")'


def test_nothing_to_save() -> None:
    """Then the report says so, and nothing is changed; a context of before is taken away."""
    model = made(lambda: nn.Sequential(nn.Linear(WIDTH, 4)))
    for _ in range(2):
        report = fitact.convert(model, example_inputs=X)
        assert [(site.after, site.reason) for site in report] == [(None, "it has nothing to save")]
        assert report.saved_before == report.saved_after and not report.replaced and not attached(model)
        assert "it has nothing to save" in str(report) and "as before, 0 % less" in str(report)
        fitact.convert(model)  # without inputs it is not known
        assert attached(model) == [""]


PATTERNS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "included": ({"include": "layers.*"}, ["layers.0", "layers.1"]),
    "two": ({"include": ["layers.0.mlp", "head"]}, ["layers.0.mlp", "head"]),
    "excluded": ({"exclude": ["layers.0"]}, [""]),
    "both": ({"include": "*.mlp", "exclude": ("layers.1",)}, ["layers.0.mlp"]),
}


@pytest.mark.parametrize(("given", "paths"), PATTERNS.values(), ids=PATTERNS)
def test_patterns(given: dict[str, Any], paths: list[str]) -> None:
    """What is excluded saves as it does by itself."""
    model, plain = made(), made()
    before, expected = step(plain)
    report = fitact.convert(model, **given, example_inputs=X)
    assert [site.name for site in report.replaced] == paths
    left = [(site.name, site.reason) for site in report if site not in report.replaced]
    assert left == [(path, "excluded") for path in given.get("exclude", ())]
    after, actual = step(model)
    assert not differences(actual, expected) and report.saved_after == after < before
    with count_saved(model, detail=True) as saved:
        model(X)
    rows = {row.name: row.after for row in report.modules if row.after}
    assert rows == {name: size for name, size in saved.by_module().items() if size}
    fitact.revert(model)
    assert not attached(model) and step(model)[0] == before


class Frozen(nn.Sequential):
    """A module whose attributes may not be set once it is made."""

    def __setattr__(self, name: str, value: object) -> None:
        if "frozen" in vars(self):
            raise RuntimeError("frozen")
        super().__setattr__(name, value)


def test_modules_that_refuse_attributes() -> None:
    model = Frozen(linear(WIDTH, HIDDEN), nn.GELU(), linear(HIDDEN))
    vars(model)["frozen"] = True
    assert fitact.convert(model, example_inputs=X).replaced and isinstance(model, Attached)
    fitact.revert(model)
    assert type(model) is Frozen


def test_a_scripted_part_has_no_context_of_its_own() -> None:
    model = nn.Sequential(torch.jit.script(linear()), nn.GELU(), linear())
    with pytest.raises(UsageError, match=r"^0: a ScriptModule runs as it was compiled"):
        fitact.convert(model, exclude="0")
    assert not attached(model)


def test_lazy_and_untrained_models() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4), nn.GELU(), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    for method in (None, "fewbit"):
        with pytest.raises(UsageError, match="not initialised yet: run it once"):
            fitact.convert(lazy, method, example_inputs=X)
    fitact.convert(lazy)
    lazy(X).sum().backward()
    with fitact.saving():  # which layers may be made in
        layers = nn.Conv2d(3, 3, 3), nn.LSTM(3, 3), nn.MultiheadAttention(8, 2), nn.Embedding(4, 4)
    assert all(bool(parameter.isfinite().all()) for layer in layers for parameter in layer.parameters())
    frozen = made().requires_grad_(False)
    report = fitact.convert(frozen, example_inputs=X)
    assert (report.saved_before, report.saved_after, report.replaced) == (0, 0, ()) and not attached(frozen)


def test_converting_again() -> None:
    """The last context counts; what it saves is compared with the model as it is without any."""
    model = made()
    reports = []
    for given in ({"error": "rounding"}, {"include": "layers.1"}, {}, {}, {"error": "coarse"}):
        reports.append(fitact.convert(model, **given, example_inputs=X))
        assert attached(model) == [given.get("include", "")]
        assert reports[-1].saved_before == reports[0].saved_before
        assert reports[-1].saved_after == step(model)[0]
    assert reports[2] == reports[3]
    for given in ({"method": "fewbit"}, {"example_inputs": X}):
        fitact.convert(model, **given, dry_run=True)
        assert attached(model) == [""] and step(model)[0] == reports[-1].saved_after
    (site,) = fitact.revert(model)
    assert (site.name, site.before, site.after) == ("", "Model", "no context") and not fitact.revert(model).sites
    assert type(model) is Model and step(model)[0] == reports[0].saved_before


def test_beside_a_method() -> None:
    """Replaced activations save their bits in a context too, and each kind of conversion leaves the other."""
    model = made(lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, 4)))
    _, exact = step(model)
    fitact.convert(model, "fewbit")
    before, expected = step(model)
    report = fitact.convert(model, example_inputs=X)
    after, actual = step(model)
    assert not differences(actual, expected) and after < before == report.saved_before
    assert len(fitact.revert(model)) == 2
    assert type(model) is nn.Sequential and type(model[2]) is nn.GELU and not differences(step(model)[1], exact)


@pytest.mark.parametrize("how", ["torch.compile", "in place", "a part"])
def test_compiled_models(how: str) -> None:
    """The compiler traces the model as it is; around a part that is compiled, the rest saves less."""
    torch._dynamo.reset()
    model = compiled = made(lambda: Model(0.0))
    expected = model(X)
    if how == "torch.compile":
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    else:
        (model if how == "in place" else model.layers[0]).compile(backend="aot_eager")
    fitact.convert(compiled)
    y = compiled(X)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    fitact.revert(compiled)
    assert type(model) is Model


class Around(nn.Module):
    """A wrapper with all attributes of what it wraps, as peft's."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)

    def forward(self, x: Tensor, factor: int) -> Tensor:
        return factor * self.inner(x)


def test_a_wrapper_around_a_compiled_model() -> None:
    """It is not compiled itself, though it has an attribute that says so."""
    model = Around(torch.compile(made(lambda: Model(0.0)), backend="eager"))
    fitact.convert(model, example_inputs=(X, 2))
    assert isinstance(model, Attached)


def test_sparse_tensors() -> None:
    """They are stored as they are, and not counted: a product's gradient needs the sparse matrix."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down(F.silu(torch.sparse.mm(torch.eye(len(x)).to_sparse(), self.up(x))))

    model, x = built(forward, up=nn.Linear(64, 64), down=nn.Linear(64, 8)), torch.randn(16, 64)
    assert fitact.plan(model, gib=1, example_inputs=x).fits
    report = fitact.convert(model, example_inputs=x)
    assert report.gradient is not None and report.gradient.error == 0
    assert (report.saved_before, report.saved_after) == (3 * x.nbytes, 2 * x.nbytes)


def test_a_module_that_differentiates_itself() -> None:
    """PyTorch refuses hooks around `torch.func.grad`: the message says what to leave out, and then all is well."""
    forces = built(lambda m, x: torch.func.grad(lambda y: F.silu(m.layer(y)).sum())(x), layer=linear())
    model = nn.Sequential(linear(), forces)
    expected = torch.autograd.grad(model(X).square().sum(), [*model.parameters()])
    fitact.convert(model)
    with pytest.raises(UsageError, match="leave out the module"):
        model(X)
    fitact.revert(model)
    fitact.convert(model, exclude="1")
    assert all(map(torch.equal, torch.autograd.grad(model(X).square().sum(), [*model.parameters()]), expected))
