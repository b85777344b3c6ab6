"""The command line: `calibrate`, `fit`, `codegen`, `plot`, `show`, `memory`, `plan`.

Errors are one line on standard error: status 2 for wrong use, 1 for a job that failed. Commands import what they
need only when they run, so `--help` is instant.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from fitact.base import FitactError, reason

from . import calibrate, codegen, fit, memory, plan, plot, show
from .options import say


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
    epilog="Start with:  fitact fit --fn gelu --bits 3,  or  fitact memory --hf gpt2",
)
@click.version_option(package_name="fitact", message="%(prog)s %(version)s")
def cli() -> None:
    """Train PyTorch models in less memory: measure and plan them, fit and generate activations."""


for _command in (calibrate.calibrate, codegen.codegen, fit.fit, memory.memory, plan.plan, plot.plot, show.show):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    try:
        return cli.main(arguments, prog_name="fitact", standalone_mode=False) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        say(error.format_message())
        return 0
    except click.ClickException as error:
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "fitact"
        return _fail(f"{error.format_message()} (see {command} --help)", 2)
    except click.Abort:
        return _fail("interrupted", 130)  # 128 and the signal's number
    except FitactError as error:
        return _fail(str(error), error.exit_status)
    except OSError as error:
        return _fail(f"{error.filename or 'output'}: {reason(error)}", 1)


def _fail(message: str, status: int) -> int:
    say("fitact: " + " ".join(message.split()), err=True)
    return status
