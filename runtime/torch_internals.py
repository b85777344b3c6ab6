"""The private parts of PyTorch that the package uses, each under a name of its own.

A name is private if it, or a module that it is in, begins with an underscore. PyTorch promises nothing about
private names, so no other file uses one but `kernels.internals`, which has those that the ops need; and a public
name is used where it does the same. All names here were tried on PyTorch 2.9.1, 2.11.0, 2.13.0 and 2.15.0;
differences are noted. Slow imports stand where they are needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

# Tensors with a device but without memory, and what they raise; the public alternative has only the device "meta".
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

# A context in which the modes of fake tensors see no operation.
from torch._subclasses.fake_tensor import disable_fake_tensor_cache as disable_fake_tensor_cache
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily

# A context that sees every operation below autograd; the public `TorchFunctionMode` sees the calls above it.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# The leaves of nested tuples, lists, mappings and classes that libraries register, such as transformers' outputs.
from torch.utils._pytree import tree_iter as tree_iter
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

from fitact.runtime.kernels import in_functorch_transform as in_functorch_transform
from fitact.runtime.kernels import version_of as version_of

Function = TypeVar("Function", bound=Callable[..., Any])

# -------------------------------------------------------------------------------------------- tensors and storages


def storage_id(of: Tensor | torch.UntypedStorage) -> int:
    """Return the identity of a storage: the same for all its tensors, and unique among storages that are alive.

    The public `data_ptr()` is 0 for every storage without memory, such as those of fake tensors. A sparse tensor
    has none, and counts by itself.
    """
    if isinstance(of, Tensor):
        return int(of.untyped_storage()._cdata) if of.layout is torch.strided else id(of)
    return int(of._cdata)


def is_alone(tensor: Tensor) -> bool:
    """Return whether nothing else refers to a tensor's memory, which is PyTorch's, as if it had just been made."""

    def users(of: Tensor) -> int:
        return torch._C._storage_Use_Count(of.untyped_storage()._cdata)

    return users(tensor) <= users(torch.empty(0)) and tensor.untyped_storage().resizable()


def has_batched_gradients() -> bool:
    """Return whether `torch.autograd.grad` with `is_grads_batched=True` runs; to ask takes two changes."""
    level = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return level > 1


# How often a tensor that autograd saves, which is never one of inference mode, has been changed in place.
version_of_saved: Callable[[Tensor], int] = attrgetter("_version")


# What a tensor is a view of, None if it is no view; PyTorch's notes name `Tensor._base` so.
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")


def function_of(node: Any) -> type[torch.autograd.Function]:
    """Return the function whose call a node belongs to."""
    function: type[torch.autograd.Function] = type(node)._forward_cls
    return function


def packed_by(node: Any) -> list[Any]:
    """Return what hooks made of the tensors that a custom function saved; nothing once they are freed."""
    try:
        return [getattr(saved, "data", None) for saved in node._raw_saved_tensors]
    except RuntimeError:
        return []


_MARK = "_fitact_mark"
setattr(torch.UntypedStorage, _MARK, None)  # of storages without one

# What `set_mark` set on a storage, None if nothing; PyTorch keeps a storage's attributes.
mark_of: Callable[[torch.UntypedStorage], Any] = attrgetter(_MARK)


def set_mark(storage: torch.UntypedStorage, mark: object) -> None:
    """Set something on a storage, for as long as its memory lives."""
    setattr(storage, _MARK, mark)


_EMPTY: dict[torch.device, Tensor] = {}


def version_guard(tensor: Tensor) -> Tensor:
    """Return a tensor without memory whose version is that of another.

    `detach` shares the count of changes in place, and `data` replaces the memory but not this count.
    """
    if in_functorch_transform():  # which lets nobody set `data`; hooks get tensors from below it
        with torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack():
            return version_guard(tensor)
    guard, device = tensor.detach(), tensor.device
    if device not in _EMPTY:
        _EMPTY[device] = torch.empty(0, device=device)
    guard.data = _EMPTY[device]
    return guard


def after_backward(of: Any) -> bool:
    """Have `release` of an object called when the backward pass that runs now ends; returns False if none runs.

    The object is not held until then.
    """
    held = weakref.ref(of)

    def call() -> None:
        if (of := held()) is not None:
            of.release()

    try:
        torch.autograd.Variable._execution_engine.queue_callback(call)
    except RuntimeError:
        return False
    return True


# The number of a node, which grows with each node that a thread makes.
calls_of: Callable[[Any], int] = methodcaller("_sequence_nr")

# The number that the thread's next node gets.
next_call: Callable[[], int] = torch._C._autograd._get_sequence_nr

# Nodes of what reshapes a tensor, and of what turns it, with the method and where its arguments are.
_RESHAPES = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "ExpandBackward0"}
_VIEWS = {
    "PermuteBackward0": ("permute", "_saved_dims"),
    "TransposeBackward0": ("transpose", "_saved_dim0", "_saved_dim1"),
    "UnsqueezeBackward0": ("unsqueeze", "_saved_dim"),
}
Views = tuple[tuple[str, tuple[Any, ...]], ...]


def _signed(dims: Any) -> Any:
    """Return dimensions counted from the last ones as such: a node has them modulo 2⁶⁴."""
    return tuple(map(_signed, dims)) if isinstance(dims, tuple) else dims - (dims >> 63 << 64)


def copied_from(copy: Tensor) -> Iterator[tuple[Any, int, Views]]:
    """Yield what a tensor is a copy of, perhaps a cast one, the nearest first.

    Yields:
        A node and the number of its output, and the methods of `Tensor`, with arguments, that turn the output so
        that its numbers are in the copy's order.

    """
    node: Any = copy.grad_fn
    views: Views = ()
    while node is not None:
        name = node.name()
        if name in _VIEWS:
            method, *saved = _VIEWS[name]
            views = ((method, tuple(_signed(getattr(node, each)) for each in saved)), *views)
        elif name not in ("CloneBackward0", "ToCopyBackward0") and (views or name not in _RESHAPES):
            return
        node, number = node.next_functions[0]
        yield node, number, views


def running_call() -> int | None:
    """Return the number of the node whose backward runs in this thread, None if none does."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else calls_of(node)


