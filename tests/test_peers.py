"""Other people's tools on the library's models; skipped where the extra ``peers`` is not installed."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch

from helpers import assert_same, each_mode, images, layers, toy, training_state


@pytest.fixture(scope="module")
def pruning():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its affair
        return pytest.importorskip("torch_pruning", reason="needs torch-pruning: pip install -e '.[peers]'")


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
