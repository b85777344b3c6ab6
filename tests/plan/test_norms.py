"""Plans that merge norms: chosen only where that is asked for, as said where applied, and undone where refused."""

from __future__ import annotations

import copy
import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fitact
from fitact.cli import main
from fitact.errors import FitactError, UsageError
from fitact.planning import make
from fitact.planning.make import Planner
from fitact.planning.record import GIB, Group, Plan, from_json
from fitact.runtime.memory.peak import peak_memory
from fitact.runtime.memory.saved import count_saved
from fitact.runtime.norms import rewrite
from fitact.runtime.norms.modules import MSLayerNorm, MSRMSNorm
from fitact.runtime.plan.devices import DEVICES
from fitact.runtime.plan.subjects import of_model, runs_of, with_norms
from fitact.runtime.plan.ways import MERGED, WAYS, Checkpointed
from fitact.runtime.rebuild.modules import Rebuilding
from fitact.runtime.torch_internals import storage_id

FEW = ("stock", "checkpointed", "codes of 8 bits", "codes of 4 and 8 bits")  # to measure less
CPU = dataclasses.replace(DEVICES["t4"], name="CPU of a test")
WIDTH = 64


class Mixer(nn.Module):
    """In the place of attention: three layers read a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.q(x) + self.k(x) + self.v(x)
        return y


class Gated(nn.Module):
    """The MLP of LLaMA."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.act, self.down = nn.SiLU(), nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    """A block like those of LLaMA, or of a vision transformer with no biases at its queries."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        norm = nn.RMSNorm if kind == "llama" else nn.LayerNorm
        self.first, self.second = norm(WIDTH), norm(WIDTH)
        self.mixer = Mixer()
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mlp = Gated() if kind == "llama" else nn.Sequential(up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.first(x))
        y: Tensor = x + self.mlp(self.second(x))
        return y


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


@cache
def built(kind: str) -> tuple[nn.Module, Tensor]:
    """Return a model whose norms have an α and β that change what it computes, and its inputs."""
    torch.manual_seed(0)
    model = Model(kind)
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            for parameter in module.parameters():
                nn.init.uniform_(parameter, 0.5, 1.5)
    return model, torch.randn(4, 64, WIDTH)


@cache
def planner(kind: str, norms: bool) -> Planner:
    model, x = built(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "OF_BLOCKS", tuple(WAYS[name] for name in FEW))
        patch.setattr(
            make, "MERGED", tuple(way for way in MERGED if way.name.removeprefix("merged norms, ") in FEW)
        )
        return fitact.planner(model, example_inputs=x, optimizer="none", device=CPU, norms=norms)


@cache
def sizes(kind: str, error: str) -> tuple[int, int]:
    """Return the least peak of a plan that may merge norms, and stock's."""
    of = planner(kind, norms=True)
    return of.least(error), of.fixed + of.costs.stock.peak


def planned(kind: str, share: float, error: str = "rounding", *, norms: bool = True) -> Plan:
    """Return the plan for a memory so far above the least one with norms, as a share of the way to stock's."""
    low, stock = sizes(kind, error)
    return planner(kind, norms).plan((low + share * (stock - low)) / GIB, error, front=False)


def a_plan(way: str = "merged norms, codes of 8 bits") -> Plan:
    """Return a plan that merges norms in all blocks, where they go a way."""
    blocks = tuple(f"blocks.{i}" for i in range(3))
    norms = tuple(f"{block}.{name}" for block in blocks for name in ("first", "second"))
    return dataclasses.replace(planned("vit", 0.5), groups=(Group(way, blocks),), norms=norms)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    """Return whether a model is as it was, bit for bit."""
    now = model.state_dict()
    changed = MSLayerNorm, MSRMSNorm, Checkpointed, Rebuilding
    plain = not any(isinstance(one, changed) for one in model.modules())
    return plain and now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in now)


