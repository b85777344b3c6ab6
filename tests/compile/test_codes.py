"""The ops of block codes, and masks in bits, as a graph calls them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fitact.runtime.compile.codes import Graph, pack, unpack
from fitact.runtime.saving import blocks
from fitact.runtime.torch_internals import FakeTensorMode

OPS = torch.ops.fitact


@pytest.mark.parametrize("shape", [(64, 128), (3, 77, 192), (130, 34), (65, 33), (4096,)])
@pytest.mark.parametrize("bits", [8, pytest.param(5, marks=pytest.mark.full), 4])
def test_the_ops_are_those_of_saving(shape: tuple[int, ...], bits: int) -> None:
    """With rows as long as the features, or of 64, as where sizes vary; and without numbers as with them."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    for columns in {blocks.columns_of(shape), blocks.BLOCK}:
        *parts, form = OPS.encode_blocks(x, columns, bits, False)
        assert sum(part.nbytes for part in parts) <= x.numel() * (bits + 0.3125) / 8 + 32 * columns + 64
        assert form.nbytes == 0
        found = OPS.decode_blocks(*parts, form, columns, x.dtype)
        assert found.shape == x.shape and found.dtype == x.dtype
        if columns == blocks.columns_of(shape):
            expected = blocks.encode(x, bits)
            assert all(torch.equal(one, other) for one, other in zip(parts, expected, strict=True))
            assert sum(part.nbytes for part in parts) == blocks.nbytes(shape, bits)
            assert torch.equal(found, blocks.decode(*expected, shape, x.dtype))
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(OPS.encode_blocks, (x, columns, bits, False), test_utils=checks)
        torch.library.opcheck(OPS.decode_blocks, (*parts, form, columns, x.dtype), test_utils=checks)


def test_masks() -> None:
    """Eight lie in a byte, the first in the lowest bit."""
    graph, mode = torch.fx.Graph(), FakeTensorMode()
    mask = torch.rand(3, 24, generator=torch.Generator().manual_seed(0)) < 0.5
    x = graph.placeholder("x")
    x.meta["val"] = mode.from_tensor(mask)
    end = graph.output(x)
    module = torch.fx.GraphModule(nn.Module(), graph)
    builder = Graph(module, end)
    packed = pack(builder, x)
    end.args = ((packed, unpack(builder, packed)),)
    module.recompile()
    found, again = module(mask)
    assert torch.equal(again, mask)
    for row, own in zip(found.tolist(), mask.tolist(), strict=True):
        assert int.from_bytes(bytes(row), "little") == sum(bit << i for i, bit in enumerate(own))
