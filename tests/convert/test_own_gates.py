"""One's own generated gates in a model: what they keep, their row in the report, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fitact
from fitact.errors import UsageError
from fitact.generated.gelu_coded8 import GeluCoded8
from fitact.generated.swiglu_rebuild import SwigluRebuild
from fitact.runtime.ops.factors import CodedFactor
from fitact.runtime.ops.gate_ops import find
from tests.support import gates
from tests.support.generated import load, same

from .test_coded_models import ELEMENTS, HIDDEN, MLP, WIDTH, Fused, Gated, X, equal, gradients, kept, made


@cache
def own(bits: int = 5, bits_u: int = 16, text: str = "silu(g)*u") -> Any:
    """The class of a generated gate, whose fit lies beside its module."""
    fit = gates.coded(text, f"own_gate{bits}_{bits_u}", bits, bits_u)
    module = load(fit)
    fits = Path(str(module.__file__)).parent / "fits"
    fits.mkdir()
    (fits / f"{fit.name}.json").write_text(fit.to_json(), "utf-8")
    return getattr(module, f"OwnGate{bits}{bits_u}")


@pytest.mark.parametrize("method", ["coded", "auto"])
@pytest.mark.parametrize("bits_u", [16, 8])
@pytest.mark.parametrize("make", [Gated, Fused])
def test_it_takes_the_place_of_what_ships(make: Callable[[], nn.Module], bits_u: int, method: str) -> None:
    """The bytes of its codes, and the gradients of its own tables, to which no shipped fit is equal."""
    model, x = made(make, torch.bfloat16), X.bfloat16()
    keys, y = [*model.state_dict()], model(x)
    given: dict[str, Any] = {"replace": {nn.SiLU: own(5, bits_u)}, "example_inputs": x}
    planned = fitact.convert(model, method, dry_run=True, **given)
    assert type(model) is make
    (site,) = fitact.convert(model, method, **given)
    assert (site.name, site.kind, site.after) == ("", "gate", f"own_gate5_{bits_u}")
    assert list(planned) == [site]
    error = gates.coded("silu(g)*u", f"own_gate5_{bits_u}", 5, bits_u).error
    assert site.reason == ", ".join(f"{one} off by {100 * error[f'{one}_1']:.2g} %" for one in ("h", "dg", "du"))
    assert [*model.state_dict()] == keys
    assert same(model(x).detach(), y.detach())
    assert kept(model, x) == sorted([x.nbytes, ELEMENTS * 5 // 8, ELEMENTS * bits_u // 8])
    (back,) = fitact.revert(model)
    assert (back.before, back.after) == (site.after, make.__name__)
    assert type(model) is make and type(model.act) is nn.SiLU


def test_the_gradients_are_those_of_its_tables() -> None:
    model = made(Gated, torch.float64)
    fitact.convert(model, "coded", replace={nn.SiLU: own()})
    a = find(model.fitact_codes.key).a
    assert isinstance(a, CodedFactor)
    x = X.double()
    y = model(x)
    dy = torch.randn_like(y)
    of_up, of_down = torch.autograd.grad(y, [model.up.weight, model.down.weight], dy)
    with torch.no_grad():
        code = torch.bucketize(model.gate(x), torch.tensor(a.borders, dtype=torch.float64))
        f = torch.tensor(a.values, dtype=torch.float64)[code]
        torch.testing.assert_close(of_down, dy.t() @ (f * model.up(x)))
        torch.testing.assert_close(of_up, ((dy @ model.down.weight) * f).t() @ x)


def test_each_layer_may_have_its_own() -> None:
    """In two calls, of which each leaves alone what the other has done; copies and pickles do the same."""
    model = nn.Sequential(made(Gated), made(Gated), made(MLP))
    stock = gradients(model)
    for i, gate in enumerate((own(5), own(4))):
        fitact.convert(model, "coded", replace={nn.SiLU: gate}, include=f"{i}.act")
    assert [model[i].fitact_codes.names for i in (0, 1)] == [("own_gate5_16",), ("own_gate4_16",)]
    assert not equal(gradients(model), stock)
    expected = gradients(model)
    assert equal(gradients(copy.deepcopy(model)), expected)
    assert equal(gradients(pickle.loads(pickle.dumps(model))), expected)
    fitact.revert(model)
    assert equal(gradients(model), stock)


def test_others_get_what_they_would_get() -> None:
    model = nn.Sequential(made(Gated), made(lambda: Gated(nn.GELU())), made(MLP))
    done = fitact.convert(model, "coded", replace={nn.SiLU: own()})
    assert [one.after for one in done] == ["gelu_coded8", "own_gate5_16", "gelu_coded8"]
    fitact.revert(model)
    both = {nn.SiLU: own(), nn.GELU: GeluCoded8}
    done = fitact.convert(model, "coded", replace=both, exclude="1*")
    assert {one.name: one.after for one in done if one.after} == {"0": "own_gate5_16", "2.act": "gelu_coded8"}


def test_it_stays_where_it_keeps_more() -> None:
    """As other classes of one's own do: of few elements, words for whole tiles are more than the tensors."""
    model = made(Gated)
    done = fitact.convert(model, "auto", replace={nn.SiLU: own()}, example_inputs=X[:2])
    assert [one.after for one in done] == ["own_gate5_16"]
    assert (done.kept_after or 0) > (done.kept_before or 0)


class Twice(nn.Module):
    """A gate, but not of the form that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.gate, self.down = nn.SiLU(), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.gate(x)) * self.gate(x).square())
        return y


BAD: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (Gated, {"method": "fewbit"}, r'replace: gates such as OwnGate516 need method="coded", or "auto"'),
    (Gated, {"error": "exact"}, r'replace: gates such as OwnGate516 need method="coded", or "auto"'),
    (MLP, {"method": "coded"}, "whose f is SiLU, for the gate OwnGate516; found none"),
    (Twice, {"method": "coded"}, "whose f is SiLU, for the gate OwnGate516; found none"),
    (Gated, {"method": "coded", "exclude": "act"}, "found none that is to be changed"),
    (lambda: Gated(nn.GELU()), {"method": "coded", "replace": nn.GELU}, "does not compute GELU of g times u"),
    (Gated, {"method": "coded", "text": "silu(g)*tanh(u)", "bits": 4}, "does not compute SiLU of g times u"),
]


@pytest.mark.parametrize(("make", "given", "message"), BAD, ids=[message for *_, message in BAD])
def test_wrong_arguments(make: Callable[[], nn.Module], given: dict[str, Any], message: str) -> None:
    model = made(make)
    stock = gradients(model)
    rest = {key: value for key, value in given.items() if key not in ("replace", "text", "bits")}
    gate = own(given.get("bits", 5), text=given.get("text", "silu(g)*u"))
    with pytest.raises(UsageError, match=message):
        fitact.convert(model, replace={given.get("replace", nn.SiLU): gate}, example_inputs=X, **rest)
    assert equal(gradients(model), stock)


def test_a_gate_that_rebuilds() -> None:
    """Without codes, it is what `rebuild` does: exact. It has no errors to state."""
    model = made(Gated)
    stock = gradients(model)
    (site,) = fitact.convert(model, "coded", replace={nn.SiLU: SwigluRebuild})
    assert (site.after, site.reason) == ("swiglu_rebuild", "")
    assert equal(gradients(model), stock)
