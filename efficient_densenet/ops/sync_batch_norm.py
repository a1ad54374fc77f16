"""BatchNorm over the batches of all processes, on any device."""

from __future__ import annotations

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
        """Turns every BatchNorm of a model into this one; returns the model (or what takes its place, if it is one)."""
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
        for norm in module.modules():
            if type(norm) is nn.SyncBatchNorm:
                norm.__class__ = cls
        return module
