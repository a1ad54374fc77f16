"""Every pass of a dense block in tiles against the reference on whole matrices, in float64 on the same numbers.

The same cases by which the kernels prove themselves; what surrounds a view is NaN, and has to stay.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from efficient_densenet import DenseNet
from efficient_densenet.ops import device
from efficient_densenet.ops.passes import Passes, choice, proof, tiles
from efficient_densenet.ops.passes.proof import CASES, ODD, Shape, disagreement

CPU = torch.device("cpu")
STEM_3D = (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)
SHAPES = {
    "odd": ODD,
    "all": dataclasses.replace(ODD, bias=True, dropout=True, first=4, channels_last=True),
    "running statistics": dataclasses.replace(ODD, batch=False),
    "3-D": Shape(n=2, sizes=(3, 4, 5), taps=(3, 3, 3), pool=(2, 2, 2), channels=8, width=8, k=4, stem=STEM_3D),
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
    """Kills: a pass that nothing compares."""
    passes = {name for name, value in vars(Passes).items() if isinstance(value, staticmethod)}
    assert "conv1x1_backward" in passes
    assert passes - set(CASES) <= {"finish_backward", "short_cuts"}


def test_the_plan_says_what_the_passes_run_on(monkeypatch):
    """Kills: kernels that are on, or off, without a word."""
    model = DenseNet(4, (2,), num_init_features=8)
    assert model.execution_plan()[0].passes == "torch's operations: the kernels are for CUDA"
    assert model.set_efficient("checkpoint").execution_plan()[0].passes == ""
    gpu = torch.device("cuda", 0)
    with device.assume(device.H200):
        assert choice(gpu, torch.float32) == "Triton kernels"
        assert choice(gpu, torch.float64) == "torch's operations: there are no kernels for torch.float64"
        fault = {("conv1x1_forward", gpu, torch.float32, proof.precision(torch.float32)): "wrong"}
        monkeypatch.setattr(proof, "_verdicts", fault)
        assert choice(gpu, torch.float32) == "Triton kernels, but torch's operations for conv1x1_forward"
        monkeypatch.setenv("EFFICIENT_DENSENET_KERNELS", "0")
        assert choice(gpu, torch.float32) == "torch's operations: EFFICIENT_DENSENET_KERNELS=0"
        monkeypatch.delenv("EFFICIENT_DENSENET_KERNELS")
    with device.assume(device.Description.of("cuda", (7, 5))):
        assert "capability 8.0, not 7.5" in choice(gpu, torch.float32)
