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

from .rebuild import is_many, levels_of_batched_gradients, must_rebuild, rebuilt_gradients
from .storage import as_rows, channels_last_empty
from .tiles import as_type, fit, parts, tile_rows

masked_gradient = torch.ops.aten.threshold_backward.grad_input  # (dz, z, 0, grad_input=out): dz where z > 0, else 0


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
        dtype = torch.promote_types(norm.running_mean.dtype, torch.float32)
        return cls(norm.running_mean.to(dtype, copy=True), norm.running_var.to(dtype, copy=True))


class Moments:
    """Statistics of a matrix's columns from its tiles of rows, each taken while the tile is in the cache.

    Every tile's mean and variance come from differences to a mean, never from a bare sum of squares, and are merged by
    Chan, Golub and LeVeque's formula: as good as torch's for data with a large mean.
    """

    def __init__(self):
        self._tiles: list[tuple[int, Tensor, Tensor]] = []

    def add(self, rows: Tensor) -> None:
        count, width = rows.shape
        dtype = torch.promote_types(rows.dtype, torch.float32)
        if rows.device.type != "cpu" or count == 1:
            var, mean = torch.var_mean(rows.to(dtype), dim=0, correction=0)
        elif width % 8 == 0 and rows.is_contiguous() and dtype == rows.dtype:
            mean, var = torch.batch_norm_update_stats(rows, None, None, 0.0)
        else:  # narrow or strided: two products with a row of ones beat torch's reductions
            rows = rows.to(dtype)
            share = rows.new_full((1, count), 1.0 / count)
            near = torch.mm(share, rows)
            centred = rows - near
            rest = torch.mm(share, centred)
            mean = (near + rest)[0]
            var = torch.mm(share, centred.square_()).addcmul_(rest, rest, value=-1)[0]
        self._tiles.append((count, mean, var))

    def statistics(self) -> Statistics:
        if len(self._tiles) == 1:
            _, mean, var = self._tiles[0]
            return Statistics(mean, var)
        counts, means, variances = zip(*self._tiles, strict=True)
        return _merged(counts, torch.stack(means), torch.stack(variances))


def _merged(counts: Sequence[int], means: Tensor, variances: Tensor) -> Statistics:
    """Statistics of the union of several sets of values from those of each, ``(sets, C)``."""
    share = torch.tensor(counts, dtype=means.dtype, device=means.device).div_(sum(counts))
    mean = share @ means
    return Statistics(mean, share @ (variances + (means - mean).square_()))


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

    def statistics(self, own: Statistics) -> Statistics:
        """The statistics of all batches from those of each: the same bits on every process."""
        if self.group is None:
            return own
        flat = torch.cat((own.mean, own.var))
        gathered = [torch.empty_like(flat) for _ in self._counts]
        dist.all_gather(gathered, flat, group=self.group)
        means, variances = torch.stack(gathered).chunk(2, 1)
        return _merged(self._counts, means, variances)

    def sums(self, *own: Tensor) -> Sequence[Tensor]:
        """The sums over the processes, of vectors ``(C,)``."""
        if self.group is None:
            return own
        flat = torch.cat(own)
        dist.all_reduce(flat, group=self.group)
        return flat.split([len(t) for t in own])


def batch_statistics(rows: Tensor) -> Statistics:
    """Batch mean and biased variance of the columns of ``rows``, ``(m, C)``.

    Raises:
        ValueError: a single row, which has no variance.
    """
    moments = Moments()
    for tile in parts(rows, tile_rows(rows.shape[0], rows.shape[1] * rows.element_size(), rows.device)):
        moments.add(tile)
    return moments.statistics()


def check_count(count: int, shape: tuple[int, ...]) -> None:
    """Raises ValueError, as torch does, where a training BatchNorm would see one value per channel."""
    if count <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {shape}")


