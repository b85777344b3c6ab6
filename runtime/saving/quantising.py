"""Policies: which tensors are quantised, and in how many bits, by the function that saves them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fitact.base import UsageError
from fitact.runtime.torch_internals import (
    GROUPED_MM,
    base_of,
    mark_of,
    next_call,
    running_call,
    storage_id,
    version_of_saved,
    without_torch_function,
)

from . import cheap
from .blocks import BITS
from .capture import Call, Capture, Function, call_of, slope_of
from .recompute import Computed, Reading, Recompute
from .storage import Mark, Quantised, Slope, Stored, is_dense, is_parameter

DTYPES = torch.float32, torch.bfloat16, torch.float16

# By kind, the functions whose tensors have it: theirs are quantised, those of all other functions never. A sigmoid
# is none: it saves its result, which may be small, and a logarithm or a quotient reads it.
KINDS: Mapping[str, str] = {
    "gate": "glu mul multiply mul_ multiply_ __mul__ __rmul__ __imul__",
    "activation": """
        gelu silu mish hardswish hardsigmoid leaky_relu elu celu selu softplus hardtanh relu relu6 logsigmoid
        softsign tanhshrink prelu rrelu tanh erf pow __pow__ tanh_ relu_ celu_ selu_
    """,
    "norm": "layer_norm rms_norm group_norm local_response_norm square",
    "batch_norm": "batch_norm",
    "linear": "linear addmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
    "attention": "scaled_dot_product_attention matmul bmm mm baddbmm einsum __matmul__ __rmatmul__",
}
SIGMOIDS, TANHS, POWERS = cheap.named("sigmoid"), cheap.named("tanh tanh_"), cheap.named("pow __pow__")
# Activations whose slope jumps at 0: elements that are not 0 keep their sign.
KINKED = cheap.named("relu relu_ leaky_relu prelu rrelu elu celu celu_ selu selu_")
JUMPING = cheap.named("prelu rrelu selu selu_")  # these read no codes but those of their own
# In place, these ask their results for their slope. Those below 0 may be much smaller than the others.
MASKED = (*cheap.CLIPPED, F.leaky_relu)
FEW = 4096  # elements: a tensor of fewer is stored as it is
STATISTIC = 16  # times fewer elements than what a function reads: such a tensor is a statistic
SHARP = 8  # bits at least from which logits of attention are recomputed, and of a tanh: near 1 its slope is 1 - y²
# Fused attention recomputes its weights from queries and keys, and the exact logarithm of their sums: an error of
# a logit is one of the exponent. It reads codes only if the policy has bits for attention, and so does a softmax.
FUSED = cheap.named("scaled_dot_product_attention softmax softmin log_softmax logsumexp")

_NARROW = dict.fromkeys(("gate", "activation", "norm", "linear"), 8)
POLICIES: Mapping[str, Mapping[str, int]] = {
    "exact": {},
    "rounding": _NARROW,
    "coarse": {**dict.fromkeys(_NARROW, 4), "batch_norm": 8, "attention": 8},
}


def _either(names: Sequence[object]) -> str:
    *most, last = map(str, names)
    return f"{', '.join(most)} or {last}"


def policy_of(error: str, bits: int | Mapping[str, int] | None) -> dict[str, int]:
    """Return the bits of each kind of tensors that is quantised.

    Args:
        error: a key of POLICIES.
        bits: of all kinds, or of some.

    Raises:
        UsageError: there is no such class of errors, kind or number of bits.

    """
    if error not in POLICIES:
        raise UsageError(f"error: expected {_either([*map(repr, POLICIES)])}, got {error!r}")
    given = {} if bits is None else bits if isinstance(bits, Mapping) else dict.fromkeys(KINDS, bits)
    for kind, number in given.items():
        if kind not in KINDS:
            raise UsageError(f"bits: expected the kinds {_either([*KINDS])}, got {kind!r}")
        if type(number) is not int or number not in BITS:
            raise UsageError(f"bits: expected {_either(BITS)}, got {number!r}")
    return {**POLICIES[error], **given}


_KIND_OF = {function: kind for kind, names in KINDS.items() for function in cheap.named(names)} | {
    GROUPED_MM: "linear"
}
# Functions that may read codes: those of kinds, cheap ones, and others that are smooth. Not those that compare,
# since a decoded number may be on the other side, nor those for which an error near 0 has no bound.
_SMOOTH = """
    norm vector_norm instance_norm cosine_similarity lstm gru rnn_tanh rnn_relu
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
"""
_SHARP = """
    abs __abs__ abs_ clamp clamp_ clamp_min clamp_max clip clip_ max min maximum minimum amax amin threshold
    softshrink hardshrink log log1p log2 log10 logit sqrt sqrt_ rsqrt rsqrt_ reciprocal addcdiv xlogy tan asin acos
    atanh acosh atan2 prod
