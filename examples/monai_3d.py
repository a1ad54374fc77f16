"""A 3-D DenseNet of MONAI's on volumes, in a fraction of the memory: one line, ``make_efficient(model)``.

python examples/monai_3d.py
python examples/monai_3d.py --batch_size 1 --size 96 --steps 4 --mode lean

The volumes are random; a DataLoader of one's own goes in the place of ``volumes``.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from monai.networks.nets import DenseNet

from efficient_densenet import execution_plan, make_efficient
from efficient_densenet.memory import measure_step


def volumes(steps: int, batch_size: int, size: int):
    """Random scans of one channel, and their classes."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(batch_size, 1, size, size, size, generator=generator)
        yield x, torch.arange(batch_size) % 2


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--size", type=int, default=48)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--blocks", default="6,12,24,16", help="layers of the dense blocks; DenseNet-121's by default")
    parser.add_argument("--mode", default="fused")
    flags = parser.parse_args(arguments)

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    blocks = tuple(map(int, flags.blocks.split(",")))
    model = DenseNet(spatial_dims=3, in_channels=1, out_channels=2, block_config=blocks).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scan = torch.randn(flags.batch_size, 1, *[flags.size] * 3, device=device)
    before = measure_step(model, scan).peak_bytes

    make_efficient(model, flags.mode)  # the line; model, parameters, optimizer stay the same objects

    after = measure_step(model, scan).peak_bytes
    print(f"peak of a training step: {before / 2**20:,.0f} MiB as it is, {after / 2**20:,.0f} MiB now")
    for plan in execution_plan(model):
        print(f"{plan.block}: runs {plan.runs} {plan.reason}")
    losses = []
    for step, (x, target) in enumerate(volumes(flags.steps, flags.batch_size, flags.size), 1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(device)), target.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
