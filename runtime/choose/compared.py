"""The records that `measure` returns, and the published count for a transformer layer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

SCHEMA = "fitact.memory/1"


@dataclass(frozen=True)
class Row:
    """The model as it is (stock), with a method, or with a baseline.

    Attributes:
        name: name of the method or baseline.
        bytes: bytes kept for backward.
        kinds: these bytes by kind; `checkpoint` is what checkpointing keeps, `graph` what the compiler keeps.
        replaced: how many activations were replaced; None for stock and baselines.
        flops: FLOPs that are run again, as a share of the forward pass's.
        traffic: bytes that are read and written again, as a share of the forward pass's; None under the compiler,
            which fuses operations.
        peak: bytes at the peak of a training step, by PyTorch's memory tracker, with the optimizer's state; None
            if not requested.
        batch, seq: the largest that fit, each with the other unchanged; None if not requested or not variable. If
            blocks are run again, the bytes that one of them then keeps must fit too.
        scaled: whether batch and seq were computed from stock's and not measured.

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
    """The result of `measure`.

    Attributes:
        model, training: names of the model and of what is trained.
        batch, seq: sizes of the inputs; None if the model has no sequence, or its callable does not take them.
        dtype, autocast: dtype of the parameters, and of autocast if it was on.
        parameters, trained: the numbers of all and of trained parameters.
        parameter_bytes, gradient_bytes, optimizer_bytes: memory of training besides what is kept for backward.
        optimizer: `adamw`, `sgd` (with momentum) or `none`.
        sites: how many modules of the model are activations.
        blocks: how often the block repeats; 1 if it is the whole model.
        block_name: the block's class.
        block: bytes that one block keeps, by kind.
        closed_form: bytes of one block by the formula 34bsh + 5bs²a, by term; None if it is not a transformer's.
        operations, modules: bytes that the stock model keeps, by operation and by module.
        rows: stock first, then the methods, then the baselines.
        gib: the memory for which the largest sizes were found.
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
    """Return the bytes that a transformer layer keeps, by term: 34bsh + 5bs²a if an element has 2 bytes.

    Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, arXiv 2205.05198,
    section 4.1: attention that is not fused, an MLP that expands 4 times, three dropouts with masks of one byte
    per element. The mean and deviation that a norm keeps for each row are not counted.

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
        "scores": (2 * element + 1) * scores,  # softmax, its dropout, a mask: fused attention does not keep these
        "mlp": (9 * element + 1) * unit,  # its input, the activation's input and output, a mask
        "norms": 2 * element * unit,
    }
