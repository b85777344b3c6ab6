"""The context that users enter."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, ContextDecorator
from types import TracebackType

import torch

from fitact.base import UsageError
from fitact.runtime.torch_internals import break_graph, in_functorch_transform

from . import rules as rules  # which fill the table
from .capture import Capture
from .offload import Amount, offload_hooks
from .quantising import Quantising, policy_of


class _Entered(threading.local):
    def __init__(self) -> None:
        self.captures: list[Capture | None] = []  # None: a context that does nothing
        self.paused: list[list[Capture]] = []


_entered = _Entered()


class saving(ContextDecorator):  # noqa: N801  as torch.autograd.graph.save_on_cpu
    """A context in which autograd saves less for backward.

    Each tensor that an operation saves is stored as itself, or as what it is recomputed from in backward,
    whichever adds less: outputs of activations, norms, sums, products by element and casts are recomputed, and
    masks are stored in bits. No product of matrices is recomputed, unless you ask for attention's. It can be
    nested, where the inner context counts, and used as a decorator; each thread enters it for itself.
    `torch.compile` breaks its graph there: compiled functions go inside. Where `torch.func` transforms a function
    it does nothing.

        with fitact.saving():
            loss = model(batch).square().mean()
        loss.backward()

    Args:
        error: how far gradients may be off: `"exact"`, bit for bit PyTorch's; `"rounding"`, about 1 %, where
            inputs of norms, activations and linear layers and the factors of gates are stored in 8 bits; or
            `"coarse"`, about 10 %, where these take 4 bits, and what attention saves 8.
        bits: 8, 6, 5, 4 or 3 for all of these, or for some by kind, such as `{"gate": 6, "attention": 8}`. The
            kinds are `gate`, `activation`, `norm`, `linear`, with convolutions, `attention`, and `batch_norm`,
            which `"rounding"` leaves as it is and `"coarse"` stores in 8 bits.
        recompute_attention: whether PyTorch's `scaled_dot_product_attention` saves its inputs alone, and backward
            runs it once more: two more products of matrices beside the seven of fused attention. With dropout it
            is not recomputed.
        offload: what is left to be stored goes to pinned memory of the host, beside what the GPU computes, and
            comes back before backward needs it: `"all"`; a share, such as 0.5; or how many bytes lie there at
            most, an int. Less than 1 MiB stays, and what backward needs first. Without a GPU nothing moves, and a
            warning says so. Inside of other hooks, such as a checkpoint's, these decide.

    Raises:
        UsageError: the error class, a kind, a number of bits or what to offload is unknown.

    """

    def __init__(
        self,
        error: str = "exact",
        bits: int | Mapping[str, int] | None = None,
        *,
        recompute_attention: bool = False,
        offload: Amount = False,
    ) -> None:
        self._error, self._bits, self._policy = error, bits, policy_of(error, bits)
        self._recompute_attention, self._offload = recompute_attention, offload
        offload_hooks(offload)  # which checks it

    def __str__(self) -> str:
        given = [f'"{self._error}"']
        given += [f"bits={self._bits}"] if self._bits else []
        given += ["recompute_attention=True"] * self._recompute_attention
        given += [f"offload={self._offload!r}"] if self._offload else []
        return f"saving({', '.join(given)})"

    @property
    def exact(self) -> bool:
        """Whether gradients are PyTorch's, bit for bit."""
        return not self._policy

    def __enter__(self) -> saving:
        if torch.compiler.is_compiling():
            break_graph("saving is for eager code: enter it around the compiled function, or use fitact.compile")
        capture: Capture | None = None
        if not in_functorch_transform():
            capture = Quantising(self._policy) if self._policy else Capture()
            capture.recompute_attention = self._recompute_attention
            capture.hooks = capture.hooks or offload_hooks(self._offload, restart=True)
            capture.__enter__()
        _entered.captures.append(capture)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        capture = _entered.captures.pop()
        if capture is not None:
            capture.__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error) and "torch.func" in str(error):
            raise UsageError(
                f"{self}: enter it in the function that torch.func transforms, where it does nothing; or leave "
                "out the module that calls torch.func: fitact.convert(model, exclude=...)"
            ) from error


class _Baseline(AbstractContextManager[None]):
    def __enter__(self) -> None:
        paused: list[Capture] = []
        _entered.paused.append(paused)
        for capture in reversed(_entered.captures):
            if capture is None or not capture.pause():
                break
            paused.append(capture)

    def __exit__(self, *error: object) -> None:
        for capture in reversed(_entered.paused.pop()):
            capture.resume()


def baseline() -> AbstractContextManager[None]:
    """Return a context inside of `saving` in which autograd saves as without it; it may be entered many times."""
    return _Baseline()
