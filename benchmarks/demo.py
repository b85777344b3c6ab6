"""Train a small character-level transformer twice from one seed, with exact GELU and with 3 bits saved.

Run in a folder that holds `generated/gelu_fewbit3.py` (`make demo` does). The text is the source code of
Python's own standard library. Writes loss.png and results.json; prints one table.
"""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fitact.runtime.measure import count_saved

CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 128, 16, 128, 4, 4
STEPS, WARM_UP, RATE, SEED = 300, 0.1, 3e-3, 0
VALIDATION_BATCHES = 16
SMOOTH = 20  # steps that a point of the loss curve is the mean of
CHARACTERS = 2_000_000


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), activation(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, vocabulary: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block(activation) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(places))))


@dataclass
class Result:
    """One training run."""

    name: str
    losses: list[float]
    validation: float
    saved_bytes: int
    activation_bytes: int
    seconds: float


def standard_library() -> str:
    """Return the first two million characters of the standard library's modules, in name order."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    text = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    return re.sub(r"[^\n -~]", "", text)[:CHARACTERS]


def batch(data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a random batch of inputs and of the characters that follow them."""
    starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=generator)
    rows = torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy, in nats a character."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train(name: str, data: Tensor, vocabulary: int, activation: Callable[[], nn.Module], steps: int) -> Result:
    """Train from SEED; the same batches in the same order whatever the activation."""
    torch.manual_seed(SEED)
    model = Transformer(vocabulary, activation)
    generator = torch.Generator().manual_seed(SEED)
    cut = len(data) * 9 // 10
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=WARM_UP)
    losses = []
    start = time.perf_counter()
    with click.progressbar(range(steps), label=f"{name:12}", file=sys.stderr) as progress:
        for _ in progress:
            inputs, targets = batch(data[:cut], generator)
            loss = loss_of(model, inputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    seconds = time.perf_counter() - start

    inputs, targets = batch(data[:cut], generator)
    with count_saved(model) as whole:
        loss_of(model, inputs, targets)
    with count_saved(model) as alone:
        activation()(torch.randn(BATCH, CONTEXT, 4 * WIDTH, requires_grad=True))
    with torch.no_grad():
        batches = [batch(data[cut:], generator) for _ in range(VALIDATION_BATCHES)]
        validation = sum(loss_of(model, *pair).item() for pair in batches) / len(batches)
    return Result(name, losses, validation, whole.bytes, LAYERS * alone.bytes, seconds)


def draw(results: list[Result], path: Path) -> None:
    """Draw the loss curves, smoothed, in one picture."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for result, color, style in zip(results, ("#1f4e79", "#d1495b"), ("-", "--"), strict=True):
        smooth = np.convolve(result.losses, np.ones(SMOOTH) / SMOOTH, mode="valid")
        saved = result.saved_bytes / 2**20
        label = f"{result.name}: {result.validation:.3f} on held-out text, {saved:.1f} MiB saved"
        axes.plot(np.arange(len(smooth)) + SMOOTH, smooth, style, color=color, linewidth=1.6, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats a character")
    axes.set_title("A character-level transformer, twice from one seed")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def table(results: list[Result]) -> str:
    """Return losses and saved bytes side by side, with the ratio to the first run."""
    rows = [("", "final loss", "held-out loss", "saved by autograd", "of it by activations", "seconds")]
    for result in results:
        final = sum(result.losses[-SMOOTH:]) / SMOOTH
        whole, alone = (
            f"{size:,} ({size / base:.0%})"
            for size, base in (
                (result.saved_bytes, results[0].saved_bytes),
                (result.activation_bytes, results[0].activation_bytes),
            )
        )
        row = (result.name, f"{final:.4f}", f"{result.validation:.4f}", whole, alone, f"{result.seconds:.0f}")
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join(lines)


@click.command()
@click.option(
    "--steps", type=click.IntRange(min=SMOOTH), default=STEPS, show_default=True, help="Of each training."
)
def main(steps: int) -> None:
    """Train both, write the picture and the numbers, print the table."""
    sys.path.insert(0, os.getcwd())
    from generated.gelu_fewbit3 import GeluFewbit3

    text = standard_library()
    characters = sorted(set(text))
    index = {character: i for i, character in enumerate(characters)}
    data = torch.tensor([index[character] for character in text])
    print(f"{len(text):,} characters of Python's standard library, {steps} steps each")
    results = [
        train("exact GELU", data, len(characters), nn.GELU, steps),
        train("gelu_fewbit3", data, len(characters), GeluFewbit3, steps),
    ]
    draw(results, Path("loss.png"))
    Path("results.json").write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    print(table(results))
    print("wrote loss.png, results.json")


if __name__ == "__main__":
    main()
