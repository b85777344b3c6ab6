"""Models that keep codes: bytes, gradients, what `auto` chooses, and situations of training."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fitact
from fitact.errors import UsageError
from fitact.generated.gelu_coded4 import GeluCoded4
from fitact.runtime.memory.saved import count_saved
from fitact.runtime.models import reference
from fitact.runtime.models.prepare import imported
from fitact.runtime.ops.registry import registered
from fitact.runtime.rebuild.codes import Codes, gate
from tests.support.generated import same, sizes

from .test_convert_models import batch_of, model_of

ROWS, WIDTH, HIDDEN = 512, 32, 128  # of hidden elements, whole tiles
ELEMENTS = ROWS * HIDDEN
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


class MLP(nn.Module):
    def __init__(self, act: nn.Module | None = None, *between: nn.Module) -> None:
        super().__init__()
        self.fc1, self.act = nn.Linear(WIDTH, HIDDEN), act or nn.GELU()
        self.between, self.fc2 = nn.Sequential(*between), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(self.between(self.act(self.fc1(x))))
        return y


class Gated(nn.Module):
    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.act, self.gate, self.up = act or nn.SiLU(), nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return y


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.both, self.down = nn.SiLU(), nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        u, g = self.both(x).chunk(2, dim=-1)
        y: Tensor = self.down(u * self.act(g))
        return y


def made(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return make().to(dtype)


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor] | None = None, x: Tensor = X) -> list[Tensor]:
    """Of x and of all parameters."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = (run or model)(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    return [x.grad, *(one.grad.clone() for one in model.parameters() if one.grad is not None)]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(same, a, b))


def kept(model: nn.Module, x: Tensor) -> list[int]:
    with count_saved(model) as saved:
        model(x)
    return sizes(saved)


