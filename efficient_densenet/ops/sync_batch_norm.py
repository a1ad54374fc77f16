"""BatchNorm over the batches of all processes, on any device."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .batch_norm import move_running_statistics, synchronised_batch_norm, synchronised_over


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """``torch.nn.SyncBatchNorm``, which DistributedDataParallel and CPUs (gloo) accept too.

    In the efficient modes a dense block exchanges the statistics of a feature once, for all layers that read it, and
    nothing when it rebuilds something in its backward pass; it does so for torch's own SyncBatchNorm as well.

    Args: as torch's, and with its parameters, buffers and state-dict keys.
        process_group: the processes whose batches count as one; all of them if ``None``.

    Shape:
        - input: ``(N, C, *spatial)``
        - output: the same
    """

    def __init__(self, num_features, eps=1e-5, momentum=0.1, affine=True, track_running_stats=True,
                 process_group=None, device=None, dtype=None):  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        group = synchronised_over(self)
        if group is None:
            return super().forward(input)
        self._check_input_dim(input)
        y, statistics, count = synchronised_batch_norm(input, self.weight, self.bias, self.eps, group)
        move_running_statistics([(self, statistics)], count)
        return y

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """Turns every BatchNorm of a model into this one, in place; returns the model.

        What a norm holds stays as it is: parameters, buffers, settings, hooks. A norm that goes on to call its own
        children (timm's norm-and-activation) still does. What is synchronised already stays so, over the processes
        given here or else over its own.

        Args:
            module: the model, or a norm.
            process_group: the processes whose batches count as one; all of them if ``None``.

        Raises:
            ValueError: a BatchNorm of a type of its own, of which nobody knows what it computes; named. Nothing has
                been converted then.
        """
        any_norm = nn.modules.batchnorm._BatchNorm
        found = [(name, norm) for name, norm in module.named_modules() if isinstance(norm, any_norm)]
        types = [_synchronised_type(norm, cls) for _, norm in found]
        refused = [
            f"{name or 'the module itself'} is a {type(norm).__module__}.{type(norm).__qualname__}"
            for (name, norm), kind in zip(found, types, strict=True)
            if kind is None
        ]
        if refused:
            more = f" (and {len(refused) - 5} more)" if len(refused) > 5 else ""
            raise ValueError(
                f"module cannot be converted: {', '.join(refused[:5])}{more}, which may compute something else than "
                "torch.nn.BatchNorm1d, 2d and 3d do; put one of those, initialised, in its place"
            )
        for (_, norm), kind in zip(found, types, strict=True):
            norm.__class__ = kind
            norm.process_group = process_group or norm.__dict__.get("process_group")
        return module


class SyncBatchNormThen(SyncBatchNorm):
    """A synchronised BatchNorm, and behind it its own children in their order."""

    def forward(self, input: Tensor) -> Tensor:
        x = super().forward(input)
        for child in self._modules.values():
            x = child(x)
        return x


def _synchronised_type(norm: nn.Module, plain: type[SyncBatchNorm]) -> type[SyncBatchNorm] | None:
    """What computes the same as ``norm``, over all processes; ``None`` where that is not known."""
    kind = type(norm)
    if issubclass(kind, SyncBatchNorm):
        return kind
    if "forward" in norm.__dict__ or isinstance(norm, nn.modules.lazy.LazyModuleMixin):
        return None
    if kind is nn.SyncBatchNorm or kind.forward is nn.BatchNorm2d.forward and not norm._modules:
        return plain
    return SyncBatchNormThen if norm._modules and _calls_its_children(norm) else None


def _calls_its_children(norm: nn.Module) -> bool:
    """Whether its forward is BatchNorm's, and then its children's in their order: tried, on copies with other values."""
    kinds = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}
    dims = next((dims for kind, dims in kinds.items() if isinstance(norm, kind)), None)
    if dims is None:
        return False
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            first = copy.deepcopy(norm).to_empty(device="cpu").double()
            for tensor in (*first.parameters(), *first.buffers()):
                tensor.uniform_(0.5, 1.5) if tensor.is_floating_point() else tensor.zero_()
            for part in first.modules():
                for hooks in (part._forward_hooks, part._forward_pre_hooks):
                    hooks.clear()
            second = copy.deepcopy(first)
            for training in (False, True):
                x = torch.randn(4, norm.num_features, *(3,) * dims, dtype=torch.float64)
                seed = torch.random.get_rng_state()
                got = first.train(training)(x.clone())
                torch.random.set_rng_state(seed)
                want = nn.BatchNorm2d.forward(second.train(training), x)
                for child in second._modules.values():
                    want = child(want)
                if not torch.equal(got, want):
                    return False
            return all(map(torch.equal, first.buffers(), second.buffers()))
    except Exception:  # whatever a type of somebody's own raises
        return False
