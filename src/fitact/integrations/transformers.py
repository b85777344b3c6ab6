"""Registers shipped activations with transformers, so that a configuration can name one.

    from fitact.integrations.transformers import register

    register()
    config = AutoConfig.for_model("bert", hidden_act="gelu_fewbit3")

Call `register()` before you load a model with such a configuration.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module

from fitact.fitter.expr import GATES
from fitact.runtime.measure import imported
from fitact.runtime.shipped import activation, shipped


def register() -> tuple[str, ...]:
    """Add the shipped activations to `transformers.activations.ACT2FN`; repeating this is harmless.

    Returns:
        Their names, such as `"gelu_fewbit3"`; gates, which take two inputs, are none of them.

    Raises:
        UsageError: transformers is not installed.

    """
    imported("transformers")
    activations = import_module("transformers.activations")
    names = tuple(name for name in shipped() if not name.startswith(tuple(f"{gate}_" for gate in GATES)))
    activations.ACT2FN.update({name: partial(activation, name) for name in names})
    return names
