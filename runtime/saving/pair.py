"""The hooks of a context alone, for whatever takes a pair of hooks, and a checkpoint inside of such hooks."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as checkpointed

from fitact.runtime.torch_internals import base_of, break_graph, version_of_saved, without_torch_function

from .capture import Capture, is_plain, unpack
from .offload import Amount, offload_hooks
from .quantising import DTYPES, FEW, STATISTIC, policy_of
from .recompute import Reading
from .storage import Part, Quantised, Stored, is_dense, is_parameter, layout_of, marked

Pair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def hooks(bits: int | None = 8, offload: Amount = False) -> Pair:
    """Return hooks that store what autograd saves in block codes, for whatever takes such a pair.

    That is `torch.autograd.graph.saved_tensors_hooks`, torch_remat's function of this name and the argument of its
    `checkpoint`, and other checkpoints. One pair serves all steps. A memory is stored once for all its views.

        with torch.autograd.graph.saved_tensors_hooks(*fitact.hooks(bits=8)):
            loss = model(batch).square().mean()
        loss.backward()

    Hooks do not see which function saves a tensor. So nothing is recomputed, unlike in `saving`, and all that a
    function reads is quantised: float32, bfloat16 and float16 of 4096 elements and more, with a gradient.
    Parameters and other leaves, transposed matrices, which are weights, statistics of norms and attention,
    integers and small tensors are stored as they are, and masks in bits. Outputs stay as they are; only gradients
    change.

    Args:
        bits: of a code: 8, 6, 5, 4 or 3. Normal numbers come back 0.5, 2.3, 4.8, 10 or 22 % off (root mean square,
            of theirs), and 0.6, 2.5, 5, 19 or 35 % of the largest of their block of 64 at most. None to quantise
            nothing.
        offload: what goes to the host, as for `saving`; codes do, if tensors are quantised.

    Returns:
        The functions `pack` and `unpack`. As in PyTorch, `unpack` raises RuntimeError if a tensor was changed in
        place after it was saved.

    Raises:
        UsageError: there are no codes of `bits` bits, or what to offload is unknown.

    """
    context = WithoutMode(policy_of("exact", bits).get("norm"))
    context.hooks = offload_hooks(offload)  # and none that are on here: the pair is used elsewhere
    return context.pack, unpack


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    error: str = "rounding",
    offload: Amount = False,
    use_reentrant: bool = False,
    **kwargs: Any,
) -> Any:
    """Run a function as `torch.utils.checkpoint.checkpoint` does, and store its inputs quantised or on the host.

    Backward runs it again, from the inputs that come back. Tensors among the arguments are stored as `hooks` says:
    once if several such functions read one. Those in lists, mappings and objects are stored as they are.

        for block in model.blocks:
            hidden = fitact.checkpoint(block, hidden)

    Args:
        function: takes the arguments, as for PyTorch's checkpoint.
        args: its arguments.
        error: `"rounding"`, inputs in 8 bits; `"coarse"`, 4 bits; or `"exact"`, as they are.
        offload: what goes to the host, as for `saving`.
        use_reentrant: as for PyTorch's checkpoint.
        kwargs: arguments by name, of PyTorch's checkpoint, such as `context_fn` and `preserve_rng_state`, or of
            the function.

    Returns:
        What the function returns.

    Raises:
        UsageError: there is no such class of errors, or what to offload is unknown.

    """
    if torch.compiler.is_compiling():
        break_graph("checkpoint is for eager code: compile the function that it is given")
    context = WithoutMode(policy_of(error, None).get("norm"))
    context.hooks = context.hooks or offload_hooks(offload)
    names, n = [name for name, value in kwargs.items() if isinstance(value, Tensor)], len(args)
    args = *args, *map(kwargs.pop, names)

    def run(*given: Any, **others: Any) -> Any:
        return function(*given[:n], **dict(zip(names, given[n:], strict=True)), **others)

    with saved_tensors_hooks(context.pack, unpack):
        return checkpointed(run, *args, use_reentrant=use_reentrant, **kwargs)


class WithoutMode(Capture):
    """The hooks of a context whose mode is never entered: they see tensors, not the functions that save them.

    Args:
        bits: of the codes of what is quantised; None to quantise nothing.

    """

    sees_calls = False

    def __init__(self, bits: int | None) -> None:
        super().__init__()
        self._bits = bits
        self.autocast = False  # no copy of a parameter is cast again: it may have been changed since
        self._sizes: deque[int] = deque((0,), maxlen=3)  # of what torch_remat handed over last

    def pack(self, tensor: Tensor) -> Stored | Reading:
        """Return how a tensor is stored that autograd or a checkpoint saves."""
        if self._bits is None or not self._is_read(tensor):
            return super().pack(tensor)
        with without_torch_function():
            quantised = self._quantised(tensor, self._bits)
        if quantised is None:
            return super().pack(tensor)
        return Reading(quantised, tensor, self.outside)

    def _is_read(self, tensor: Tensor) -> bool:
        """Return whether a tensor is one that a function reads, and neither a weight, a mask nor a statistic."""
        if not is_plain(tensor) or tensor.dtype not in DTYPES or tensor.numel() < FEW or is_parameter(tensor):
            return False
        if tensor.dim() == 2 and tensor.stride(0) == 1 != tensor.stride(1):
            return False  # a weight, transposed
        if tensor.requires_grad:  # what a function returns besides its first output is a statistic
            return not tensor.is_leaf and (tensor.output_nr == 0 or base_of(tensor) is not None)
        if not _is_detached():
            return False
        self._sizes.append(tensor.numel())
        return STATISTIC * tensor.numel() >= max(self._sizes)

    def _quantised(self, tensor: Tensor, bits: int) -> Quantised | None:
        """Return the codes of a tensor's memory, once for all its views; None if it has to be stored as it is."""
        mark, version = marked(tensor, self.hooks), version_of_saved(tensor)
        for stored in mark.alive(version) if mark.is_of(tensor, version) else ():
            if not isinstance(stored, Quantised):
                return None  # it is stored already
            if stored.bits >= bits and stored.can_read(layout_of(tensor)):
                stored.readers += 1
                return stored
        memory, base = tensor, base_of(tensor)
        kind = Quantised if base is not None or is_dense(tensor) else Part
        if base is not None and not is_dense(tensor):
            if base.grad_fn is not None and base.grad_fn.name().endswith("CopySlices"):
                return None  # a part of a memory that was written to; what lies beside it may be anything
            elements, rest = divmod(tensor.untyped_storage().nbytes(), tensor.element_size())
            columns = next((step for step in tensor.stride()[:-3:-1] if step > 1), 1)
            if rest or elements % columns:
                return None
            memory = tensor.detach().as_strided((elements // columns, columns), (columns, 1), 0)
        quantised = kind(memory, self.hooks, bits, signs=True)
        if not tensor.requires_grad and not quantised.is_finite():
            return None  # a mask with -inf
        mark.add(quantised)
        return quantised


def _is_detached() -> bool:
    """Return whether torch_remat hands over what a region saves: it detaches every tensor before."""
    remat = sys.modules.get("torch_remat")
    try:
        return remat is not None and remat.current_saved_tensor_info().kind.name != "CHECKPOINT_INPUT"
    except RuntimeError:
        return False
