"""BatchNorm taken apart: statistics of a channel, running statistics, and the normalise-and-rectify pass.

In training mode the batch mean and variance of a channel do not depend on the layer that reads it, so a dense block
takes them once, when the channel is written. Each layer then only scales and shifts,

    r = 1 / sqrt(var + eps),   scale = gamma r,   shift = beta - mean scale,   z = relu(scale x + shift),

with its own ``gamma, beta, eps``, and moves its own running statistics with its own momentum, once per forward.

Where BatchNorm is synchronised, the statistics are those of the batches of all processes, and so are the sums in its
gradient; an :class:`Exchange` puts both together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .passes import Correction, FoldedNorm, Need, Pending, implementation, merge, wide_type
from .rebuild import is_many, levels_of_batched_gradients, must_rebuild, rebuilt_gradients
from .storage import as_rows, channels_last_empty
from .tiles import Scratch, as_type


def uses_batch_statistics(norm: nn.Module) -> bool:
    """Whether this BatchNorm normalises with the batch's statistics (else with its running ones)."""
    return norm.training or norm._buffers["running_mean"] is None


def synchronised_over(norm: nn.Module) -> dist.ProcessGroup | None:
    """The processes over which this BatchNorm takes its batch statistics; None where it takes its own."""
    if "process_group" not in norm.__dict__ or not norm.training:  # torch's SyncBatchNorm and this library's have it
        return None
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = norm.process_group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


@dataclass(frozen=True)
class Statistics:
    """Mean and biased variance of some channels, in float32 or wider; both of shape ``(C,)``."""

    mean: Tensor
    var: Tensor

    @classmethod
    def running(cls, norm: nn.Module) -> Statistics:
        """A copy of the running statistics: another forward may move them before this one's backward."""
        dtype = wide_type(norm.running_mean.dtype)
        return cls(norm.running_mean.to(dtype, copy=True), norm.running_var.to(dtype, copy=True))


class Exchange:
    """What the processes of a group tell each other in one forward and backward pass; nothing where there is no group.

    All of them take part in every call, in the same order. A backward pass exchanges its own sums, never statistics
    again.

    Args:
        group: the processes, or None for this one alone.
        rows: values per channel in this process's batch.
        device: where the tensors are.

    Attributes:
        count: values per channel in all batches together.
    """

    def __init__(self, group: dist.ProcessGroup | None, rows: int, device: torch.device):
        self.group = group
        self._counts = [rows]
        if group is not None:
            counts = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
            dist.all_gather(counts, torch.tensor([rows], device=device), group=group)
            self._counts = torch.cat(counts).tolist()
        self.count = sum(self._counts)

    def statistics(self, own: Tensor) -> None:
        """Means and variances, ``(2, C)``, of this batch become those of all batches: the same bits on every process."""
        if self.group is None:
            return
        own_copy = own.contiguous()
        gathered = [torch.empty_like(own_copy) for _ in self._counts]
        dist.all_gather(gathered, own_copy, group=self.group)
        means, variances = torch.stack(gathered).unbind(1)
        share = torch.tensor(self._counts, dtype=own.dtype, device=own.device).div_(self.count)
        mean = share @ means
        own[0] = mean
        own[1] = share @ (variances + (means - mean).square_())

    def sums(self, own: Tensor) -> None:
        """Sums, in any shape, of this process become those of all of them."""
        if self.group is not None:
            total = own.contiguous()
            dist.all_reduce(total, group=self.group)
            if total is not own:
                own.copy_(total)


def batch_statistics(rows: Tensor) -> Tensor:
    """Batch mean and biased variance of the columns of ``rows``, ``(m, C)``: ``(2, C)``."""
    found = torch.empty((2, rows.shape[1]), dtype=wide_type(rows.dtype), device=rows.device)
    passes = implementation(rows.device, rows.dtype)
    partial = passes.statistics(rows, found, Scratch(rows.device))
    if partial is not None:
        merge(partial, *found.unbind(0))
    return found


def check_count(count: int, shape: tuple[int, ...]) -> None:
    """Raises ValueError, as torch does, where a training BatchNorm would see one value per channel."""
    if count <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {shape}")


class FeatureStatistics:
    """The batch statistics of a buffer's channels, taken (and exchanged) once, when a layer first asks for them.

    ``new_first``: it is filled from its end.
    """

    def __init__(self, features: Tensor, group: dist.ProcessGroup | None = None, new_first: bool = False):
        self._new_first = new_first
        self._shape = features.shape
        self._rows = as_rows(features)
        self.exchange = Exchange(group, self._rows.shape[0], features.device)
        self._mean: Tensor | None = None
        self._var: Tensor | None = None

    def first(self, channels: int) -> Statistics:
        """The statistics of the ``channels`` channels that were written first; they must have been by now."""
        if self._known < channels:
            check_count(self.exchange.count, (self._shape[0], channels, *self._shape[2:]))
            with torch.autocast(self._rows.device.type, enabled=False):  # it would take the products in half precision
                total = self._rows.shape[1]
                new = (total - channels, total - self._known) if self._new_first else (self._known, channels)
                self._append(batch_statistics(self._rows[:, slice(*new)]))
        return Statistics(self._of_first(self._mean, channels), self._of_first(self._var, channels))

    def _of_first(self, vector: Tensor, channels: int) -> Tensor:
        return vector[-channels:] if self._new_first else vector[:channels]

    @property
    def _known(self) -> int:
        return 0 if self._mean is None else self._mean.shape[0]

    def _append(self, new: Tensor) -> None:
        self.exchange.statistics(new)
        mean, var = new.unbind(0)
        # New vectors, not slices of one: what autograd has saved of the old ones stays untouched.
        if self._mean is None:
            self._mean, self._var = mean, var
            return
        order = -1 if self._new_first else 1
        self._mean = torch.cat((self._mean, mean)[::order])
        self._var = torch.cat((self._var, var)[::order])


