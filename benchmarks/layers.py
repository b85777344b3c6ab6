"""Bytes that a layer of a transformer saves for a token, with each way to save less.

    python -m benchmarks.layers [-o RESULTS.json]

Layers of transformers, with the ratios of sizes that the published models have, narrower, in bfloat16, with
attention that is fused, and a GPU's masks of dropout. A layer is the difference between models of two layers and
of one. What is saved is counted in numbers of two bytes for each of the hidden state's, so the width drops out,
except for statistics of a few bytes a token.

- baseline, exact, rounding, coarse: the models as they are, and in `fitact.saving` with each error; also where
  backward runs attention once more.
- selective checkpointing: PyTorch's, which saves the results of matrix products and of attention.
- compiler: the graphs of PyTorch's partitioner with activation memory budgets of 1 and 0.7, where everything is
  trained. With 0.7 it may compute matrix products again: `again` says by how much the FLOPs grow.
- Liger, unsloth: by count, for the layers of LLaMA, that they are made for. Their autograd functions, as
  published, give to `save_for_backward`: Liger's norm its input and a number a row, its gate both factors; layers
  that follow save their inputs. unsloth's norm saves the same; its q, k, v together their input, its o its input,
  and its gated MLP its input and both factors; it has no dropout. Rotated q and k replace q and k in both.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fitact
from fitact.runtime.choose import SELECTIVE, changed, compiled
from fitact.runtime.measure import Saved, blocks_of, count_saved, from_callable, gpu_kernels, imported, prepare
from fitact.runtime.saving import ERRORS

RESULTS = Path(__file__).parent / "results" / "layers.json"
BATCH, SEQ = 8, 256
BUDGETS = (1.0, 0.7)
RANK, DROPOUT = 8, 0.1
# Type of the configuration, name of the width, sizes of one layer.
LAYERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT": ("bert", "hidden_size", {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}),
    "GPT-2": ("gpt2", "n_embd", {"n_embd": 256, "n_head": 4}),
    "ViT-B": ("vit", "hidden_size", {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}),
    "LLaMA-7B": (
        "llama",
        "hidden_size",
        {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 4, "num_key_value_heads": 4},
    ),
    "Qwen-MoE": (
        "qwen2_moe",
        "hidden_size",
        {
            "hidden_size": 256,
            "intermediate_size": 704,
            "moe_intermediate_size": 176,
            "shared_expert_intermediate_size": 704,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_experts": 8,
            "num_experts_per_tok": 4,
        },
    ),
    "T5, gated": (
        "t5",
        "d_model",
        {"d_model": 256, "d_ff": 683, "d_kv": 64, "num_heads": 4, "feed_forward_proj": "gated-gelu"},
    ),
}
UNTRACED = ("Qwen-MoE",)  # what goes to each expert depends on numbers
Around = Callable[[nn.Module, Saved], AbstractContextManager[Any]]
TRAININGS = ("everything", "LoRA", "LoRA, dropout")


def model_of(name: str, training: str, layers: int) -> nn.Module:
    """Return a model in training mode, in bfloat16; its own dropout is that of the published one."""
    transformers = imported("transformers")
    kind, _, sizes = LAYERS[name]
    count = {"gpt2": "n_layer", "t5": "num_layers"}.get(kind, "num_hidden_layers")
    config = transformers.AutoConfig.for_model(kind, **sizes, **{count: layers})
    config.use_cache = False
    torch.manual_seed(0)
    make = transformers.T5EncoderModel if kind == "t5" else transformers.AutoModel.from_config
    model: nn.Module = make(config).to(torch.bfloat16)
    if training != "everything":
        peft = imported("peft")
        p = DROPOUT if "dropout" in training else 0.0
        adapters = peft.LoraConfig(r=RANK, target_modules="all-linear", lora_dropout=p, init_lora_weights=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of GPT-2's layers, whose weights are transposed
            model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
    return model.train()


def inputs_of(name: str) -> dict[str, Tensor]:
    """Return inputs, of which the gradient is taken too."""
    kind, width, sizes = LAYERS[name]
    if kind == "vit":
        return {"pixel_values": torch.randn(BATCH, 3, 224, 224).to(torch.bfloat16).requires_grad_()}
    x = torch.randn(BATCH, SEQ, sizes[width]).to(torch.bfloat16)
    return {"inputs_embeds": x.requires_grad_()}


def tokens(name: str) -> int:
    """Return for how many tokens a layer saves what it saves."""
    return BATCH * (197 if LAYERS[name][0] == "vit" else SEQ)


def bytes_saved(name: str, training: str, layers: int, around: Around) -> int:
    """Return the bytes that a model saves in a context."""
    model, inputs = model_of(name, training, layers), inputs_of(name)
    with gpu_kernels(), count_saved(model) as saved, around(model, saved):
        y = model(**inputs)
    del y
    return saved.bytes


def selective(model: nn.Module, saved: Saved) -> AbstractContextManager[Any]:
    """Return a context in which each block is checkpointed, and saves the results of its products."""
    blocks = [block for _, block in blocks_of(model)]
    return changed(blocks, [SELECTIVE] * len(blocks))


def saving(error: str, again: bool = False) -> Around:
    """Return what enters `fitact.saving`."""
    return lambda model, saved: fitact.saving(error, recompute_attention=again)


def traced(name: str, layers: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes that the compiler saves under each budget, and the FLOPs of both passes."""

    def example(batch: int, seq: int) -> tuple[nn.Module, dict[str, Tensor]]:
        return model_of(name, TRAININGS[0], layers), inputs_of(name)

    subject = prepare(from_callable(example), batch=BATCH, seq=SEQ)
    measured = compiled(subject, BUDGETS)
    names = [f"compiler, {budget:g}" for budget in BUDGETS]
    return dict(zip(names, (each.saved.bytes for each in measured), strict=True)), dict(
        zip(names, (each.flops for each in measured), strict=True)
    )


