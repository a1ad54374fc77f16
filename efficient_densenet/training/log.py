"""What a run leaves on disk and on the console, and the memory that an epoch took."""

import contextlib
import csv
import dataclasses
import io
import json
import os
import platform
import sys
import time

import torch
import torchvision
from matplotlib.figure import Figure
from tqdm import tqdm

import efficient_densenet
from .config import UsageError

COLUMNS = "epoch,train_loss,train_error,valid_loss,valid_error,test_error,lr,images_per_s,peak_mib".split(",")
RESULTS = ("config.json", "results.csv", "model.dat", "checkpoint.pt", "curves.png")
MIB = 2**20


def replace_file(path, content):
    """Writes a file so that the name holds the old or the new content whole, whatever happens meanwhile.

    Args:
        path: The file.
        content: Its bytes, or a function that writes them into an open binary file.
    """
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as file:
            content(file) if callable(content) else file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


class Results:
    """The folder of a run.

    Args:
        folder: Where it is; None for one named after the time, under ./results.
        overwrite: Whether results that are there may go.

    Raises:
        UsageError: The folder holds results already, or cannot be written to.
    """

    def __init__(self, folder, overwrite):
        self.folder = folder if folder is not None else _new_folder()
        self.rows = []
        held = [name for name in RESULTS if os.path.exists(self.path(name))]
        if held and not overwrite:
            raise UsageError(
                f"--save {self.folder}: holds results already ({held[0]}); choose another folder or add --overwrite True"
            )
        nearest = os.path.abspath(self.folder)
        while not os.path.lexists(nearest):
            nearest = os.path.dirname(nearest)
        if not os.path.isdir(nearest):
            raise UsageError(f"--save {self.folder}: {nearest} is not a folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise UsageError(f"--save {self.folder}: no permission to write in {nearest}")

    def path(self, name):
        """A file of this run."""
        return os.path.join(self.folder, name)

    def begin(self, settings):
        """Makes the folder, clears what an earlier run left in it, and writes config.json."""
        os.makedirs(self.folder, exist_ok=True)
        for name in RESULTS:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.path(name))
        replace_file(self.path("config.json"), (json.dumps(settings, indent=2) + "\n").encode())

    def after_epoch(self, row, model):
        """Adds an epoch's row to results.csv, redraws the curves, and keeps the model's weights unless it is None."""
        if model is not None:
            state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
            replace_file(self.path("model.dat"), lambda file: torch.save(state, file))
        self._add_row(row)

    def finish(self, test_error):
        """Adds the test error of model.dat, in a row of its own."""
        self._add_row({"test_error": test_error})

    def load_model(self, model):
        """Loads model.dat."""
        model.load_state_dict(torch.load(self.path("model.dat"), map_location="cpu", weights_only=True))

    def _add_row(self, row):
        self.rows.append(row)
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        replace_file(self.path("results.csv"), text.getvalue().encode())
        self.draw_curves()

    def draw_curves(self):
        """Draws losses and errors over the epochs into curves.png."""
        figure = Figure(figsize=(10, 4), layout="constrained")
        for axes, kind in zip(figure.subplots(1, 2), ("loss", "error")):
            for part in ("train", "valid"):
                points = [(row["epoch"], row[f"{part}_{kind}"]) for row in self.rows if row.get(f"{part}_{kind}") is not None]
                if points:
                    axes.plot(*zip(*points), label=part, marker="." if len(points) < 30 else None)
            tested = [row["test_error"] for row in self.rows if row.get("test_error") is not None]
            if kind == "error" and tested:
                axes.axhline(tested[-1], label="test (model.dat)", color="black", linestyle="--", linewidth=1)
            axes.set(xlabel="epoch", ylabel=kind)
            axes.locator_params(axis="x", integer=True)
            axes.grid(alpha=0.3)
            axes.legend()
        replace_file(self.path("curves.png"), lambda file: figure.savefig(file, format="png", dpi=100))