class FeatureStatistics:
    """The batch statistics of a buffer's channels, taken (and exchanged) once, when a layer first asks for them."""

    def __init__(self, features: Tensor, group: dist.ProcessGroup | None = None):
        self._shape = features.shape
        self._rows = as_rows(features)
        self.exchange = Exchange(group, self._rows.shape[0], features.device)
        self._mean: Tensor | None = None
        self._var: Tensor | None = None

    def first(self, channels: int) -> Statistics:
        """The statistics of the first ``channels`` channels, which must have been written by now."""
        if self._known < channels:
            check_count(self.exchange.count, (self._shape[0], channels, *self._shape[2:]))
            with torch.autocast(self._rows.device.type, enabled=False):  # it would take the products in half precision
                self._append(batch_statistics(self._rows[:, self._known : channels]))
        return Statistics(self._mean[:channels], self._var[:channels])

    def extend(self, start: int, channels: int, new: Statistics) -> None:
        """Take statistics of ``channels`` channels from ``start`` from whoever had them at hand, if they come next."""
        if self._known == start:
            self._append(Statistics(new.mean[:channels], new.var[:channels]))

    @property
    def _known(self) -> int:
        return 0 if self._mean is None else self._mean.shape[0]

    def _append(self, new: Statistics) -> None:
        new = self.exchange.statistics(new)
        # New vectors, not slices of one: what autograd has saved of the old ones stays untouched.
        self._mean = new.mean if self._mean is None else torch.cat((self._mean, new.mean))
        self._var = new.var if self._var is None else torch.cat((self._var, new.var))


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
        if momentum is None:
            momentum = 0.0 if counter is None else 1.0 / float(counter)
        move = (mean, var, as_type(batch.mean, mean.dtype), as_type(batch.var, var.dtype))
        together.setdefault(momentum, []).append(move)
    for factor, lists in together.items():
        means, variances, batch_means, batch_variances = zip(*lists, strict=True)
        torch._foreach_lerp_(means, batch_means, factor)
        torch._foreach_lerp_(variances, batch_variances, factor)
        torch._foreach_add_(variances, batch_variances, alpha=factor / (count - 1))


