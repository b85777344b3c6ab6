"""The arguments of `convert`: checking them, and what their patterns leave."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fitact.arguments import flags
from fitact.errors import UsageError, quote
from fitact.runtime.kernels.registry import is_generated
from fitact.text import few

from .choices import METHODS, Substitutes, check_bits
from .detect import ActivationSite, recognise
from .replacement import Replacement

Patterns = str | Sequence[str] | None
OLD = {"rebuild": "exact", "auto": "rounding", "coded": "rounding"}  # methods of once, and what replaces them


def check(
    model: nn.Module,
    method: str | None,
    bits: Any,
    error: str,
    substitutes: Mapping[Any, Any],
    example_inputs: Any,
    *,
    gradients: bool | None,
    dry_run: bool,
    recompute_attention: bool,
) -> None:
    """Raise a UsageError if the arguments of `convert` do not go together."""
    flags(gradients=gradients is not None and gradients, dry_run=dry_run, recompute_attention=recompute_attention)
    if method in OLD:
        raise UsageError(f"method {quote(method)}: it is now error={quote(OLD[method])}, without a method")
    if method is not None and method not in METHODS:
        raise UsageError(f"no method {quote(method)}: expected {', '.join(METHODS)}, or none")
    if method is not None:
        check_bits(method, bits)
    if error != "exact" and (method is not None or substitutes):
        raise UsageError(f"error {quote(error)}: expected no method and no replace, which have their own errors")
    if recompute_attention and (method is not None or substitutes):
        raise UsageError("recompute_attention: expected no method and no replace, which change activations alone")
    if gradients and example_inputs is None:
        raise UsageError("gradients=True runs the model: pass example_inputs, the arguments of the model")
    for old, new in substitutes.items():
        for kind in (old, new):
            if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
                raise UsageError(f"replace: expected classes of modules, got {quote(kind)}")
        if not is_generated(new):
            raise UsageError(f"replace: {new.__name__} is not an activation that fitact codegen generated")
    found = recognise(model)
    if found is not None and (method is not None or substitutes):
        raise UsageError(f"the model is itself an activation, {found.before}: use fitact.activation instead")


def check_substitutes(sites: Sequence[ActivationSite], substitutes: Substitutes) -> None:
    """Raise a UsageError if a class of the user's is not that of an activation in the model."""
    for old in substitutes:
        held = next((site.held for site in sites if type(site.held) is old), None)
        if held is None:
            raise UsageError(f"replace: the model holds no {old.__name__}")
        if any(True for _ in held.children()) or any(True for _ in held.parameters()):
            raise UsageError(f"replace: {old.__name__} holds modules or parameters, so it is not an activation")


def chosen(sites: Sequence[ActivationSite], include: Patterns, exclude: Patterns) -> list[ActivationSite]:
    """Return all activations; those that patterns leave alone are marked as refused."""
    paths = [site.path for site in sites]
    included = paths if include is None else matching(paths, include, "include", "activation")
    excluded = matching(paths, exclude, "exclude", "activation")
    return [
        refused(site, "excluded" if site.path in excluded else "" if site.path in included else "not included")
        for site in sites
    ]


def refused(site: ActivationSite, reason: str) -> ActivationSite:
    """Return an activation that is left alone for a reason, if there is one."""
    if site.found.refusal or site.found.converted or not reason:
        return site
    return dataclasses.replace(site, found=dataclasses.replace(site.found, refusal=reason))


def matching(paths: Collection[str], given: Patterns, name: str, what: str) -> list[str]:
    """Return the paths that patterns match, each of which must match one.

    Args:
        paths: all paths.
        given: the patterns.
        name: of the argument, for the UsageError.
        what: has these paths, likewise.

    """
    patterns = [given] if isinstance(given, str) else given or ()
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise UsageError(f"{name} {quote(pattern)}: no {what} has such a path; there are {few([*paths])}")
    return [path for path in paths if any(fnmatchcase(path, pattern) for pattern in patterns)]


def check_shipped(sites: Sequence[ActivationSite], replacements: Sequence[Replacement]) -> None:
    """Raise if nothing ships by a method for any of the model's activations in the catalog."""
    wanted = [replacement for site, replacement in zip(sites, replacements, strict=True) if site.activation]
    if (
        wanted
        and all(replacement.missing for replacement in wanted)
        and not any(replacement.kind for replacement in replacements)
    ):
        raise UsageError(f"nothing is replaced: {wanted[0].reason}")
