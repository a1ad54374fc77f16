"""Kernels prove themselves: on first use on a device, each on a small odd case against the plain path.

A kernel that disagrees, or does not compile, is left alone from then on: one warning, and the plain path's numbers.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..conv3x3 import as_images
from ..device import is_assumed
from ..tiles import Scratch
from . import reference
from .launch import Failed, precision
from .vectors import Correction, FoldedNorm, Need, Partial, Rebuild, merge, wide_type

# Relative to the largest value of what is compared.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
TF32_TOLERANCE = 5e-3

_verdicts: dict[tuple[str, torch.device, torch.dtype, str], str | None] = {}


def holds(name: str, passes, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels of a pass give the right numbers here; found out when first asked."""
    if is_assumed(device):
        return True
    key = name, device, dtype, precision(dtype)
    if key not in _verdicts:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # nothing can be tried now
        _verdicts[key] = None  # while it is being tried
        if name in CASES:
            fault = _try(name, passes, device, dtype)
            if fault is not None:
                fails(name, device, dtype, fault)
    return _verdicts[key] is None


def fails(name: str, device: torch.device, dtype: torch.dtype, reason: object) -> None:
    """Note that a pass's kernels are not to be used here, and say so."""
    _verdicts[name, device, dtype, precision(dtype)] = str(reason)
    warnings.warn(
        f"the kernels of {name} are not used for {dtype} on {device}, but torch's operations: {reason}", stacklevel=3
    )


def verdicts(device: torch.device) -> dict[tuple[str, torch.dtype], str | None]:
    """What has been found out so far on a device: for each pass and type, ``None`` or what was wrong."""
    return {(name, dtype): verdict for (name, on, dtype, _), verdict in _verdicts.items() if on == device}


def _try(name: str, passes, device: torch.device, dtype: torch.dtype) -> str | None:
    with _undisturbed(device):
        try:
            return disagreement(name, passes, dtype, device, ODD)
        except Failed as failure:
            return str(failure)


@contextlib.contextmanager
def _undisturbed(device: torch.device):
    """No gradients, no autocast, no mode that counts or fakes what is done inside."""
    disable = getattr(torch.utils._python_dispatch, "_disable_current_modes", contextlib.nullcontext)
    with disable(), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@dataclass(frozen=True)
class Shape:
    """A case: ``n`` images, ``channels`` read of a matrix ``pad`` columns wider, ``k`` written at ``at``."""

    n: int = 2
    sizes: tuple[int, ...] = (5, 7)
    channels: int = 19
    width: int = 12  # of the 1x1 convolution
    k: int = 3
    taps: tuple[int, ...] = (3, 3)
    pad: int = 13
    first: int = 0
    bias: bool = False
    dropout: bool = False
    batch: bool = True
    channels_last: bool = False
    pool: tuple[int, ...] = (2, 2)
    stem: tuple[tuple[int, ...], ...] = ((3, 3), (2, 2), (1, 1), (1, 1))  # kernel, stride, padding, dilation
    ceil_mode: bool = False

    @property
    def rows(self) -> int:
        return self.n * self.image

    @property
    def image(self) -> int:
        return functools.reduce(lambda a, b: a * b, self.sizes)


ODD = Shape()