class FoldedNorm:
    """A BatchNorm with its statistics, folded into one scale and one shift per channel.

    Args:
        gamma, beta: the affine parameters, ``(C,)`` each, or ``None`` for one and zero.
        statistics: of the data, or running ones.
        eps: added to the variance.
        batch: whether the statistics are the data's own, so that gradients flow through them.
    """

    __slots__ = ("batch", "beta", "gamma", "mean", "r", "scale", "shift")

    def __init__(self, gamma: Tensor | None, beta: Tensor | None, statistics: Statistics, eps: float, batch: bool):
        self.mean, self.batch = statistics.mean, batch
        self.r = (statistics.var + eps).rsqrt_()
        self.gamma = torch.ones_like(self.r) if gamma is None else as_type(gamma, self.r.dtype)
        self.beta = torch.zeros_like(self.r) if beta is None else as_type(beta, self.r.dtype)
        self.scale = self.gamma * self.r
        self.shift = torch.addcmul(self.beta, self.mean, self.scale, value=-1)

    def relu(self, x: Tensor, out: Tensor) -> Tensor:
        """``relu(scale x + shift)`` of the rows ``x``, written to ``out``."""
        return torch.addcmul(self.shift, x, self.scale, out=out).relu_()

    def add_correction(self, slope: Tensor, level: Tensor, dbeta: Tensor, gamma_dgamma: Tensor, count: int) -> None:
        """Add what turns ``scale dz`` into BatchNorm's gradient, ``dx = scale dz + slope x + (level - slope mean)``.

        Args:
            slope, level: ``(C,)``; several norms that read the same channels may add to the same.
            dbeta: ``Σ dz``.
            gamma_dgamma: ``gamma dgamma = gamma r Σ dz (x - mean)``.
            count: m, the values per channel.
        """
        slope.addcmul_(self.r * self.r, gamma_dgamma, value=-1.0 / count)
        level.addcmul_(self.scale, dbeta, value=-1.0 / count)

    def complete_gradient(self, x: Tensor, dx: Tensor, correction: tuple[Tensor, Tensor] | None) -> None:
        """Turn the rows ``dx`` from ``dz`` into ``scale dz + slope x + level``, rounded once; ``None``: no more."""
        if correction is None:
            dx.mul_(self.scale)
            return
        slope, level = correction
        step = tile_rows(dx.shape[0], dx.shape[1] * dx.element_size(), dx.device)
        scratch = torch.empty((step, dx.shape[1]), dtype=self.scale.dtype, device=dx.device)
        for x_tile, tile in zip(parts(x, step), parts(dx, step), strict=True):
            added = torch.addcmul(level, x_tile, slope, out=fit(scratch, tile.shape[0]))
            torch.addcmul(added, tile, self.scale, out=tile)

    def correction(self, dbeta: Tensor, gamma_dgamma: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
        """``slope, level`` with ``dx = scale dz + slope x + level``, from this process's sums."""
        slope, level = torch.zeros((2, *self.mean.shape), dtype=self.mean.dtype, device=self.mean.device)
        self.add_correction(slope, level, dbeta, gamma_dgamma, exchange.count)
        slope, level = exchange.sums(slope, level)
        return slope, level.addcmul_(slope, self.mean, value=-1)


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


class _NormReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gamma, beta, mean, var, eps, exchange):
        norm = FoldedNorm(gamma, beta, Statistics(mean, var), eps, exchange is not None)
        z = channels_last_empty(x, x.shape[1])
        rows, z_rows = as_rows(x), as_rows(z)
        step = tile_rows(z_rows.shape[0], z_rows.shape[1] * z.element_size(), x.device)
        for x_tile, z_tile in zip(parts(rows, step), parts(z_rows, step), strict=True):
            norm.relu(x_tile, out=z_tile)
        ctx.save_for_backward(x, gamma, beta, mean, var, z)
        ctx.eps, ctx.exchange = eps, exchange
        return z

    @staticmethod
    def backward(ctx, dz):
        x, gamma, beta, mean, var, z = ctx.saved_tensors
        exchange, batch = ctx.exchange, ctx.exchange is not None
        need_x, need_gamma, need_beta = ctx.needs_input_grad[:3]
        if must_rebuild(dz):
            arguments = (Statistics(mean, var), ctx.eps, exchange)
            gradients = rebuilt_gradients(
                lambda *tensors: norm_relu_reference(*tensors, *arguments),
                (x, gamma, beta), (need_x, need_gamma, need_beta), dz,
            )  # fmt: skip
            return *gradients, None, None, None, None

        norm = FoldedNorm(gamma, beta, Statistics(mean, var), ctx.eps, batch)
        need_sums = need_gamma or need_beta or batch
        dx = channels_last_empty(x, x.shape[1])
        rows, z_rows, dz_rows, dx_rows = as_rows(x), as_rows(z), as_rows(dz), as_rows(dx)
        step = tile_rows(dx_rows.shape[0], dx_rows.shape[1] * dx.element_size(), x.device)
        tiles = [parts(t, step) for t in (rows, z_rows, dz_rows, dx_rows)]
        sum_dz, sum_dz_x = torch.zeros_like(mean), torch.zeros_like(mean)  # Σ dz and Σ dz (x - mean)
        for x_tile, z_tile, dz_tile, dx_tile in zip(*tiles, strict=True):
            masked_gradient(dz_tile, z_tile, 0, grad_input=dx_tile)
            if need_sums:
                sum_dz += dx_tile.sum(0, dtype=mean.dtype)
                sum_dz_x += torch.sub(x_tile, mean).mul_(dx_tile).sum(0)
        sum_dz_x *= norm.r
        dgamma = sum_dz_x.to(gamma.dtype) if need_gamma else None
        dbeta = sum_dz.to(beta.dtype) if need_beta else None
        if not need_x:
            return None, dgamma, dbeta, None, None, None, None
        correction = norm.correction(sum_dz, sum_dz_x * norm.gamma, exchange) if batch else None
        norm.complete_gradient(rows, dx_rows, correction)
        return dx, dgamma, dbeta, None, None, None, None


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
