"""Triton's `jit`, `tl` and `constexpr`, or inert stand-ins where Triton is not installed.

With the stand-ins a generated module imports and trains on the PyTorch path; its kernels are never called.
"""

from __future__ import annotations

from typing import Any

try:
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
except ModuleNotFoundError:

    class constexpr:  # type: ignore[no-redef]  # noqa: N801  stands in for Triton's
        """Holds a value, as Triton's does."""

        def __init__(self, value: Any) -> None:
            self.value = value

    class _Language:
        """Has every attribute, so that annotations such as `tl.constexpr` can be read."""

        def __getattr__(self, name: str) -> _Language:
            return self

    tl = _Language()

    def jit(fn: Any) -> Any:
        """Return the function as it is."""
        return fn


__all__ = ["constexpr", "jit", "tl"]
