"""What somebody else's module computes: whether it is a dense block or a transition, told by its own ``forward``.

Neither class names nor child modules tell: a ReLU may be a function, shared, or part of the norm; dropout may be
applied where no module stands; features are appended, prepended, or not returned at all. So a copy of the module is
called with a value that stands for a tensor and writes down what happens to it: its ``forward`` runs, on modules that
compute nothing. What comes out either is a dense block, layer by layer, with or without a transition behind it, or
names the first thing that no dense block does. Then the module and the block function are both computed on a small
input, and have to agree.

What holds depends on the flags and numbers that the module's own code reads (``training``, ``drop_rate``): a plan is
for one state of them, :func:`fingerprint`. Nothing of the module is touched: copies share no state with it, and no hook
is called.
"""

from __future__ import annotations

import contextlib
import functools
import io
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.dense_block import NormCall
from ..ops.modules import (
    AVERAGE_POOLS, CONVOLUTIONS, DROPOUTS, Parts, Tail, is_hooked, rectifies, why_no_tail, why_not_fused,
)  # fmt: skip
from ..ops.runner import process_groups, run_fused

_DROPOUT_FUNCTIONS = {F.dropout: 0, F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}
_CONCATENATIONS = {torch.cat, torch.concat, torch.concatenate}
_POOLS = {F.avg_pool1d: 1, F.avg_pool2d: 2, F.avg_pool3d: 3}
_RECTIFIERS = {F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
_OWN = (frozenset(nn.Module().__dict__) - {"training"}) | {"_is_replica"}  # what every module may hold


class LayerPlan(NamedTuple):
    """Where the parts of one dense layer are, by their numbers among a plan's modules; None where there is none."""

    name: str
    norms: tuple[int, ...]
    relus: tuple[int | None, ...]
    convs: tuple[int, ...]
    inside: tuple[bool, ...]  # whether the norm rectifies
    dropout: int | None
    rate: float  # of a dropout that is a function
    kind: int  # of that: 0 drops values, else channels of so many dimensions


class TailPlan(NamedTuple):
    """Where the parts of a transition are, as in :class:`LayerPlan`."""

    norm: int
    relu: int | None
    conv: int
    pool: int | None
    inside: bool


class UnitPlan(NamedTuple):
    """What a module computes: dense layers, each reading everything before it, a transition, or these and then that.

    Plain numbers and names.

    ``modules`` says how each is found: by the number of the module that it stands in and its name there; number 0 is
    the whole. ``watched`` are those whose own ``forward`` decides what happens.
    """

    modules: tuple[tuple[int, str], ...]
    called: tuple[int, ...]  # besides norms, rectifiers and convolutions: their hooks would have to run
    layers: tuple[LayerPlan, ...]
    new_first: bool
    new_only: bool
    tail: TailPlan | None = None


class Found(NamedTuple):
    """A unit's layers and tail in this forward, and why the block function cannot speak for them."""

    layers: list[Parts] = []
    why: str = ""
    new_first: bool | None = None  # None: either way, as there are no layers
    new_only: bool = False
    tail: Tail | None = None


class Refused(Exception):
    """Why a module is no dense block."""

    def __init__(self, why: str, near: int = 0):
        super().__init__(why)
        self.near = near  # how much of a block was seen: for naming what came nearest


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a BatchNorm or an InstanceNorm of any kind, with whatever stands in it."""
    return isinstance(module, nn.modules.batchnorm._NormBase)


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is known by its type, and not by the code of its ``forward``."""
    kind = type(module)
    if is_norm(module):
        return True
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return kind.__module__.startswith("torch.nn.") and not isinstance(module, containers)


# --- Flags and numbers -----------------------------------------------------------------------------------------------


def watch(unit: nn.Module) -> tuple:
    """The modules of ``unit`` with a ``forward`` of their own, each with the names of the plain values it holds."""
    found: list[tuple[int, str, tuple[str, ...]]] = []

    def visit(module: nn.Module, parent: int, name: str) -> None:
        plain = (key for key, value in module.__dict__.items() if isinstance(value, (int, float, str, type(None))))
        names = tuple(key for key in plain if key not in _OWN and not key.startswith("_efficient_"))
        number = len(found)
        found.append((parent, name, names))
        for key, child in module._modules.items():
            if child is not None and not is_leaf(child):
                visit(child, number, key)

    visit(unit, -1, "")
    return tuple(found)


def fingerprint(unit: nn.Module, watched: tuple) -> tuple:
    """The state that the code of a module may depend on: flags, numbers, and names of what stands in it.

    Raises:
        KeyError: a module is gone.
    """
    modules: list[nn.Module] = []
    state: list[object] = []
    for parent, name, names in watched:
        module = unit if parent < 0 else modules[parent]._modules[name]
        modules.append(module)
        values = module.__dict__
        if parent >= 0:  # another attribute, or a method set on the instance; a replica has two more of its own
            state.append(len(values) - 2 * ("_is_replica" in values))
        state.append(original(type(module)).__qualname__)
        state += module._modules
        state += [values.get(key) for key in names]
    return tuple(state)


# --- Copies ----------------------------------------------------------------------------------------------------------


def original(kind: type) -> type:
    """The class of a module before :func:`make_efficient` changed it."""
    return getattr(kind, "_efficient_original", kind)


def copied(module: nn.Module, change: Callable[[nn.Module], None], memo: dict | None = None) -> nn.Module:
    """A copy of a module tree for trying things out: own containers, no hooks, whatever ``change`` makes of each."""
    memo = {} if memo is None else memo
    if module in memo:
        return memo[module]
    other = memo[module] = object.__new__(original(type(module)))
    for key, value in module.__dict__.items():
        if key.endswith("_hooks") or "_hooks_" in key or isinstance(value, (dict, list, set)):
            value = type(value)() if "_hooks" in key else value.copy()
        other.__dict__[key] = value
    if "_is_replica" in other.__dict__:
        former = other.__dict__.pop("_former_parameters")  # held as plain attributes since
        for key in ("_is_replica", *former):
            other.__dict__.pop(key)
        other.__dict__["_parameters"] = {**other._parameters, **former}
    other.__dict__["_modules"] = {
        name: child if child is None else copied(child, change, memo) for name, child in module._modules.items()
    }
    change(other)
    return other


@functools.lru_cache(maxsize=256)
def _bare(kind: type, record: bool) -> type:
    """A class whose modules are called without hooks; to record, they write down that they were called."""

    def call(self, *args, **kwargs):
        if not record:
            return kind.forward(self, *args, **kwargs)
        return self.__dict__["_efficient_record"].module(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


@contextlib.contextmanager
def _unnoticed() -> Iterator[None]:
    """Within it other people's code runs without a trace.

    Raises:
        Refused: at its end, if that code has drawn random numbers.
    """
    drawn, python = torch.get_rng_state(), random.getstate()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
        if not torch.equal(drawn, torch.get_rng_state()) or python != random.getstate():
            raise Refused("its forward draws random numbers of its own")
    finally:
        torch.set_rng_state(drawn)
        random.setstate(python)


# --- What happens to a value -----------------------------------------------------------------------------------------


class _Record:
    """What has happened in one forward."""

    def __init__(self, unit: nn.Module, names: dict[nn.Module, str]):
        self.names, self.unit = names, unit
        self.called: list[str] = []
        self.steps = 0
        self.layers: list[_Value] = []

    def module(self, module: nn.Module, *args, **kwargs) -> Any:
        name, kind = self.names[module], type(module).__mro__[1]
        if not is_leaf(module):
            self.called.append(name)
            return type(module).forward(module, *args, **kwargs)
        if len(args) != 1 or kwargs or type(args[0]) is not _Value:
            raise Refused(f"{name} is called with something else than features", len(self.layers))
        if kind is nn.Identity:
            self.called.append(name)
            return args[0]
        if kind is nn.ReLU:
            return args[0].then("relu", name)
        if is_norm(module):
            return args[0].then("norm", name)
        if kind in CONVOLUTIONS:
            return args[0].then("conv", name)
        if kind in DROPOUTS:
            self.called.append(name)
            return args[0].then("dropout", name)
        if kind in AVERAGE_POOLS:
            return args[0].then("pool", name)
        raise Refused(f"{name} is a {kind.__name__}", len(self.layers))

    def refuse(self, what: str):
        raise Refused(f"its forward {what}", len(self.layers))


def _refusing(what: str) -> Callable:
    return lambda self, *args, **kwargs: self._record.refuse(what)


class _Value:
    """Stands for a tensor: features, by the numbers of the layers that gave them, and what was done with them."""

    __class__ = property(lambda self: Tensor)  # what ``isinstance`` asks
    requires_grad = False  # code that asks does so to choose another way, to the same numbers, of less memory

    def __init__(self, record: _Record, reads: tuple[int, ...], steps: tuple = ()):
        self._record, self._reads, self._steps = record, reads, steps
        self._number: int | None = None  # of the layer that it is the output of
        self._taken = False

    def then(self, kind: str, what: object) -> _Value:
        if self._taken or self._number is not None:
            self._record.refuse("does more with a layer's output than to concatenate it")
        self._taken = bool(self._steps)
        self._record.steps += 1
        return _Value(self._record, self._reads, (*self._steps, (kind, what)))

    def segments(self) -> tuple[int, ...]:
        """The layers whose outputs it holds; 0 is the block's input."""
        if not self._steps:
            return self._reads
        if self._taken:
            self._record.refuse("does more with a layer's output than to concatenate it")
        if self._number is None:
            self._record.layers.append(self)
            self._number = len(self._record.layers)
        return (self._number,)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", str(function))
        values = [v for v in (*args, *kwargs.values()) if type(v) is _Value]
        if function in _CONCATENATIONS:
            tensors = args[0] if args else kwargs["tensors"]
            dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
            record = next(v for v in tensors if type(v) is _Value)._record
            if not all(type(v) is _Value for v in tensors):
                record.refuse("concatenates something else than features")
            if dim != 1:
                record.refuse(f"concatenates along dimension {dim}")
            return _Value(record, tuple(segment for v in tensors for segment in v.segments()))
        if function in _RECTIFIERS and values == [args[0]]:
            return args[0].then("relu", None)
        if function in _DROPOUT_FUNCTIONS and args and values == [args[0]]:
            given = dict(zip(("p", "training", "inplace"), args[1:], strict=False)) | kwargs
            if not given.get("training", True) or given.get("p", 0.5) == 0:
                return args[0]
            return args[0].then("dropout", (float(given.get("p", 0.5)), _DROPOUT_FUNCTIONS[function]))
        if function in _POOLS and args and values == [args[0]]:
            if why := _why_not_halving(_POOLS[function], *args[1:], **kwargs):
                values[0]._record.refuse(why)
            return args[0].then("pool", None)
        record = values[0]._record if values else next(v for a in args for v in a if type(v) is _Value)._record
        return record.refuse(f"calls {name}")

    def relu(self):
        return self.then("relu", None)

    relu_ = relu
    __hash__ = object.__hash__
    __bool__ = __len__ = __iter__ = _refusing("decides by values")
    __getitem__ = _refusing("takes a part of its features")
    __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = _refusing("adds")
    __mul__ = __rmul__ = __imul__ = __truediv__ = _refusing("multiplies")
    __lt__ = __le__ = __gt__ = __ge__ = _refusing("compares values")

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        self._record.refuse(f"reads {name} of its features")


def _why_not_halving(
    dims: int, kernel_size=None, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None
) -> str:
    """Why an average pooling, a function of these arguments, is not the one that a dense block's transition has."""
    given = (kernel_size, stride or kernel_size, padding, ceil_mode, count_include_pad, divisor_override)
    wanted = (2, 2, 0, False, True, None)
    for value, want in zip(given, wanted, strict=True):
        if value != want and value not in ((want,) * dims, [want] * dims):
            return f"averages over {kernel_size} at a stride of {stride or kernel_size}"
    return ""


def _observe(unit: nn.Module) -> tuple[_Record, Any]:
    """What the module's forward does with its input, and what it returns."""

    def change(module: nn.Module) -> None:
        module.__dict__["_parameters"] = dict(module._parameters)
        module.__class__ = _bare(type(module), True)

    other = copied(unit, change)
    names = {module: name for name, module in other.named_modules()}
    record = _Record(other, names)
    for module in names:
        module.__dict__["_efficient_record"] = record
    with _unnoticed(), torch.no_grad():
        try:
            result = type(other).forward(other, _Value(record, (0,)))
        except Refused:
            raise
        except Exception as error:  # other people's code, on something that is no tensor
            why = f"its forward cannot be followed: {type(error).__name__}: {error}"
            raise Refused(why, len(record.layers)) from None
    return record, result


# --- Plans -----------------------------------------------------------------------------------------------------------


def _common(names: Sequence[str]) -> str:
    """The module in which all of these stand."""
    parts = [name.split(".")[:-1] for name in names]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared)


def _chain(
    steps: list[tuple[str, Any]], prefix: str, number: Callable[[str], int], unit: nn.Module, near: int
) -> tuple[int, int | None, int, bool]:
    """BN, ReLU, convolution at the beginning of what was done; they are taken from ``steps``."""
    norm = steps.pop(0)[1]
    inside, relu = rectifies(unit.get_submodule(norm)), None
    what = norm.rpartition(".")[2]
    if not inside:
        if not steps or steps[0][0] != "relu":
            raise Refused(f"{prefix}no ReLU behind {what}", near)
        relu = steps.pop(0)[1]
    if not steps or steps[0][0] != "conv":
        raise Refused(f"{prefix}no convolution behind {what}", near)
    return number(norm), None if relu is None else number(relu), number(steps.pop(0)[1]), inside


def _named(steps: Sequence[tuple[str, Any]]) -> tuple[str, str]:
    """The module in which all was done, and that as the beginning of a reason."""
    label = _common([what for _, what in steps if isinstance(what, str)])
    return label, f"{label}: " if label else ""


def _layer(value: _Value, number: Callable[[str], int], unit: nn.Module) -> LayerPlan:
    """A layer by what was done between reading features and giving new ones."""
    label, prefix = _named(value._steps)
    steps = list(value._steps)
    chains = []
    while steps and steps[0][0] == "norm" and len(chains) < 2:
        chains.append(_chain(steps, prefix, number, unit, value._number))
    if not chains:
        raise Refused(f"{prefix}it begins with a {steps[0][0]}", value._number)
    dropout, rate, kind = None, 0.0, 0
    if steps and steps[0][0] == "dropout":
        what = steps.pop(0)[1]
        if isinstance(what, str):
            dropout = number(what)
        else:
            rate, kind = what
    if steps:
        last = "dropout" if dropout or rate else "its last convolution"
        raise Refused(f"{prefix}a {steps[0][0]} behind {last}", value._number)
    norms, relus, convs, inside = zip(*chains, strict=True)
    return LayerPlan(label, norms, relus, convs, inside, dropout, rate, kind)


def _tail(value: _Value, number: Callable[[str], int], unit: nn.Module, near: int) -> TailPlan:
    """A transition by what was done with all features; the last of that was a pooling."""
    _, prefix = _named(value._steps)
    steps = list(value._steps)
    if steps[0][0] != "norm":
        raise Refused(f"{prefix}it begins with a {steps[0][0]}", near)
    norm, relu, conv, inside = _chain(steps, prefix, number, unit, near)
    if len(steps) > 1:
        raise Refused(f"{prefix}a {steps[0][0]} between convolution and pooling", near)
    pool = steps[0][1]
    return TailPlan(norm, relu, conv, None if pool is None else number(pool), inside)


def _plan(unit: nn.Module) -> UnitPlan:
    """What a module computes in the state it is in.

    Raises:
        Refused: it is no dense block.
    """
    record, result = _observe(unit)
    if type(result) is not _Value:
        raise Refused(f"it returns a {type(result).__name__}", len(record.layers))
    closed = bool(result._steps) and result._steps[-1][0] == "pool" and result._number is None
    out = result._reads if closed else result.segments()
    layers = record.layers
    if not layers and not closed:
        raise Refused("it computes nothing")
    orders = set()
    for i, value in enumerate(layers, 1):
        forward, backward = tuple(range(i)), tuple(reversed(range(i)))
        if value._reads not in (forward, backward):
            raise Refused(f"layer {i} reads the features {value._reads} and not all before it", i - 1)
        if i > 1:
            orders.add(value._reads == backward)
    everything = tuple(range(len(layers) + 1))
    new_only = 0 not in out
    if new_only and closed:
        raise Refused("its transition reads the new features only", len(layers))
    expected = everything[1:] if new_only else everything
    if out == expected:
        orders.add(False)
    elif out == tuple(reversed(expected)):
        orders.add(True)
    else:
        raise Refused(f"it returns the features {out}, not all, or all new ones, in order", len(layers))
    if len(out) > 1 and len(orders) > 1:
        raise Refused("its features are in another order from layer to layer", len(layers))
    if len(out) == 1 and not closed:  # one function of its input, and nothing is concatenated
        raise Refused("it concatenates nothing")
    if sum(len(value._steps) for value in (*layers, *[result][:closed])) != record.steps:
        raise Refused("it computes more than it returns", len(layers))

    numbers: dict[str, int] = {"": 0}
    modules: list[tuple[int, str]] = [(-1, "")]

    def number(name: str) -> int:
        if name not in numbers:
            parent, _, own = name.rpartition(".")
            above = number(parent)
            modules.append((above, own))
            numbers[name] = len(modules) - 1
        return numbers[name]

    plans = tuple(_layer(value, number, unit) for value in layers)
    tail = _tail(result, number, unit, len(layers)) if closed else None
    used = [i for plan in plans for i in (*plan.norms, *plan.convs, plan.dropout) if i is not None]
    used += [] if tail is None else [tail.norm, tail.conv]
    if len(used) != len(set(used)):
        raise Refused("one of its modules is called twice", len(layers))
    called = tuple(dict.fromkeys(number(name) for name in record.called if name))
    return UnitPlan(tuple(modules), called, plans, True in orders, new_only, tail)


def parts(unit: nn.Module, plan: UnitPlan) -> Found:
    """What a unit is made of in this forward, or why the block function cannot speak for it."""
    modules = [unit]
    try:
        for parent, name in plan.modules[1:]:
            modules.append(modules[parent]._modules[name])
    except KeyError:
        return Found(why=f"{name} is gone")
    layers: list[Parts] = []
    if why := next((f"{plan.modules[i][1]} has hooks" for i in plan.called if is_hooked(modules[i])), ""):
        return Found(why=why)
    for layer in plan.layers:
        rate, kind = layer.rate, layer.kind
        if layer.dropout is not None:
            dropout = modules[layer.dropout]
            if type(dropout) not in DROPOUTS:
                return Found(why=f"{layer.name}: dropout is a {type(dropout).__name__}")
            rate, kind = float(dropout.p) if dropout.training else 0.0, DROPOUTS[type(dropout)]
        chain: list[nn.Module | None] = []
        for norm, relu, conv in zip(layer.norms, layer.relus, layer.convs, strict=True):
            chain += (modules[norm], None if relu is None else modules[relu], modules[conv])
        taken = Parts(*chain, *(None,) * (6 - len(chain)), rate, kind > 0, True)
        why = why_not_fused(taken)
        for norm, inside in zip(taken.norms, layer.inside, strict=True):
            why = why or ("" if rectifies(norm) == inside else f"its norm is a {type(norm).__name__}")
        if not why and rate and kind and kind != len(taken.conv1.kernel_size):
            why = f"it drops channels of {kind} dimensions"
        if why:
            return Found(why=f"{layer.name}: {why}" if layer.name else why)
        layers.append(taken)
    groups = process_groups(layers)
    tail = None
    if plan.tail is not None:
        norm, relu, conv, pool, inside = plan.tail
        tail = Tail(*(None if i is None else modules[i] for i in (norm, relu, conv, pool)))
        why = why_no_tail(tail)
        if not why and rectifies(tail.norm) != inside:
            why = f"its norm is a {type(tail.norm).__name__}"
        if why:
            return Found(why=f"transition: {why}" if layers else why)
        groups = groups | NormCall.of(tail.norm).groups
    if len(groups) > 1:
        return Found(why="its norms take their statistics over different processes")
    return Found(layers, "", plan.new_first if layers else None, plan.new_only, tail)


def run_found(x: Tensor, found: Found, keep_conv1: bool, channels_last: bool | None = None) -> tuple[Tensor, bool]:
    """A unit's layers and tail as one function; see :func:`~..ops.runner.run_fused`."""
    return run_fused(x, found.layers, keep_conv1, channels_last, found.tail, bool(found.new_first), found.new_only)


# --- The self-check --------------------------------------------------------------------------------------------------


def _with_values(unit: nn.Module) -> nn.Module:
    """A copy with numbers of its own, in float64 on the CPU; the same every time."""
    # As many random numbers as are quickly drawn, over and over; of a prime number, so that no two channels are alike.
    noise = torch.randn(65521, dtype=torch.float64, device="cpu", generator=torch.Generator().manual_seed(0))

    def values(old: Tensor, name: str) -> Tensor:
        if not old.is_floating_point():
            return torch.zeros(old.shape, dtype=old.dtype, device="cpu")
        new = noise.repeat(-(-max(old.numel(), 1) // len(noise)))[: old.numel()].view(old.shape)
        return new.abs().add_(0.5) if name == "running_var" else new.mul(0.3)

    def change(module: nn.Module) -> None:
        for kind in ("_parameters", "_buffers"):
            module.__dict__[kind] = {
                name: old if old is None else values(old, name) for name, old in getattr(module, kind).items()
            }
        for name, value in module._parameters.items():
            if value is not None:
                module._parameters[name] = nn.Parameter(value)

    return copied(unit, change)


def _outcome(unit: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Output, gradients and buffers of one step."""
    x = x.clone().requires_grad_()
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        out = run(x)
    # As they are behind the forward pass: checkpointed layers move theirs again as they are computed again.
    buffers = [buffer.clone() for buffer in unit.buffers()]
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device="cpu").view(out.shape)
    out.backward(weights)
    gradients = (tensor.grad for tensor in (x, *unit.parameters()))
    return [out.detach(), *(torch.zeros(()) if g is None else g for g in gradients), *buffers]


def _check(unit: nn.Module, plan: UnitPlan) -> None:
    """Raises Refused where the module and the block function give different numbers."""
    plain, ours = _with_values(unit), _with_values(unit)
    found = parts(ours, plan)
    if found.why:
        raise Refused(found.why, len(plan.layers))
    norm, _, conv, *_ = found.layers[0] if found.layers else found.tail
    sides = (3 if found.tail is None else 5,) * len(conv.kernel_size)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2, norm.num_features, *sides, dtype=torch.float64, device="cpu", generator=draw)
    for module in list(plain.modules()):
        module.__class__ = _bare(type(module), False)
    calm = torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu")
    with contextlib.ExitStack() as stack, _unnoticed():
        for context in calm:
            stack.enter_context(context)
        try:
            expected = _outcome(plain, plain, x)
        except Exception as error:
            raise Refused(f"its forward fails: {type(error).__name__}: {error}", len(plan.layers)) from None
        actual = _outcome(ours, lambda x: run_found(x, found, keep_conv1=True)[0], x)
    for want, got in zip(expected, actual, strict=True):
        if want.shape != got.shape or not torch.allclose(want, got, rtol=1e-8, atol=1e-8 * float(want.abs().max() + 1)):
            raise Refused("computed on a small input, it gives other numbers than a dense block", len(plan.layers))


def recognise(unit: nn.Module) -> UnitPlan:
    """What a module computes, in the state that its flags and numbers are in.

    Raises:
        Refused: it is no dense block that the block function can compute.
    """
    plan = _plan(unit)
    _check(unit, plan)
    return plan
