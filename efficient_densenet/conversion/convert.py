"""Finding what can run here in a model of anybody's, and the three functions of the package that do it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import nn

from ..models import BlockPlan, DenseBlock, DenseNet
from ..models.layers import mode_name
from ..ops.modules import AVERAGE_POOLS, CONVOLUTIONS, tensor
from ..ops.passes import choice
from ..ops.runner import why_no_operator
from .adopt import ATTRIBUTES, Efficient, Row, Unit, children, closing, efficient_class, is_row, plans_of, spans
from .recognise import Refused, UnitPlan, is_leaf, is_norm, original

# Where torch keeps what dense blocks are made of, of any kind; modules with other leaves are not tried.
_KINDS = ("batchnorm", "instancenorm", "normalization", "activation", "conv", "dropout")
_LEAVES = tuple(f"torch.nn.modules.{kind}" for kind in _KINDS)


def make_efficient(module: nn.Module, mode: bool | str = True) -> nn.Module:
    """Make the dense blocks, transitions and stems in somebody's model run here, in place.

    The module tree stays what it is: same objects, parameters, keys and order, same numbers. What is not recognised, or
    cannot be computed here for the time being (because of hooks, say), runs its own code.

    Args:
        module: a model, or any part of one; from torchvision, timm, MONAI, one's own.
        mode: as for :meth:`DenseNet.set_efficient <efficient_densenet.DenseNet.set_efficient>`; called again, it sets
            the mode. Models of this package that are part of ``module`` are set as well.

    Returns:
        The module itself.

    Raises:
        ValueError: an unknown mode, or nothing was found; names what came nearest, and why it is none.

    Example:
        >>> import torchvision
        >>> model = make_efficient(torchvision.models.densenet121())
    """
    mode = mode_name(mode)
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, got {type(module).__name__}")
    if why := _why_not_convertible(module):
        raise ValueError(why)
    found, own = _find(module)
    before = [(one, type(one), {name: one.__dict__[name] for name in ATTRIBUTES if name in one.__dict__})
              for one in module.modules()]  # fmt: skip
    try:
        for one, attributes in found:
            if not isinstance(one, Efficient):
                one.__class__ = efficient_class(type(one))
            one.__dict__.update(attributes)
            one.__dict__["_efficient_mode"] = mode
        for row in _rows(module):
            if not isinstance(row, Row):
                row.__class__ = efficient_class(type(row))
            row.__dict__["_efficient_mode"] = mode
    except BaseException:  # a class that cannot be exchanged, an interruption
        for one, kind, attributes in before:
            if type(one) is not kind:
                one.__class__ = kind
            for name in ATTRIBUTES:
                one.__dict__.pop(name, None)
            one.__dict__.update(attributes)
        raise
    for one in own:
        if isinstance(one, DenseNet):
            one.set_efficient(mode)
        else:
            one.efficient = mode
    return module


def restore(module: nn.Module) -> nn.Module:
    """Undo :func:`make_efficient` in a module and all its parts; returns the module."""
    for one in module.modules():
        if not isinstance(one, Efficient):
            continue
        if type(one) is not efficient_class(one._efficient_original):
            raise ValueError(f"a {type(one).__name__} was changed further since; undo that first")
        one.__class__ = one._efficient_original
        for name in ATTRIBUTES:
            one.__dict__.pop(name, None)
    return module


def execution_plan(module: nn.Module) -> list[BlockPlan]:
    """For every dense block in a module: its name, the mode asked for, what runs, and why where the two differ.

    What looks like a dense block, but was not or cannot be converted, is listed with the reason.
    """
    plans: list[BlockPlan] = []
    seen: set[nn.Module] = set()
    for name, one in _walk(module):
        if isinstance(one, DenseNet):
            plans += [dataclasses.replace(plan, block=_joined(name, plan.block)) for plan in one.execution_plan()]
        elif isinstance(one, DenseBlock):
            plans.append(one.plan(name))
        elif is_row(one):
            for first, layers in _blocks(one):
                plans.append(_row_plan(_joined(name, first), layers))
                seen.update(layers.values())
        elif one in seen:
            continue
        elif isinstance(one, Unit):
            if not _is_transition(one._efficient_plans):
                plans.append(_unit_plan(name, one))
        elif _is_candidate(one) and not any(isinstance(part, Unit) for part in one.modules()):
            try:
                if _is_transition(plans_of(one)[1]):
                    continue
                plans.append(BlockPlan(name, "naive", "naive", "not converted"))
            except Refused as refused:
                if refused.near == 0 or any(map(_is_recognised, one.modules())):  # of those inside, then
                    continue
                plans.append(BlockPlan(name, "naive", "naive", str(refused)))
            seen.update(one.modules())
    return plans


def _is_transition(plans: dict[tuple, UnitPlan | str]) -> bool:
    """Whether a unit is a transition alone."""
    known = [plan for plan in plans.values() if isinstance(plan, UnitPlan)]
    return bool(known) and not any(plan.layers for plan in known)


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is a unit of one dense layer alone."""
    if not isinstance(module, Unit):
        return False
    known = [plan for plan in module._efficient_plans.values() if isinstance(plan, UnitPlan)]
    return all(len(plan.layers) == 1 and plan.tail is None for plan in known)


def _is_recognised(module: nn.Module) -> bool:
    if not _is_candidate(module):
        return False
    try:
        plans_of(module)
    except Refused:
        return False
    return True


def _joined(name: str, part: str) -> str:
    return f"{name}.{part}" if name and part else name or part


