"""A dense block as two operators without side effects, for ``torch.compile``: one graph, whatever the batch.

Equivalent to :func:`~.dense_block.fused_block`, whose passes they run. Everything they depend on is an argument, so that
the compiler knows when to look again: tensors, and for each norm its eps and whether it takes batch statistics. What the
eager function does on the side is done outside, by ordinary operations the compiler traces: drawing dropout's factors
before, moving running statistics behind.

Not here, as the compiler's autograd refuses it or cannot know of it: second derivatives, and statistics over several
processes. Nor what the library's own blocks do not have: biases, another order or choice of features.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from .batch_norm import Exchange, Statistics, move_running_statistics
from .costs import made_of
from .dense_block import (
    BlockCall, LayerCall, NormCall, TailCall, _Backward, _Forward, _Geometry, _Kept, _KeptLayer, as_it_says,
    with_factors,
)  # fmt: skip
from .storage import FeatureBuffer, as_rows, channels_last_empty

# How a block runs, as both operators are told: which layers have a bottleneck, every norm's eps and whether it takes
# batch statistics, the running ones of those that do not, dropout's factors of the layers that drop, and what closes it:
# nothing (no number), BN-ReLU (a zero, or -1 for a contiguous output), or a transition with this pooling window.
_HOW = "bool[] bottlenecks, float[] eps, bool[] batch, Tensor[] running, Tensor[] factors, bool[] drops, int[] tail"

_library = torch.library.Library("efficient_densenet", "FRAGMENT")
_library.define(
    f"block(Tensor x, Tensor[] parameters, {_HOW}, bool keep_conv1, bool[] needed, ScalarType dtype) -> Tensor[]"
)
_library.define(
    "block_backward(Tensor grad, Tensor features, Tensor statistics, Tensor[] conv1, Tensor[] parameters, "
    f"{_HOW}, bool[] needed, int channels) -> Tensor[]"
)


def _call(bottlenecks, eps, batch, running, factors, drops, tail) -> BlockCall:
    """The call that arguments of an operator stand for."""
    moments, noise = iter(running), iter(factors)

    def norms() -> Iterator[NormCall]:
        for each, takes_batch in zip(eps, batch, strict=True):
            module = None  # nothing of it is moved in here
            if not takes_batch:
                module = SimpleNamespace(running_mean=next(moments), running_var=next(moments))
            yield NormCall(module, each, takes_batch, None)

    norm = norms()
    layers = tuple(
        LayerCall(next(norm), next(norm) if bottleneck else None, 0.0, next(noise) if drop else None)
        for bottleneck, drop in zip(bottlenecks, drops, strict=True)
    )
    pool = tuple(tail) if tail and tail[0] > 0 else None
    return BlockCall(layers, TailCall(next(norm), pool, tail[0] >= 0) if tail else None, True)


def _without_biases(parameters: Sequence) -> list:
    return [p for i, p in enumerate(parameters) if i % 4 != 3]


def _with_biases(parameters: Sequence, none: object = None) -> list:
    """With ``none`` where a convolution has no bias: behind every weight."""
    found = []
    for i in range(0, len(parameters), 3):
        found += parameters[i : i + 3]
        if i + 3 <= len(parameters):
            found.append(none)
    return found


def _total(x: Tensor, parameters: Sequence[Tensor], bottlenecks: Sequence[bool]) -> int:
    """Channels of the finished block."""
    ends = itertools.accumulate(6 if bottleneck else 3 for bottleneck in bottlenecks)
    return x.shape[1] + sum(parameters[end - 1].shape[0] for end in ends)


def _block(
    x, parameters, bottlenecks, eps, batch, running, factors, drops, tail, keep_conv1, needed, dtype
) -> list[Tensor]:
    call = _call(bottlenecks, eps, batch, running, factors, drops, tail)
    buffer = FeatureBuffer(x, _total(x, parameters, bottlenecks), dtype, alone=bool(tail))
    with as_it_says(x.device):
        buffer.tensor.narrow(1, 0, x.shape[1]).copy_(x)
        run = _Forward(buffer, x.shape[1], call, _with_biases(parameters), keep=keep_conv1)
        if not all(batch):  # the same every time, also where nobody takes statistics
            run.statistics.zero_()
        out, kept = run.run(), run.kept
    conv1 = [layer.conv1 for layer in kept.layers if layer.conv1 is not None]
    return [*([out] if tail else []), buffer.tensor, kept.statistics, *conv1]


def _block_backward(
    grad, features, statistics, conv1, parameters, bottlenecks, eps, batch, running, factors, drops, tail, needed, channels
) -> list[Tensor]:
    call = _call(bottlenecks, eps, batch, running, factors, drops, tail)
    parameters, needed = _with_biases(parameters), [needed[0], *_with_biases(needed[1:], none=False)]
    groups, tail_parameters = call.split(parameters)
    of = _Geometry(features, channels, call, groups)
    kept_conv1 = iter(conv1)

    def fold(norm: NormCall, gamma: Tensor, beta: Tensor, start: int, stop: int):
        mean, var = statistics[:, start:stop].unbind(0)
        if not norm.batch:
            mean, var = norm.module.running_mean, norm.module.running_var
        return of.passes.fold(mean, var, gamma, beta, norm.eps, norm.batch, None, 0, of.scratch)

    with as_it_says(features.device):
        layers = []
        for i, (layer, p) in enumerate(zip(call.layers, groups, strict=True)):
            kept = _KeptLayer(fold(layer.norm1, p[0], p[1], *of.read(i)))
            if layer.norm2 is not None:
                kept.norm2 = fold(layer.norm2, p[4], p[5], *of.inner(i))
                kept.conv1 = next(kept_conv1, None)
            layers.append(kept)
        last = fold(call.tail.norm, *tail_parameters[:2], *of.read(len(groups))) if tail else None
        kept = _Kept(Exchange(None, of.rows.shape[0], of.device), layers, statistics, last)
        gradients = _Backward(features, channels, call, parameters, kept, needed).run(grad)
    gradients = [gradients[0], *_without_biases(gradients[1:])]
    return [grad.new_empty(0) if g is None else g for g in gradients]


def _fake_block(
    x, parameters, bottlenecks, eps, batch, running, factors, drops, tail, keep_conv1, needed, dtype
) -> list[Tensor]:
    total = _total(x, parameters, bottlenecks)
    n, _, *sizes = x.shape
    starts = itertools.accumulate((6 if bottleneck else 3 for bottleneck in bottlenecks), initial=0)
    widths = [parameters[start + 2].shape[0] for start, wide in zip(starts, bottlenecks) if wide]  # noqa: B905
    rows = n
    for size in sizes:
        rows = rows * size
    features = FeatureBuffer(x, total, dtype, alone=bool(tail)).tensor
    out = []
    if tail and tail[0] <= 0:
        contiguous = x.new_empty((n, total, *sizes), dtype=dtype)
        out = [contiguous if tail[0] else channels_last_empty(x, total, dtype)]
    elif tail:
        pooled = [size // window for size, window in zip(sizes, tail, strict=True)]
        out = [x.new_empty((n, *pooled, parameters[-1].shape[0]), dtype=dtype).movedim(-1, 1)]
    wide = torch.promote_types(dtype, torch.float32)
    statistics = x.new_empty((2, total + sum(widths) if any(batch) else 0), dtype=wide)
    return [*out, features, statistics, *(x.new_empty((rows, width), dtype=dtype) for width in widths if keep_conv1)]


def _fake_block_backward(
    grad, features, statistics, conv1, parameters, bottlenecks, eps, batch, running, factors, drops, tail, needed, channels
) -> list[Tensor]:
    like = [channels_last_empty(features, channels), *map(torch.empty_like, parameters)]
    return [tensor if need else grad.new_empty(0) for tensor, need in zip(like, needed, strict=True)]


def _keep(ctx, inputs, output) -> None:
    x, parameters, *how, _, needed, _ = inputs
    bottlenecks, eps, batch, running, factors, drops, tail = how
    features, statistics, *conv1 = output[1:] if tail else output
    ctx.counts = len(parameters), len(running), len(factors)
    ctx.save_for_backward(features, statistics, *parameters, *running, *factors, *conv1)
    ctx.how = (bottlenecks, eps, batch, drops, tail, needed)
    ctx.channels, ctx.dtype = x.shape[1], x.dtype


def _differentiate(ctx, grads):
    features, statistics, *rest = ctx.saved_tensors
    parameters, running, factors, conv1 = (
        rest[start:stop] for start, stop in itertools.pairwise(itertools.accumulate((*ctx.counts, len(rest)), initial=0))
    )
    bottlenecks, eps, batch, drops, tail, needed = ctx.how
    dx, *dparameters = torch.ops.efficient_densenet.block_backward(
        grads[0], features, statistics, conv1, parameters, bottlenecks, eps, batch, running, factors, drops, tail, needed,
        ctx.channels,
    )  # fmt: skip
    dparameters = [g if need else None for g, need in zip(dparameters, needed[1:], strict=True)]
    dx = dx.to(ctx.dtype) if needed[0] else None
    # To torch an empty list is one of tensors, whose gradients are another.
    lists = [None if given else [] for given in (bottlenecks, eps, batch, drops, tail)]
    return dx, dparameters, *lists[:3], [None] * len(running), [None] * len(factors), *lists[3:], None, None, None


def _differentiate_again(ctx, *grads):
    raise RuntimeError(
        "second derivatives of a compiled dense block cannot be had; take them from the model uncompiled, or compile it "
        "with efficient='naive'"
    )


_library.impl("block", _block, "CompositeExplicitAutograd")
_library.impl("block_backward", _block_backward, "CompositeExplicitAutograd")
torch.library.register_fake("efficient_densenet::block", _fake_block, lib=_library)
torch.library.register_fake("efficient_densenet::block_backward", _fake_block_backward, lib=_library)
torch.library.register_autograd("efficient_densenet::block", _differentiate, setup_context=_keep, lib=_library)
torch.library.register_autograd("efficient_densenet::block_backward", _differentiate_again, lib=_library)
made_of("efficient_densenet::block", _block)
made_of("efficient_densenet::block_backward", _block_backward)


def traced_block(x: Tensor, call: BlockCall, parameters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """:func:`~.dense_block.fused_block` for the compiler to trace; takes the same, in one process, without biases."""
    call = with_factors(call, x, parameters, dtype)
    norms, layers = call.norms, call.layers
    running = [
        tensor.clone()  # another forward may move them before this one's backward
        for norm in norms if not norm.batch
        for tensor in (norm.module.running_mean, norm.module.running_var)
    ]  # fmt: skip
    groups = [_without_biases(p) for p in call.split(parameters)[0]]
    parameters = _without_biases(parameters)
    factors = [layer.factor for layer in layers if layer.factor is not None]
    bottlenecks = [layer.norm2 is not None for layer in layers]
    tail = []
    if call.tail is not None:
        tail = list(call.tail.pool or (0 if call.tail.channels_last else -1,))
    wanted = torch.is_grad_enabled()
    needed = [wanted and tensor.requires_grad for tensor in (x, *parameters)]
    out, *others = torch.ops.efficient_densenet.block(
        x, list(parameters), bottlenecks, [norm.eps for norm in norms], [norm.batch for norm in norms], running, factors,
        [layer.factor is not None for layer in layers], tail, call.keep_conv1 and any(needed), needed, dtype,
    )  # fmt: skip
    mean, var = others[1 if tail else 0].detach().unbind(0)
    count = x.shape[0]
    for size in x.shape[2:]:
        count = count * size
    stop, inner, moves = x.shape[1], _total(x, parameters, bottlenecks), []
    for layer, p in zip(layers, groups, strict=True):
        moves.append((layer.norm1, 0, stop))
        stop += p[-1].shape[0]
        if layer.norm2 is not None:
            moves.append((layer.norm2, inner, inner + p[2].shape[0]))
            inner += p[2].shape[0]
    if call.tail is not None:
        moves.append((call.tail.norm, 0, stop))
    with torch.no_grad():
        move_running_statistics(
            [(norm.module, Statistics(mean[start:stop], var[start:stop])) for norm, start, stop in moves if norm.batch],
            count,
        )
    return out
