"""The command `fitact memory`."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fitact.base import UsageError, quote

from .names import WORD, check_layers, check_model, check_place, check_timm, installed, model_types, timm_models
from .options import completing, finish, named, once, progress, writing

if TYPE_CHECKING:
    from fitact.runtime.measure import Source, Training


@dataclass(frozen=True)
class Asked:
    """What the options of a model say: which one, its inputs, and how it is trained."""

    call: str | None
    hf: str | None
    timm: str | None
    sizes: Sequence[str]
    head: str | None
    attention: str | None
    image: int | None
    batch: int
    seq: int
    dtype: str | None
    autocast: str | None
    lora: str | None
    rank: int
    freeze: Sequence[str]
    optimizer: str

    @cached_property
    def source(self) -> Source:
        """The source of the model, after `check`."""
        from fitact.runtime.measure import from_callable, hugging_face, timm_model

        if self.hf is not None:
            return hugging_face(self.hf, self.given, head=self.head, attention=self.attention, image=self.image)
        return from_callable(self.call or "") if self.timm is None else timm_model(self.timm, image=self.image)

    @cached_property
    def given(self) -> dict[str, Any]:
        """The sizes of a model of transformers that --set gives."""
        return named("--set", map(_size, self.sizes))

    def check(self) -> None:
        """Raise UsageError if an option is surely wrong: all that can be known without PyTorch."""
        if sum(given is not None for given in (self.call, self.hf, self.timm)) != 1:
            command = click.get_current_context().info_name
            raise UsageError(f"{command} takes one model: MODULE:CALLABLE, --hf TYPE or --timm NAME")
        foreign = {"--set": self.sizes or None, "--head": self.head, "--attention": self.attention}
        for option, given in foreign.items():
            if given is not None and self.hf is None:
                raise UsageError(f"{option} is for --hf")
        if self.image is not None and self.call is not None:
            raise UsageError(f"--image is for --hf and --timm: {self.call} makes its own inputs")
        if self.hf is not None:
            check_model(self.hf, self.given)
        elif self.timm is not None:
            check_timm(self.timm)
        else:
            check_place(self.call or "")
        if self.lora is not None:
            if not self.layers:
                raise UsageError("--lora: expected names of linear layers, or all")
            installed("peft")
            if self.hf is not None and self.layers != ("all",):
                check_layers(self.hf, self.layers)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers that get adapters."""
        return tuple(name.strip() for name in (self.lora or "").split(",") if name.strip())

    @property
    def training(self) -> Training:
        """What is trained."""
        from fitact.runtime.measure import Training

        return Training(self.layers, self.rank, tuple(self.freeze))


def of_a_model(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a model, which it gets as an `Asked`, its first argument."""

    @click.argument("call", required=False, metavar="[MODULE:CALLABLE]")
    @click.option(
        "--hf",
        metavar="TYPE",
        shell_complete=completing(model_types),
        help="Model type of transformers, e.g. llama, bert, vit; random weights.",
    )
    @click.option(
        "--timm",
        metavar="NAME",
        shell_complete=completing(timm_models),
        help="Model of timm, e.g. efficientnet_b0; random weights.",
    )
    @click.option(
        "--set",
        "sizes",
        multiple=True,
        metavar="K=V",
        help="A size of the --hf model, e.g. num_hidden_layers=24. Repeatable.",
    )
    @click.option(
        "--head",
        type=click.Choice(["none", "causal-lm", "masked-lm", "sequence", "image"]),
        help="Head of the --hf model, with its loss.  [default: by the model]",
    )
    @click.option(
        "--attention",
        type=click.Choice(["sdpa", "eager"]),
        help="Attention of the --hf model: fused (sdpa), or composed of operations (eager).  [default: sdpa]",
    )
    @click.option("--image", type=click.IntRange(1), metavar="N", help="Height and width of images, in pixels.")
    @click.option("--batch", type=click.IntRange(1), default=1, metavar="N")
    @click.option("--seq", type=click.IntRange(1), default=512, metavar="N", help="Tokens per row.")
    @click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16", "float16"]),
        help="Dtype of parameters and inputs.  [default: bfloat16; with --autocast, float32]",
    )
    @click.option("--autocast", type=click.Choice(["bfloat16", "float16"]), help="Dtype that autocast casts to.")
    @click.option(
        "--lora",
        metavar="NAMES",
        help="Train only adapters, on the linear layers with these names, e.g. q_proj,v_proj; with 'all', on "
        "those of all blocks.",
    )
    @click.option("--rank", type=click.IntRange(1), default=8, metavar="R", help="Rank of the adapters.")
    @click.option(
        "--freeze",
        multiple=True,
        metavar="PATTERN",
        help="Parameters not to train, e.g. 'embeddings.*'. Repeatable.",
    )
    @click.option(
        "--optimizer",
        type=click.Choice(["adamw", "sgd", "none"]),
        default="adamw",
        help="Optimizer whose state must fit too; sgd has momentum.",
    )
    @wraps(command)
    def with_options(**options: Any) -> None:
        command(Asked(**{option.name: options.pop(option.name) for option in fields(Asked)}), **options)

    return with_options


def _refuse(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value is not None:
        raise click.UsageError("--json is now -o, as in all commands", ctx)


@click.command()
@of_a_model
@click.option(
    "--bits",
    type=click.IntRange(1, 4),
    multiple=True,
    default=(3,),
    metavar="K",
    help="Bits of fewbit. Repeatable.",
)
@click.option(
    "--budget",
    "budgets",
    type=click.FloatRange(0, 1),
    multiple=True,
    default=(1.0, 0.9, 0.7),
    metavar="B",
    help="The compiler's activation_memory_budget; 0.9 also in codes, and in float8. Repeatable.",
)
@click.option("--no-compiler", is_flag=True, help="Leave out the compiler, which takes most of the time.")
@click.option("--bytes", "exact", is_flag=True, help="Print bytes, not MiB.")
@click.option("--json", hidden=True, expose_value=False, callback=_refuse)
@writing("all numbers", "a bar chart")
def memory(
    asked: Asked,
    bits: Sequence[int],
    budgets: Sequence[float],
    no_compiler: bool,
    exact: bool,
    output: Path | None,
    picture: Path | None,
) -> None:
    """Measure what a model saves for backward, with each method.

    The model and its inputs are built without memory, and nothing is downloaded. MODULE:CALLABLE is a function of
    yours that returns a model and its inputs; it may take batch and seq.

    \b
    Examples:
      fitact memory --hf llama --seq 2048 --lora q_proj,v_proj
      fitact memory --hf bert --set num_hidden_layers=24 --batch 32 --plot bert.png
      fitact memory --timm convnext_atto --batch 64
      fitact memory my_models:tiny --batch 8 -o tiny.json
    """
    asked.check()
    from fitact.runtime.choose import lines, measure

    source = asked.source
    with progress(1, "measuring") as advance:
        report = measure(
            source,
            training=asked.training,
            batch=asked.batch,
            seq=asked.seq,
            dtype=asked.dtype,
            autocast=asked.autocast,
            bits=once(bits),
            budgets=() if no_compiler else once(budgets),
            optimizer=asked.optimizer,
            progress=advance,
        )
    finish(report, "\n".join(lines(report, exact=exact)), output, picture)


def _size(text: str) -> tuple[str, Any]:
    name, mark, value = text.partition("=")
    if not name or not mark:
        raise UsageError(f"--set {quote(text)}: expected NAME=VALUE")
    try:
        return name, literal_eval(value)
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError):
        if not WORD.fullmatch(value):
            raise UsageError(f"--set {quote(text)}: expected a word or a literal of Python") from None
        return name, value
