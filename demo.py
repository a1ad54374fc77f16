#!/usr/bin/env python
"""Train a DenseNet on images, in a fraction of the memory.

One GPU, or the CPU:

    python demo.py --efficient True --batch_size 128 --n_epochs 1
    python demo.py --dataset cifar10 --depth 190 --growth_rate 40
    python demo.py --data /data/imagenet --image_size 224 --model densenet121 --n_epochs 90

Several GPUs of one machine, one process each (or as many CPU processes; without torchrun: DataParallel, slower):

    torchrun --nproc_per_node=4 demo.py --batch_size 64

Several machines, the same line on each of them:

    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 demo.py

On from where a run stopped (torchrun with --max-restarts does it by itself), and the test of what a run left:

    python demo.py --resume results/RUN
    python demo.py --evaluate results/RUN

Batch size and learning rate are per GPU. --data FOLDER is taken for what it holds; without it: CIFAR-10 where it can be
had, else scikit-learn's digits. ``python demo.py --help`` lists all flags. A run leaves results.csv, model.dat, config.json, checkpoint.pt and
curves.png in its folder, prints a line per epoch, and ends with the test error of model.dat. Ctrl-C and SIGTERM end it
after the step, with a checkpoint. A mistake in the flags is one line on standard error and exit code 2, before anything
is done.
"""

import contextlib
import dataclasses
import functools
import math
import sys

try:
    import fire, matplotlib, sklearn, torch, torchvision, tqdm  # noqa: E401, F401
except ImportError as error:
    sys.exit(f"demo.py: error: {error}; pip install -e '.[demo]' brings everything")
except KeyboardInterrupt:
    sys.exit(130)

import efficient_densenet
from efficient_densenet.training import budget, checkpoint, data, distillation, distributed, engine, log
from efficient_densenet.training.config import UsageError, parse_flags


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
    plans = [f"{plan.runs} ({plan.reason})" if plan.reason else plan.runs for plan in model.execution_plan()]
    runs = ", ".join(dict.fromkeys(plans))
    return f"model: {name}, {parameters:,} parameters, efficient={model.efficient}, blocks run: {runs}"


def find_images(config, world, say):
    """The data set that the flags describe, and how many images a batch must have for this model's BatchNorm."""
    images = data.load(config, world, config.seed)
    facts = images.facts
    with torch.device("meta"):  # shapes without weights
        model = build_model(config, images.num_classes, images.in_channels)
    if min(facts["image_size"]) < model.min_size:
        size = "x".join(map(str, facts["image_size"]))
        raise UsageError(
            f"--image_size: images of {size} pixels are too small, this model takes {model.min_size} and more"
        )
    say(f"data: {images.source}" + (f" (CIFAR-10: {facts['note']})" if facts["note"] else ""))
    say("{train_images:,} training, {valid_images:,} validation, {test_images:,} test images".format(**facts))
    for remark in images.remarks:
        say(remark)
    return images, engine.least_batch(model, facts["image_size"])


def make_model(config, images, world):
    """The network for these images, where it will run."""
    model = build_model(config, images.num_classes, images.in_channels).to(world.device)
    if config.sync_bn and world.size > 1:
        model = efficient_densenet.SyncBatchNorm.convert_sync_batchnorm(model)
    return model.to(memory_format=torch.channels_last) if config.channels_last else model


def start(config, images, world, teacher=None):
    """A run before its first step: the model, and what trains it, the teacher included."""
    model = make_model(config, images, world)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=engine.step_lr(config, world),
        momentum=config.momentum,
        weight_decay=config.wd,
        nesterov=config.momentum > 0,
    )
    return checkpoint.State(
        model=model,
        optimizer=optimizer,
        scheduler=engine.scheduler(optimizer, config, world),
        scaler=torch.amp.GradScaler(world.device.type, enabled=config.amp == "fp16"),
        ema=engine.averaged(model, config.ema_decay) if config.ema_decay else None,
        totals=engine.Totals(world.device),
        teacher=teacher and teacher.network(make_model, images, world),
    )


