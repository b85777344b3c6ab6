"""What is trained on what: characters of real text, handwritten digits, and a fine-tuning with adapters.

Nothing is downloaded: the texts are the source code of Python's standard library and the reference that ships with
it (what `help("topics")` shows), the digits are those that ship with scikit-learn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fitact.runtime.measure import imported

from ..demo import standard_library
from .models import Derf, DyT, Swish, Transformer

ALPHABET = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
CLASSES, SIDE, PATCH = 10, 8, 2  # of the digits, in pixels
PATCHES = (SIDE // PATCH) ** 2
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Recipe:
    """How large and how long.

    Attributes:
        width, heads, layers: of the transformer.
        length: of a text in characters, or of an image in patches.
        batch: texts or images a step.
        steps: of training.
        rate: the highest learning rate.
        validation: texts or images that the final loss is the mean over.
        rank: of the adapters; 0 trains everything.

    """

    width: int
    heads: int
    layers: int
    length: int
    batch: int
    steps: int
    rate: float
    validation: int
    rank: int = 0


@dataclass(frozen=True)
class Setting:
    """A recipe for each task, and the device that they run on, under autocast to bfloat16 or not."""

    name: str
    device: str
    autocast: bool
    recipes: dict[str, Recipe]


@dataclass(frozen=True)
class Data:
    """Training batches without end, in the order of a seed, and the held-out batches."""

    training: Iterator[Batch]
    validation: list[Batch]


@dataclass(frozen=True)
class Task:
    """A model and its data.

    Attributes:
        name: in files and options.
        title: in pictures and sentences.
        model: recipe → baseline, with random weights from PyTorch's global generator.
        data: recipe, seed, device → data.
        accuracy: whether that is reported too.
        begins_with: the task whose exactly trained model of the same seed this one goes on with.

    """

    name: str
    title: str
    model: Callable[[Recipe], Transformer]
    data: Callable[[Recipe, int, str], Data]
    accuracy: bool = False
    begins_with: str | None = None


@cache
def code() -> str:
    """Return source code of Python's standard library, of printable ASCII."""
    return standard_library()


@cache
def prose() -> str:
    """Return Python's reference as it ships with `pydoc`, of printable ASCII."""
    from pydoc_data.topics import topics

    text = "".join(topics[topic] for topic in sorted(topics))
    return "".join(character for character in text if character in ALPHABET)


@cache
def encoded(text: Callable[[], str]) -> Tensor:
    """Return the places of a text's characters in the alphabet."""
    index = {character: i for i, character in enumerate(ALPHABET)}
    return torch.tensor([index[character] for character in text()])


def text_data(text: Callable[[], str], recipe: Recipe, seed: int, device: str) -> Data:
    """Return texts of `length` characters and the characters that follow each.

    The last tenth is held out: as many texts, evenly spaced, as the recipe says, the same for every seed.
    """
    data = encoded(text).to(device)
    cut = len(data) * 9 // 10
    window = torch.arange(recipe.length + 1, device=device)

    def rows(starts: Tensor) -> Batch:
        windows = data[starts.to(device)[:, None] + window]
        return windows[:, :-1], windows[:, 1:]

    def training() -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield rows(torch.randint(cut - recipe.length, (recipe.batch,), generator=generator))

    starts = torch.linspace(cut, len(data) - recipe.length - 1, recipe.validation).long()
    return Data(training(), [rows(part) for part in starts.split(recipe.batch)])