def move_running_statistics(moves: Sequence[tuple[nn.Module, Statistics]], count: int) -> None:
    """What BatchNorms' forwards do to their buffers: once per forward in training mode, nothing otherwise.

        running = (1 - f) running + f batch,   var unbiased by count / (count - 1),

    with ``f`` the momentum, or ``1 / num_batches_tracked`` where the momentum is ``None``.

    Args:
        moves: the norms and the batch statistics each has used. Norms of one momentum move together, by few calls.
        count: values per channel.
    """
    together: dict[float, list[tuple[Tensor, Tensor]]] = {}
    counters, tracking = [], []
    for norm, batch in moves:
        buffers = norm._buffers  # nn.Module's own way to them is several times slower
        mean, var, counter = (buffers[name] for name in ("running_mean", "running_var", "num_batches_tracked"))
        if norm.training and norm.track_running_stats and mean is not None:
            tracking.append((norm.momentum, counter, mean, var, batch))
            if counter is not None:
                counters.append(counter)
    if len({id(mean) for _, _, mean, _, _ in tracking}) < len(tracking):  # a norm in several places: step by step
        for move in moves:
            move_running_statistics([move], count)
        return
    if counters:
        torch._foreach_add_(counters, 1)
    for momentum, counter, mean, var, batch in tracking:
        if momentum is None and counter is None:
            momentum = 0.0
        move = (mean, var, as_type(batch.mean, mean.dtype), as_type(batch.var, var.dtype))
        if momentum is None:  # the cumulative average, without waiting for the counter
            mean.lerp_(move[2], 1.0 / counter.to(mean.dtype))
            var.lerp_(move[3] * (count / (count - 1)), 1.0 / counter.to(var.dtype))
            continue
        together.setdefault(momentum, []).append(move)
    for factor, lists in together.items():
        means, variances, batch_means, batch_variances = zip(*lists, strict=True)
        torch._foreach_lerp_(means, batch_means, factor)
        torch._foreach_lerp_(variances, batch_variances, factor)
        torch._foreach_add_(variances, batch_variances, alpha=factor / (count - 1))


class _SumOverProcesses(torch.autograd.Function):
    """The sum of the processes' tensors. All their losses depend on it, and its gradient on all of theirs."""

    @staticmethod
    def forward(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        if is_many(x):  # no collective takes it, and many sums are one of more elements
            level = levels_of_batched_gradients() or 1
            many = torch._remove_batch_dim(x, level, 0, 0)
            return torch._add_batch_dim(_SumOverProcesses.apply(many, group), 0, level)
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, dist.ProcessGroup], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def vmap(info, in_dims: tuple[int, None], x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, int]:
        return _SumOverProcesses.apply(x, group), in_dims[0]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOverProcesses.apply(grad, ctx.group), None


