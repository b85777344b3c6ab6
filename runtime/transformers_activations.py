"""Shipped activations under their names in transformers, so that a configuration can ask for one.

    from fitact.runtime.transformers_activations import register

    register()
    config = AutoConfig.for_model("bert", hidden_act="gelu_fewbit3")

A model that is loaded from such a configuration needs `register()` to be called before.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module

import fitact

from .models import imported


def register() -> tuple[str, ...]:
    """Add the shipped activations to `transformers.activations.ACT2FN`; again is harmless.

    Returns:
        Their names, as `"gelu_fewbit3"`.

    Raises:
        UsageError: transformers is not installed.

    """
    imported("transformers")
    activations = import_module("transformers.activations")
    names = fitact.shipped()
    activations.ACT2FN.update({name: partial(fitact.activation, name) for name in names})
    return names