def image_data(recipe: Recipe, seed: int, device: str) -> Data:
    """Return digits cut into patches, (batch, PATCHES, PATCH²), and what they are.

    Which images are held out depends on the seed. Those trained on are shifted by up to a pixel at random.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = F.pad(torch.tensor(digits.images, dtype=torch.float32) / 4 - 2, (1, 1, 1, 1), value=-2.0)
    shifted = images.unfold(1, SIDE, 1).unfold(2, SIDE, 1).flatten(1, 2)  # (image, shift, SIDE, SIDE)
    patches = shifted.unflatten(2, (-1, PATCH)).unflatten(4, (-1, PATCH)).transpose(3, 4)
    patches = patches.reshape(*shifted.shape[:2], PATCHES, PATCH**2).to(device)
    labels = torch.tensor(digits.target, device=device)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    trained, held_out = order[recipe.validation :], order[: recipe.validation]
    middle = patches.shape[1] // 2

    def training() -> Iterator[Batch]:
        while True:
            chosen = trained[torch.randint(len(trained), (recipe.batch,), generator=generator)]
            shift = torch.randint(patches.shape[1], (recipe.batch,), generator=generator)
            yield patches[chosen.to(device), shift.to(device)], labels[chosen.to(device)]

    return Data(training(), [(patches[part.to(device), middle], labels[part.to(device)]) for part in
                             held_out.split(recipe.batch)])  # fmt: skip


def text_model(recipe: Recipe, **other: Any) -> Transformer:
    """Return a transformer that predicts the next character; `other` is what its class takes."""
    embedding = nn.Embedding(len(ALPHABET), recipe.width)
    return _transformer(recipe, embedding, len(ALPHABET), causal=True, **other)


def image_model(recipe: Recipe) -> Transformer:
    """Return a vision transformer that tells digits apart."""
    return _transformer(recipe, nn.Linear(PATCH**2, recipe.width), CLASSES, causal=False)


def xielu() -> nn.Module:
    """Return xIELU as transformers has it, with its two learned parameters in float32."""
    made: nn.Module = imported("transformers").activations.XIELUActivation(dtype=torch.float32)
    return made


def _transformer(recipe: Recipe, embedding: nn.Module, outputs: int, *, causal: bool, **other: Any) -> Transformer:
    return Transformer(
        embedding,
        length=recipe.length,
        width=recipe.width,
        heads=recipe.heads,
        layers=recipe.layers,
        outputs=outputs,
        causal=causal,
        **other,
    )


# Tasks with learned parameters in place of activations or norms: what titles call these, and the models.
LEARNED_PARTS: dict[str, tuple[str, Callable[[Recipe], Transformer]]] = {
    "xielu": ("xIELU", partial(text_model, activation=xielu)),
    "dyt": ("DyT", partial(text_model, norm=DyT)),
    "derf": ("Derf", partial(text_model, norm=Derf)),
    "swish": ("Swish with β", partial(text_model, activation=Swish)),
}
TASKS = {
    task.name: task
    for task in (
        Task(
            "characters",
            "characters of source code",
            text_model,
            partial(text_data, code),
        ),
        Task("digits", "handwritten digits", image_model, image_data, accuracy=True),
        Task(
            "lora",
            "from source code to prose with adapters",
            text_model,
            partial(text_data, prose),
            begins_with="characters",
        ),
        Task(
            "gated",
            "characters of source code, SwiGLU",
            partial(text_model, gated=True),
            partial(text_data, code),
        ),
        *(
            Task(name, f"characters of source code, {label}", model, partial(text_data, code))
            for name, (label, model) in LEARNED_PARTS.items()
        ),
    )
}

SMALL = Setting(
    "small",
    "cpu",
    False,
    {
        "characters": Recipe(64, 4, 2, 64, 8, 1000, 8e-3, 512),
        "digits": Recipe(64, 4, 2, PATCHES, 32, 800, 3e-3, 500),
        "lora": Recipe(64, 4, 2, 64, 8, 500, 1e-2, 512, rank=8),
    },
)
LARGE = Setting(
    "large",
    "cuda",
    True,
    {
        "characters": Recipe(384, 6, 6, 256, 64, 4000, 1e-3, 512),
        "digits": Recipe(192, 6, 6, PATCHES, 256, 2000, 1e-3, 500),
        "lora": Recipe(384, 6, 6, 256, 64, 1500, 1e-3, 512, rank=16),
    },
)
STORED = Setting(
    "stored", "cpu", False, {**SMALL.recipes, "gated": replace(SMALL.recipes["characters"], steps=500)}
)
LEARNED = Setting("learned", "cpu", False, dict.fromkeys(LEARNED_PARTS, STORED.recipes["gated"]))
