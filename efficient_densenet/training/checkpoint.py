"""All that a run is at one moment, written so that it goes on from there bit by bit; and weights from anywhere."""

import contextlib
import dataclasses
import glob
import json
import math
import os

import torch
from torch import nn

from ..models import weights
from . import distributed
from .config import Config, RunError, UsageError, dataset_in
from .engine import Totals

# What a run that is resumed need not repeat: its length, and what only shows it or loads for it. And what says where.
_FREE = {"n_epochs", "num_workers", "progress", "tensorboard"}
_PLACE = {"save", "overwrite", "resume", "evaluate"}
_MACHINE = {"device", "parallel", "num_workers"}  # a model is tested elsewhere than it was trained


@dataclasses.dataclass
class State:
    """A run between two steps.

    Attributes:
        model, optimizer, scheduler, scaler, ema: What is trained, and what trains it; ``ema`` may be None.
        epoch, step: Epochs that are over, and optimizer steps of the one that is not.
        totals: This rank's sums over those steps.
        best_error: The least validation error of all epochs.
        rows: The epochs' rows of results.csv.
        teacher: The network whose outputs are learned too, which itself learns nothing; may be None.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    ema: nn.Module | None
    totals: Totals
    epoch: int = 0
    step: int = 0
    best_error: float = math.inf
    rows: list = dataclasses.field(default_factory=list)
    teacher: nn.Module | None = None

    @property
    def kept(self):
        """The model that is evaluated and kept: the averaged one, where there is one."""
        return self.model if self.ema is None else self.ema.module

    def parts(self):
        """The objects with a state dict of their own, by name."""
        names = ("model", "optimizer", "scheduler", "scaler", "ema")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def check_finite(self, folder):
        """Waits for the device; raises a :class:`RunError` unless all losses, weights and statistics are finite."""
        tensors = [
            self.totals.sums,
            *self.model.parameters(),
            *(b for b in self.model.buffers() if b.is_floating_point()),
        ]
        if not torch.stack([tensor.isfinite().all() for tensor in tensors]).all():
            last = os.path.join(folder, "checkpoint.pt")
            good = f"{last} is from before" if os.path.exists(last) else "there is no checkpoint yet"
            where = f"in epoch {self.epoch + 1}, by step {self.step}"
            raise RunError(f"the loss or a weight is not finite {where}; {good}. A lower --lr or --clip_grad may help")

    def improves(self, valid_error):
        """Whether no weights so far were better, or the last where there is no validation; remembers the error.

        Of equally good ones the later are kept: a small validation set tells few epochs apart.
        """
        if valid_error is None:
            return True
        better = valid_error <= self.best_error
        self.best_error = min(valid_error, self.best_error)
        return better

    def next_epoch(self, row):
        """Ends an epoch, which left a row of results.csv."""
        self.scheduler.step()
        self.rows.append(row)
        self.epoch, self.step = self.epoch + 1, 0
        self.totals.sums.zero_()

    def capture(self, world):
        """The state of all ranks, as a dictionary of plain objects and tensors; every rank calls this.

        What differs between ranks is kept for each of them: their random numbers, sums, and BatchNorm statistics, which
        are put together only between epochs.
        """
        mine = {"totals": self.totals.sums.cpu(), "random": torch.get_rng_state()}
        if world.device.type == "cuda":
            mine["random_cuda"] = [torch.cuda.get_rng_state(device) for device in world.devices]
        if world.size > 1:
            mine["buffers"] = [[buffer.cpu() for buffer in module.buffers()] for module in self._with_buffers()]
        ranks = world.gather(mine)
        return {
            **{name: part.state_dict() for name, part in self.parts().items()},
            **{name: getattr(self, name) for name in ("epoch", "step", "best_error", "rows")},
            "ranks": ranks,
        }

    def restore(self, saved, world):
        """Takes over what :meth:`capture` gave."""
        for name, part in self.parts().items():
            part.load_state_dict(saved[name])
        for name in ("epoch", "step", "best_error", "rows"):
            setattr(self, name, saved[name])
        mine = saved["ranks"][world.rank]
        self.totals.sums.copy_(mine["totals"])
        if world.size > 1:
            with torch.no_grad():
                for module, values in zip(self._with_buffers(), mine["buffers"]):
                    for buffer, value in zip(module.buffers(), values):
                        buffer.copy_(value)
        torch.set_rng_state(mine["random"])
        for device, random in zip(world.devices, mine.get("random_cuda", ())):
            torch.cuda.set_rng_state(random, device)

    def _with_buffers(self):
        return [self.model] if self.ema is None else [self.model, self.ema.module]


def not_finite(weights):
    """Which tensors hold NaN or infinite values, in words; an empty text where none does."""
    names = [name for name, tensor in weights.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if names[1:] else ""
    return f"values that are not finite in {names[0]}{more} of its {len(weights)} tensors"


def check(saved, settings):
    """Raises a :class:`UsageError` unless a run with these settings can go on from the saved state."""
    before = saved["settings"]
    settings["images"]["note"] = before["images"]["note"]  # why these data were chosen, which is not asked again
    for name, what in (("world_size", "processes"), ("gpus", "GPUs per process"), ("images", "images")):
        if before[name] != settings[name]:
            raise UsageError(
                f"--resume: the run had other {what} ({before[name]}) than there are now ({settings[name]})"
            )
    learned, told = (each.get("teacher_facts") for each in (before, settings))
    if learned != told and (told is None or learned is None or learned["sha256"] != told["sha256"]):
        raise UsageError(f"--resume: the file of --teacher {settings['teacher']} is not the one the run began with")
    if saved["epoch"] > settings["n_epochs"]:
        raise UsageError(
            f"--n_epochs {settings['n_epochs']}: the run in {settings['save']} is at {saved['epoch']} already"
        )


def recall(config, given):
    """The flags of a run that is resumed or evaluated: as they were, where the command line does not say them again.

    A restart by torchrun (``--max-restarts``) is known by the launchers that config.json names, one per machine: rank 0
    may be on another of them than before.

    Args:
        config: The flags.
        given: The names of those that were typed.

    Returns:
        The flags to go by. Where ``resume`` is on, it is True, and ``save`` is the run's folder.

    Raises:
        UsageError: A typed flag contradicts the run.
    """
    if config.evaluate is not None:
        for flag in ("resume", "memory_budget", "teacher"):
            if getattr(config, flag):
                raise UsageError(f"--evaluate does not go with --{flag}: it trains nothing")
        read_weights(config.evaluate)  # before any work
        path = config.evaluate
        settings = settings_in(path if os.path.isdir(path) else os.path.dirname(path))
        settings = {name: value for name, value in settings.items() if name not in _MACHINE}
        if "dataset" in settings and "data" in given:  # another folder may hold another data set
            settings["dataset"] = dataset_in(config.data, settings["dataset"])
    else:
        if config.resume is False:
            folder = _restarted(config.save)
            if folder is None:
                return config
        elif config.resume is True:
            if config.save is None:
                raise UsageError("--resume True: which run? add --save FOLDER, or give the folder to --resume")
            folder = config.save
        else:
            folder = config.resume
            if os.path.basename(folder) == "checkpoint.pt":
                folder = os.path.dirname(folder) or "."
            if not os.path.isdir(folder):
                wanted = "the folder of a run, or the checkpoint.pt in it"
                raise UsageError(f"--resume {config.resume}: there is no such folder; it takes {wanted}")
            if config.save is not None and os.path.abspath(config.save) != os.path.abspath(folder):
                raise UsageError(f"--resume {config.resume}: goes on in {folder}, not in --save {config.save}")
        config = dataclasses.replace(config, save=folder, resume=True)
        settings = settings_in(folder)

    changes = {}
    for name in set(settings) & set(Config.__dataclass_fields__) - _PLACE:
        mine, theirs = getattr(config, name), settings[name]
        left_open = mine == "auto"
        if name == "efficient":
            settled = theirs in (True, "auto") or settings.get("memory_budget") is not None
            left_open = settled and mine in (True, "auto")
        if name not in given or left_open:  # what a flag leaves open is as the run has settled it
            changes[name] = theirs
        elif config.resume and name not in _FREE and mine != theirs:
            raise UsageError(f"--{name} {mine}: the run in {config.save} has {theirs}, and it goes on as it was")
    config = dataclasses.replace(config, **changes)
    if config.evaluate is not None and config.batch_size == "auto":
        raise UsageError("--batch_size auto: --evaluate takes a number")
    return config


def settings_in(folder):
    """The settings of the run in a folder; none where there is none."""
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            return json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return (read(os.path.join(folder, "checkpoint.pt")) or {}).get("settings", {})
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {os.path.join(folder, 'config.json')}: {error}") from None


def _restarted(folder):
    """The folder of the run that this launcher started before, or None."""
    launcher = distributed.launcher()
    folders = [folder] if folder is not None else sorted(glob.glob("./results/*/"), reverse=True)
    for folder in folders if launcher else ():
        with contextlib.suppress(UsageError):
            if launcher in settings_in(folder).get("launchers", ()):
                return folder.rstrip("/")
    return None


def read(path):
    """A file of tensors and plain objects, on the CPU; None where there is no such file.

    Raises:
        UsageError: There is one, but not of ours.
    """
    try:
        with open(path, "rb") as file:
            return _loaded(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


def _loaded(file):
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # torch has no common type for what another file makes it raise, and much to say
        wanted = "it is damaged, or no file of torch.save with tensors and plain objects alone"
        raise UsageError(f"cannot read {file.name}: {wanted}") from None


def read_run(config):
    """What the run in ``save`` left to go on from; None where it has not come that far.

    Raises:
        UsageError: Files of the run are missing, or another's. Going on, or from the start, would lose results.
    """
    path = os.path.join(config.save, "checkpoint.pt")
    saved, model = read(path), os.path.join(config.save, "model.dat")
    again = "bring it back, or start again with --overwrite True"
    if saved is None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            with open(os.path.join(config.save, "results.csv"), encoding="utf-8") as file:
                # An epoch's checkpoint is written behind its row: one row may be there without.
                if len(file.readlines()) > 2 and not config.overwrite:
                    raise UsageError(f"--resume: {path} is missing, yet there are results; {again}")
        return None
    if not isinstance(saved, dict) or not {"settings", "epoch", "ranks", "model", "optimizer"} <= set(saved):
        raise UsageError(f"--resume: {path} is not the checkpoint of a run")
    if saved["epoch"] and not os.path.isfile(model):
        raise UsageError(f"--resume: {model}, the best weights so far, is missing; {again}")
    return saved


def read_weights(path, flag="--evaluate"):
    """Reads weights from a run's folder, its model.dat or checkpoint.pt, or a file that others wrote.

    Args:
        path: What was given to the flag.
        flag: Its name, for what goes wrong.

    Returns:
        The tensors by the names that this library gives them; see :func:`efficient_densenet.models.weights.weights_in`.

    Raises:
        UsageError: There is no such file, or it holds no weights, or some that are not finite.
    """
    file = os.path.join(path, "model.dat") if os.path.isdir(path) else path
    content = read(file)
    if content is None:
        raise UsageError(f"{flag} {path}: there is no file {file}")
    found = weights.weights_in(content)
    if not found:
        raise UsageError(f"{flag} {path}: there are no weights in {file}")
    if broken := not_finite(found):
        raise UsageError(f"{flag} {path}: {broken}, so that its outputs would say nothing")
    return found


def load_weights(model, path):
    """Loads what :func:`read_weights` finds.

    Raises:
        UsageError: Keys or shapes do not fit, which are listed; or there is nothing to load.
    """
    try:
        weights.load_weights(model, read_weights(path))
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"--evaluate {path}: {error}") from None