"""
READING = frozenset(_KIND_OF) | cheap.CHEAP_FUNCTIONS | cheap.CAST_FUNCTIONS | cheap.PURE.keys()
READING = (READING | cheap.named(_SMOOTH)) - cheap.named(_SHARP)
NORMS = cheap.named("norm vector_norm normalize")  # sharp unless they are Euclidean
QUOTIENTS = cheap.named("div div_ divide divide_ true_divide true_divide_ __div__ __truediv__ __itruediv__")
ROOTS = cheap.named("sqrt rsqrt reciprocal") | POWERS | QUOTIENTS
AVERAGES = cheap.named("sum mean var std norm vector_norm")


def kind_of(func: Function, args: Sequence[Any]) -> str | None:
    """Return the kind of the tensors that a call saves; None if they are stored exactly.

    Composed norms begin with squares. Products with a parameter are linear layers, others attention.
    """
    kind = _KIND_OF.get(func)
    if func in POWERS:
        kind = None if not _is_at_least_1(args[-1]) else "norm" if args[-1] == 2 else kind
    if kind == "attention" and any(isinstance(argument, Tensor) and is_parameter(argument) for argument in args):
        return "linear"
    return kind


def _is_at_least_1(exponent: Any) -> bool:
    """Return whether an exponent is a number of 1 or more; of others, an error near 0 has no bound."""
    return type(exponent) in (int, float) and exponent >= 1


def _is_euclidean(order: Sequence[Any]) -> bool:
    """Return whether the order of a norm is 2 or none; without one, dimensions by name may stand in its place."""
    return not order or order[0] in (2, "fro", None) or isinstance(order[0], tuple | list) or order[0] == -1


class Quantising(Capture):
    """A context that also quantises what it stores.

    A tensor's memory is stored once for all that read it: the first function that saves it decides how. But
    attention reads nothing in fewer than 8 bits, and fused attention no codes, unless the policy says so.
    """

    def __init__(self, policy: Mapping[str, int]) -> None:
        super().__init__()
        self._policy = policy
        self._last: Call | None = None
        self._held: Tensor | None = None  # what was quantised last, for the next function that reads no codes

    def __exit__(self, *error: Any) -> None:
        self._last = self._held = None
        super().__exit__(*error)

    def made(
        self, func: Function, args: Sequence[Any], kwargs: dict[str, Any], changed: Tensor | None = None
    ) -> Any:
        """Make a call as `Capture` does, and remember it until what it saved is stored."""
        self._last = None
        made = super().made(func, args, kwargs, changed)
        self._last = call_of(func, args, kwargs) if made[1] else None
        return made

    def pack(self, tensor: Tensor) -> Stored | Reading:
        """Return how a tensor is stored that autograd saves."""
        self._last, held = None, self._held
        stored = super().pack(tensor)
        if self._held is held and tensor.requires_grad and tensor.numel() >= FEW and not self.undecided:
            self._held = None
        return self.computed(stored, tensor, self.current) if type(stored) is Quantised else stored

    def same(self, tensor: Tensor, mark: Mark, version: int) -> Stored | None:
        """Return the codes of a tensor, if the call that saves it may read them, or what `Capture` does."""
        least, jumps = self._least(self.current, tensor), self.current and self.current[0] in JUMPING
        codes = (other for other in mark.alive(version) if type(other) is Quantised)
        near = next((each for each in codes if each.bits >= least or (each.signs and jumps)), None)
        return super().same(tensor, mark, version) if near is None else near

    def added(self, tensor: Tensor, mark: Mark, grows: bool) -> Stored:
        """Store a tensor as `Capture` does, or quantised; what is stored as it is takes the place of its codes."""
        quantised = self._quantised(tensor, mark) if grows else None
        return self._exact(tensor, mark, grows) if quantised is None else quantised

    def _exact(self, tensor: Tensor, mark: Mark, grows: bool) -> Stored:
        codes = [other for other in mark.alive(version_of_saved(tensor)) if type(other) is Quantised]
        stored = super().added(tensor, mark, grows)
        for other in codes:
            other.read_exact(stored)
        return stored

    def _least(self, call: Call | None, tensor: Tensor) -> float:
        """Return in how few bits a call that saves a tensor may read it, or what it is recomputed from.

        A function of another library may be fused attention. The mode sees none, nor what backward calls. What a
        function that is not listed makes of an error, nobody knows.
        """
        if call is None or call[0] not in READING:
            if running_call() is not None:
                return 0
            return self._policy.get("attention", math.inf) if call is None else math.inf
        func, args = call
        if func in POWERS and not _is_at_least_1(args[-1]):
            return math.inf
        if func in JUMPING or (func in QUOTIENTS and tensor is args[1]):
            return math.inf
        if func in NORMS and not _is_euclidean(args[1:2]):
            return math.inf
        fused = func in FUSED
        if kind_of(func, args) != "attention" and not fused:
            return 0
        return self._policy.get("attention", math.inf if fused else SHARP)

    def is_near_enough(self, recompute: Recompute, call: Call | None, tensor: Tensor) -> bool:
        """Return whether what a tensor is recomputed from is stored in bits enough for the call that saves it."""
        least = self._least(call, tensor)
        small = call is not None and call[0] in ROOTS and STATISTIC * recompute.size <= recompute.largest
        if small and not AVERAGES.isdisjoint(recompute.functions()):
            return True  # of a mean, in which errors average out
        if recompute.is_difference():  # which may be far smaller than its terms, and their errors
            least = math.inf
        if not least:
            return True
        recompute.is_free()  # which learns what is stored by now
        rough = {leaf for leaf in recompute.leaves() if type(leaf) is Quantised and leaf.bits < least}
        if not rough or (call is not None and self._policy.get(kind_of(*call) or "")):
            return not rough
        return self._store_exactly(rough, tensor.untyped_storage().nbytes())

    def _store_exactly(self, coded: Collection[Quantised], most: int) -> bool:
        """Store tensors that are in codes as they are, and return True, if that takes `most` bytes or fewer."""
        tensors = [each.tensor_at_hand() for each in coded]
        sizes = [math.inf if tensor is None else tensor.untyped_storage().nbytes() for tensor in tensors]
        if sum(sizes) > most:
            return False
        for tensor in tensors:
            assert tensor is not None
            self._exact(tensor, mark_of(tensor.untyped_storage()), True)
        return True

    def is_as_near(self, stored: Stored, leaves: Sequence[Stored]) -> bool:
        """Return whether a tensor is stored in no more bits than what it would be computed from."""
        least = min((leaf.bits for leaf in leaves if type(leaf) is Quantised), default=None)
        return (
            least is None
            or stored.small
            or (type(stored) is Quantised and not stored.signs and stored.bits <= least)
        )

    def computed(self, computed: Computed | Stored, value: Tensor, call: Call | None) -> Reading | Stored:
        """Return how autograd gets a value that a call saves: of a decoded ReLU its slope, in bits."""
        signs = type(computed) is Quantised and computed.signs
        kinked = call is not None and call[0] in cheap.KINKED and not signs
        if call is None or not kinked or value.numel() < FEW or not computed.is_decoded():
            return super().computed(computed, value, call)
        computed.readers -= 1
        return Slope(value, self.hooks, *slope_of(value, *call), computed)

    def settle(self, stored: Stored, storage: torch.UntypedStorage, output: Any) -> Stored:
        """Store what could not be recomputed; the output of an activation quantised."""
        quantised: Quantised | None = None
        if isinstance(output, Tensor) and output.requires_grad and storage is output.untyped_storage():
            quantised = self._quantised(output, mark_of(storage), result=True)
        if quantised is None:
            stored.small = self._last is not None and self._last[0] in SIGMOIDS
            return super().settle(stored, storage, output)
        stored.recompute_instead(self.computed(quantised, output, self._last))
        return quantised

    def _quantised(self, tensor: Tensor, mark: Mark, result: bool = False) -> Quantised | None:
        """Return the codes of a tensor's memory; None if it has to be stored as it is."""
        call = self.current or self._last
        bits = self._policy.get(kind_of(*call) or "") if call else None
        base = base_of(tensor)
        memory = tensor if base is None or is_dense(tensor) else base
        if call is None or bits is None or tensor.dtype not in DTYPES or memory.numel() < FEW:
            return None
        if not is_dense(memory) or memory.dtype != tensor.dtype or (base is not None and base.is_leaf):
            return None
        if any(type(stored) is not Quantised for stored in mark.alive(version_of_saved(tensor))):
            return None  # it is stored already
        if call[0] in TANHS:
            bits = max(bits, SHARP)
        with without_torch_function():
            if not _is_read(tensor, *call):
                return None
            signs = call[0] in KINKED and not (result and call[0] in MASKED)
            quantised = Quantised(memory, self.hooks, bits, signs)
            quantised.first = next_call() - 1
        mark.add(quantised)
        self._held = memory
        return quantised


def _is_read(tensor: Tensor, func: Function, args: Sequence[Any]) -> bool:
    """Return whether a tensor is neither a statistic nor a weight of the call."""
    tensors = [argument for argument in args if isinstance(argument, Tensor)]
    largest = max((argument.numel() for argument in tensors if not is_parameter(argument)), default=0)
    if STATISTIC * tensor.numel() < largest:
        return False
    factors = tensors[func is torch.addmm :][:2]
    if kind_of(func, args) != "linear" or len(factors) < 2:
        return True
    x, weight = factors
    return storage_id(weight) != storage_id(tensor) and not tensor.numel() == weight.numel() != x.numel()
