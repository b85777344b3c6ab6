"""The ways to train a model that are measured: activations replaced, contexts, blocks checkpointed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from fitact.runtime.measure.saved import Saved
from fitact.runtime.saving import ERRORS, saving
from fitact.runtime.saving.modules import attaching

from .baselines import checkpointed
from .choices import Policy
from .detect import REFUSED, ActivationSite, activation_sites
from .replacement import putting


@dataclass(frozen=True)
class Candidate:
    """A way to train a model.

    Attributes:
        name: its name in the report.
        context: changes the model until the context ends, given what counts the bytes kept.
        replaced: how many activations it replaces; None if it replaces none.
        again: whether a part of the forward pass is run again.
        blocks: whether whole blocks are run again.

    """

    name: str
    context: Callable[[Saved], AbstractContextManager[Any]]
    replaced: int | None = None
    again: bool = False
    blocks: bool = False


STOCK = Candidate("stock", lambda saved: nullcontext())


def methods(model: nn.Module, bits: Sequence[int], notes: list[str]) -> Iterator[Candidate]:
    """Yield the methods that can replace at least one of a model's activations, and note the others."""
    sites = sites_of(model)
    if not sites:
        notes.append("its activations are calls of functions; only modules such as nn.GELU are replaced")
        return
    chosen = [("fewbit", k) for k in bits] + [("relumix", 2), ("inverted", None), ("exact", None)]
    useless = []
    for method, k in chosen:
        name = method if k is None else f"{method}, {k} bit{'s'[: k > 1]}"
        with replaced(model, method, k) as count:
            pass
        if count:
            yield Candidate(name, partial(replaced, model, method, k), count)
        else:
            useless.append(name)
    if useless:
        names = sorted({site.activation for site in sites if site.activation})
        notes.append(f"{'; '.join(useless)}: cannot replace {', '.join(names) or 'its activations'}")


def contexts(model: nn.Module) -> Iterator[Candidate]:
    """Yield a context of `saving` of the whole model for each error."""
    for error in ERRORS:
        yield Candidate(f"saving, {error}", partial(_in_context, model, error), again=True)


def _in_context(model: nn.Module, error: str, saved: Saved) -> AbstractContextManager[None]:
    return attaching(model, {"": partial(saving, error)})


def checkpoints(blocks: Sequence[nn.Module]) -> Iterator[Candidate]:
    """Yield both ways to checkpoint blocks."""
    for name, selective in (("checkpointing, full", False), ("checkpointing, selective", True)):
        yield Candidate(name, partial(checkpointed, blocks, selective=selective), again=True, blocks=True)


def sites_of(model: nn.Module) -> list[ActivationSite]:
    """Return where modules hold activations; calls of functions are not seen."""
    return [site for site in activation_sites(model) if site.found.before not in REFUSED]


@contextmanager
def replaced(model: nn.Module, method: str, bits: int | None, _: Saved | None = None) -> Iterator[int]:
    """Replace a model's activations by fitact's inside the context.

    Args:
        model: the model, which is changed in place and restored at the end.
        method: as in `fitact.activation`.
        bits: bits kept per element; if none ships with so many, the next fewer. None for the fewest.

    Yields:
        How many were replaced; those that do not ship stay.

    """
    sites = activation_sites(model)
    replacements = Policy(method, bits).replacements(sites)
    with putting(replacements, sites):
        yield sum(replacement.kind is not None for replacement in replacements)
