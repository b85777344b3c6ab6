"""Plans that offload: what they count is what the hooks do, on a link whose copies take time."""

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import fitact
from fitact.planning import GIB, Planner
from fitact.runtime.choose import BASELINE, FULL, MOVED, POLICIES, measure_costs
from fitact.runtime.measure import Meter, MeteredLink, copied
from fitact.runtime.restore import Inputs
from fitact.runtime.saving import offload
from tests.plan.test_plan import CPU, Block, Squared, halfway, results, step
from tests.support.links import SimulatedLink
from tests.support.saving import differences

HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let small memories be offloaded, too."""
    monkeypatch.setattr(offload, "LEAST", 2**12)
    yield
    assert not any(each.bytes for each in offload._made.offloads.values())


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Squared(*(Block(32) for _ in range(16))), torch.randn(16, 64, 32)


PLAIN = {"exact, offloaded": "exact", "rounding, offloaded": "rounding", MOVED.name: FULL.name}


@cache
def planner() -> Planner:
    model, x = made()
    return fitact.planner(model, example_inputs=x, optimizer="none", device=CPU, host_gib=1)


def test_what_waits_for_a_link() -> None:
    """A fast one costs no time; on a slow one each byte goes there and back, and nothing else counts."""
    policies = [BASELINE, *(POLICIES[name] for names in PLAIN.items() for name in names)]
    model, x = made()
    fast, slow = (
        measure_costs(copied(model, x, None, "cpu"), replace(CPU, link=link), policies).segments[1].costs
        for link in (1e18, 1e6)
    )
    for name, other in PLAIN.items():
        plain, quick, late = fast[POLICIES[other]], fast[POLICIES[name]], slow[POLICIES[name]]
        assert quick.work.seconds == pytest.approx(plain.work.seconds, rel=1e-6)
        assert quick.work.flops == plain.work.flops
        assert (late.saved, late.peak, late.host) == (quick.saved, quick.peak, quick.host)
        left = plain.saved - quick.saved  # what is on the host, which takes a power of two for each
        assert 0.95 * plain.saved < left <= quick.host <= 2 * left
        assert late.work.seconds == pytest.approx(2 * left / 1e6, rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize(("error", "share"), [("exact", 1e-3), ("rounding", 0.2), ("coarse", 0.1)])
def test_an_applied_plan(error: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peak, time and bytes on the host are those of real tensors; exact gradients are the baseline's."""
    plan = halfway(planner(), error, share)
    assert any("offloaded" in group.policy for group in plan.groups) and plan.host > 0
    assert f"of pinned memory, of {plan.host_gib:g} GiB" in str(plan)
    model, x = made()
    inputs = Inputs((x,))
    expected = results(model, inputs)
    plan.apply(model)
    monkeypatch.setattr(offload, "_made", offload._Made())
    with pytest.warns(UserWarning, match="offload moves nothing: tensors of the device cpu"):
        actual = results(model, inputs)
    assert error != "exact" or not differences(actual, expected)
    meter = Meter(owned := [*model.parameters()], CPU)
    monkeypatch.setitem(offload.LINKS, HOST, MeteredLink(meter, CPU.link))
    with meter:
        step(model, inputs)
    model.zero_grad(set_to_none=True)
    assert meter.peak + sum(each.nbytes for each in owned) == pytest.approx(plan.peak, rel=1e-3)
    assert meter.clock == pytest.approx(plan.seconds, rel=0.01)
    link = SimulatedLink(1e9)
    monkeypatch.setitem(offload.LINKS, HOST, link)
    for _ in range(3):
        actual = results(model, inputs)
    assert error != "exact" or not differences(actual, expected)
    assert 0.5 * plan.host < link.most <= plan.host
    fitact.revert(model)
    assert not differences(results(model, inputs), expected)


@pytest.mark.full
def test_more_memory_of_the_host_is_no_slower() -> None:
    """Its budget holds; and plans with offloading are as fast as those without."""
    with_host = copy(planner())
    with_host.host = 0
    low = with_host.least("exact")
    gib = low * 1.02 / GIB
    host = planner().plan(gib, "exact").host
    assert host > 0 and planner().least("exact") < low
    seconds = []
    for share in (0, 0.3, 0.6, 1):
        with_host.host = int(host * share)
        plan = with_host.plan(gib, "exact")
        assert plan.fits and plan.host <= host * share
        seconds.append(plan.seconds)
    assert all(b <= a * 1.001 for a, b in pairwise(seconds)) and seconds[-1] < seconds[0]
    assert MOVED.name in {point.name for point in planner().plan(gib, "exact", front=True).points}
