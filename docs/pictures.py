"""Draw the pictures of explained.md, from shipped fits and counted bytes: python docs/pictures.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn

import fitact
from fitact.base import save
from fitact.fitter.plot import EXACT, FITTED
from fitact.fitter.records import StepFit, read
from fitact.runtime.measure import count_saved, gpu_kernels
from fitact.runtime.saving import decode, encode
from fitact.runtime.torch_internals import FakeTensorMode

DOCS = Path(__file__).resolve().parent
FITS = DOCS.parent / "generated" / "fits"
FOLDER = DOCS / "explained"
MIB = 2**20
DPI = 200
TOKENS, HIDDEN, WIDE = 8192, 1024, 4096
BOX, INK, PALE = "#eef2f6", "#2b2d42", "#8d99ae"
COLORS = {"x": "#8d99ae", "h": EXACT, "y": "#6a994e", "code": FITTED}
WAYS: tuple[tuple[str, dict[str, Any] | None], ...] = (
    ("PyTorch as it is", None),
    ("steps of f′, 3 bits", {"method": "fewbit", "bits": 3}),
    ("inverted: output and 1 bit", {"method": "inverted"}),
    ("y recomputed", {}),
    ("h in 8 bits, y recomputed", {"error": "rounding"}),
    ("h in 4 bits, y recomputed", {"error": "coarse"}),
)


def mlp(hidden: int = HIDDEN, wide: int = WIDE) -> nn.Module:
    """Return the MLP of the page, in bfloat16."""
    layers = nn.Linear(hidden, wide, dtype=torch.bfloat16), nn.Linear(wide, hidden, dtype=torch.bfloat16)
    return nn.Sequential(layers[0], nn.GELU(), layers[1])


def saved(policy: dict[str, Any] | None) -> list[int]:
    """Return the bytes of each storage that the MLP saves, in order, without allocating any."""
    with FakeTensorMode(), gpu_kernels():
        model = mlp()
        if policy is not None:
            fitact.convert(model, **policy)
        with count_saved(model, detail=True) as saved:
            model(torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True))
    return [record.bytes for record in saved.records.values() if record.bytes]


def error(policy: dict[str, Any] | None) -> str:
    """Return how far the gradient of a small MLP is off, for inputs of GELU whose deviation is near 1."""
    if policy is None:
        return ""
    torch.manual_seed(0)
    batch = 1.7 * torch.randn(512, 256, dtype=torch.bfloat16)
    report = fitact.convert(mlp(256, 1024), example_inputs=(batch,), gradients=True, **policy)
    assert report.gradient is not None and report.gradient.error is not None
    return (
        "gradients exact" if report.gradient.error == 0 else f"gradients {100 * report.gradient.error:.2g} % off"
    )


def canvas(width: float, height: float) -> Figure:
    """Return an empty figure, in inches."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def blank(figure: Figure, width: float, height: float) -> Axes:
    """Return axes without frame, in units of the drawing."""
    axes = figure.add_subplot()
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return axes


def box(axes: Axes, x: float, y: float, text: str, color: str = BOX, ink: str = INK, width: float = 1.7) -> None:
    """Draw a box with a text around a point."""
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((x - width / 2, y - 0.42), width, 0.84, boxstyle=style, color=color, zorder=2))
    axes.text(x, y, text, ha="center", va="center", color=ink, fontsize=9.5, zorder=3)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = INK) -> None:
    """Draw an arrow between two points."""
    style = {
        "arrowstyle": "-|>",
        "color": color,
        "lw": 1.4,
        "shrinkA": 0,
        "shrinkB": 1,
    }
    axes.annotate("", end, start, arrowprops=style, zorder=1)


