"""Philox 4x32-10 in PyTorch's operators: random numbers as a function of a seed and of a counter.

Salmon et al., *Parallel random numbers: as easy as 1, 2, 3*, SC 2011. The same as Triton's `tl.philox`.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
LOW = (1 << 32) - 1
FACTORS = (0xD2511F53, 0xCD9E8D57)
STEPS = (0x9E3779B9, 0xBB67AE85)


def words(seed: Tensor, counter: Tensor, stream: int = 0) -> list[Tensor]:
    """Return four random numbers of 32 bits for each counter.

    Args:
        seed: int64, (1,), Philox's key; its lower half is the first word.
        counter: int64, not negative, of any shape, the lower half of Philox's counter.
        stream: the upper half of the counter; each gives other numbers.

    Returns:
        Four tensors of the counter's shape, int64, from 0 to 2³² − 1.

    """
    keys = [seed & LOW, (seed >> 32) & LOW]
    zero = torch.zeros_like(counter)
    state = [counter & LOW, counter >> 32, zero + stream, zero]
    for _ in range(ROUNDS):
        # of 64 bits: an int64 wraps round, and keeps them all
        first, second = state[0] * FACTORS[0], state[2] * FACTORS[1]
        state = [
            ((second >> 32) & LOW) ^ state[1] ^ keys[0],
            second & LOW,
            ((first >> 32) & LOW) ^ state[3] ^ keys[1],
            first & LOW,
        ]
        keys = [(key + step) & LOW for key, step in zip(keys, STEPS, strict=True)]
    return state
