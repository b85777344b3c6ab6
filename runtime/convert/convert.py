"""Converting a model in place: its activations are replaced by others that keep less, and put back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from fitact.errors import UsageError
from fitact.runtime.autocast import active_autocast
from fitact.runtime.models.twins import Twins
from fitact.runtime.norms.fold import merge_norms
from fitact.runtime.rebuild import sites as rebuilding
from fitact.runtime.rebuild.modules import put_back, reading, standing
from fitact.runtime.records import Conversion, Gradient, SiteRecord, Unseen
from fitact.runtime.restore import runner
from fitact.runtime.torch_internals import is_compiled

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
    with_own_gates,
)
from .attached import attached
from .choices import ERRORS, Coding, Policy, Substitutes, best, check_coded, codings, least, paying
from .detect import ActivationSite, activation_sites
from .gradients import gradient_error, too_far
from .measure import Plan, Trace, Usage, stock, traces
from .replacement import Replacement, as_likes, attempt, groups_of, inner, plan, put, putting


def convert(
    model: nn.Module,
    method: str | None = None,
    bits: int | None = None,
    *,
    bits_u: int | None = None,
    bits_norms: int | None = None,
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
    modules that compute some themselves. `"auto"`, `"rebuild"` and `"coded"` also rebuild outputs of
    activations, gates and norms in backward (`fitact.rebuild`). The state dict stays the same; `revert` puts the
    originals back.

    Args:
        model: the model, which is changed in place.
        method: `"fewbit"`, `"relumix"`, `"inverted"` or `"exact"`, as in `fitact.activation`; `"rebuild"`, which
            only rebuilds outputs; `"coded"`, which rebuilds those of activations and gates from codes instead: an
            activation keeps a code of its input, by which its derivative is looked up, and the next trained
            layer looks up its own input by the same code, in place of keeping it. A gate f(g)·u keeps a code of g,
            and u. Everything else is rebuilt exactly. Revert layers that `rebuild` has changed first.
            Or `"auto"`, which rebuilds what pays, and then chooses what keeps least for each activation, among
            leaving it alone and the methods that `error` allows. `"auto"` runs the model in the caller's autocast,
            so it needs `example_inputs`; freeze what is not trained first. In a model that is compiled, as a whole
            or in parts, it rebuilds nothing: that is the compiler's choice. The default is `"auto"` if `error` is
            given, else `"fewbit"`.
        bits: the most bits kept per element; by default 3 for Few-Bit, 8 for codes, with `error="few-bit"` 6 too,
            and the fewest possible for the others.
        bits_u: bits of a code of the factor u of gates, 3 to 8; by default u is kept as it is, but coded in 8 bits
            with `error="few-bit"`.
        bits_norms: bits of a code of a norm's normalised rows, 3 to 8, which give its gradients and the input of
            the next layers; by default its input is kept, but with `error="few-bit"` codes of 8 bits.
        norms: whether to merge norms into the next linear layers, too, as
            `fitact.runtime.norms.fold.merge_norms` describes. This needs `example_inputs` and changes parameters:
            make the optimizer afterwards. A dry run merges norms in a copy of the model, which takes as much
            memory again.
        replace: generated classes of your own for classes of activations, such as `{nn.GELU: MyGelu3}`. They
            replace every module of exactly that class, whatever its parameters; use `include` or `exclude` to
            limit this. A generated gate, such as `{nn.SiLU: MySwiglu8}`, is for gated MLPs whose f has the class:
            these keep what your gate keeps, with `"coded"`, or `"auto"` with an error other than `"exact"`.
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
            activations, with errors as large as half precision's rounding, and codes of 8 bits. By these, outputs
            are off by 0.7 % and derivatives by 0.4 % (root mean square, normal inputs), where bfloat16's rounding
            is off by 0.17 % and at most by 0.39 %. Only gradients are off; outputs of the model are as without
            codes. `"few-bit"`: all step functions, and codes of fewer bits; their errors add up over the layers of
            a model, so look at `gradients`. Unless `error` is `"exact"`, layers also use the codes of coded
            activations that are in the model already.
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
    given, model = model, inner(model)
    if method is None and error in (None, "exact"):
        return attached(model, "exact", include, exclude, example_inputs, dry_run)
    method = method or "auto"
    check(model, method, bits, example_inputs, error, norms=norms, gradients=gradients, dry_run=dry_run)
    for name, width in (("bits_u", bits_u), ("bits_norms", bits_norms)):
        check_coded(method, error, name, width)
    # of a compiled model the stock one is traced, so only replacements can gain something
    compiled = given is not model or any(map(is_compiled, model.modules()))
    if dry_run and norms:  # the gain of activations depends on what merged norms keep
        model = copy.deepcopy(model)
    job = _Job(model, method, bits, replace or {}, error or ERRORS[1], example_inputs)
    rebuilds = method in ("coded", "rebuild") or (method == "auto" and not compiled)
    job.codings = codings(method, job.error, bits, bits_u, bits_norms) if rebuilds else []
    job.choose(include, exclude, norms=norms, rebuilds=rebuilds)
    job.measure_stock()
    refused = job.find_rebuilt(norms=norms)
    merged = job.merge_norms(include, exclude) if norms else []
    job.keep_rebuilt_that_pay()
    with rebuilding.swapped(job.rebuilt):
        job.find_replacements()
    job.find_codes()
    gradient = job.gradient_error() if gradients else None
    if not dry_run:
        job.put()
    told = {*(one.path for one in job.rebuilt), *(one.path for one in job.sites)}
    left = [one for one in (*refused, *merged) if one.after or one.name not in told]  # one record a module
    records = (*_records(job), *rebuilding.records(job.rebuilt), *left)
    after = job.after.kept if job.after else None
    return Conversion(records, dry_run, job.stock_kept, after, job.unseen, gradient)


State = tuple[tuple[Replacement, ...], tuple[rebuilding.Swap, ...]]  # what is done to a model


class _Job:
    """A conversion under way.

    Attributes:
        model: the model.
        method, bits, replace, error: what was asked for, as in `convert`; `replace` without gates.
        gates: the gates of `replace`.
        own: classes of activations that the user replaces.
        run: runs the model; None without example inputs, and then nothing is measured.
        rebuilds: whether outputs may be rebuilt.
        chosen: what patterns leave of the model.
        sites, replacements: activations, and what each gets.
        rebuilt, codings: the outputs that are rebuilt; the codes that may be kept.
        attempt, twins: chooses the random numbers of a run; makes the copies of the model that are run.
        before: what the model keeps before activations are replaced, but with merged norms and rebuilt outputs.
        stock_kept: the bytes that the model kept at first.
        was: what each activation kept, by path, before outputs were rebuilt.
        unseen: activations that modules compute themselves.
        after: what the converted model keeps.

    """

    def __init__(
        self,
        model: nn.Module,
        method: str,
        bits: int | None,
        replace: Substitutes,
        error: str,
        example_inputs: Any,
    ) -> None:
        self.model, self.method, self.bits, self.error = model, method, bits, error
        self.replace, self.gates = own_classes(replace)
        self.example_inputs = example_inputs
        self.run = None if example_inputs is None else runner(example_inputs)
        self.own = frozenset(self.replace)
        self.rebuilt: list[rebuilding.Swap] = []
        self.codings: list[Coding] = []
        self.attempt, self.twins = 0, Twins()
        self.before: Trace | None = None
        self.stock_kept: int | None = None
        self.was: dict[str, Usage] = {}
        self.unseen: tuple[Unseen, ...] = ()
        self.after: Trace | None = None

    def choose(self, include: Patterns, exclude: Patterns, *, norms: bool, rebuilds: bool) -> None:
        """Find the activations, and what replaces each if nothing is measured; refuse what cannot be done."""
        self.rebuilds = rebuilds
        sites = activation_sites(self.model, self.own)
        if not (sites or norms or rebuilds):
            raise UsageError(none_held(self.model, self.run))
        self.chosen = choose(self.model, sites, include, exclude, norms or rebuilds)
        self._choose_at(sites)
        check_substitutes(self.sites, self.replace)
        check_shipped(self.sites, self.replacements)

    def _choose_at(self, sites: Sequence[ActivationSite]) -> None:
        """Choose what replaces the activations at these sites, where this is not decided by what is kept."""
        self.sites = self.chosen.sites(sites, self.rebuilds, () if self.before is None else self.before.usages)
        methods = () if self.method in ("auto", "rebuild") else (self.method,)
        self.replacements = Policy(methods, self.bits, self.replace).replacements(self.sites)

    def measure(self, plans: Sequence[Plan], *, detail: bool = False) -> list[Trace]:
        """Run the model as plans have it."""
        assert self.run is not None
        return traces(self.model, self.run, self.own, plans, attempt=self.attempt, detail=detail, twins=self.twins)

    def measure_stock(self) -> None:
        """Measure the model as it is."""
        if self.run is None:
            return
        measured = partial(traces, self.model, self.run, self.own, [stock], detail=True, twins=self.twins)
        self.attempt, self.before = attempt(self.sites, lambda seed: measured(attempt=seed)[0])
        self.stock_kept, self.unseen = self.before.kept, self.before.unseen

    def find_rebuilt(self, *, norms: bool) -> list[SiteRecord]:
        """Find the outputs that can be rebuilt; return the records of those that cannot."""
        refused: list[SiteRecord] = []
        if self.rebuilds:
            allowed = partial(self.chosen.rebuilt, own=self.own)
            self.rebuilt, refused = rebuilding.swaps(self.model, self.run, allowed)
            exact = not (self.codings or self.gates)
            self.rebuilt = [dataclasses.replace(one, exact=exact) for one in self.rebuilt]
        self.rebuilt = with_own_gates(self.rebuilt, self.gates, self.method, self.error)
        if not self.rebuilt and self.method == "rebuild":
            raise UsageError(nothing_to_rebuild(refused, self.run))
        if not (self.rebuilt or self.sites or norms):
            raise UsageError(none_held(self.model, self.run))
        return refused

    def merge_norms(self, include: Patterns, exclude: Patterns) -> list[SiteRecord]:
        """Merge norms except those whose outputs are rebuilt; return their records."""
        device = next((parameter.device.type for parameter in self.model.parameters()), "cpu")
        coded = any(coding.bits_norms is not None for coding in self.codings)
        spared = self._rebuilt_norms() if coded or not active_autocast(device) else []
        left = [*patterns(exclude), *spared]
        merged = merge_norms(self.model, self.example_inputs, include=include, exclude=left)
        (self.before,) = self.measure([stock])
        there = {id(module) for module in self.model.modules()}
        self.rebuilt = [one for one in self.rebuilt if id(one.module) in there]
        return merged

    def _rebuilt_norms(self) -> list[str]:
        """Return the norms whose outputs layers rebuild: merged, they would keep as much and round differently.

        Not so under autocast, where merged norms keep less; but codes take less still.
        """
        with rebuilding.swapped(self.rebuilt), reading() as read:
            self.measure([stock])
        return [one.path for one in self.rebuilt if one.path in read and one.record and one.record.kind == "norm"]

    def keep_rebuilt_that_pay(self) -> None:
        """Drop the outputs whose rebuilding gains nothing; then look at the activations again."""
        if self.before is not None:
            self.was = {site.path: usage for site, usage in zip(self.sites, self.before.usages, strict=True)}
        if self.before is not None and self.rebuilt:
            with rebuilding.swapped(self.rebuilt), reading() as read:
                (rebuilt,) = self.measure([stock], detail=True)
            pays = rebuilt.kept < self.before.kept or any(one.given for one in self.rebuilt)
            self.rebuilt = rebuilding.paying(self.rebuilt, read) if pays else []
            if self.rebuilt:
                self.before, self.unseen = rebuilt, rebuilt.unseen

    def find_replacements(self) -> None:
        """Find what replaces each activation, where outputs are rebuilt already."""
        self._choose_at(activation_sites(self.model, self.own))
        if self.before is None:
            return
        if self.method == "auto":
            self.replacements, self.after = best(
                self.sites, self.bits, self.error, self.replace, self.measure, self.before
            )
        elif self.method == "rebuild":
            self.after = self.before
        else:
            self.replacements, self.after = paying(
                self.sites, self.replacements, self.replace, self.before, self.measure
            )

    def find_codes(self) -> None:
        """Find which gates keep codes, and which activations, where this is decided by what is kept."""
        if self.before is None:
            for coding in self.codings:
                self.rebuilt = rebuilding.coded(self.rebuilt, coding.codes)
            return
        assert self.after is not None
        far = self._too_far()
        alike = groups_of(self.sites, self.replacements)
        groups = [frozenset(i for i in group if self.sites[i].held not in far) for group in alike]
        likes = rebuilding.likes(self.rebuilt, without=far)
        steps = [
            step
            for coding in self.codings
            for step in (
                *(partial(coding.code, self.sites, group) for group in groups),
                *(partial(_code_gates, coding, like) for like in likes),
            )
        ]
        start = tuple(self.replacements), tuple(self.rebuilt)
        (replacements, rebuilt), self.after = least(start, self.after, steps, self._measured)
        self.replacements, self.rebuilt = [*as_likes(self.sites, replacements, self.before)], [*rebuilt]

    def _too_far(self) -> Collection[nn.Module]:
        """Return the activations and norms whose inputs do not suit codes, so that `auto` gives them none."""
        if self.method != "auto" or not self.codings:
            return ()
        assert self.run is not None
        held = [site.held for site in self.sites if isinstance(site.held, nn.Module)]
        held += [one.activation for one in self.rebuilt if one.may_code]
        found = ((one, self.codings[0].codes(one)) for one in held)
        coded = {one: codes.table(one) for one, codes in found if codes is not None}
        return too_far(self.model, self.run, coded, attempt=self.attempt)

    def _measured(self, state: State) -> Trace:
        replacements, rebuilt = state
        with rebuilding.swapped(rebuilt):
            (trace,) = self.measure([plan(replacements)])
        return trace

    def gradient_error(self) -> Gradient:
        """Return how far the gradient is from stock's."""
        assert self.run is not None
        whole = _whole(self.rebuilt, self.sites, self.replacements)
        return gradient_error(self.model, self.run, self.own, whole, attempt=self.attempt)

    def put(self) -> None:
        """Change the model."""
        rebuilding.put(self.rebuilt)
        put(self.sites, self.replacements)
        for site, replacement in zip(self.sites, self.replacements, strict=True):
            if replacement.kind:
                put_back(site.held)  # the original is as it was


