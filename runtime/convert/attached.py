"""Letting a model, or modules of it, run in a context of `saving`, and measuring what that saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from fitact.errors import JobError, UsageError, quote
from fitact.runtime.memory.saved import Saved, count_saved
from fitact.runtime.records import Conversion, Gradient, ModuleRecord, SiteRecord
from fitact.runtime.restore import Run, runner
from fitact.runtime.saving.context import baseline, saving
from fitact.runtime.saving.modules import Context, attach, attaching, detach
from fitact.runtime.torch_internals import is_compiled
from fitact.text import few, starred

from .arguments import Patterns, patterns
from .gradients import gradient_error
from .measure import run_trained, runs

Contexts = Mapping[str, Context]


def attached(
    model: nn.Module, error: str, include: Patterns, exclude: Patterns, example_inputs: Any, dry_run: bool
) -> Conversion:
    """Let a model run in a context of `saving`, and report what that saves; the arguments are those of `convert`."""
    contexts = _contexts(model, error, include, exclude)
    conversion = Conversion(tuple(_site(model, *both, error) for both in contexts.items()), dry_run)
    if example_inputs is not None:
        run = runner(example_inputs)
        conversion = _measured(conversion, model, run, contexts)
        if conversion.kept_before == conversion.kept_after:
            sites = [replace(site, after=None, reason="nothing is saved less") for site in conversion.sites]
            return replace(conversion, sites=tuple(sites))
        conversion = replace(conversion, gradient=_gradient(model, run, contexts, error))
    if not dry_run:
        for module in model.modules():
            detach(module)
        for path, context in contexts.items():
            attach(model.get_submodule(path), context)
    return conversion


def _contexts(model: nn.Module, error: str, include: Patterns, exclude: Patterns) -> Contexts:
    """Return the contexts of modules by path: by default one of the whole model."""
    paths = [path for path, _ in model.named_modules() if path]
    included = [""] if include is None else _outermost(_matching(paths, include, "include"))
    excluded = _outermost(_matching(paths, exclude, "exclude"))
    return dict.fromkeys(included, partial(saving, error)) | dict.fromkeys(excluded, baseline)


def _matching(paths: Sequence[str], given: Patterns, name: str) -> list[str]:
    for pattern in patterns(given):
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise UsageError(f"{name} {quote(pattern)}: no module has such a path; there are {few(paths)}")
    return [path for path in paths if any(fnmatchcase(path, pattern) for pattern in patterns(given))]


def _outermost(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]


def _site(model: nn.Module, path: str, context: Context, error: str) -> SiteRecord:
    name = type(model.get_submodule(path)).__name__
    if context is baseline:
        return SiteRecord(path, "module", name, None, "excluded")
    return SiteRecord(path, "module", name, f'saving("{error}")')


def _measured(conversion: Conversion, model: nn.Module, run: Run, contexts: Contexts) -> Conversion:
    """Return a conversion with what is saved as the model is, and in its contexts."""

    def look(model: nn.Module, run: Run, *, contexts: Contexts) -> Saved:
        detail = not any(map(is_compiled, model.modules()))
        with attaching(model, contexts), count_saved(model, detail=detail) as saved:
            run_trained(run, model)
        return saved

    (before, _), (after, _) = runs(model, run, [partial(look, contexts={}), partial(look, contexts=contexts)])
    return replace(conversion, kept_before=before.bytes, kept_after=after.bytes, modules=_modules(before, after))


def _modules(before: Saved, after: Saved) -> tuple[ModuleRecord, ...]:
    was, now = before.by_module(), after.by_module()
    counts = {
        name: len({kept.module for kept in before.kept.values() if starred(kept.module) == name}) for name in was
    }
    found = [
        ModuleRecord(name, counts.get(name, 1), was.get(name, 0), now.get(name, 0)) for name in {**was, **now}
    ]
    return tuple(sorted(found, key=lambda one: -one.before))


def _gradient(model: nn.Module, run: Run, contexts: Contexts, error: str) -> Gradient:
    """Compare the gradient with the baseline's; one that is said to be exact must be."""
    compare = partial(gradient_error, model, run, frozenset(), baseline=lambda _: attaching(model, {}))
    gradient = compare(lambda _: attaching(model, contexts))
    if error != "exact" or not gradient.error:
        return gradient
    if compare(lambda _: attaching(model, {})).error:
        return Gradient(note="two runs of the model as it is have different gradients")
    raise JobError(f"{gradient}, but must equal it with error='exact': please report this; the model is unchanged")
