"""Weights from anywhere: what other programs write, under the names that this package gives them."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

NESTED = ("ema", "model_ema", "state_dict_ema", "model", "state_dict", "model_state_dict")  # averaged weights first


def weights_in(content: object) -> dict[str, Tensor]:
    """The weights in what ``torch.load`` gave, by this package's names; empty where there are none.

    Prefixes of wrappers (``module.``, ``_orig_mod.``), a state dict inside a training checkpoint, and the names of
    torchvision's first DenseNets, which its published files still have (``norm.1``, ``conv.2``), are understood.
    """
    if not isinstance(content, dict):
        return {}
    content = next((content[name] for name in NESTED if isinstance(content.get(name), dict)), content)
    return {_plain_key(key): value for key, value in content.items() if torch.is_tensor(value) and key != "n_averaged"}


def published_weights(network: str, name: str) -> dict[str, Tensor]:
    """Weights by the name that torchvision gives them; downloaded on first use, then found where torch keeps them.

    Args:
        network: ``"densenet121"``, ``"densenet161"``, ….
        name: ``"DEFAULT"``, ``"IMAGENET1K_V1"``.

    Raises:
        ImportError: torchvision is not there.
        ValueError: no such weights, or they cannot be downloaded.
    """
    try:
        from torchvision.models import get_model_weights
    except ImportError:
        raise ImportError(f"weights={name!r} are torchvision's: pip install torchvision, or give a file") from None
    try:
        known = get_model_weights(network)
    except ValueError:
        raise ValueError(f"weights={name!r}: nobody published weights of {network}; give a file") from None
    if name not in known.__members__:
        names = " and ".join(map(repr, known.__members__))
        raise ValueError(f"weights={name!r} is neither a file nor a name of {network}'s weights, {names}")
    try:
        return weights_in(known[name].get_state_dict(progress=False, check_hash=True))
    except OSError as error:
        raise ValueError(f"weights={name!r}: cannot download {known[name].url}: {error}; a file works too") from None


def adapted(weights: dict[str, Tensor], model: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
    """Weights for other input channels or classes than they were trained with, and what was done, in words.

    The first convolution sums what it does to three channels into one, or repeats it over more (or fewer) with as much
    weight in all. The classifier of other classes stays as it is.

    Source: timm's ``adapt_input_conv``.
    """
    weights, notes = dict(weights), []
    own, kernel = model.features.conv0.weight, weights["features.conv0.weight"]
    if own.shape[1] != kernel.shape[1]:
        taken, wanted = kernel.shape[1], own.shape[1]
        if wanted == 1:
            kernel = kernel.sum(1, keepdim=True)
        else:
            kernel = kernel.repeat(1, -(-wanted // taken), *[1] * (kernel.dim() - 2))[:, :wanted] * (taken / wanted)
        weights["features.conv0.weight"] = kernel
        how = "summed into one" if wanted == 1 else f"repeated over {wanted}"
        notes.append(f"conv0's kernels for {taken} channels are {how}")
    classes, rows = weights["classifier.weight"].shape[0], getattr(model.classifier, "out_features", 0)
    if rows != classes:
        for name in ("classifier.weight", "classifier.bias"):
            del weights[name]
            if rows:
                weights[name] = model.state_dict()[name]
        notes.append(f"the classifier of {classes} classes is left out" + (f", one of {rows} begins anew" if rows else ""))
    return weights, notes


def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Loads all weights or none.

    Raises:
        ValueError: keys or shapes that do not fit; lists the first of them.
    """
    expected = model.state_dict()
    counters = "num_batches_tracked"  # which the first torch versions did not count, and torch does without
    wrong = [f"missing {key}" for key in expected if key not in weights and not key.endswith(counters)]
    wrong += [f"unexpected {key}" for key in weights if key not in expected]
    wrong += [
        f"{key} has shape {tuple(weights[key].shape)} instead of {tuple(value.shape)}"
        for key, value in expected.items()
        if key in weights and weights[key].shape != value.shape
    ]
    if wrong:
        raise ValueError(f"does not fit this model: {', '.join(first_five(wrong))}")
    model.load_state_dict(weights)


def layer_key(key: str) -> str:
    """A dense layer's key by the name it has now: ``norm.1.weight``, of torchvision's first, is ``norm1.weight``."""
    return re.sub(r"^(norm|conv)\.([12])\.", r"\1\2.", key)


def shortened(error: str) -> str:
    """What torch says of a state dict that does not fit, with five keys of each kind and how many more there are."""
    first, *lines = error.split("\n\t")
    found = []
    for line in lines:
        what, _, keys = line.partition(" key(s) in state_dict: ")
        if what in ("Missing", "Unexpected"):
            line = f"{what} key(s) in state_dict: {', '.join(first_five(keys.strip('. ').split(', ')))}."
        found.append(line)
    listed = [line for line in found if " key(s) in state_dict: " in line]
    others = [line for line in found if line not in listed]
    return "\n\t".join((first, *listed, *first_five(others)))


def first_five(items: list[str]) -> list[str]:
    """The first five, and how many more there are."""
    return items if len(items) <= 5 else [*items[:5], f"and {len(items) - 5} more"]


def _plain_key(key: str) -> str:
    while key.startswith(("module.", "_orig_mod.")):
        key = key.partition(".")[2]
    in_layer = re.match(r"(.*\bdenselayer\d+\.)(.*)", key)
    return in_layer[1] + layer_key(in_layer[2]) if in_layer else key