class _Values:
    """Draws of a case's tensors, the same for one seed in every type; what surrounds a view is NaN.

    Args:
        dtype: what the numbers are rounded to; and, unless ``exact``, the features' type.
        exact: whether the numbers are given in float64.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, exact: bool):
        self.dtype, self.device, self.exact = dtype, device, exact
        self._random = torch.Generator().manual_seed(0)

    def _draw(self, shape: tuple[int, ...], rounded: torch.dtype) -> Tensor:
        values = torch.randn(shape, generator=self._random, dtype=torch.float64).to(rounded)
        return (values.double() if self.exact else values).to(self.device)

    def vector(self, size: int, low: float | None = None) -> Tensor:
        values = self._draw((size,), wide_type(self.dtype))
        return values if low is None else values.abs_().add_(low)

    def matrix(self, rows: int, columns: int, pad: int = 0, at: int = 0) -> Tensor:
        """The columns from ``at`` on of a matrix ``pad`` columns wider, which is the view's ``_base``."""
        wide = self._draw((rows, columns + pad), self.dtype)
        wide[:, :at] = wide[:, at + columns :] = float("nan")
        return wide[:, at : at + columns]

    def parameter(self, *shape: int, channels_last: bool = False) -> Tensor:
        values = self._draw(shape, self.dtype)
        return values.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else values

    def norm(self, size: int, batch: bool = True) -> FoldedNorm:
        gamma, beta, mean, r = self.vector(size), self.vector(size), self.vector(size), self.vector(size, 0.5)
        if not self.exact:
            scale, shift = gamma * r, beta - mean * (gamma * r)
        else:  # as the kernel is given them
            g, b, m, w = (t.to(wide_type(self.dtype)) for t in (gamma, beta, mean, r))
            scale, shift = (g * w).double(), (b - m * (g * w)).double()
        return FoldedNorm(mean, r, scale, shift, gamma, beta, batch)

    def correction(self, size: int) -> Correction:
        return Correction(0.1 * self.vector(size), 0.1 * self.vector(size), self.vector(size))

    def factor(self, shape: Shape) -> Tensor | None:
        if not shape.dropout:
            return None
        return self._draw((shape.n, shape.k, shape.image), self.dtype).gt(0).to(self.draw_type()).mul_(2).mT

    def draw_type(self) -> torch.dtype:
        return torch.float64 if self.exact else self.dtype


CASES: dict[str, Callable] = {}


def _case(function: Callable) -> Callable:
    CASES[function.__name__] = function
    return function


def disagreement(name: str, passes, dtype: torch.dtype, device: torch.device, shape: Shape) -> str | None:
    """What is wrong with a pass, if anything: every result against the reference in float64 on the same numbers."""
    tf32 = precision(dtype) == "tf32" and device.type == "cuda"
    tolerance = TF32_TOLERANCE if tf32 else TOLERANCES[dtype]
    found = CASES[name](passes, _Values(dtype, device, False), Scratch(device), shape)
    wanted = CASES[name](reference, _Values(dtype, device, True), Scratch(device), shape)
    for key, want in wanted.items():
        got = found[key]
        if got.shape != want.shape or not torch.equal(got.isnan(), want.isnan()):
            return f"{key} has another shape, or is not a number elsewhere"
        want = want.nan_to_num(0.0)
        error = (got.double().nan_to_num(0.0) - want).abs().max().item()
        size = max(want.abs().max().item(), 1e-3)
        if not error <= tolerance * size:
            return f"{key} differs by {error / size:.1e} of its size, allowed {tolerance:.0e}"
    return None


def _whole(view: Tensor) -> Tensor:
    """The matrix a view is columns of: what lies beside them has to stay as it was."""
    return view if view._base is None else view._base


def _statistics(new, stored: Tensor) -> Tensor:
    if new is not None:
        merge(new, stored[0], stored[1])
    return stored


def _space(v: _Values, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64 if v.exact else wide_type(v.dtype), device=v.device)


@_case
def statistics(passes, v, scratch, s):
    x, stored = v.matrix(s.rows, s.channels, s.pad), _space(v, 2, s.channels)
    return {"statistics": _statistics(passes.statistics(x, stored, scratch), stored)}


