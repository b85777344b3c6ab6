"""What replaces an activation, also one that no example reaches; putting it in, and putting the original back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fitact.errors import UsageError
from fitact.runtime.kernels.registry import registered
from fitact.runtime.restore import check_model
from fitact.runtime.saving.modules import detach
from fitact.runtime.torch_internals import uncompiled
from fitact.runtime.wrappers import Held, InPlace
from fitact.text import starred

from .detect import ActivationSite, activation_sites, recognise
from .probe import PLAIN, argument_of, computes
from .records import Conversion, SiteRecord
from .trials import Plan, Trace

Sites = Sequence[ActivationSite]
ORIGINAL = "_fitact_original"  # the attribute of a replacement that holds the original, outside its modules


@dataclass(frozen=True)
class Replacement:
    """What replaces the activation at a site.

    Attributes:
        kind: the class of the replacement; None to leave the activation alone.
        in_place: whether it must overwrite its input.
        reason: why it is left alone, or another note.
        missing: whether it is left alone because nothing is shipped.

    """

    kind: type[nn.Module] | None = None
    in_place: bool = False
    reason: str = ""
    missing: bool = False

    @property
    def label(self) -> str | None:
        """The name of the fit, None where nothing is replaced."""
        if self.kind is None:
            return None
        return registered(self.kind).name + ", in place" * self.in_place

    def make(self, held: Any) -> nn.Module:
        """Return a replacement for a module or a function, with the numbers and texts that a module holds."""
        assert self.kind is not None
        made = InPlace(self.kind()) if self.in_place else self.kind()
        if not isinstance(held, nn.Module):
            return Held(made, held)
        forward = type(held).forward
        argument = "input" if computes(held) is None else argument_of(forward)
        module = made if argument == "input" else Held(made, partial(forward, held), argument)
        told = {name: value for name, value in vars(held).items() if type(value) in PLAIN}
        vars(module).update({name: value for name, value in told.items() if not hasattr(module, name)})
        return module


def put(sites: Sequence[ActivationSite], replacements: Sequence[Replacement]) -> None:
    """Replace what is chosen; a module at several sites gets a single replacement."""
    made: dict[Any, nn.Module] = {}
    for site, replacement in zip(sites, replacements, strict=True):
        if replacement.kind is None:
            continue
        if site.key not in made:
            made[site.key] = replacement.make(site.held)
            vars(made[site.key])[ORIGINAL] = site.held
            if isinstance(site.held, nn.Module):
                made[site.key].train(site.held.training)
        site.put(made[site.key])


@contextmanager
def putting(replacements: Sequence[Replacement], sites: Sequence[ActivationSite]) -> Iterator[None]:
    """Replace what is chosen until the context ends."""
    put(sites, replacements)
    try:
        yield
    finally:
        for site in sites:
            site.put(site.held)


def plan(replacements: Sequence[Replacement]) -> Plan:
    """Return replacements as a plan for a measurement."""
    return partial(putting, replacements)


def revert(model: nn.Module) -> Conversion:
    """Put back in place what `convert` and `Plan.apply` changed.

    Args:
        model: the model, which is changed in place; a model that is not converted stays as it is. Each activation
            becomes the same module or function as before.

    Returns:
        What was put back.

    Raises:
        UsageError: the model is not an nn.Module.

    """
    model = inner(model)
    records = []
    for site in activation_sites(model):
        original = vars(site.held).get(ORIGINAL) if isinstance(site.held, nn.Module) else None
        if original is None:
            continue
        if isinstance(original, nn.Module):
            original.train(site.held.training)
        site.put(original)
        found = recognise(original)
        after = type(original).__name__ if found is None else found.before
        records.append(SiteRecord(site.path, "activation", site.found.before, after))
    for path, module in model.named_modules():
        if detach(module):
            records.append(SiteRecord(path, "module", "saving", type(module).__name__))
    return Conversion(tuple(records))


def inner(model: nn.Module) -> nn.Module:
    """Return the model, without the wrapper of `torch.compile`."""
    inner: nn.Module = uncompiled(model)
    check_model(inner)
    if isinstance(inner, torch.jit.ScriptModule):
        raise UsageError("TorchScript's modules cannot be changed: convert the model before scripting it")
    return inner


# ----------------------------------------------------------------------------------- sites that no example reaches

ATTEMPTS = 8  # a layer that is left out half the time is run in one of them, except in 1 case of 256


def attempt(sites: Sequence[ActivationSite], measure: Callable[[int], Trace]) -> tuple[int, Trace]:
    """Find random numbers with which the model runs each activation or one like it; return them and the trace.

    Otherwise layers that a model leaves out at random would be measured as keeping nothing.

    Args:
        sites: where the activations are.
        measure: runs the stock model with the random numbers of an attempt.

    """
    likes = [_like(site) for site in sites]
    reached = dict.fromkeys(range(ATTEMPTS), 0)
    found: dict[int, Trace] = {}
    for i in reached:
        found[i] = measure(i)
        usages = found[i].usages
        reached[i] = len({like for like, usage in zip(likes, usages, strict=True) if usage.shared is not None})
        if reached[i] == len({*likes}) or not found[i].random:
            break
    most = max(found, key=reached.__getitem__)  # the first of equals
    return most, found[most]


def as_likes(
    sites: Sequence[ActivationSite], replacements: Sequence[Replacement], stock: Trace
) -> list[Replacement]:
    """Give each unreached site what most sites like it get; sites of one module get the same."""
    reached = [usage.shared is not None for usage in stock.usages]
    models: dict[Any, list[tuple[Replacement, ActivationSite]]] = {}
    for site, replacement, was in zip(sites, replacements, reached, strict=True):
        if was and not site.found.refusal and not site.found.converted:
            models.setdefault(_like(site), []).append((replacement, site))
    given: dict[Any, Replacement] = {}
    found = []
    for site, replacement, was in zip(sites, replacements, reached, strict=True):
        likes = models.get(_like(site))
        if likes and not was and not site.found.refusal and not site.found.converted:
            counts = Counter((like.kind, like.in_place) for like, _ in likes)
            (kind, in_place), _ = counts.most_common(1)[0]
            model = next(one.path for like, one in likes if (like.kind, like.in_place) == (kind, in_place))
            reason = f"example_inputs do not reach it: treated as {model}"
            replacement = given.setdefault(site.key, Replacement(kind, in_place, reason))
        found.append(replacement)
    return found


def _like(site: ActivationSite) -> tuple[str, str]:
    """Return a key that the same activation has in every layer."""
    return site.found.before, starred(site.path)
