"""Replacing a model's activations by fitact's during a measurement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fitact.runtime.convert.choices import Policy, putting
from fitact.runtime.convert.detect import REFUSED, ActivationSite, activation_sites


def sites_of(model: nn.Module) -> list[ActivationSite]:
    """Return where modules hold activations; it does not see calls of functions."""
    return [site for site in activation_sites(model) if site.found.before not in REFUSED]


@contextmanager
def replaced(model: nn.Module, method: str, bits: int | None) -> Iterator[int]:
    """Replace a model's activations by fitact's inside the context.

    Args:
        model: the model, which is changed in place and restored at the end.
        method: as in `fitact.activation`.
        bits: bits kept per element, or the next fewer if none ships with so many; None for the fewest.

    Yields:
        How many were replaced; those that do not ship stay.

    """
    sites = activation_sites(model)
    replacements = Policy((method,), bits).replacements(sites)
    with putting(replacements, sites):
        yield sum(replacement.kind is not None for replacement in replacements)
