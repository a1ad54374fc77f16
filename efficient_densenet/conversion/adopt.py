"""Other people's modules, made to run here: their classes are exchanged for subclasses with another ``forward``.

Nothing else of a module changes: it stays the same object in the same tree, with the same parameters, keys and names,
and an instance of its class. The subclass has the same name, is built again from the original wherever a module is
copied or loaded, and hands over to the original's own ``forward`` whenever the block function cannot speak for it.

Two kinds are taken in: *units*, modules that :func:`~.recognise.recognise` knows for dense layers, one or many, or for
a transition, or for both; and *rows*, ``nn.Sequential``s in which there is something to gain by computing several
children at once: units one after the other, a block and the transition behind it, a stem's BN-ReLU-max-pool. Each is
efficient when called alone.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.dense_block import NormCall
from ..ops.layout import behind_pointwise, in_format, is_channels_last
from ..ops.modules import (
    AVERAGE_POOLS, CONVOLUTIONS, MAX_POOLS, NORMS, Tail, is_hooked, rectifies, why_no_stem, why_no_tail,
    why_plain,
)  # fmt: skip
from ..ops.runner import closes, dtype_of, process_groups
from ..ops.stem import norm_relu_max_pool
from .recognise import Found, Refused, UnitPlan, copied, fingerprint, original, parts, recognise, run_found, watch

ATTRIBUTES = ("_efficient_mode", "_efficient_plans", "_efficient_watched")
_MOST_PLANS = 16


class Efficient:
    """What all exchanged classes have in common."""

    _efficient_original: type  # the class that was there before
    _efficient_mode = "auto"

    def __reduce_ex__(self, protocol: int) -> tuple:
        if type(self) is not efficient_class(self._efficient_original):  # exchanged once more, by somebody else
            return super().__reduce_ex__(protocol)
        return _rebuilt, (self._efficient_original,), super().__reduce_ex__(2)[2]

    def _efficient_plain(self, *args, **kwargs) -> Any:
        return self._efficient_original.forward(self, *args, **kwargs)


def _rebuilt(kind: type) -> nn.Module:
    """What a pickle or a copy starts from."""
    return object.__new__(efficient_class(kind))


@functools.lru_cache(maxsize=None)
def efficient_class(kind: type) -> type:
    """The class whose modules run here, for an original one."""
    forward = kind.forward
    # TorchScript compiles the original under another name: it knows functions by theirs.
    plain = types.FunctionType(
        forward.__code__, forward.__globals__, "_plain_forward", forward.__defaults__, forward.__closure__
    )
    plain.__annotations__, plain.__kwdefaults__ = forward.__annotations__, forward.__kwdefaults__
    names = {}
    if forward is nn.Sequential.forward:
        base = Row
    elif len(arguments := list(inspect.signature(forward).parameters.values())) == 2 and arguments[1].kind < 2:
        base, code = Unit, Unit.forward.__code__.replace(co_varnames=("self", arguments[1].name))
        names["forward"] = types.FunctionType(code, globals(), "forward")  # may be given its argument by name
    else:
        base = UnitOfMoreArguments
    names |= {
        "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
        "__jit_ignored_attributes__": [*getattr(kind, "__jit_ignored_attributes__", []), *ATTRIBUTES],
        "_efficient_original": kind, "_plain_forward": plain,
    }  # fmt: skip
    return type(kind.__name__, (base, kind), names)


# --- Units -----------------------------------------------------------------------------------------------------------


class Unit(Efficient):
    """A module that computes dense layers, each reading everything before it, or a transition."""

    def forward(self, x):
        if torch.jit.is_scripting():
            return self._plain_forward(x)
        return self._efficient_run(x)

    @torch.jit.unused
    def _efficient_run(self, x: Tensor) -> Tensor:
        if self._efficient_mode == "naive" or why_plain(x):
            return self._efficient_plain(x)
        found = self._efficient_parts()
        if found.why or why_not_these(x, found):
            return self._efficient_plain(x)
        return in_format(*run_found(x, found, self._efficient_mode != "lean"))

    def _efficient_parts(self) -> Found:
        """What it is made of in this forward, or why that cannot run as one function."""
        try:
            state = fingerprint(self, self._efficient_watched)
        except KeyError:  # a module is gone
            state = None
        plan = self._efficient_plans.get(state)
        if plan is None:
            plan = _learn(self)
        return Found(why=plan) if isinstance(plan, str) else parts(self, plan)


class UnitOfMoreArguments(Unit):
    """A unit whose ``forward`` takes more than features; where it is given more, it runs as it is."""

    def forward(self, *args, **kwargs):
        if kwargs or not args or any(a is not b for a, b in zip(args[1:], self._efficient_defaults(), strict=False)):
            return self._efficient_plain(*args, **kwargs)
        return self._efficient_run(args[0])

    def _efficient_defaults(self) -> list:
        parameters = list(inspect.signature(self._efficient_original.forward).parameters.values())[2:]
        return [parameter.default for parameter in parameters]


def why_not_these(x: Tensor, found: Found) -> str:
    """Why a unit's layers and tail cannot be computed of this input."""
    norm, _, conv, *_ = found.layers[0] if found.layers else found.tail
    if x.dim() != len(conv.kernel_size) + 2 or x.shape[1] != norm.num_features:
        return "an input of another shape"
    if dtype_of(x, found.layers, found.tail) is None:
        return "an input of another type"
    return "" if found.tail is None or closes(found.tail, x, found.layers) else "a transition for another input"