# A context in which modes of `torch.overrides` see no operation; there is no public one.
without_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction


# A context in which these modes see operations again, inside of one without.
with_torch_function: Callable[[], AbstractContextManager[None]] = torch._C._EnableTorchFunction


# The hooks of `torch.autograd.graph.saved_tensors_hooks` that are on, such as a checkpoint's; None without.
top_hooks: Callable[[], Any] = partial(torch._C._autograd._top_saved_tensors_default_hooks, False)


# Whether an autocast is on, for any device.
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled


# ------------------------------------------------------------------------------------------------------- operators

COPY_TO: Any = torch.ops.aten._to_copy.default  # `Tensor.to`, below autograd
# Batch norm in training mode, below autograd.
BATCH_NORM: Any = torch.ops.aten._native_batch_norm_legit
# What modes of `torch.overrides` see of `torch.nn.functional.grouped_mm`.
GROUPED_MM: Any = torch._grouped_mm
# A context in which no mode sees operations below autograd, nor do those of fake tensors.
without_dispatch_modes: Any = torch.utils._python_dispatch._disable_current_modes
# The softmax of attention that is not fused, whose rows of -inf alone become zeros.
SAFE_SOFTMAX: Any = torch._safe_softmax
# What PyTorch chooses for arguments of `scaled_dot_product_attention`: a value of `torch.nn.attention.SDPBackend`.
ATTENTION_BACKEND: Callable[..., int] = torch._fused_sdp_choice
# The fused attention of a CPU, and the operator of a GPU whose arguments begin like its own.
_aten: Any = torch.ops.aten
ATTENTION: Mapping[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}

# A view of contiguous tensors, which Inductor takes for one though it is not declared as such.
UNSAFE_VIEW: Any = torch.ops.aten._unsafe_view.default
GROUPED = torch.ops.aten._grouped_mm  # products of several experts
# Products of matrices and convolutions, below autograd.
PRODUCTS: frozenset[Any] = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm")
    if hasattr(torch.ops.aten, name)
)


