"""The catalog: every formula is PyTorch's function; warnings; shipped fits, made again, are the same bytes."""

import platform

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fitact
from fitact.base import FitWarning
from fitact.codegen.generate import render
from fitact.fitter.analysis import Activation, Gate
from fitact.fitter.catalog import CATALOG
from fitact.fitter.methods import again, fewbit, make
from fitact.fitter.records import from_json
from tests.codegen.test_standalone import SHIPPED, shipped
from tests.conftest import ROOT
from tests.support.generated import BASELINE
from tests.support.processes import python
from tests.support.refusals import refused
from tests.support.rows import full

PARAMETERS = [
    ("celu", {"alpha": 2.5}, lambda x: F.celu(x, 2.5)),
    ("elu", {"alpha": 0.3}, lambda x: F.elu(x, 0.3)),
    ("hardshrink", {"lambd": 1.25}, lambda x: F.hardshrink(x, 1.25)),
    ("hardtanh", {"min_val": -2.0, "max_val": 0.5}, lambda x: F.hardtanh(x, -2.0, 0.5)),
    ("leaky_relu", {"negative_slope": 0.2}, lambda x: F.leaky_relu(x, 0.2)),
    ("softshrink", {"lambd": 0.75}, lambda x: F.softshrink(x, 0.75)),
    ("threshold", {"threshold": 0.1, "value": 20.0}, lambda x: F.threshold(x, 0.1, 20.0)),
]
ALL = [*((name, {}, function) for name, function in BASELINE.items()), *PARAMETERS]


@pytest.mark.parametrize(("name", "parameters", "baseline"), ALL, ids=lambda p: p if isinstance(p, str) else None)
def test_equals_pytorch(name, parameters, baseline) -> None:
    """Value and derivative in float64, breakpoints and their neighbours included."""
    activation = Activation.of(name, parameters)
    corners = activation.switch_points(-20, 20)
    beside = np.concatenate([corners, np.nextafter(corners, -30), np.nextafter(corners, 30)])
    points = np.concatenate([np.linspace(-20, 20, 1001), beside])
    x = torch.from_numpy(points).requires_grad_()
    y = baseline(x)
    (dy,) = torch.autograd.grad(y.sum(), x)
    # PyTorch: softplus is the identity from 20 on, tanh-GELU cancels in its tail, hardsigmoid has 1/6 in float32
    np.testing.assert_allclose(activation.value(points), y.detach().numpy(), rtol=1e-12, atol=5e-9)
    np.testing.assert_allclose(activation.derivative(points), dy.numpy(), rtol=1e-12, atol=5e-9)
    if activation.torch is not None:
        named = eval(activation.torch, {"torch": torch, "F": F, "x": x})  # our own text
        assert torch.equal(named, y)


def test_parameters_pass_through_json_and_code() -> None:
    fit = fewbit.fit(Activation.of("hardtanh", {"min_val": -2.0, "max_val": 0.5}), 2, "a_fit")
    assert from_json(fit.to_json()) == fit
    assert fit.activation.torch in render(fit)
    assert fit.error["objective"] <= 1e-15


REFUSED = [("gelu", 1.0, "there are none"), ("elu", float("nan"), "alpha: expected a finite number")]
REFUSED += [("x*sigmoid(x)", 1.0, "an expression has no parameters")]


@pytest.mark.parametrize(("name", "alpha", "reason"), REFUSED)
def test_refused(name, alpha, reason) -> None:
    assert reason in refused(Activation.of, name, {"alpha": alpha})


WARNED = [
    ("relu6", 1, (-10.0, 10.0), "a step function with 3 levels, and --bits 1 holds 2: 2 bits are exact"),
    ("relu2", 3, (-10.0, 10.0), "beyond the domain -10 10 the derivative of relu2 leaves the step function"),
    ("gelu", 3, (0.0, 5.0), "beyond the domain 0 5 the derivative of gelu leaves the step function, by 0.6"),
    ("tanh", 2, (3.0, 9.0), "choose a wider domain"),
]


@pytest.mark.parametrize(("name", "bits", "domain", "reason"), WARNED)
def test_warns(name, bits, domain, reason) -> None:
    with pytest.warns(FitWarning) as caught:
        fewbit.fit(Activation.of(name), bits, "a_fit", domain=domain)
    (message,) = (str(each.message) for each in caught)
    assert reason in message and "\n" not in message


@pytest.mark.parametrize("gate", ["log(1 + exp(g) + exp(2*g))*u", "g*log(1 + exp(u) + exp(2*u))"])
def test_warns_of_factors(gate) -> None:
    with pytest.warns(FitWarning, match="overflows"):
        make("gate_recompute", Gate.of(gate), "a_fit")


def test_every_activation_ships() -> None:
    assert set(BASELINE) == set(CATALOG), "the tests know the whole catalog"
    # eight levels are far from the derivative of snake, a sine that never ends
    for name in set(CATALOG) - {"identity", "snake"}:
        fitact.activation(name, method="output" if name == "exp" else "fewbit")
    assert "no activation 'exp_fewbit3' is shipped" in refused(fitact.activation, "exp")
    for bits in (1, 2, 3, 4):
        acts = [type(fitact.activation(name, bits=bits)).__name__ for name in ("gelu", "silu")]
        assert acts == [f"GeluFewbit{bits}", f"SiluFewbit{bits}"]


FITS = ROOT / "generated" / "fits"
QUICK = [name for name in SHIPPED if name.endswith(("_published", "_output")) or name == "gelu_relumix2"]


@pytest.mark.parametrize("name", full(SHIPPED, QUICK))
@pytest.mark.filterwarnings("ignore:beyond the domain -10 10 the derivative of relu2:fitact.FitWarning")
def test_made_again(name: str) -> None:
    assert again(shipped(name)).to_json() == (FITS / f"{name}.json").read_text()


# NumPy, BLAS and the C library use no kernels of newer CPUs.
OLDER = {
    "NPY_DISABLE_CPU_FEATURES": " ".join(np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])),
    "OPENBLAS_CORETYPE": "Nehalem" if platform.machine() in ("x86_64", "AMD64") else "ARMV8",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX2,-AVX,-FMA,-FMA4",
}
AGAIN = """
import sys
from pathlib import Path
from fitact.fitter.methods import again
from fitact.fitter.records import read
for name in sys.argv[1:]:
    assert again(read(Path(name))).to_json() == Path(name).read_text(), name
"""
TOGETHER = ["gelu_fewbit3", "silu_fewbit4", "mish_relumix2"]
TOGETHER += [f"../../notebooks/fits/{name}" for name in ("gelu_relumix3", "silu_relumix4")]


@pytest.mark.parametrize("names", full([["silu_inverted1"], TOGETHER], lambda names: len(names) == 1))
def test_made_again_on_a_cpu_with_other_kernels(names: list[str]) -> None:
    python(AGAIN, *(FITS / f"{name}.json" for name in names), **OLDER)
