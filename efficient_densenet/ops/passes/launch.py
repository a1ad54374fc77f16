"""Launching the Triton kernels: as operators that a dispatch mode sees, in configurations chosen from a table.

Importing this imports no Triton; the first launch on a device does. Every operator of the namespace
``efficient_densenet`` is one launch of the kernel of that name in :mod:`.triton_kernels`, whose docstring says what it
computes. Outputs and partial sums are arguments, made by the caller. Without a dispatch mode (that counts, say, or
makes fake tensors) the dispatcher's microseconds are saved.

A configuration depends on shapes, types and the device alone, never on a stopwatch: it decides in which order sums add
up.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..costs import Cost, cost_of, nbytes
from ..device import describe, is_assumed
from ..overrides import is_fake
from .vectors import wide_type

VARIABLE = "EFFICIENT_DENSENET_KERNELS"  # "0": no kernels; "interpret": on CPU tensors, in Triton's interpreter
_library = torch.library.Library("efficient_densenet", "FRAGMENT")


def interpreted() -> bool:
    return os.environ.get(VARIABLE) == "interpret"


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels are not for features of this type on this device; ``None`` where they are."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted == "0":
        return f"{VARIABLE}=0"
    if wanted == "interpret":
        return None if device.type == "cpu" else f"{VARIABLE}=interpret is for CPU tensors"
    if device.type != "cuda":
        return "the kernels are for CUDA"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"there are no kernels for {dtype}"
    if torch.version.hip and wanted != "1":
        return f"the kernels have not run on AMD's devices ({VARIABLE}=1 tries)"
    capability = describe(device).capability or (0, 0)
    if capability < (8, 0):
        return f"the kernels need compute capability 8.0, not {capability[0]}.{capability[1]}"
    if not (is_assumed(device) or _has_triton()):
        return "Triton is not installed"
    return None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def kernels():
    """The module of the kernels, which imports Triton.

    Raises:
        RuntimeError: they are to be interpreted, but Triton was imported before it could be told so.
    """
    if interpreted():
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError(
                f"{VARIABLE}=interpret needs a process in which Triton has not been imported yet, or "
                "TRITON_INTERPRET=1 from its start"
            )
        os.environ["TRITON_INTERPRET"] = "1"
    from . import triton_kernels

    return triton_kernels


class Launch(NamedTuple):
    """One launch: what is to be compiled, and with what it is called."""

    kernel: str
    programs: int
    arguments: tuple[Tensor | int | None, ...]  # the kernel's first parameters, in order
    constants: dict[str, Any]  # the others
    warps: int
    stages: int
    loaded: int  # bytes its loads ask for


class Failed(RuntimeError):
    """A kernel could not be compiled or launched; nothing was written."""


def run(launch: Launch) -> None:
    module = kernels()
    constants = dict(launch.constants)
    if "ACC" in constants:
        constants["ACC"] = module.tl.float64 if constants["ACC"] == torch.float64 else module.tl.float32
    kernel = getattr(module, launch.kernel)[(launch.programs,)]
    if interpreted():
        kernel(*launch.arguments, **constants)
        return
    device = next(a.device for a in launch.arguments if a is not None and not isinstance(a, int))
    try:
        with torch.cuda.device(device):  # Triton launches on the current one
            kernel(*launch.arguments, **constants, num_warps=launch.warps, num_stages=launch.stages)
    except Exception as error:  # of Triton, its compiler, the assembler
        raise Failed(f"{launch.kernel}: {type(error).__name__}: {error}") from error


def operator(schema: str, *fresh: str, **unless: str) -> Callable:
    """Define an operator ``schema`` that is the decorated function's launch; the result calls it.

    Args:
        schema: without the return, which there is none of.
        fresh: the arguments that are written without being read.
        unless: others that are not read, by what they are not read without: ``x="slope"``.
    """

    def define(plan: Callable[..., Launch]) -> Callable[..., None]:
        name = schema.partition("(")[0]
        _library.define(f"{schema} -> ()")
        names = tuple(inspect.signature(plan).parameters)

        @cost_of(f"efficient_densenet::{name}")
        def _(*args) -> Cost:
            given = dict(zip(names, args, strict=True))
            unread = {*fresh, *(x for x, needed in unless.items() if given[needed] is None or given[needed] is False)}
            read = sum(nbytes(t) for x, t in given.items() if isinstance(t, Tensor) and x not in unread)
            return Cost(read=read, loaded=plan(*args).loaded)

        def launch(*args) -> None:
            run(plan(*args))

        for key in ("CPU", "CUDA"):
            _library.impl(name, launch, key)
        torch.library.register_fake(f"efficient_densenet::{name}", lambda *args: None, lib=_library)
        through = getattr(torch.ops.efficient_densenet, name)

        @functools.wraps(plan)
        def call(*args) -> None:
            first = next(a for a in args if a is not None)
            if type(first) in (Tensor, torch.nn.Parameter) and not torch._C._len_torch_dispatch_stack():
                launch(*args)
            else:
                through(*args)

        call.plan = plan
        return call

    return define


# Configurations


class Tile(NamedTuple):
    """Rows and columns of what a program computes, and how much of what is summed over it takes at a time.

    Of kernels that sum over rows: ``resident`` programs share a multiprocessor, few where each holds many registers, as
    their partial sums are memory to go through.
    """

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    resident: int = 2


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least that is not smaller."""
    return 1 << (n - 1).bit_length()


