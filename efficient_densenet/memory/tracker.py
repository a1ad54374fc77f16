"""What runs on a device, seen from outside: every storage from its birth to its death, every operator's launches."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..ops.costs import COSTS, IMPLEMENTATIONS, Cost, nbytes
from .rules import by_rule

# Operators that launch nothing, besides views (which their schema tells).
_FREE = {
    "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided",
    "aten::set_", "aten::resize_", "aten::lift_fresh", "aten::lift", "aten::_unsafe_view", "aten::record_stream",
    "aten::is_same_size", "aten::promote_types", "aten::result_type", "aten::sym_size", "aten::sym_stride",
    "aten::sym_numel", "aten::sym_storage_offset", "aten::size", "aten::stride", "prim::device",
}  # fmt: skip
# Operators that write their first argument without reading it.
_OVERWRITES = {"aten::copy_", "aten::zero_", "aten::fill_", "aten::normal_", "aten::uniform_", "aten::bernoulli_"}
# BatchNorm goes over what it reads twice: for the statistics (or the sums of its gradient), then to normalise. cuDNN's
# kernel does both in one launch.
_TWO_READS = {
    "aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::_batch_norm_with_update",
    "aten::native_batch_norm_backward", "aten::cudnn_batch_norm_backward", "aten::batch_norm_backward",
}  # fmt: skip
_TWO_LAUNCHES = {"aten::native_batch_norm", "aten::native_batch_norm_backward"}
# Tensors that one launch of a _foreach operator takes, by how many lists it goes over (ATen's multi_tensor_apply).
_FOREACH_TENSORS = (110, 64, 48, 36, 30)
# Operators whose result, or its size, is a number the host has to wait for.
_ASKS = {
    "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero", "aten::masked_select",
    "aten::unique_dim", "aten::_unique", "aten::_unique2", "aten::unique_consecutive",
}  # fmt: skip
_COPIES = {"aten::_to_copy", "aten::copy_"}


@dataclass
class Traffic:
    """What some calls of operators cost the device.

    Attributes:
        calls: of operators that launch something.
        launches: kernels, and copies and fills, which are kernels too.
        read_bytes: of the elements of every argument that is read, once per call (BatchNorm's twice).
        written_bytes: of the elements of everything that is written.
        loaded_bytes: what the kernels' loads ask for, where an operator of this package says so; else ``read_bytes``.
        host_waits: calls after which the host cannot go on before the device is done: copies between the two, and
            numbers or sizes the host asks for.
    """

    calls: int = 0
    launches: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    loaded_bytes: int = 0
    host_waits: int = 0

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass
class Life:
    """Of one storage.

    Attributes:
        part: what it counts as.
        phase: in which it was born.
        size: its bytes.
        born, died: events before and at which it was there, counted from 1; 0 for what was there before.
    """

    part: str
    phase: str
    size: int
    born: int
    died: float = math.inf


@dataclass(frozen=True)
class Moment:
    """The worst moment: the bytes that were there, by part, and the phase it fell into."""

    bytes: int
    parts: dict[str, int]
    phase: str


class Tracker(TorchDispatchMode):
    """A dispatch mode that follows all storages and operators on one type of device while it is active.

    Tensors may be real or fake. A storage is born when an operator returns it, and dies when its last tensor does; what
    operators take inside and give back (workspaces, the temporaries of composite kernels) is not seen. Storages that
    were there before are adopted, explicitly or when an operator first reads them, and stay for good.

    Numbers that an operator asks of a tensor without data do not exist; the answer is 1, or False.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``.
        granularity: sizes of storages are rounded up to multiples of so many bytes.

    Attributes:
        phase: what is going on, a word of the caller's, by which operators and new storages are booked.
        operators: :class:`Traffic` by phase and operator.
        lives: of all storages, from the first to the last, those with a size.
        live_bytes, before_bytes: of all storages now, and of adopted ones.

    Example:
        >>> with Tracker("cpu") as tracker:
        ...     y = torch.ones(1000).relu()
        >>> tracker.total().launches, tracker.peak_bytes, tracker.live_bytes
        (2, 8000, 4000)
    """

    def __init__(self, device_type: str, granularity: int = 1):
        super().__init__()
        self.device_type = device_type
        self.granularity = granularity
        self.phase = "forward"
        self.operators: dict[tuple[str, str], Traffic] = {}
        self.lives: list[Life] = []
        self.live_bytes = self.before_bytes = 0
        self._events = 0
        self._storages: dict[int, tuple[Any, Life]] = {}

    # Storages

    @property
    def peak_bytes(self) -> int:
        """The most that was there at one moment."""
        return self.worst().bytes

    def worst(self) -> Moment:
        """The moment at which the most was there, the first of them."""
        changes: Counter[int] = Counter()
        for life in self.lives:
            changes[life.born] += life.size
            changes[life.died] -= life.size
        most = live = at = 0
        for event in sorted(changes):
            live += changes[event]
            if live > most:
                most, at = live, event
        there = [life for life in self.lives if life.born <= at < life.died]
        parts: Counter[str] = Counter()
        for life in there:
            parts[life.part] += life.size
        return Moment(most, dict(parts), max(there, key=lambda life: life.born).phase if there else self.phase)

    def adopt(self, tensors: Iterable[Tensor | None], part: str = "before") -> None:
        """Storages that were there before: counted in the peak, as a part of their own, and never given back."""
        for tensor in tensors:
            if tensor is None or tensor.device.type != self.device_type:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in self._storages:
                continue
            # The storage itself instead of a weak reference: its address must not be given to another.
            life = self._new_life(part, storage.nbytes(), born=0)
            self._storages[storage._cdata] = storage, life
            self.before_bytes += life.size

    def move(self, part: str, to: str) -> None:
        """What is alive of one part counts as another, from its birth on: what the forward pass leaves, as kept."""
        for _, life in self._storages.values():
            if life.part == part:
                life.part = to

    def mark(self, tensors: Iterable[Tensor | None], part: str, from_the_start: bool = False) -> None:
        """Tensors that are alive count as a part of their own; ``from_the_start``: as if they had always been there."""
        for tensor in tensors:
            if tensor is not None and (known := self._storages.get(tensor.untyped_storage()._cdata)):
                known[1].part = part
                if from_the_start:
                    known[1].born = 0

    def _new_life(self, part: str, size: int, born: int) -> Life:
        life = Life(part, self.phase, self._rounded(size), born)
        if size:
            self.lives.append(life)
            self.live_bytes += life.size
        return life

    def _rounded(self, size: int) -> int:
        return -(-size // self.granularity) * self.granularity

    def _event(self) -> int:
        self._events += 1
        return self._events

    def _end(self, life: Life) -> None:
        life.died = self._event()
        self.live_bytes -= life.size

    def _see(self, tensor: Tensor) -> None:
        """A storage is born, or has another size than before."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._storages.get(key)
        if known is None:
            reference = weakref.ref(storage, lambda _: self._end(self._storages.pop(key)[1]))
            self._storages[key] = reference, self._new_life(self.phase, size, self._event())
        elif self._rounded(size) != known[1].size:  # a storage that grows is a new one beside the old
            reference, life = known
            self._storages[key] = reference, self._new_life(life.part, size, self._event())
            self._end(life)

    # Operators

    def total(self, phase: str | None = None) -> Traffic:
        """Of all operators, or of those of one phase."""
        wanted = [traffic for (of, _), traffic in self.operators.items() if phase in (None, of)]
        return sum(wanted, Traffic())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        if name in IMPLEMENTATIONS:
            with self:
                return IMPLEMENTATIONS[name](*args, **kwargs)
        before = _tensors((args, kwargs))
        if not name.startswith("aten::lift"):  # what is lifted was born inside torch.tensor
            self.adopt(before)
        try:
            result = by_rule(func, args, kwargs)
            if result is None:
                result = func(*args, **kwargs)
        except RuntimeError:
            if name != "aten::_local_scalar_dense":
                raise
            dtype = args[0].dtype
            result = False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        after = _tensors(result)
        for tensor in after:
            if tensor.device.type == self.device_type:
                self._see(tensor)
        if self.device_type == "cpu" and (inside := _columns(name, args)):
            self._end(self._new_life(self.phase, inside, self._event()))
        if not (func.is_view or name in _FREE):
            self._book(func, args, kwargs, before, after)
        return result

    def _book(self, func, args: tuple, kwargs: dict[str, Any], before: list[Tensor], after: list[Tensor]) -> None:
        name = func._schema.name
        devices = {tensor.device.type for tensor in (*before, *after)}
        if self.device_type not in devices:
            return
        read, written = _by_schema(func._schema, args, kwargs, after)
        cost = COSTS[name](*args, **kwargs) if name in COSTS else Cost(_launches(name, args, read or written))
        read = read if cost.read is None else cost.read
        self.operators[self.phase, name] = self.operators.get((self.phase, name), Traffic()) + Traffic(
            calls=1,
            launches=cost.launches,
            read_bytes=read,
            written_bytes=written if cost.written is None else cost.written,
            loaded_bytes=read if cost.loaded is None else cost.loaded,
            host_waits=self._waits(name, args, kwargs, devices),
        )

    def _waits(self, name: str, args: tuple, kwargs: dict[str, Any], devices: set[str]) -> int:
        if self.device_type == "cpu":
            return 0
        if name in _COPIES and len(devices) > 1:
            # Asked for as such, the copy is queued like a kernel.
            return int(not (kwargs.get("non_blocking") or name == "aten::copy_" and len(args) > 2 and args[2]))
        return int(name in _ASKS)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _columns(name: str, args: tuple) -> int:
    """Bytes of the unfolded input that torch's own convolutions on the CPU work in.

    They run where oneDNN does not: in float64, for a single volume, for small images with one thread.
    """
    if name == "aten::convolution":
        x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
    elif name == "aten::convolution_backward":
        _, x, weight, _, stride, padding, dilation, transposed, output_padding, groups, _ = args
        bias = None
    else:
        return 0
    kernel = weight.shape[2:].numel()
    select = getattr(torch._C, "_select_conv_backend", None)
    if kernel == 1 or select is None:
        return 0
    backend = select(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    if getattr(backend, "name", "") not in ("Slow2d", "Slow3d"):
        return 0
    pixels = 1
    for size, taps, step, pad in zip(x.shape[2:], weight.shape[2:], stride, padding, strict=True):
        pixels *= (size + 2 * pad - taps) // step + 1
    return len(x) * pixels * weight.shape[1] * kernel * x.element_size()


def _launches(name: str, args: tuple, touched: int) -> int:
    """Kernels of one call of torch's own operator, from ATen's sources; what touches no bytes launches none."""
    if not touched:
        return 0
    if name == "aten::convolution_backward":
        return sum(args[-1])  # the gradients that are asked for: of the input, the weight, the bias
    if name.startswith("aten::_foreach_"):
        lists = sum(isinstance(arg, (list, tuple)) and isinstance(arg[0], Tensor) for arg in args)
        lists += not name.endswith("_")  # that of the results
        return -(-len(args[0]) // _FOREACH_TENSORS[min(lists, len(_FOREACH_TENSORS)) - 1])
    return 2 if name in _TWO_LAUNCHES else 1


def _by_schema(schema, args: tuple, kwargs: dict[str, Any], results: list[Tensor]) -> tuple[int, int]:
    """Bytes that a call reads and writes: its arguments by the schema's marks, and results that are new."""
    read = written = 0
    for i, argument in enumerate(schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        reads = not (writes and (argument.kwarg_only and argument.is_out or schema.name in _OVERWRITES))
        for tensor in _tensors(value):
            size = nbytes(tensor)
            written += size if writes else 0
            read += size if reads else 0
            if schema.name in _TWO_READS and tensor.dim() > 1:
                read += size
    if all(returned.alias_info is None for returned in schema.returns):
        written += sum(map(nbytes, results))
    return read, written