@_case
def fold(passes, v, scratch, s):
    mean, var = v.vector(s.channels), v.vector(s.channels, 0.1)
    gamma, beta = (v.parameter(s.channels) for _ in range(2))
    rows, k = 16, s.k
    parts = -(-s.rows // rows)
    values = torch.stack((v.vector(parts * k).view(parts, k), v.vector(parts * k, 0.1).view(parts, k)), 1)
    norm = passes.fold(
        mean, var, gamma, beta, 1e-5, s.batch, Partial(values, rows, s.rows), s.channels - k, scratch
    )
    other = passes.fold(mean, var, None, None, 1e-3, not s.batch, None, 0, scratch)
    return {
        f"{name} {i}": getattr(n, name) for i, n in enumerate((norm, other)) for name in ("mean", "r", "scale", "shift")
    } | {"mean": mean, "var": var}


@_case
def conv1x1_forward(passes, v, scratch, s):
    x, norm = v.matrix(s.rows, s.channels, s.pad), v.norm(s.channels)
    weight = v.parameter(s.width, s.channels, *(1 for _ in s.taps))
    bias = v.parameter(s.width) if s.bias else None
    out, stored = v.matrix(s.rows, s.width), _space(v, 2, s.width)
    new = passes.conv1x1_forward(x, norm, weight, bias, out, stored, scratch)
    return {"out": out, "statistics": _statistics(new, stored)}


@_case
def conv3x3_forward(passes, v, scratch, s):
    x, norm = v.matrix(s.rows, s.width, 1 if s.bias else 0), v.norm(s.width)
    weight = v.parameter(s.k, s.width, *s.taps, channels_last=s.channels_last)
    bias = v.parameter(s.k) if s.bias else None
    out, stored = v.matrix(s.rows, s.k, s.channels + s.pad, s.channels), _space(v, 2, s.k)
    new = passes.conv3x3_forward(x, norm, weight, bias, v.factor(s), s.sizes, out, stored, scratch)
    return {"out": _whole(out), "statistics": _statistics(new, stored)}


def _finished(passes, pending, norm, weight, v, scratch, channels, count, rebuild=None) -> dict[str, Tensor]:
    correction = _space(v, 2, channels)
    found = passes.finish_backward(
        pending, norm, weight, count, correction if norm.batch else None, scratch, rebuild
    )
    return {"correction": correction} | {
        f"d{name}": value for name, value in found._asdict().items() if value is not None
    }


def _backward_3x3(passes, v, scratch, s, add: bool) -> dict[str, Tensor]:
    channels = s.channels if add else s.width
    x, norm = v.matrix(s.rows, channels, s.pad if add else 0), v.norm(channels, s.batch)
    weight = v.parameter(s.k, channels, *s.taps, channels_last=s.channels_last)
    y, grad = (v.matrix(s.rows, s.k, s.channels + s.pad, s.channels) for _ in range(2))
    out = v.matrix(s.rows, channels - s.first, s.pad) if add else v.matrix(s.rows, channels)
    need = Need(True, True, s.bias)
    pending = passes.conv3x3_backward(
        x, norm, weight, y, grad, v.correction(s.k) if s.batch else None, v.factor(s), s.sizes, out,
        s.first if add else None, need, scratch,
    )  # fmt: skip
    return {"out": _whole(out)} | _finished(passes, pending, norm, weight, v, scratch, channels, s.rows)


@_case
def conv3x3_backward(passes, v, scratch, s):
    alone = _backward_3x3(passes, v, scratch, s, False)
    added = _backward_3x3(passes, v, scratch, s, True)
    return alone | {f"added {name}": value for name, value in added.items()}


@_case
def conv1x1_backward(passes, v, scratch, s):
    x, norm = v.matrix(s.rows, s.channels, s.pad), v.norm(s.channels, s.batch)
    weight = v.parameter(s.width, s.channels, *(1 for _ in s.taps))
    b, dz2, norm2 = v.matrix(s.rows, s.width), v.matrix(s.rows, s.width), v.norm(s.width)
    g = v.matrix(s.rows, s.channels - s.first, s.pad)
    pending = passes.conv1x1_backward(
        x, norm, weight, b, dz2, norm2, v.correction(s.width) if s.batch else None, g, s.first,
        Need(True, True, s.bias), scratch,
    )  # fmt: skip
    again = Rebuild(x[:, : s.k], v.norm(s.k), v.parameter(s.width, s.k, *(1 for _ in s.taps)), None, b)
    found = _finished(passes, pending, norm, weight, v, scratch, s.channels, s.rows, again)
    return {"g": _whole(g), "b": b} | found


@_case
def correct(passes, v, scratch, s):
    x, g = v.matrix(s.rows, s.k, s.pad + 4, 4), v.matrix(s.rows, s.k, s.pad)
    out, plain = v.matrix(s.rows, s.k), v.matrix(s.rows, s.k)
    passes.correct(x, g, None, v.correction(s.k), out, scratch)
    passes.correct(x, g, v.vector(s.k), None, plain, scratch)
    return {"out": out, "scaled": plain}


@_case
def norm_relu(passes, v, scratch, s):
    x, out = v.matrix(s.rows, s.channels, s.pad), v.matrix(s.rows, s.channels)
    passes.norm_relu(x, v.norm(s.channels), out, scratch)
    return {"out": out}


@_case
def norm_relu_backward(passes, v, scratch, s):
    x, norm = v.matrix(s.rows, s.channels, s.pad), v.norm(s.channels, s.batch)
    grad = v.matrix(s.n, s.channels).view(s.n, 1, s.channels).expand(-1, s.image, -1)
    rows = v.matrix(s.rows, s.channels).view(s.n, s.image, s.channels)
    dz, g = v.matrix(s.rows, s.channels), v.matrix(s.rows, s.channels - s.first)
    pending = passes.norm_relu_backward(x, norm, grad, dz, None, Need(True), scratch)
    found = _finished(passes, pending, norm, None, v, scratch, s.channels, s.rows)
    pending = passes.norm_relu_backward(x, norm, rows, g, s.first, Need(True), scratch)
    again = _finished(passes, pending, norm, None, v, scratch, s.channels, s.rows)
    return {"dz": dz, "g": g} | found | {f"of rows {name}": value for name, value in again.items()}


def _pooled_image(s: Shape) -> int:
    return functools.reduce(lambda a, b: a * b, (a // b for a, b in zip(s.sizes, s.pool, strict=True)))


@_case
def transition_forward(passes, v, scratch, s):
    x, norm = v.matrix(s.rows, s.channels, s.pad), v.norm(s.channels)
    weight = v.parameter(s.k, s.channels, *(1 for _ in s.taps))
    out = v.matrix(s.n * _pooled_image(s), s.k)
    passes.transition_forward(x, norm, weight, v.parameter(s.k) if s.bias else None, s.pool, s.sizes, out, scratch)
    return {"out": out}


@_case
def transition_backward(passes, v, scratch, s):
    x, norm = v.matrix(s.rows, s.channels, s.pad), v.norm(s.channels, s.batch)
    weight = v.parameter(s.k, s.channels, *(1 for _ in s.taps))
    grad = v.matrix(s.n * _pooled_image(s), s.k).view(s.n, -1, s.k)
    out = v.matrix(s.rows, s.channels - s.first, s.pad)
    need = Need(True, True, s.bias)
    pending = passes.transition_backward(x, norm, weight, grad, s.pool, s.sizes, out, s.first, need, scratch)
    return {"out": _whole(out)} | _finished(passes, pending, norm, weight, v, scratch, s.channels, s.rows)


def _max_pooled(s: Shape) -> tuple[int, ...]:
    """The sizes that the stem's pooling leaves."""
    image = torch.empty((1, 1, *s.sizes), device="meta")
    pool = F.max_pool2d if len(s.sizes) == 2 else F.max_pool3d
    return tuple(pool(image, *s.stem, s.ceil_mode).shape[2:])


def _whole_numbers(x: Tensor, norm: FoldedNorm) -> None:
    """Values of which the largest is the same one in every type."""
    x.mul_(8).round_()
    norm.r.fill_(1)
    norm.scale.copy_(norm.gamma.sign_())
    norm.shift.copy_(norm.beta.round_() - norm.mean.round_() * norm.scale)


@_case
def norm_relu_max_pool(passes, v, scratch, s):
    x, norm = v.matrix(s.rows, s.channels, s.pad), v.norm(s.channels)
    _whole_numbers(x, norm)
    out = v.matrix(s.n * math.prod(pooled := _max_pooled(s)), s.channels)
    passes.norm_relu_max_pool(x, norm, (*s.stem, s.ceil_mode), s.sizes, as_images(out, pooled), scratch)
    return {"out": out}


@_case
def norm_relu_max_pool_backward(passes, v, scratch, s):
    x, norm = v.matrix(s.rows, s.channels, s.pad), v.norm(s.channels, s.batch)
    _whole_numbers(x, norm)
    grad = v.matrix(s.n * math.prod(pooled := _max_pooled(s)), s.channels)
    dz = v.matrix(s.rows, s.channels)
    pending = passes.norm_relu_max_pool_backward(
        x, norm, (*s.stem, s.ceil_mode), s.sizes, as_images(grad, pooled), dz, Need(True), scratch
    )
    return {"dz": dz} | _finished(passes, pending, norm, None, v, scratch, s.channels, s.rows)
