"""Norms as formulas, and linear layers that can take up a norm's α and β.

A norm is z·α + β with a normalised row z. The next linear layer W·x + b becomes W·diag(α)·z + (Wβ + b).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fitact.runtime.ops.library import DTYPES
from fitact.runtime.torch_internals import FakeTensor, has_forward_pre_hooks, parameters_in, unset_fake_temporarily

from .modules import MSLayerNorm, MSRMSNorm

BIASES = frozenset(("bias", "beta", "b"))
PROBE = 1e-5  # relative to the largest value: several roundings of float32, the precision of such norms


@dataclass
class Norm:
    """A norm of the last dimension: z·α + β with z = (x − mean(x))/σ or x/σ and α = offset + weight.

    Attributes:
        module: the norm.
        columns: length of a row.
        centred: whether the mean is subtracted.
        eps: the number added under the root; None for the machine epsilon, as in `nn.RMSNorm`.
        weight, bias: its parameters; None if α is 1 or β is 0.
        offset: 1 where the weight is counted from 1, as in Gemma, else 0.

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
        """The factor α, (columns,), in float32 or wider; None for 1."""
        if self.weight is None:
            return None
        return _wide(self.weight) + self.offset

    @property
    def beta(self) -> Tensor | None:
        """The summand β, (columns,), in float32 or wider; None for 0."""
        return None if self.bias is None else _wide(self.bias)

    def memory_sharing(self) -> MSLayerNorm | MSRMSNorm:
        """Return a norm without α and β that keeps its output.

        It still has the attributes that models read, most often the weight's dtype: all plain attributes, and the
        parameters as buffers that are not saved, with α = 1 and β = 0.
        """
        made: MSLayerNorm | MSRMSNorm
        if self.centred:
            assert self.eps is not None
            made = MSLayerNorm(self.columns, self.eps)
        else:
            made = MSRMSNorm(self.columns, self.eps)
        for name, parameter in self.module.named_parameters():
            parameters_in(made).pop(name, None)
            value = 0.0 if parameter is self.bias else 1.0 - self.offset
            made.register_buffer(name, torch.full_like(parameter.detach(), value), persistent=False)
        for name, attribute in vars(self.module).items():
            if not name.startswith("_") and not hasattr(made, name):
                setattr(made, name, attribute)
        return made.train(self.module.training)


def _wide(tensor: Tensor) -> Tensor:
    """Return a detached tensor in float32, or in float64 if it is float64."""
    detached = tensor.detach()
    return detached if detached.dtype == torch.float64 else detached.float()


def recognise(module: nn.Module) -> Norm | str | None:
    """Return a module as a norm, the reason why it is not usable as one, or None if it does not look like a norm.

    PyTorch's own classes are known. Another module is tried if it has no submodules and buffers, one or two
    one-dimensional parameters, and an epsilon. A copy with random parameters must agree with the formula up to
    float32 rounding, for large rows and for rows so small that epsilon decides, in training and evaluation mode.
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
    """Return a module as a norm if it has the parts of a norm and computes one."""
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


def trial_copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy on the CPU whose parameters are ones in one dtype; the module's own may be fake tensors."""
    ones = {
        id(parameter): nn.Parameter(torch.ones(parameter.shape, dtype=dtype), parameter.requires_grad)
        for parameter in module.parameters()
    }
    return copy.deepcopy(module, dict(ones))


def _computes(norm: Norm) -> bool:
    """Return whether a module computes the formula."""
    with unset_fake_temporarily():
        return _agrees(norm)


def _agrees(norm: Norm) -> bool:
    random = torch.Generator().manual_seed(0)
    assert norm.eps is not None
    rows = torch.randn(4, 3, norm.columns, generator=random) + 0.5
    rows *= torch.tensor([1.0, norm.eps**0.5, 30.0, 1.0]).view(4, 1, 1)
    try:
        trial = trial_copy(norm.module, torch.float32)
        with torch.no_grad():
            for parameter in trial.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=random) + 0.5)
            values = [trial.train(mode)(rows) for mode in (True, False)]
    except Exception:  # a norm of this form would run
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
    return isinstance(module, nn.Linear) or is_conv1d(module) or is_adapted(module)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is Conv1D, GPT-2's linear layer in transformers; its weight is (inputs, outputs)."""
    return (type(module).__module__, type(module).__name__) == ("transformers.pytorch_utils", "Conv1D")


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is an adapter of peft that adds B·A·x to a layer."""
    return type(module).__module__.startswith("peft.") and all(
        hasattr(module, name) for name in ("base_layer", "lora_A", "lora_B")
    )


# Below, a layer is Any: the functions above have checked that it has a weight or adapters.


def core(layer: Any) -> Any:
    """Return the layer itself, without adapters."""
    while is_adapted(layer):
        layer = layer.base_layer
    return layer


def blocker(module: Any) -> str:
    """Return why a layer cannot take up a norm's α and β; `""` if it can."""
    if is_adapted(module):
        return _adapter_blocker(module) or blocker(module.base_layer)
    kind = type(module).__name__
    known = is_conv1d(module) or (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward)
    if not known or "forward" in vars(module):
        return f"it is a {kind} and not a plain linear layer: quantised, or computed in another way"
    if why := parameter_blocker(module):
        return why
    return "it has forward pre-hooks, which may change its input" if has_forward_pre_hooks(module) else ""


