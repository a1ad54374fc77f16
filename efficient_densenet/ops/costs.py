"""What an operator of this package launches and moves, for whoever counts it; torch's own operators need no word.

A dispatch mode sees that an operator was called, not what its kernels do. By its schema alone a call is one launch that
reads every argument once and writes what the schema marks as written and what it returns. Where that is not so, the
operator says so here::

    @cost_of("efficient_densenet::normalise")
    def _(x, scale, out):
        return Cost(read=nbytes(x) + nbytes(scale), loaded=2 * nbytes(x) + nbytes(scale))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Cost:
    """One call of an operator, in launches and bytes; ``None`` is what its schema says.

    Attributes:
        launches: kernels.
        read: bytes of the elements its kernels read, each once per launch.
        written: bytes of those they write.
        loaded: bytes their loads ask for, an element as often as it is loaded; by default as ``read``.
    """

    launches: int = 1
    read: int | None = None
    written: int | None = None
    loaded: int | None = None


COSTS: dict[str, Callable[..., Cost]] = {}
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}


def cost_of(operator: str) -> Callable[[Callable[..., Cost]], Callable[..., Cost]]:
    """Declares an operator's costs: a function of the operator's own arguments, which may be without data.

    Args:
        operator: its full name, ``"namespace::name"``.
    """

    def declare(formula: Callable[..., Cost]) -> Callable[..., Cost]:
        COSTS[operator] = formula
        return formula

    return declare


def made_of(operator: str, implementation: Callable[..., Any]) -> None:
    """Declares that an operator is nothing but other operators: those that ``implementation`` calls are counted.

    Args:
        operator: its full name, ``"namespace::name"``.
        implementation: takes the operator's arguments and returns what it returns.
    """
    IMPLEMENTATIONS[operator] = implementation


def nbytes(tensor: Tensor) -> int:
    """Bytes of the elements of a tensor in memory: dimensions it was expanded to count once.

    Example:
        >>> nbytes(torch.zeros(3, 1).expand(3, 100))
        12
    """
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride or not size else 1
    return elements * tensor.element_size()
