"""What codes of an MLP keep (`keeping`), what stands for f and f′, and errors of gradients (`coded_gradients`)."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn

import fitact
from benchmarks.convergence.keeping import (
    BLOCK,
    DERIVATIVES,
    EXACT,
    FUNCTIONS,
    KEEPERS,
    backward,
    fit,
    pack,
    product,
    unpack,
)
from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.tasks import LEARNED_PARTS, SMALL
from benchmarks.evidence import coded_gradients
from benchmarks.evidence.coded_gradients import Site
from fitact.runtime.memory.saved import count_saved
from fitact.runtime.rebuild.modules import swap
from tests.conftest import ROOT

EVERY = pytest.mark.parametrize("name", KEEPERS)
CODED = [name for name in KEEPERS if name.startswith("coded")]


@pytest.mark.parametrize("bits", range(3, 8))
@pytest.mark.parametrize("count", [1, 8, 1003])
def test_packing(bits: int, count: int) -> None:
    codes = torch.randint(2**bits, (count,))
    packed = pack(codes, bits)
    assert packed.shape == (bits, math.ceil(count / 8)) and packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, count), codes)
    assert int(packed[0, 0]) == sum((int(code) & 1) << i for i, code in enumerate(codes[:8]))


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_codes_are_the_records(function: str, name: str) -> None:
    record = fit(function, KEEPERS[name].bits, wide=name.endswith("wide"))
    x = torch.cat([torch.randn(1000, dtype=torch.float64) * 3, torch.tensor(record.borders, dtype=torch.float64)])
    codes = record.code(x.numpy())
    value, derivative = KEEPERS[name].stand_ins(function, x)
    assert value.tolist() == [record.values[code] for code in codes]
    assert derivative.tolist() == [record.derivatives[code] for code in codes]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_derivatives(function: str) -> None:
    x = torch.randn(100, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(FUNCTIONS[function](x).sum(), x)
    torch.testing.assert_close(DERIVATIVES[function](x.detach()), expected)


@pytest.mark.parametrize("name", sorted(KEEPERS.keys() - CODED))
def test_what_is_rounded_is_near(name: str) -> None:
    """To half of the last digit, or of the step, and not nearer."""
    x = torch.randn(64, 3 * BLOCK) * torch.logspace(-1, 1, 64)[:, None]
    value, derivative = KEEPERS[name].stand_ins("identity", x)
    assert torch.equal(derivative, torch.ones_like(x))
    exact = x.double()
    error = (value.double() - exact).abs()
    if name.startswith("int8"):
        scale = (
            x.view(-1, BLOCK if name == "int8_block" else x.shape[1]).abs().amax(1, keepdim=True).double() / 127
        )
        assert bool((error.view(len(scale), -1) <= scale * (0.5 + 1e-5)).all())
        assert float(error.max()) > 0.4 * float(scale.max())
    else:
        digits = {"bfloat16": 8, "e4m3": 4, "e5m2": 3}[name.partition("_")[0]]
        near = exact.abs() > 0.02
        assert bool((error[near] <= 2.0**-digits * exact.abs()[near] * (1 + 1e-5)).all())
        assert float((error[near] / exact.abs()[near]).max()) > 0.9 * 2.0**-digits / (1 + 2.0**-digits)


def test_float8_saturates() -> None:
    x = torch.tensor([[1e6, -1e6, 1.0]])
    assert KEEPERS["e4m3"].stand_ins("identity", x)[0].tolist() == [[448, -448, 1]]
    assert KEEPERS["e5m2"].stand_ins("identity", x)[0].tolist() == [[57344, -57344, 1]]


@EVERY
@pytest.mark.parametrize("gated", [False, True])
def test_kept_bytes(name: str, gated: bool) -> None:
    """Bits of each element, and 4 bytes for each scale; forward is exact."""
    layer, x = nn.Linear(2 * BLOCK, 16), torch.randn(40, 2 * BLOCK, requires_grad=True)
    u = torch.randn(40, 2 * BLOCK) if gated else None
    keeper = KEEPERS[name]
    with count_saved(layer) as saved:
        z = product(layer, "silu", (keeper, keeper), x, u)
    assert torch.equal(z, layer(F.silu(x) if u is None else F.silu(x) * u))
    scales = {"int8_row": 40, "int8_block": 80, "e4m3_scaled": 1, "e5m2_scaled": 1}.get(name, 0)
    assert saved.bytes == (1 + gated) * (x.numel() * keeper.bits // 8 + 4 * scales)


@pytest.mark.parametrize("gated", [False, True])
def test_the_gradients_are_autograds(gated: bool) -> None:
    weight, dz = (
        torch.randn(5, 7, dtype=torch.float64, requires_grad=True),
        torch.randn(2, 3, 5, dtype=torch.float64),
    )
    x, u = (torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    wanted = [x, u, weight] if gated else [x, weight]
    expected = torch.autograd.grad(F.linear(F.silu(x) * u if gated else F.silu(x), weight), wanted, dz)
    found = backward(dz, weight, EXACT.stand_ins("silu", x), u if gated else None)
    torch.testing.assert_close([one for one in found if one is not None], list(expected))


@pytest.mark.parametrize(
    ("module", "bits", "keepers"),
    [
        ("gelu", 8, ("coded8", "exact")),
        ("gelu", 6, ("coded6", "exact")),
        ("gelu", 4, ("coded4", "exact")),
        ("swiglu", 8, ("coded8", "exact")),
        ("swiglu_coded8_8", None, ("coded8", "coded8")),
        ("swiglu_coded6_8", None, ("coded6", "coded8")),
    ],
)
def test_the_gradients_are_those_of_fitact(module: str, bits: int | None, keepers: tuple[str, str]) -> None:
    """So what the benchmarks measure is what its modules and the layer that follows compute."""
    gated = module.startswith("swiglu")
    if bits is None:
        act: nn.Module = fitact.activation(module)
    else:
        act = fitact.activation(module, method="coded", bits=bits)
    layer = nn.Linear(24, 16)
    other = copy.deepcopy(layer)
    swap(layer, "Linear", "down", exact=False)
    inputs = [torch.randn(300, 24, requires_grad=True) for _ in range(1 + gated)]
    dz = torch.randn(300, 16)
    expected = torch.autograd.grad(layer(act(*inputs)), [*inputs, layer.weight, layer.bias], dz)
    keep = tuple((KEEPERS | {"exact": EXACT})[name] for name in keepers)
    z = product(other, "silu" if gated else "gelu", keep, *inputs)
    found = torch.autograd.grad(z, [*inputs, other.weight, other.bias], dz)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    with torch.enable_grad():
        exact = F.linear(F.silu(inputs[0]) * inputs[1] if gated else F.gelu(inputs[0]), layer.weight, layer.bias)
    stock = torch.autograd.grad(exact, [*inputs, layer.weight], dz)
    assert not torch.allclose(found[0], stock[0], rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------- errors of gradients


@pytest.fixture(scope="module")
def found() -> dict[str, list[Site]]:
    recipe = dataclasses.replace(SMALL.recipes["characters"], width=32, steps=2, validation=4)
    return {function: coded_gradients.sites(task, recipe) for function, task in coded_gradients.MODELS.items()}


@pytest.mark.parametrize("function", coded_gradients.MODELS)
def test_sites(function: str, found: dict[str, list[Site]]) -> None:
    assert len(found[function]) == 2
    for site in found[function]:
        assert site.function == function and (site.u is not None) == (function == "silu")
        assert all(t.dtype == torch.float64 and bool(t.isfinite().all()) and float(t.std()) > 0 for t in
                   (site.x, site.weight, site.dz))  # fmt: skip
        assert site.weight.shape == (site.dz.shape[1], site.x.shape[1]) and len(site.x) == len(site.dz)
        assert set(coded_gradients.errors(site, EXACT, EXACT).values()) == {0.0}
        near = coded_gradients.errors(site, KEEPERS["bfloat16"], EXACT)
        assert near.keys() == ({"dx", "du", "dw"} if site.u is not None else {"dx", "dw"})
        assert all(0 < error < 2**-8 for error in near.values())


def test_errors_by_hand() -> None:
    """With one element, dx = dz·w·u·f′ and dW = dz·f·u, so errors are those of f and f′."""
    one = [torch.full((1, 1), value, dtype=torch.float64) for value in (0.7, 0.3, 2.0, 0.5)]
    site = Site("silu", *one)
    value, derivative = KEEPERS["coded6"].stand_ins("silu", site.x)
    errors = coded_gradients.errors(site, KEEPERS["coded6"], EXACT)
    of_value = abs(float(value / F.silu(site.x)) - 1)
    assert errors["dw"] == pytest.approx(of_value) and errors["du"] == pytest.approx(of_value)
    assert errors["dx"] == pytest.approx(abs(float(derivative / DERIVATIVES["silu"](site.x)) - 1))


def test_variants(found: dict[str, list[Site]]) -> None:
    variants = dict(coded_gradients.variants(found["silu"]))
    for name, factors in coded_gradients.FACTORS.items():
        for site, changed in zip(found["silu"], variants[name], strict=True):
            ratios = [(new / old).mean(0) for old, new in ((site.x, changed.x), (site.u, changed.u))]
            assert all(sorted(r.tolist())[-4:] == pytest.approx(factors) for r in ratios)
            assert not bool(((ratios[0] > 1.5) & (ratios[1] > 1.5)).any())
            assert all(int((r > 1.5).sum()) == 4 for r in ratios)
    for deviation in coded_gradients.DEVIATIONS:
        for site in variants[f"deviation {deviation:g}"]:
            assert site.u is not None
            assert float(site.x.std()) == pytest.approx(deviation) == float(site.u.std())


def test_the_documents_table() -> None:
    """It is that of the committed results."""
    results = json.loads((ROOT / "benchmarks" / "results" / "coded_gradients.json").read_text())
    rows = {(row["function"], row["inputs"], row["x"], row.get("u", "exact")): row for row in results["rows"]}
    columns = [
        *(("gelu", "trained", name) for name in ("dx", "dw")),
        *(("silu", "trained", name) for name in ("dx", "du", "dw")),
        *(("gelu", inputs, name) for inputs in ("outliers", "deviation 0.1") for name in ("dx", "dw")),
    ]
    labels = {
        **{f"codes, {k} bits": f"coded{k}" for k in (8, 6, 4)},
        "codes, 8 bits, wide": "coded8_wide",
        "bfloat16": "bfloat16",
        "int8 per row": "int8_row",
        **{f"float8 {name}": name for name in ("e4m3", "e5m2")},
    }
    lines = (ROOT / "docs" / "coded.md").read_text("utf-8").splitlines()
    for label, name in labels.items():
        cells = [f"{100 * rows[function, inputs, name, 'exact'][one]:.2g}" for function, inputs, one in columns]
        assert f"| {label} | {' | '.join(cells)} |" in lines
    text = " ".join(lines)
    both = [
        [f"{100 * rows['silu', 'trained', n, n][one]:.1f} %" for one in ("dx", "du", "dw")]
        for n in ("coded8", "e4m3")
    ]
    assert (
        "leave `dx` {} off, `du` {} and `dW` {}; float8 e4m3 for both {}, {} and {}.".format(*both[0], *both[1])
        in text
    )
    small = [rows["gelu", "deviation 0.05", name, "exact"]["dw"] for name in ("coded8", "e4m3")]
    assert 2.7 < small[0] / small[1] < 3.3
    ratios = [
        rows[function, "trained", "e4m3", "exact"][one] / rows[function, "trained", "coded8", "exact"][one]
        for function, inputs, one in columns[:5]
    ]
    assert f"{min(ratios):.1f} to {max(ratios):.1f} times nearer" in text
    assert rows.keys() == {
        (function, inputs, keep_x.name, keep_u.name)
        for function in coded_gradients.MODELS
        for inputs in (
            "trained",
            *coded_gradients.FACTORS,
            *(f"deviation {d:g}" for d in coded_gradients.DEVIATIONS),
        )
        for keep_x, keep_u in coded_gradients.pairs(function)
    }


def test_the_documents_trainings() -> None:
    """The table of final losses is that of the committed runs, and so is what could have been told apart."""
    results = json.loads((ROOT / "benchmarks" / "results" / "convergence_codes.json").read_text())
    found = {(one["task"], one["method"]): one for one in results["comparisons"] if one["family"] == "exact"}
    text = (ROOT / "docs" / "coded.md").read_text("utf-8")
    trained = {name for _, name in found}
    assert trained == {name for name, method in METHODS.items() if method.keepers is not None}
    for name, method in METHODS.items():
        if name in trained:
            cells = []
            for task in ("characters", "gated"):
                one = found.get((task, name))
                number = "" if one is None else f"{one['difference']:+.4f} ± {one['half']:.4f}".replace("-", "−")
                cells.append(f"**{number}**" if one is not None and one["distinguishable"] else number)
            assert f"| {method.label} | {' | '.join(cells)} |".replace("|  |", "| |") in text
    for task in ("characters", "gated"):
        sizes = [one["detectable"] for (of, _), one in found.items() if of == task]
        assert f"{min(sizes):.3f} to {max(sizes):.3f}" in text
    (pairs,) = {one["pairs"] for one in found.values()}
    assert f"{pairs} seeds" in text


def test_the_documents_compiled_trainings() -> None:
    """The table of losses under the compiler is that of the committed runs, and so are the sentences."""
    results = json.loads((ROOT / "benchmarks" / "results" / "convergence_compiled.json").read_text())
    found = {(one["task"], one["method"]): one for one in results["comparisons"]}
    kept = {(one["task"], one["method"]): one["kept_bytes"] for one in results["runs"]}
    text = " ".join((ROOT / "docs" / "compiler.md").read_text("utf-8").split())
    methods = [method for method in METHODS.values() if method.compiled is not None]
    assert {name for _, name in found} == {method.name for method in methods}
    for method in methods:
        cells = []
        for task in ("characters", "gated"):
            one = found[task, method.name]
            share = f"{100 * kept[task, method.name] / kept[task, 'exact']:.0f} %"
            number = f"{one['difference']:+.4f} ± {one['half']:.4f}".replace("-", "−")
            cells += [share, f"**{number}**" if one["distinguishable"] else number]
        label = "without codes" if method.name == "compiled" else method.label.removeprefix("compiled, ")
        assert f"| {label} | {' | '.join(cells)} |" in text
    sizes = [one["detectable"] for (_, name), one in found.items() if name.startswith("compiled8")]
    assert f"{min(sizes):.3f} to {max(sizes):.3f} nats" in text
    ends = [
        max(
            one["loss"] - exact["loss"]
            for one in results["runs"]
            for exact in results["runs"]
            if (one["task"], one["method"]) == (task, "compiled6-all")
            and (exact["task"], exact["method"], exact["seed"]) == (task, "exact", one["seed"])
        )
        for task in ("characters", "gated")
    ]
    assert f"they end {ends[0]:.2f} and {ends[1]:.2f} nats above" in text


def test_the_documents_learned_trainings() -> None:
    """The table is that of the committed runs, by SciPy's paired t test; rebuilding changes no bit in them."""
    results = json.loads((ROOT / "benchmarks" / "results" / "convergence_learned.json").read_text())
    found = {(one["task"], one["method"]): one for one in results["comparisons"]}
    runs = {(one["task"], one["method"], one["seed"]): one for one in results["runs"]}
    text = (ROOT / "docs" / "learned.md").read_text("utf-8")
    assert len(runs) == 3 * 5 * len(LEARNED_PARTS) and len(found) == 2 * len(LEARNED_PARTS)
    for task, (label, _) in LEARNED_PARTS.items():
        exact, rebuilt, coded = (
            [runs[task, method, seed] for seed in range(5)] for method in ("exact", "rebuild", "learned8")
        )
        for name in ("loss", "curve"):
            assert [one[name] for one in rebuilt] == [one[name] for one in exact]
        losses = [[one["loss"] for one in some] for some in (coded, exact)]
        test = stats.ttest_rel(*losses)
        low, high = test.confidence_interval(0.95)
        one = found[task, "learned8"]
        assert one["adjusted"] == pytest.approx(min(1, 2 * test.pvalue), rel=1e-4) and not one["distinguishable"]
        cells = [
            f"{sum(losses[1]) / 5:.3f}",
            *(f"{100 * some[0]['kept_bytes'] / exact[0]['kept_bytes']:.0f} %" for some in (rebuilt, coded)),
            f"{(low + high) / 2:+.4f} ± {(high - low) / 2:.4f}".replace("-", "−"),
            f"{one['detectable']:.4f}",
        ]
        assert f"| {label} | {' | '.join(cells)} |" in text
    assert f"{results['setting']['recipes']['dyt']['steps']} steps, from 5 seeds" in text
    sizes = [one["detectable"] for (_, method), one in found.items() if method == "learned8"]
    evidence = " ".join((ROOT / "docs" / "evidence.md").read_text("utf-8").split())
    assert (
        f"{min(sizes):.3f} to {max(sizes):.3f} nats would have been found with probability 0.8 (`python"
        in evidence
    )
