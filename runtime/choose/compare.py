"""Where a model's bytes are, and what each policy saves: `measure`, behind `fitact memory`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import nn

from fitact.base import Bars, Shown, UsageError, binary, columns, integer, one_line, quote, real, several
from fitact.runtime.compile import BUDGET
from fitact.runtime.measure import (
    Measured,
    Source,
    Subject,
    Training,
    blocks_of,
    from_callable,
    prepare,
    whole_step,
)
from fitact.runtime.saving import ERRORS, saving

from .checkpoints import CHECKPOINTS
from .compiler import Compiled, compiled
from .convert import check_bits
from .detect import activation_sites
from .policies import BASELINE, Policy, changed

SCHEMA = "fitact.memory/2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OPTIMIZERS = {"adamw": 2, "sgd": 1, "none": 0}  # tensors of a parameter's size; SGD with momentum
BUDGETS = (1.0, 0.9, 0.7)
KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Row:
    """The model as it is (baseline), with a method, or with a baseline.

    Attributes:
        name: name of the method or baseline.
        bytes: bytes saved for backward.
        kinds: these bytes by kind; `checkpoint` is what checkpointing saves, `graph` what the compiler saves.
        replaced: how many activations were replaced; None for the baseline, checkpointing and the compiler.
        flops: FLOPs that are run again, as a share of the forward pass's.
        traffic: bytes that are read and written again, as a share of the forward pass's; None under the compiler,
            which fuses operations.
        peak: bytes at the peak of a training step, parameters and the optimizer's state among them, without
            inputs; None under the compiler.

    """

    name: str
    bytes: int
    kinds: Mapping[str, int]
    replaced: int | None = None
    flops: float = 0.0
    traffic: float | None = 0.0
    peak: int | None = None


@dataclass(frozen=True)
class Report(Shown):
    """The result of `measure`.

    Attributes:
        model, training: names of the model and of what is trained.
        batch, seq: sizes of the inputs; None if the model has no sequence, or its callable does not take them.
        dtype, autocast: dtype of the parameters, and of autocast if it was on.
        parameters, trained: the numbers of all and of trained parameters.
        parameter_bytes, gradient_bytes, optimizer_bytes: memory of training besides what is saved for backward.
        optimizer: `adamw`, `sgd` (with momentum) or `none`.
        sites: how many modules of the model are activations.
        blocks: how often the block repeats; 1 if it is the whole model.
        block_name: the block's class.
        block: bytes that one block saves, by kind.
        operations, modules: bytes that the baseline saves, by operation and by module.
        rows: the baseline first, then the methods, checkpointing and the compiler.
        notes: further remarks.

    """

    model: str
    training: str
    batch: int | None
    seq: int | None
    dtype: str
    autocast: str | None
    parameters: int
    trained: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    optimizer: str
    sites: int
    blocks: int
    block_name: str
    block: Mapping[str, int]
    operations: Mapping[str, int]
    modules: Mapping[str, int]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(lines(self))

    def bars(self) -> Bars:
        """Return what each policy saves."""
        title = f"What {self.model} saves for backward"
        return Bars(title, "saved for backward", ("bytes",), tuple((row.name, (row.bytes,)) for row in self.rows))

    def to_json(self) -> str:
        """Return the report as JSON; the same measurement gives the same text."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2, sort_keys=True) + "\n"


