"""The memory of a training step: predicted, counted on tensors without data, or measured from real allocations."""

from .count import StepCount, count_step
from .estimate import MemoryEstimate, estimate_memory, fit_batch_size
from .measure import Allocations, measure_allocations, measure_step
from .plan import fit_plan

__all__ = [
    "Allocations", "MemoryEstimate", "StepCount",
    "count_step", "estimate_memory", "fit_batch_size", "fit_plan", "measure_allocations", "measure_step",
]  # fmt: skip