class Table:
    """A shipped coded fit, in float64."""

    def __init__(self, name: str) -> None:
        fit = json.loads(files("fitact.generated").joinpath("fits", f"{name}.json").read_text())
        self.borders, self.values, self.derivatives = (
            torch.tensor(fit[key], dtype=torch.float64) for key in ("borders", "values", "derivatives")
        )
        self.error = fit["error"]

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What stands in place of f and f′."""
        code = torch.searchsorted(self.borders, x.detach().double())
        return self.values[code], self.derivatives[code]


# -------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", [8, 6, 4])
def test_an_mlp_keeps_codes_alone(bits: int, dtype: torch.dtype) -> None:
    """Where stock keeps the input of GELU, and its output."""
    model, x = made(MLP, dtype), X.to(dtype)
    assert kept(model, x) == sorted([x.nbytes, *[ELEMENTS * dtype.itemsize] * 2])
    (site,) = fitact.convert(model, "coded", bits)
    assert (site.name, site.after, site.kind) == ("act", f"gelu_coded{bits}", "activation")
    assert kept(model, x) == sorted([x.nbytes, ELEMENTS * bits // 8])


GATES = {"24 bits": (8, None, 24), "16 bits": (8, 8, 16), "14 bits": (6, 8, 14)}


@pytest.mark.parametrize(("bits", "bits_u", "total"), GATES.values(), ids=GATES)
@pytest.mark.parametrize("make", [Gated, Fused])
def test_gates(make: Callable[[], nn.Module], bits: int, bits_u: int | None, total: int) -> None:
    """Where stock keeps 64 bits for an element, in bfloat16: g, f(g), u and the product."""
    model, x = made(make, torch.bfloat16), X.bfloat16()
    assert sum(kept(model, x)) == x.nbytes + ELEMENTS * 64 // 8
    (site,) = fitact.convert(model, "coded", bits, bits_u=bits_u)
    named = [f"silu_coded{bits}", *([f"identity_coded{bits_u}"] if bits_u else [])]
    assert (site.name, site.kind, site.after) == ("", "gate", ", ".join(named))
    assert kept(model, x) == sorted([x.nbytes, ELEMENTS * bits // 8, ELEMENTS * (bits_u or 16) // 8])
    assert sum(kept(model, x)) == x.nbytes + ELEMENTS * total // 8


BLOCKS: dict[str, tuple[int, dict[str, Any]]] = {  # bytes for a token in a layer; those with codes are the docs'
    "llama, rebuilt": (5904, {"method": "rebuild"}),
    "llama": (5200, {"method": "coded"}),
    "llama, u coded": (4496, {"method": "coded", "bits_u": 8}),
    "llama, norms coded": (4696, {"method": "coded", "bits_norms": 8}),
    "llama, u and norms coded": (3992, {"method": "coded", "bits_u": 8, "bits_norms": 8}),
    "llama, auto": (5200, {"method": "auto"}),
    "gpt2, rebuilt": (5136, {"method": "rebuild"}),
    "gpt2": (4112, {"method": "coded"}),
    "gpt2, norms coded": (3600, {"method": "coded", "bits_norms": 8}),
}


def block(name: str, layers: int) -> nn.Module:
    transformers = imported("transformers")
    if name == "gpt2":
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = {"n_embd": 256, "n_head": 2, "n_layer": layers, "bos_token_id": 0, "eos_token_id": 0} | off
    else:
        sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4}
        sizes |= {"num_hidden_layers": layers}
    config = transformers.AutoConfig.for_model(name, vocab_size=64, use_cache=False, **sizes)
    model: nn.Module = transformers.AutoModel.from_config(config)
    return model.bfloat16()


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_transformers(name: str) -> None:
    """Hidden size 256, bfloat16, everything trained: a token in a layer more keeps this much more."""
    bytes_kept, given = BLOCKS[name]
    ids = {"input_ids": torch.zeros(2, 512, dtype=torch.long)}
    one, two = (
        fitact.convert(block(name.partition(",")[0], n), dry_run=True, example_inputs=ids, **given) for n in (1, 2)
    )
    assert one.kept_after is not None
    assert two.kept_after is not None
    assert (two.kept_after - one.kept_after) / 1024 == bytes_kept


def test_the_row_of_the_report() -> None:
    from fitact.runtime.compare.report import measure

    rows = {row.name: row for row in measure(reference.gelu_mlp, batch=1, seq=4096, budgets=()).rows}
    coded, rebuilt = rows["coded, 8 bits"], rows["rebuilt, exact"]
    assert coded.bytes < rebuilt.bytes < rows["stock"].bytes
    assert coded.flops == 0.0


# ---------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize(("bits", "bits_u"), [(8, None), (8, 8), (6, 8), (4, 4)])
def test_gradients_of_a_gate_by_definition(bits: int, bits_u: int | None) -> None:
    """In float64: products with what the tables say; and their errors are those that the fits state."""
    torch.manual_seed(0)
    g, u, dh = torch.randn(3, 1024, 256, dtype=torch.float64)
    linear = nn.Linear(256, 64, bias=False).double()
    model = nn.Sequential(linear)
    of_f, of_u = Table(f"silu_coded{bits}"), None if bits_u is None else Table(f"identity_coded{bits_u}")
    keys = [
        registered(type(fitact.activation(name, method="coded", bits=k))).key
        for name, k in (("silu", bits), ("identity", bits_u))
        if k
    ]
    g.requires_grad_()
    u.requires_grad_()
    from fitact.runtime.rebuild.modules import swap

    swap(linear, "Linear", "0", exact=False)
    h = gate(Codes(*keys), nn.functional.silu, g, u)
    assert same(h, nn.functional.silu(g) * u)
    dz = torch.randn(1024, 64, dtype=torch.float64)
    (dw,) = torch.autograd.grad(model(h), linear.weight, dz, retain_graph=True)
    dg, du = torch.autograd.grad(h, (g, u), dh)
    with torch.no_grad():
        f, df = of_f(g)
        again = u if of_u is None else of_u(u)[0]
        for found, expected in ((dg, dh * again * df), (du, dh * f), (dw, dz.t() @ (f * again))):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    exact = nn.functional.silu(g) * u
    wanted = [*torch.autograd.grad(exact, (g, u), dh), dz.t() @ exact.detach()]
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip((dg, du, dw), wanted, strict=True)]
    value, derivative = of_f.error["value_1"], of_f.error["derivative_1"]
    in_u = 0.0 if of_u is None else of_u.error["value_1"]
    stated = [(derivative**2 + in_u**2) ** 0.5, value, (value**2 + in_u**2) ** 0.5]
    assert all(error <= 1.05 * most for error, most in zip(errors, stated, strict=True)), (errors, stated)


@pytest.mark.parametrize("given", [{}, {"bits_u": 8}, {"bits_u": 8, "bits_norms": 8}], ids=str)
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_whole_gradient(name: str, given: dict[str, int]) -> None:
    model = model_of(name)
    done = fitact.convert(model, "coded", example_inputs=batch_of(name), gradients=True, **given)
    assert done.gradient is not None
    assert done.gradient.error is not None
    print(f"{name}, {given}: {done.gradient}")
    assert 0 < done.gradient.error < 0.02


# --------------------------------------------------------------------------------------------------------- auto


def after(model: nn.Module, x: Tensor = X, **given: Any) -> dict[str, str | None]:
    """What `auto` puts where, after which the model is put back; it never keeps more than without codes."""
    exact = fitact.convert(model, "auto", error="exact", dry_run=True, example_inputs=x)
    done = fitact.convert(model, "auto", example_inputs=x, **given)
    assert done.kept_before is not None
    assert done.kept_after is not None
    assert done.kept_after == sum(kept(model, x))
    assert done.kept_after <= (exact.kept_after or 0)
    fitact.revert(model)
    return {site.name: site.after for site in done}


def test_what_auto_takes() -> None:
    mlp, gated = made(MLP), made(Gated)
    assert after(mlp) == after(mlp, error="rounding") == {"act": "gelu_coded8"}
    assert after(mlp, error="few-bit") == {"act": "gelu_coded6"}
    assert after(mlp, error="few-bit", bits=4) == {"act": "gelu_coded4"}
    assert after(mlp, error="exact") == {"act": "rebuilt"}
    assert after(mlp, bits=4) == {"act": "rebuilt"}
    assert after(gated) == {"": "silu_coded8"}
    assert after(gated, bits_u=8) == {"": "silu_coded8, identity_coded8"}
    assert after(gated, error="few-bit") == {"": "silu_coded6, identity_coded8"}
    assert after(gated, error="exact") == {"": "rebuilt"}


def suited(model: nn.Sequential) -> nn.Sequential:
    """Let inputs of activations have a deviation near 1; without norms they get smaller from layer to layer."""
    x = X
    with torch.no_grad():
        for part in model:
            part.fc1.weight /= part.fc1(x).std()
            x = part(x)
    return model


def test_auto_mixes() -> None:
    """Where a frozen layer follows, three bits are less than six; where nothing is gained, nothing is done."""
    model = suited(nn.Sequential(made(MLP), made(lambda: MLP(nn.ReLU())), made(MLP)))
    model[2].fc2.requires_grad_(False)
    assert after(model, error="few-bit") == {"0.act": "gelu_coded6", "1.act": None, "2.act": "gelu_fewbit3"}
    assert after(model) == {"0.act": "gelu_coded8", "1.act": None, "2.act": "gelu_coded8"}
    few = X[:8]  # the codes of six bits stand in whole tiles
    assert after(model[0], few, error="few-bit") == {"act": "gelu_coded8"}


def test_exact_leaves_codes_alone() -> None:
    """Those that the user has put there: gradients stay what they were, bit for bit."""
    for error in ("exact", None):
        model = made(lambda: MLP(GeluCoded4(), nn.Dropout(0.0)))
        stock = gradients(model)
        given = {"method": "rebuild"} if error is None else {"error": error}
        try:
            fitact.convert(model, example_inputs=X, **given)
        except UsageError as none:
            assert "nothing to rebuild" in str(none)
        assert isinstance(model.act, GeluCoded4)
        assert equal(gradients(model), stock)


# --------------------------------------------------------------------------------------------------- situations


def run_checkpointed(model: nn.Module, reentrant: bool) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(model, x, use_reentrant=reentrant)
        return y

    return run


@pytest.mark.parametrize("make", [MLP, Gated, Fused])
def test_the_same_gradients(make: Callable[[], nn.Module]) -> None:
    """Checkpointed, copied, pickled, accumulated, beside another model: bit for bit."""
    model = made(make)
    keys, stock = [*model.state_dict()], gradients(model)
    fitact.convert(model, "coded", bits_u=8)
    assert [*model.state_dict()] == keys
    expected = gradients(model)
    assert not equal(expected, stock)
    for reentrant in (False, True):
        assert equal(gradients(model, run_checkpointed(model, reentrant)), expected)
    assert equal(gradients(copy.deepcopy(model)), expected)
    assert equal(gradients(pickle.loads(pickle.dumps(model))), expected)
    other = made(make)
    assert equal(gradients(other), stock)
    fitact.convert(other, "coded", 6)
    assert equal(gradients(model, lambda x: model(x) + 0 * other(x).detach()), expected)
    first, second = model(X), model(2 * X)
    model.zero_grad()
    first.sum().backward()
    second.sum().backward()
    both = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    model(X).sum().backward()
    model(2 * X).sum().backward()
    assert equal(both, [one.grad for one in model.parameters()])
    again = make()
    fitact.convert(again, "coded", bits_u=8)
    again.load_state_dict(model.state_dict())
    assert equal(gradients(again), expected)
    fitact.revert(model)
    assert equal(gradients(model), stock)


@pytest.mark.parametrize("make", [MLP, Gated])
def test_autocast(make: Callable[[], nn.Module]) -> None:
    model = made(make)
    fitact.convert(model, "coded", bits_u=8)
    with torch.autocast("cpu", torch.bfloat16):
        found = kept(model, X)
    codes = ELEMENTS if make is MLP else 2 * ELEMENTS
    assert [size for size in found if size >= ELEMENTS] == [ELEMENTS] * (codes // ELEMENTS)
    with torch.autocast("cpu", torch.bfloat16):
        near = gradients(model)
        fitact.revert(model)
        stock = gradients(model)
    for a, b in zip(near, stock, strict=True):
        assert (a - b).norm() < 0.03 * b.norm()


@pytest.mark.parametrize("make", [MLP, Gated])
def test_the_compiler_traces(make: Callable[[], nn.Module]) -> None:
    model = made(make)
    stock = gradients(model)
    fitact.convert(model, "coded")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(model, lambda x: compiled(x)), stock, strict=True):
        assert (a - b).norm() < 0.01 * b.norm()


def test_a_module_at_two_sites() -> None:
    act = nn.GELU()
    model = suited(nn.Sequential(made(lambda: MLP(act)), made(lambda: MLP(act))))
    stock = gradients(model)
    exact = fitact.rebuild(model)
    assert [site.after for site in exact] == ["rebuilt", "rebuilt"]
    assert equal(gradients(model), stock)
    fitact.revert(model)
    assert after(model) == {"0.act": "gelu_coded8", "1.act": "gelu_coded8"}
    assert model[0].act is act
    assert model[1].act is act


def test_hooks_of_the_activation_are_called() -> None:
    model = made(Gated)
    fitact.convert(model, "coded")
    seen: list[Tensor] = []
    model.act.register_forward_hook(lambda _module, _args, y: seen.append(y))
    stock = made(Gated)
    assert equal(gradients(model), gradients(stock))
    assert len(seen) == 1


def test_without_gradients_nothing_is_kept() -> None:
    model = made(Gated)
    y = model(X)
    fitact.convert(model, "coded", bits_u=8)
    with torch.no_grad():
        assert kept(model, X) == []
        assert same(model(X), y.detach())
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(model(X).sum(), model.gate.weight, create_graph=True)[0].sum().backward()


# ---------------------------------------------------------------------------------------------------- arguments


def test_a_dry_run_patterns_and_twice() -> None:
    model = nn.Sequential(made(MLP), made(Gated))
    wanted = {"0.act": "gelu_coded8", "1": "silu_coded8"}
    for given in ({}, {"example_inputs": X}):
        planned = fitact.convert(model, "coded", dry_run=True, **given)
        assert {site.name: site.after for site in planned} == wanted
        assert type(model[1]) is Gated
        assert type(model[0].act) is nn.GELU
        assert type(model[0].fc2) is nn.Linear
        assert "value off by 0.69 %, derivative by 0.36 %" in str(planned)
    without = fitact.convert(model, "coded", exclude="1*", dry_run=True)
    assert {site.name: site.after for site in without if site.after} == {"0.act": "gelu_coded8"}
    only = fitact.convert(model, "coded", include="1.act", dry_run=True)
    assert {site.name: site.after for site in only if site.after} == {"1": "silu_coded8"}
    fitact.convert(model, "coded")
    once = gradients(model)
    again = fitact.convert(model, "coded")
    assert [site.reason for site in again if site.kind == "activation"] == ["already gelu_coded8"]
    assert equal(gradients(model), once)
    back = fitact.revert(model)
    assert {(site.before, site.after) for site in back} == {("gelu_coded8", "GELU"), ("silu_coded8", "Gated")}
    assert type(model[1]) is Gated
    assert type(model[0].act) is nn.GELU
    assert all("fitact" not in name for module in model.modules() for name in vars(module))


def test_layers_that_are_exact_are_reverted_first() -> None:
    model = made(MLP)
    fitact.rebuild(model)
    with pytest.raises(UsageError, match="layers of the model rebuild exactly"):
        fitact.convert(model, "coded")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"method": "coded", "bits": 2}, "bits 2: expected 3, 4, 5, 6, 7 or 8"),
    ({"method": "coded", "bits": 3}, "nothing is replaced: not shipped|nothing is shipped for gelu"),
    ({"method": "coded", "bits_u": 9}, "bits_u 9: expected 3, 4, 5, 6, 7 or 8"),
    ({"method": "coded", "bits_u": 3}, "bits_u 3: no code of the identity of so few bits is shipped"),
    ({"method": "fewbit", "bits_u": 8}, "bits_u 8: nothing keeps codes"),
    ({"error": "exact", "bits_u": 8}, "bits_u 8: nothing keeps codes"),
    ({"method": "rebuild", "bits_norms": 8}, "bits_norms 8: nothing keeps codes"),
    ({"method": "coded", "bits_norms": 2}, "bits_norms 2: expected 3, 4, 5, 6, 7 or 8"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[str(given) for given, _ in BAD])
def test_wrong_arguments(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fitact.convert(made(MLP), **given)


def test_fewer_bits_are_told() -> None:
    (site,) = fitact.convert(made(MLP), "coded", 7, dry_run=True)
    assert site.after == "gelu_coded6"
    assert site.reason == "6 bits: none of 7 is shipped; value off by 2.6 %, derivative by 1.5 %"


def test_the_default_width() -> None:
    assert type(fitact.activation("gelu", method="coded")).__name__ == "GeluCoded8"


@pytest.mark.parametrize(("scale", "outliers"), [(0.05, 1.0), (1.7, 60.0)])
def test_auto_leaves_inputs_that_codes_do_not_suit(scale: float, outliers: float) -> None:
    """Codes have a fixed range: tiny inputs fall into few cells, and outlier channels lie beyond the last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    with torch.no_grad():
        model[0].weight.mul_(scale)
        model[0].weight[:4] *= outliers
    conversion = fitact.convert(model, error="rounding", example_inputs=torch.randn(512, 64))
    assert [site.after for site in conversion.sites if site.kind == "activation"] == ["rebuilt"]
    fitact.revert(model)
    asked = fitact.convert(model, "coded", example_inputs=torch.randn(512, 64))
    assert [site.after for site in asked.sites if site.kind == "activation"] == ["gelu_coded8"]


def test_auto_leaves_gates_whose_inputs_codes_do_not_suit() -> None:
    model = made(Gated)
    with torch.no_grad():
        model.gate.weight.mul_(0.01)
        model.gate.bias.zero_()
    assert after(model) == {"": "rebuilt"}
