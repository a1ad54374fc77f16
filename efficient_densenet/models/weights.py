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


def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Loads all weights or none.

    Raises:
        ValueError: keys or shapes that do not fit; lists the first of them.
    """
    expected = model.state_dict()
    wrong = [f"missing {key}" for key in expected if key not in weights]
    wrong += [f"unexpected {key}" for key in weights if key not in expected]
    wrong += [
        f"{key} has shape {tuple(weights[key].shape)} instead of {tuple(value.shape)}"
        for key, value in expected.items()
        if key in weights and weights[key].shape != value.shape
    ]
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(f"does not fit this model: {', '.join(wrong[:5])}{more}")
    model.load_state_dict(weights)


def _plain_key(key: str) -> str:
    while key.startswith(("module.", "_orig_mod.")):
        key = key.partition(".")[2]
    return re.sub(r"(\.denselayer\d+\.(?:norm|conv))\.(\d\.)", r"\1\2", key)