@pytest.mark.parametrize(("kind", "error"), [("llama", "rounding"), ("vit", "rounding"), ("vit", "few-bit")])
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_an_applied_plan_keeps_what_it_said(kind: str, error: str, share: float) -> None:
    model, x = built(kind)
    plan = planned(kind, share, error)
    assert plan.fits
    assert len(plan.norms) == 2 * sum(len(group.blocks) for group in plan.groups if WAYS[group.way].norms) > 0
    twin = copy.deepcopy(model)
    plan.apply(twin, x[:1])
    assert sum(isinstance(one, (MSLayerNorm, MSRMSNorm)) for one in twin.modules()) == len(plan.norms)
    torch.testing.assert_close(twin(x), model(x), rtol=1e-4, atol=1e-4)
    peak = peak_memory(lambda: twin(x).backward(torch.ones(4, 64, 8)), twin)["total"]
    assert peak == pytest.approx(plan.peak, rel=0.01)
    twin.zero_grad(set_to_none=True)
    with count_saved(twin) as saved:
        output = twin(x)
    if not any(isinstance(one, Checkpointed) for one in twin.modules()):
        kept = sum(one.nbytes() for key, one in saved.storages.items() if key != storage_id(x))
        assert kept + output.nbytes == pytest.approx(plan.kept, rel=0.01)
    fitact.revert_plan(twin)
    assert [type(one) for one in twin.modules()] == [type(one) for one in model.modules()]
    assert twin.state_dict().keys() == model.state_dict().keys()
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name])


def test_gradients_are_those_of_the_merged_model() -> None:
    """With norms merged and nothing else, those of the weights W·diag(α) are W's divided by α."""
    model, x = built("vit")
    twin = copy.deepcopy(model)
    alpha = model.get_parameter("blocks.1.first.weight").detach().clone()
    a_plan("merged norms").apply(twin, x)
    wanted, found = (
        torch.autograd.grad(one(x).square().mean(), one.get_parameter("blocks.1.mixer.q.weight"))[0]
        for one in (model, twin)
    )
    beta = model.get_parameter("blocks.1.first.bias").detach()
    by_bias = torch.autograd.grad(twin(x).square().mean(), twin.get_parameter("blocks.1.mixer.q.bias"))[0]
    torch.testing.assert_close(found * alpha + by_bias[:, None] * beta, wanted, rtol=1e-3, atol=1e-6)


def test_norms_are_merged_only_where_asked_for_and_plans_are_no_slower() -> None:
    for error in ("exact", "rounding", "few-bit"):
        for share in (0.1, 0.5, 1.5):
            merged, plain = (planned("vit", share, error, norms=norms) for norms in (True, False))
            assert not plain.norms
            assert not any(WAYS[group.way].norms for group in plain.groups)
            assert not (error == "exact" and merged.norms)
            if plain.fits:
                assert merged.seconds <= plain.seconds * (1 + 1e-9)
    assert not any(
        way in costs for way in MERGED for costs in (s.costs for s in planner("vit", False).costs.segments)
    )


def test_without_inputs_nothing_is_changed() -> None:
    model = copy.deepcopy(built("vit")[0])
    before = state(model)
    with pytest.raises(UsageError, match="merges 6 norms, which runs the model: expected example_inputs"):
        a_plan().apply(model)
    assert unchanged(model, before)


def test_a_norm_that_cannot_be_merged_for_its_values() -> None:
    model, x = copy.deepcopy(built("vit"))
    with torch.no_grad():
        model.get_parameter("blocks.1.second.weight")[3] = 0
    before = state(model)
    with pytest.raises(UsageError, match=r"blocks\.1\.second: α is 0 in 1 of 64 .*plan without norms") as raised:
        a_plan().apply(model, x)
    assert "\n" not in str(raised.value)
    assert unchanged(model, before)


def test_outputs_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "MARGIN", 0)
    model, x = copy.deepcopy(built("vit"))
    before = state(model)
    with pytest.raises(FitactError, match=r"after merging 6 norms the outputs differ .*plan without norms"):
        a_plan().apply(model, x)
    assert unchanged(model, before)


