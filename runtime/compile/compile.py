"""Compiling with codes: the options, and `torch.compile` with them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch

from fitact.arguments import flags, integer, real
from fitact.errors import UsageError, quote
from fitact.runtime.torch_internals import compiler_options, partitioner

from .compander import Compander
from .kept import ALSO
from .partition import Partition
from .report import CompileReport

Compiled = TypeVar("Compiled", bound=Callable[..., Any])
BITS = {"rounding": (8,), "coarse": (4, 6, 8)}  # the default first
OPTION = "custom_partitioner_fn"
BUDGET = 0.9
_reports: WeakKeyDictionary[Any, CompileReport] = WeakKeyDictionary()


class CompileOptions(dict[str, Any]):
    """Options of `torch.compile`.

    Attributes:
        report: what became codes, filled in as graphs are compiled.

    """

    def __init__(self, options: dict[str, Any], report: CompileReport) -> None:
        super().__init__(options)
        self.report = report


def compile_options(
    *,
    error: str = "rounding",
    bits: int | None = None,
    budget: float = BUDGET,
    attention: bool = False,
    inputs: bool = False,
    loss: bool = False,
) -> CompileOptions:
    """Return options with which `torch.compile` keeps codes for backward.

    As usual, the compiler first chooses what to keep, and computes the rest again. Then masks that it keeps become
    bits, and other tensors become codes of the identity, with rows scaled by powers of two. Encoding and decoding
    are operators that the compiler sees and fuses.

    Args:
        error: `"exact"` codes only masks, so that no value changes; `"rounding"` uses codes of 8 bits, whose error
            is a few times that of bfloat16's own rounding; `"coarse"` uses codes of 4 bits.
        bits: of a code; 8 for `"rounding"`, 4, 6 or 8 for `"coarse"`, None for `"exact"`.
        budget: how much the compiler may keep, from 0 (it computes everything again) to 1 (what is fastest): the
            value of `torch._functorch.config.activation_memory_budget` while it chooses. At 0.9 it computes no
            matrix product of a transformer's blocks again.
        attention: whether queries, keys, values and outputs of attention become codes, and factors of other
            batched products.
        inputs: whether inputs that are no parameters become codes. This saves memory where nothing else keeps
            them, as between regions that are compiled one by one.
        loss: whether tensors that lead to a loss become codes; their errors enter every gradient.

    Returns:
        A dictionary for the argument `options` of `torch.compile`, with the `report`.

    Raises:
        UsageError: an argument is not valid.

    """
    code = _code(error, bits)
    budget = real("budget", budget, 0, 1)
    flags(attention=attention, inputs=inputs, loss=loss)
    report = CompileReport()
    asked = zip(ALSO, (attention, inputs, loss), strict=True)
    also = tuple(name for name, wanted in asked if wanted)
    partition = Partition(budget, code, also, lambda records: report.graphs.append(tuple(records)))
    return CompileOptions({OPTION: partitioner(partition, _identity(code, budget, also))}, report)


def compile(  # noqa: A001  it stands for torch.compile
    model: Compiled,
    *,
    error: str = "rounding",
    bits: int | None = None,
    budget: float = BUDGET,
    attention: bool = False,
    inputs: bool = False,
    loss: bool = False,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **others: Any,
) -> Compiled:
    """Return the compiled model, which keeps codes for backward.

    Args:
        model: a module or a function, as `torch.compile` takes it.
        error: as for `compile_options`, like the next five.
        bits: of a code.
        budget: how much the compiler may keep.
        attention: whether tensors of attention become codes.
        inputs: whether inputs become codes.
        loss: whether what leads to a loss becomes codes.
        mode: of `torch.compile`, such as `"max-autotune"`.
        options: more options of `torch.compile`.
        others: other arguments of `torch.compile`, such as `fullgraph` and `dynamic`.

    Returns:
        What `torch.compile` returns; `compile_report` tells what became codes.

    Raises:
        UsageError: an argument is not valid.

    """
    if others.get("backend", "inductor") != "inductor":
        raise UsageError(f"backend: expected 'inductor', whose graphs are changed, got {quote(others['backend'])}")
    if OPTION in (options or {}):
        raise UsageError(f"options: {OPTION} is what fitact sets; leave it out, or use torch.compile")
    own = compile_options(error=error, bits=bits, budget=budget, attention=attention, inputs=inputs, loss=loss)
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


def _code(error: str, bits: int | None) -> Compander | None:
    """Return the code that arguments of `compile_options` ask for; None if values may not change."""
    if error == "exact":
        if bits is not None:
            raise UsageError("error='exact' codes only masks: leave out bits")
        return None
    if error not in BITS:
        raise UsageError(f"error: expected 'exact', 'rounding' or 'coarse', got {quote(error)}")
    allowed = BITS[error]
    width = allowed[0] if bits is None else integer("bits", bits, 1)
    if width not in allowed:
        numbers = " or ".join(map(str, sorted(allowed)))
        raise UsageError(f"bits: expected {numbers} for error={error!r}, got {width}")
    return Compander(width)


def _identity(code: Compander | None, budget: float, also: Sequence[str]) -> str:
    """Return what names everything that the changed graphs depend on."""
    sources = sorted(files(__package__).iterdir(), key=lambda file: file.name)
    texts = [file.read_text(encoding="utf-8") for file in sources if file.name.endswith(".py")]
    parts = [*texts, repr(code), repr(budget), *also]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
