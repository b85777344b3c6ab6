"""A small LLaMA with Liger's kernels in Triton's interpreter, converted: prints the row of docs/integrations.md.

The interpreter has no functions of CUDA's library, and gives kernels Python's numbers, which have no `to`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from transformers import AutoModelForCausalLM, LlamaConfig
from triton.runtime.interpreter import GridExecutor

import fitact


class Scalar(float):
    """A number that can be cast."""

    def to(self, dtype: Any) -> float:
        """Return the number."""
        return float(self)


def call(self: Any, *args: Any, inner: Any = GridExecutor.__call__, **given: Any) -> Any:
    def own(value: Any) -> Any:
        return Scalar(value) if type(value) is float else value

    return inner(self, *map(own, args), **{key: own(value) for key, value in given.items()})


@triton.jit
def rsqrt(x):
    return 1 / tl.sqrt(x)


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


def main() -> None:
    GridExecutor.__call__ = call
    from liger_kernel.ops import geglu, rms_norm
    from liger_kernel.transformers import LigerGEGLUMLP, apply_liger_kernel_to_llama

    rms_norm.rsqrt, geglu.tanh = rsqrt, tanh
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, use_cache=False, **sizes))
    apply_liger_kernel_to_llama(rope=False, fused_linear_cross_entropy=False, model=model)
    config = LlamaConfig(**sizes, hidden_act="gelu_pytorch_tanh")
    model.model.layers[1].mlp = LigerGEGLUMLP(config)
    ids = torch.randint(256, (2, 32))
    report = fitact.convert(model, example_inputs={"input_ids": ids, "labels": ids})
    assert report.gradient.error == 0 and fitact.verify(model, {"input_ids": ids, "labels": ids}).same
    print(f"{report.saved_before:,} {100 * report.saved_after / report.saved_before:.1f}")


main()
