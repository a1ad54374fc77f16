"""Other people's tools on the models: what they find in the plain model, they find in every mode."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch

from efficient_densenet import SyncBatchNorm
from efficient_densenet.memory import measure_step
from helpers import (
    assert_same,
    assert_trains_like,
    blocks,
    buffers,
    each_mode,
    gradients,
    images,
    layers,
    peer,
    toy,
    training_state,
    twin,
)


# --- Torch-Pruning --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pruning():
    return peer("torch_pruning")


# What is pruned, and the method of Torch-Pruning that does it.
PRUNED = {
    "stem": ("conv0", "prune_conv_out_channels"),
    "new features": ("denseblock1.denselayer1.conv2", "prune_conv_out_channels"),
    "what a layer reads": ("denseblock2.denselayer1.norm1", "prune_batchnorm_out_channels"),
    "in 3-D": ("denseblock1.denselayer1.conv2", "prune_conv_out_channels"),
}


@functools.lru_cache(maxsize=None)
def pruned(mode: str, part: str) -> tuple[list, dict, dict]:
    """What goes with channel 1 of a part by Torch-Pruning's graph, the shapes left, two steps of training behind."""
    import torch_pruning

    overrides, size = {}, (8, 8)
    if part == "in 3-D":
        overrides, size = {"small_inputs": False, "spatial_dims": 3}, (17, 17, 17)
    name, method = PRUNED[part]
    model, x = toy(mode, **overrides), images(3, 3, *size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = torch_pruning.DependencyGraph().build_dependency(model, example_inputs=x)
        group = graph.get_pruning_group(model.features.get_submodule(name), getattr(torch_pruning, method), idxs=[1])
    taken = sorted((dep.target.name, dep.handler.__name__, tuple(channels)) for dep, channels in group)
    group.prune()
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    return taken, shapes, training_state(model.train(), x, steps=2)


@each_mode
@pytest.mark.parametrize("part", PRUNED)
def test_pruning_takes_the_same_channels(mode, part, pruning):
    """Torch-Pruning's dependency graph: who reads a channel. The pruned model then trains as the plain one.

    Kills: a function for a whole block under hooks on all its parts, whose graph lacks the layers that read a channel.
    """
    (taken, shapes, expected), (other_taken, other_shapes, actual) = pruned("naive", part), pruned(mode, part)
    assert other_taken == taken and other_shapes == shapes
    assert_same(expected, actual)


@each_mode
def test_whole_models_are_pruned_alike(mode, pruning):
    """Half of all channels by their size, layer after layer. Kills: as above, for importances and ratios."""
    x, found = images(2, 3, 8, 8), []
    for net in (toy(), toy(mode)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pruner = pruning.pruner.MagnitudePruner(
                net,
                x,
                importance=pruning.importance.MagnitudeImportance(),
                pruning_ratio=0.5,
                ignored_layers=[net.classifier],
            )
            pruner.step()
        found.append(training_state(net.train(), x))
        assert all(layer.conv2.out_channels < layer.growth_rate for layer in layers(net))
        assert not any(module._forward_hooks for module in net.modules())
    assert_same(*found)
    assert torch.isfinite(found[0]["step 1: output"]).all()


# --- MONAI ----------------------------------------------------------------------------------------------------------


def meta_tensor(x: torch.Tensor) -> torch.Tensor:
    return peer("monai.data").MetaTensor(x, affine=2 * torch.eye(4), meta={"name": "scan"})


@each_mode
@pytest.mark.parametrize("overrides", [{"spatial_dims": 3}, {"small_inputs": False}], ids=["3d", "imagenet"])
def test_meta_tensors(mode, overrides):
    """Type and metadata come out as from the plain model. Kills: a function through which they do not pass."""
    model = toy(**overrides)
    states = []
    for net in (model, twin(model, mode)):
        x = images(2, 3, *(8,) * net.spatial_dims)
        outputs = {
            "model": net(meta_tensor(x)),
            "forward_features": net.forward_features(meta_tensor(x)),
            "features": net.features(meta_tensor(x)),
            "block": blocks(net)[0](meta_tensor(images(2, 8, *(4,) * net.spatial_dims))),
            "transition": net.features.transition1(meta_tensor(images(2, 16, *(4,) * net.spatial_dims))),
        }
        for name, output in outputs.items():
            assert type(output) is peer("monai.data").MetaTensor, name
            assert output.meta["name"] == "scan" and torch.equal(output.affine, 2 * torch.eye(4).double()), name
        outputs["model"].square().sum().backward()
        states.append({**{k: v.detach().as_tensor() for k, v in outputs.items()}, **gradients(net), **buffers(net)})
    assert_same(*states)


@each_mode
def test_meta_tensors_cost_no_memory(mode):
    """Kills: the plain path for whatever is not exactly a tensor."""
    model = toy(mode, block_config=(8, 8))
    plain, meta = (measure_step(model, x) for x in (images(4, 3, 16, 16), meta_tensor(images(4, 3, 16, 16))))
    assert meta.kept_bytes - plain.kept_bytes <= 128  # a copy of the 4x4 matrix among the metadata
    assert meta.peak_bytes <= 1.02 * plain.peak_bytes


# --- timm -----------------------------------------------------------------------------------------------------------


def test_timms_norms_and_activations_are_synchronised_whole():
    """In one process nothing changes. Kills: ReLUs that are lost with the norms they stood in."""
    timm = peer("timm")
    torch.manual_seed(0)
    model = timm.create_model("densenet121", num_classes=5, growth_rate=4, block_config=(2, 2)).double()
    other = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    synchronised = [module for module in other.modules() if isinstance(module, SyncBatchNorm)]
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert len(synchronised) == len(norms) > 10 and list(model.state_dict()) == list(other.state_dict())
    assert_trains_like(model, other, images(2, 3, 32, 32), steps=2)
