"""Converting a model in place: it saves less, or its activations are replaced by others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace as replaced
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from fitact.base import JobError, UsageError, flags, quote
from fitact.runtime.kernels import is_generated, registered
from fitact.runtime.measure import Patterns, Saved, count_saved, inside, matching, outermost, trials
from fitact.runtime.restore import Runner, refused, runner
from fitact.runtime.saving import Amount, Context, attach, attaching, baseline, detach, observing, saving
from fitact.runtime.torch_internals import is_compiled, storage_id

from .detect import ActivationSite, activation_sites, recognise
from .gradients import gradient_error
from .records import Conversion, Gradient, ModuleRecord, SiteRecord
from .replacement import Change, Substitutes, apply_replacements, inner, paying, replacement, with_replacements

METHODS = ("fewbit", "relumix", "inverted", "output")
WIDTHS = range(1, 5)
OLD = {"rebuild": "exact", "auto": "rounding", "coded": "rounding"}  # methods of once, and what replaces them
NOTHING = "it has nothing to save"
Storages = Mapping[str, Counter[str]]  # by module, the bytes in each storage


def convert(
    model: nn.Module,
    method: str | None = None,
    bits: int | Mapping[str, int] | None = None,
    *,
    error: str = "exact",
    recompute_attention: bool = False,
    offload: Amount = False,
    replace: Substitutes | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
    dry_run: bool = False,
    example_inputs: Any = None,
    gradients: bool | None = None,
) -> Conversion:
    """Change a model in place so that it saves less for backward.

    Without a method, the model's forward runs in a context of `fitact.saving`, and no module is replaced. With
    one, generated activations replace others: modules of PyTorch, transformers and timm, your own modules that
    compute an activation of the catalog and nothing else, and functions that a module holds, such as
    `self.act = F.gelu`. The state dict stays the same; `fitact.revert` undoes it.

    Args:
        model: the model, which is changed in place.
        method: `"fewbit"`, `"relumix"`, `"inverted"` or `"output"`, as in `fitact.activation`; None for a context.
        bits: with a method, the most bits saved per element; by default 3 for Few-Bit, and the fewest possible for
            the others. Without one, as for `fitact.saving`.
        error: how far gradients may be off, as for `fitact.saving`: by default `"exact"`, bit for bit PyTorch's.
        recompute_attention: as for `fitact.saving`: whether backward runs fused attention once more.
        offload: what goes to the host, as for `fitact.saving`; without a method.
        replace: generated classes of your own for classes of activations, such as `{nn.GELU: MyGelu3}`. They
            replace every module of exactly that class, whatever its parameters; use `include` or `exclude` to
            limit this. Without a method, no other activations are replaced.
        include: patterns (fnmatch) of paths, such as `"encoder.*"`: of the modules that run in a context, by
            default the whole model; with a method, of activations, by default all.
        exclude: patterns of paths to leave as they are; by default none.
        dry_run: whether to leave the model as it is and only report what would be done.
        example_inputs: inputs to run and measure the model with: a tensor, a tuple of positional arguments, a
            mapping of named arguments, or a function that takes the model and runs it. The model is run forward,
            in training mode if the whole model is in evaluation mode, and with fake tensors where it allows that,
            so that nothing is computed. This changes neither the model nor the random generators of PyTorch,
            Python and NumPy. Measured by these, a model with nothing to save is left as it is; so are the
            activations of all layers with which a method would let the model save more.
        gradients: whether to compare the gradient of all parameters with the baseline's. This runs the model and
            its backward pass twice with `example_inputs` and real tensors, and takes the memory and time of a
            training step. By default this is done if there are inputs and the gradient is to be exact.

    Returns:
        What was done and, with `example_inputs`, the bytes saved before and after. Its `str` is a table.

    Raises:
        UsageError: the arguments do not fit the model, or the model cannot be run; it is then unchanged.
        JobError: the gradient was compared and is off, though `error="exact"`; the model is then unchanged.

    """
    model, substitutes = inner(model), replace or {}
    flags(gradients=gradients is not None and gradients, dry_run=dry_run, recompute_attention=recompute_attention)
    if gradients and example_inputs is None:
        raise UsageError("gradients=True runs the model: pass example_inputs, the arguments of the model")
    run = None if example_inputs is None else runner(example_inputs)
    if method is None and not substitutes:
        context = saving(error, bits, recompute_attention=recompute_attention, offload=offload)
        return _attached(model, _contexts(model, context, include, exclude), run, dry_run, gradients)
    _check(model, method, bits, substitutes)
    for what, given, why in (
        (f"error {quote(error)}", error != "exact", "have their own errors"),
        ("recompute_attention", recompute_attention, "change activations alone"),
        ("offload", offload, "save nothing in a context"),
    ):
        if given:
            raise UsageError(f"{what}: expected no method and no replace, which {why}")
    own = frozenset(substitutes)
    sites = _chosen(activation_sites(model, own), include, exclude)
    _check_substitutes(sites, substitutes)
    if not sites:
        return Conversion((), dry_run, note="no module holds an activation, so that no method replaces one")
    width = None if bits is None or isinstance(bits, Mapping) else int(bits)
    choices = [replacement(site, method, width, substitutes) for site in sites]
    kinds, notes = map(list, zip(*choices, strict=True))
    conversion = Conversion((), dry_run)
    if run is not None:

        def count(changes: Sequence[Change]) -> list[Saved]:
            return [saved for saved, _ in _counted(model, run, changes)]

        reasons, before, after = paying(sites, kinds, own, count)
        kinds = [None if reason else kind for kind, reason in zip(kinds, reasons, strict=True)]
        notes = [reason or note for note, reason in zip(notes, reasons, strict=True)]
        conversion = _with_modules(conversion, before, after)
        if gradients:
            gradient = gradient_error(model, run, nullcontext, partial(with_replacements, kinds, own))
            conversion = replaced(conversion, gradient=gradient)
    if not dry_run:
        apply_replacements(sites, kinds)
    first: dict[Any, str] = {}
    records = []
    for site, kind, note in zip(sites, kinds, notes, strict=True):
        path = first.setdefault(site.key, site.path)
        same = f"the same module as {path}" if path != site.path else ""
        new = None if kind is None else registered(kind).name + ", in place" * site.in_place
        reason = "; ".join(filter(None, (note, same)))
        records.append(SiteRecord(site.path, "activation", site.before, new, reason))
    return replaced(conversion, sites=tuple(records))


def _attached(
    model: nn.Module, contexts: Mapping[str, Context], run: Runner | None, dry_run: bool, gradients: bool | None
) -> Conversion:
    """Let modules of a model run in contexts, by path, and report what that saves."""
    sites = tuple(_site(model, path, context) for path, context in contexts.items())
    conversion = Conversion(sites, dry_run)
    if run is not None:
        changes: list[Change] = [partial(attaching, contexts=some) for some in ({}, contexts)]
        (before, _), (after, storages) = _counted(model, run, changes)
        conversion = _with_modules(conversion, before, after, storages)
        exact = all(getattr(context, "exact", True) for context in contexts.values())
        if before.bytes == after.bytes:
            left = tuple(replaced(site, after=None, reason=site.reason or NOTHING) for site in sites)
            conversion, contexts = replaced(conversion, sites=left), {}
        elif exact if gradients is None else gradients:
            gradient = gradient_error(model, run, *changes)
            if gradient.error and exact:  # the first products of a GPU may differ from later ones
                gradient = gradient_error(model, run, *changes)
            if gradient.error and exact:
                if not gradient_error(model, run, changes[0], changes[0]).error:
                    promise = "but error='exact' promises the baseline's: please report it"
                    raise JobError(f"{gradient}, {promise}; the model is unchanged")
                gradient = Gradient(note="two runs of the model as it is have different gradients")
            conversion = replaced(conversion, gradient=gradient)
    if not dry_run:
        for module in model.modules():
            detach(module)
        for path, context in contexts.items():
            attach(model.get_submodule(path), context)
    return conversion


def _contexts(model: nn.Module, context: Context, include: Patterns, exclude: Patterns) -> dict[str, Context]:
    """Return the contexts of modules by path: by default one of the whole model."""
    paths = [path for path, _ in model.named_modules() if path]
    included = [""] if include is None else outermost(matching(paths, include, "include", "module"))
    excluded = outermost(matching(paths, exclude, "exclude", "module"))
    included = [path for path in included if path not in excluded and not inside(path, excluded)]
    for path in (*included, *excluded):
        if isinstance(model.get_submodule(path), torch.jit.ScriptModule):
            raise UsageError(f"{path}: a ScriptModule runs as it was compiled, and has no context of its own")
    return dict.fromkeys(included, context) | dict.fromkeys(excluded, baseline())


def _site(model: nn.Module, path: str, context: Context) -> SiteRecord:
    done = (str(context), "") if isinstance(context, saving) else (None, "excluded")
    return SiteRecord(path, "module", type(model.get_submodule(path)).__name__, *done)


def _counted(model: nn.Module, run: Runner, changes: Sequence[Change]) -> list[tuple[Saved, Storages]]:
    """Count what a model saves with each of several changes, and the storages of its modules in contexts."""

    def look(model: nn.Module, run: Runner, *, change: Change) -> tuple[Saved, Storages]:
        detail = not any(map(is_compiled, model.modules()))
        storages: dict[str, Counter[str]] = {}
        with change(model), count_saved(model, detail=detail) as saved:

            def where(tensor: Tensor) -> tuple[str, int]:
                dense = tensor.layout is torch.strided
                own = not dense or storage_id(tensor) in saved.owned or saved.place is None
                return saved.place.module[1] if saved.place else "", 0 if own else tensor.nbytes

            with observing(where) as seen, refused("the model cannot be run with example_inputs"):
                run(model)
        for (group, size), storage in seen:
            storages.setdefault(group, Counter())[storage()] += size
        return saved, storages

    return trials(model, run, [partial(look, change=change) for change in changes])


def _with_modules(
    conversion: Conversion, before: Saved, after: Saved, storages: Storages | None = None
) -> Conversion:
    """Return a conversion with what is saved, in all and by module: those that saved most first."""
    was, now = before.by_module(), after.by_module()
    records_of = (record for saved in (before, after) for record in saved.records.values() if saved.place)
    groups = {record.module: record.group for record in records_of}
    records = []
    for name, count in Counter(groups.values()).items():
        sizes = (storages or {}).get(name, Counter()).most_common()
        stored = tuple(storage for storage, size in sizes if size)
        records.append(ModuleRecord(name, count, was.get(name, 0), now.get(name, 0), stored))
    modules = tuple(sorted(records, key=lambda record: (-record.before, record.name)))
    return replaced(conversion, saved_before=before.bytes, saved_after=after.bytes, modules=modules)


def _check(model: nn.Module, method: str | None, bits: Any, substitutes: Mapping[Any, Any]) -> None:
    """Raise a UsageError if a method and replacements cannot be these, or the model has no place for them."""
    if method in OLD:
        raise UsageError(f"method {quote(method)}: it is now error={quote(OLD[method])}, without a method")
    if method is not None and method not in METHODS:
        raise UsageError(f"no method {quote(method)}: expected {', '.join(METHODS)}, or none")
    if method is not None:
        check_bits(method, bits)
    elif bits is not None:
        raise UsageError(f"bits {quote(bits)}: expected none with replace alone, whose classes have their own")
    for old, new in substitutes.items():
        for kind in (old, new):
            if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
                raise UsageError(f"replace: expected classes of modules, got {quote(kind)}")
        if not is_generated(new):
            raise UsageError(
                f"replace: {new.__name__} is not an activation of one input, without learned numbers, that fitact "
                "codegen generated"
            )
    if (site := recognise(model, frozenset(), model, "", "")) is not None:
        raise UsageError(f"the model is itself an activation, {site.before}: use fitact.activation instead")


def check_bits(method: str, bits: object) -> None:
    """Raise a UsageError if a method's fits cannot have this number of bits."""
    known = type(bits) is not bool and isinstance(bits, Integral) and bits in WIDTHS
    if bits is not None and (method == "output" or not known):
        some = f"{', '.join(map(str, WIDTHS[:-1]))} or {WIDTHS[-1]}"
        expected = "none for output, which saves no bits" if method == "output" else some
        raise UsageError(f"bits {quote(bits)}: expected {expected}")


def _check_substitutes(sites: Sequence[ActivationSite], substitutes: Substitutes) -> None:
    """Raise a UsageError if a class of the user's is not that of an activation in the model."""
    for old in substitutes:
        held = next((site.held for site in sites if type(site.held) is old), None)
        if held is None:
            raise UsageError(f"replace: the model holds no {old.__name__}")
        if any(True for _ in held.children()) or any(True for _ in held.parameters()):
            raise UsageError(f"replace: {old.__name__} holds modules or parameters, so it is not an activation")


def _chosen(sites: Sequence[ActivationSite], include: Patterns, exclude: Patterns) -> list[ActivationSite]:
    """Return all activations; those that patterns leave alone are marked as refused."""
    paths = [site.path for site in sites]
    included = paths if include is None else matching(paths, include, "include", "activation")
    excluded = matching(paths, exclude, "exclude", "activation")
    reasons = ["excluded" if path in excluded else "" if path in included else "not included" for path in paths]
    return [
        site if site.refusal or site.converted or not reason else replaced(site, refusal=reason)
        for site, reason in zip(sites, reasons, strict=True)
    ]
