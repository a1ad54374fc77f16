"""What a training step takes in every mode, and the largest batch for the usual sizes of memory.

python -m efficient_densenet.memory --model densenet121 --batch_size 64 --image_size 224 --dtype bf16
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models import (
    MODES as EVERY_MODE, DenseNet, densenet121, densenet161, densenet169, densenet201, densenet264, densenet_bc,
)  # fmt: skip
from .estimate import AUTOCAST, Line, MemoryEstimate, bytes_of, rehearsal

MODES = tuple(mode for mode in EVERY_MODE if mode != "auto")
BUDGETS = tuple(f"{size}GB" for size in (8, 12, 16, 24, 40, 80))
IMAGENET = {make.__name__: make for make in (densenet121, densenet161, densenet169, densenet201, densenet264)}
OPTIMIZERS: dict[str, Callable | None] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": torch.optim.Adam,
    "none": None,
}
MIB = 2**20


@dataclass(frozen=True)
class Answer:
    """Of one mode.

    Attributes:
        estimate: of the step asked for.
        largest: the largest batch for each of :data:`BUDGETS`; 0 where not even one image fits.
    """

    estimate: MemoryEstimate
    largest: tuple[int, ...]


def network(flags: argparse.Namespace) -> nn.Module:
    """The network that the flags name, without data."""
    with torch.device("meta"):
        if flags.model == "densenet_bc":
            return densenet_bc(flags.depth, flags.growth_rate)
        if flags.model == "densenet3d":
            return DenseNet(
                32, (6, 12), num_init_features=64, small_inputs=False, in_channels=1, spatial_dims=3
            )
        return IMAGENET[flags.model]()


def cross_entropy(output: Tensor) -> Tensor:
    return F.cross_entropy(output.float(), torch.zeros(len(output), dtype=torch.int64, device=output.device))


def answer(flags: argparse.Namespace, mode: str) -> Answer:
    """A step with the batch asked for, one near the largest batch, and one that checks it; lines between them."""
    model = network(flags)
    shape = (model.in_channels, *(flags.image_size,) * model.spatial_dims)
    dtype = None if flags.dtype == "float32" else flags.dtype
    with rehearsal(model, dtype, OPTIMIZERS[flags.optimizer], flags.device, cross_entropy) as step:
        line = Line(lambda batch: step((batch, *shape), mode))
        estimate = line.at(flags.batch_size)
        largest = []
        for budget in map(bytes_of, reversed(BUDGETS)):
            # The peak, a maximum of straight lines, lies below a line between two of its points and above it outside.
            inside = largest and line.reading(budget) >= min(line.known)
            largest.append(line.reading(budget) if inside else line.largest(budget, flags.batch_size))
    return Answer(estimate, tuple(reversed(largest)))


def table(flags: argparse.Namespace, answers: dict[str, Answer]) -> str:
    """All that is said."""
    name = flags.model if flags.model != "densenet_bc" else f"densenet_bc({flags.depth}, {flags.growth_rate})"
    sizes = "x".join([str(flags.image_size)] * (3 if flags.model == "densenet3d" else 2))
    optimizer = "no optimizer" if flags.optimizer == "none" else flags.optimizer
    columns = ("weights", "input", "gradients", "optimizer", "kept", "scratch", "peak")
    lines = [
        f"{name}, batch {flags.batch_size}, {sizes}, {flags.dtype}, {optimizer}, {flags.device}: "
        "a training step at its worst moment, predicted, in MiB",
        "",
        row("mode", columns),
    ]
    for mode, found in answers.items():
        e = found.estimate
        parts = (
            e.weight_bytes + e.buffer_bytes, e.input_bytes, e.gradient_bytes, e.optimizer_bytes, e.kept_bytes,
            e.scratch_bytes, e.peak_bytes,
        )  # fmt: skip
        lines.append(row(mode, [f"{part / MIB:,.1f}" for part in parts]))
    lines += ["", row("largest batch", [budget.replace("GB", " GB") for budget in BUDGETS])]
    lines += [row(mode, [f"{batch:,}" if batch else "none" for batch in found.largest]) for mode, found in answers.items()]
    if flags.device == "cuda":
        lines += ["", "Beside it a GPU holds the context (some hundred MiB), workspaces of cuDNN and cuBLAS, and what "
                  "the allocator cannot use."]  # fmt: skip
    return "\n".join(lines)


def row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<13}" + "".join(f"{cell:>11}" for cell in cells)


# The command line


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and exit code 2."""
        print("error:", " ".join(message.split()), file=sys.stderr)
        raise SystemExit(2)


def whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def read(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags, checked before any work."""
    parser = Parser(
        prog="python -m efficient_densenet.memory", allow_abbrev=False,
        description="Predicted memory of a training step in every mode, and the largest batch for 8 to 80 GB. Nothing is "
        "run: the model's own code goes over tensors without data, and the device need not be there.",
    )  # fmt: skip
    parser.add_argument("--model", choices=("densenet_bc", "densenet3d", *IMAGENET), default="densenet_bc",
                        help="densenet3d: blocks of 6 and 12 layers, growth rate 32, volumes of one channel")  # fmt: skip
    parser.add_argument("--depth", type=whole, help="of DenseNet-BC (default: 100)")
    parser.add_argument("--growth_rate", type=whole, help="of DenseNet-BC (default: 12)")
    parser.add_argument("--batch_size", type=whole, help="default: 64; densenet3d: 2")
    parser.add_argument("--image_size", type=whole, help="default: 32 (densenet_bc), 80 (densenet3d) or 224")
    parser.add_argument("--dtype", choices=("float32", *AUTOCAST), default="float32", help="bf16 and fp16: autocast")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd", help="sgd: with momentum")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what the step is meant for")
    flags = parser.parse_args(arguments)
    if flags.model == "densenet_bc":
        flags.depth, flags.growth_rate = flags.depth or 100, flags.growth_rate or 12
    for name in ("depth", "growth_rate"):
        if flags.model != "densenet_bc" and getattr(flags, name) is not None:
            parser.error(f"--{name} has no meaning for {flags.model}, whose shape is fixed")
    flags.batch_size = flags.batch_size or (2 if flags.model == "densenet3d" else 64)
    flags.image_size = flags.image_size or {"densenet_bc": 32, "densenet3d": 80}.get(flags.model, 224)
    try:
        least = network(flags).min_size
    except ValueError as error:
        parser.error(f"--{error}")
    if flags.image_size < least:
        parser.error(f"--image_size must be at least {least} for {flags.model}, got {flags.image_size}")
    return flags


def main(arguments: Sequence[str] | None = None) -> None:
    flags = read(arguments)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        # A mode is Python's work alone: one process for each of them, as far as there are cores.
        with ProcessPoolExecutor(min(cores, len(MODES)), multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(functools.partial(answer, flags), MODES))
    except RuntimeError as error:  # this torch cannot count for CUDA
        print("error:", error, file=sys.stderr)
        raise SystemExit(2) from None
    print(table(flags, dict(zip(MODES, found, strict=True))))