def plans_of(unit: nn.Module) -> tuple[tuple, dict[tuple, UnitPlan | str]]:
    """What a module computes as it is, in training, and in evaluation: what is watched for it, and the plans.

    Raises:
        Refused: it is no dense block, in none of them.
    """
    watched, plans, refusals = watch(unit), {}, []
    for flag in (None, True, False):
        other = copied(unit, lambda module: None)
        for module in other.modules():
            module.__dict__["training"] = module.training if flag is None else flag
        state = fingerprint(other, watched)
        if state in plans:
            continue
        try:
            plans[state] = recognise(other)
        except Refused as refused:
            plans[state] = str(refused)
            refusals.append(refused)
            if refused.near == 0:
                raise
    if len(refusals) == len(plans):
        raise refusals[0]
    return watched, plans


def _learn(unit: nn.Module) -> UnitPlan | str:
    """What a unit computes, now that its flags or numbers have changed."""
    if torch.compiler.is_compiling():
        return "changed since it was last called; call it once before it is compiled"
    plans = unit._efficient_plans
    if len(plans) >= _MOST_PLANS:
        return "its attributes change from call to call"
    watched = watch(unit)
    try:
        plan = recognise(unit)
    except Refused as refused:
        plan = str(refused)
    if watched != unit._efficient_watched:
        unit.__dict__["_efficient_watched"] = watched
        plans.clear()
    plans[fingerprint(unit, watched)] = plan
    return plan


# --- Rows ------------------------------------------------------------------------------------------------------------


class Row(Efficient):
    """A Sequential some of whose children are computed together."""

    def forward(self, input):
        if torch.jit.is_scripting():
            return self._plain_forward(input)
        return self._efficient_run(input)

    @torch.jit.unused
    def _efficient_run(self, x):
        if self._efficient_mode == "naive" or why_plain(x):
            return self._efficient_plain(x)
        return run_row(x, children(self), self._efficient_mode != "lean")

    def __getitem__(self, index):
        found = super().__getitem__(index)
        if isinstance(index, slice):  # a Sequential of its own
            found.__dict__["_efficient_mode"] = self._efficient_mode
        return found


def is_row(module: nn.Module) -> bool:
    """Whether all that happens in a module is that its children are called one after the other."""
    return original(type(module)).forward is nn.Sequential.forward


def children(row: nn.Module) -> list[nn.Module]:
    """What a row calls, with the children of rows within it in their place."""
    found = []
    for child in row._modules.values():
        if is_row(child) and not is_hooked(child) and getattr(child, "_efficient_mode", "auto") != "naive":
            found += children(child)
        else:
            found.append(child)
    return found


def norm_relu(modules: Sequence[nn.Module], i: int) -> tuple[nn.Module | None, nn.Module | None, int]:
    """A BatchNorm and its ReLU, which may be part of it, from the i-th module on; and where the next module is."""
    norm = modules[i] if i < len(modules) else None
    if norm is not None and rectifies(norm):
        return norm, None, i + 1
    if type(norm) in NORMS and i + 1 < len(modules) and type(modules[i + 1]) is nn.ReLU:
        return norm, modules[i + 1], i + 2
    return None, None, i


def closing(modules: Sequence[nn.Module], i: int) -> tuple[Tail | None, int]:
    """A transition from the i-th module on; and where the next module is."""
    norm, relu, j = norm_relu(modules, i)
    if norm is not None and j + 1 < len(modules):
        conv, pool = modules[j : j + 2]
        if type(conv) in CONVOLUTIONS and type(pool) in AVERAGE_POOLS:
            return Tail(norm, relu, conv, pool), j + 2
    return None, i


