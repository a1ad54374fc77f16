"""The teacher of a run with knowledge distillation: a trained network, found by its file and made as it was."""

import dataclasses
import hashlib
import os
from dataclasses import dataclass

import torch

from ..models import weights
from . import checkpoint
from .config import UsageError

_SHAPE = ("model", "depth", "growth_rate", "compression")


@dataclass(frozen=True)
class Teacher:
    """What ``--teacher`` names, read and found fit before any work.

    Attributes:
        config: The flags that describe the network.
        weights: Its weights.
        facts: What config.json says of it: the file, its SHA-256, the shape, and what it was trained on, if known.
    """

    config: object
    weights: dict
    facts: dict

    def network(self, make, images, world):
        """The network where it will run, in evaluation mode and without gradients.

        Args:
            make: ``make(config, images, world)`` gives an untrained one.
        """
        model = make(self.config, images, world)
        try:
            weights.load_weights(model, self.weights)
        except ValueError as error:
            raise UsageError(f"--teacher {self.facts['file']}: {error}") from None
        return world.spread(model.eval().requires_grad_(False))


def read_teacher(config):
    """The teacher that the flags name, None where they name none.

    Raises:
        UsageError: There is no such file, or nothing says which network it is of.
    """
    if config.teacher is None:
        return None
    path = config.teacher
    folder, file = (path, os.path.join(path, "model.dat")) if os.path.isdir(path) else (os.path.dirname(path), path)
    if config.save is not None and os.path.realpath(folder) == os.path.realpath(config.save):
        raise UsageError(f"--teacher {path}: lies in --save {config.save}, where this run's own weights will be")
    found = checkpoint.read_weights(path, "--teacher")
    run = checkpoint.settings_in(folder)
    if config.teacher_model is not None:
        run = {name: run[name] for name in ("dataset", "images") if name in run} | {"model": config.teacher_model}
    elif not set(_SHAPE) <= set(run):
        raise UsageError(
            f"--teacher {path}: no config.json beside it says which network it is; add e.g. --teacher_model densenet121"
        )
    shape = {name: run[name] for name in _SHAPE if name in run}
    with open(file, "rb") as content:
        digest = hashlib.sha256(content.read()).hexdigest()
    facts = {"file": file, "sha256": digest, **shape, "dataset": run.get("dataset"),
             "classes": run.get("images", {}).get("classes")}  # fmt: skip
    return Teacher(dataclasses.replace(config, **shape, drop_rate=0.0, efficient="lean", sync_bn=False), found, facts)


def check(teacher, images, world):
    """Raises a :class:`UsageError` where a teacher was trained on other images, or the ranks have different ones."""
    facts, ours = teacher.facts, images.facts
    if len(set(world.gather(facts["sha256"]))) > 1:
        raise UsageError(f"--teacher {facts['file']}: the machines of this run have different files of this name")
    if facts["dataset"] not in (None, ours["name"]):
        raise UsageError(f"--teacher {facts['file']}: trained on {facts['dataset']}, and this run is on {ours['name']}")
    if facts["classes"] not in (None, ours["classes"]):
        raise UsageError(
            f"--teacher {facts['file']}: its {len(facts['classes'])} classes ({_some(facts['classes'])}) are not the "
            f"{len(ours['classes'])} of these images ({_some(ours['classes'])})"
        )


def _some(names):
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def describe(teacher, config):
    """What is learned from whom, in a line."""
    facts = teacher.facts
    shape = facts["model"] or f"densenet_bc (depth {facts['depth']}, growth rate {facts['growth_rate']})"
    soft = f"its probabilities at temperature {config.distill_temperature:g}"
    what = soft if config.distill == "soft" else "the class it takes for right"
    return f"teacher: {shape} in {facts['file']}; {config.distill_alpha:g} of the loss is for {what}"