def cross_entropy_backward(grad: Tensor, logarithms: Tensor, target: Tensor, ignored: int, into: Tensor) -> None:
    """Write the gradient of logits into a tensor of their shape, from those of the losses of rows.

    The public `torch.autograd.grad` computes it in memory of its own, which is then copied.
    """
    aten, total = torch.ops.aten, grad.new_empty(())  # what a mean would be divided by
    grad = aten.nll_loss_backward(grad, logarithms, target, None, 0, ignored, total)
    aten._log_softmax_backward_data.out(grad, logarithms, 1, grad.dtype, out=into)


def is_operator(function: Any) -> bool:
    """Return whether a function is an operator of `torch.ops`, or one of its overloads."""
    return isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def changes_arguments(operator: Any) -> bool:
    """Return whether an operator, or an overload of it, changes an argument in place that is no `out`."""
    names = [] if isinstance(operator, torch._ops.OpOverload) else operator.overloads()
    schemas = [getattr(operator, name)._schema for name in names] or [operator._schema]
    arguments = [
        each for schema in schemas for each in schema.arguments if each.alias_info and not each.kwarg_only
    ]
    return any(each.alias_info.is_write for each in arguments)


def schema_name(function: Any) -> str:
    """Return the name of an operator without its overload, such as `aten::add`; for other objects, `str`."""
    return function._schema.name if isinstance(function, torch._ops.OpOverload) else str(function)


