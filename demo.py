#!/usr/bin/env python
"""Train a DenseNet on images, in a fraction of the memory.

One GPU, or the CPU:

    python demo.py --efficient True --batch_size 128 --n_epochs 1
    python demo.py --dataset cifar10 --depth 190 --growth_rate 40
    python demo.py --dataset imagefolder --data /data/imagenet --image_size 224 --model densenet121 --n_epochs 90

Several GPUs of one machine, one process each (or as many CPU processes; without torchrun: DataParallel, slower):

    torchrun --nproc_per_node=4 demo.py --batch_size 64

Several machines, the same line on each of them:

    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 demo.py

Batch size and learning rate are per GPU. Without --dataset: CIFAR-10 where it can be had, else scikit-learn's digits.
``python demo.py --help`` lists all flags. A run leaves results.csv, model.dat, config.json and curves.png in its folder,
prints a line per epoch, and ends with the test error of model.dat. A mistake in the flags is one line on standard error
and exit code 2, before anything is done.
"""

import functools
import secrets
import sys
import time

try:
    import fire, matplotlib, sklearn, torch, torchvision, tqdm  # noqa: E401, F401
except ImportError as error:
    sys.exit(f"demo.py: error: {error}; pip install -e '.[demo]' brings everything")

import efficient_densenet
from efficient_densenet.training import data, distributed, engine, log
from efficient_densenet.training.config import RunError, UsageError, parse_flags


def build_model(config, num_classes, in_channels):
    """The network that the flags describe; the library's objections become a :class:`UsageError`."""
    shape = {"drop_rate": config.drop_rate, "num_classes": num_classes, "in_channels": in_channels}
    try:
        if config.model is not None:
            return getattr(efficient_densenet, config.model)(efficient=config.efficient, **shape)
        return efficient_densenet.densenet_bc(
            config.depth, config.growth_rate, compression=config.compression, efficient=config.efficient, **shape
        )
    except ValueError as error:  # it names the argument, and the flag is called the same
        raise UsageError(f"--{error}") from None


def describe(model, config):
    """The model in a line: shape, size, and what its blocks run."""
    name = config.model or f"densenet_bc (depth {config.depth}, growth rate {config.growth_rate})"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    runs = ", ".join(dict.fromkeys(f"{plan.runs} ({plan.reason})" if plan.reason else plan.runs for plan in model.execution_plan()))
    return f"model: {name}, {parameters:,} parameters, efficient={model.efficient}, blocks run: {runs}"


def train(config, world):
    """One run, from the flags to the test error."""
    say = functools.partial(print, flush=True) if world.is_main else lambda *_: None

    # What can be wrong is found out before anything is written.
    results = world.on_main(lambda: log.Results(config.save, config.overwrite))
    seed = world.on_main(lambda: secrets.randbelow(2**32) if config.seed is None else config.seed)
    images = data.load(config, world, seed)
    torch.manual_seed(seed)
    model = build_model(config, images.num_classes, images.in_channels).to(world.device)
    smallest = min(images.facts["image_size"])
    if smallest < model.min_size:
        raise UsageError(f"--image_size: images of {smallest} pixels are too small for this model, it takes {model.min_size}")

    sampler = data.TrainSampler(len(images.train), world, seed, config.max_steps and config.max_steps * config.batch_size * world.gpus)
    train_batches = data.batches(images.train, sampler, config, world)
    valid_batches, test_batches = (
        part and data.batches(part, data.EvalSampler(len(part), world), config, world) for part in (images.valid, images.test)
    )
    lr = engine.scaled_lr(config, world)
    optimizer = torch.optim.SGD(
        model.parameters(), lr, config.momentum, weight_decay=config.wd, nesterov=config.momentum > 0
    )
    scheduler = engine.scheduler(optimizer, config, lr / config.lr)

    facts, batch = images.facts, config.batch_size
    say(f"data: {facts['name']}" + (f" (CIFAR-10: {facts['note']})" if facts["note"] else ""))
    say("{train_images:,} training, {valid_images:,} validation, {test_images:,} test images".format(**facts))
    say(describe(model, config))
    say(f"{world} x {batch} = {world.replicas * batch} images per step, lr {lr:g}")
    if world.gpus > 1:
        say(f"DataParallel on {world.gpus} GPUs; torchrun --nproc_per_node={world.gpus} demo.py is faster")
    settings = log.settings_of(config, world, facts, seed=seed, save=results.folder)
    world.on_main(lambda: results.begin(settings))
    say(f"results: {results.folder}")

    trained = world.wrap(model)  # what is called in training; `model` holds the weights
    evaluated = trained if world.gpus > 1 else model
    torch.manual_seed(seed + 1 + world.rank)  # dropout differs between ranks
    memory = log.PeakMemory(world.devices)
    best_error, began = float("inf"), time.monotonic()
    show_bar = world.is_main and (sys.stderr.isatty() if config.progress is None else config.progress)
    for epoch in range(config.n_epochs):
        memory.reset()
        sampler.set_epoch(epoch)
        totals, start = engine.Totals(world.device), time.monotonic()
        bar = log.Bar(f"epoch {epoch + 1}/{config.n_epochs}", sampler.images * world.size, 0, show_bar)
        engine.train_epoch(trained, train_batches, optimizer, world, totals, bar)
        bar.close()
        train_loss, train_error = totals.over_ranks(world)
        seconds = time.monotonic() - start

        world.average_buffers(model)
        valid_loss, valid_error = engine.evaluate(evaluated, valid_batches, world) if valid_batches else (None, None)
        peaks = [peak for rank_peaks in world.gather(memory.read()) for peak in rank_peaks]
        row = {
            "epoch": epoch + 1,
            "train_loss": train_loss,
            "train_error": train_error,
            "valid_loss": valid_loss,
            "valid_error": valid_error,
            "lr": scheduler.get_last_lr()[0],
            "images_per_s": sampler.images * world.size / seconds,
            "peak_mib": max(peaks),
        }
        improved = valid_error is None or valid_error < best_error
        best_error = valid_error if improved else best_error
        world.on_main(lambda: results.after_epoch(row, model if improved else None))
        left = (time.monotonic() - began) / (epoch + 1) * (config.n_epochs - epoch - 1)
        say(log.epoch_line(row, config.n_epochs, peaks, left))
        scheduler.step()

    world.on_main(lambda: results.load_model(model))
    world.broadcast(model)
    _, test_error = engine.evaluate(evaluated, test_batches, world)
    world.on_main(lambda: results.finish(test_error))
    say(f"test error: {test_error:.4f}")


def main():
    """Reads the flags, then trains; what a line can explain is explained in a line."""
    try:
        config = parse_flags(sys.argv[1:])
        with torch.device("meta"):  # the library's checks of the flags, without its work
            build_model(config, num_classes=10, in_channels=3)
        with distributed.start(config) as world:
            train(config, world)
    except (UsageError, RunError) as error:
        if distributed.speaks_for(error):
            print(f"demo.py: error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    main()
