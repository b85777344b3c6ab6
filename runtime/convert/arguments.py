"""The arguments of `convert`: checking them, and what their patterns leave."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fitact.arguments import flags
from fitact.errors import UsageError, quote
from fitact.runtime.ops import gate_ops
from fitact.runtime.ops.gate_ops import generated_gate
from fitact.runtime.ops.registry import home_of, is_generated
from fitact.runtime.rebuild.codes import OwnCodes
from fitact.runtime.rebuild.modules import Rebuilding, original_class
from fitact.runtime.rebuild.sites import Swap
from fitact.runtime.records import SiteRecord
from fitact.runtime.restore import Run
from fitact.text import few

from .choices import ERRORS, METHODS, Substitutes, check_bits
from .detect import ActivationSite, recognise
from .measure import Usage, stock, traces
from .probe import agree
from .replacement import Replacement

Patterns = str | Sequence[str] | None


def check(
    model: nn.Module,
    method: str,
    bits: int | None,
    example_inputs: Any,
    error: str | None,
    *,
    norms: bool,
    gradients: bool,
    dry_run: bool,
) -> None:
    """Raise a UsageError if the arguments of `convert` do not go together."""
    flags(norms=norms, gradients=gradients, dry_run=dry_run)
    runs = example_inputs is not None
    if method not in (*METHODS, "coded", "rebuild", "auto"):
        raise UsageError(f"no method {quote(method)}: expected {', '.join(METHODS)}, coded, rebuild or auto")
    check_bits(method, bits)
    if error is not None and error not in ERRORS:
        raise UsageError(f"error {quote(error)}: expected {', '.join(ERRORS[:-1])} or {ERRORS[-1]}")
    if error is not None and method != "auto":
        raise UsageError(f'error {quote(error)}: expected only with method="auto", got method={quote(method)}')
    if error == "exact" and norms:
        raise UsageError('error "exact": merged norms round differently from stock: leave out norms=True')
    if gradients and not runs:
        raise UsageError("gradients=True runs the model: pass example_inputs, the arguments of the model")
    if not runs and ((method == "auto" and error != "exact") or norms):
        what = (
            'method="auto" measures what each activation keeps'
            if method == "auto"
            else "norms=True looks at the model's graph"
        )
        raise UsageError(f"{what}: pass example_inputs, the arguments of the model")
    if method == "coded" and any(isinstance(one, Rebuilding) and one.fitact_exact for one in model.modules()):
        raise UsageError("layers of the model rebuild exactly what they keep: call fitact.revert first")
    found = recognise(model)
    if found is not None:
        raise UsageError(f"the model is itself an activation, {found.before}: use fitact.activation instead")


def own_classes(substitutes: Mapping[Any, Any]) -> tuple[Substitutes, Substitutes]:
    """Return the user's own activations and own gates, by the classes of activations that they are for."""
    for old, new in substitutes.items():
        for kind in (old, new):
            if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
                raise UsageError(f"replace: expected classes of modules, got {quote(kind)}")
        if not (is_generated(new) or generated_gate(new) is not None):
            raise UsageError(
                f"replace: {new.__name__} is not an activation or a gate that fitact codegen generated"
            )
    gates = {old: new for old, new in substitutes.items() if generated_gate(new) is not None}
    return {old: new for old, new in substitutes.items() if old not in gates}, gates


def with_own_gates(found: Sequence[Swap], gates: Substitutes, method: str, error: str) -> list[Swap]:
    """Let gates f(g)·u keep what the user's own generated gates keep, chosen by the class of f.

    Raises:
        UsageError: the method keeps no codes; or there is no gate of such a class, or it computes something else.

    """
    if gates and (method not in ("coded", "auto") or error == "exact"):
        names = ", ".join(one.__name__ for one in gates.values())
        raise UsageError(f'replace: gates such as {names} need method="coded", or "auto" with an error')
    given = list(found)
    for old, new in gates.items():
        gate = gate_ops.find(home_of(new)["_KEY"])
        places = [i for i, one in enumerate(found) if one.gate and original_class(one.activation) is old]
        if not places:
            raise UsageError(
                f"replace: expected a module down(f(gate(x)) · up(x)) whose f is {old.__name__}, for the gate "
                f"{new.__name__}; found none that is to be changed"
            )
        for i in places:
            if not (agree(found[i].activation, gate.a.value) and agree(nn.Identity(), gate.b.value)):
                raise UsageError(f"replace: {new.__name__} does not compute {old.__name__} of g times u")
            given[i] = dataclasses.replace(found[i], codes=OwnCodes(gate.key))
    return given


