"""Norms as formulas, and linear layers that can take up what a norm multiplies by and adds.

A norm is z·α + β, of a normalised row z; a linear layer W·x + b that follows becomes W·diag(α)·z + (Wβ + b).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .norms import MSLayerNorm, MSRMSNorm
from .ops import DTYPES

BIASES = frozenset(("bias", "beta", "b"))
PROBE = 1e-5  # of the largest value: some roundings of float32, in which such norms compute


@dataclass
class Norm:
    """A norm of the last dimension: z·α + β with z = (x − mean(x))/σ or x/σ and α = offset + weight.

    Attributes:
        module: which it is.
        columns: length of a row.
        centred: whether the mean is subtracted.
        eps: under the root; None for the machine epsilon, as `nn.RMSNorm` has it.
        weight, bias: its parameters, None if α is 1 or β is 0.
        offset: 1 where the weight is counted from 1, as Gemma's, else 0.

    """

    module: nn.Module
    columns: int
    centred: bool
    eps: float | None
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    offset: float = 0.0

    @property
    def alpha(self) -> Tensor | None:
        """What z is multiplied by, (columns,), None for 1; in float32 at least."""
        if self.weight is None:
            return None
        return _wide(self.weight) + self.offset

    @property
    def beta(self) -> Tensor | None:
        """What is added, (columns,), None for 0; in float32 at least."""
        return None if self.bias is None else _wide(self.bias)

    def memory_sharing(self) -> MSLayerNorm | MSRMSNorm:
        """Return the norm without α and β that keeps its output."""
        made: MSLayerNorm | MSRMSNorm
        if self.centred:
            assert self.eps is not None
            made = MSLayerNorm(self.columns, self.eps)
        else:
            made = MSRMSNorm(self.columns, self.eps)
        return made.train(self.module.training)


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor without its history, in float32 or, of float64, in that."""
    detached = tensor.detach()
    return detached if detached.dtype == torch.float64 else detached.float()


def recognise(module: nn.Module) -> Norm | str | None:
    """Return a module as a norm, why it cannot be taken for one, or None if nothing suggests that it is one.

    PyTorch's own classes are known. Any other module without submodules and buffers, with one or two parameters of
    one dimension and an epsilon, is tried: a copy with random parameters has to agree with the formula to float32
    rounding, on rows large and so small that epsilon decides, in training and in evaluation.
    """
    if isinstance(module, (MSLayerNorm, MSRMSNorm)):
        return None
    if type(module) in (nn.LayerNorm, nn.RMSNorm):
        assert isinstance(module, (nn.LayerNorm, nn.RMSNorm))
        if len(module.normalized_shape) != 1:
            return f"it normalises over {len(module.normalized_shape)} dimensions, not only the last one"
        bias = module.bias if isinstance(module, nn.LayerNorm) else None
        centred = isinstance(module, nn.LayerNorm)
        return Norm(module, module.normalized_shape[0], centred, module.eps, module.weight, bias)
    found = _tried(module)
    name = type(module).__name__.lower()
    if found is None and ("layernorm" in name or "rmsnorm" in name) and not list(module.children()):
        return "it does not compute z·w or z·(1 + w), with or without a bias, of the last dimension"
    return found


def _tried(module: nn.Module) -> Norm | None:
    """Return a module as a norm if it has the parts of one and computes as one."""
    parameters = dict(module.named_parameters())
    epsilons = [value for name, value in vars(module).items() if "eps" in name and isinstance(value, float)]
    sizes = {tuple(parameter.shape) for parameter in parameters.values()}
    biases = [name for name in parameters if name in BIASES]
    parts = len(list(module.children())) + len(list(module.buffers()))
    if parts or len(epsilons) != 1 or len(sizes) != 1:
        return None
    (shape,) = sizes
    if len(shape) != 1 or shape[0] < 2 or len(parameters) - len(biases) != 1 or len(biases) > 1:
        return None
    weight = next(parameter for name, parameter in parameters.items() if name not in BIASES)
    bias = parameters[biases[0]] if biases else None
    for centred in (False, True):
        for offset in (0.0, 1.0):
            norm = Norm(module, shape[0], centred, epsilons[0], weight, bias, offset)
            if _computes(norm):
                return norm
    return None


