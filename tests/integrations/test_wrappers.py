"""The tables of docs/integrations.md and docs/qlora.md: adapters and layers of others, converted and compared."""

import os
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fitact
from tests.conftest import ROOT
from tests.support.processes import python
from tests.support.rows import full

transformers: Any = pytest.importorskip("transformers")
peft: Any = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")
ROW = re.compile(r"^\| (.+?) \| ([\d,]+) \| (\S+) % \| bit for bit \|$", re.MULTILINE)
ROWS = {name: row for name, *row in ROW.findall((ROOT / "docs/integrations.md").read_text("utf-8"))}
QLORA = re.compile(r"^\| `(\S+)`.*? \| (\S+) \| (\S+) \| (\S+) % \| bit for bit \|$", re.MULTILINE)
QLORA_ROWS = QLORA.findall((ROOT / "docs/qlora.md").read_text("utf-8"))
PINNED = f"torch=={torch.__version__.partition('+')[0]}\n" in (ROOT / "constraints.txt").read_text("utf-8")
SOME = ["q_proj", "v_proj", "down_proj"]
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOKENS = {"num_virtual_tokens": 8, "task_type": "CAUSAL_LM"}
BATCH = torch.randint(256, (4, 128), generator=torch.Generator().manual_seed(0))
# A row of the table → the class of peft's configuration, and its arguments.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 8, "lora_dropout": 0.1, "target_modules": "all-linear"}),
    "DoRA": ("LoraConfig", {"r": 8, "lora_dropout": 0.1, "use_dora": True, "target_modules": "all-linear"}),
    "AdaLoRA": ("AdaLoraConfig", {"init_r": 8, "total_step": 100, "target_modules": LAYERS}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", *SOME[1:]], "feedforward_modules": SOME[2:]}),
    "VeRA": ("VeraConfig", {"r": 8, "target_modules": ["q_proj", "v_proj"]}),
    "VBLoRA": ("VBLoRAConfig", {"r": 4, "num_vectors": 64, "vector_length": 32, "target_modules": SOME[:2]}),
    "LoHa": ("LoHaConfig", {"r": 8, "target_modules": "all-linear"}),
    "LoKr": ("LoKrConfig", {"r": 8, "target_modules": "all-linear"}),
    "OFT": ("OFTConfig", {"oft_block_size": 32, "target_modules": "all-linear"}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 32, "target_modules": SOME}),
    "HRA": ("HRAConfig", {"r": 8, "target_modules": "all-linear"}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 100, "target_modules": SOME}),
    "MiSS": ("MissConfig", {"r": 16, "target_modules": SOME}),
    "LN tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm", "norm"], "task_type": "CAUSAL_LM"}),
    "prompt tuning": ("PromptTuningConfig", TOKENS),
    "prefix tuning": ("PrefixTuningConfig", TOKENS),
    "P-tuning": ("PromptEncoderConfig", {"encoder_hidden_size": 64, **TOKENS}),
}
QUICK = ("DoRA", "IA3")


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """BOFT sets CXX=gcc for all that follows, and then a compiler links C++ without its library."""
    with mock.patch.dict(os.environ):
        yield


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=256, use_cache=False, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def adapted(name: str, model: nn.Module | None = None, **more: Any) -> nn.Module:
    kind, options = ADAPTERS[name]
    return peft.get_peft_model(model or llama(), getattr(peft, kind)(**options | more))


def in_a_block(module: nn.Module, path: str) -> bool:
    return isinstance(module, nn.Linear) and "lm_head" not in path


def torchao(part: str) -> Any:
    return pytest.importorskip(f"torchao.{part}", reason="torchao is not installed")


def quantised(configuration: Any) -> nn.Module:
    """Return a LLaMA whose linear layers in blocks torchao has changed."""
    model = llama()
    torchao("quantization").quantize_(model, configuration, filter_fn=in_a_block)
    return model


def weight_only(name: str) -> nn.Module:
    return adapted("LoRA", quantised(getattr(torchao("quantization"), name)()))


def float8() -> nn.Module:
    config = torchao("float8").Float8LinearConfig(emulate=True)
    return torchao("float8").convert_to_float8_training(llama(), config=config, module_filter_fn=in_a_block)


def aware() -> nn.Module:
    weights = torchao("quantization.qat").IntxFakeQuantizeConfig(torch.int4, group_size=32)
    return quantised(torchao("quantization.qat").QATConfig(weight_config=weights, step="prepare"))


def in_bits(kind: str, dropout: float) -> nn.Module:
    """Return a LLaMA with LoRA whose layers are frozen ones of a kind, of bitsandbytes if not of PyTorch."""
    model = llama()
    if kind != "nn.Linear":
        bnb: Any = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").nn
        four = kind == "Linear4bit"
        given: dict[str, Any] = {"quant_type": "nf4"} if four else {"has_fp16_weights": False}
        more = {"compute_dtype": torch.bfloat16} if four else {}
        parameter = bnb.Params4bit if four else bnb.Int8Params
        for path, layer in [*model.named_modules()]:
            if in_a_block(layer, path):
                made = getattr(bnb, kind)(layer.in_features, layer.out_features, bias=False, **given, **more)
                made.weight = parameter(layer.weight.data, requires_grad=False, **given)
                model.set_submodule(path, made.to("cpu"))
        setattr(model, "is_loaded_in_4bit" if four else "is_loaded_in_8bit", True)
    return adapted("LoRA", model, lora_dropout=dropout)


LAYERS_OF: dict[str, Callable[[], nn.Module]] = {
    "torchao, weights in int8, LoRA": lambda: weight_only("Int8WeightOnlyConfig"),
    "torchao, weights in float8, LoRA": lambda: weight_only("Float8WeightOnlyConfig"),
    "torchao, float8 training": float8,
    "torchao, int8 training": lambda: quantised(
        torchao("prototype.quantized_training").int8_mixed_precision_training()
    ),
    "torchao, quantisation-aware, int4": aware,
}


def row(model: nn.Module) -> list[str]:
    """Convert a model, check that its step is the baseline's bit for bit, and return the row of the table."""
    inputs = {"input_ids": BATCH, "labels": BATCH}
    report: Any = fitact.convert(model, example_inputs=inputs, gradients=False)
    assert fitact.verify(model, inputs).same
    return [f"{report.saved_before:,}", f"{100 * report.saved_after / report.saved_before:.1f}"]


@pytest.mark.parametrize("name", full((*ADAPTERS, *LAYERS_OF), QUICK))
def test_table(name: str) -> None:
    actual = row(adapted(name) if name in ADAPTERS else LAYERS_OF[name]())
    assert float(actual[1]) < 100
    assert not PINNED or actual == ROWS[name]


def test_liger() -> None:
    """The table's last row; the others are those of test_table."""
    assert [*ROWS] == [*ADAPTERS, *LAYERS_OF, "Liger, in float32"]
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    actual = python("import tests.support.liger", folder=ROOT, warnings="ignore", TRITON_INTERPRET="1")
    assert actual.split() == ROWS["Liger, in float32"]


@pytest.mark.parametrize(("kind", "dropout", "before", "share"), QLORA_ROWS)
def test_table_of_qlora(kind: str, dropout: str, before: str, share: str) -> None:
    assert len(QLORA_ROWS) == 4 and row(in_bits(kind, float(dropout))) == [before, share]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_eight_bits(dropout: float) -> None:
    assert float(row(in_bits("Linear8bitLt", dropout))[1]) < 45