def precision(dtype: torch.dtype) -> str:
    """How products of this type are taken: float32 in TF32 where torch's convolutions may."""
    if dtype != torch.float32:
        return "ieee"  # of no meaning
    try:
        return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
    except RuntimeError:  # set by the newer names, convolutions apart from recurrent layers
        return "tf32" if torch.backends.cudnn.conv.fp32_precision == "tf32" else "ieee"


def tile(kernel: str, dtype: torch.dtype, columns: int, inner: int, device: torch.device) -> Tile:
    """The configuration of a kernel.

    Args:
        kernel: its name, or what it is called for.
        dtype: of the features.
        columns: of what it computes.
        inner: what it sums over: of ``product_gradient``, which has all of it at once, its size.
        device: where.
    """
    if interpreted():
        if kernel == "product_gradient":
            return Tile(32, 32, power_of_two(max(inner, 16)), 4, 1)
        return Tile(64 if "conv" in kernel else 32, 32, 32, 4, 1)
    return _tile(kernel, dtype.itemsize, precision(dtype), columns, inner, describe(device).capability)


@functools.cache
def _tile(kernel: str, itemsize: int, precision: str, columns: int, inner: int, capability) -> Tile:
    """Of all tried by compiling for sm_80, 90 and 100, the largest without spills and with room for a second stage."""
    half, exact = itemsize == 2, itemsize == 4 and precision == "ieee"  # exact: no tensor cores
    narrow = min(max(power_of_two(columns), 16), 64)
    if kernel == "norm_relu_product":
        if exact:
            return Tile(64, 32, 16, 4, 2)
        wide = 128 if cdiv(columns, 128) * 128 <= cdiv(columns, 64) * 64 else 64
        return Tile(128, wide, 32, wide // 16, 3 if half or wide == 64 else 2)
    if kernel == "pooled product":
        return Tile(32, 32, 16, 4, 2) if exact else Tile(64, 64, 32, 8, 2)
    if kernel == "norm_relu_conv":
        if exact:
            return Tile(64, narrow, 16, 4, 2)
        return Tile(128, narrow, 64 if half else 32, 4, 3)
    if kernel == "conv_input_gradient":
        return Tile(64, 32, 16, 4, 2) if exact else Tile(64, 64, min(max(power_of_two(inner), 16), 32), 4, 2)
    if kernel == "conv_weight_gradient":
        blackwell = capability[:1] in ((10,), (11,), (12,))
        rows = 32 if exact or (blackwell and not half) else 64
        return Tile(rows, 32 if exact else 64, min(max(power_of_two(inner), 16), 64), 4, 2)
    if kernel == "product_gradient":
        taken = max(power_of_two(inner), 16)
        hopper = capability in ((9, 0), (10, 0), (10, 3))  # or later, with its shared memory
        if half:
            if taken <= 128:
                return Tile(64 if capability == (9, 0) else 32, 64, taken, 8, 2, 1)
            return Tile(32, 64 if hopper else 32, taken, 8, 2, 1)
        if exact:
            return Tile(16, 32 if hopper or taken <= 128 else 16, taken, 8, 1, 1)
        if taken <= 128:
            return Tile(32 if hopper or capability == (8, 0) else 16, 64, taken, 8, 2, 1)
        return Tile(32, 32, taken, 8, 2, 1) if hopper else Tile(16, 32, taken, 8, 1, 1)
    if kernel in ("norm_relu", "correct", "statistics"):
        return Tile(64, 64, 0, 4, 1)
    if kernel in ("norm_relu_gradient", "norm_relu_max_pool", "norm_relu_max_pool_gradient"):
        return Tile(16, 64, 0, 4, 1, 8)
    raise KeyError(kernel)


def splits(m: int, chunks: int, tile: Tile, device: torch.device) -> tuple[int, int]:
    """Into how many parts a sum over ``m`` rows goes, and how many rows each has: a multiple of the tile's.

    About as many programs as the device runs at a time, ``chunks`` of them for every part.
    """
    wanted = max(tile.resident * describe(device).multiprocessors // chunks, 2)
    each = cdiv(cdiv(m, min(wanted, cdiv(m, tile.rows))), tile.rows) * tile.rows
    return cdiv(m, each), each


# Alignment


def together(x: Tensor, columns: int, first: int = 0, exact: bool = False) -> int:
    """How many elements of a matrix's rows, or of a vector, may be loaded together: a power of two, 16 bytes at most.

    Args:
        x: the columns in question of a matrix, or a vector.
        columns: how many of them. Rounded up to a multiple of the result, they still lie in the storage.
        first: what else it has to divide.
        exact: whether it has to divide ``columns`` as well.
    """
    size = x.element_size()
    address = x.storage_offset() * size if x.is_meta or is_fake(x) else x.data_ptr()
    pitch = x.stride(0) if x.dim() == 2 else 0
    bits = address // size | pitch | first | 16 // size
    width = bits & -bits
    if columns % width:
        end = x.storage_offset() + (x.shape[0] - 1) * pitch + cdiv(columns, width) * width
        if exact or end * size > x.untyped_storage().nbytes():
            width = columns & -columns
    return width


def _images(sizes: Sequence[int]) -> tuple[int, int, int]:
    """The sizes of an image as of a volume."""
    return (1, 1, *sizes)[-3:]


def _strides(factor: Tensor | None) -> tuple[int, int, int, int]:
    return (1, 0, 0, 0) if factor is None else (factor.shape[1], *factor.stride())


# What loads ask for


def _up(n: int, unit: int) -> int:
    return cdiv(n, unit) * unit


def _wide(x: Tensor) -> int:
    """Bytes of a number in a vector or a sum."""
    return wide_type(x.dtype).itemsize


def _size(x: Tensor | None) -> int:
    return 0 if x is None else x.element_size()


def _inside(m: int, sizes: tuple[int, ...], taps: tuple[int, ...]) -> int:
    """How many of the taps of a padded convolution at m pixels lie inside their image."""
    near = (sum(max(size - abs(t - tap // 2), 0) for t in range(tap)) for size, tap in zip(sizes, taps, strict=True))
    return m // math.prod(sizes) * math.prod(near)


def _pooled_taps(sizes, pooled, window: dict[str, int]) -> list[list[int]]:
    """For each axis, how many taps of each window lie inside the image."""
    found = []
    for size, number, axis in zip(sizes, pooled, "DHW", strict=True):
        taps, step, before, apart = (window[what + axis] for what in "KSPD")
        starts = [o * step - before for o in range(number)]
        found.append([sum(0 <= start + t * apart < size for t in range(taps)) for start in starts])
    return found


def _constants(x: Tensor, tile: Tile, product: bool = True, **constants) -> dict[str, Any]:
    constants |= {"BM": tile.rows, "BC": tile.columns}
    if product:
        constants |= {"BK": tile.inner, "PREC": precision(x.dtype)}
    return constants | {"ACC": wide_type(x.dtype)}


# The operators. Matrices are named as in the kernels; all vectors and sums are in the wide type.


@operator(
    "norm_relu_product(Tensor x, Tensor scale, Tensor shift, Tensor weight, Tensor? bias, Tensor(a!) out, "
    "Tensor(b!)? part, int[] sizes, int[] pool)",
    "out", "part",
)  # fmt: skip
def norm_relu_product(x, scale, shift, weight, bias, out, part, sizes, pool):
    (m, n), c = out.shape, x.shape[1]
    pd, ph, pw = _images(pool)
    t = tile("norm_relu_product" if pd * ph * pw == 1 else "pooled product", x.dtype, n, c, x.device)
    arguments = (
        x, x.stride(0), scale, shift, weight, weight.stride(0), bias, out, out.stride(0), part, m, c, n, *_images(sizes)
    )  # fmt: skip
    constants = _constants(
        x, t, PD=pd, PH=ph, PW=pw, BIASED=bias is not None, STATS=part is not None,
        VX=together(x, c), VS=min(together(scale, c), together(shift, c)), VW=together(weight, c, exact=True),
        VO=together(out, n, exact=True),
    )  # fmt: skip
    blocks, chunks = cdiv(m, t.rows), cdiv(n, t.columns)
    loaded = blocks * chunks * 2 * _up(c, constants["VS"]) * _wide(x)
    loaded += chunks * pd * ph * pw * m * _up(c, constants["VX"]) * _size(x)
    loaded += blocks * n * (_up(c, constants["VW"]) * _size(weight) + _size(bias))
    return Launch("norm_relu_product", blocks * chunks, arguments, constants, t.warps, t.stages, loaded)


@operator(
    "norm_relu_conv(Tensor x, Tensor scale, Tensor shift, Tensor weight, Tensor? bias, Tensor? factor, Tensor(a!) out, "
    "Tensor(b!)? part, int[] sizes)",
    "out", "part",
)  # fmt: skip
def norm_relu_conv(x, scale, shift, weight, bias, factor, out, part, sizes):
    (m, k), c = out.shape, x.shape[1]
    t = tile("norm_relu_conv", x.dtype, k, c, x.device)
    td, th, tw = _images(weight.shape[1:-1])
    arguments = (
        x, x.stride(0), scale, shift, weight, bias, factor, *_strides(factor), out, out.stride(0), part, m, c, k,
        *_images(sizes),
    )  # fmt: skip
    constants = _constants(
        x, t, TD=td, TH=th, TW=tw, BIASED=bias is not None, DROPS=factor is not None, STATS=part is not None,
        VX=together(x, c), VS=min(together(scale, c), together(shift, c)), VW=together(weight[0, 0, 0], c, exact=True),
        VO=together(out, k, exact=True),
    )  # fmt: skip
    blocks, chunks, taps = cdiv(m, t.rows), cdiv(k, t.columns), td * th * tw
    loaded = blocks * chunks * taps * 2 * _up(c, constants["VS"]) * _wide(x)
    loaded += chunks * _inside(m, _images(sizes), (td, th, tw)) * _up(c, constants["VX"]) * _size(x)
    loaded += blocks * k * (taps * _up(c, constants["VW"]) * _size(weight) + _size(bias))
    loaded += m * _up(k, constants["VO"]) * _size(factor)
    return Launch("norm_relu_conv", blocks * chunks, arguments, constants, t.warps, t.stages, loaded)


@operator(
    "conv_gradient(Tensor g, Tensor y, Tensor? slope, Tensor? level, Tensor? ymean, Tensor? factor, Tensor weight, "
    "Tensor x, Tensor scale, Tensor shift, Tensor mean, Tensor(a!)? out, Tensor(b!)? sums, Tensor(c!)? dw, int[] sizes, "
    "int first, bool add, int split_rows, bool dweight, bool bias)",
    "sums", "dw", y="slope", out="add", weight="sums",
)  # fmt: skip
def conv_gradient(
    g, y, slope, level, ymean, factor, weight, x, scale, shift, mean, out, sums, dw, sizes, first, add, split_rows,
    dweight, bias,
):  # fmt: skip
    (m, k), c = g.shape, x.shape[1]
    t = tile("conv_input_gradient", x.dtype, c, k, x.device)
    w = tile("conv_weight_gradient", x.dtype, c, k, x.device)
    td, th, tw = _images(weight.shape[1:-1])
    vo = 1 if out is None else together(out, c, first if add else 0, exact=True)
    arguments = (
        g, g.stride(0), y, y.stride(0), slope, level, ymean, factor, *_strides(factor), weight, x, x.stride(0), scale,
        shift, mean, out, 0 if out is None else out.stride(0), sums, dw, m, c, k, *_images(sizes), split_rows,
        first // vo,
    )  # fmt: skip
    constants = _constants(
        x, t, TD=td, TH=th, TW=tw, CORRECT=slope is not None, DROPS=factor is not None, INPUT=sums is not None,
        ADD=add and out is not None, WRITE=not add and out is not None, WEIGHT=dweight, BIAS=bias,
        VG=min(together(g, k), together(y, k)), VW=together(weight[0, 0, 0], c, exact=True), VX=together(x, c), VO=vo,
        WM=w.rows, WC=w.columns, WK=w.inner,
    )  # fmt: skip
    taps, inside = td * th * tw, _inside(m, _images(sizes), (td, th, tw))
    corrects = slope is not None
    row = (1 + corrects) * _up(k, constants["VG"]) * _size(g) + k * _size(factor)  # of dy
    level = corrects * 3 * k * _wide(x)
    wide_row = _up(c, constants["VX"]) * _size(x)
    programs = loaded = 0
    if sums is not None:
        blocks, chunks = cdiv(m, t.rows), cdiv(c, t.columns)
        programs += blocks * chunks
        loaded += chunks * (blocks * taps * level + inside * row) + m * wide_row
        loaded += blocks * (taps * k * _up(c, constants["VW"]) * _size(weight) + 3 * c * _wide(x))
        if constants["ADD"]:
            loaded += m * (_up(c, vo) - first) * _size(x)
    if dw is not None:
        parts, chunks, k_chunks = dw.shape[0], cdiv(c, w.columns), cdiv(k, w.inner)
        programs += parts * taps * chunks * k_chunks
        loaded += taps * (parts * (k_chunks * 2 * c * _wide(x) + chunks * level) + chunks * m * row)
        loaded += dweight * k_chunks * inside * wide_row
    return Launch("conv_gradient", programs, arguments, constants, t.warps, t.stages, loaded)


@operator(
    "product_gradient(Tensor x, Tensor(a!)? g, Tensor b, Tensor dz2, Tensor weight, Tensor scale, Tensor shift, "
    "Tensor mean, Tensor scale2, Tensor? slope2, Tensor? level2, Tensor? mean2, Tensor(b!)? dw, Tensor(c!)? sums, "
    "int first, int split_rows, bool dweight, bool bias)",
    "dw", "sums", b="slope2",
)  # fmt: skip
def product_gradient(
    x, g, b, dz2, weight, scale, shift, mean, scale2, slope2, level2, mean2, dw, sums, first, split_rows, dweight, bias
):  # fmt: skip
    (m, c), n = x.shape, b.shape[1]
    t = tile("product_gradient", x.dtype, c, n, x.device)
    vx = together(x, c)
    vg = 1
    if g is not None:
        vg = together(g, c - first, first)
        vx = min(vx, vg)  # the columns of g that are rewritten are those of x that are read
    arguments = (
        x, x.stride(0), g, 0 if g is None else g.stride(0), b, b.stride(0), dz2, dz2.stride(0), weight,
        weight.stride(0), scale, shift, mean, scale2, slope2, level2, mean2, dw, sums, m, c, n, split_rows, first // vg,
    )  # fmt: skip
    constants = _constants(
        x, t, CORRECT=slope2 is not None, WEIGHT=dweight, BIAS=bias, INPUT=sums is not None, ADD=g is not None,
        VX=vx, VG=vg, VB=min(together(b, n, exact=True), together(dz2, n, exact=True)),
        VW=together(weight, c, exact=True),
    )  # fmt: skip
    parts, chunks, corrects = cdiv(m, split_rows), cdiv(c, t.columns), slope2 is not None
    loaded = parts * (3 * c + chunks * (1 + 3 * corrects) * n) * _wide(x)
    loaded += parts * n * _up(c, constants["VW"]) * _size(weight)
    loaded += m * _size(x) * (chunks * (1 + corrects) * _up(n, constants["VB"]) + _up(c, vx))
    if g is not None and sums is not None:
        loaded += m * (_up(c, vx) - first) * _size(x)
    return Launch("product_gradient", parts * chunks, arguments, constants, t.warps, t.stages, loaded)


@operator("statistics(Tensor x, Tensor(a!) part)", "part")
def statistics(x, part):
    m, c = x.shape
    t = tile("statistics", x.dtype, c, 0, x.device)
    constants = _constants(x, t, product=False, VX=together(x, c))
    programs = cdiv(m, t.rows) * cdiv(c, t.columns)
    loaded = m * _up(c, constants["VX"]) * _size(x)
    return Launch("statistics", programs, (x, x.stride(0), part, m, c), constants, t.warps, t.stages, loaded)


@operator("norm_relu(Tensor x, Tensor scale, Tensor shift, Tensor(a!) out)", "out")
def norm_relu(x, scale, shift, out):
    m, c = x.shape
    t = tile("norm_relu", x.dtype, c, 0, x.device)
    constants = _constants(x, t, product=False, VX=together(x, c), VO=together(out, c, exact=True))
    arguments = x, x.stride(0), scale, shift, out, out.stride(0), m, c
    blocks = cdiv(m, t.rows)
    loaded = m * _up(c, constants["VX"]) * _size(x) + blocks * 2 * c * _wide(x)
    return Launch("norm_relu", blocks * cdiv(c, t.columns), arguments, constants, t.warps, t.stages, loaded)


@operator(
    "norm_relu_gradient(Tensor x, Tensor scale, Tensor shift, Tensor mean, Tensor(a!) dp, Tensor(b!)? g, "
    "Tensor(c!) sums, int[] sizes, int[] pool, int first, int split_rows, bool scaled, bool pooled)",
    "g", "sums",
)  # fmt: skip
def norm_relu_gradient(x, scale, shift, mean, dp, g, sums, sizes, pool, first, split_rows, scaled, pooled):
    c = x.shape[1]
    n, image, _ = dp.shape
    pd, ph, pw = _images(pool)
    t = tile("norm_relu_gradient", x.dtype, c, 0, x.device)
    rows = dp.stride(2) == 1 and (n == 1 or dp.stride(0) == image * dp.stride(1))
    vp = together(dp[0], c, exact=True) if rows else 0
    vg = 1 if g is None else together(g, c - first, first, exact=True)
    arguments = (
        x, x.stride(0), scale, shift, mean, dp, image, *dp.stride(), g, 0 if g is None else g.stride(0), sums,
        n * image, c, *_images(sizes), split_rows, first // vg,
    )  # fmt: skip
    constants = _constants(
        x, t, product=False, PD=pd, PH=ph, PW=pw, WRITE=g is not None, SCALED=scaled, POOLED=pooled,
        VX=together(x, c), VP=vp, VG=vg,
    )  # fmt: skip
    parts = sums.shape[0]
    loaded = n * image * (pd * ph * pw * _up(c, constants["VX"]) * _size(x) + (_up(c, vp) if vp else c) * _size(dp))
    loaded += parts * 3 * c * _wide(x)
    return Launch("norm_relu_gradient", parts * cdiv(c, t.columns), arguments, constants, t.warps, t.stages, loaded)


def _windows(window: Sequence[Sequence[int]]) -> dict[str, int]:
    """Kernel, stride, padding and dilation of a pooling, as constants."""
    filled = zip("KSPD", window, (1, 1, 0, 1), strict=True)
    return {
        what + axis: size
        for what, sizes, rest in filled
        for axis, size in zip("DHW", (rest, rest, *sizes)[-3:], strict=True)
    }


@operator(
    "norm_relu_max_pool(Tensor x, Tensor scale, Tensor shift, Tensor(a!) out, int[] sizes, int[] pooled, int[] kernel, "
    "int[] stride, int[] padding, int[] dilation)",
    "out",
)  # fmt: skip
def norm_relu_max_pool(x, scale, shift, out, sizes, pooled, kernel, stride, padding, dilation):
    m, c = out.shape
    t = tile("norm_relu_max_pool", x.dtype, c, 0, x.device)
    constants = _constants(
        x, t, product=False, **_windows((kernel, stride, padding, dilation)), VX=together(x, c),
        VO=together(out, c, exact=True),
    )  # fmt: skip
    arguments = x, x.stride(0), scale, shift, out, out.stride(0), m, c, *_images(sizes), *_images(pooled)
    blocks = cdiv(m, t.rows)
    taps = _pooled_taps(_images(sizes), _images(pooled), constants)
    inside = m // math.prod(pooled) * math.prod(map(sum, taps))
    loaded = inside * _up(c, constants["VX"]) * _size(x) + blocks * 2 * c * _wide(x)
    return Launch("norm_relu_max_pool", blocks * cdiv(c, t.columns), arguments, constants, t.warps, t.stages, loaded)


@operator(
    "norm_relu_max_pool_gradient(Tensor x, Tensor scale, Tensor shift, Tensor mean, Tensor dp, Tensor(a!) dz, "
    "Tensor(b!) sums, int[] sizes, int[] pooled, int[] kernel, int[] stride, int[] padding, int[] dilation, "
    "int split_rows)",
    "dz", "sums",
)  # fmt: skip
def norm_relu_max_pool_gradient(
    x, scale, shift, mean, dp, dz, sums, sizes, pooled, kernel, stride, padding, dilation, split_rows
):  # fmt: skip
    m, c = x.shape
    t = tile("norm_relu_max_pool_gradient", x.dtype, c, 0, x.device)
    arguments = (
        x, x.stride(0), scale, shift, mean, dp, dp.stride(0), dz, dz.stride(0), sums, m, c, *_images(sizes),
        *_images(pooled), split_rows,
    )  # fmt: skip
    constants = _constants(
        x, t, product=False, **_windows((kernel, stride, padding, dilation)), VX=together(x, c), VP=together(dp, c),
        VO=together(dz, c, exact=True),
    )  # fmt: skip
    parts, n = sums.shape[0], m // math.prod(sizes)
    taps = _pooled_taps(_images(sizes), _images(pooled), constants)
    again = n * math.prod(sum(t * t for t in axis) for axis in taps)  # each tap finds its window's largest
    loaded = (again + m) * _up(c, constants["VX"]) * _size(x) + parts * 3 * c * _wide(x)
    loaded += n * math.prod(map(sum, taps)) * _up(c, constants["VP"]) * _size(dp)
    programs = parts * cdiv(c, t.columns)
    return Launch("norm_relu_max_pool_gradient", programs, arguments, constants, t.warps, t.stages, loaded)


@operator(
    "correct(Tensor x, Tensor g, Tensor? scale, Tensor? slope, Tensor? level, Tensor? mean, Tensor(a!) out)",
    "out", x="slope",
)  # fmt: skip
def correct(x, g, scale, slope, level, mean, out):
    m, c = x.shape
    t = tile("correct", x.dtype, c, 0, x.device)
    constants = _constants(
        x, t, product=False, SCALED=scale is not None, CORRECT=slope is not None,
        VX=together(x, c), VG=together(g, c), VO=together(out, c, exact=True),
    )  # fmt: skip
    arguments = x, x.stride(0), g, g.stride(0), scale, slope, level, mean, out, out.stride(0), m, c
    blocks, corrects = cdiv(m, t.rows), slope is not None
    loaded = m * (_up(c, constants["VG"]) + corrects * _up(c, constants["VX"])) * _size(x)
    loaded += blocks * (constants["SCALED"] + 3 * corrects) * c * _wide(x)
    return Launch("correct", blocks * cdiv(c, t.columns), arguments, constants, t.warps, t.stages, loaded)


@operator(
    "fold(Tensor(a!) mean, Tensor(b!) var, Tensor? gamma, Tensor? beta, Tensor? part, Tensor(c!)? copy, Tensor(d!) r, "
    "Tensor(e!) scale, Tensor(f!) shift, int m, int part_rows, int start, float eps)",
    "copy", "r", "scale", "shift",
)  # fmt: skip
def fold(mean, var, gamma, beta, part, copy, r, scale, shift, m, part_rows, start, eps):
    c = mean.shape[0]
    parts, k = (0, 0) if part is None else (part.shape[0], part.shape[2])
    arguments = part, mean, var, gamma, beta, copy, r, scale, shift, parts, m, part_rows, start, k, c
    constants = {
        "EPS": eps, "MERGE": part is not None, "HAS_GAMMA": gamma is not None, "HAS_BETA": beta is not None,
        "BATCH": copy is None, "BP": 128, "BC": 8, "ACC": scale.dtype,
    }  # fmt: skip
    loaded = 2 * (c - k) * _size(mean) + c * (_size(gamma) + _size(beta)) + 3 * parts * k * _size(part)
    return Launch("fold", cdiv(c, 8), arguments, constants, 4, 1, loaded)


@operator(
    "finish_gradient(Tensor? sums, Tensor r, Tensor scale, Tensor(a!)? dgamma, Tensor(b!)? dbeta, Tensor(c!)? slope, "
    "Tensor(d!)? level, Tensor? dw, Tensor(e!)? out, Tensor(f!)? dbias, int count, int o, int[] strides)",
    "dgamma", "dbeta", "out", "dbias",
)  # fmt: skip
def finish_gradient(sums, r, scale, dgamma, dbeta, slope, level, dw, out, dbias, count, o, strides):
    parts, c = (0, 0) if sums is None else (sums.shape[0], sums.shape[2])
    width = 0 if dw is None else dw.shape[1]
    taps, cw = (1, 1) if out is None else (out[0, 0].numel(), out.shape[1])
    so, st, sc = strides
    arguments = (
        sums, r, scale, dgamma, dbeta, slope, level, dw, out, dbias, parts, c, count, 0 if dw is None else dw.shape[0],
        o, cw, so, st, sc,
    )  # fmt: skip
    constants = {
        "TAPS": taps, "NORM": sums is not None, "BATCH": slope is not None, "WEIGHT": out is not None,
        "BIAS": dbias is not None, "BP": 128, "BV": 8, "BS": 16, "BE": 128, "ACC": r.dtype,
    }  # fmt: skip
    loaded = ((2 * parts + 1) * c + constants["BATCH"] * 3 * c) * _size(sums) + (0 if dw is None else nbytes(dw))
    return Launch("finish_gradient", cdiv(c, 8) + cdiv(width, 128), arguments, constants, 4, 1, loaded)


@operator(
    "finish_and_product(Tensor? sums, Tensor r, Tensor scale, Tensor(a!)? dgamma, Tensor(b!)? dbeta, Tensor(c!)? slope, "
    "Tensor(d!)? level, Tensor? dw, Tensor(e!)? out, Tensor(f!)? dbias, int count, int o, int[] strides, Tensor x, "
    "Tensor xscale, Tensor xshift, Tensor weight, Tensor? bias, Tensor(g!) product)",
    "dgamma", "dbeta", "out", "dbias", "product",
)  # fmt: skip
def finish_and_product(
    sums, r, scale, dgamma, dbeta, slope, level, dw, out, dbias, count, o, strides, x, xscale, xshift, weight, bias,
    product,
):  # fmt: skip
    first = finish_gradient.plan(sums, r, scale, dgamma, dbeta, slope, level, dw, out, dbias, count, o, strides)
    then = norm_relu_product.plan(x, xscale, xshift, weight, bias, product, None, [1], [1])
    arguments = *first.arguments, first.programs, *then.arguments
    constants = first.constants | then.constants
    programs, loaded = first.programs + then.programs, first.loaded + then.loaded
    return Launch("finish_and_product", programs, arguments, constants, then.warps, then.stages, loaded)
