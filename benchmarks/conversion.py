"""What the papers' methods and fitact.saving save, beside what the papers report: a table, and its numbers.

Counted on fake tensors, in the settings of the papers' own scripts as far as they are known: no GPU, some minutes
on two cores. Norms are merged as the paper does it; in `fitact.saving` they stay as they are. `saved` is what
autograd saves for backward. `whole` is there where the published share is one of a
GPU's peak: the tracked peak of a training step with the optimizer's state (ViT), or what is saved and what QLoRA
holds beside it (LLaMA). Nothing that is written depends on the machine. Run it as python -m benchmarks.conversion.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # some virtual machines announce AMX, then trap

import torch
from torch import nn

from fitact.runtime.choose import Policy, changed
from fitact.runtime.measure import (
    Example,
    Source,
    Subject,
    Training,
    count_saved,
    gpu_kernels,
    hugging_face,
    prepare,
)
from fitact.runtime.norms import merge_norm
from fitact.runtime.saving import ERRORS, attaching, saving
from tests.support.peak import peak_memory

RESULTS = Path(__file__).parent / "results" / "conversion.json"
OPTIMIZER = 2  # AdamW's tensors of a parameter's size
# A weight in NF4, doubly quantised: a constant of 8 bits for 64 weights, and one of 32 bits for 256 of those.
NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
LLAMA_LAYERS = 32
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VIT_LORA = Training(lora=("all",), rank=4)
NORMS = {"vit": "MS-LN", "llama": "MS-RMSNorm"}
STEPS = {  # what the replaced activations are called
    "vit": {("relumix", 2): "ReGELU2", ("fewbit", 3): "Few-Bit (3 bits)"},
    "llama": {("relumix", 2): "ReSiLU2", ("fewbit", 3): "Few-Bit (3 bits)"},
}
# Changes in per cent, as the papers and the README of the package of Inverted print them.
VIT_PUBLISHED = {
    ("LoRA", "ReGELU2"): -15.0,
    ("LoRA", "MS-LN"): -16.0,
    ("LoRA", "ReGELU2 and MS-LN"): -30.0,
    ("full tuning", "ReGELU2 and MS-LN"): -27.0,
}
LLAMA_PUBLISHED = {"ReSiLU2": -8.0, "MS-RMSNorm": -12.0, "ReSiLU2 and MS-RMSNorm": -29.0}
BERT_PUBLISHED, MISTRAL_PUBLISHED = -23.1, -15.7


@dataclass(frozen=True)
class Row:
    """One conversion of one model, and the published change; changes are shares of the baseline, in per cent.

    Attributes:
        model, setting: which, and how it is trained.
        what: what was converted.
        baseline, saved: bytes saved for backward, before and after.
        whole_baseline, whole: bytes of the whole, before and after; None where no peak is published.
        published: the paper's change, in per cent; None where it has none.
        of: what that is a share of, "peak" or "saved".

    """

    model: str
    setting: str
    what: str
    baseline: int
    saved: int
    whole_baseline: int | None
    whole: int | None
    published: float | None
    of: str

    @property
    def change(self) -> float:
        """The change of what is saved, in per cent."""
        return 100 * (self.saved / self.baseline - 1)

    @property
    def whole_change(self) -> float | None:
        """The change of the whole, in per cent."""
        if self.whole is None or self.whole_baseline is None:
            return None
        return 100 * (self.whole / self.whole_baseline - 1)


# ------------------------------------------------------------------------------------------------------- measuring


# By kind of model: the path of its layers, and the norms of one with the layers that read them.
READERS: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "vit": (
        "vit.layers",
        {"layernorm_before": tuple(f"attention.{name}_proj" for name in "qkv"), "layernorm_after": ("mlp.fc1",)},
    ),
    "llama": (
        "model.layers",
        {
            "input_layernorm": tuple(f"self_attn.{name}_proj" for name in "qkv"),
            "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
        },
    ),
}


def merged(source: Source, training: Training, dtype: torch.dtype) -> Source:
    """Return a source whose models are trained so, and whose layers have merged norms.

    Merging needs values, so models are made with them; `prepare` makes them fake then.
    """

    def build(batch: int, seq: int) -> Example:
        with torch.device("cpu"):
            model, _ = source.build(1, 16)
            training.apply(model.train().to(dtype))
            for module in model.modules():
                if hasattr(module, "lora_A"):
                    module.cast_input_dtype_enabled = False  # or peft copies the input of adapters in float32
            path, norms = READERS[source.name]
            (layers,) = (module for name, module in model.named_modules() if name.endswith(path))
            for layer, (name, readers) in product(layers.children(), norms.items()):
                setattr(layer, name, merge_norm(layer.get_submodule(name), list(_linear(layer, readers))))
        return model, source.build(batch, seq)[1]

    return replace(source, build=build)


def _linear(layer: nn.Module, readers: Sequence[str]) -> Iterator[nn.Linear]:
    """Yield the linear layers of a layer that read a norm; with adapters, what these begin with, too."""
    for reader in map(layer.get_submodule, readers):
        for name, module in reader.named_modules():
            if isinstance(module, nn.Linear) and not name.startswith("lora_B"):
                yield module


def _casting(autocast: bool) -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext()


def saved(subject: Subject, autocast: bool = False) -> int:
    """Return the bytes that autograd saves, with a GPU's kernels."""
    with gpu_kernels(), count_saved(subject.model) as saved, _casting(autocast):
        subject.run()
    return saved.bytes


