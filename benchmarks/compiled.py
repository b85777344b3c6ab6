"""What codes under the compiler save and cost, beside the compiler alone and beside its own pass to float8.

    python -m benchmarks.compiled [-o RESULTS.json] [--times] [MODEL ...]

Two blocks of an MLP and small models of transformers and timm, two layers each, of width 256, without dropout, in
bfloat16. Each is compiled with a memory budget of 0.9: as it is, with each class of errors, with codes of 8 and
of 6 bits for all kinds of tensors, and with PyTorch's pass `activation_quantization_aten_pass`, which stores
tensors in float8, with a scale. No kernels are made: PyTorch runs the compiler's graphs operator by operator.
Counted are the bytes that the forward graph hands to the backward graph, without parameters and inputs, a token a
layer. The gradient of all parameters is compared with the one that the compiler alone computes. Errors are null
where a gradient is not finite.

With `--times` some models are compiled to the end, in float32, where codes cost most beside products. Then the
kernels that the compiler generates are counted, and steps are timed on one thread, in turns: a time is the least
of all rounds, and the thread's own time counts. Models that are named replace their part of the results.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from fitact.runtime.measure import count_saved, imported
from fitact.runtime.torch_internals import storage_id

TOKENS, WIDTH, LAYERS, BUDGET = 512, 256, 2, 0.9
TIMED = ("SwiGLU MLP", "gpt2", "llama")
RESULTS = Path(__file__).parent / "results" / "compiled.json"
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


def ways() -> dict[str, dict[str, Any]]:
    """Return the options of the compiler by name of what is compared; the compiler alone first."""
    return {
        "compiler alone": {},
        **{error: dict(fitact.compile_options(error=error, budget=BUDGET)) for error in ("rounding", "coarse")},
        **{f"{bits} bits": dict(fitact.compile_options(bits=bits, budget=BUDGET)) for bits in (8, 6)},
        "float8": {"post_grad_fusion_options": FLOAT8},
    }


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Run forward and backward, and return the gradients in float32."""
    model.zero_grad()
    call(x).backward(dy)
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def whole(gradient: dict[str, Tensor]) -> Tensor:
    """Return all gradients as one."""
    return torch.cat([part.flatten() for part in gradient.values()])


def written(number: float) -> float | None:
    """Return an error as the record has it; None if it is not finite."""
    return round(number, 5) if math.isfinite(number) else None


def run_graphs(model: nn.Module, options: dict[str, Any], budget: float) -> Callable[..., Any]:
    """Compile up to kernels, and let PyTorch run the graphs that these would be made of.

    Args:
        model: what is compiled.
        options: of the compiler.
        budget: how much it may save, unless the options say so.

    """

    def partition(joint: Any, inputs: Any, **more: Any) -> Any:
        with torch._inductor.config.patch(options), torch._functorch.config.patch(activation_memory_budget=budget):
            return compile_fx.partition_fn(joint, inputs, **more)

    table = select_decomp_table()
    backend = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=partition, decompositions=table)
    compiled: Callable[..., Any] = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    return compiled


def compare(name: str) -> Iterator[dict[str, Any]]:
    """Yield what each way to compile a model saves, and how far the whole gradient is off."""
    make, tokens = MODELS[name]
    torch.manual_seed(0)
    model, x = make()
    model.to(torch.bfloat16)
    x = x.bfloat16() if x.is_floating_point() else x
    dy = torch.randn_like(model(x))
    plain: Tensor | None = None
    for variant, options in ways().items():
        torch.compiler.reset()
        call = run_graphs(model, options, BUDGET)
        gradient = whole(gradients(model, call, x, dy))
        plain = gradient if plain is None else plain
        with count_saved(model) as saved:
            saved.owned.add(storage_id(x))
            y = call(x)
        del y
        off = written(float((gradient - plain).norm() / plain.norm()))
        yield {"model": name, "way": variant, "bytes": round(saved.bytes / tokens / LAYERS), "whole": off}


def timed(name: str) -> dict[str, dict[str, float]]:
    """Return the kernels of each way, and the time of its step beside that of the compiler alone."""
    torch.manual_seed(0)
    model, x = MODELS[name][0]()
    dy = torch.randn_like(model(x))
    steps, kernels = {}, {}
    torch.compiler.reset()
    functorch, inductor = torch._functorch.config, torch._inductor.config
    with (
        functorch.patch(activation_memory_budget=BUDGET, enable_autograd_cache=False),
        inductor.patch(fx_graph_cache=False),
    ):
        for variant, options in ways().items():
            if "bits" in variant:
                continue
            metrics.reset()
            call = torch.compile(model, fullgraph=True, dynamic=False, options=options)
            steps[variant] = partial(_run, partial(gradients, model, call, x, dy))
            steps[variant]()
            kernels[variant] = metrics.generated_kernel_count
    times = measured(steps)
    first = times["compiler alone"]
    return {variant: {"kernels": kernels[variant], "time": round(times[variant] / first, 3)} for variant in steps}


def _run(step: Callable[[], Any]) -> None:
    step()


NAMES = {"gpt2": "GPT-2", "bert": "BERT", "llama": "LLaMA", "vit": "ViT"}


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the documents' table."""
    lines = ["| | | bytes | error |", "|---|---|---:|---:|"]
    for row in rows:
        name = NAMES.get(row["model"], row["model"]) if row["way"] == "compiler alone" else ""
        off = "NaN" if row["whole"] is None else f"{100 * row['whole']:.2g} %" if row["whole"] else ""
        lines.append(f"| {name} | {row['way']} | {row['bytes']:,} | {off} |".replace("  ", " "))
    return lines


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--times", action="store_true", help=f"also time steps of {', '.join(TIMED)}")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if unknown := {*arguments.models} - MODELS.keys():
        parser.error(f"{', '.join(unknown)}: expected {', '.join(MODELS)}")
    keep_freed_memory()
    torch.set_num_threads(1)
    record = {
        "machine": f"{platform.machine()}, {platform.system()}",
        "threads": 1,
        "torch": torch.__version__,
        "transformers": imported("transformers").__version__,
        "timm": imported("timm").__version__,
        "date": date.today().isoformat(),
    }
    path = arguments.output
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for name in arguments.models or MODELS:
        rows = [row for row in rows if row["model"] != name] + list(compare(name))
        times = timed(name) if arguments.times and name in TIMED else {}
        for row in rows:
            if row["model"] == name:
                row.update(times.get(row["way"], {}))
                print(row, flush=True)
        rows.sort(key=lambda row: [*MODELS].index(row["model"]))
        path.write_text(json.dumps(record | {"rows": rows}, indent=1) + "\n")
    print("\n".join(table(rows)))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
