"""The compiler as a way: what its graphs keep and need, and that a plan takes it where it is fastest."""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

import fitact
from fitact.errors import UsageError
from fitact.planning.problem import Problem, chosen, line_of
from fitact.planning.record import Group, Plan
from fitact.runtime.compare.baselines import compiled
from fitact.runtime.models.prepare import Inputs, Prepared, Source
from fitact.runtime.models.reference import Block
from fitact.runtime.plan.compiled import compiled_steps, step_of
from fitact.runtime.plan.costs import Costs, Step, measure, step
from fitact.runtime.plan.devices import DEVICES
from fitact.runtime.plan.subjects import Subject, of_model
from fitact.runtime.plan.timeline import Work
from fitact.runtime.plan.ways import COMPILED, FULL, SELECTIVE, STOCK, WAYS, Way
from fitact.runtime.torch_internals import is_compiled

CPU = dataclasses.replace(DEVICES["t4"], name="CPU of a test")
ROWS, WIDTH = 64, 128


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(nn.GELU(), 4, WIDTH) for _ in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.blocks(x).square().mean()
        return loss


def made(blocks: int = 6) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Model(blocks), torch.randn(4, ROWS, WIDTH)


@cache
def measured() -> tuple[Subject, Costs]:
    model, x = made()
    subject = of_model(model, x, None, "cpu")
    return subject, measure(subject, CPU, [STOCK, FULL, SELECTIVE, WAYS["rebuilt"], WAYS["codes of 8 bits"]])


def plan_of(way: Way) -> Plan:
    """Return a plan that compiles the whole model."""
    names = dict.fromkeys(("model", "training", "inputs", "dtype", "optimizer", "device"), "")
    counts = dict.fromkeys(("fixed", "gradients", "peak", "kept", "flops_again", "traffic_again", "stock_peak"), 0)
    times = {"seconds": 1.0, "stock_seconds": 2.0, "gib": 1.0}
    given: dict[str, Any] = names | counts | times
    return Plan(**given, error="rounding", groups=(Group(way.name, ("",)),))


def test_what_is_between_products_is_one_kernel() -> None:
    """y = relu(x w) z, summed, is one kernel, which reads x w and z; the mask that is kept is another."""

    def forward(x: Tensor, w: Tensor, z: Tensor) -> Any:
        h = x @ w
        y = h.relu() * z
        return y.sum(), h > 0, z

    def backward(dy: Tensor, mask: Tensor, z: Tensor, x: Tensor) -> Any:
        return x.t() @ (dy * z * mask)

    x, w, z = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    one = make_fx(forward, tracing_mode="fake")(x, w, z)
    kept = [node.meta["val"] for node in one.graph.find_nodes(op="output")[0].args[0]]
    given = [node.meta["val"] for node in one.graph.find_nodes(op="placeholder")]
    with kept[0].fake_mode:
        dy = torch.empty(())
    other = make_fx(backward, tracing_mode="real")(dy, kept[1], kept[2], given[0])
    found = step_of(one, other, 1, CPU)
    rows, wide, mask, number = 4 * ROWS * WIDTH, 4 * WIDTH * WIDTH, ROWS * WIDTH, 4
    products = 2 * (rows + wide + rows)
    assert found.work.traffic == products + (2 * rows + number) + (rows + mask) + (number + mask + rows + rows)
    assert found.work.flops == 2 * 2 * ROWS * WIDTH * WIDTH
    assert found.kept == number + mask  # z and x are inputs
    assert found.peak == max(rows + number + mask, number + number + mask + rows, number + rows + wide)


@pytest.mark.parametrize(("faster", "fits"), [(True, True), (True, False), (False, True)])
def test_the_compiler_is_taken_where_it_fits_and_is_faster(faster: bool, fits: bool) -> None:
    subject, costs = measured()
    stock = costs.stock
    room = stock.peak
    share = 0.5 if faster else 2.0
    of_compiler = Step(stock.kept, room if fits else room + 1, Work(stock.work.seconds * share))
    way = WAYS["compiler, budget 0.9"]
    costs = dataclasses.replace(costs, compiled={way: of_compiler})
    groups, done = chosen(subject, CPU, Problem(costs, "exact"), room)
    taken = faster and fits
    assert (groups == [Group(way.name, ("",))]) is taken
    assert done.work.seconds == (of_compiler if taken else stock).work.seconds