def check_substitutes(sites: Sequence[ActivationSite], substitutes: Substitutes) -> None:
    """Raise a UsageError if a class of the user's is not that of an activation in the model."""
    for old in substitutes:
        held = next((site.held for site in sites if original_class(site.held) is old), None)
        if held is None:
            raise UsageError(f"replace: the model holds no {old.__name__}")
        if any(True for _ in held.children()) or any(True for _ in held.parameters()):
            raise UsageError(f"replace: {old.__name__} holds modules or parameters, so it is not an activation")


def none_held(model: nn.Module, run: Run | None) -> str:
    """Return the message for a model without sites."""
    seen = ""
    if run is not None:
        with suppress(UsageError):  # the model cannot be run: there is nothing to replace anyway
            (trace,) = traces(model, run, frozenset(), [stock], detail=True)
            seen = "".join(f"; {one}" for one in trace.unseen)
    calls = "for calls of functions such as F.gelu, use `with fitact.converted_functions():`"
    return f"no module holds an activation{seen}; {calls}"


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What the patterns leave: paths that are included, None for all, and those that are excluded."""

    included: frozenset[str] | None
    excluded: frozenset[str]

    def refusal(self, *paths: str) -> str:
        """Return why something with these paths is left alone; `""` if it is not."""
        if self.included is not None and self.included.isdisjoint(paths):
            return "not included"
        return "" if self.excluded.isdisjoint(paths) else "excluded"

    def sites(
        self, sites: Sequence[ActivationSite], rebuilds: bool, usages: Sequence[Usage] = ()
    ) -> list[ActivationSite]:
        """Return all sites; those that are to be left alone are marked as refused.

        Args:
            sites: all of them.
            rebuilds: whether outputs may be rebuilt.
            usages: one for each site, if they were measured.

        """
        kept = "" if rebuilds else "its output is rebuilt: fitact.revert puts it back"
        foreign = [usage.foreign for usage in usages] or [None] * len(sites)
        return [
            _refused(
                site,
                self.refusal(site.path)
                or (kept if site.found.rebuilt else "")
                or (f"its output is {dtype}, which no replacement takes" if dtype else ""),
            )
            for site, dtype in zip(sites, foreign, strict=True)
        ]

    def rebuilt(self, swap: Swap, own: frozenset[type]) -> bool:
        """Whether an output is to be rebuilt; not where the user gives a replacement."""
        return not self.refusal(*swap.paths) and type(swap.activation) not in own


def nothing_to_rebuild(refused: Sequence[SiteRecord], run: Run | None) -> str:
    """Return the message for a model without outputs to rebuild."""
    hint = "" if run else "; pass example_inputs to look at what modules compute in their forward"
    hint = "".join(f"; {site.name or 'the model'}: {site.reason}" for site in refused[:1]) or hint
    return f"nothing to rebuild: there is no activation, gate or norm before a trained layer{hint}"


def choose(
    model: nn.Module, sites: Sequence[ActivationSite], include: Patterns, exclude: Patterns, others: bool
) -> Chosen:
    """Return what patterns leave of a model; one that matches nothing raises a UsageError.

    Args:
        model: the model.
        sites: its activations.
        include: patterns of what is changed.
        exclude: patterns of what is left alone.
        others: whether more than activations may be changed, so that patterns may match any module.

    """
    there = [site.path for site in sites]
    if others:
        there += [path for path, _ in model.named_modules() if path and path not in there]
    included = None if include is None else frozenset(_matching(there, include, "include"))
    return Chosen(included, frozenset(_matching(there, exclude, "exclude")))


def patterns(given: Patterns) -> Sequence[str]:
    """Return patterns as a sequence."""
    return [given] if isinstance(given, str) else given or ()


def _matching(paths: Sequence[str], given: Patterns, name: str) -> set[str]:
    found: set[str] = set()
    for pattern in patterns(given):
        some = {path for path in paths if fnmatchcase(path, pattern)}
        if not some:
            raise UsageError(f"{name} {quote(pattern)}: no activation has such a path; there are {few(paths)}")
        found |= some
    return found


def _refused(site: ActivationSite, reason: str) -> ActivationSite:
    if site.found.refusal or site.found.converted or not reason:
        return site
    return dataclasses.replace(site, found=dataclasses.replace(site.found, refusal=reason))


def check_shipped(sites: Sequence[ActivationSite], replacements: Sequence[Replacement]) -> None:
    """Raise if nothing ships by a method for any of the model's activations in the catalog."""
    wanted = [replacement for site, replacement in zip(sites, replacements, strict=True) if site.activation]
    if (
        wanted
        and all(replacement.missing for replacement in wanted)
        and not any(replacement.kind for replacement in replacements)
    ):
        raise UsageError(f"nothing is replaced: {wanted[0].reason}")