def argument(operator: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what an operator was given for the argument of a name; None if it has none, or has its default."""
    names = [each.name for each in operator._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}.get(name)


# --------------------------------------------------------------------------------------------------------- modules


def modules_in(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dictionary itself in which a module holds its children by name.

    The public `named_children` leaves out a child's second name, and `setattr` refuses objects other than modules.
    """
    return module._modules


def has_hooks(module: nn.Module) -> bool:
    """Return whether a hook of the forward or backward pass is registered; no public function tells."""
    names = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    return any(vars(module).get(name) for name in names)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is compiled, by `torch.compile` or its own `compile`; no public function tells."""
    return uncompiled(module) is not module or module._compiled_call_impl is not None


def uncompiled(module: Any) -> Any:
    """Return the module that `torch.compile` wrapped; other objects unchanged."""
    return module._orig_mod if type(module).__name__ == "OptimizedModule" else module


def plain(model: nn.Module) -> None:
    """Let a model run uncompiled and without checkpoints of transformers, timm and PyTorch's wrapper, in place."""
    for module in [*model.modules()]:
        module._compiled_call_impl = None
        for name, child in modules_in(module).items():
            modules_in(module)[name] = uncompiled(child)
        for flag in ("gradient_checkpointing", "grad_checkpointing"):
            if getattr(module, flag, False) is True:
                setattr(module, flag, False)
        if hasattr(module, "_checkpoint_wrapped_module"):
            vars(module)["checkpoint_fn"] = lambda function, *args, **kwargs: function(*args, **kwargs)


def plain_path(path: str) -> str:
    """Return a path in a model without the parts that wrappers of the compiler and of checkpoints add."""
    return ".".join(part for part in path.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module"))


# ------------------------------------------------------------------------------------------------------- compiling


def never_alone(function: Function) -> Function:
    """Never let the compiler compile a function, or what it calls, alone; inside a graph it is traced as usual.

    PyTorch's own activations stay as they are if they are compiled alone. A mode that sees them would be compiled,
    and they with it. The public `torch.compiler.disable` breaks the graphs around the function, too.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(function.__code__, skip)
    return function


def break_graph(reason: str) -> None:
    """Have the compiler that traces now run the code as it is; with `fullgraph=True` it raises the reason."""
    torch._dynamo.graph_break(reason)  # no private name, but the module is


def is_tracing() -> bool:
    """Return whether `torch.jit.trace` or `torch.fx.symbolic_trace` runs; no public function tells the second."""
    return torch._C._get_tracing_state() is not None or torch.fx._symbolic_trace.is_fx_symbolic_tracing()


def trace_joint(
    function: Callable[..., Any], tensors: Sequence[Tensor], owned: int, mode: FakeTensorMode,
    partition: Callable[..., Any],
) -> None:  # fmt: skip
    """Trace the forward and backward pass of a function of tensors into one graph, as `torch.compile` does.

    The first `owned` of the tensors are parameters and buffers. `partition` is called with the joint graph, its
    inputs and options by name, including `num_fwd_outputs`; it may raise to end the tracing.
    """
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    never: Any = None  # only the joint graph is wanted: the partition raises before anything is compiled
    options: dict[str, Any] = {"decompositions": select_decomp_table(), "num_params_buffers": owned}
    compile_ = aot_function(function, never, never, partition_fn=partition, **options)
    with V.set_fake_mode(mode):
        compile_(*tensors)


def partition_with(
    joint: fx.GraphModule, inputs: Sequence[Any], owned: int, partition: Callable[..., Any], **options: Any
) -> Any:
    """Run the passes of Inductor over a joint graph, and then `partition`, called as `partitioner` calls it.

    The first `owned` inputs are parameters and buffers.
    """
    from torch._inductor import compile_fx, config

    options["static_lifetime_input_indices"] = list(range(owned))
    with config.patch(custom_partitioner_fn=partitioner(partition, None)):
        return compile_fx.partition_fn(joint, inputs, **options)


def min_cut(
    graph: fx.GraphModule, inputs: Sequence[Any], budget: float, float8: bool = False, **options: Any
) -> Any:
    """Return the forward and the backward graph that Inductor's partitioner makes of a joint graph.

    The budget is the value of `torch._functorch.config.activation_memory_budget`, between 0 and 1. With `float8`,
    PyTorch's own pass follows, after which tensors of 16 bits are saved in 8, with a scale.
    """
    import torch._inductor.config
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    passes: dict[str, Any] = dict(torch._inductor.config.post_grad_fusion_options)
    if float8:
        settings = {"use_scaling": True, "size_in_mb": 0.0, "quant_type": "torch.float8_e4m3fn"}
        passes["activation_quantization_aten_pass"] = settings | {"allowed_dtypes": "torch.bfloat16;torch.float16"}
    inductor = torch._inductor.config.patch(post_grad_fusion_options=passes)
    with inductor, config.patch(activation_memory_budget=budget):
        return min_cut_rematerialization_partition(graph, inputs, **options)


def compiler_options(mode: str | None) -> dict[str, Any]:
    """Return the options of a mode of `torch.compile`, which takes no mode and options together.

    PyTorch documents `torch._inductor.list_mode_options` under this name.
    """
    import torch._inductor

    return dict(torch._inductor.list_mode_options(mode)) if mode else {}


def partitioner(partition: Callable[..., Any], identity: str | None) -> Any:
    """Return what Inductor takes for its option `custom_partitioner_fn`.

    `partition` gets the joint graph, its inputs and options by name, for `min_cut`. The identity names all that it
    depends on, in the keys of caches of compiled code; with None nothing is cached.
    """
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **given: Any) -> Any:
            return partition(gm, joint_inputs, **given)

        def uuid(self) -> str | None:
            return identity

        def __reduce__(self) -> Any:  # keys of caches hold all options
            return str, (identity,)

    return Partitioner()


def size_hint(size: Any) -> int:
    """Return a size as it was when a graph was traced."""
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(size) if hint is None else int(hint)


# ------------------------------------------------------------------------------------------------------- measuring


def saved_selectively(context: Any) -> Iterator[Tensor]:
    """Yield what a selective checkpoint saves: the `storage` of the first of its contexts, each in a wrapper."""
    entries = [context.storage]
    for entry in entries:
        for leaf in tree_leaves(list(entry.values()) if isinstance(entry, dict) else entry):
            if isinstance(leaf, dict):
                entries.append(leaf)
            elif isinstance(tensor := getattr(leaf, "val", leaf), Tensor):
                yield tensor


def fake_mode() -> FakeTensorMode:
    """Return a mode of fake tensors that have no address.

    By default PyTorch gives 0, where a kernel that it does not know would read and write.
    """
    import torch._functorch.config

    with torch._functorch.config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keep fake tensors from logging the traceback of an error that is reported in one line anyway."""
    import logging
    from unittest import mock

    with mock.patch.object(logging.getLogger(FakeTensorMode.__module__), "disabled", True):
        yield