@pytest.mark.parametrize("error", ["exact", "rounding"])
def test_nothing_is_faster_than_a_plan(error: str) -> None:
    """As measured, at each of some budgets: neither any one way for all blocks, nor the compiler."""
    subject, costs = measured()
    stock = costs.stock
    steps = {
        way: Step(stock.kept, stock.peak * share // 10, Work(stock.work.seconds * time))
        for way, share, time in zip(COMPILED, (9, 8, 6, 5, 4), (1.02, 1.04, 1.1, 1.12, 1.14), strict=True)
    }
    costs = dataclasses.replace(costs, compiled=steps)
    problem = Problem(costs, error)
    answers = [problem.every(way) for way in (STOCK, FULL, SELECTIVE)] + [
        problem.every(FULL, n) for n in (2, 3, 4)
    ]
    others = [step(subject, CPU, costs.runs, problem.taken(one)) for one in answers]
    others += problem.compiled.values()
    low = min(one.peak for one in others)
    for k in range(6):
        room = low + (stock.peak - low) * k // 5
        groups, done = chosen(subject, CPU, problem, room)
        assert groups
        assert done.peak <= room
        assert done.work.seconds <= min(one.work.seconds for one in others if one.peak <= room) * (1 + 1e-9)
    line = line_of(problem, error, stock.peak, 0)
    for point in line:
        best = min((one.work.seconds for one in problem.compiled.values() if one.peak <= point.peak), default=9e9)
        assert point.seconds <= best


def test_a_plan_compiles_in_place_and_back() -> None:
    model, _ = made(1)
    plan = plan_of(WAYS["compiler, 0.9 and codes"])
    plan.apply(model)
    assert is_compiled(model)
    with pytest.raises(UsageError, match="compiled already"):
        plan.apply(model)
    assert not is_compiled(copy.deepcopy(model))
    fitact.revert_plan(model)
    assert not is_compiled(model)
    own = copy.deepcopy(model)
    own.compile()
    fitact.revert_plan(own)
    assert is_compiled(own)  # by its owner
    assert "with codes of 8 bits, compiled" in str(plan)


def test_a_loss_outside_of_the_model_is_refused() -> None:
    model, x = made(1)
    subject = of_model(model, lambda given: given(x) * 2, None, "cpu")
    with pytest.raises(UsageError, match="returns its loss or its outputs"):
        compiled_steps(subject, CPU, COMPILED[:1])


@pytest.mark.full
def test_the_compiler_keeps_what_the_report_says() -> None:
    """`fitact memory` counts the same graphs, with inputs and without outputs, and keeps no mask as bits."""
    model, x = made(2)
    subject = of_model(model, x, None, "cpu")
    source = Source("model", lambda batch, seq: (model, Inputs((x,))), lambda *_: Inputs((x,)))
    counted = compiled(Prepared("model", model, source, torch.float32, None), Inputs((x,)), [1.0, 0.9, 0.7])
    steps = compiled_steps(subject, CPU, COMPILED[:3])
    kept = [one.saved.bytes - x.nbytes for one in counted]
    assert [one.kept - 4 for one in steps.values()] == kept
    assert [one.work.flops for one in steps.values()] == [one.flops for one in counted]


@pytest.mark.full
@pytest.mark.long
def test_a_compiled_step_peaks_at_what_was_foretold() -> None:
    """By PyTorch's profiler, which sees what Inductor's kernels allocate."""
    model, x = made(2)
    way = WAYS["compiler, 0.9 and codes"]
    (foretold,) = compiled_steps(of_model(model, x, None, "cpu"), CPU, [way]).values()
    plan_of(way).apply(model)
    for _ in range(2):  # the first compiles
        model.zero_grad(set_to_none=True)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            model(x).backward()
    assert peak_of(seen) == pytest.approx(foretold.peak, rel=0.1)


def peak_of(seen: Any) -> int:
    level = most = 0
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda one: one.start_ns()):
        level += event.nbytes()
        most = max(most, level)
    return most