def synchronised_batch_norm(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float, group: dist.ProcessGroup
) -> tuple[Tensor, Statistics, int]:
    """BatchNorm over the batches of all processes by torch's own operations, differentiable any number of times.

    Returns:
        ``gamma (x - mean) / sqrt(var + eps) + beta``, the statistics, and the values per channel behind them.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = [d for d in range(x.dim()) if d != 1]
    shape = [-1 if d == 1 else 1 for d in range(x.dim())]
    count = Exchange(group, x.numel() // x.shape[1], x.device).count
    check_count(count, tuple(x.shape))
    mean = _SumOverProcesses.apply(wide.sum(dims), group) / count
    centred = wide - mean.view(shape)
    var = _SumOverProcesses.apply(centred.square().sum(dims), group) / count
    y = centred * (var + eps).rsqrt().view(shape)
    if gamma is not None:
        y = y * gamma.view(shape)
    if beta is not None:
        y = y + beta.view(shape)
    return y.to(x.dtype), Statistics(mean.detach(), var.detach()), count


def batch_norm_reference(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    statistics: Statistics | None,
    eps: float,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """``gamma (x - mean) / sqrt(var + eps) + beta`` by torch's own operations, differentiable any number of times.

    Args:
        x: ``(N, C, *spatial)``.
        gamma, beta: ``(C,)`` each, or ``None`` for one and zero.
        statistics: mean and variance to normalise with, or ``None`` for those of the batch.
        eps: added to the variance.
        group: the processes whose batches count as one, or ``None`` for this one's alone.
    """
    if statistics is not None:
        return F.batch_norm(x, statistics.mean.to(x.dtype), statistics.var.to(x.dtype), gamma, beta, False, 0.0, eps)
    if group is None:
        return F.batch_norm(x, None, None, gamma, beta, True, 0.0, eps)
    return synchronised_batch_norm(x, gamma, beta, eps, group)[0]


def norm_relu_gradients(
    x: Tensor,
    norm: FoldedNorm,
    pending: Pending,
    dz: Tensor,
    exchange: Exchange | None,
    need_x: bool,
    scratch: Scratch,
) -> tuple[Tensor | None, Tensor | None]:
    """What is left of the way back through a norm alone: the rows ``dz`` become ``dx``; then dgamma and dbeta.

    Args:
        x: ``(m, C)``, what the norm read.
        norm: how it ran.
        pending: of the pass that has given ``dz``.
        dz: ``(m, C)``, the masked gradient at its output.
        exchange: where its statistics are the batch's, else ``None``.
        need_x: whether ``dx`` is wanted.
        scratch: working memory.
    """
    passes = implementation(x.device, x.dtype)
    sums, count = None, x.shape[0]
    if exchange is not None:
        sums, count = norm.mean.new_zeros((2, x.shape[1])), exchange.count
    gradients = passes.finish_backward(pending, norm, None, count, sums, scratch)
    if need_x:
        correction = None
        if exchange is not None:
            exchange.sums(sums)
            correction = Correction(*sums.unbind(0), norm.mean)
        passes.correct(x, dz, norm.scale, correction, dz, scratch)
    return gradients.gamma, gradients.beta


class _NormReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gamma, beta, mean, var, eps, exchange):
        passes, scratch = implementation(x.device, x.dtype), Scratch(x.device)
        norm = passes.fold(mean, var, gamma, beta, eps, exchange is not None, None, 0, scratch)
        z = channels_last_empty(x, x.shape[1])
        passes.norm_relu(as_rows(x), norm, as_rows(z), scratch)
        ctx.save_for_backward(x, gamma, beta, mean, var)
        ctx.eps, ctx.exchange = eps, exchange
        return z

    @staticmethod
    def backward(ctx, dz):
        x, gamma, beta, mean, var = ctx.saved_tensors
        exchange, batch = ctx.exchange, ctx.exchange is not None
        need_x, need_gamma, need_beta = ctx.needs_input_grad[:3]
        if must_rebuild(dz):
            arguments = (Statistics(mean, var), ctx.eps, exchange)
            gradients = rebuilt_gradients(
                lambda *tensors: norm_relu_reference(*tensors, *arguments),
                (x, gamma, beta), (need_x, need_gamma, need_beta), dz,
            )  # fmt: skip
            return *gradients, None, None, None, None

        passes, scratch = implementation(x.device, x.dtype), Scratch(x.device)
        norm = passes.fold(mean, var, gamma, beta, ctx.eps, batch, None, 0, scratch)
        dx, rows = channels_last_empty(x, x.shape[1]), as_rows(x)
        dx_rows = as_rows(dx)
        grad = dz.flatten(2).transpose(1, 2)
        need = Need(need_gamma or need_beta or batch)
        pending = passes.norm_relu_backward(rows, norm, grad, dx_rows, None, need, scratch)
        dgamma, dbeta = norm_relu_gradients(rows, norm, pending, dx_rows, exchange, need_x, scratch)
        return (
            dx if need_x else None, dgamma if need_gamma else None, dbeta if need_beta else None, None, None, None, None
        )  # fmt: skip


def norm_relu_reference(
    x: Tensor, gamma: Tensor, beta: Tensor, statistics: Statistics, eps: float, exchange: Exchange | None
) -> Tensor:
    """``relu(batch_norm(x))`` by torch; the same arguments as :func:`norm_relu`."""
    group = None if exchange is None else exchange.group
    return F.relu(batch_norm_reference(x, gamma, beta, None if exchange else statistics, eps, group))


def norm_relu(
    x: Tensor, gamma: Tensor, beta: Tensor, statistics: Statistics, eps: float, exchange: Exchange | None
) -> Tensor:
    """``relu(gamma (x - mean) / sqrt(var + eps) + beta)`` with given statistics, in tiles that stay in the cache.

    Equivalent to :func:`norm_relu_reference`; as fast on a slice of channels of a wider channels-last tensor.

    Args:
        x: the features.
        gamma, beta: ``(C,)`` each, or ``None`` for one and zero.
        statistics: mean and variance of x, or running ones.
        eps: added to the variance.
        exchange: where the statistics are those of ``x`` itself, so that gradients flow through them; else ``None``.

    Shape:
        - x: ``(N, C, *spatial)``
        - returns: the same, channels-last
    """
    return _NormReLU.apply(x, gamma, beta, statistics.mean, statistics.var, eps, exchange)