def counted(name: str, training: str) -> dict[str, float]:
    """Return what others' layers save by count, in numbers of the hidden state's."""
    if name != "LLaMA-7B" or "dropout" in training:
        return {}
    _, width, sizes = LAYERS[name]
    wide = sizes["intermediate_size"] / sizes[width]
    norms, attention, factors = 2.0, 4.0, 2 * wide  # inputs of both; q, k, v and what attention returns
    ranks = 7 * RANK / sizes[width] if training == "LoRA" else 0.0  # what seven adapters have between their layers
    tools = {"Liger": norms + 2.0 + attention + factors + wide + ranks}  # the norms' outputs; the gate's
    if training == "LoRA":
        tools["unsloth"] = norms + 2.0 + attention + factors  # what is between adapters' layers is recomputed
    return tools


WAYS: dict[str, Around] = {
    "baseline": lambda model, saved: nullcontext(),
    "selective checkpointing": selective,
    **{error: saving(error) for error in ERRORS},
    **{f"{error}, attention recomputed": saving(error, again=True) for error in ERRORS},
}


def row(name: str, training: str) -> dict[str, Any]:
    """Measure one layer in one kind of training."""
    _, width, sizes = LAYERS[name]
    numbers = tokens(name) * sizes[width] * 2
    saved: dict[str, float] = {}
    for variant, around in WAYS.items():
        single, two = (bytes_saved(name, training, layers, around) for layers in (1, 2))
        saved[variant] = round((two - single) / numbers, 3)
    again: dict[str, float] = {}
    if training == TRAININGS[0] and name not in UNTRACED:
        (first, _), (both, flops) = traced(name, 1), traced(name, 2)
        whole = f"compiler, {BUDGETS[0]:g}"
        rest = 2 * first[whole] - both[whole]  # of what is no layer; a smaller budget is for the model as a whole
        saved |= {key: round((both[key] - rest) / 2 / numbers, 3) for key in both}
        least = min(flops.values())
        again = {key: round(of / least - 1, 3) for key, of in flops.items() if of > least}
    saved |= {key: round(value, 3) for key, value in counted(name, training).items()}
    return {"layer": name, "training": training, "saved": saved, "again": again}


OTHERS = "baseline", "selective checkpointing", "compiler, 1", "compiler, 0.7", "Liger", "unsloth"
COLUMNS = (*OTHERS, *ERRORS)


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the documents' table."""
    lines = [f"| {' | '.join(('layer', 'trained', *COLUMNS))} |", f"|---|---|{'---:|' * len(COLUMNS)}"]
    for row in rows:
        numbers = [f"{row['saved'][key]:.1f}" if key in row["saved"] else "" for key in COLUMNS]
        numbers[COLUMNS.index("exact")] = f"**{numbers[COLUMNS.index('exact')]}**"
        lines.append(f"| {' | '.join((row['layer'], row['training'], *numbers))} |".replace("  ", " "))
    return lines


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    record = {
        "torch": torch.__version__,
        "transformers": imported("transformers").__version__,
        "batch": BATCH,
        "tokens": SEQ,
        "rank": RANK,
        "rows": rows,
    }
    for name in LAYERS:
        for training in TRAININGS:
            rows.append(row(name, training))
            print(rows[-1], flush=True)
            arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print("\n".join(table(rows)))
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
