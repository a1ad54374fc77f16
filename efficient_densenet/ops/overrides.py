"""Types of tensors that override functions: those of this package follow torch's protocol, as torch's own do.

A type with a ``__torch_function__`` (MONAI's MetaTensor, torchvision's tv_tensors) is told which function is called,
and decides what its result is; what runs within sees plain tensors. A type that computes by itself (by a
``__torch_dispatch__``, as DTensor does) must see every single operation, and parameters that override functions say
what a convolution means: for those the package hands over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

PLAIN_TENSORS = (nn.Parameter, Tensor)
_FAKE = "torch._subclasses.fake_tensor"


def overridable(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function whose first one or two arguments are tensors, by torch's protocol."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        others = tuple(a for a in args[:2] if isinstance(a, Tensor) and type(a) not in PLAIN_TENSORS)
        if not others:
            return function(*args, **kwargs)
        if has_torch_function(others):
            return handle_torch_function(call, others, *args, **kwargs)
        tensors = (as_plain(a) if isinstance(a, Tensor) else a for a in args[:2])
        return function(*tensors, *args[2:], **kwargs)

    return call


@overridable
def same(x: Tensor) -> Tensor:
    """The tensor itself: for asking a type whether it knows functions like this one."""
    return x


def why_other_type(x: Tensor) -> str:
    """Why this type of tensor needs to see torch's own functions; empty where it does not."""
    if _computes(type(x)):
        return f"a {type(x).__name__}"
    if is_fake(x):  # within its mode, what functions make is fake too
        return "" if torch._guards.active_fake_mode() is not None else "a fake tensor outside its mode"
    try:
        same(x)
    except TypeError:  # as torch says it where all types return NotImplemented
        return f"a {type(x).__name__}, which knows torch's own functions only"
    return ""


def is_plain(parameter: object) -> bool:
    """Whether functions may read this parameter as what it holds: nothing about its type overrides anything."""
    kind = type(parameter)
    return kind in PLAIN_TENSORS or (isinstance(parameter, Tensor) and _overrides_nothing(kind))


def as_plain(x: Tensor) -> Tensor:
    """The same tensor, of torch's own type; a fake one, which has no other, itself."""
    if type(x) in PLAIN_TENSORS or is_fake(x):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


@functools.lru_cache(maxsize=64)
def _overrides_nothing(kind: type) -> bool:
    return kind.__torch_function__ is nn.Parameter.__torch_function__ and not _computes(kind)


def _computes(kind: type) -> bool:
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and kind.__module__ != _FAKE


def is_fake(x: Tensor) -> bool:
    """Whether ``x`` stands for a plain tensor of the same shape, without values (torch's FakeTensorMode)."""
    return type(x).__module__ == _FAKE
