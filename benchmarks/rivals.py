"""What others store tensors in, in the place of block codes: the same tensors, at the same point of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from fitact.runtime.saving import storage

Coded = tuple[Tensor, Tensor, Tensor]

# Levels of NF4 (Dettmers et al., QLoRA, 2023, appendix E), and of the numbers e2m1 of NVFP4.
_NF4 = (
    -1.0,
    -0.6961928,
    -0.5250731,
    -0.3949175,
    -0.2844414,
    -0.1847734,
    -0.09105004,
    0.0,
    0.0795803,
    0.1609302,
    0.2461123,
    0.3379152,
    0.4407098,
    0.562617,
    0.7229568,
    1.0,
)
_E2M1 = tuple(sign * size for sign in (-1.0, 1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))


def _scaled(x: Tensor, bits: int, signs: bool, block: int, most: float, code: Callable[[Tensor], Tensor]) -> Coded:
    parts = F.pad(x.detach().float().flatten(), (0, -x.numel() % block)).view(-1, block)
    scales = parts.abs().amax(1, keepdim=True).clamp(min=1e-30) / most
    if block == 16:  # NVFP4: scales in e4m3, with one in float32 for the whole tensor
        whole = scales.amax() / 448
        scales = ((scales / whole).clamp(min=2**-9).to(torch.float8_e4m3fn).float() * whole).clamp(min=1e-30)
    return code(parts / scales), scales, scales[:0]


def _decoded(
    codes: Tensor,
    scales: Tensor,
    _: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    levels: tuple[float, ...] = (),
) -> Tensor:
    numbers = torch.tensor(levels)[codes.int()] if levels else codes.float()
    return (numbers * scales).flatten()[: torch.Size(shape).numel()].view(shape).to(dtype)


def _nearest(z: Tensor, levels: tuple[float, ...]) -> Tensor:
    """Return the index of the nearest level."""
    order = sorted(range(len(levels)), key=levels.__getitem__)
    known = torch.tensor([levels[i] for i in order])
    return torch.tensor(order, dtype=torch.uint8)[torch.bucketize(z, (known[1:] + known[:-1]) / 2)]


def _table(levels: tuple[float, ...], block: int) -> tuple[Callable[..., Coded], Callable[..., Tensor]]:
    code = partial(_nearest, levels=levels)
    return partial(_scaled, block=block, most=max(levels), code=code), partial(_decoded, levels=levels)


# By name: what takes the place of `encode` and `decode` of block codes. The bytes of 4 bits are not packed.
RIVALS: Mapping[str, tuple[Callable[..., Coded], Callable[..., Tensor]]] = {
    "e4m3, 1×128": (
        partial(_scaled, block=128, most=448, code=lambda z: z.to(torch.float8_e4m3fn)),
        _decoded,
    ),
    "int8, 1×64": (partial(_scaled, block=64, most=127, code=lambda z: z.round().to(torch.int8)), _decoded),
    "NF4, 1×64": _table(_NF4, 64),
    "NVFP4, 1×16": _table(_E2M1, 16),
}
BITS: Mapping[str, int] = {"e4m3, 1×128": 8, "int8, 1×64": 8, "NF4, 1×64": 4, "NVFP4, 1×16": 4}


@contextmanager
def in_place_of_block_codes(name: str) -> Iterator[None]:
    """Store in a rival's way, around forward and backward, what a context would store in block codes."""
    encode, decode = RIVALS[name]
    with mock.patch.multiple(storage, encode=encode, decode=decode):
        yield