def stem(modules: Sequence[nn.Module], i: int) -> int:
    """Where the next module is behind the BN-ReLU-max-pool of a stem, from the i-th module on; or ``i``."""
    norm, _, j = norm_relu(modules, i)
    return j + 1 if norm is not None and j < len(modules) and type(modules[j]) in MAX_POOLS else i


def units(modules: Sequence[nn.Module], i: int) -> int:
    """Where the next module is behind units, from the i-th module on."""
    while i < len(modules) and isinstance(modules[i], Unit):
        i += 1
    return i


def spans(modules: Sequence[nn.Module]) -> Iterator[tuple[int, int]]:
    """Where something can be computed at once, by the types of modules, and where the next module is."""
    i = 0
    while i < len(modules):
        start, i = i, units(modules, i)
        if i > start:
            i = max(closing(modules, i)[1], norm_relu(modules, i)[2])
        else:
            i = max(stem(modules, i), closing(modules, i)[1])
        if i > start:
            yield start, i
        i = max(i, start + 1)


def run_row(x: Tensor, modules: list[nn.Module], keep_conv1: bool) -> Tensor:
    """The modules one after the other, those together that can be."""
    channels_last = None  # whether x is in the plain model, where it is laid out otherwise here
    i = 0
    while i < len(modules):
        found = _together(x, modules, i, keep_conv1, channels_last)
        if found is None:
            x = modules[i](x if channels_last is None else in_format(x, channels_last))
            channels_last = None
            i += 1
        else:
            x, channels_last, i = found
    return x if channels_last is None else in_format(x, channels_last)


def _together(
    x: Tensor, modules: list[nn.Module], i: int, keep_conv1: bool, channels_last: bool | None
) -> tuple[Tensor, bool | None, int] | None:
    """What is computed at once from the i-th module on: the result, its format, and where the next module is."""
    if isinstance(modules[i], Unit):
        return None if why_plain(x) else _block(x, modules, i, keep_conv1, channels_last)
    norm, relu, last = norm_relu(modules, i)
    if norm is None or why_plain(x) or x.shape[1] != norm.num_features:
        return None
    end = stem(modules, i)
    if end > i:
        pool = modules[last]
        if torch.compiler.is_compiling() or why_no_stem(x, norm, relu, pool):
            return None
        x = x if channels_last is None else in_format(x, channels_last)
        return norm_relu_max_pool(x, norm, pool), behind_pointwise(is_channels_last(x), x.shape), end
    tail, end = closing(modules, i)
    if tail is None or why_no_tail(tail) or dtype_of(x, [], tail) is None or not closes(tail, x, []):
        return None
    return *run_found(x, Found(tail=tail), keep_conv1, channels_last), end


def _block(
    x: Tensor, modules: list[nn.Module], i: int, keep_conv1: bool, channels_last: bool | None
) -> tuple[Tensor, bool | None, int] | None:
    """Units and what closes them."""
    block = Found()
    groups: set = set()
    while i < len(modules) and isinstance(modules[i], Unit) and block.tail is None and not block.new_only:
        unit = modules[i]
        if is_hooked(unit) or unit._efficient_mode == "naive":
            break
        new = unit._efficient_parts()
        if new.why:
            break
        new_groups = groups | process_groups(new.layers)
        new_groups |= set() if new.tail is None else NormCall.of(new.tail.norm).groups
        joined = Found(block.layers + new.layers, "", new.new_first, new.new_only, new.tail)
        if block.layers:  # in one order, all or nothing of what they read
            if len(new_groups) > 1 or new.new_only or new.new_first not in (None, block.new_first):
                break
            if new.tail is not None and not closes(new.tail, x, block.layers + new.layers):
                break
            joined = joined._replace(new_first=block.new_first)
        block, groups = joined, new_groups
        i += 1
    if not block.layers and block.tail is None or why_not_these(x, block):
        return None
    end = i
    if block.tail is None and not block.new_only:
        tail, end = closing(modules, i)
        if tail is None:
            norm, relu, end = norm_relu(modules, i)
            tail = None if norm is None else Tail(norm, relu)
        if tail is not None:
            if why_no_tail(tail) or not closes(tail, x, block.layers):
                tail, end = None, i
        block = block._replace(tail=tail)
    return *run_found(x, block, keep_conv1, channels_last), end
