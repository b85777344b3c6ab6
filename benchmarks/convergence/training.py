"""One training run."""

from __future__ import annotations

import io
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fitact.base import write
from fitact.runtime.measure import count_saved, imported

from .methods import EXACT, Method
from .models import Transformer
from .tasks import TASKS, Batch, Setting, Task

WARM_UP, DECAY = 0.1, 0.01
POINTS = 50  # of a curve: each is the mean of as many steps as fall to it


@dataclass(frozen=True)
class Run:
    """What is recorded of a run.

    Attributes:
        task, method: their names.
        seed: of initial weights, data order and rounding at random.
        curve: training loss in nats, POINTS means over consecutive steps; null where it is not finite.
        loss: of the held-out data after the last step, in nats; null if the run diverged.
        accuracy: share of right answers there; null if the run diverged.
        diverged: the first step, from 0, whose loss was not finite, or their number if only that of the held-out
            data was not; null if all were.
        saved_bytes: what autograd saved of the first step, parameters not counted, but their copies in
            autocast's dtype.
        seconds: of training, validation not counted.

    """

    task: str
    method: str
    seed: int
    curve: list[float | None]
    loss: float | None
    accuracy: float | None
    diverged: int | None
    saved_bytes: int
    seconds: float


def train(task: Task, method: Method, setting: Setting, seed: int, store: Path) -> Run:
    """Train once. Initial weights and data order depend on task, setting and seed alone.

    Args:
        task: what is trained on what.
        method: what saves fewer bytes.
        setting: how large and how long.
        seed: of initial weights, data order and rounding at random.
        store: folder for the weights that another task begins with.

    """
    recipe = setting.recipes[task.name]
    torch.manual_seed(seed)
    model = task.model(recipe)
    if task.begins_with is not None:
        model.load_state_dict(_trained(TASKS[task.begins_with], setting, seed, store))
    method.apply(model)
    if recipe.rank:
        add_adapters(model, recipe.rank, seed)
    model.to(setting.device)
    data = task.data(recipe, seed, setting.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=recipe.rate, weight_decay=DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.rate, recipe.steps, pct_start=WARM_UP)
    losses = torch.empty(recipe.steps, device=setting.device)
    torch.manual_seed(seed)  # what rounds at random begins alike, whatever was drawn before
    saved_bytes = 0
    start = time.perf_counter()
    with method.around(model) as call:
        for step in range(recipe.steps):
            batch = next(data.training)
            if step == 0:
                with count_saved(model) as saved:
                    loss = loss_of(call, batch, setting)
                saved_bytes = saved.bytes
                saved.release()
            else:
                loss = loss_of(call, batch, setting)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses[step] = loss.detach()
    curve = losses.tolist()  # waits for the device
    seconds = time.perf_counter() - start
    held_out, accuracy = evaluate(model, data.validation, setting)
    diverged = next((step for step, each in enumerate([*curve, held_out]) if not math.isfinite(each)), None)
    if task.name in {other.begins_with for other in TASKS.values()} and method is EXACT:
        _save(model, _weights(task, seed, store))
    return Run(
        task.name,
        method.name,
        seed,
        thinned(curve),
        held_out if diverged is None else None,
        accuracy if diverged is None else None,
        diverged,
        saved_bytes,
        round(seconds, 2),
    )


def logits_of(model: Callable[[Tensor], Tensor], inputs: Tensor, setting: Setting) -> Tensor:
    """Return the logits, under autocast if the setting says so."""
    with torch.autocast(setting.device, torch.bfloat16, enabled=setting.autocast):
        return model(inputs)


def loss_of(model: Callable[[Tensor], Tensor], batch: Batch, setting: Setting) -> Tensor:
    """Return the mean cross entropy in nats."""
    inputs, targets = batch
    return F.cross_entropy(logits_of(model, inputs, setting).float().flatten(0, -2), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[Batch], setting: Setting) -> tuple[float, float]:
    """Return mean cross entropy in nats, and the share of right answers."""
    loss, right, count = 0.0, 0, 0
    for inputs, targets in batches:
        logits = logits_of(model, inputs, setting).float()
        loss += F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum").item()
        right += int((logits.argmax(-1) == targets).sum())
        count += targets.numel()
    return loss / count, right / count


def thinned(losses: list[float]) -> list[float | None]:
    """Return the means of POINTS stretches, of all losses if they are fewer; to five digits."""
    points = min(POINTS, len(losses))
    ends = [round(i * len(losses) / points) for i in range(points + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in pairwise(ends)]
    return [float(f"{mean:.5g}") if math.isfinite(mean) else None for mean in means]


def add_adapters(model: Transformer, rank: int, seed: int) -> None:
    """Give every linear layer of the blocks an adapter, and freeze all else; what it computes stays the same."""
    peft = imported("peft")
    config = peft.LoraConfig(
        target_modules=["qkv", "out", "up", "down"], r=rank, lora_alpha=2 * rank, lora_dropout=0.0
    )
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of models that are not of transformers
        peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def _weights(task: Task, seed: int, store: Path) -> Path:
    return store / f"{task.name}-{seed}.pt"


def _trained(task: Task, setting: Setting, seed: int, store: Path) -> dict[str, Tensor]:
    """Return the weights of an exactly trained model; trains it if they are not there yet."""
    path = _weights(task, seed, store)
    if not path.exists():
        train(task, EXACT, setting, seed, store)
    weights: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return weights


def _save(model: nn.Module, path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    write(path, buffer.getvalue())  # whole or not at all: another process may be reading