def peak(subject: Subject, autocast: bool) -> int:
    """Return the bytes alive when most are in a training step, with the optimizer's state."""

    def step() -> None:
        with _casting(autocast):
            outputs = subject.run()
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        subject.model.zero_grad(set_to_none=True)

    trained = sum(parameter.nbytes for parameter in subject.model.parameters() if parameter.requires_grad)
    with gpu_kernels(), subject.mode or nullcontext():
        return peak_memory(step, subject.model)["total"] + OPTIMIZER * trained


# ---------------------------------------------------------------------------------------------------------- models


Around = AbstractContextManager[object]


def variants(kind: str, subject: Subject, norms: bool) -> Iterator[tuple[str, Around]]:
    """Yield what a model has, merged norms or not, and the context that makes it so; "" for PyTorch as it is."""
    yield NORMS[kind] if norms else "", nullcontext()
    for (method, bits), name in STEPS[kind].items():
        policy = Policy(name, method=method, bits=bits)
        yield f"{name} and {NORMS[kind]}" if norms else name, changed([subject.model], [policy])
    if not norms:
        for error in ERRORS:
            yield f"saving, {error}", attaching(subject.model, {"": saving(error)})


def vit(tuning: str) -> Iterator[Row]:
    """Measure ViT-B/16 as Approx-BP trains it: batch 64, mixed precision, AdamW, LoRA of rank 4 or full tuning."""
    training = VIT_LORA if tuning == "LoRA" else Training()
    measured: dict[str, tuple[int, int]] = {}
    for norms in (False, True):
        source = hugging_face("vit")
        given = (merged(source, training, torch.float32), None) if norms else (source, training)
        subject = prepare(*given, batch=64, seq=1, dtype=torch.float32)
        for what, around in variants("vit", subject, norms):
            with around:
                measured[what] = saved(subject, True), peak(subject, True)
    baseline, whole_baseline = measured.pop("")
    setting = f"{tuning}, batch 64, mixed precision"
    for what, (saved_bytes, whole) in measured.items():
        published = VIT_PUBLISHED.get((tuning, what))
        yield Row("ViT-B/16", setting, what, baseline, saved_bytes, whole_baseline, whole, published, "peak")


