"""Converting a model: its activations are replaced by ones that keep less, in place; and back again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from fitact.errors import UsageError, quote

from .conversion import Conversion, Site
from .convert_choices import METHODS, ORIGINAL, Choice, Replacements, Wish, best, check_bits, lasting, plan, put
from .convert_measure import Trace, runner, stock, traces
from .merge import merge_norms, unmerge_norms
from .models import few
from .sites import Slot, is_generated, recognise, slots

Patterns = str | Sequence[str] | None


def convert(
    model: nn.Module,
    method: str = "fewbit",
    bits: int | None = None,
    *,
    norms: bool = False,
    replace: Replacements | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
    dry_run: bool = False,
    example_inputs: Any = None,
) -> Conversion:
    """Replace a model's activations, in place, by ones that keep less for backward.

    Replaced are modules of PyTorch, transformers and timm, wherever a module holds them, and functions that a
    module holds, as `self.act = F.gelu`. For activations that a `forward` calls there is `converted_functions`.
    The state and its keys stay as they are; `revert` puts the originals back.

    Args:
        model: changed in place.
        method: `"fewbit"`, `"relumix"`, `"inverted"` or `"exact"`, as in `fitact.activation`; or `"auto"`, for
            each activation what keeps least, of these and of leaving it alone. It runs the model to find out, in
            the caller's autocast, so it needs `example_inputs`, and what is trained has to be settled before.
        bits: the most that are kept per element; by default 3 for Few-Bit, the least there is for the others.
        norms: whether norms are merged into the linear layers that follow them, too, as
            `fitact.runtime.merge.merge_norms` describes. It needs `example_inputs`, and changes parameters: make
            the optimizer afterwards. A dry run merges them in a copy of the model, which takes its memory once
            more.
        replace: generated classes of your own for classes of activations, as `{nn.GELU: MyGelu3}`: for each module
            of that very class, whatever its parameters are, so `include` or `exclude` others than yours.
        include: patterns (fnmatch) of the paths of activations, as `"encoder.*"`; by default all.
        exclude: patterns of those to leave alone; by default none.
        dry_run: whether to leave the model as it is and only say what would be done.
        example_inputs: what the model is run with to measure: a tensor, a tuple of positional or a mapping of
            named arguments, or a function that takes a model and runs it. It is run forward, in training mode if
            the model as a whole is in evaluation mode, and where it allows that as fake tensors, so that nothing
            is computed. Neither the model nor PyTorch's and Python's generators of random numbers are changed by
            that. Where an activation's output turns out to be overwritten, nothing is put that needs it.

    Returns:
        What was done at each activation, and, with `example_inputs`, what it kept and keeps. Its `str` is a table.

    Raises:
        UsageError: the arguments fit nothing, or the model cannot be run; it is then as it was.
        JobError: with merged norms the model did not compute what it did; it is then as it was.

    """
    model = _inner(model)
    if dry_run and norms:  # what activations gain depends on what merged norms keep
        _check(model, method, bits, norms, example_inputs is not None)
        options: dict[str, Any] = {"replace": replace, "include": include, "exclude": exclude}
        tried = convert(copy.deepcopy(model), method, bits, norms=True, example_inputs=example_inputs, **options)
        return dataclasses.replace(tried, dry_run=True)
    run = None if example_inputs is None else runner(example_inputs)
    _check(model, method, bits, norms, run is not None)
    own = _own(replace or {})
    places = _selected(model, own, include, exclude, norms)
    _check_replacements(places, replace or {})
    choices = Wish(() if method == "auto" else (method,), bits, replace or {}).choices(places)
    _check_shipped(places, choices)
    measure = None if run is None else partial(traces, model, run, own)
    stock_kept = measure([stock])[0].kept if measure and norms else None
    merged = merge_norms(model, example_inputs, include=include, exclude=exclude) if norms else []
    before: Trace | None = None
    after: Trace | None = None
    if measure and method == "auto":
        choices, before, after = best(places, bits, replace or {}, measure)
    elif measure:
        before, after = measure([stock, plan(choices)])
        chosen, choices = choices, lasting(choices, after)
        if choices != chosen:
            (after,) = measure([plan(choices)])
    if not dry_run:
        put(places, choices)
    sites = (*_sites(places, choices, before, after), *merged)
    if before is None or after is None:
        return Conversion(sites, dry_run)
    return Conversion(sites, dry_run, before.kept if stock_kept is None else stock_kept, after.kept)


def _sites(
    places: Sequence[Slot], choices: Sequence[Choice], before: Trace | None, after: Trace | None
) -> Iterator[Site]:
    """Yield the records; what a module at several places keeps is told at the first of them."""
    first: dict[Any, Slot] = {}
    for i, (slot, choice) in enumerate(zip(places, choices, strict=True)):
        site = Site(slot.path, "activation", slot.found.before, choice.label, choice.reason)
        if first.setdefault(slot.key, slot) is not slot:
            same = f"the same module as {first[slot.key].path}"
            site = dataclasses.replace(site, reason="; ".join(filter(None, (choice.reason, same))))
        elif before is not None and after is not None and after.usages[i].shared is not None:
            was, now = before.usages[i], after.usages[i]
            site = dataclasses.replace(site, kept_before=was.kept, kept_after=now.kept, shared=now.shared)
        yield site


def revert(model: nn.Module) -> Conversion:
    """Put back what `convert` replaced, in place: the activations, and the norms, if they were merged.

    Args:
        model: changed in place; one that is not converted stays as it is. An activation is put back as the module
            or function that it was; of norms `fitact.runtime.merge.unmerge_norms` says what changes.

    Returns:
        What was put back.

    Raises:
        UsageError: it is no nn.Module.

    """
    model = _inner(model)
    sites = []
    for slot in slots(model):
        original = vars(slot.held).get(ORIGINAL) if isinstance(slot.held, nn.Module) else None
        if original is None:
            continue
        if isinstance(original, nn.Module):
            original.train(slot.held.training)
        slot.put(original)
        found = recognise(original)
        after = type(original).__name__ if found is None else found.before
        sites.append(Site(slot.path, "activation", slot.found.before, after))
    merged = {name: type(module).__name__ for name, module in model.named_modules()}
    sites += [
        Site(name, "norm", merged[name], type(model.get_submodule(name)).__name__) for name in unmerge_norms(model)
    ]
    return Conversion(tuple(sites))


def _inner(model: nn.Module) -> nn.Module:
    """Return the model that `torch.compile` wrapped."""
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, nn.Module):
        raise UsageError(f"expected a model, an nn.Module, got {type(model).__name__}")
    if isinstance(inner, torch.jit.ScriptModule):
        raise UsageError("TorchScript's modules cannot be changed: convert the model that it was made from")
    return inner


# --------------------------------------------------------------------------------------------------- what is asked


def _check(model: nn.Module, method: str, bits: int | None, norms: bool, runs: bool) -> None:
    if method not in (*METHODS, "auto"):
        raise UsageError(f"no method {quote(method)}: expected {', '.join(METHODS)} or auto")
    check_bits(method, bits)
    if not runs and (method == "auto" or norms):
        what = (
            'method="auto" measures what each activation keeps'
            if method == "auto"
            else "norms=True looks at the model's graph"
        )
        raise UsageError(f"{what}: give example_inputs, what the model is called with")
    found = recognise(model)
    if found is not None:
        raise UsageError(f"the model is itself an activation, {found.before}: use fitact.activation instead")


def _own(replacements: Mapping[Any, Any]) -> frozenset[type]:
    for old, new in replacements.items():
        for kind in (old, new):
            if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
                raise UsageError(f"replace: expected classes of modules, got {quote(kind)}")
        if not is_generated(new):
            raise UsageError(f"replace: {new.__name__} is no activation that fitact codegen has generated")
    return frozenset(replacements)


def _check_replacements(places: Sequence[Slot], replacements: Replacements) -> None:
    for old in replacements:
        held = next((slot.held for slot in places if type(slot.held) is old), None)
        if held is None:
            raise UsageError(f"replace: the model holds no {old.__name__}")
        if any(True for _ in held.children()) or any(True for _ in held.parameters()):
            raise UsageError(f"replace: {old.__name__} has modules or parameters in it, so it is no activation")


def _selected(
    model: nn.Module, own: frozenset[type], include: Patterns, exclude: Patterns, norms: bool
) -> list[Slot]:
    """Return the slots; those that the patterns leave out are refused."""
    places = slots(model, own)
    if not places and not norms:
        raise UsageError(
            "no module holds an activation; for calls of functions such as F.gelu there is "
            "`with fitact.converted_functions():`"
        )
    there = [slot.path for slot in places]
    if norms:
        there += [path for path, _ in model.named_modules() if path]
    wanted = _matching(there, include, "include")
    unwanted = _matching(there, exclude, "exclude")
    return [
        _refused(slot, "not included")
        if include is not None and slot.path not in wanted
        else _refused(slot, "excluded")
        if slot.path in unwanted
        else slot
        for slot in places
    ]


def _matching(paths: Sequence[str], patterns: Patterns, name: str) -> set[str]:
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
        some = {path for path in paths if fnmatchcase(path, pattern)}
        if not some:
            raise UsageError(f"{name} {quote(pattern)}: no activation has such a path; there are {few(paths)}")
        found |= some
    return found


def _refused(slot: Slot, reason: str) -> Slot:
    if slot.found.refusal or slot.found.converted:
        return slot
    return dataclasses.replace(slot, found=dataclasses.replace(slot.found, refusal=reason))


def _check_shipped(places: Sequence[Slot], choices: Sequence[Choice]) -> None:
    """Raise if a method has nothing for any of the activations that are in the catalog."""
    wanted = [choice for slot, choice in zip(places, choices, strict=True) if slot.activation]
    if wanted and all(choice.missing for choice in wanted) and not any(choice.kind for choice in choices):
        raise UsageError(f"nothing is replaced: {wanted[0].reason}")
