"""A step cut short is the whole step: of like blocks of one policy some run, and one stands for the others."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fitact.runtime.choose import BASELINE, FULL, POLICIES, SELECTIVE, Policy, measure_costs, step
from fitact.runtime.measure import DEVICES, Subject, copied, cut, hugging_face, prepare, runs_of

from . import test_plan

DEVICE = DEVICES["t4"]
EXACT, ROUNDING = POLICIES["exact"], POLICIES["rounding"]


class Block(test_plan.Block):
    """A block that may run several times."""

    def __init__(self) -> None:
        super().__init__(32)
        self.times = 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = super().forward(x)
        return x


class Model(nn.Module):
    """Blocks and a loss, which may read what every block returns."""

    def __init__(self, all_read: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(8, 32), nn.ModuleList(Block() for _ in range(9))
        self.all_read = all_read

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        read = []
        for block in self.blocks:
            x = block(x)
            read += [x] if self.all_read else []
        return torch.stack(read or [x]).square().mean()


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
    model = Model()
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
    assert all(run.steady for run in measure_costs(subject(Model()), DEVICE, [BASELINE]).runs)
    costs = measure_costs(subject(Model(all_read=True)), DEVICE, [BASELINE])
    assert not any(run.steady for run in costs.runs)


def test_blocks_that_work_differently_are_not_cut_short() -> None:
    model = Model()
    block = model.blocks[3]
    assert isinstance(block, Block)
    block.times = 2
    (run,) = runs_of(subject(model))
    assert not run.steady
