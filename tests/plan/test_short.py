"""A step cut short is the whole step: of like blocks of one policy some run, and one is counted for the others."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fitact.runtime.choose import BASELINE, FULL, POLICIES, SELECTIVE, Policy, measure_costs, step
from fitact.runtime.measure import DEVICES, Subject, copied, cut, hugging_face, prepare, runs_of
from tests.support.built import built

from .test_plan import Block

DEVICE = DEVICES["t4"]
EXACT, ROUNDING = POLICIES["exact"], POLICIES["rounding"]


class Repeated(Block):
    times = 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = super().forward(x)
        return x


def made(all_read: bool = False) -> Any:
    """Return blocks and a loss, which may read what every block returns."""

    def forward(self: Any, x: Tensor) -> Tensor:
        read = [self.embed(x)]
        for block in self.blocks:
            read = [*(read if all_read else []), block(read[-1])]
        return torch.stack(read).square().mean()

    return built(forward, embed=nn.Linear(8, 32), blocks=nn.ModuleList(Repeated(32) for _ in range(9)))


def subject(model: nn.Module) -> Subject:
    return copied(model, torch.randn(2, 16, 8), None, "cpu")


ROWS = {
    "baseline": ([BASELINE] * 9, 0),
    "exact": ([EXACT] * 7 + [BASELINE] * 2, 0),
    "rounding": ([FULL] + [ROUNDING] * 8, 0),
    "selective": ([SELECTIVE] * 5 + [EXACT] * 4, 0),
    "frozen": ([FULL] * 9, 5),
}


@pytest.mark.parametrize(("policies", "frozen"), ROWS.values(), ids=ROWS)
def test_a_step_cut_short_is_the_whole_step(policies: list[Policy], frozen: int) -> None:
    model = made()
    for block in [model.embed, *model.blocks][: frozen + 1 if frozen else 0]:
        block.requires_grad_(False)
    of = subject(model)
    runs = runs_of(of)
    assert [len(run.blocks) for run in runs] == ([5, 4] if frozen else [9])
    assert all(run.steady for run in runs)
    assert cut(runs, policies)
    short = step(of, DEVICE, runs, policies)
    whole = step(of, DEVICE, [replace(run, steady=False) for run in runs], policies)
    assert (short.saved, short.peak) == (whole.saved, whole.peak)
    assert (short.work.flops, short.work.traffic) == (whole.work.flops, whole.work.traffic)
    assert short.work.seconds == pytest.approx(whole.work.seconds)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gpt2", "qwen2_moe"])
def test_full_size_models_are_cut_short(kind: str) -> None:
    of = prepare(hugging_face(kind), batch=2, seq=64)
    costs = measure_costs(of, DEVICE, [BASELINE])
    assert all(run.steady for run in costs.runs)
    policies = [BASELINE for run in costs.runs for _ in run.blocks]
    assert costs.baseline.like(step(of, DEVICE, [replace(run, steady=False) for run in costs.runs], policies))


def test_a_model_that_reads_every_block_is_not_cut_short() -> None:
    """Nor are blocks that work differently."""
    assert all(run.steady for run in measure_costs(subject(made()), DEVICE, [BASELINE]).runs)
    costs = measure_costs(subject(made(all_read=True)), DEVICE, [BASELINE])
    assert not any(run.steady for run in costs.runs)
    model = made()
    model.blocks[3].times = 2
    (run,) = runs_of(subject(model))
    assert not run.steady
