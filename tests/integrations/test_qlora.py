"""docs/qlora.md: its table, counted anew with bitsandbytes' layers."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import fitact
from fitact.runtime.choose import Conversion
from fitact.runtime.measure import imported
from tests.conftest import ROOT

bitsandbytes: Any = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")
ROW = re.compile(r"^\| `(\S+)`.*? \| (\S+) \| (\S+) \| (\S+) % \| bit for bit \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs" / "qlora.md").read_text("utf-8"))


def quantised(layer: nn.Linear, kind: str) -> nn.Module:
    """Return a frozen layer of bitsandbytes with the weights of one."""
    sizes, weight, half = (layer.in_features, layer.out_features), layer.weight.data, torch.bfloat16
    made: nn.Module
    if kind == "Linear4bit":
        made = bitsandbytes.nn.Linear4bit(*sizes, bias=False, compute_dtype=half, quant_type="nf4")
        made.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    else:
        made = bitsandbytes.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
        made.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    return made.to("cpu")


def converted(kind: str, dropout: float) -> Conversion:
    """Return the report of a small LLaMA with LoRA and frozen layers of a kind; its gradients are compared."""
    transformers, peft = imported("transformers"), imported("peft")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=256, use_cache=False, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if kind != "nn.Linear":
        for path, layer in [*model.named_modules()]:
            if isinstance(layer, nn.Linear) and path != "lm_head":
                model.set_submodule(path, quantised(layer, kind))
        setattr(model, "is_loaded_in_4bit" if kind == "Linear4bit" else "is_loaded_in_8bit", True)
    lora = peft.LoraConfig(r=8, lora_dropout=dropout, target_modules="all-linear")
    tokens = torch.randint(256, (4, 128))
    adapted = peft.get_peft_model(model, lora)
    report = fitact.convert(adapted, example_inputs={"input_ids": tokens, "labels": tokens})
    assert report.gradient is not None and report.gradient.error == 0
    return report


@pytest.mark.parametrize(("kind", "dropout", "before", "share"), ROWS)
def test_table(kind: str, dropout: str, before: str, share: str) -> None:
    report = converted(kind, float(dropout))
    assert f"{report.saved_before:,}" == before
    assert f"{100 * (report.saved_after or 0) / (report.saved_before or 1):.1f}" == share


def test_rows() -> None:
    assert len(ROWS) == 4


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_eight_bits(dropout: float) -> None:
    report = converted("Linear8bitLt", dropout)
    assert report.saved_before and report.saved_after and report.saved_after < 0.45 * report.saved_before
