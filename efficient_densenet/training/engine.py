"""The training loop: schedule, steps, evaluation."""

import contextlib
import math

import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

LOOK_EVERY = 50  # steps after which the loss is looked at


class Totals:
    """Sums over images, kept on the device: asking for them waits for it, adding to them does not."""

    def __init__(self, device):
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, loss_sum, logits, labels):
        """Adds a batch, whose losses sum to ``loss_sum``."""
        errors = (logits.argmax(1) != labels).sum().double()
        self.sums += torch.stack([loss_sum.double(), errors, torch.full_like(errors, len(labels))])

    def means(self):
        """Mean loss and share of errors so far; NaN before the first image."""
        loss, errors, images = self.sums.tolist()
        return (loss / images, errors / images) if images else (math.nan, math.nan)

    def are_finite(self):
        """Whether every loss so far was a number."""
        return math.isfinite(self.sums[0].item())

    def over_ranks(self, world):
        """Mean loss and share of errors over the images of all ranks."""
        loss, errors, images = world.sum(self.sums).tolist()
        return loss / images, errors / images


def step_lr(config, world):
    """The learning rate of a step: ``lr`` times the batches in it, or times their root, or ``lr`` itself."""
    batches = world.replicas * config.accumulation_steps
    return config.lr * {"linear": batches, "sqrt": math.sqrt(batches), "none": 1}[config.lr_scaling]


def warmup_epochs(config, world):
    """Epochs of rising rate: as the flags say, or 5 where the rate is scaled up."""
    return (5 if step_lr(config, world) > config.lr else 0) if config.warmup_epochs is None else config.warmup_epochs


def describe_step(config, world):
    """What a step takes, in a line: ``4 GPUs x 128 = 512 images per step, lr 0.4``."""
    accumulated = f" x {config.accumulation_steps} accumulation steps" if config.accumulation_steps > 1 else ""
    images = world.replicas * config.batch_size * config.accumulation_steps
    warmup = warmup_epochs(config, world)
    rate = f"lr {step_lr(config, world):g}" + (f" after {warmup} warm-up epochs" if warmup else "")
    rate += " (the run is over by then)" if warmup >= config.n_epochs else ""
    hint = f" (by DataParallel; torchrun --nproc_per_node={world.gpus} demo.py is faster)" if world.gpus > 1 else ""
    return f"{world} x {config.batch_size}{accumulated} = {images} images per step, {rate}{hint}"


@torch.no_grad()
def least_batch(model, image_size):
    """Images that a batch must have for BatchNorm in training: two where an image leaves it one value per channel.

    Args:
        model: A network on the meta device.
        image_size: Height and width.
    """
    image = torch.empty(1, model.in_channels, *image_size, device="meta")
    return 2 if model.set_efficient(False).eval().forward_features(image).shape[2:].numel() == 1 else 1


def scheduler(optimizer, config, world):
    """The learning rate's course, stepped once per epoch.

    ``multistep`` divides by ten when 50 % of the epochs are done, and again at 75 %, never before. ``cosine`` falls
    from the end of the warm-up towards zero. In a warm-up of w epochs, epoch e (from 0) has (e + 1) / (w + 1) of the
    rate.
    """
    warmup = warmup_epochs(config, world)

    def factor(epoch):
        if epoch < warmup:
            return (epoch + 1) / (warmup + 1)
        if config.schedule == "multistep":
            return 0.1 ** sum(epoch >= share * config.n_epochs for share in (0.5, 0.75))
        return (1 + math.cos(math.pi * (epoch - warmup) / max(config.n_epochs - warmup, 1))) / 2

    return lr_scheduler.LambdaLR(optimizer, factor)


def averaged(model, decay):
    """An exponential moving average of the model's weights and of its BatchNorm statistics."""

    def update(averages, values, _):
        if averages[0].is_floating_point():
            torch._foreach_lerp_(averages, values, 1 - decay)
        else:  # counters
            torch._foreach_copy_(averages, values)

    return AveragedModel(model, multi_avg_fn=update, use_buffers=True)


def _to_device(batch, config, world):
    images, labels = batch
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    images = images.to(world.device, non_blocking=True, memory_format=layout)
    return images, labels.to(world.device, non_blocking=True)


def _precision(config, world):
    """Autocast where ``--amp`` asks for it."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.amp)
    return torch.autocast(world.device.type, dtype) if dtype else contextlib.nullcontext()


def loss_sum(logits, labels, told, config):
    """The sum over the images of ``(1 - a) CE(s, label) + a D(s, t)``, with s the student's logits, t the teacher's.

    ``soft``: ``D = T² KL(softmax(t / T) || softmax(s / T))``; the factor keeps its gradient as large as the first term's
    for any temperature T. ``hard``: ``D = CE(s, argmax t)``. The first term alone has the label smoothing.

    Args:
        logits: s, ``(N, classes)``, in float32.
        labels: ``(N,)``.
        told: t, or None where there is no teacher; then ``a = 0``.
        config: The flags.

    Source: Hinton, Vinyals, Dean, Distilling the Knowledge in a Neural Network, 2015 (arXiv:1503.02531), section 2;
    hard labels: Touvron et al., Training data-efficient image transformers, 2021 (arXiv:2012.12877), section 4.
    """
    given = F.cross_entropy(logits, labels, label_smoothing=config.label_smoothing, reduction="sum")
    if told is None:
        return given
    if config.distill == "hard":
        distilled = F.cross_entropy(logits, told.argmax(1), reduction="sum")
    else:
        temperature = config.distill_temperature
        ours, theirs = ((values / temperature).log_softmax(1) for values in (logits, told.to(logits.dtype)))
        distilled = temperature**2 * F.kl_div(ours, theirs, reduction="sum", log_target=True)
    return (1 - config.distill_alpha) * given + config.distill_alpha * distilled


def train_steps(model, batches, state, config, world):
    """Trains to the end of the epoch; yields the number of this rank's images after each optimizer step.

    A step takes ``accumulation_steps`` batches, the last one of the epoch what is left. Its loss is the mean over its
    images, however they are spread over batches; gradients go from rank to rank once per step.

    Args:
        model: What is called: ``state.model``, or what wraps it.
        batches: A loader whose sampler gives the rest of the epoch.
        state: What is trained.
    """
    model.train()
    left = len(batches.sampler)
    size = min(left, config.batch_size * world.gpus * config.accumulation_steps)
    done = 0
    for batch in batches:
        images, labels = _to_device(batch, config, world)
        done += len(labels)
        complete = done == size
        with contextlib.nullcontext() if complete or not world.distributed else model.no_sync():
            with _precision(config, world):
                with torch.no_grad():
                    told = None if state.teacher is None else state.teacher(images)
                logits = model(images)
            loss = loss_sum(logits.float(), labels, told, config)
            state.scaler.scale(loss / size).backward()
        state.totals.add(loss.detach(), logits.detach(), labels)
        if not complete:
            continue
        if config.clip_grad:
            state.scaler.unscale_(state.optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad()
        if state.ema is not None:
            state.ema.update_parameters(state.model)
        state.step += 1
        yield size
        left -= size
        size, done = min(left, size), 0


@torch.inference_mode()
def evaluate(model, batches, config, world):
    """Mean loss and share of errors over the images of all ranks, every image counted once."""
    model.eval()
    totals = Totals(world.device)
    for batch in batches:
        images, labels = _to_device(batch, config, world)
        with _precision(config, world):
            logits = model(images).float()
        totals.add(F.cross_entropy(logits, labels, reduction="sum"), logits, labels)
    return totals.over_ranks(world)
