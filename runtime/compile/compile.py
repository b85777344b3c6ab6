"""Compiling with block codes: the options, and `torch.compile` with them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch

from fitact.base import UsageError, flags, quote, real
from fitact.runtime.saving import policy_of
from fitact.runtime.torch_internals import compiler_options, partitioner

from .partition import Partition
from .report import CompileReport

Compiled = TypeVar("Compiled", bound=Callable[..., Any])
OPTION = "custom_partitioner_fn"
BUDGET = 0.9
_reports: WeakKeyDictionary[Any, CompileReport] = WeakKeyDictionary()


class CompileOptions(dict[str, Any]):
    """Options of `torch.compile`, with a report of what became codes, filled in as graphs are compiled."""

    report: CompileReport


def compile_options(
    *,
    error: str = "rounding",
    bits: int | Mapping[str, int] | None = None,
    budget: float = BUDGET,
    inputs: bool = False,
) -> CompileOptions:
    """Return options with which `torch.compile` saves codes for backward.

    As usual, the compiler first chooses what to save, and recomputes the rest. Then masks that it saves become
    bits, and other tensors become block codes, as in `fitact.saving`.

    Args:
        error: as for `fitact.saving`: `"exact"` stores only masks otherwise, so that no value changes; with
            `"rounding"` gradients are about 1 % off, with `"coarse"` about 10 %.
        bits: as for `fitact.saving`: of all codes, or by kind, such as `{"gate": 6, "attention": 8}`.
        budget: how much the compiler may save, from 0 (it recomputes everything) to 1 (what is fastest): the value
            of `torch._functorch.config.activation_memory_budget` while it chooses. At 0.9 it recomputes no matrix
            product of a transformer's blocks.
        inputs: whether inputs that are no parameters become codes too. This saves memory where nothing else saves
            them, as between regions that are compiled one by one.

    Returns:
        A dictionary for the argument `options` of `torch.compile`, with the `report`.

    Raises:
        UsageError: an argument is not valid.

    """
    policy = policy_of(error, bits)
    budget = real("budget", budget, 0, 1)
    flags(inputs=inputs)
    report = CompileReport()
    partition = Partition(budget, policy, inputs, lambda records: report.graphs.append(tuple(records)))
    options = CompileOptions({OPTION: partitioner(partition, _identity(partition))})
    options.report = report
    return options


def compile(  # noqa: A001  as torch.compile
    model: Compiled,
    *,
    error: str = "rounding",
    bits: int | Mapping[str, int] | None = None,
    budget: float = BUDGET,
    inputs: bool = False,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **others: Any,
) -> Compiled:
    """Return the compiled model, which saves codes for backward.

    Args:
        model: a module or a function, as `torch.compile` takes it.
        error: as for `compile_options`, like the next three.
        bits: of codes.
        budget: how much the compiler may save.
        inputs: whether inputs become codes.
        mode: of `torch.compile`, such as `"max-autotune"`.
        options: more options of `torch.compile`.
        others: other arguments of `torch.compile`, such as `fullgraph` and `dynamic`.

    Returns:
        What `torch.compile` returns; `compile_report` tells what became codes.

    Raises:
        UsageError: an argument is not valid.

    """
    if "attention" in others:
        raise UsageError("attention: say in how many bits: bits={'attention': 8}; error='coarse' has this")
    if others.get("backend", "inductor") != "inductor":
        raise UsageError(f"backend: expected 'inductor', whose graphs are changed, got {quote(others['backend'])}")
    if OPTION in (options or {}):
        raise UsageError(f"options: {OPTION} is what fitact sets; leave it out, or use torch.compile")
    own = compile_options(error=error, bits=bits, budget=budget, inputs=inputs)
    given = {**compiler_options(mode), **(options or {}), **own}
    compiled: Any = torch.compile(model, options=given, **others)
    _reports[compiled] = own.report
    return cast("Compiled", compiled)


def compile_report(compiled: Callable[..., Any]) -> CompileReport:
    """Return what became codes in what `compile` returned; UsageError for anything else."""
    try:
        return _reports[compiled]
    except (KeyError, TypeError):
        raise UsageError(
            "compile_report: expected what fitact.compile returned; with torch.compile, keep the options' report"
        ) from None


def _identity(partition: Partition) -> str:
    """Return what names everything that the changed graphs depend on."""
    sources = sorted(files(__package__).iterdir(), key=lambda file: file.name)
    texts = [file.read_text(encoding="utf-8") for file in sources if file.name.endswith(".py")]
    return hashlib.sha256("\0".join([*texts, repr(partition)]).encode()).hexdigest()
