"""Where a model's bytes are, and what each method and baseline saves: `measure`, behind `fitact memory`.

    from .compare import measure
    from fitact.runtime.measure.prepare import Training
    from fitact.runtime.measure.sources import hugging_face

    report = measure(hugging_face("llama"), training=Training(lora=("q_proj", "v_proj")), seq=2048, gib=24)
    report.block                                   # bytes of one block by kind
    {row.name: row.bytes for row in report.rows}   # bytes kept, stock and with each method and baseline

    def mine(batch, seq):                          # a model of your own, with its input
        return MyModel(), torch.randn(batch, seq, 512)

    measure(mine, batch=8, seq=1024)

`fitact.cli.memory_tables.show(report)` prints the command line's tables, `fitact.cli.charts.draw(report)` returns
the picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fitact.arguments import flags, integer, positive, real, several
from fitact.errors import UsageError, quote
from fitact.runtime.compile.compile import BUDGET
from fitact.runtime.measure.peak import peak_memory
from fitact.runtime.measure.prepare import Inputs, Prepared, Source, Training, blocks_of, prepare
from fitact.runtime.measure.saved import Saved, count_saved, gpu_kernels
from fitact.runtime.measure.sources import from_callable
from fitact.runtime.restore import differentiate, explained
from fitact.text import one_line

from .baselines import Work, compiled, work_of
from .candidates import STOCK, Candidate, checkpoints, contexts, methods, sites_of
from .capacity import Curve
from .choices import check_bits
from .compared import Report, Row, closed_form

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OPTIMIZERS = {"adamw": 2, "sgd": 1, "none": 0}  # tensors of a parameter's size; SGD with momentum
BUDGETS = (1.0, 0.9, 0.7)
GIB = 2**30
MOST_GIB = 2**20  # a pebibyte


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
    gib: float | None = None,
    optimizer: str = "adamw",
    peak: bool = False,
    fake: bool = True,
    progress: Callable[[float], None] | None = None,
) -> Report:
    """Measure where a model's bytes are, and what each method and baseline would save.

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
        gib: memory for which to find the largest batch and the longest sequence, with parameters, gradients and
            the optimizer's state; None to leave these out.
        optimizer: a name in OPTIMIZERS.
        peak: whether to track a training step's peak too, which takes a while for large models.
        fake: whether to measure without memory; else tensors are real.
        progress: called with the share that is done.

    Returns:
        The report. `measure` trains nothing, downloads nothing, and runs nothing on real data.

    Raises:
        UsageError: the model cannot be built or run with these arguments, or has no activation; or a number is out
            of range.

    """
    dtype = dtype or ("bfloat16" if autocast is None else "float32")
    for value, known in ((dtype, DTYPES), (autocast or dtype, DTYPES), (optimizer, OPTIMIZERS)):
        if value not in known:
            raise UsageError(f"{quote(value)}: expected {', '.join(known)}")
    flags(peak=peak, fake=fake)
    batch, seq = integer("batch", batch, 1), integer("seq", seq, 1)
    bits = [integer("bits", k, 1) for k in several("bits", bits)]
    for k in bits:
        check_bits("fewbit", k)
    budgets = [real("budgets", budget, 0, 1) for budget in several("budgets", budgets)]
    gib = None if gib is None else positive("gib", gib, MOST_GIB)
    if not isinstance(source, Source):
        source = from_callable(source)
    prepared, inputs = prepare(source, training, batch=batch, seq=seq, dtype=DTYPES[dtype], fake=fake)
    casting = DTYPES[autocast] if autocast else None
    measurement = _Measurement(prepared, casting, batch, seq, inputs, budgets, gib, optimizer, peak, progress)
    with gpu_kernels():
        return measurement.report(str(training or Training()), bits)


@dataclass
class _Measurement:
    prepared: Prepared
    autocast: torch.dtype | None
    batch: int
    seq: int
    inputs: Inputs
    budgets: Sequence[float]
    gib: float | None
    optimizer: str
    peak: bool
    progress: Callable[[float], None] | None
    work_done: float = 0.0  # of `work_in_all`, in forward passes
    work_in_all: float = 1.0
    notes: list[str] = field(default_factory=list)
    of_block: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def model(self) -> nn.Module:
        return self.prepared.model

    def advance(self, weight: float = 1.0) -> None:
        """Move the progress bar by the work of so many forward passes."""
        self.work_done += weight
        if self.progress:
            self.progress(min(self.work_done / self.work_in_all, 1.0))

    def around(self) -> AbstractContextManager[Any]:
        """Return a new context for the forward pass."""
        return nullcontext() if self.autocast is None else torch.autocast("cpu", dtype=self.autocast)

    def kept(self, candidate: Candidate, inputs: Inputs, detail: bool = False) -> Saved:
        """Count what a forward pass keeps."""
        with count_saved(self.model, detail=detail) as saved, candidate.context(saved), self.around():
            self.run(inputs)
        return saved

    def step(self, candidate: Candidate) -> tuple[Saved, Work, Work]:
        """Count what a forward pass keeps, its work, and the work of the backward pass."""
        outputs: list[Tensor] = []
        with ExitStack() as counting:
            saved = counting.enter_context(count_saved(self.model, detail=True))
            with candidate.context(saved):
                with self.around():
                    forward = work_of(lambda: outputs.extend(self.run(self.inputs)))
                counting.close()  # what backward runs again is not kept
                with self.prepared.mode or nullcontext():
                    backward = work_of(partial(self.differentiate, outputs))
        return saved, forward, backward

    def run(self, inputs: Inputs) -> list[Tensor]:
        with explained(self.prepared.name, "forward"):
            return self.prepared.run(inputs)

    def report(self, training: str, bits: Sequence[int]) -> Report:
        saved, forward, backward = self.step(STOCK)
        sites = sites_of(self.model)
        if not sites and "activation" not in saved.kinds:
            raise UsageError(f"{self.prepared.name}: it has no activation, so there is nothing to replace")
        blocks = blocks_of(self.model)
        if len(blocks) == 1:
            self.notes.append("no block repeats, so checkpointing treats the whole model as one block")
        modules = [block for _, block in blocks]
        candidates = [STOCK, *methods(self.model, bits, self.notes), *contexts(self.model), *checkpoints(modules)]
        results = len(self.budgets) + 2 * self.budgets.count(BUDGET)
        compiling = (8.0, *[4.0] * results) if self.budgets else ()  # tracing, and each result
        self.work_in_all = 10 + len(candidates) * (1 + 6 * (self.gib is not None) + 8 * self.peak) + sum(compiling)
        self.advance()
        parameters = list(self.model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        gradient_bytes = sum(parameter.nbytes for parameter in trained)
        state = OPTIMIZERS[self.optimizer] * gradient_bytes
        self.advance(3)
        rows = {}
        for candidate in candidates:
            row = self.row(candidate, saved if candidate is STOCK else None, forward, backward, state)
            if row is not None:
                rows[candidate] = row
            self.advance(1 + 3 * candidate.again + 8 * self.peak)
        traced = list(self.compiled_rows(forward.flops, backward.flops, compiling))
        block = saved.by_kind(blocks[len(blocks) // 2][0])
        self.of_block[self.batch, self.seq] = sum(block.values())
        report = Report(
            model=self.prepared.name,
            training=training,
            batch=self.batch if "batch" in self.prepared.source.varies else None,
            seq=self.seq if "seq" in self.prepared.source.varies else None,
            dtype=str(self.prepared.dtype).removeprefix("torch."),
            autocast=None if self.autocast is None else str(self.autocast).removeprefix("torch."),
            parameters=sum(parameter.numel() for parameter in parameters),
            trained=sum(parameter.numel() for parameter in trained),
            parameter_bytes=sum(parameter.nbytes for parameter in parameters),
            gradient_bytes=gradient_bytes,
            optimizer_bytes=state,
            optimizer=self.optimizer,
            sites=len(sites),
            blocks=len(blocks),
            block_name=type(blocks[0][1]).__name__,
            block=block,
            closed_form=self.closed_form(),
            operations=saved.by_operation(),
            modules=saved.by_module(),
            rows=(*rows.values(), *traced),
            gib=self.gib,
        )
        if self.gib is not None:
            room = int(self.gib * GIB) - report.parameter_bytes - gradient_bytes - state
            report = replace(report, rows=tuple(self.fitted(rows, traced, room)))
        if self.progress:
            self.progress(1.0)
        return replace(report, notes=tuple(self.notes))

    # -------------------------------------------------------------------------------------------------------- rows

    def row(
        self, candidate: Candidate, saved: Saved | None, forward: Work, backward: Work, state: int
    ) -> Row | None:
        """Measure a candidate; `saved` is what it keeps if that has been counted, `state` is the optimizer's."""
        try:
            flops = traffic = 0.0
            if candidate.again:
                saved, *passes = self.step(candidate)
                flops = sum(one.flops for one in passes) - forward.flops - backward.flops
                traffic = sum(one.traffic for one in passes) - forward.traffic - backward.traffic
                flops, traffic = flops / max(forward.flops, 1), traffic / max(forward.traffic, 1)
            elif saved is None:
                saved = self.kept(candidate, self.inputs, detail=True)
            row = Row(candidate.name, saved.bytes, saved.by_kind(), candidate.replaced, flops, traffic)
            if candidate.blocks:
                row = replace(row, kinds={**row.kinds, "checkpoint": saved.bytes - sum(row.kinds.values())})
            return replace(row, peak=self.step_peak(candidate) + state) if self.peak else row
        except UsageError as error:  # PyTorch does not checkpoint operations in place
            if not candidate.again:
                raise
            self.notes.append(f"{candidate.name}: it fails: {one_line(error.__cause__ or error)}")
            return None

    def differentiate(self, outputs: Sequence[Tensor]) -> None:
        try:
            differentiate(self.prepared.name, outputs)
        finally:
            self.model.zero_grad(set_to_none=True)

    def step_peak(self, candidate: Candidate) -> int:
        def step() -> None:
            with self.around():
                outputs = self.run(self.inputs)
            self.differentiate(outputs)

        with candidate.context(Saved()), self.prepared.mode or nullcontext():
            return peak_memory(step, self.model)["total"]

    def compiled_rows(self, forward: int, backward: int, weights: Sequence[float]) -> Iterator[Row]:
        """Yield what the compiler keeps; `forward` and `backward` are the FLOPs of eager passes."""
        if not self.budgets:
            return
        steps = iter(weights)
        try:
            found = compiled(
                self.prepared, self.inputs, self.budgets, lambda: self.advance(next(steps)), self.around, [BUDGET]
            )
        except Exception as error:  # whatever the compiler cannot do must not cost the other rows
            self.notes.append(f"the compiler cannot trace the model: {one_line(error)}")
            return
        for one in found:
            flops = max(one.flops - forward - backward, 0) / max(forward, 1)
            name = f"compiler, {one.budget:g} and {one.kept}" if one.kept else f"compiler, budget {one.budget:g}"
            yield Row(name, one.saved.bytes, {"graph": one.saved.bytes}, flops=flops, traffic=None)

    def closed_form(self) -> dict[str, int] | None:
        config = getattr(self.model, "config", None)
        hidden, heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
        if not isinstance(hidden, int) or not isinstance(heads, int):
            return None
        seq = self.seq
        if "seq" not in self.prepared.source.varies:
            image, patch = (getattr(config, name, None) for name in ("image_size", "patch_size"))
            if not isinstance(image, int) or not isinstance(patch, int):
                return None
            seq = (image // patch) ** 2 + 1
        element = (self.autocast or self.prepared.dtype).itemsize
        return closed_form(self.batch, seq, hidden, heads, element)

    # ------------------------------------------------------------------------------------------- the largest sizes

    def fitted(self, rows: Mapping[Candidate, Row], traced: Sequence[Row], room: int) -> Iterator[Row]:
        """Yield rows with the largest batch and the longest sequence that fit so many bytes."""
        source = self.prepared.source
        if not source.varies:
            self.notes.append("its callable takes neither batch nor seq, so the largest sizes cannot be found")
        limits = {"batch": None, "seq": source.longest(self.model)}
        if limits["seq"] is not None and "seq" in source.varies:
            self.notes.append(f"{self.prepared.name} has positions for {limits['seq']} tokens")
        stock: dict[str, Curve] = {}
        for candidate, row in rows.items():
            curves = {
                name: self.curve(name, row, candidate, limit)
                for name, limit in limits.items()
                if name in source.varies
            }
            stock = stock or curves
            found = {name: curve.largest(room) for name, curve in curves.items()}
            yield replace(row, batch=found.get("batch"), seq=found.get("seq"))
            self.advance(6)
        for row in traced:
            scaled = room * rows[STOCK].bytes // max(row.bytes, 1)
            sizes = {name: curve.solve(scaled) for name, curve in stock.items()}
            yield replace(row, batch=sizes.get("batch"), seq=sizes.get("seq"), scaled=True)

    def curve(self, name: str, row: Row, candidate: Candidate, limit: int | None) -> Curve:
        """Measure what a candidate keeps at two batches, or at three lengths."""
        here = self.batch if name == "batch" else self.seq

        def needed(size: int) -> int:
            batch, seq = (size, self.seq) if name == "batch" else (self.batch, size)
            kept = row.bytes if size == here else self.kept(candidate, self.prepared.inputs(batch, seq)).bytes
            return kept + (self.block_bytes(batch, seq) if candidate.blocks else 0)

        factors = (2,) if name == "batch" else (2, 3)
        if limit is not None and here * factors[-1] > limit:
            sizes = [max(here * k // (factors[-1] + 1), 1) for k in factors]
        else:
            sizes = [here * k for k in factors]
        return Curve(needed, limit, (here, *sizes))

    def block_bytes(self, batch: int, seq: int) -> int:
        """Return the bytes that one block of the stock model keeps, which exist while the block runs again."""
        if (batch, seq) not in self.of_block:
            saved = self.kept(STOCK, self.prepared.inputs(batch, seq), detail=True)
            blocks = blocks_of(self.model)
            self.of_block[batch, seq] = sum(saved.by_kind(blocks[len(blocks) // 2][0]).values())
        return self.of_block[batch, seq]
