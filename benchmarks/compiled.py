"""What codes under the compiler save and cost, beside the compiler alone and beside its own pass to float8.

    python -m benchmarks.compiled [-o RESULTS.json] [--graphs] [--budget B ...] [MODEL ...]

Two blocks of an MLP and small models of transformers and timm, two layers each, of width 256, in bfloat16, without
dropout. Each is compiled at several memory budgets: as it is, with codes of 8 and 4 bits, with codes of 8 and 6
bits also of the tensors of attention and of inputs ("all"), and with PyTorch's pass
`activation_quantization_aten_pass`, which keeps all these in float8, with a scale. Counted are the bytes that the
compiled function keeps for backward, without parameters and inputs, a token a layer, and the kernels that the
compiler generates. Gradients are compared with those that the compiler alone computes at the same budget, and
these with float32. Parameters whose gradients are more than half rounding are left out of the largest error.
Errors are null where a gradient is not finite.

At the default budget all are timed on a CPU, in turns: a time is the least of all rounds. There is one thread, and
its own time counts. Models and budgets that are named replace their part of the results.

With `--graphs` no kernels are made: PyTorch runs the compiler's graphs operator by operator. This gives bytes and
errors in a fraction of the time. What keeps codes of everything is compared with float8 then, for whole models.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop
from torch._inductor import compile_fx, metrics
from torch._inductor.decomposition import select_decomp_table

import fitact
from benchmarks.kernels.activations import keep_freed_memory
from benchmarks.saving import measured
from fitact.runtime.measure.prepare import imported
from fitact.runtime.measure.saved import count_saved
from fitact.runtime.torch_internals import storage_id

TOKENS, WIDTH, LAYERS = 512, 256, 2
BUDGETS = (0.9, 1.0, 0.7)
TIMED = 0.9
NOISE = 0.5  # a gradient that rounding changes by more says nothing
ALL = {"attention": True, "inputs": True}  # what float8 takes too
FLOAT8 = {
    "activation_quantization_aten_pass": {
        "use_scaling": True,
        "size_in_mb": 0.0,
        "allowed_dtypes": "torch.bfloat16",
        "quant_type": "torch.float8_e4m3fn",
    }
}
Made = tuple[nn.Module, Tensor]


class GeluBlock(nn.Module):
    """x + Linear(GELU(Linear(LayerNorm(x))))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class SwigluBlock(nn.Module):
    """x + down(silu(gate(n)) * up(n)) of n = RMSNorm(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 704, bias=False) for _ in range(2))
        self.down = nn.Linear(704, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        n = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(n)) * self.up(n))


class LastHidden(nn.Module):
    """A model of transformers, of which the last hidden state is returned."""

    def __init__(self, kind: str, sizes: dict[str, Any]) -> None:
        super().__init__()
        transformers = imported("transformers")
        config = transformers.AutoConfig.for_model(kind, vocab_size=1000, **sizes)
        config.use_cache = False
        self.model = transformers.AutoModel.from_config(config, attn_implementation="sdpa")

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the last hidden state."""
        state: Tensor = self.model(input_ids=tokens).last_hidden_state
        return state


COMMON = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_hidden_layers": LAYERS}
OFF = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": WIDTH, "n_head": 4, "n_layer": LAYERS}
    | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    "bert": COMMON | OFF | {"intermediate_size": 4 * WIDTH},
    "llama": COMMON | {"intermediate_size": 704},
}


def blocks(kind: type[nn.Module]) -> Made:
    """Return two blocks in a row, and their input."""
    return nn.Sequential(*(kind() for _ in range(LAYERS))), torch.randn(TOKENS, WIDTH)


def transformer(kind: str) -> Made:
    """Return a model of transformers, and tokens."""
    return LastHidden(kind, KINDS[kind]), torch.randint(0, 1000, (1, TOKENS))


def vit() -> Made:
    """Return a model of timm, and images."""
    model = imported("timm").models.VisionTransformer(
        img_size=224, patch_size=16, embed_dim=WIDTH, depth=LAYERS, num_heads=4, num_classes=10
    )
    return model, torch.randn(2, 3, 224, 224)


MODELS: dict[str, tuple[Callable[[], Made], int]] = {  # and how many tokens
    "GELU MLP": (partial(blocks, GeluBlock), TOKENS),
    "SwiGLU MLP": (partial(blocks, SwigluBlock), TOKENS),
    **{name: (partial(transformer, name), TOKENS) for name in KINDS},
    "vit": (vit, 2 * 197),
}


WHOLE = (*KINDS, "vit")


def ways(budget: float) -> dict[str, dict[str, Any]]:
    """Return the options of the compiler by name of what is compared; the compiler alone first."""
    return {
        "plain": {},
        "codes, 8 bits": dict(fitact.compile_options(budget=budget)),
        "codes, 4 bits": dict(fitact.compile_options(error="coarse", budget=budget)),
        "all, 8 bits": dict(fitact.compile_options(budget=budget, **ALL)),
        "all, 6 bits": dict(fitact.compile_options(error="coarse", bits=6, budget=budget, **ALL)),
        "float8": {"post_grad_fusion_options": FLOAT8},
    }


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Run forward and backward, and return the gradients in float32."""
    model.zero_grad()
    call(x).backward(dy)
    return {name: one.grad.float() for name, one in model.named_parameters() if one.grad is not None}


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative error of each gradient."""
    return {name: float((found[name] - one).norm() / one.norm()) for name, one in wanted.items()}


