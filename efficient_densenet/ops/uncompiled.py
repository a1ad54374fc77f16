"""A call that torch.compile leaves alone; importing this module loads the compiler, which takes seconds."""

from collections.abc import Callable

import torch
from torch import Tensor


@torch.compiler.disable
def call(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``run(x)``, as it is.

    The compiler would trace a checkpointed block's recomputation away, and cannot trace statistics over processes. Such a
    block runs uncompiled, between the compiled parts before and behind it.
    """
    return run(x)
