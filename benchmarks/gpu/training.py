"""Training for sixty steps on real text: tokens a second, peak and loss.

The text is that of docs/, a byte a token. Weights are random, so losses only show whether the variants' losses
agree; speed and memory are those of fine-tuning.
"""

from __future__ import annotations

import time
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.models import Inputs, make, names
from benchmarks.gpu.record import ROOT, Record, Row
from benchmarks.gpu.timer import MIB, WARM, synchronise
from benchmarks.gpu.variants import VARIANTS

STEPS = 60
MODELS = {"LLaMA-7B, LoRA": (2, 1024, 1e-3), "GPT-2 XL": (4, 1024, 1e-4)}  # batch, tokens, rate
COMPARED = ("baseline", "exact", "checkpointing")
LAST = 10  # losses whose mean is recorded


def run(record: Record, device: str, tiny: bool) -> None:
    """Add a row for each model and variant."""
    for model in filter(MODELS.__contains__, names(tiny)):
        for variant in COMPARED:
            record.measure({"model": model, "variant": variant}, partial(trained, model, variant, device, tiny))


def trained(model: str, variant: str, device: str, tiny: bool) -> Row:
    """Train a model; return its speed, the most memory allocated, and the first and last losses."""
    batch, tokens, rate = (2, 32, 1e-3) if tiny else MODELS[model]
    steps = 5 if tiny else STEPS
    subject = make(model, device, tiny=tiny, whole=True)
    forward = VARIANTS[variant].prepare(subject)
    optimizer = torch.optim.AdamW([each for each in subject.model.parameters() if each.requires_grad], rate)
    data = text(device)
    losses = []
    for i in range(WARM + steps):
        if i == WARM:
            synchronise(device)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(i)  # of dropout
        loss = forward(sample(data, batch, tokens, i))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    synchronise(device)
    seconds = time.perf_counter() - start
    peak = {"peak_mib": torch.cuda.max_memory_allocated() / MIB} if device == "cuda" else {}
    return {
        "batch": batch,
        "tokens": tokens,
        "steps": steps,
        "tokens_per_s": steps * batch * tokens / seconds,
        **peak,
        "first_loss": float(losses[0]),
        "last_loss": float(torch.stack(losses[-LAST:]).mean()),
    }


def text(device: str) -> Tensor:
    """Return the project's pages as bytes."""
    pages = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
    return torch.frombuffer(bytearray(pages), dtype=torch.uint8).to(device, torch.long)


def sample(data: Tensor, batch: int, tokens: int, seed: int) -> Inputs:
    """Return pieces of the text at random places, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - tokens, (batch, 1), generator=generator).to(data.device)
    ids = data[starts + torch.arange(tokens, device=data.device)]
    return {"input_ids": ids, "labels": ids}
