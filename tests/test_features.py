"""Feature maps from the way, as timm's DenseNet gives them, in every mode."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from helpers import assert_same, each_mode, gradients, images, peer, toy, twin
from torch import Tensor

from efficient_densenet import DenseNet

SHAPES = {
    "small": ({"block_config": (2, 2, 1)}, (2, 3, 8, 8)),
    "ImageNet": ({"block_config": (2, 2, 1), "small_inputs": False}, (2, 3, 32, 32)),
    "3-D": ({"block_config": (1, 2), "spatial_dims": 3}, (2, 3, 4, 4, 4)),
}


def by_hooks(model: DenseNet, x: Tensor) -> list[Tensor]:
    """What leaves the stem, every block but the last, and the final ReLU."""
    seen: list[Tensor] = []
    hooks = [
        model.get_submodule(of["module"]).register_forward_hook(lambda _, args, output: seen.append(output))
        for of in model.feature_info[:-1]
    ]
    seen.append(model.forward_features(x))
    for hook in hooks:
        hook.remove()
    return seen


def numbered(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    return {str(i): tensor for i, tensor in enumerate(tensors)}


@each_mode
@pytest.mark.parametrize("shape", SHAPES)
def test_intermediates_are_the_plain_models(shape, mode):
    """Values, gradients and running statistics. Kills: a wrong module, a last block without norm and ReLU."""
    kwargs, size = SHAPES[shape]
    plain, x = toy(**kwargs), images(*size)
    model = twin(plain, mode)
    expected = by_hooks(plain, x)
    features, taken = model.forward_intermediates(x)
    assert_same(numbered(expected), numbered(taken))
    assert features is taken[-1]
    assert [(of["num_chs"], x.shape[-1] // of["reduction"]) for of in model.feature_info] == [
        (each.shape[1], each.shape[-1]) for each in taken
    ]
    for each in (expected, taken):
        sum(i * map_.square().sum() for i, map_ in enumerate(each, 1)).backward()
    assert_same(gradients(plain), gradients(model), tolerance=1e-8)
    assert_same(dict(plain.named_buffers()), dict(model.named_buffers()))


def test_which_intermediates():
    model, x = toy("fused", block_config=(1, 1, 1)).eval(), images()
    features, all_ = model.forward_intermediates(x)
    assert len(all_) == len(model.feature_info) == 4
    for indices, wanted in ((2, [2, 3]), ([0, 2], [0, 2]), ([-1, 1], [1, 3]), ((), []), (4, [0, 1, 2, 3])):
        last, taken = model.forward_intermediates(x, indices)
        assert_same(numbered(all_[i] for i in wanted), numbered(taken), tolerance=0)
        assert torch.equal(last, features)
    last, (first,) = model.forward_intermediates(x, [1], stop_early=True)
    assert last is first and torch.equal(first, all_[1])
    assert len(model.forward_intermediates(x, 1, intermediates_only=True)) == 1
    for indices in (0, 5, [4], [-5]):
        with pytest.raises(ValueError, match=r"indices must be a number from 1 to 4, or some of -4 to 3, got "):
            model.forward_intermediates(x, indices)
    with pytest.raises(ValueError, match="output_fmt must be 'NCHW', got 'NLC'"):
        model.forward_intermediates(x, output_fmt="NLC")
    with pytest.raises(ValueError, match="expected an input of shape"):
        model.forward_intermediates(x[0])


def test_they_are_timms():
    """The same weights, indices, channels and strides; timm's modules are called otherwise where it has the ReLU inside."""
    DenseNet_ = peer("timm").models.densenet.DenseNet
    theirs = DenseNet_(growth_rate=4, block_config=(2, 2), num_classes=3).double()
    model = toy("lean", growth_rate=4, block_config=(2, 2), num_classes=3, small_inputs=False)
    theirs.load_state_dict(model.state_dict())
    assert [(of["num_chs"], of["reduction"]) for of in theirs.feature_info] == [
        (of["num_chs"], of["reduction"]) for of in model.feature_info
    ]
    x = images(2, 3, 32, 32)
    for indices, early in ((None, False), ([0, 1], True), (1, False)):
        expected = theirs.forward_intermediates(x, indices, stop_early=early)
        features, taken = model.forward_intermediates(x, indices, stop_early=early)
        assert_same(numbered([expected[0], *expected[1]]), numbered([features, *taken]))