def draw_mlp() -> Figure:
    """Draw the MLP, and the three tensors that PyTorch saves of it."""
    figure = canvas(5.4, 2.5)
    axes = blank(figure, 12, 5.6)
    axes.set_ylim(0.75, 5.6)
    layers = {2.2: "Linear up", 6.0: "GELU", 9.8: "Linear down"}
    for x, name in layers.items():
        box(axes, x, 4.4, name, width=2.1)
    for x, name in {0.35: "x", 4.1: "h", 7.9: "y", 11.65: "z"}.items():
        axes.text(
            x, 4.4, name, ha="center", va="center", fontsize=12, style="italic", fontweight="bold", color=INK
        )
    for start, end in ((0.6, 1.1), (3.3, 3.8), (4.4, 4.9), (7.1, 7.6), (8.2, 8.7), (10.9, 11.4)):
        arrow(axes, (start, 4.4), (end, 4.4))
    reasons = ("for the gradient\nof its weight", "for f′(h)", "for the gradient\nof its weight")
    sizes = saved(None)
    tallest = max(sizes)
    for x, name, size, reason in zip(layers, ("x", "h", "y"), sizes, reasons, strict=True):
        arrow(axes, (x, 3.95), (x, 3.3), COLORS[name])
        height = 1.75 * size / tallest
        axes.add_patch(_bar(x - 0.8, 3.25 - height, 1.6, height, COLORS[name]))
        label = f"{name}: {size / MIB:.0f} MiB"
        axes.text(x, 3.25 - height / 2, label, ha="center", va="center", color="white", fontsize=9, zorder=4)
        axes.text(x, 3.1 - height, reason, ha="center", va="top", color=INK, fontsize=9)
    axes.text(0, 5.5, "forward", fontsize=9, color=PALE, va="top")
    axes.text(0, 1.75, "saved until backward", fontsize=9, color=PALE, va="top")
    return figure


def _bar(x: float, y: float, width: float, height: float, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, color=color, zorder=3, linewidth=0)


