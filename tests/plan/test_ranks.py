"""What a plan says of each rank under FSDP2 is what two processes take that really train, by PyTorch's tracker."""

from pathlib import Path

import pytest

from tests.support.processes import run

# The peak of the third step, whose optimizer has its state; of a large batch, and of a small one, where parameters
# decide.
SCRIPT = """
from dataclasses import replace

import torch.nn.functional as F
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from fitact.planning import GIB
from fitact.planning.record import from_json
from fitact.runtime.measure import DEVICES
from tests.plan.test_plan import Block


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed, self.head = nn.Embedding(511, width), nn.Linear(width, 511)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), x.flatten())


def peak(plan, model, x, accumulate):
    plan.apply(model)
    sharded(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    if accumulate:
        model(x).backward()
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((x,))
    with tracker:
        model(x).backward()
    (sizes,) = tracker.get_tracker_snapshot("peak").values()
    return sizes["Total"] - x.nbytes


cpu = replace(DEVICES["t4"], name="CPU of a test")
for width, batch, accumulate in ((127, 32, False), (320, 4, False), (320, 4, True)):
    x = torch.randint(511, (batch, 64), generator=torch.Generator().manual_seed(rank))
    plans = []
    if rank == 0:
        planner = fitact.planner(Model(width), example_inputs=x, device=cpu, fsdp=2, accumulate=accumulate)
        whole = (3 + accumulate) * sum(one.nbytes for one in Model(width).parameters())
        assert whole / 2 <= planner.fixed < 0.51 * whole
        baseline = planner.fixed + planner.costs.baseline.peak
        for error, share in (("exact", 1), ("exact", 0.5), ("rounding", 0.1)):
            low = planner.least(error)
            plans.append(planner.plan((low + share * (baseline - low)) / GIB, error).to_json())
    told = [plans]
    dist.broadcast_object_list(told)
    for plan in map(from_json, told[0]):
        found = peak(plan, Model(width), x, accumulate)
        assert abs(plan.peak / found - 1) < 0.03, (width, plan.groups, plan.peak, found)
"""


@pytest.mark.full
def test_the_peak_of_each_rank(tmp_path: Path) -> None:
    run(SCRIPT, tmp_path)
