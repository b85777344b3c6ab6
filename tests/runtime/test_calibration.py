"""Calibration: what goes into a model's activations is what is counted, and nothing of the model changes."""

import gc
import random
import weakref
from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fitact
from fitact.fitter.records.weights import Calibration
from fitact.runtime.measure import sketch
from fitact.runtime.measure.sketch import NEAR, STEPS, Sketch
from tests.convert.test_trials import looks
from tests.support.built import built
from tests.support.refusals import refused


def counted(*parts: Tensor) -> Sketch:
    actual = Sketch()
    for part in parts:
        actual.add(part)
    return actual


def numbers(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 0.5


def test_counts() -> None:
    x = torch.cat([numbers(5000), numbers(5000) * 1e-4, torch.tensor([0.0, -0.0, 1e-30, 3e29, -7e29])])
    edges, counts = counted(x).cells()
    assert np.histogram(x.numpy(), edges)[0].tolist() == counts
    widths, size = np.diff(edges), np.abs(edges[1:])
    assert widths.max() > 1e27
    np.testing.assert_array_less(widths, np.maximum(1.01 * size / STEPS, 1.01 * NEAR / STEPS) + size / STEPS)
    small = (size < NEAR / 2) & (np.abs(edges[:-1]) < NEAR / 2)
    np.testing.assert_array_less(widths[small], 1.2 * NEAR / STEPS)
    assert Sketch().cells() == ([], [])


def test_chunks_and_streams_count_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = numbers(1000)
    whole = counted(x)
    monkeypatch.setattr(sketch, "CHUNK", 7)
    for parts in ([x], x.split(33), [x.view(10, 5, 20).mT], [x.view(2, 500)[:, ::1]]):
        other = counted(*parts)
        assert torch.equal(other.counts, whole.counts)
        assert (other.count, other.least, other.largest) == (whole.count, whole.least, whole.largest)
        assert (other.mean, other.deviation) == pytest.approx((whole.mean, whole.deviation), rel=1e-12)


def forward(self: Any, x: Tensor) -> Tensor:
    """Call activations of every kind that calibration sees."""
    y = self.act(self.up(x))
    y = self.gate(y) + self.approximate(input=y)
    y = self.drop(self.own(self.slope(self.norm(y))))
    y = torch.tanh(y) + y.sigmoid() + F.gelu(y, approximate="tanh")
    return self.down(F.relu(y, inplace=True))


def block() -> nn.Module:
    parts = {"up": nn.Linear(8, 24), "act": nn.GELU(), "gate": F.silu, "norm": nn.BatchNorm1d(24)}
    parts |= {"approximate": partial(F.gelu, approximate="tanh"), "slope": nn.LeakyReLU(0.2)}
    parts |= {"own": built(lambda self, x: x * torch.sigmoid(x)), "drop": nn.Dropout(0.5)}
    return built(forward, **parts, down=nn.Linear(24, 8))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(block(), block(), nn.Softmax(-1))
    model[1].unused = nn.Tanh()
    return model


BATCHES = [torch.randn(16, 8, generator=torch.Generator().manual_seed(i)) * (i + 1) for i in range(3)]
OF_A_BLOCK = {"act": "gelu", "slope": "LeakyReLU(negative_slope=0.2)", "own": "silu"}
OF_A_BLOCK |= {f":{name}": name for name in ("silu", "tanh", "sigmoid", "gelu_tanh", "relu")}


def test_sites() -> None:
    model = net()
    actual = fitact.calibrate(model, BATCHES)
    assert isinstance(actual, Calibration) and actual.to_json() == fitact.calibrate(model, BATCHES).to_json()
    expected = {f"{i}{'.' * (name[0] != ':')}{name}": kind for i in (0, 1) for name, kind in OF_A_BLOCK.items()}
    assert {site.path: site.activation for site in actual.sites} == expected
    twice = {site.path: 1 + site.path.endswith(":gelu_tanh") for site in actual.sites}
    assert {site.path: site.count for site in actual.sites} == {path: k * 3 * 16 * 24 for path, k in twice.items()}
    assert actual.notes == ("not calibrated: 1.unused: tanh: it was not run",)
    for line in str(actual).splitlines()[1 : len(expected) + 1]:
        assert line.split()[0] in expected


@pytest.mark.parametrize("train", [True, False])
def test_the_inputs_are_those_of_the_model(train: bool) -> None:
    """In the mode it is in, with the random numbers that come next, batch norm included."""
    model, copied = net().train(train), net().train(train)
    seen: dict[str, list[Tensor]] = defaultdict(list)
    for i, block in enumerate(copied[:2]):
        for name in ("act", "slope", "own"):
            keep = seen[f"{i}.{name}"]
            block.get_submodule(name).register_forward_pre_hook(lambda _, args, keep=keep: keep.append(args[0]))
        keep = seen[f"{i}:tanh"]
        block.drop.register_forward_hook(lambda *args, keep=keep: keep.append(args[2].clone()))
    torch.manual_seed(5)
    with torch.no_grad():
        for batch in BATCHES:
            copied(batch)
    torch.manual_seed(5)
    actual = {site.path: site for site in fitact.calibrate(model, BATCHES).sites}
    for path, parts in seen.items():
        x, each = torch.cat([part.flatten() for part in parts]).double(), actual[path]
        expected = [x.min().item(), x.max().item(), x.mean().item(), x.std(correction=0).item()]
        assert [each.least, each.largest, each.mean, each.deviation] == pytest.approx(expected, rel=1e-6)
        assert (each.weight(np.linspace(-30, 30, 9)) > 0).all()


def test_groups() -> None:
    alone, grouped = (fitact.calibrate(net().eval(), BATCHES, group=group) for group in (False, True))
    paths = [site.path for site in alone.sites if site.path[0] == "0"]
    assert [site.path.replace("*", "0") for site in grouped.sites] == paths
    for site in grouped.sites:
        parts = [part for part in alone.sites if part.path in (site.path.replace("*", i) for i in "01")]
        assert site.count == sum(part.count for part in parts)
        assert site.mean == pytest.approx(sum(part.mean * part.count for part in parts) / site.count, rel=1e-5)
        assert site.largest == max(part.largest for part in parts)
    actual = fitact.calibrate(nn.Sequential(nn.GELU(), nn.SiLU(), nn.GELU()), BATCHES, group=True)
    assert {site.path: site.count for site in actual.sites} == {"* (gelu)": 768, "* (silu)": 384}


def _fails(model: nn.Module) -> None:
    model(BATCHES[0])
    np.random.rand()  # noqa: NPY002
    raise RuntimeError("two\nlines")


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_model_stays_as_it_was(train: bool, fails: bool) -> None:
    model = net().train(train)
    model[1].eval()

    def state() -> Any:
        generators = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002
        return looks((model, BATCHES, torch.get_rng_state(), torch.is_grad_enabled(), generators))

    before = state()
    if fails:
        message = refused(fitact.calibrate, model, [BATCHES[0], _fails])
        assert message == "batch 1: the model cannot be run with it: RuntimeError: two lines"
    else:
        fitact.calibrate(model, BATCHES)
    assert state() == before


def test_no_tensor_is_stored() -> None:
    alive: list[weakref.ref[Tensor]] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            gc.collect()
            assert not any(each() is not None for each in alive)
            y = super().forward(x)
            alive.append(weakref.ref(y))
            return y

    actual = fitact.calibrate(nn.Sequential(Watched(3, 3), nn.GELU()), (torch.ones(2, 3) * i for i in range(4)))
    assert (len(alive), actual.sites[0].count) == (4, 24)


def test_kinds_of_batches_and_models() -> None:
    """A module at two places is one site; converted models, and those in a context, are seen as they were."""

    def sites(model: nn.Module, batches: Any) -> list[Any]:
        return [(site.path, site.activation, site.count) for site in fitact.calibrate(model, batches).sites]

    x, act = torch.ones(3), nn.GELU()
    two = built(lambda self, x, *, y: F.silu(x + y))
    assert sites(two, [{"x": x, "y": x}, lambda model: model(x, y=x)]) == [(":silu", "silu", 6)]
    assert sites(nn.Sequential(nn.GELU()), [(x,), [x], x]) == [("0", "gelu", 9)]
    assert sites(nn.Sequential(act, nn.Linear(8, 8), act), BATCHES) == [("0", "gelu", 2 * 3 * 16 * 8)]
    half = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh()).bfloat16()
    fitact.convert(half, "fewbit", bits=3)
    actual = sites(half, [batch.bfloat16() for batch in BATCHES])
    assert [each[:2] for each in actual] == [("1", "gelu_fewbit3"), ("3", "tanh_fewbit3")]
    model = net()
    expected = fitact.calibrate(model, BATCHES)
    fitact.convert(model, error="coarse")
    assert fitact.calibrate(model, BATCHES) == expected