def test_a_block_that_cannot_be_changed_after_norms_were_merged() -> None:
    """The first block has merged norms and codes by then; all is bit for bit as it was."""
    model, x = copy.deepcopy(built("vit"))
    model.get_submodule("blocks.2.mlp").register_module("1", nn.Identity())
    before = state(model)
    with pytest.raises(UsageError, match=r"blocks\.2: merged norms, codes of 8 bits: "):
        a_plan().apply(model, x)
    assert unchanged(model, before)


def test_like_norms_of_all_blocks_or_none() -> None:
    """One norm has a hook, which would be lost; then only the others of its block and their likes are merged."""
    model, x = copy.deepcopy(built("llama"))
    model.get_submodule("blocks.2.second").register_forward_hook(lambda *_: None)
    subject = of_model(model, x, None, "cpu")
    (run,), note = with_norms(subject, runs_of(subject, CPU))
    assert [[*of_block] for of_block in run.norms] == [[f"blocks.{i}.first"] for i in range(3)]
    assert not note
    subject.model.get_submodule("blocks.0.first").register_forward_hook(lambda *_: None)
    (run,), note = with_norms(subject, runs_of(subject, CPU))
    assert not any(run.norms)
    assert note == "no norm of a block can be merged, blocks.0.first: it has hooks, which would be lost"


def test_a_plan_is_kept(tmp_path: Path) -> None:
    plan = a_plan()
    plan.save(tmp_path / "plan.json")
    assert fitact.load_plan(tmp_path / "plan.json") == plan
    assert "6 norms are merged" in str(plan)
    given = json.loads(plan.to_json())
    older = {key: value for key, value in given.items() if key != "norms"}
    with pytest.raises(UsageError, match=r"expected some in 'blocks\.0', which merges norms"):
        from_json(json.dumps(older))
    stock = older | {"groups": [{"way": "stock", "blocks": ["blocks.0"]}]}
    assert from_json(json.dumps(stock)).norms == ()
    bad: list[tuple[dict[str, Any], str]] = [
        ({"norms": [*plan.norms, "head.norm"]}, r"norms\[6\]: expected a norm in a block that merges norms"),
        ({"norms": [*plan.norms[1:], 3]}, r"norms\[5\]: expected a printable text"),
        ({"groups": stock["groups"]}, r"norms\[0\]: expected a norm in a block"),
    ]
    for change, message in bad:
        with pytest.raises(UsageError, match=message):
            from_json(json.dumps(given | change))


MINE = """
import torch

class Block(torch.nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)

def mine(batch=2, seq=8):
    nn = torch.nn
    parts = lambda: (nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
    return nn.Sequential(*(Block(*parts()) for _ in range(3))), torch.randn(batch, seq, 32)
"""


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "norms_of_mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    call = "plan norms_of_mine:mine --batch 64 --gib 0.04 --norms --no-front -o plan.json"
    assert main(call.split()) == 0
    assert "merged norms" in capsys.readouterr().out
    assert fitact.load_plan("plan.json").norms == ("0.0", "1.0", "2.0")


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "without", "merged"),
    [
        ("--hf llama --lora all --batch 8 --seq 2048 --gib 24", 1.41, 1.28),
        ("--timm vit_base_patch16_224 --batch 64 --gib 2.5", 1.05, 1.03),
        ("--hf gpt2 --batch 8 --seq 1024 --gib 4", 1.00, 0.99),
    ],
)
def test_what_the_guide_says_of_merged_norms(command: str, without: float, merged: float, tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    for options, stated in (([], without), (["--norms"], merged)):
        path = str(tmp_path / "plan.json")
        assert main(["plan", *command.split(), "--no-front", *options, "-o", path]) == 0
        assert f"{1 + fitact.load_plan(path).slower:.2f}" == f"{stated:.2f}"
        assert f"{stated:.2f}" in guide
    assert f"fitact plan {command} --norms" in guide
