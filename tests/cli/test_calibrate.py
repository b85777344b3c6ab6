"""`fitact calibrate`, and fits with the weights that it writes."""

import re
import sys
from pathlib import Path

import pytest

from fitact.fitter.methods import again
from fitact.fitter.records import read, read_weights
from tests.conftest import Command
from tests.support.commands import FITS

MODEL = """
from collections import OrderedDict
import torch
from torch import nn
import torch.nn.functional as F

class Block(nn.Sequential):
    def forward(self, x):
        return F.silu(super().forward(x))[..., :8]

def tiny(batch=1, seq=3):
    torch.manual_seed(0)
    blocks = [Block(OrderedDict(up=nn.Linear(8, 16), act=nn.GELU())) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Softmax(-1)), torch.randn(batch, seq, 8)

seeds = [torch.Generator().manual_seed(i) for i in range(50)]
sample = lambda: (nn.Sequential(nn.GELU()), (torch.randn(2000, generator=seed) * 0.7 - 1 for seed in seeds))
wide = lambda: (nn.Sequential(nn.GELU()), torch.linspace(-40, 40, 1001))
named = lambda: (tiny()[0], {"input": torch.ones(2, 8)})
several = lambda: (tiny()[0], torch.utils.data.DataLoader([(torch.ones(8),)] * 5, batch_size=2))
"""


@pytest.fixture
def models(command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "calibrated_models", raising=False)
    Path("calibrated_models.py").write_text(MODEL, "utf-8")
    return command


def test_the_table_and_the_file(models: Command) -> None:
    """The same command gives the same bytes."""
    line, sites = "calibrate calibrated_models:tiny --batch 5 --seq 3", ["0.act", "1.act", "0:silu", "1:silu"]
    (status, out, err), written = models(line), Path("weights.json").read_text("utf-8")
    head, *rows, last = out.splitlines()
    assert (status, err, last) == (0, "", "wrote weights.json")
    assert " ".join(head.split()) == "site activation count mean deviation 0.1 % 99.9 % least largest"
    kinds = ["gelu", "gelu", "silu", "silu"]
    assert [row.split()[:3] for row in rows] == [[*row, "240"] for row in zip(sites, kinds, strict=True)]
    assert [site.path for site in read_weights(Path("weights.json")).sites] == sites
    assert models(line)[0] == 0 and Path("weights.json").read_text("utf-8") == written


BATCHES = {"tiny --seq 7": [112] * 4, "tiny --group --batch 2 --seq 3": [192] * 2, "named": [32] * 4}
BATCHES |= {"several": [80] * 4, "several --most 2": [64] * 4, "sample --most 3": [6000]}


@pytest.mark.parametrize(("arguments", "counts"), BATCHES.items(), ids=BATCHES)
def test_batches(arguments: str, counts: list[int], models: Command) -> None:
    assert models(f"calibrate calibrated_models:{arguments} -o folder/w.json")[0] == 0
    assert [site.count for site in read_weights(Path("folder/w.json")).sites] == counts


def test_a_fit_with_the_weight_of_a_site(models: Command) -> None:
    """How good it is, is in tests/fitter/test_weights.py."""
    assert models("calibrate calibrated_models:sample -o w.json")[0] == 0
    weight = read_weights(Path("w.json")).weight()
    for name, site in (("data", "w.json#0"), ("only", "w.json")):
        assert models(f"fit --fn gelu --bits 3 --domain -8 8 --name {name} --weight {site}")[0] == 0
    Path("w.json").unlink()
    fit, record = read(FITS / "data.json"), (FITS / "data.json").read_text("utf-8")
    assert fit.weight == weight and again(fit).to_json() == record, "without the file"
    assert record == (FITS / "only.json").read_text("utf-8").replace('"only"', '"data"')
    assert models("codegen generated/fits/data.json")[0] == 0


def test_what_lies_beyond_the_domain_is_told(models: Command) -> None:
    assert models("calibrate calibrated_models:wide")[0] == 0
    status, _, err = models("fit --fn gelu --bits 2 --weight weights.json --name a")
    beyond = r"fitact: warning: 7.*% of the weight lies beyond the domain -10 10: choose one with --domain\n"
    assert status == 0 and re.match(beyond, err)
    assert models("fit --fn gelu --bits 2 --weight weights.json --name b --domain -100 100")[::2] == (0, "")