def _unit_plan(name: str, unit: Unit) -> BlockPlan:
    mode = unit._efficient_mode
    if mode == "naive":
        return BlockPlan(name, mode, "naive")
    found = unit._efficient_parts()
    if found.why:
        return BlockPlan(name, mode, "naive", found.why)
    weight = tensor(found.layers[0].conv1, "weight")
    runs = "lean" if mode == "lean" else "fused"
    reason = "there are no checkpoints in converted modules" if mode == "checkpoint" else ""
    graph_break = why_no_operator(found.layers, bool(found.new_first), found.new_only)
    return BlockPlan(name, mode, runs, reason, runs == "fused", choice(weight.device, weight.dtype), graph_break)


def _blocks(row: nn.Module) -> list[tuple[str, dict[str, Unit]]]:
    """The layers that are neighbours in a Sequential, with the name of the first unless it is the only block."""
    blocks: list[dict[str, Unit]] = [{}]
    for key, module in row._modules.items():
        if _is_layer(module):
            blocks[-1][key] = module
        else:
            blocks.append({})
    blocks = [layers for layers in blocks if len(layers) > 1]
    return [("" if len(blocks) == 1 else next(iter(layers)), layers) for layers in blocks]


def _row_plan(name: str, layers: dict[str, Unit]) -> BlockPlan:
    """Of layers that are children of a Sequential, as one block."""
    each = {key: _unit_plan(name, unit) for key, unit in layers.items()}
    reasons = [f"{key}: {plan.reason}" for key, plan in each.items() if plan.reason]
    plain = next((plan for plan in each.values() if plan.runs == "naive"), None)
    return dataclasses.replace(plain or next(iter(each.values())), reason="; ".join(reasons))


def _why_not_convertible(module: nn.Module) -> str:
    for one in module.modules():
        kind = type(one).__name__
        if isinstance(one, torch.jit.ScriptModule):
            return f"module holds a {kind}; convert the model before it is scripted or traced"
        if isinstance(one, torch.fx.GraphModule):
            return f"module holds a {kind}; convert the model before it is traced"
        if kind == "OptimizedModule":
            return "module is compiled; convert the model first, then compile it"
    return ""


def _walk(module: nn.Module, name: str = "", seen: set | None = None) -> Iterator[tuple[str, nn.Module]]:
    """The modules by name, without the insides of blocks that are known."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    yield name, module
    if isinstance(module, (DenseNet, DenseBlock, Unit)):
        return
    for key, child in module._modules.items():
        if child is not None:
            yield from _walk(child, _joined(name, key), seen)


def _is_candidate(module: nn.Module) -> bool:
    """Whether a module may be a dense block: code of its own, on norms, convolutions, and what goes with them."""
    if is_leaf(module) or is_row(module) or not module._modules:
        return False
    leaves = [one for one in module.modules() if is_leaf(one)]
    leaves = [one for one in leaves if type(one) not in AVERAGE_POOLS]
    norms = [one for one in leaves if is_norm(one) or type(one).__module__ in _LEAVES[1:3]]
    if not norms or not any(type(one) in CONVOLUTIONS for one in leaves):
        return False
    return all(type(one).__module__ in _LEAVES or isinstance(one, nn.Identity) or is_norm(one) for one in leaves)


def _find(module: nn.Module) -> tuple[list[tuple[nn.Module, dict]], list[nn.Module]]:
    """The units in a module with what is to be known of them, and the models and blocks of this package.

    Raises:
        ValueError: there are none.
    """
    found: list[tuple[nn.Module, dict]] = []
    own: list[nn.Module] = []
    near: list[tuple[int, str, str]] = []
    inside: set[nn.Module] = set()
    for name, one in _walk(module):
        if one in inside:
            continue
        if isinstance(one, Unit):
            found.append((one, {}))
        elif isinstance(one, (DenseNet, DenseBlock)):
            own.append(one)
        elif _is_candidate(one):
            try:
                watched, plans = plans_of(one)
            except Refused as refused:
                near.append((refused.near, name or type(one).__name__, str(refused)))
                continue
            found.append((one, {"_efficient_watched": watched, "_efficient_plans": plans}))
            inside.update(one.modules())
    nearest = max(near, key=lambda miss: miss[0], default=None)
    plans = [known.get("_efficient_plans") or one._efficient_plans for one, known in found]
    blocks = own or not all(map(_is_transition, plans))
    transitions = bool(found) or any(_transitions(module))
    if not blocks and (nearest is not None and nearest[0] or not transitions):
        what = f"; nearest is {nearest[1]}: {nearest[2]}" if nearest else "; nothing in it has the parts of one"
        raise ValueError(f"no dense block was found in {type(module).__name__}{what}")
    return found, own


def _rows(module: nn.Module) -> Iterator[nn.Module]:
    """The Sequentials in which several children are computed at once."""
    for _, one in list(_walk(module)):
        if is_row(one) and _gains(one):
            yield one


def _transitions(module: nn.Module) -> Iterator[bool]:
    """For every Sequential, whether there is a transition in it."""
    for _, row in _walk(module):
        if is_row(row):
            modules = children(row)
            yield any(closing(modules, i)[0] is not None for i in range(len(modules)))


def _gains(row: nn.Module) -> bool:
    """Whether something that is computed at once reaches over several children of this row."""
    modules, owners = [], []
    for number, child in enumerate(row._modules.values()):
        new = children(child) if is_row(child) else [child]
        modules += new
        owners += [number] * len(new)
    return any(owners[start] != owners[end - 1] for start, end in spans(modules))
