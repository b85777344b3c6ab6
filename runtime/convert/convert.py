"""Converting a model in place: its activations are replaced by ones that keep less, and put back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from fitact.errors import UsageError, quote
from fitact.runtime.norms.fold import merge_norms, unmerge_norms
from fitact.runtime.ops.registry import is_generated
from fitact.runtime.rebuild.modules import restore
from fitact.runtime.records import Conversion, SiteRecord
from fitact.runtime.torch_internals import uncompiled
from fitact.text import few

from .choices import (
    ERRORS,
    METHODS,
    ORIGINAL,
    Measure,
    Policy,
    Replacement,
    Substitutes,
    as_likes,
    attempt,
    best,
    check_bits,
    paying,
    plan,
    put,
)
from .detect import ActivationSite, activation_sites, recognise
from .gradients import gradient_error
from .measure import Run, Trace, runner, stock, traces

Patterns = str | Sequence[str] | None


def convert(
    model: nn.Module,
    method: str = "fewbit",
    bits: int | None = None,
    *,
    norms: bool = False,
    replace: Substitutes | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
    dry_run: bool = False,
    example_inputs: Any = None,
    error: str | None = None,
    gradients: bool = False,
) -> Conversion:
    """Replace a model's activations, in place, by ones that keep less for backward.

    This replaces activation modules of PyTorch, transformers and timm, your own modules that compute an activation
    of the catalog and nothing else, and functions that a module holds, such as `self.act = F.gelu`. For
    activations that a `forward` calls, use `converted_functions`; with `example_inputs` the report names the
    modules that compute some themselves. The state dict stays the same; `revert` puts the originals back.

    Args:
        model: the model, which is changed in place.
        method: `"fewbit"`, `"relumix"`, `"inverted"` or `"exact"`, as in `fitact.activation`; or `"auto"`, which
            chooses for each activation what keeps least, among leaving it alone and the methods that `error`
            allows. `"auto"` runs the model in the caller's autocast, so it needs `example_inputs`; freeze what is
            not trained before.
        bits: the most bits kept per element; by default 3 for Few-Bit, and the fewest possible for the others.
        norms: whether to merge norms into the next linear layers, too, as
            `fitact.runtime.norms.fold.merge_norms` describes. This needs `example_inputs` and changes parameters:
            make the optimizer afterwards. A dry run merges norms in a copy of the model, which takes as much
            memory again.
        replace: generated classes of your own for classes of activations, such as `{nn.GELU: MyGelu3}`. They
            replace every module of exactly that class, whatever its parameters; use `include` or `exclude` to
            limit this.
        include: patterns (fnmatch) of the paths of activations, such as `"encoder.*"`; by default all.
        exclude: patterns of the paths to leave alone; by default none.
        dry_run: whether to leave the model as it is and only report what would be done.
        example_inputs: inputs to run and measure the model with: a tensor, a tuple of positional arguments, a
            mapping of named arguments, or a function that takes the model and runs it. The model is run forward,
            in training mode if the whole model is in evaluation mode, and with fake tensors where it allows that,
            so that nothing is computed. This changes neither the model nor the random generators of PyTorch,
            Python and NumPy. Where something overwrites an activation's output, no method that keeps the output
            is used; where a method would keep more than stock, the activation is left alone. Activations that the
            inputs do not reach, such as those of a layer left out by chance or of an expert without tokens, are
            treated like the same activation in other layers.
        error: how much `method="auto"` may change gradients; each value allows all before it. `"exact"`: not at
            all; gradients are PyTorch's, bit for bit, except for the sign of zeros and where they are not finite.
            This holds for PyTorch's own piecewise linear activations, such as nn.ReLU and nn.Hardtanh, whose
            derivative is a step function; in float64, borders and levels are rounded to float32. `"rounding"`, the
            default: `exact`, `inverted` and the step functions of piecewise linear activations, with errors as
            large as half precision's rounding. `"few-bit"`: all step functions; their errors add up over the
            layers of a model, so look at `gradients`.
        gradients: whether to measure how far the gradient of all parameters is from stock's, and to report it.
            This runs the model and its backward pass twice with `example_inputs` and real tensors, and takes the
            memory and time of a training step. If norms are merged, stock has merged norms, too.

    Returns:
        What was done at each activation and, with `example_inputs`, the bytes it kept and keeps. Its `str` is a
        table.

    Raises:
        UsageError: the arguments do not fit the model, or the model cannot be run; it is then unchanged.
        JobError: the outputs of the model with merged norms differed; it is then unchanged.

    """
    model = _inner(model)
    if dry_run and norms:  # the gain of activations depends on what merged norms keep
        _check(model, method, bits, norms, example_inputs is not None, error, gradients)
        options: dict[str, Any] = {"replace": replace, "include": include, "exclude": exclude}
        options |= {"error": error, "gradients": gradients}
        tried = convert(copy.deepcopy(model), method, bits, norms=True, example_inputs=example_inputs, **options)
        return dataclasses.replace(tried, dry_run=True)
    run = None if example_inputs is None else runner(example_inputs)
    _check(model, method, bits, norms, run is not None, error, gradients)
    own = _own(replace or {})
    sites = activation_sites(model, own)
    if not sites and not norms:
        raise UsageError(_none_held(model, run))
    sites = _selected(model, sites, include, exclude, norms)
    _check_substitutes(sites, replace or {})
    replacements = Policy(() if method == "auto" else (method,), bits, replace or {}).replacements(sites)
    _check_shipped(sites, replacements)
    before: Trace | None = None
    after: Trace | None = None
    measure: Measure | None = None
    number = 0
    if run is not None:
        measured = partial(traces, model, run, own)
        number, before = attempt(sites, lambda seed: measured([stock], attempt=seed, detail=True)[0])
        measure = partial(measured, attempt=number)
    stock_kept = None if before is None else before.kept
    unseen = () if before is None else before.unseen
    merged = merge_norms(model, example_inputs, include=include, exclude=exclude) if norms else []
    if measure and merged:
        (before,) = measure([stock])
    if measure and before and method == "auto":
        replacements, after = best(sites, bits, error or ERRORS[1], replace or {}, measure, before)
    elif measure and before:
        replacements, after = paying(sites, replacements, replace or {}, before, measure)
    if before:
        replacements = as_likes(sites, replacements, before)
    gradient = None
    if gradients and run is not None:
        gradient = gradient_error(model, run, own, plan(replacements), attempt=number)
    if not dry_run:
        put(sites, replacements)
    records = (*_records(sites, replacements, before, after), *merged)
    return Conversion(records, dry_run, stock_kept, None if after is None else after.kept, unseen, gradient)


def _records(
    sites: Sequence[ActivationSite], replacements: Sequence[Replacement], before: Trace | None, after: Trace | None
) -> Iterator[SiteRecord]:
    """Yield the records; a module at several sites has its bytes at the first of them."""
    first: dict[Any, ActivationSite] = {}
    for i, (site, replacement) in enumerate(zip(sites, replacements, strict=True)):
        record = SiteRecord(site.path, "activation", site.found.before, replacement.label, replacement.reason)
        if first.setdefault(site.key, site) is not site:
            same = f"the same module as {first[site.key].path}"
            record = dataclasses.replace(record, reason="; ".join(filter(None, (replacement.reason, same))))
        elif before is not None and after is not None and after.usages[i].shared is not None:
            was, now = before.usages[i], after.usages[i]
            record = dataclasses.replace(record, kept_before=was.kept, kept_after=now.kept, shared=now.shared)
        yield record


def revert(model: nn.Module) -> Conversion:
    """Put back in place what `convert` and `rebuild` changed: activations, merged norms, classes of modules.

    Args:
        model: the model, which is changed in place; a model that is not converted stays as it is. Each activation
            becomes the same module or function as before. `fitact.runtime.norms.fold.unmerge_norms` says what
            changes in norms.

    Returns:
        What was put back.

    Raises:
        UsageError: the model is not an nn.Module.

    """
    model = _inner(model)
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
    merged = {name: type(module).__name__ for name, module in model.named_modules()}
    records += [
        SiteRecord(name, "norm", merged[name], type(model.get_submodule(name)).__name__)
        for name in unmerge_norms(model)
    ]
    records += restore(model)
    return Conversion(tuple(records))


def _inner(model: nn.Module) -> nn.Module:
    """Return the model, without the wrapper of `torch.compile`."""
    inner = uncompiled(model)
    if not isinstance(inner, nn.Module):
        raise UsageError(f"expected a model, an nn.Module, got {type(model).__name__}")
    if isinstance(inner, torch.jit.ScriptModule):
        raise UsageError("TorchScript's modules cannot be changed: convert the model before scripting it")
    return inner


# ----------------------------------------------------------------------------------------------- checked arguments


def _check(
    model: nn.Module,
    method: str,
    bits: int | None,
    norms: bool,
    runs: bool,
    error: str | None,
    gradients: bool,
) -> None:
    if method not in (*METHODS, "auto"):
        raise UsageError(f"no method {quote(method)}: expected {', '.join(METHODS)} or auto")
    check_bits(method, bits)
    if error is not None and error not in ERRORS:
        raise UsageError(f"error {quote(error)}: expected {', '.join(ERRORS[:-1])} or {ERRORS[-1]}")
    if error is not None and method != "auto":
        raise UsageError(f'error {quote(error)}: expected only with method="auto", got method={quote(method)}')
    if error == "exact" and norms:
        raise UsageError('error "exact": merged norms round differently from stock: leave out norms=True')
    if gradients and not runs:
        raise UsageError("gradients=True runs the model: pass example_inputs, the arguments of the model")
    if not runs and (method == "auto" or norms):
        what = (
            'method="auto" measures what each activation keeps'
            if method == "auto"
            else "norms=True looks at the model's graph"
        )
        raise UsageError(f"{what}: pass example_inputs, the arguments of the model")
    found = recognise(model)
    if found is not None:
        raise UsageError(f"the model is itself an activation, {found.before}: use fitact.activation instead")


def _own(substitutes: Mapping[Any, Any]) -> frozenset[type]:
    for old, new in substitutes.items():
        for kind in (old, new):
            if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
                raise UsageError(f"replace: expected classes of modules, got {quote(kind)}")
        if not is_generated(new):
            raise UsageError(f"replace: {new.__name__} is not an activation that fitact codegen generated")
    return frozenset(substitutes)


def _check_substitutes(sites: Sequence[ActivationSite], substitutes: Substitutes) -> None:
    for old in substitutes:
        held = next((site.held for site in sites if type(site.held) is old), None)
        if held is None:
            raise UsageError(f"replace: the model holds no {old.__name__}")
        if any(True for _ in held.children()) or any(True for _ in held.parameters()):
            raise UsageError(f"replace: {old.__name__} holds modules or parameters, so it is not an activation")


def _none_held(model: nn.Module, run: Run | None) -> str:
    """Return the message for a model without sites."""
    seen = ""
    if run is not None:
        with suppress(UsageError):  # the model cannot be run: there is nothing to replace anyway
            (trace,) = traces(model, run, frozenset(), [stock], detail=True)
            seen = "".join(f"; {one}" for one in trace.unseen)
    calls = "for calls of functions such as F.gelu, use `with fitact.converted_functions():`"
    return f"no module holds an activation{seen}; {calls}"


def _selected(
    model: nn.Module, sites: Sequence[ActivationSite], include: Patterns, exclude: Patterns, norms: bool
) -> list[ActivationSite]:
    """Return all sites; those that the patterns leave out are marked as refused."""
    there = [site.path for site in sites]
    if norms:
        there += [path for path, _ in model.named_modules() if path]
    wanted = _matching(there, include, "include")
    unwanted = _matching(there, exclude, "exclude")
    return [
        _refused(site, "not included")
        if include is not None and site.path not in wanted
        else _refused(site, "excluded")
        if site.path in unwanted
        else site
        for site in sites
    ]


def _matching(paths: Sequence[str], patterns: Patterns, name: str) -> set[str]:
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
        some = {path for path in paths if fnmatchcase(path, pattern)}
        if not some:
            raise UsageError(f"{name} {quote(pattern)}: no activation has such a path; there are {few(paths)}")
        found |= some
    return found


def _refused(site: ActivationSite, reason: str) -> ActivationSite:
    if site.found.refusal or site.found.converted:
        return site
    return dataclasses.replace(site, found=dataclasses.replace(site.found, refusal=reason))


def _check_shipped(sites: Sequence[ActivationSite], replacements: Sequence[Replacement]) -> None:
    """Raise if nothing ships by a method for any of the model's activations in the catalog."""
    wanted = [replacement for site, replacement in zip(sites, replacements, strict=True) if site.activation]
    if (
        wanted
        and all(replacement.missing for replacement in wanted)
        and not any(replacement.kind for replacement in replacements)
    ):
        raise UsageError(f"nothing is replaced: {wanted[0].reason}")
