"""The command `fitact show`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from fitact.base import UsageError

from .names import check_function, known_functions
from .options import completing, read_fits, say


@click.command()
@click.argument("things", nargs=-1, metavar="[ACTIVATION | FITS...]", shell_complete=completing(known_functions))
def show(things: Sequence[str]) -> None:
    """Show the catalog, an activation, or fits side by side.

    Without arguments, show the catalog. ACTIVATION is a name of the catalog, such as one with learned parameters,
    an expression in x, or a gate, whose factors are shown. FITS are fit files; their names end in .json.

    \b
    Examples:
      fitact show
      fitact show hardtanh
      fitact show "x*tanh(exp(x))"
      fitact show "silu(g)*u"
      fitact show generated/fits/gelu_fewbit2.json generated/fits/gelu_fewbit3.json
    """
    from fitact.fitter.catalog import LEARNED, is_gate

    fits = bool(things) and all(thing.endswith(".json") for thing in things)
    if not fits and len(things) > 1:
        raise UsageError("show takes one activation, or fit files whose names end in .json")
    read = read_fits([Path(thing) for thing in things]) if fits else []
    for thing in () if fits else things:
        check_function("formulas" if thing in LEARNED else "gates" if is_gate(thing) else "activations", thing)

    from fitact.fitter.analysis import Activation, Gate, Learned

    from . import tables

    if not things:
        lines = tables.catalog()
    elif fits:
        lines = tables.fits(read)
    elif things[0] in LEARNED:
        lines = tables.learned(Learned.of(things[0], {}))
    elif is_gate(things[0]):
        lines = tables.gate(Gate.of(things[0]))
    else:
        lines = tables.activation(Activation.of(things[0]))
    say("\n".join(lines))
