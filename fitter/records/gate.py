"""The records of gates h = a(g)·b(u): rebuilt exactly, or with codes in place of g, or of both."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fitact.errors import UsageError, quote
from fitact.fitter.analysis.gate import Gate

from .coded import DEVIATIONS, CodedFit, by_deviation
from .fit import Fit

BITS_U = (6, 8)  # of a code of u
KEPT = 16  # stands for u kept as it is


@dataclass(frozen=True, kw_only=True)
class GateFit(Fit):
    """A gate that keeps g and u for backward and nothing else: a, a′, b and b′ are computed again, exactly.

    Attributes:
        activation: the gate.
        error: empty.

    """

    METHODS = ("gate_rebuild",)
    ERRORS = ()

    activation: Gate


@dataclass(frozen=True, kw_only=True)
class CodedGateFit(Fit):
    """A gate that keeps a code of g, to look up a and a′ by it, and u or a code of u.

    The errors of the tables combine: dg = dh·a′(g)·b(u) takes those of a′ and b, du = dh·a(g)·b′(u) those of a and
    b′, and h those of a and b. `error` has the root of the sum of their squares for g and u independent and normal
    with deviation σ, in the notation of `CodedFit.error`; products of errors are left out. Where u is kept as it
    is, b and b′ have no error.

    Attributes:
        activation: the gate.
        code_g: the code of g, and the tables of a; of the same name as this fit.
        code_u: the code of u, and the tables of b, likewise; None if u is kept as it is.
        error: for each of `DEVIATIONS` σ, `dg_σ`, `du_σ` and `h_σ`.

    """

    METHODS = ("gate_coded",)
    PARTS = ("code_g", "code_u")
    ERRORS = by_deviation("dg", "du", "h")

    activation: Gate
    code_g: CodedFit
    code_u: CodedFit | None

    def __post_init__(self) -> None:
        super().__post_init__()
        for what, part, factor in zip(
            self.PARTS,
            (self.code_g, self.code_u),
            (self.activation.a, self.activation.b),
            strict=True,
        ):
            if part is None:
                continue
            if part.name != self.name:
                raise UsageError(
                    f"{what}.name: expected {quote(self.name)}, as the gate's, got {quote(part.name)}"
                )
            if part.activation != factor:
                raise UsageError(
                    f"{what}.activation: expected the factor {quote(factor.expression)} of {self.activation}, got "
                    f"{quote(part.activation.expression)}"
                )
        if self.code_u is not None and self.code_u.bits not in BITS_U:
            raise UsageError(f"code_u.bits: expected {' or '.join(map(str, BITS_U))}, got {self.code_u.bits}")
        found = combined(self.code_g, self.code_u)
        for name in self.ERRORS:
            if self.error[name] != found[name]:
                raise UsageError(
                    f"error.{name}: expected what its parts' errors give, {found[name]!r}, "
                    f"got {self.error[name]!r}"
                )

    @property
    def bits(self) -> int:
        """Bits of a code of g."""
        return self.code_g.bits


def combined(a: CodedFit, b: CodedFit | None) -> dict[str, float]:
    """Return the errors of a coded gate from those of its parts, see `CodedGateFit`."""
    sources = {"dg": ("derivative", "value"), "du": ("value", "derivative"), "h": ("value", "value")}
    return {
        f"{what}_{deviation:g}": math.hypot(
            a.error[f"{of_a}_{deviation:g}"], 0.0 if b is None else b.error[f"{of_b}_{deviation:g}"]
        )
        for what, (of_a, of_b) in sources.items()
        for deviation in DEVIATIONS
    }