def _computes(norm: Norm) -> bool:
    """Return whether a module computes the formula that it is thought to."""
    random = torch.Generator().manual_seed(0)
    assert norm.eps is not None
    rows = torch.randn(4, 3, norm.columns, generator=random) + 0.5
    rows *= torch.tensor([1.0, norm.eps**0.5, 30.0, 1.0]).view(4, 1, 1)
    try:
        trial = copy.deepcopy(norm.module).to("cpu", torch.float32)
        with torch.no_grad():
            for parameter in trial.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=random) + 0.5)
            values = [trial.train(mode)(rows) for mode in (True, False)]
    except Exception:  # whatever it needs to run, a norm of this form does not
        return False
    parts = dict(trial.named_parameters())
    names = {id(parameter): name for name, parameter in norm.module.named_parameters()}
    wide = rows.double()
    if norm.centred:
        wide = wide - wide.mean(-1, keepdim=True)
    expected = wide * (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    expected = expected * (norm.offset + parts[names[id(norm.weight)]].detach().double())
    if norm.bias is not None:
        expected = expected + parts[names[id(norm.bias)]].detach().double()
    bound = PROBE * float(expected.abs().max())
    return all(
        isinstance(value, Tensor)
        and value.shape == rows.shape
        and float((value.double() - expected).abs().max()) <= bound
        for value in values
    )


# ------------------------------------------------------------------------------------------------- linear layers


def is_layer(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, or an adapter of peft around one."""
    return isinstance(module, nn.Linear) or _is_conv1d(module) or is_adapted(module)


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is what transformers calls GPT-2's linear layer; its weight is (inputs, outputs)."""
    return (type(module).__module__, type(module).__name__) == ("transformers.pytorch_utils", "Conv1D")


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is an adapter of peft that adds B·A·x to a layer."""
    return type(module).__module__.startswith("peft.") and all(
        hasattr(module, name) for name in ("base_layer", "lora_A", "lora_B")
    )


# Below, a layer is Any: what it has to have, a weight or adapters, the functions above have found.


def core(layer: Any) -> Any:
    """Return the layer itself, without adapters."""
    while is_adapted(layer):
        layer = layer.base_layer
    return layer


def trouble(module: Any) -> str:
    """Return why a layer cannot take up a norm's α and β, `""` if it can."""
    if is_adapted(module):
        return _adapter_trouble(module) or trouble(module.base_layer)
    kind = type(module).__name__
    known = _is_conv1d(module) or (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward)
    if not known or "forward" in vars(module):
        return f"it is a {kind} and not a plain linear layer: quantised, or computed in another way"
    if why := parameter_trouble(module):
        return why
    return "it has forward pre-hooks, which may change its input" if module._forward_pre_hooks else ""


def parameter_trouble(module: Any) -> str:
    """Return why weight and bias of a layer without adapters cannot be changed, `""` if they can."""
    for name in ("weight", "bias"):
        if getattr(module, name) is not None and module._parameters.get(name) is None:
            return f"its {name} is computed from other parameters"
    for parameter in module.parameters(recurse=False):
        if type(parameter) is not nn.Parameter or parameter.dtype not in DTYPES:
            found = parameter.dtype if type(parameter) is nn.Parameter else type(parameter).__name__
            return f"its parameters are {found}: quantised, or spread over processes"
    return ""


def _adapter_trouble(module: Any) -> str:
    if why := adapter_kind_trouble(module):
        return why
    if module.merged:
        return "its adapter is merged into its weight: unmerge it first"
    if module.disable_adapters:
        return "its adapters are disabled: enable them first"
    if any(getattr(dropout, "p", 0.0) > 0 for dropout in module.lora_dropout.values()):
        return "its adapter has dropout on its input, of which it keeps a copy: set lora_dropout to 0"
    return next((reason for part in module.lora_A.values() if (reason := trouble(part))), "")


def adapter_kind_trouble(module: Any) -> str:
    """Return why an adapter does not add scale·B·A·x, `""` if it does."""
    kind = type(module)
    if (kind.__module__, kind.__name__) != ("peft.tuners.lora.layer", "Linear"):
        return f"it is a {kind.__module__}.{kind.__name__}, of which it is not known how it computes"
    if any(name in module.lora_variant for name in module.lora_A):
        return "its adapter is a variant of LoRA that is not linear in the weights, such as DoRA"
    return ""


def width(module: Any) -> int | None:
    """Return how many numbers a layer reads at a time, None if it does not tell."""
    found = module.weight.shape[0] if _is_conv1d(module) else getattr(module, "in_features", None)
    return found if isinstance(found, int) else None


def overflows(module: Any, alpha: Tensor) -> bool:
    """Return whether a weight times α leaves the range of its dtype."""
    return any(
        bool((weight.detach().abs().amax(1 - dim).to(alpha) * alpha.abs() > torch.finfo(weight.dtype).max).any())
        for weight, dim in weights(module)
        if weight.numel()
    )


def wrappers(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the adapters of other kinds than B·A·x, by the layers that they are around."""
    return {
        inner: module
        for module in model.modules()
        if isinstance(inner := getattr(module, "base_layer", None), nn.Module) and not is_adapted(module)
    }


def weights(module: Any) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield the parameters of a layer whose columns belong to its inputs, and the dimension of these."""
    if is_adapted(module):
        yield from weights(module.base_layer)
        for part in module.lora_A.values():
            yield from weights(part)
    else:
        yield module.weight, 0 if _is_conv1d(module) else 1


def shift(module: Any, beta: Tensor) -> Tensor:
    """Return what an input of β adds to the output of a layer, (outputs,): Wβ, and of adapters scale·B·A·β."""
    if is_adapted(module):
        total = shift(module.base_layer, beta)
        for name in module.active_adapters:
            if name in module.lora_A and not module.merged:  # merged, it is in the weight of the layer itself
                inner = shift(module.lora_A[name], beta)
                total = total + module.scaling[name] * shift(module.lora_B[name], inner)
        return total
    matrix = _wide(module.weight)
    kind = torch.promote_types(matrix.dtype, beta.dtype)
    beta = beta.to(matrix.device, kind)
    return beta @ matrix.to(kind) if _is_conv1d(module) else matrix.to(kind) @ beta


def ambiguous(module: Any, beta: Tensor) -> bool:
    """Return whether β means a bias of its own to each of several adapters, so that none could be exchanged."""
    if not is_adapted(module) or len(module.lora_A) < 2:
        return False
    parts = (shift(module.lora_B[name], shift(part, beta)) for name, part in module.lora_A.items())
    return any(bool(part.any()) for part in parts)