def whole(gradient: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return all gradients as one."""
    return {"": torch.cat([one.flatten() for one in gradient.values()])}


def written(number: float) -> float | None:
    """Return an error as the record has it; None if it is not finite."""
    return round(number, 5) if math.isfinite(number) else None


def run_graphs(model: nn.Module, options: dict[str, Any], budget: float) -> Callable[..., Any]:
    """Compile up to kernels, and let PyTorch run the graphs that these would be made of.

    Args:
        model: what is compiled.
        options: of the compiler.
        budget: how much it may keep, unless the options say so.

    """

    def partition(joint: Any, inputs: Any, **more: Any) -> Any:
        with torch._inductor.config.patch(options), torch._functorch.config.patch(activation_memory_budget=budget):
            return compile_fx.partition_fn(joint, inputs, **more)

    table = select_decomp_table()
    backend = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=partition, decompositions=table)
    compiled: Callable[..., Any] = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    return compiled


def compare(name: str, budget: float, graphs: bool) -> Iterator[dict[str, Any]]:
    """Yield what is found for each way to compile a model at a budget."""
    make, tokens = MODELS[name]
    torch.manual_seed(0)
    wide, x = make()
    model = deepcopy(wide).to(torch.bfloat16)
    narrow = x.bfloat16() if x.is_floating_point() else x
    dy = torch.randn_like(wide(x))
    exact = gradients(wide, wide, x, dy)
    calls, rows, plain = {}, {}, exact
    torch.compiler.reset()
    with ExitStack() as stack:
        stack.enter_context(
            torch._functorch.config.patch(activation_memory_budget=budget, enable_autograd_cache=False)
        )
        stack.enter_context(torch._inductor.config.patch(fx_graph_cache=False))
        for way, options in ways(budget).items():
            if graphs and way.startswith("codes"):
                continue
            metrics.reset()
            call: Any
            if graphs:
                torch.compiler.reset()
                call = run_graphs(model, options, budget)
            else:
                call = torch.compile(model, fullgraph=True, dynamic=False, options=options)
            found = gradients(model, call, narrow, dy.bfloat16())
            kernels = metrics.generated_kernel_count
            with count_saved(model) as saved:
                saved.owned.add(storage_id(narrow))
                y = call(narrow)
            del y
            errors = error(found, plain)
            if way == "plain":
                plain, kept = found, {one for one, value in errors.items() if value < NOISE}
            calls[way] = call
            counted = {} if graphs else {"kernels": kernels}
            rows[way] = {
                "model": name,
                "budget": budget,
                "way": way,
                "bytes": round(saved.bytes / tokens / LAYERS),
                **counted,
                "largest": written(float(torch.tensor([errors[one] for one in kept]).max())),
                "whole": written(error(whole(found), whole(exact if way == "plain" else plain))[""]),
            }
        if budget == TIMED and not graphs:
            steps = {way: partial(gradients, model, call, narrow, dy.bfloat16()) for way, call in calls.items()}
            times = measured({way: partial(_run, one) for way, one in steps.items()})
            for way, seconds in times.items():
                rows[way]["time"] = round(seconds / times["plain"], 3)
    yield from rows.values()


def _run(step: Callable[[], Any]) -> None:
    step()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--budget", dest="budgets", action="append", type=float, choices=BUDGETS)
    parser.add_argument("--graphs", action="store_true", help="make no kernels; bytes and errors of whole models")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if unknown := {*arguments.models} - MODELS.keys():
        parser.error(f"{', '.join(unknown)}: expected {', '.join(MODELS)}")
    keep_freed_memory()
    torch.set_num_threads(1)
    given = "graphs" if arguments.graphs else "cpu"
    path = arguments.output or Path(__file__).parent / "results" / f"compiled_{given}.json"
    record = {
        "machine": f"{platform.machine()}, {platform.system()}",
        "threads": 1,
        "torch": torch.__version__,
        "transformers": imported("transformers").__version__,
        "timm": imported("timm").__version__,
        "date": date.today().isoformat(),
    }
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    order = {model: i for i, model in enumerate(MODELS)}
    for budget in arguments.budgets or BUDGETS:
        for name in arguments.models or (WHOLE if arguments.graphs else MODELS):
            rows = [row for row in rows if (row["model"], row["budget"]) != (name, budget)]
            for row in compare(name, budget, arguments.graphs):
                rows.append(row)
                print(row, flush=True)
            rows.sort(key=lambda row: (order[row["model"]], -row["budget"]))
            path.write_text(json.dumps(record | {"rows": rows}, indent=2) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
