"""Converting a model in place: its activations are replaced by ones that keep less, and put back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fitact.errors import UsageError
from fitact.runtime.norms.fold import merge_norms, unmerge_norms
from fitact.runtime.rebuild import sites as rebuilding
from fitact.runtime.rebuild.modules import REBUILT, put_back, reading, restore
from fitact.runtime.records import Conversion, SiteRecord
from fitact.runtime.torch_internals import is_compiled, uncompiled

from .arguments import (
    Patterns,
    check,
    check_shipped,
    check_substitutes,
    choose,
    none_held,
    nothing_to_rebuild,
    own_classes,
    patterns,
)
from .choices import (
    ERRORS,
    ORIGINAL,
    Measure,
    Policy,
    Replacement,
    Substitutes,
    as_likes,
    attempt,
    best,
    paying,
    put,
    putting,
)
from .detect import ActivationSite, activation_sites, recognise
from .gradients import gradient_error
from .measure import Plan, Trace, Usage, runner, stock, traces


def convert(
    model: nn.Module,
    method: str | None = None,
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
    """Change a model in place so that it keeps less for backward.

    This replaces activation modules of PyTorch, transformers and timm, your own modules that compute an activation
    of the catalog and nothing else, and functions that a module holds, such as `self.act = F.gelu`. For
    activations that a `forward` calls, use `converted_functions`; with `example_inputs` the report names the
    modules that compute some themselves. `"auto"` and `"rebuild"` also rebuild outputs of activations, gates and
    norms in backward (`fitact.rebuild`). The state dict stays the same; `revert` puts the originals back.

    Args:
        model: the model, which is changed in place.
        method: `"fewbit"`, `"relumix"`, `"inverted"` or `"exact"`, as in `fitact.activation`; `"rebuild"`, which
            only rebuilds outputs; or `"auto"`, which rebuilds what pays, and then chooses for each activation
            what keeps least, among leaving it alone and the methods that `error` allows. `"auto"` runs the model
            in the caller's autocast, so it needs `example_inputs`; freeze what is not trained before. In a model
            that is compiled, as a whole or in parts, it rebuilds nothing: that is the compiler's choice. The
            default is `"auto"` if `error` is given, else `"fewbit"`.
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
            all; outputs are rebuilt, and PyTorch's own piecewise linear activations, such as nn.ReLU and
            nn.Hardtanh, are replaced, whose derivative is a step function. Gradients are PyTorch's, bit for bit,
            except for the sign of zeros, where they are not finite, and in float64, where borders and levels are
            rounded to float32. Without `example_inputs`, outputs are rebuilt and nothing is replaced.
            `"rounding"`, the default: also `exact`, `inverted` and the step functions of piecewise linear
            activations, with errors as large as half precision's rounding.
            `"few-bit"`: all step functions; their errors add up over the layers of a model, so look at
            `gradients`.
        gradients: whether to measure how far the gradient of all parameters is from stock's, and to report it.
            This runs the model and its backward pass twice with `example_inputs` and real tensors, and takes the
            memory and time of a training step. If norms are merged, stock has merged norms, too.

    Returns:
        What was done at each activation, gate and norm and, with `example_inputs`, the bytes kept. Its `str` is
        a table.

    Raises:
        UsageError: the arguments do not fit the model, or the model cannot be run; it is then unchanged.
        JobError: the outputs of the model with merged norms differed; it is then unchanged.

    """
    given, model = model, _inner(model)
    method = method or ("fewbit" if error is None else "auto")
    runs = example_inputs is not None
    check(model, method, bits, norms, runs, error, gradients)
    # of a compiled model the stock one is traced, so only replacements can gain something
    compiled = given is not model or any(map(is_compiled, model.modules()))
    if dry_run and norms:  # the gain of activations depends on what merged norms keep
        model = copy.deepcopy(model)
    run = runner(example_inputs) if runs else None
    own = own_classes(replace or {})
    sites = activation_sites(model, own)
    rebuilds = method == "rebuild" or (method == "auto" and not compiled)
    if not (sites or norms or rebuilds):
        raise UsageError(none_held(model, run))
    chosen = choose(model, sites, include, exclude, norms or rebuilds)
    sites = chosen.sites(sites, rebuilds)
    check_substitutes(sites, replace or {})
    methods = () if method in ("auto", "rebuild") else (method,)
    replacements = Policy(methods, bits, replace or {}).replacements(sites)
    check_shipped(sites, replacements)
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
    found, refused = rebuilding.swaps(model, run, partial(chosen.rebuilt, own=own)) if rebuilds else ([], [])
    if not found and (method == "rebuild" or not (sites or norms)):
        raise UsageError(nothing_to_rebuild(refused, run) if method == "rebuild" else none_held(model, run))
    merged: list[SiteRecord] = []
    if norms and measure:
        spared = [] if torch.is_autocast_enabled(_device(model)) else _rebuilt_norms(found, measure)
        merged = merge_norms(model, example_inputs, include=include, exclude=[*patterns(exclude), *spared])
        (before,) = measure([stock])
        there = {id(module) for module in model.modules()}
        found = [one for one in found if id(one.module) in there]
    was = {} if before is None else {site.path: usage for site, usage in zip(sites, before.usages, strict=True)}
    if run is not None and before and found:
        with rebuilding.swapped(found), reading() as read:
            (rebuilt,) = traces(model, run, own, [stock], attempt=number, detail=True)
        found = rebuilding.paying(found, read) if rebuilt.kept < before.kept else []
        before, unseen = (rebuilt, rebuilt.unseen) if found else (before, unseen)
    with rebuilding.swapped(found):
        if found:
            sites = chosen.sites(activation_sites(model, own), rebuilds)
            replacements = Policy((), bits, replace or {}).replacements(sites)
        if measure and before and method == "auto":
            replacements, after = best(sites, bits, error or ERRORS[1], replace or {}, measure, before)
        elif measure and before and method == "rebuild":
            after = before
        elif measure and before:
            replacements, after = paying(sites, replacements, replace or {}, before, measure)
        if before:
            replacements = as_likes(sites, replacements, before)
    gradient = None
    if gradients and run is not None:
        gradient = gradient_error(model, run, own, _whole(found, sites, replacements), attempt=number)
    if not dry_run:
        rebuilding.put(found)
        put(sites, replacements)
        for site, replacement in zip(sites, replacements, strict=True):
            if replacement.kind:
                put_back(site.held)  # the original is as it was
    paths = {one.path for one in found}
    merged = [one for one in merged if one.after or one.name not in paths]  # what is rebuilt is not left alone
    records = (*_records(sites, replacements, was, after), *_rebuilt(found), *refused, *merged)
    return Conversion(records, dry_run, stock_kept, None if after is None else after.kept, unseen, gradient)


def _device(model: nn.Module) -> str:
    """Return the kind of device that a model is on."""
    return next((parameter.device.type for parameter in model.parameters()), "cpu")


def _rebuilt_norms(found: Sequence[rebuilding.Swap], measure: Measure) -> list[str]:
    """Return the norms whose outputs layers rebuild: merged, they would keep as much and round differently.

    Not under autocast, where their input is in float32 and their output, which merged norms keep, is cast to less.
    """
    with rebuilding.swapped(found), reading() as read:
        measure([stock])
    return [one.path for one in found if one.path in read and one.record and one.record.kind == "norm"]


def _whole(
    found: Sequence[rebuilding.Swap], sites: Sequence[ActivationSite], replacements: Sequence[Replacement]
) -> Plan:
    """Return all that is done to a model as a plan for a measurement."""

    @contextmanager
    def done(_: Sequence[ActivationSite]) -> Iterator[None]:
        with rebuilding.swapped(found), putting(replacements, sites):
            yield

    return done


def _rebuilt(found: Sequence[rebuilding.Swap]) -> Iterator[SiteRecord]:
    """Yield the records of gates, norms and calls; activations are among the sites."""
    for one in found:
        if one.record is not None and one.record.kind != "activation":
            yield one.record


def _records(
    sites: Sequence[ActivationSite],
    replacements: Sequence[Replacement],
    before: Mapping[str, Usage],
    after: Trace | None,
) -> Iterator[SiteRecord]:
    """Yield the records; a module at several sites has its bytes at the first of them."""
    first: dict[Any, ActivationSite] = {}
    for i, (site, replacement) in enumerate(zip(sites, replacements, strict=True)):
        label, reason = replacement.label, replacement.reason
        if label is None and site.found.rebuilt:
            label, reason = REBUILT, ""
        record = SiteRecord(site.path, "activation", site.found.before, label, reason)
        if first.setdefault(site.key, site) is not site:
            same = f"the same module as {first[site.key].path}"
            record = dataclasses.replace(record, reason="; ".join(filter(None, (reason, same))))
        elif after is not None and after.usages[i].shared is not None:
            was, now = before[site.path], after.usages[i]
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
