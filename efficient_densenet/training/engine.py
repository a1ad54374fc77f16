"""The training loop: schedule, steps, evaluation."""

import math

import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler


class Totals:
    """Sums over images, kept on the device: asking for them waits for it, adding to them does not."""

    def __init__(self, device):
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, loss_sum, logits, labels):
        """Adds a batch, whose losses sum to ``loss_sum``."""
        errors = (logits.argmax(1) != labels).sum()
        images = torch.tensor(len(labels), device=errors.device)
        self.sums += torch.stack([loss_sum.double(), errors.double(), images.double()])

    def means(self):
        """Mean loss and share of errors so far; NaN before the first image."""
        loss, errors, images = self.sums.tolist()
        return (loss / images, errors / images) if images else (math.nan, math.nan)

    def over_ranks(self, world):
        """Mean loss and share of errors over the images of all ranks."""
        loss, errors, images = world.sum(self.sums).tolist()
        return loss / images, errors / images


def scaled_lr(config, world):
    """The learning rate of a step on all replicas: ``lr`` times their number, or its root, or ``lr`` itself."""
    return config.lr * {"linear": world.replicas, "sqrt": math.sqrt(world.replicas), "none": 1}[config.lr_scaling]


def scheduler(optimizer, config, scale):
    """The learning rate's course, stepped once per epoch.

    ``multistep`` divides by ten when 50 % of the epochs are done, and again at 75 %, never before. ``cosine`` falls from
    the end of the warm-up towards zero. In a warm-up of w epochs, epoch e (from 0) has (e + 1) / (w + 1) of the rate.

    Args:
        optimizer: With the scaled rate.
        config: The flags.
        scale: How much the rate was scaled up: above 1, a warm-up of 5 epochs is the default.
    """
    warmup = (5 if scale > 1 else 0) if config.warmup_epochs is None else config.warmup_epochs

    def factor(epoch):
        if epoch < warmup:
            return (epoch + 1) / (warmup + 1)
        if config.schedule == "multistep":
            return 0.1 ** sum(epoch >= share * config.n_epochs for share in (0.5, 0.75))
        return (1 + math.cos(math.pi * (epoch - warmup) / (config.n_epochs - warmup))) / 2

    return lr_scheduler.LambdaLR(optimizer, factor)


def train_epoch(model, loader, optimizer, world, totals, bar):
    """Trains on every batch of the loader and adds what it saw to ``totals``."""
    model.train()
    for images, labels in loader:
        images, labels = images.to(world.device, non_blocking=True), labels.to(world.device, non_blocking=True)
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        totals.add(loss.detach() * len(labels), logits.detach(), labels)
        bar.advance(len(labels) * world.size, totals)


@torch.inference_mode()
def evaluate(model, loader, world):
    """Mean loss and share of errors over the images of all ranks, every image counted once."""
    model.eval()
    totals = Totals(world.device)
    for images, labels in loader:
        images, labels = images.to(world.device, non_blocking=True), labels.to(world.device, non_blocking=True)
        logits = model(images).float()
        totals.add(F.cross_entropy(logits, labels, reduction="sum"), logits, labels)
    return totals.over_ranks(world)
