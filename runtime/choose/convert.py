"""Converting a model in place: it saves less, or its activations are replaced by others; and putting it back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace as replaced
from functools import partial
from typing import Any

from torch import nn

from fitact.runtime.measure.twins import Twins
from fitact.runtime.restore import runner
from fitact.runtime.saving import saving

from .arguments import Patterns, check, check_shipped, check_substitutes, chosen, refused
from .choices import Policy, Substitutes, paying
from .context import attached
from .detect import activation_sites
from .gradients import gradient_error
from .records import Conversion, SiteRecord
from .replacement import Replacement, Sites, as_likes, attempt, inner, plan, put
from .trials import Trace, stock, traces


def convert(
    model: nn.Module,
    method: str | None = None,
    bits: int | Mapping[str, int] | None = None,
    *,
    error: str = "exact",
    recompute_attention: bool = False,
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
    `self.act = F.gelu`. The state dict stays the same; `fitact.revert` puts everything back.

    Args:
        model: the model, which is changed in place.
        method: `"fewbit"`, `"relumix"`, `"inverted"` or `"exact"`, as in `fitact.activation`; None for a context.
        bits: with a method, the most bits kept per element; by default 3 for Few-Bit, and the fewest possible for
            the others. Without one, as for `fitact.saving`.
        error: how far gradients may be off, as for `fitact.saving`: by default `"exact"`, bit for bit PyTorch's.
        recompute_attention: as for `fitact.saving`: whether backward runs fused attention once more.
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
            Python and NumPy. Measured by these, a model with nothing to save is left as it is; so is an activation
            that a method would let keep more.
        gradients: whether to compare the gradient of all parameters with the baseline's. This runs the model and
            its backward pass twice with `example_inputs` and real tensors, and takes the memory and time of a
            training step. By default this is done if there are inputs and the gradient is to be exact.

    Returns:
        What was done and, with `example_inputs`, the bytes saved before and after. Its `str` is a table.

    Raises:
        UsageError: the arguments do not fit the model, or the model cannot be run; it is then unchanged.
        JobError: the gradient was compared and is off, though `error="exact"`; the model is then unchanged.

    """
    model = inner(model)
    check(
        *(model, method, bits, error, replace or {}, example_inputs),
        gradients=gradients,
        dry_run=dry_run,
        recompute_attention=recompute_attention,
    )
    if method is None and not replace:
        context, measured = (
            partial(saving, error, bits, recompute_attention=recompute_attention),
            {"example_inputs": example_inputs, "gradients": gradients},
        )
        return attached(model, context, include, exclude, dry_run=dry_run, **measured)
    sites = chosen(activation_sites(model, frozenset(replace or ())), include, exclude)
    check_substitutes(sites, replace or {})
    policy = Policy(method, bits if isinstance(bits, int) else None, replace or {})
    if not sites:
        return Conversion((), dry_run, note="no module holds an activation, so that no method replaces one")
    return _replaced(model, sites, policy, example_inputs, dry_run=dry_run, gradients=bool(gradients))


def _replaced(
    model: nn.Module, sites: Sites, policy: Policy, example_inputs: Any, *, dry_run: bool, gradients: bool
) -> Conversion:
    """Replace activations by a policy."""
    replacements = policy.replacements(sites)
    check_shipped(sites, replacements)
    own = frozenset(policy.substitutes)
    before = after = gradient = None
    if example_inputs is not None:
        run = runner(example_inputs)
        measured = partial(traces, model, run, own, twins=Twins())
        seed, before = attempt(sites, lambda seed: measured([stock], detail=True, attempt=seed)[0])
        foreign = [usage.foreign for usage in before.usages]
        sites = [
            refused(site, f"its output is {dtype}, which no replacement takes" if dtype else "")
            for site, dtype in zip(sites, foreign, strict=True)
        ]
        replacements, after = paying(
            sites, policy.replacements(sites), policy.substitutes, before, partial(measured, attempt=seed)
        )
        replacements = as_likes(sites, replacements, before)
        if gradients:
            gradient = gradient_error(model, run, own, plan(replacements), attempt=seed)
    if not dry_run:
        put(sites, replacements)
    return Conversion(
        tuple(_records(sites, replacements, before, after)),
        dry_run,
        None if before is None else before.kept,
        None if after is None else after.kept,
        () if before is None else before.unseen,
        gradient,
    )


def _records(
    sites: Sites, replacements: Sequence[Replacement], before: Trace | None, after: Trace | None
) -> Iterator[SiteRecord]:
    """Yield the records; a module at several sites has its bytes at the first of them."""
    first: dict[Any, str] = {}
    for i, (site, replacement) in enumerate(zip(sites, replacements, strict=True)):
        record = SiteRecord(site.path, "activation", site.found.before, replacement.label, replacement.reason)
        path = first.setdefault(site.key, site.path)
        if path != site.path:
            reasons = (record.reason, f"the same module as {path}")
            record = replaced(record, reason="; ".join(filter(None, reasons)))
        elif before is not None and after is not None and after.usages[i].shared is not None:
            now = after.usages[i]
            record = replaced(record, saved_before=before.usages[i].kept, saved_after=now.kept, shared=now.shared)
        yield record
