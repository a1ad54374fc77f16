"""The memory of a training step: measured from real allocations, or counted on tensors without data."""

from .count import StepCount, count_step
from .measure import Allocations, measure_allocations, measure_step

__all__ = ["Allocations", "StepCount", "count_step", "measure_allocations", "measure_step"]