def draw_steps() -> Figure:
    """Draw GELU's derivative and its eight steps, with the code of each."""
    fit = read(FITS / "gelu_fewbit3.json")
    assert isinstance(fit, StepFit)
    figure = canvas(5.4, 3.2)
    axes = figure.add_subplot()
    reach = 3.6
    x = np.linspace(-reach, reach, 2001)
    axes.plot(x, fit.activation.derivative(x), color=EXACT, linewidth=2, label="f′, GELU's derivative")
    edges = [-reach, *fit.borders, reach]
    for code, level in enumerate(fit.levels):
        left, right = edges[code], edges[code + 1]
        axes.axvspan(left, right, color=BOX if code % 2 else "#dfe7ef", zorder=0, linewidth=0)
        label = "the step: one number for each code" if code == 0 else None
        axes.plot([left, right], [level, level], color=FITTED, linewidth=2.4, label=label, solid_capstyle="butt")
        place = (left + right) / 2
        axes.text(place, -0.36, f"{code}", ha="center", va="center", color=FITTED, fontsize=10, fontweight="bold")
    axes.text(-reach, -0.5, "  code that is saved: 3 bits", ha="left", va="center", fontsize=9, color=FITTED)
    axes.set(xlim=(-reach, reach), ylim=(-0.6, 1.3), xlabel="x")
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_codes() -> Figure:
    """Draw a block of 64 numbers, its scale, and the places that codes of 4 bits can name."""
    torch.manual_seed(1)
    rows = torch.randn(64, 64)
    x, near = rows[0], decode(*encode(rows, 4), rows.shape, rows.dtype)[0]
    figure = canvas(5.4, 3.4)
    axes = figure.add_subplot()
    top = float(x[x.abs().argmax()])
    steps = np.arange(-8, 8) / 8
    for place in -top * steps * (1 + abs(steps)) / 2:
        axes.axhline(place, color="#dfe7ef", linewidth=1, zorder=0)
    axes.plot(x, "o", color=EXACT, markersize=4, label="a block of h: 64 numbers")
    axes.plot(near, "_", color=FITTED, markersize=8, markeredgewidth=2, label="what comes back from 4 bits each")
    text = "the scale: the number of the\nlargest absolute value, exact"
    place = int(x.abs().argmax())
    axes.text(place - 3, top, text, ha="right", fontsize=9, color=INK, va="center")
    axes.set(xlabel="place in the block", ylabel="value", ylim=(-1.15 * abs(top), 1.55 * abs(top)))
    axes.legend(frameon=False, loc="upper right", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_outliers() -> Figure:
    """Draw the error of the features beside one that is far larger, with codes of 8 and 4 bits, and int8."""
    torch.manual_seed(0)
    factors = 2.0 ** np.arange(11)
    others = torch.arange(64) != 5

    def error(factor: float, bits: int | None) -> float:
        rows = torch.randn(128, 64)
        rows[:, 5] *= factor
        scale = rows.abs().amax(1, keepdim=True) / 127
        decoded = (
            (rows / scale).round() * scale if bits is None else decode(*encode(rows, bits), rows.shape, rows.dtype)
        )
        return float((decoded - rows)[:, others].norm() / rows[:, others].norm())

    figure = canvas(5.4, 2.9)
    axes = figure.add_subplot()
    for bits, name, color in ((8, "8 bits", EXACT), (4, "4 bits", FITTED), (None, "int8, a scale for 64", PALE)):
        line = [100 * error(factor, bits) for factor in factors]
        axes.plot(factors, line, marker="o", markersize=3.5, color=color, label=name)
    axes.set(xscale="log", yscale="log", xlabel="one of 64 features is larger by this factor")
    axes.set_ylabel("error of the 63 others, %")
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_recompute() -> Figure:
    """Draw forward and backward of a recomputed output: the next layer needs h, not y."""
    figure = canvas(5.4, 3.5)
    axes = blank(figure, 12, 7.2)
    for y, name in ((6.3, "forward"), (1.6, "backward")):
        axes.text(1.9, y + 0.45, name, fontsize=9, color=PALE, va="bottom")
    for x, text in ((1.0, "h"), (7.2, "y")):
        box(axes, x, 6.3, text, COLORS[text], "white", 1.1)
    box(axes, 4.1, 6.3, "GELU", width=2.0)
    box(axes, 10.4, 6.3, "Linear down", width=2.4)
    for start, end in ((1.6, 3.1), (5.1, 6.6), (7.8, 9.2)):
        arrow(axes, (start, 6.3), (end, 6.3))
    axes.text(7.2, 5.6, "freed after forward", ha="center", fontsize=9, color=COLORS["y"])
    box(axes, 1.0, 4.0, "h", COLORS["h"], "white", 1.1)
    axes.text(
        1.75,
        4.0,
        "of these two, only h is saved: GELU needs it anyway",
        va="center",
        fontsize=9,
        color=COLORS["h"],
    )
    arrow(axes, (1.0, 5.85), (1.0, 4.45), COLORS["h"])
    arrow(axes, (1.0, 3.55), (1.0, 2.05), COLORS["h"])
    for x, text in ((1.0, "h"), (7.2, "y")):
        box(axes, x, 1.6, text, COLORS[text], "white", 1.1)
    box(axes, 4.1, 1.6, "GELU again", width=2.0)
    box(axes, 10.4, 1.6, "dW = dzᵀ · y", width=2.4)
    for start, end in ((1.6, 3.1), (5.1, 6.6), (7.8, 9.2)):
        arrow(axes, (start, 1.6), (end, 1.6))
    axes.text(
        7.2, 0.9, "the same bits as before,\nfreed after use", ha="center", va="top", fontsize=9, color=COLORS["y"]
    )
    return figure


def draw_ways() -> Figure:
    """Draw what the MLP saves each way, as stacked bars, and how far gradients are off."""
    figure = canvas(5.4, 3.1)
    axes = figure.add_subplot()
    for i, (name, policy) in enumerate(reversed(WAYS)):
        left = 0.0
        for part, size in _parts(saved(policy), name):
            axes.barh(i, size, left=left, height=0.68, color=COLORS[part], edgecolor="white", linewidth=0.8)
            if size > 8:
                label = f"{part} {size:.0f}" if part != "code" or size > 20 else f"{size:.0f}"
                axes.text(left + size / 2, i, label, ha="center", va="center", color="white", fontsize=8.5)
            left += size
        axes.text(left + 1.5, i, f"{left:.0f} MiB\n{error(policy)}".strip(), va="center", fontsize=8.5, color=INK)
        axes.text(-2, i, name, ha="right", va="center", fontsize=9, color=INK)
    axes.set(xlim=(0, 185), yticks=[], xlabel="MiB saved for backward")
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _parts(sizes: list[int], name: str) -> list[tuple[str, float]]:
    """Return parts and their MiB, in the order of the colours: x is the first, codes are no wide ones."""
    wide = TOKENS * WIDE * 2
    wider = iter(("y",) if name.startswith(("steps", "inverted")) else ("h", "y"))
    named = [("x", sizes[0] / MIB)]
    named += [(next(wider) if size == wide else "code", size / MIB) for size in sizes[1:]]
    codes = sum(size for part, size in named if part == "code")
    parts = {part: size for part, size in named if part != "code"} | ({"code": codes} if codes else {})
    assert len(parts) == len({part for part, _ in named})
    return sorted(parts.items(), key=lambda pair: list(COLORS).index(pair[0]))


PICTURES: dict[str, Callable[[], Figure]] = {
    "mlp": draw_mlp,
    "recompute": draw_recompute,
    "codes": draw_codes,
    "outliers": draw_outliers,
    "steps": draw_steps,
    "ways": draw_ways,
}


def main() -> None:
    """Draw all."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.png").write_bytes(save(draw(), "png"))
        print(f"wrote {FOLDER.name}/{name}.png")


if __name__ == "__main__":
    main()
