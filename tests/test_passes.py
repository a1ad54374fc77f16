"""Every pass of a dense block in tiles against the reference on whole matrices, in float64 on the same numbers.

The same cases by which the kernels prove themselves; what surrounds a view is NaN, and has to stay.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from efficient_densenet.ops import device
from efficient_densenet.ops.passes import Passes, tiles
from efficient_densenet.ops.passes.proof import CASES, ODD, Shape, disagreement

CPU = torch.device("cpu")
SHAPES = {
    "odd": ODD,
    "all": dataclasses.replace(ODD, bias=True, dropout=True, first=4, channels_last=True),
    "running statistics": dataclasses.replace(ODD, batch=False),
    "3-D": Shape(n=2, sizes=(3, 4, 5), taps=(3, 3, 3), pool=(2, 2, 2), channels=8, width=8, k=4),
    "a line": Shape(n=3, sizes=(1, 9), taps=(1, 3), pool=(1, 2)),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("tile_bytes", [2**21, 500], ids=["one tile", "many tiles"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_a_pass_in_tiles(name, shape, dtype, tile_bytes):
    """Kills: a tile left out or taken twice, a wrong stride, what is written beside a view, a sum in half precision."""
    for unfolds in (True, False):
        machine = dataclasses.replace(device.describe(CPU), tile_bytes=tile_bytes, unfolds=unfolds)
        with device.assume(machine):
            assert disagreement(name, tiles, dtype, CPU, SHAPES[shape]) is None


def test_every_pass_has_a_case():
    """Kills: a pass that nothing compares, but for the stem's, which tests of whole models do."""
    passes = {name for name, value in vars(Passes).items() if isinstance(value, staticmethod)}
    assert "conv1x1_backward" in passes
    assert passes - set(CASES) <= {"finish_backward", "short_cuts", "norm_relu_max_pool", "norm_relu_max_pool_backward"}
