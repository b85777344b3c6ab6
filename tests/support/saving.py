"""Models as they are, and models that save less for backward: the one place that says how the second are made."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

import fitact

Inputs = Mapping[str, Any]


def converted(model: nn.Module, inputs: Inputs) -> nn.Module:
    """Return a model whose layers save less, with the baseline's gradients."""
    fitact.convert(model, error="exact", example_inputs=inputs)
    return model


def in_context(model: nn.Module, inputs: Inputs | None = None) -> nn.Module:
    """Return a model whose forward runs in the context."""
    kind: Any = type(model)

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with fitact.saving():
            return kind.forward(self, *args, **kwargs)

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model


# By name, what makes a model save less; it gets a model and the arguments that the model is called with by name.
WAYS: dict[str, Callable[[nn.Module, Inputs], nn.Module]] = {"converted": converted, "context": in_context}


def both(make: Callable[[], nn.Module], inputs: Inputs, way: str) -> tuple[nn.Module, nn.Module]:
    """Return a model as it is, and one that saves less."""
    baseline = make()
    return baseline, WAYS[way](copy.deepcopy(baseline), inputs)