def _code_gates(coding: Coding, like: tuple[str, str], state: State) -> State:
    """Let gates that are alike keep codes."""
    replacements, rebuilt = state
    return replacements, tuple(rebuilding.coded(rebuilt, coding.codes, like))


def _whole(
    found: Sequence[rebuilding.Swap], sites: Sequence[ActivationSite], replacements: Sequence[Replacement]
) -> Plan:
    """Return all that is done to a model as a plan for a measurement."""

    @contextmanager
    def done(_: Sequence[ActivationSite]) -> Iterator[None]:
        with rebuilding.swapped(found), putting(replacements, sites):
            yield

    return done


def _records(job: _Job) -> Iterator[SiteRecord]:
    """Yield the records; a module at several sites has its bytes at the first of them."""
    first: dict[Any, ActivationSite] = {}
    told = {id(one.module): (one.record.after, one.record.reason) for one in job.rebuilt if one.record}
    for i, (site, replacement) in enumerate(zip(job.sites, job.replacements, strict=True)):
        after, reason = replacement.label, replacement.reason
        if after is None and site.found.rebuilt:
            after, reason = told.get(id(site.held), standing(site.held))
        record = SiteRecord(site.path, "activation", site.found.before, after, reason)
        if first.setdefault(site.key, site) is not site:
            same = f"the same module as {first[site.key].path}"
            record = dataclasses.replace(record, reason="; ".join(filter(None, (reason, same))))
        elif job.after is not None and job.after.usages[i].shared is not None:
            was, now = job.was[site.path], job.after.usages[i]
            record = dataclasses.replace(record, kept_before=was.kept, kept_after=now.kept, shared=now.shared)
        yield record
