"""Generated activations in place of a model's own: what a method has for each, those that pay, applying them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fitact.base import UsageError, one_line, starred
from fitact.runtime.kernels import registered
from fitact.runtime.measure import Saved
from fitact.runtime.restore import check_model
from fitact.runtime.torch_internals import uncompiled

from .detect import OUTPUT_SAVED, PLAIN, ActivationSite, activation_sites, argument_of, recognise, shipped_class
from .records import SiteRecord
from .wrappers import Held, InPlace

Change = Callable[[nn.Module], AbstractContextManager[Any]]  # changes a model until the context ends
Sites = Sequence[ActivationSite]
Kind = type[nn.Module] | None  # the class of what replaces an activation; None to leave it alone
Substitutes = Mapping[type[nn.Module], type[nn.Module]]
ORIGINAL = "_fitact_original"  # the attribute of a replacement that holds the original, outside its modules


def replacement(
    site: ActivationSite, method: str | None, bits: int | None, substitutes: Substitutes
) -> tuple[Kind, str]:
    """Return what replaces the activation at a site, and a note; or None to leave it alone, and why.

    `substitutes` come before the method, and without one alone; the arguments are those of `fitact.convert`.
    """
    kind, note = substitutes.get(type(site.held)), ""
    if site.converted:
        return None, f"already {site.before}"
    if site.refusal:
        return None, site.refusal
    if kind is None:
        if method is None:
            return None, ""
        kind = None if site.activation is None else shipped_class(site.activation, method, bits)
        if kind is None:
            return None, _missing(site.activation, method, bits)
        width = registered(kind).bits
        if bits is not None and 0 < width < bits:
            note = f"{width} bit{'s' if width > 1 else ''}: none of {bits} is shipped"
    if site.in_place and registered(kind).saves_output:
        return None, "in place: a method that saves the output needs another tensor for it"
    if site.in_place and site.activation in OUTPUT_SAVED:
        return None, "in place: it saves only its output, as most layers do"
    return kind, note


def _missing(activation: str | None, method: str, bits: int | None) -> str:
    """Return why nothing is shipped for an activation, and how to make it."""
    if activation is None:
        return "nothing is shipped for it: fit its formula, and pass replace={its class: yours}"
    width = f" --bits {bits}" if bits else ""
    command = f"fitact fit --fn {activation} --method {method}{width}"
    return f"{method}: nothing is shipped for {activation}; if there is a fit, {command} makes it"


def _made(site: ActivationSite, kind: type[nn.Module]) -> nn.Module:
    """Return a replacement, with the numbers and texts that a module at the site holds."""
    held = site.held
    made = InPlace(kind()) if site.in_place else kind()
    if not isinstance(held, nn.Module):
        made = Held(made, held)
    else:
        forward = type(held).forward
        argument = argument_of(forward)
        made = made if argument == "input" else Held(made, partial(forward, held), argument)
        plain = {name: value for name, value in vars(held).items() if type(value) in PLAIN}
        vars(made).update({name: value for name, value in plain.items() if not hasattr(made, name)})
        made.train(held.training)
    vars(made)[ORIGINAL] = held
    return made


def apply_replacements(sites: Sites, kinds: Sequence[Kind]) -> None:
    """Replace what is chosen; a module at several sites gets a single replacement."""
    made: dict[Any, nn.Module] = {}
    for site, kind in zip(sites, kinds, strict=True):
        if kind is not None:
            if site.key not in made:
                made[site.key] = _made(site, kind)
            site.replace(made[site.key])


@contextmanager
def with_replacements(kinds: Sequence[Kind], own: frozenset[type], model: nn.Module) -> Iterator[None]:
    """Replace what is chosen until the context ends; `own` are further classes that are activations."""
    sites = activation_sites(model, own)
    apply_replacements(sites, kinds)
    try:
        yield
    finally:
        for site in sites:
            site.replace(site.held)


def revert_replacements(model: nn.Module) -> list[SiteRecord]:
    """Revert all replacements, and return what was done."""
    records = []
    for site in activation_sites(model):
        original = vars(site.held).get(ORIGINAL) if isinstance(site.held, nn.Module) else None
        if original is None:
            continue
        if isinstance(original, nn.Module):
            original.train(site.held.training)
        site.replace(original)
        restored = recognise(original, frozenset(), site.parent, site.attribute, site.path)
        after = type(original).__name__ if restored is None else restored.before
        records.append(SiteRecord(site.path, "activation", site.before, after))
    return records


def inner(model: nn.Module) -> nn.Module:
    """Return the model, without the wrapper of `torch.compile`."""
    inner: nn.Module = uncompiled(model)
    check_model(inner)
    if isinstance(inner, torch.jit.ScriptModule):
        raise UsageError("TorchScript's modules cannot be changed: convert the model before scripting it")
    return inner


MORE = "the model would save {:,} bytes more with it than without"
OVERWRITTEN = "a later operation overwrites its output, so no method can save the output"


def paying(
    sites: Sites, kinds: Sequence[Kind], own: frozenset[type], count: Callable[[Sequence[Change]], list[Saved]]
) -> tuple[list[str], Saved, Saved]:
    """Find the replacements that cannot be used, or with which the model saves more.

    This is decided for all layers at once that differ only by numbers in their paths, so that layers that example
    inputs do not reach are treated as those that they reach. The user chose what replaces the classes in `own`:
    that stays even where it saves more. `count` counts what the model saves with each of several changes.

    It returns for each site why it must be left alone, `""` if it need not; and what the model saves as it is, and
    with the other replacements.
    """
    first: dict[Any, str] = {}
    paths = [first.setdefault(site.key, site.path) for site in sites]
    groups = [(site.before, starred(path)) for site, path in zip(sites, paths, strict=True)]
    pairs = [*zip(groups, kinds, strict=True)]
    given = {group for group, site in zip(groups, sites, strict=True) if type(site.held) in own}
    chosen = list(dict.fromkeys(group for group, kind in pairs if kind))
    reasons: dict[Any, str] = {}  # of groups that are left alone

    def counted(*choices: Sequence[Any]) -> list[Saved]:
        """Count with the replacements of some groups alone, for each of several choices of groups."""
        made = ([kind if group in some else None for group, kind in pairs] for some in choices)
        return count([partial(with_replacements, choice, own) for choice in made])

    def leave(group: Any, reason: str) -> None:
        reasons[group] = reason
        chosen.remove(group)

    (before,) = counted([])
    for group in [*chosen]:
        try:
            (alone,) = counted([group])
            if alone.overwritten > before.overwritten:
                leave(group, OVERWRITTEN)
        except UsageError as error:
            leave(group, f"its replacement cannot be run: {one_line(error.__cause__ or error)}")
    (after,) = counted(chosen)
    while optional := [group for group in chosen if group not in given]:
        counts = counted(*([other for other in chosen if other != group] for group in optional))
        least, group = min(zip(counts, optional, strict=True), key=lambda pair: pair[0].bytes)
        if least.bytes >= after.bytes:
            break
        leave(group, MORE.format(after.bytes - least.bytes))  # one at a time: without it, others may pay
        after = least
    if after.bytes > before.bytes and optional:  # what several of them save together, each alone would not
        for group in optional:
            leave(group, MORE.format(after.bytes - before.bytes))
        (after,) = counted(chosen)
    return [reasons.get(group, "") if kind else "" for group, kind in pairs], before, after
