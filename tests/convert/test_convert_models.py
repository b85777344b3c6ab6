"""Converting real models, small and with random weights: values, training, and bytes in every setting."""

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fitact
from fitact.integrations.transformers import register
from fitact.runtime.measure import imported
from tests.support.models import MODELS, QUICK, TIMM_CONV, batch_of, logits, made, model_of
from tests.support.rows import full
from tests.support.saving import cast, saved_bytes_of

CLASSES = {"GELUActivation", "NewGELUActivation", "SiLUActivation", "GELU"}


@pytest.mark.parametrize("method", ["fewbit", "inverted"])
@pytest.mark.parametrize("name", full(MODELS, QUICK))
def test_every_activation_is_replaced_or_refused(name: str, method: str) -> None:
    model, inputs = model_of(name).eval(), batch_of(name)
    logits_of = torch.no_grad()(partial(logits, model, inputs))
    baseline, state = logits_of(), model.state_dict()
    count = sum(type(module).__name__ in CLASSES for module in model.modules())
    conversion = fitact.convert(model, method)
    assert all(site.after or site.reason for site in conversion)
    actual = [site for site in conversion.replaced if site.before in CLASSES]
    assert len(actual) == count >= 2 * (name != TIMM_CONV) and all(f"_{method}" in site.after for site in actual)
    converted, trained = logits_of(), logits(model, inputs)
    if name in ("gpt2", TIMM_CONV):  # theirs are made of several operations
        torch.testing.assert_close(converted, baseline, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(converted, baseline)
    assert trained.requires_grad
    torch.testing.assert_close(trained.detach(), converted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert not {type(module).__name__ for module in model.modules()} & CLASSES
    fitact.revert(model)
    assert torch.equal(logits_of(), baseline)


@pytest.mark.parametrize("name", full(("gpt2", "llama", TIMM_CONV), ("gpt2", "llama")))
def test_gradients(name: str) -> None:
    """They are off by little more than was measured; Few-Bit's most where batches are normed."""
    few = 0.8 if name == TIMM_CONV else 0.2
    for given, most in ({"error": "rounding"}, 0.005), ({"error": "coarse"}, 0.06), ({"method": "fewbit"}, few):
        report = fitact.convert(model_of(name), **given, example_inputs=batch_of(name), gradients=True)
        assert 0 < report.gradient.error < most


def frozen(name: str) -> nn.Module:
    """Freeze the second half of the parameters, whose layers then save no input, but for the last."""
    model = model_of(name)
    parameters = list(model.parameters())
    for parameter in parameters[len(parameters) // 2 : -2]:
        parameter.requires_grad_(False)
    return model


# the last has parameters in its activations, xIELU
SHARED = ("phi3", "opt", "mixtral", "qwen3_moe", "apertus")  # which save anyway what lies at some activations
SETTINGS = {"everything": model_of, "lora": lambda name: made(f"{name} lora"), "frozen": frozen}
WAYS: list[dict[str, Any]] = [
    *({"method": method} for method in ("fewbit", "inverted", "output")),
    *({"error": error} for error in ("exact", "rounding", "coarse")),
]


# Each model in one setting, and each setting of several models.
ROWS = zip((*MODELS, *SHARED), itertools.cycle(itertools.product(("float32", "autocast"), SETTINGS)))


@pytest.mark.parametrize(
    ("name", "setting", "precision"),
    full(((name, *reversed(how)) for name, how in ROWS), lambda row: row[0] in ("bert", "llama", "apertus")),
)
def test_reports_say_what_is_saved(name: str, setting: str, precision: str) -> None:
    """That is at most what the baseline saves, and for errors that may be larger, less."""
    dtype = torch.bfloat16 if precision == "autocast" else None
    inputs = batch_of(name, size=8)
    base = SETTINGS[setting](name)
    with cast(dtype):
        counts = [saved_bytes_of(base, lambda: base(**inputs))]
        for given in WAYS:
            model = copy.deepcopy(base)
            conversion = fitact.convert(model, **given, example_inputs=inputs)
            counts.append(saved_bytes_of(model, lambda model=model: model(**inputs)))
            assert (conversion.saved_before, conversion.saved_after) == (counts[0], counts[-1])
            assert counts[-1] <= counts[0]
    assert counts[0] > counts[-3] > counts[-2] > counts[-1]


def test_activations_of_a_models_own() -> None:
    """BLOOM has its GELU as a class of its own, gpt-oss computes its gates where its experts are."""
    inputs = batch_of("llama", size=8)
    model = model_of("bloom").eval()
    baseline = logits(model, inputs)
    conversion = fitact.convert(model, "inverted", example_inputs=inputs)
    assert [(site.before, site.after) for site in conversion] == [("BloomGelu", "gelu_tanh_inverted1")] * 2
    torch.testing.assert_close(logits(model, inputs), baseline, rtol=1e-5, atol=1e-5)
    assert conversion.saved_after < 0.9 * conversion.saved_before
    assert not fitact.convert(model_of("gpt_oss"), "fewbit", example_inputs=inputs).sites


def test_names_in_transformers() -> None:
    transformers = imported("transformers")
    known = {*transformers.activations.ACT2FN}
    try:
        names = register()
        shipped = [name for name in fitact.shipped() if not name.startswith(("swiglu_", "geglu_"))]
        assert register() == names == (*shipped,) and known.isdisjoint(names)
        for name in ("gelu_fewbit3", "silu_inverted1", "softplus_output", "gelu_regelu2_published"):
            assert type(transformers.activations.ACT2FN[name]).__module__ == f"fitact.generated.{name}"
    finally:
        for name in {*transformers.activations.ACT2FN} - known:
            del transformers.activations.ACT2FN[name]
