"""Putting fitact's activations in the place of a model's own, for as long as a measurement lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .convert_choices import Wish, putting
from .sites import REFUSED, Slot, slots


def sites_of(model: nn.Module) -> list[Slot]:
    """Return where modules hold activations; calls of functions are not seen."""
    return [slot for slot in slots(model) if slot.found.before not in REFUSED]


@contextmanager
def replaced(model: nn.Module, method: str, bits: int | None) -> Iterator[int]:
    """Replace a model's activations by fitact's inside the context.

    Args:
        model: changed in place, and back at the end.
        method: as in `fitact.activation`.
        bits: kept per element; where none of so many is shipped, the most below that. None for the least.

    Yields:
        How many were replaced: what is not shipped stays.

    """
    places = slots(model)
    choices = Wish((method,), bits).choices(places)
    with putting(choices, places):
        yield sum(choice.kind is not None for choice in choices)
