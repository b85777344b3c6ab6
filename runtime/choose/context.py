"""Letting a model, or modules of it, run in a context of `saving`, and measuring what that saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from fitact.errors import JobError
from fitact.runtime.measure.saved import Saved, count_saved
from fitact.runtime.restore import Run, runner
from fitact.runtime.saving.context import baseline, saving
from fitact.runtime.saving.modules import Context, attach, attaching, detach
from fitact.runtime.torch_internals import is_compiled
from fitact.text import starred

from .arguments import Patterns, matching
from .gradients import gradient_error
from .records import Conversion, Gradient, ModuleRecord, SiteRecord
from .trials import run_trained, runs

Contexts = Mapping[str, Context]
Saving = Callable[[], saving]
NOTHING = "it has nothing to save"


def attached(
    model: nn.Module,
    context: Saving,
    include: Patterns,
    exclude: Patterns,
    *,
    dry_run: bool,
    example_inputs: Any,
    gradients: bool | None,
) -> Conversion:
    """Let a model run in a context, and report what that saves; other arguments are those of `convert`."""
    contexts = _contexts(model, context, include, exclude)
    conversion = Conversion(tuple(_site(model, *both) for both in contexts.items()), dry_run)
    if example_inputs is not None:
        run = runner(example_inputs)
        conversion = _measured(conversion, model, run, contexts)
        if conversion.saved_before == conversion.saved_after:
            sites = [replace(site, after=None, reason=site.reason or NOTHING) for site in conversion.sites]
            conversion, contexts = replace(conversion, sites=tuple(sites)), {}
        elif context().exact if gradients is None else gradients:
            conversion = replace(conversion, gradient=_gradient(model, run, contexts, exact=context().exact))
    if not dry_run:
        for module in model.modules():
            detach(module)
        for path, one in contexts.items():
            attach(model.get_submodule(path), one)
    return conversion


def _contexts(model: nn.Module, context: Context, include: Patterns, exclude: Patterns) -> Contexts:
    """Return the contexts of modules by path: by default one of the whole model."""
    paths = [path for path, _ in model.named_modules() if path]
    included = [""] if include is None else _outermost(matching(paths, include, "include", "module"))
    excluded = _outermost(matching(paths, exclude, "exclude", "module"))
    included = [path for path in included if path not in excluded and not _inside(path, excluded)]
    return dict.fromkeys(included, context) | dict.fromkeys(excluded, baseline)


def _inside(path: str, others: Sequence[str]) -> bool:
    return any(path.startswith(f"{other}.") for other in others)


def _outermost(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not _inside(path, paths)]


def _site(model: nn.Module, path: str, context: Context) -> SiteRecord:
    name = type(model.get_submodule(path)).__name__
    if context is baseline:
        return SiteRecord(path, "module", name, None, "excluded")
    return SiteRecord(path, "module", name, str(context()))


def _measured(conversion: Conversion, model: nn.Module, run: Run, contexts: Contexts) -> Conversion:
    """Return a conversion with what is saved as the model is, and in its contexts."""

    def look(model: nn.Module, run: Run, *, contexts: Contexts) -> Saved:
        detail = not any(map(is_compiled, model.modules()))
        with attaching(model, contexts), count_saved(model, detail=detail) as saved:
            run_trained(run, model)
        return saved

    (before, _), (after, _) = runs(model, run, [partial(look, contexts={}), partial(look, contexts=contexts)])
    return replace(conversion, saved_before=before.bytes, saved_after=after.bytes, modules=_modules(before, after))


def _modules(before: Saved, after: Saved) -> tuple[ModuleRecord, ...]:
    """Return what modules save, those that saved most first; the numbers of layers are stars."""
    was, now = before.by_module(), after.by_module()
    paths = {kept.module for saved in (before, after) for kept in saved.kept.values()}
    counts = Counter(map(starred, paths))
    records = [ModuleRecord(name, count, was.get(name, 0), now.get(name, 0)) for name, count in counts.items()]
    return tuple(sorted(records, key=lambda one: (-one.before, one.name)))


def _gradient(model: nn.Module, run: Run, contexts: Contexts, *, exact: bool) -> Gradient:
    """Compare the gradient with the baseline's; one that is said to be exact must equal it."""
    compare = partial(gradient_error, model, run, frozenset(), baseline=lambda _: attaching(model, {}))
    gradient = compare(lambda _: attaching(model, contexts))
    if not gradient.error or not exact:
        return gradient
    if compare(lambda _: attaching(model, {})).error:
        return Gradient(note="two runs of the model as it is have different gradients")
    raise JobError(
        f"{gradient}, but error='exact' promises the baseline's: please report it; the model is unchanged"
    )