def llama() -> tuple[list[Row], dict[str, dict[str, int]]]:
    """Measure LLaMA-7B as Approx-BP trains it with QLoRA: batch 4, 640 tokens, rank 64 on all linear layers.

    Models of one and of two layers, whose difference is a layer: all layers save the same. That is checked against
    the model of 32 layers where that needs no values, without merged norms.

    Raises:
        SystemExit: 32 layers save something else than composed.

    """
    bf16, training = torch.bfloat16, Training(lora=PROJECTIONS, rank=64)
    batch, seq = 4, 640  # 512 tokens of the source and 128 of the target
    measured: dict[str, list[int]] = {}
    for norms, layers in product((False, True), (1, 2)):
        source = hugging_face("llama", {"num_hidden_layers": layers, "dtype": "bfloat16"})
        given = (merged(source, training, bf16), None) if norms else (source, training)
        subject = prepare(*given, batch=batch, seq=seq, dtype=bf16)
        for what, around in variants("llama", subject, norms):
            with around:
                measured.setdefault(what, []).append(saved(subject))
    composed = {what: single + (LLAMA_LAYERS - 1) * (two - single) for what, (single, two) in measured.items()}
    subject = prepare(hugging_face("llama"), training, batch=batch, seq=seq, dtype=bf16)
    checks = {}
    for what, around in variants("llama", subject, norms=False):
        with around:
            checks[what or "baseline"] = {"composed": composed[what], "measured": saved(subject)}
    if any(check["composed"] != check["measured"] for check in checks.values()):
        raise SystemExit(f"32 layers do not save what one and two layers say: {checks}")
    beside = held_by_qlora(subject.model)
    baseline = composed.pop("")
    setting = "QLoRA, batch 4, 640 tokens, bfloat16"
    rows = [
        Row(
            "LLaMA-7B",
            setting,
            what,
            baseline,
            size,
            baseline + beside,
            size + beside,
            LLAMA_PUBLISHED.get(what),
            "peak",
        )
        for what, size in composed.items()
    ]
    return rows, checks


def held_by_qlora(model: nn.Module) -> int:
    """Return the bytes that QLoRA holds beside what is saved: weights, adapters, gradients, AdamW's state.

    Frozen weights of linear layers with adapters are in NF4, other weights and adapters in 16 bits, gradients too;
    the state is in float32.
    """
    sizes = {"nf4": 0, "half": 0, "trained": 0}
    for name, parameter in model.named_parameters():
        kind = "trained" if parameter.requires_grad else "nf4" if "base_layer" in name else "half"
        sizes[kind] += parameter.numel()
    return round(sizes["nf4"] * NF4_BYTES) + 2 * sizes["half"] + (2 + 2 + 4 * OPTIMIZER) * sizes["trained"]


def inverted() -> Iterator[Row]:
    """Measure the two examples of the package of Inverted at their sizes, in float32.

    Mistral's has 4-bit weights and swaps GELU in for SiLU, which saves the same: the output and a bit.
    """
    cases = (
        ("BERT-base", hugging_face("bert", head="none"), Training(), 16, 512, BERT_PUBLISHED),
        ("Mistral-7B", hugging_face("mistral"), Training(lora=PROJECTIONS, rank=16), 1, 4096, MISTRAL_PUBLISHED),
    )
    for name, source, training, batch, seq, published in cases:
        setting = f"{'LoRA' if training.lora else 'full tuning'}, batch {batch}, {seq} tokens, float32"
        subject = prepare(source, training, batch=batch, seq=seq, dtype=torch.float32)
        baseline = saved(subject)
        with changed([subject.model], [Policy("inverted", method="inverted")]):
            saved_bytes = saved(subject)
        yield Row(name, setting, "Inverted", baseline, saved_bytes, None, None, published, "saved")


# ---------------------------------------------------------------------------------------------------------- output


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"{'':62}{'saved':>12}{'change':>9}{'whole':>9}{'published':>11}"
    for row in rows:
        name = f"{row.model}, {row.setting.partition(',')[0]}: {row.what}"
        whole = "" if row.whole_change is None else f"{row.whole_change:+.1f} %"
        published = "" if row.published is None else f"{row.published:+.1f} %"
        yield f"{name:62}{row.saved / 2**20:8,.0f} MiB{row.change:+7.1f} %{whole:>9}{published:>11}"


def main() -> None:
    """Measure, print the table, write the bytes."""
    rows: list[Row] = []

    def progress(text: str) -> None:
        sys.stderr.write(f"{text} ...\n")

    progress("1/5 BERT and Mistral, inverted")
    rows += inverted()
    progress("2/5 ViT-B/16, LoRA")
    rows += vit("LoRA")
    progress("3/5 ViT-B/16, full tuning")
    rows += vit("full tuning")
    progress("4/5 LLaMA-7B, one and two layers, then all 32")
    of_llama, checks = llama()
    rows += of_llama
    progress("5/5 writing")
    record = {
        "command": "python -m benchmarks.conversion",
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
        "rows": [asdict(row) for row in rows],
        "llama_of_32_layers": checks,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
