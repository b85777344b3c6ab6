"""Fine-tunes a language model with LoRA under transformers' Trainer, converted in one line.

    python docs/examples/finetune_lora.py [--model PATH] [--plain] [--steps N]

Without `--model` a small LLaMA with random weights learns the characters of Python's licence, so that it runs
anywhere in a minute; with it, a checkpoint and its tokenizer are loaded from a folder. `--plain` leaves the model
as it is, to compare: the loss is the same to the last digit. Needs `pip install fitact[transformers]`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Trainer, TrainingArguments

import fitact
from fitact.runtime.measure import count_saved

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Windows(Dataset[dict[str, Tensor]]):
    """Overlapping windows of a long row of tokens."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return max(2 * (len(self.tokens) - 1) // self.length - 1, 1)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self.length // 2
        window = self.tokens[start : start + self.length]
        return {"input_ids": window, "labels": window}


def text() -> str:
    """Return some English that every Python has: the licence of its own library."""
    import _sitebuiltins
    import builtins

    licence: Any = builtins.license
    assert isinstance(licence, _sitebuiltins._Printer)
    licence._Printer__setup()
    return "\n".join(licence._Printer__lines)


def small() -> tuple[nn.Module, Tensor]:
    """Return a model with random weights, and tokens: the bytes of a text."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    return AutoModelForCausalLM.from_config(config), torch.tensor(list(text().encode()))


def loaded(path: str) -> tuple[nn.Module, Tensor]:
    """Return a checkpoint from a folder, and the tokens of the text."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path), torch.tensor(tokenizer(text())["input_ids"])


def main() -> None:
    """Train, and print the loss and what autograd saves for a batch."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="folder of a checkpoint and its tokenizer")
    parser.add_argument("--plain", action="store_true", help="do not convert")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    base, tokens = loaded(arguments.model) if arguments.model else small()
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules=LAYERS))
    data = Windows(tokens, arguments.length)
    batch = {key: torch.stack([data[i][key] for i in range(8)]) for key in ("input_ids", "labels")}
    if not arguments.plain:
        print(fitact.convert(model, error="exact", example_inputs=batch))
    with count_saved(model) as saved:
        model(**batch)
    print(f"saved for backward: {saved.bytes / 2**20:.2f} MiB a batch of 8")

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            logging_steps=max(arguments.steps // 6, 1),
            save_strategy="no",
            dataloader_pin_memory=torch.cuda.is_available(),
            report_to=[],
            seed=0,
        )
        result = Trainer(
            model=model, args=settings, train_dataset=data
        ).train()  # makes the optimizer: after converting
        model.save_pretrained(Path(folder) / "adapter")
    print(f"loss {result.training_loss} over {arguments.steps} steps")  # to the last digit that of --plain


if __name__ == "__main__":
    main()
