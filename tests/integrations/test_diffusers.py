"""The table of docs/integrations.md: adapters of diffusion models, in their published sizes and in small ones."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fitact
from tests.conftest import ROOT

diffusers: Any = pytest.importorskip("diffusers", reason="diffusers is not installed")
peft: Any = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")
ROW = re.compile(r"^\| (.+?) \| (\d+) \| ([\d.]+) GiB \| (\d+) % \| (\d+) % \| (\d+) % \|$", re.MULTILINE)
ROWS = {row[0]: row[1:] for row in ROW.findall((ROOT / "docs/integrations.md").read_text("utf-8"))}
UNET = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "norm_num_groups": 16}
UNET |= {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "block_out_channels": (32, 64)}
SMALL_XL = UNET | {"addition_embed_type": "text_time", "addition_time_embed_dim": 8}
SMALL_XL |= {"projection_class_embeddings_input_dim": 1328}
XL = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")}
XL |= {"up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), "addition_time_embed_dim": 256}
XL |= {"transformer_layers_per_block": (1, 2, 10), "addition_embed_type": "text_time"}
XL |= {"block_out_channels": (320, 640, 1280), "attention_head_dim": (5, 10, 20), "use_linear_projection": True}
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
DIT = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4, "joint_attention_dim": 32}
# The class, its arguments in the published size and in a small one, beside the defaults; latents and words.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], int, int]] = {
    "Stable Diffusion 1.5, UNet": ("UNet2DConditionModel", {"cross_attention_dim": 768}, UNET, 64, 77),
    "SDXL, UNet": (
        "UNet2DConditionModel",
        XL | {"projection_class_embeddings_input_dim": 2816},
        SMALL_XL,
        128,
        77,
    ),
    "Stable Diffusion 3": (
        "SD3Transformer2DModel",
        {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 192},
        {**DIT, "caption_projection_dim": 64, "pos_embed_max_size": 64},
        128,
        333,
    ),
    "Flux.1": (
        "FluxTransformer2DModel",
        {"guidance_embeds": True},
        DIT | {"axes_dims_rope": (4, 4, 8), "num_single_layers": 1},
        64,
        512,
    ),
}


def made(name: str, batch: int, small: bool) -> tuple[Any, dict[str, Any]]:
    """Return a model with frozen weights in bfloat16 and adapters in float32, and its inputs."""
    kind, published, tiny, latents, words = MODELS[name]
    model = getattr(diffusers, kind)(**(tiny if small else published)).to(torch.bfloat16)
    model.requires_grad_(False).train()
    model.add_adapter(peft.LoraConfig(r=8, init_lora_weights=False, target_modules=TARGETS))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    config, side = model.config, 16 if small else latents

    def noise(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, dtype=torch.bfloat16)

    given: dict[str, Any] = {"timestep": torch.ones(batch)}
    width = getattr(config, "joint_attention_dim", None) or config.cross_attention_dim
    given["encoder_hidden_states"] = noise(words, width)
    if kind.startswith("UNet"):
        given["sample"] = noise(4, side, side)
        if config.addition_embed_type:
            given["added_cond_kwargs"] = {"text_embeds": noise(1280), "time_ids": noise(6)}
        return model, given
    given["pooled_projections"] = noise(config.pooled_projection_dim)
    if kind.startswith("SD3"):
        return model, given | {"hidden_states": noise(config.in_channels, side, side)}
    given |= {"img_ids": torch.zeros(side * side, 3), "txt_ids": torch.zeros(words, 3)}
    given |= {"guidance": torch.ones(batch)} if config.guidance_embeds else {}
    return model, given | {"hidden_states": noise(side * side, config.in_channels)}


@pytest.mark.long
@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_table(name: str) -> None:
    batch, *stated = ROWS[name]
    with torch.device("meta"):
        model, inputs = made(name, int(batch), small=False)
    shares = []
    for error in ("exact", "rounding", "coarse"):
        with torch.autocast("cpu", torch.bfloat16):
            report: Any = fitact.convert(model, error=error, example_inputs=inputs)
        shares.append(f"{100 * report.saved_after / report.saved_before:.0f}")
        fitact.revert(model)
    assert stated == [f"{report.saved_before / 2**30:.1f}", *shares]
    model.enable_gradient_checkpointing()
    with torch.autocast("cpu", torch.bfloat16):
        checkpointed: Any = fitact.convert(model, error="exact", example_inputs=inputs)
    assert checkpointed.saved_before < report.saved_after


@pytest.mark.parametrize("name", MODELS)
def test_same(name: str, tmp_path: Path) -> None:
    """A step of a small one is the baseline's bit for bit, and diffusers saves it as the class that it was."""
    torch.manual_seed(0)
    model, inputs = made(name, 2, small=True)
    with torch.autocast("cpu", torch.bfloat16):
        fitact.convert(model, error="exact")
        assert fitact.verify(model, inputs).same
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["_class_name"] == MODELS[name][0]
