"""Invalid numbers: every public function refuses them in one line, before it does anything."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import nn

import fitact
from fitact.fitter.analysis import Activation
from fitact.fitter.methods import fewbit, inverted, relumix
from fitact.runtime.choose import measure
from fitact.runtime.measure import Training, hugging_face, timm_model
from fitact.runtime.measure.reference import gelu_mlp
from tests.support.refusals import refused

NO_BITS = (3.0, True, False, "3", [3], (3,), math.nan, np.float64(3), np.True_, 0.5, -1)
NO_BUDGETS = (math.nan, math.inf, -0.5, 1.5, True, "1", None)
NO_IMAGES = (0, -1, 1.5, 2.0, True, "2", math.nan, math.inf, [2])
NO_SIZES = (*NO_IMAGES, None)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU())


GELU = Activation.of("gelu")
CALLS: dict[str, tuple[Callable[[Any], object], tuple[object, ...]]] = {
    "fewbit.fit(bits)": (lambda bits: fewbit.fit(GELU, bits, "a"), (*NO_BITS, 1.0, None)),
    "relumix.fit(bits)": (lambda bits: relumix.fit(GELU, bits, "a"), (*NO_BITS, 1.0, None)),
    "inverted.fit(bits)": (lambda bits: inverted.fit(GELU, "a", bits), (*NO_BITS, 1.0)),
    "activation(bits)": (lambda bits: fitact.activation("gelu", bits=bits), NO_BITS),
    "convert(bits)": (lambda bits: fitact.convert(model(), "fewbit", bits=bits), NO_BITS),
    "measure(bits)": (lambda bits: measure(gelu_mlp, bits=(bits,)), (*NO_BITS, 0, 5, None)),
    "measure(all bits)": (lambda bits: measure(gelu_mlp, bits=bits), (3, "3", None)),
    "measure(batch)": (lambda batch: measure(gelu_mlp, batch=batch), NO_SIZES),
    "measure(seq)": (lambda seq: measure(gelu_mlp, seq=seq), NO_SIZES),
    "measure(budgets)": (lambda budget: measure(gelu_mlp, budgets=(budget,)), NO_BUDGETS),
    "measure(all budgets)": (lambda budgets: measure(gelu_mlp, budgets=budgets), (0.5, "1", None)),
    "Training(rank)": (lambda rank: Training(rank=rank), NO_SIZES),
    "hugging_face(image)": (lambda image: hugging_face("vit", image=image), NO_IMAGES),
    "timm_model(image)": (lambda image: timm_model("resnet18", image=image), NO_IMAGES),
}
CASES = [(name, value) for name, (_, values) in CALLS.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES, ids=[f"{name} {value!r}" for name, value in CASES])
def test_refused(name: str, value: object) -> None:
    refused(CALLS[name][0], value)


@pytest.mark.parametrize("bits", [3, np.int64(3), np.uint8(3)])
def test_integers_of_any_type(bits: Any) -> None:
    name = type(fitact.activation("gelu", bits=3)).__name__
    assert type(fitact.activation("gelu", bits=bits)).__name__ == name
    converted = model()
    fitact.convert(converted, "fewbit", bits=bits)
    assert type(converted[1]).__name__ == name