def _new_folder():
    """A name under ./results that no run has."""
    name = os.path.join(".", "results", time.strftime("%Y-%m-%d-%H%M%S"))
    taken = 1
    while os.path.exists(name if taken == 1 else f"{name}-{taken}"):
        taken += 1
    return name if taken == 1 else f"{name}-{taken}"


def settings_of(config, world, facts, **found):
    """What config.json says: the flags, with what was chosen where they left it open, and what the run depends on."""
    settings = dataclasses.asdict(config) | found
    settings["versions"] = {
        "efficient_densenet": efficient_densenet.__version__,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "python": platform.python_version(),
    }
    return settings | {"dataset": facts["name"], "images": facts, "world_size": world.size}


class PeakMemory:
    """The most memory that a process holds between :meth:`reset` and :meth:`read`.

    On CUDA: the allocator's peak on each of the devices. On the CPU: the peak of the process's resident memory, which
    Linux can be told to forget; where it cannot, the peak since the process began, and :attr:`since_start` is True.
    """

    def __init__(self, devices):
        self._devices = [device for device in devices if device.type == "cuda"]
        self.since_start = False
        self.reset()

    def reset(self):
        """Starts a new measurement."""
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)
        if not self._devices:
            try:
                with open("/proc/self/clear_refs", "w") as file:
                    file.write("5")
            except OSError:
                self.since_start = True

    def read(self):
        """The peak of each device (of the process, on the CPU) in MiB."""
        if self._devices:
            return [torch.cuda.max_memory_allocated(device) / MIB for device in self._devices]
        if not self.since_start:
            with open("/proc/self/status") as file:
                for line in file:
                    if line.startswith("VmHWM:"):
                        return [int(line.split()[1]) / 1024]
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return [peak / MIB if sys.platform == "darwin" else peak / 1024]


class Bar:
    """The progress bar of an epoch, in images; a hidden one does nothing.

    The loss and the error come from the device, which has to finish its work before it can tell them; so they are asked
    for at most once in :attr:`SECONDS`.
    """

    SECONDS = 1.0

    def __init__(self, title, images, done, visible):
        self._bar = tqdm(
            total=images, initial=done, desc=title, unit=" images", leave=False, dynamic_ncols=True, disable=not visible
        )
        self._next = time.monotonic() + self.SECONDS / 4

    def advance(self, images, totals):
        """Counts images of all ranks; ``totals`` are this rank's so far."""
        self._bar.update(images)
        if not self._bar.disable and time.monotonic() >= self._next:
            loss, error = totals.means()
            self._bar.set_postfix_str(f"loss {loss:.3f}, error {error:.3f}")
            self._next = time.monotonic() + self.SECONDS

    def close(self):
        """Takes the bar off the terminal."""
        self._bar.close()


def epoch_line(row, n_epochs, peaks, seconds_left):
    """An epoch in one line.

    Args:
        row: Its row of results.csv.
        n_epochs: Epochs of the run.
        peaks: MiB of every device (or process), in order.
        seconds_left: Estimated time to the end of the run.
    """
    parts = [f"train loss {row['train_loss']:.4f} error {row['train_error']:.4f}"]
    if row["valid_error"] is not None:
        parts.append(f"valid loss {row['valid_loss']:.4f} error {row['valid_error']:.4f}")
    memory = " + ".join(f"{peak:.0f}" for peak in peaks)
    parts += [f"lr {row['lr']:.4g}", f"{row['images_per_s']:.0f} images/s", f"peak {memory} MiB"]
    if row["epoch"] < n_epochs:
        hours, minutes, seconds = int(seconds_left) // 3600, int(seconds_left) // 60 % 60, int(seconds_left) % 60
        parts.append(f"{hours}:{minutes:02}:{seconds:02} left")
    return f"epoch {row['epoch']}/{n_epochs}: " + ", ".join(parts)