def train(config, world, say):
    """One run, from the flags to the test error."""
    # What can be wrong is found out before anything is written.
    results = world.together((world.is_main, lambda: log.Results(config)))
    config = world.on_main(lambda: dataclasses.replace(config, save=results.folder, seed=data.seed(config)))
    saved = world.on_main(lambda: checkpoint.read_run(config) if config.resume else None)
    known = world.on_main(lambda: config.resume and checkpoint.settings_in(config.save))
    teacher = world.together((True, lambda: distillation.read_teacher(config)))
    images, least = find_images(config, world, say)
    if teacher is not None:
        distillation.check(teacher, images, world)
        say(distillation.describe(teacher, config))
    begin = functools.partial(start, teacher=teacher)
    if not known:
        config = budget.choose(config, begin, images, least, world, say)
    settings = log.settings_of(config, world, images.facts, teacher and teacher.facts)
    if saved is not None:
        checkpoint.check(saved, settings)

    sampler = data.TrainSampler(len(images.train), world, config, least)
    train_batches = data.batches(images.train, sampler, config, world)
    valid_batches, test_batches = (
        part and data.batches(part, data.EvalSampler(len(part), world), config, world)
        for part in (images.valid, images.test)
    )
    torch.manual_seed(config.seed)
    state = begin(config, images, world)
    model, kept = state.model, state.kept  # `kept` is evaluated, and written to model.dat
    trained = world.wrap(model)  # what is called in training, while `model` holds the weights
    if config.compile:
        trained = torch.compile(trained)
    torch.manual_seed(config.seed + 1 + world.rank)  # dropout differs between ranks

    say(describe(model, config))
    say(engine.describe_step(config, world) + sampler.note)
    world.together((world.is_main, lambda: results.begin(settings, saved and saved["epoch"])))
    say(f"results: {config.save}")
    if saved is not None:
        state.restore(saved, world)
        say(f"goes on after {state.epoch} epochs and {state.step} steps")
    elif config.resume:
        say("no checkpoint yet: from the start")

    def save_checkpoint():
        world.together((True, lambda: state.check_finite(config.save)))
        content = state.capture(world) | {"settings": settings}
        world.together((world.is_main, lambda: results.save("checkpoint.pt", content)))

    meter, clock = log.Meter(world.devices), log.Clock()
    loaders = data.closing(train_batches, valid_batches, test_batches)
    with distributed.Signals() as signals, loaders, results or contextlib.nullcontext():
        while state.epoch < config.n_epochs:
            meter.reset()
            done = min(state.step * sampler.per_step, sampler.images)
            sampler.set_epoch(state.epoch, first=done)
            title, progress = f"epoch {state.epoch + 1}/{config.n_epochs}", world.is_main and config.progress
            with log.Bar(title, sampler.images * world.size, done * world.size, progress, say) as bar:
                for count in engine.train_steps(trained, train_batches, state, config, world):
                    bar.advance(count * world.size, state.totals)
                    meter.sample()
                    broken = state.step % engine.LOOK_EVERY == 0 and not state.totals.are_finite()
                    broken, stop = world.any(broken, signals.received is not None)
                    if broken or stop or config.save_every_steps and state.step % config.save_every_steps == 0:
                        save_checkpoint()
                    if stop:
                        raise distributed.Stopped(signals.received, f"in {title} after step {state.step}", config.save)
            train_loss, train_error = state.totals.over_ranks(world)
            world.together((True, lambda: state.check_finite(config.save)))

            for module in dict.fromkeys((model, kept)):
                world.average_buffers(module)
            valid_loss, valid_error = None, None
            if valid_batches is not None:
                valid_loss, valid_error = engine.evaluate(world.spread(kept), valid_batches, config, world)
            usages = [usage for of_rank in world.gather(meter.read()) for usage in of_rank]
            row = {
                "epoch": state.epoch + 1,
                "train_loss": train_loss,
                "train_error": train_error,
                "valid_loss": valid_loss,
                "valid_error": valid_error,
                "lr": state.scheduler.get_last_lr()[0],
                "images_per_s": bar.images_per_s,
                "peak_mib": max(usage.peak for usage in usages),
            }
            weights = kept.state_dict() if state.improves(valid_error) else None
            state.next_epoch(row)
            world.together((world.is_main, lambda: results.after_epoch(state.rows, weights, usages)))
            save_checkpoint()  # last: until it is there, the epoch is repeated
            say(log.epoch_line(row, config.n_epochs, usages, clock.left(config.n_epochs - state.epoch)))
            if world.any(signals.received is not None)[0] and state.epoch < config.n_epochs:
                raise distributed.Stopped(signals.received, f"after {title}", config.save)

        world.together((world.is_main, lambda: results.load_model(kept)))
        world.broadcast(kept)
        test_loss, test_error = engine.evaluate(world.spread(kept), test_batches, config, world)
        world.together((world.is_main, lambda: results.finish(state.rows, test_error)))
    say_test_error(test_loss, test_error, say)


def say_test_error(loss, error, say):
    """The last line of a run, and before it what makes it worthless."""
    if not math.isfinite(loss):
        say("the loss of the test images is not finite: the model's outputs are too large, and its error means little")
    say(f"test error: {error:.4f}")


def evaluate(config, world, say):
    """Tests a saved model."""
    config = world.on_main(lambda: dataclasses.replace(config, seed=data.seed(config)))
    images, _ = find_images(config, world, say)
    model = make_model(config, images, world)
    say(describe(model, config))
    world.together((True, lambda: checkpoint.load_weights(model, config.evaluate)))
    batches = data.batches(images.test, data.EvalSampler(len(images.test), world), config, world)
    with data.closing(batches):
        loss, error = engine.evaluate(world.spread(model), batches, config, world)
    say_test_error(loss, error, say)


def main():
    """Reads the flags, then trains; what a line can explain is explained in a line.

    Returns:
        The exit code.
    """
    log.open_console()
    try:
        config = checkpoint.recall(*parse_flags(sys.argv[1:]))
        with torch.device("meta"):  # the library's checks of the flags, without its work
            build_model(config, num_classes=10, in_channels=3)
        with distributed.start(config) as world:
            config = world.on_main(lambda: config)
            say = log.say if world.is_main else lambda *_: None
            evaluate(config, world, say) if config.evaluate else train(config, world, say)
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        told = error if hasattr(error, "exit_code") else data.explained(error)
        if told is None:
            raise
        if distributed.speaks_for(told):
            print(f"demo.py: {'' if isinstance(told, distributed.Stopped) else 'error: '}{told}", file=sys.stderr)
        return told.exit_code


if __name__ == "__main__":
    sys.exit(main())
