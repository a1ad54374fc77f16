"""The block function where it is easily wrong."""

import dataclasses

import pytest
import torch
from helpers import assert_same, training_state
from torch import nn

from efficient_densenet import DenseNet
from efficient_densenet.ops import dense_block, device, storage

MODES = ("checkpoint", "fused", "lean")


def toy(mode, **kwargs):
    torch.manual_seed(0)
    return DenseNet(**{"growth_rate": 4, "block_config": (3, 2), "num_init_features": 8, **kwargs}, efficient=mode).double()


@pytest.mark.parametrize("small_inputs", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_in_eval_a_broken_image_spoils_no_other(mode, small_inputs):
    """Kills: adding slope times x where slope is zero and x is not finite."""
    x = torch.randn(2, 3, 33, 33, dtype=torch.float64)
    x[0, 0, 0, 0] = float("nan")

    def gradient(mode):
        images = x.clone().requires_grad_()
        toy(mode, small_inputs=small_inputs).eval()(images)[1].sum().backward()
        return images.grad

    expected, got = gradient("naive"), gradient(mode)
    assert expected[1].isfinite().all()
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["relu1", "conv1", "relu2", "conv2"])
def test_dropout_of_a_replaced_module_draws_as_in_the_plain_model(mode, name):
    """Kills: handing a foreign module another memory layout than the plain model does."""
    x = torch.randn(3, 3, 9, 8, dtype=torch.float64)

    def output(mode):
        model = toy(mode)
        layer = model.features.denseblock1.denselayer2
        setattr(layer, name, nn.Sequential(getattr(layer, name), nn.Dropout(0.3)))
        torch.manual_seed(7)
        return model(x)

    torch.testing.assert_close(output(mode), output("naive"), rtol=1e-10, atol=1e-12)


def test_planning_reads_no_parametrized_weight():
    """Kills: taking shapes from weights, which moves the state of spectral normalisation."""
    model = toy("lean")
    nn.utils.parametrizations.spectral_norm(model.features.transition1.conv)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.execution_plan()
    repr(model)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


@pytest.mark.parametrize("mode", ("fused", "lean"))
def test_rows_may_be_aligned(mode):
    """As accelerators want them. Kills: strides of a buffer or of its gradient taken for those of dense rows."""
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64)
    machine = dataclasses.replace(device.describe(x.device), row_bytes=64)
    pitches, aligned = [], storage.aligned_empty
    with device.assume(machine), pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "aligned_empty", lambda *args: pitches.append(aligned(*args)) or pitches[-1])
        patch.setattr(dense_block, "aligned_empty", storage.aligned_empty)
        found = training_state(toy(mode, growth_rate=5), x)
    assert_same(training_state(toy("naive", growth_rate=5), x), found)
    assert [tensor.stride(-1) for tensor in pitches] == [24] * 4  # of 23 and 21 channels, forward and backward
