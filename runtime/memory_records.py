"""What `measure` returns, and the count of a transformer's layer to compare it with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

SCHEMA = "fitact.memory/1"


@dataclass(frozen=True)
class Row:
    """The same model, stock or with a remedy.

    Attributes:
        name: of the remedy.
        bytes: that are kept for backward.
        kinds: the same by kind; `checkpoint` is what checkpointing keeps, `graph` what the compiler keeps.
        replaced: activations that were replaced, None where none are.
        flops: what is run again, as a share of the forward pass's FLOPs.
        traffic: the same of the bytes that the forward pass's operations read and write; None under the compiler,
            which fuses them.
        peak: bytes of a training step at its peak, by PyTorch's memory tracker, with the optimizer's state; None
            if not asked for.
        batch, seq: the largest that fit, each with the other as it is; None if not asked for or not varied. Where
            blocks are run again, what one of them keeps then has to fit too.
        scaled: whether these were computed from stock's and not measured.

    """

    name: str
    bytes: int
    kinds: Mapping[str, int]
    replaced: int | None = None
    flops: float = 0.0
    traffic: float | None = 0.0
    peak: int | None = None
    batch: int | None = None
    seq: int | None = None
    scaled: bool = False


@dataclass(frozen=True)
class Report:
    """What `measure` returns.

    Attributes:
        model, training: what was measured.
        batch, seq: of the inputs; None where the model has no sequence, or its callable takes none.
        dtype, autocast: of the parameters, and of autocast if it was on.
        parameters, trained: how many there are.
        parameter_bytes, gradient_bytes, optimizer_bytes: of the training, beside what is kept for backward.
        optimizer: `adamw`, `sgd` (with momentum) or `none`.
        sites: how many modules of the model are activations.
        blocks: how many times the block repeats; 1 if it is the whole model.
        block_name: its class.
        block: bytes that one block keeps, by kind.
        closed_form: bytes of one block by the count 34bsh + 5bs²a, by term; None if it is no transformer's.
        operations, modules: bytes that the stock model keeps, by operation and by module.
        rows: stock first, then each remedy.
        gib: the memory that the largest sizes were sought for.
        notes: what else should be known.

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
    closed_form: Mapping[str, int] | None
    operations: Mapping[str, int]
    modules: Mapping[str, int]
    rows: tuple[Row, ...]
    gib: float | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the report as JSON; the same measurement gives the same text."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2, sort_keys=True) + "\n"


def closed_form(batch: int, seq: int, hidden: int, heads: int, element: int = 2) -> dict[str, int]:
    """Return the bytes that a layer of a transformer keeps, by term: 34bsh + 5bs²a where an element has 2 bytes.

    Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, arXiv 2205.05198,
    section 4.1: attention that is not fused, an MLP that expands 4 times, three dropouts with masks of one byte an
    element. What a norm keeps for a row, its mean and deviation, is not counted.

    Args:
        batch: b.
        seq: s.
        hidden: h.
        heads: a.
        element: bytes of an activation's element.

    """
    unit, scores = batch * seq * hidden, batch * seq * seq * heads
    return {
        "attention": (5 * element + 1) * unit,  # the inputs of q, k, v and of the projection, q, k, v, a mask
        "scores": (2 * element + 1) * scores,  # softmax, its dropout, a mask: what a fused attention does not keep
        "mlp": (9 * element + 1) * unit,  # its input, the activation's input and output, a mask
        "norms": 2 * element * unit,
    }