def measure(
    source: Source | Callable[..., Any],
    *,
    training: Training | None = None,
    batch: int = 1,
    seq: int = 512,
    dtype: str | None = None,
    autocast: str | None = None,
    bits: Sequence[int] = (3,),
    budgets: Sequence[float] = BUDGETS,
    optimizer: str = "adamw",
    progress: Callable[[float], None] = lambda share: None,
) -> Report:
    """Measure where a model's bytes are, and what each method, checkpointing and the compiler would save.

    A training step of the model is run once as it is, and once with each policy.

    Args:
        source: the model, from `hugging_face`, `timm_model` or `from_callable`; or a function that returns a model
            and its inputs, and may have arguments `batch` and `seq`.
        training: what is trained, by default what needs gradients.
        batch: of the inputs.
        seq: of the inputs, in tokens.
        dtype: of parameters and floating-point inputs, a name in DTYPES; by default bfloat16, and float32
            with autocast.
        autocast: a name in DTYPES; it casts what PyTorch's autocast casts on a CPU.
        bits: widths of Few-Bit activations, a row for each.
        budgets: memory budgets of the compiler, a row for each; an empty list leaves out the compiler, which takes
            longest. With 0.9, which is the default of `fitact.compile`, rows follow for the same in codes of 8
            bits and in PyTorch's float8.
        optimizer: a name in OPTIMIZERS.
        progress: called with the share that is done.

    Returns:
        The report. `measure` trains nothing, downloads nothing, and runs nothing on real data.

    Raises:
        UsageError: the model cannot be built or run with these arguments, or a number is out of range.

    """
    dtype = dtype or ("bfloat16" if autocast is None else "float32")
    for value, known in ((dtype, DTYPES), (autocast or dtype, DTYPES), (optimizer, OPTIMIZERS)):
        if value not in known:
            raise UsageError(f"{quote(value)}: expected {', '.join(known)}")
    batch, seq = integer("batch", batch, 1), integer("seq", seq, 1)
    bits = [integer("bits", k, 1) for k in several("bits", bits)]
    for k in bits:
        check_bits("fewbit", k)
    budgets = [real("budgets", budget, 0, 1) for budget in several("budgets", budgets)]
    if not isinstance(source, Source):
        source = from_callable(source)
    casting = DTYPES[autocast] if autocast else None
    subject = replace(prepare(source, training, batch=batch, seq=seq, dtype=DTYPES[dtype]), autocast=casting)
    sizes = {name: size for name, size in (("batch", batch), ("seq", seq)) if name in source.varies}
    model = subject.model
    baseline = whole_step(subject)
    sites, blocks = activation_sites(model), blocks_of(model)
    notes: list[str] = []
    if len(blocks) == 1:
        notes.append("no block repeats, so checkpointing treats the whole model as one block")
    if not sites:
        notes.append("no module of it is an activation, such as nn.GELU, which methods could replace")
    candidates = [*_candidates(model, [block for _, block in blocks], bits if sites else None)]
    steps = 1 + len(candidates) + (2 + len(budgets) + 2 * budgets.count(BUDGET) if budgets else 0)
    done = count(1)

    def advance() -> None:
        progress(min(next(done) / steps, 1.0))

    advance()
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradient_bytes = sum(parameter.nbytes for parameter in trained)
    state = OPTIMIZERS[optimizer] * gradient_bytes
    fixed = sum(tensor.nbytes for tensor in (*parameters, *model.buffers())) + state
    rows, refused = list[Row](), list[str]()
    for policy, modules in candidates:
        try:
            rows.append(_row(subject, policy, modules, baseline, fixed))
        except UsageError as error:  # PyTorch does not checkpoint operations in place
            if policy.method:
                refused.append(policy.name)
            else:
                notes.append(f"{policy.name}: it fails: {one_line(error.__cause__ or error)}")
        advance()
    if refused:
        names = sorted({site.activation for site in sites if site.activation})
        notes.append(f"{'; '.join(refused)}: cannot replace {', '.join(names) or 'its activations'}")
    if budgets:
        try:
            rows += _compiled_rows(compiled(subject, budgets, advance, [BUDGET]), baseline)
        except Exception as error:  # whatever the compiler cannot do must not cost the other rows
            notes.append(f"the compiler cannot trace the model: {one_line(error)}")
    progress(1.0)
    # Those of a teacher save nothing.
    saving_blocks = [kinds for path, _ in blocks if (kinds := baseline.saved.by_kind(path))]
    return Report(
        model=subject.name,
        training=subject.training,
        batch=sizes.get("batch"),
        seq=sizes.get("seq"),
        dtype=dtype,
        autocast=autocast,
        parameters=sum(parameter.numel() for parameter in parameters),
        trained=sum(parameter.numel() for parameter in trained),
        parameter_bytes=sum(parameter.nbytes for parameter in parameters),
        gradient_bytes=gradient_bytes,
        optimizer_bytes=state,
        optimizer=optimizer,
        sites=len(sites),
        blocks=len(blocks),
        block_name=type(blocks[0][1]).__name__,
        block=saving_blocks[len(saving_blocks) // 2] if saving_blocks else {},
        operations=baseline.saved.by_operation(),
        modules=baseline.saved.by_module(),
        rows=tuple(rows),
        notes=tuple(notes),
    )


def _candidates(
    model: nn.Module, blocks: Sequence[nn.Module], bits: Sequence[int] | None
) -> Iterator[tuple[Policy, Sequence[nn.Module]]]:
    """Yield policies, and the modules of the model that get each; methods only if there are bits."""
    yield BASELINE, [model]
    methods = [*(("fewbit", k) for k in bits or ()), ("relumix", 2), ("inverted", None), ("output", None)]
    for method, k in methods if bits is not None else []:
        name = method if k is None else f"{method}, {k} bit{'s'[: k > 1]}"
        yield Policy(name, method=method, bits=k), [model]
    for error in ERRORS:
        yield Policy(f"saving, {error}", context=saving(error)), [model]
    for name, kind in zip(("full", "selective"), CHECKPOINTS[1:], strict=True):
        yield Policy(f"checkpointing, {name}", checkpoint=kind), blocks


def _row(subject: Subject, policy: Policy, modules: Sequence[nn.Module], baseline: Measured, fixed: int) -> Row:
    """Measure a policy; UsageError if there is nothing in the modules that it changes, or it fails."""
    with changed(modules, [policy] * len(modules)) as replaced:
        done = baseline if policy is BASELINE else whole_step(subject)
    row = Row(policy.name, done.saved.bytes, done.saved.by_kind(), peak=fixed + done.peak)
    if policy.method:
        return replace(row, replaced=replaced)
    again, once = done.forward + done.backward - baseline.forward - baseline.backward, baseline.forward
    return replace(row, flops=again.flops / max(once.flops, 1), traffic=again.traffic / max(once.traffic, 1))


def _compiled_rows(results: Sequence[Compiled], baseline: Measured) -> Iterator[Row]:
    for result in results:
        again = max(result.flops - baseline.forward.flops - baseline.backward.flops, 0)
        name = f"{result.budget:g} and {result.stored}" if result.stored else f"budget {result.budget:g}"
        kinds = {"graph": result.saved.bytes}
        flops = again / max(baseline.forward.flops, 1)
        yield Row(f"compiler, {name}", result.saved.bytes, kinds, flops=flops, traffic=None)


def lines(report: Report, *, exact: bool = False) -> list[str]:
    """Return a report's tables, with sizes in MiB, for small models in KiB or bytes, and if `exact`, in bytes."""
    block = sum(report.block.values())
    exact = exact or report.rows[0].bytes < MIB
    unit, name = (MIB, "MiB") if block >= MIB else (KIB, "KiB")

    def size(count: int) -> str:
        return f"{count:,}" if exact else f"{count / unit:,.1f} {name}"

    which = f"one of {report.blocks} {report.block_name}" if report.blocks > 1 else report.block_name
    text = [f"{report.model}: {_sizes(report)}", "", f"{which} saves {size(block)}{' bytes' if exact else ''}"]
    text += columns([(kind, size(count), _percent(count, block)) for kind, count in report.block.items()], "<>>")
    text += ["", *columns([*_table(report, size)], "<>>>>>>")]
    fixed = {"parameters": report.parameter_bytes, "gradients": report.gradient_bytes}
    fixed[report.optimizer] = report.optimizer_bytes
    parts = " + ".join(f"{binary(count)} {name}" for name, count in fixed.items() if count)
    return [*text, f"peak: of a training step, with {parts}", *(f"note: {note}" for note in report.notes)]


def _table(report: Report, size: Callable[[int], str]) -> Iterator[tuple[str, ...]]:
    yield "", "saved", "of baseline", "replaced", "FLOPs again", "traffic again", "peak"
    for row in report.rows:
        again = row.traffic != 0
        yield (
            row.name,
            size(row.bytes),
            _percent(row.bytes, report.rows[0].bytes),
            "" if row.replaced is None else f"{row.replaced} of {report.sites}",
            _percent(row.flops) if again else "",
            "" if not again else "-" if row.traffic is None else _percent(row.traffic),
            "-" if row.peak is None else size(row.peak),
        )


def _percent(part: float, whole: float = 1) -> str:
    return f"{100 * part / (whole or 1):.1f} %"  # of nothing, nothing


def _sizes(report: Report) -> str:
    """Return the sizes of the inputs, the dtype and the parameters."""
    sizes = {"batch": report.batch, "seq": report.seq}
    given = "".join(f"{name} {size}, " for name, size in sizes.items() if size is not None)
    dtype = report.dtype + (f", autocast to {report.autocast}" if report.autocast else "")
    part = "" if report.trained == report.parameters else f" ({_count(report.trained)} trained)"
    return f"{given}{dtype}; {_count(report.parameters)} parameters{part}, {report.training}"


def _count(number: int) -> str:
    return f"{number / 1e6:,.1f} million" if number >= 1e6 else f"{number:,}"