def is_plain(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is one of PyTorch's own, or a fake one in its place."""
    return type(parameter) in (nn.Parameter, FakeTensor)


def parameter_blocker(module: Any) -> str:
    """Return why weight and bias of a layer without adapters cannot be changed, `""` if they can."""
    for name in ("weight", "bias"):
        if getattr(module, name) is not None and parameters_in(module).get(name) is None:
            return f"its {name} is computed from other parameters"
    for parameter in module.parameters(recurse=False):
        if not is_plain(parameter) or parameter.dtype not in DTYPES:
            found = parameter.dtype if is_plain(parameter) else type(parameter).__name__
            return f"its parameters are {found}: quantised, or spread over processes"
    return ""


def _adapter_blocker(module: Any) -> str:
    if why := adapter_kind_blocker(module):
        return why
    if module.merged:
        return "its adapter is merged into its weight: unmerge it first"
    if module.disable_adapters:
        return "its adapters are disabled: enable them first"
    if any(getattr(dropout, "p", 0.0) > 0 for dropout in module.lora_dropout.values()):
        return "its adapter has dropout on its input and keeps a copy of it: set lora_dropout to 0"
    return next((reason for part in module.lora_A.values() if (reason := blocker(part))), "")


def adapter_kind_blocker(module: Any) -> str:
    """Return why an adapter does not add scale·B·A·x, `""` if it does."""
    kind = type(module)
    if (kind.__module__, kind.__name__) != ("peft.tuners.lora.layer", "Linear"):
        return f"it is a {kind.__module__}.{kind.__name__}, and fitact does not know how it computes"
    if any(name in module.lora_variant for name in module.lora_A):
        return "its adapter is a variant of LoRA that is not linear in the weights, such as DoRA"
    return ""


def width(module: Any) -> int | None:
    """Return the length of a layer's input rows; None if it does not tell."""
    found = module.weight.shape[0] if is_conv1d(module) else getattr(module, "in_features", None)
    return found if isinstance(found, int) else None


def range_trouble(module: Any, alpha: Tensor, largest: float) -> str:
    """Return why a weight times α leaves the range of its dtype; `""` if it does not.

    A column of only subnormal numbers has lost digits that division by α cannot restore.

    Args:
        module: a layer that can take up α.
        alpha: α, (columns,).
        largest: the largest number of the dtype that the weight is cast to; infinite if it is not cast.

    """
    for weight, dim in weights(module):
        if not weight.numel():
            continue
        info = torch.finfo(weight.dtype)
        columns = weight.detach().abs().amax(1 - dim).to(alpha)
        scaled = columns * alpha.abs()
        if bool((scaled > min(info.max, largest)).any()):
            return "its weight times α would overflow"
        if bool(((scaled < info.tiny) & (columns >= info.tiny)).any()):
            return f"its weight times α would be too small for {weight.dtype} to keep its digits"
    return ""


def wrappers(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the adapters other than B·A·x, by the layers that they wrap."""
    return {
        inner: module
        for module in model.modules()
        if isinstance(inner := getattr(module, "base_layer", None), nn.Module) and not is_adapted(module)
    }


def weights(module: Any) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield each parameter of a layer that multiplies its inputs, with its dimension of the inputs."""
    if is_adapted(module):
        yield from weights(module.base_layer)
        for part in module.lora_A.values():
            yield from weights(part)
    else:
        yield module.weight, 0 if is_conv1d(module) else 1


def shift(module: Any, beta: Tensor) -> Tensor:
    """Return what an input of β adds to a layer's output, (outputs,): Wβ, and scale·B·A·β for each adapter."""
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
    return beta @ matrix.to(kind) if is_conv1d(module) else matrix.to(kind) @ beta


def ambiguous(module: Any, beta: Tensor) -> bool:
    """Return whether β would give each of several adapters its own bias, so that these could not be exchanged."""
    if not is_adapted(module) or len(module.lora_A) < 2:
        return False
    parts = (shift(module.lora_B[name], shift(part, beta)) for name, part in module.lora_A.items())
    return any(bool(part.any()) for part in parts)