def test_what_is_not_finite_is_told() -> None:
    bad = BATCHES[0].clone()
    bad[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    actual = fitact.calibrate(nn.Sequential(nn.GELU()), [bad])
    assert (actual.sites[0].count, actual.sites[0].left_out) == (125, 3)
    assert actual.notes == ("0: 3 numbers are NaN, infinite or huge, and not counted",)


GELU = nn.Sequential(nn.GELU())
REFUSED: list[tuple[Any, Any, str]] = [
    (GELU, BATCHES[0], "batches: expected several batches, as a list, got tensor"),
    (GELU, "text", "batches: expected several batches"),
    (3, BATCHES, "expected a model, an nn.Module, got int"),
    (GELU, [], "batches: expected at least one batch, got none"),
    (GELU, [3], "example_inputs 3: expected a tensor"),
    (GELU, (BATCHES[0] / (1 // (1 - i)) for i in range(2)), "batch 1: it cannot be made: ZeroDivisionError"),
    (nn.Sequential(nn.Linear(8, 8)), BATCHES, "no input of an activation was seen in the model"),
    (nn.Sequential(nn.Linear(8, 8, device="meta"), nn.GELU()), BATCHES, "have no values"),
    (nn.Sequential(nn.LazyLinear(8), nn.GELU()), BATCHES, "not initialised yet"),
    (GELU, [torch.eye(2).to_sparse()], "0: expected a dense tensor"),
    (GELU, [torch.zeros(2, dtype=torch.complex64)], "0: expected a dense tensor of real"),
    (GELU, [torch.full((2,), torch.nan)], "no input of an activation was seen in the model; 0: 2 numbers are NaN"),
    (torch.compile(GELU), BATCHES, "the model is compiled"),
]


@pytest.mark.parametrize(("model", "batches", "reason"), REFUSED)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_refused(model: nn.Module, batches: Any, reason: str) -> None:
    assert reason in refused(fitact.calibrate, model, batches)
