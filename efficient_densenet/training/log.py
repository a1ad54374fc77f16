"""What a run leaves on disk and on the console, and the memory that an epoch took."""

import contextlib
import csv
import dataclasses
import io
import json
import math
import os
import platform
import shutil
import sys
import time

import torch
import torchvision
from matplotlib.figure import Figure
from tqdm import tqdm

import efficient_densenet
from .checkpoint import not_finite
from .config import RunError, UsageError
from .distributed import launcher

COLUMNS = "epoch,train_loss,train_error,valid_loss,valid_error,test_error,lr,images_per_s,peak_mib".split(",")
RESULTS = ("config.json", "results.csv", "model.dat", "checkpoint.pt", "curves.png")
MIB = 2**20

try:
    import fcntl
except ImportError:  # not everywhere
    fcntl = None
_locks = {}  # folders in use by this process, and their file descriptors


def _forget_locks():
    """A process that loads images must not hold the folder when the one that trains has died."""
    for folder in _locks.values():
        os.close(folder)
    _locks.clear()


if fcntl is not None:
    os.register_at_fork(after_in_child=_forget_locks)


def replace_file(path, content):
    """Writes a file so that the name holds the old or the new content whole, whatever happens meanwhile.

    Args:
        path: The file.
        content: Its bytes, or a function that writes them into an open binary file.
    """
    temporary = f"{path}.tmp"
    with _explained(f"cannot write {path}"):
        try:
            with open(temporary, "wb") as file:
                content(file) if callable(content) else file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(temporary)


@contextlib.contextmanager
def _explained(what):
    """Turns the file system's errors, some of which torch wraps, into a line."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        raise RunError(f"{what}: {getattr(cause, 'strerror', None) or error}") from None


def open_console():
    """Lets every line be printed: a character that the console's encoding does not have is shown as ``\\u4e2d``."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a stream of another program's
            stream.reconfigure(errors="backslashreplace")


def say(line):
    """Prints a line, at once.

    Raises:
        RunError: It cannot be written: nobody reads it any more, or the disk is full.
    """
    with _explained("cannot write to standard output"):
        try:
            print(line, flush=True)
        except OSError:  # the interpreter would try again to get rid of it when it ends
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
            raise


class Results:
    """The folder of a run.

    Args:
        config: The flags. ``save``: where it is, None for one named after the time, under ./results; ``overwrite``:
            whether results that are there may go; ``resume``: whether the run that is there goes on.

    Raises:
        UsageError: The folder holds results already, is in use by another run, or cannot be written to.
    """

    def __init__(self, config):
        self.folder = config.save if config.save is not None else _new_folder()
        self._board, self._writer = None, _summary_writer(self.folder) if config.tensorboard else None
        held = [name for name in RESULTS if os.path.exists(self.path(name))]
        if held and not config.overwrite and not config.resume:
            wanted = "go on with --resume True, choose another folder or add --overwrite True"
            raise UsageError(f"--save {self.folder}: holds results already ({held[0]}); {wanted}")
        nearest = os.path.abspath(self.folder)
        while not os.path.lexists(nearest):
            nearest = os.path.dirname(nearest)
        if not os.path.isdir(nearest):
            raise UsageError(f"--save {self.folder}: {nearest} is not a folder")
        for name in os.path.relpath(self.folder, nearest).split(os.sep):
            try:
                os.lstat(os.path.join(nearest, name))
            except FileNotFoundError:
                pass
            except OSError as error:  # a name that no file can have
                raise UsageError(f"--save {self.folder}: {error.strerror}") from None
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise UsageError(f"--save {self.folder}: no permission to write in {nearest}")
        if os.path.isdir(self.folder):
            self._lock()

    def path(self, name):
        """A file of this run."""
        return os.path.join(self.folder, name)

    def begin(self, settings, epochs=None):
        """Makes the folder, writes config.json, and clears what an earlier run left unless its ``epochs`` go on."""
        try:
            os.makedirs(self.folder, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--save {self.folder}: cannot make this folder: {error.strerror}") from None
        with _explained(f"cannot write to {self.folder}"):
            self._lock()
            for name in RESULTS if epochs is None else ():
                with contextlib.suppress(FileNotFoundError):
                    os.remove(self.path(name))
            if epochs is None:
                shutil.rmtree(self.path("tensorboard"), ignore_errors=True)
        replace_file(self.path("config.json"), (json.dumps(settings, indent=2) + "\n").encode())
        if self._writer is not None:
            self._board = self._writer(self.path("tensorboard"), purge_step=(epochs or 0) + 1)

    def _lock(self):
        """Makes sure that no other run writes here, until this process ends."""
        if fcntl is None or os.path.abspath(self.folder) in _locks:
            return
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(folder)
            raise UsageError(f"--save {self.folder}: another run is writing there") from None
        _locks[os.path.abspath(self.folder)] = folder

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Lets others have the folder."""
        if self._board is not None:
            self._board.close()
        folder = _locks.pop(os.path.abspath(self.folder), None)
        if folder is not None:
            os.close(folder)

    def after_epoch(self, rows, state_dict, usages=()):
        """Writes the epochs' rows to results.csv, redraws the curves, and keeps the weights unless they are None."""
        if state_dict is not None:
            self.save("model.dat", {name: tensor.cpu() for name, tensor in state_dict.items()})
        self._write(rows)
        if self._board is not None:
            for number, usage in enumerate(usages):
                self._board.add_scalar(f"peak_mib/{number}", usage.peak, len(rows))
                if usage.busy is not None:
                    self._board.add_scalar(f"busy/{number}", usage.busy, len(rows))
            self._board.flush()

    def finish(self, rows, test_error):
        """Adds the test error of model.dat, in a row of its own."""
        self._write([*rows, {"test_error": test_error}])

    def save(self, name, content):
        """Writes what ``torch.load(..., weights_only=True)`` reads."""
        replace_file(self.path(name), lambda file: torch.save(content, file))

    def load_model(self, model):
        """Loads model.dat.

        Raises:
            RunError: What it holds is not finite: a test would say nothing.
        """
        weights = torch.load(self.path("model.dat"), map_location="cpu", weights_only=True)
        if broken := not_finite(weights):
            raise RunError(f"{self.path('model.dat')} cannot be tested: {broken}")
        model.load_state_dict(weights)

    def _write(self, rows):
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        replace_file(self.path("results.csv"), text.getvalue().encode())
        self.draw_curves(rows)
        if self._board is not None:
            for name, value in rows[-1].items():
                if value is not None and name not in ("epoch", "peak_mib"):
                    part, _, kind = name.partition("_")
                    self._board.add_scalar(f"{kind}/{part}" if kind in ("loss", "error") else name, value, len(rows))
            self._board.flush()

    def draw_curves(self, rows):
        """Draws losses and errors over the epochs into curves.png."""
        figure = Figure(figsize=(10, 4))
        figure.subplots_adjust(left=0.07, right=0.98, bottom=0.13, top=0.96)
        for axes, kind in zip(figure.subplots(1, 2), ("loss", "error")):
            for part in ("train", "valid"):
                points = [
                    (row["epoch"], row[f"{part}_{kind}"]) for row in rows if row.get(f"{part}_{kind}") is not None
                ]
                if points:
                    axes.plot(*zip(*points), label=part, marker="." if len(points) < 30 else None)
            tested = [row["test_error"] for row in rows if row.get("test_error") is not None]
            if kind == "error" and tested:
                axes.axhline(tested[-1], label="test (model.dat)", color="black", linestyle="--", linewidth=1)
            axes.set(xlabel="epoch", ylabel=kind)
            axes.locator_params(axis="x", integer=True)
            axes.grid(alpha=0.3)
            axes.legend()
        replace_file(self.path("curves.png"), lambda file: figure.savefig(file, format="png", dpi=100))


def _summary_writer(folder):
    """TensorBoard's writer."""
    try:
        folder.encode()
    except UnicodeEncodeError:  # TensorBoard's files name it
        raise UsageError(f"--tensorboard True: not in {folder}, a name that is not UTF-8") from None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError(f"--tensorboard True: {error}; pip install tensorboard") from None
    return SummaryWriter


def _new_folder():
    """A name under ./results that no run has."""
    name = os.path.join(".", "results", time.strftime("%Y-%m-%d-%H%M%S"))
    taken = 1
    while os.path.exists(name if taken == 1 else f"{name}-{taken}"):
        taken += 1
    return name if taken == 1 else f"{name}-{taken}"


def settings_of(config, world, facts, teacher_facts):
    """What config.json says: the flags, and what else the run depends on; every rank calls this."""
    settings = dataclasses.asdict(config)
    settings["versions"] = {
        "efficient_densenet": efficient_densenet.__version__,
        "torch": str(torch.__version__),
        "torchvision": str(torchvision.__version__),
        "python": platform.python_version(),
    }
    return settings | {
        "dataset": facts["name"],
        "images": facts,
        "teacher_facts": teacher_facts,
        "world_size": world.size,
        "gpus": world.gpus,
        "launchers": sorted({one for one in world.gather(launcher()) if one}),
    }


@dataclasses.dataclass(frozen=True)
class Usage:
    """What an epoch took of a device, or of this process on the CPU.

    Attributes:
        peak: MiB held at the most.
        before: MiB that the process held before the first step: libraries, images, weights; 0 on CUDA.
        busy: Share of the time in which the GPU computed something; None where nobody can tell.
    """

    peak: float
    before: float = 0.0
    busy: float | None = None


class Meter:
    """What a process takes of its devices between :meth:`reset` and :meth:`read`.

    Memory, on CUDA: the allocator's peak on each of the devices. On the CPU: the peak of the process's resident memory,
    which Linux can be told to forget; where it cannot, the peak since the process began, and :attr:`since_start` is
    True. Utilisation is NVML's, asked for about once a second, where the package nvidia-ml-py is there.
    """

    EVERY = 1.0  # seconds

    def __init__(self, devices):
        self._devices = [device for device in devices if device.type == "cuda"]
        self._before = 0.0 if self._devices else _resident("VmRSS") or 0.0
        self.since_start = False
        self.reset()

    def reset(self):
        """Starts a new measurement."""
        self._busy, self._next = [[] for _ in self._devices], time.monotonic() + self.EVERY
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)
        if not self._devices:
            try:
                with open("/proc/self/clear_refs", "w") as file:
                    file.write("5")
            except OSError:
                self.since_start = True

    def sample(self):
        """Looks at the devices, unless it has just done so; called after every step."""
        if not self._devices or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self.EVERY
        for device, busy in zip(self._devices, self._busy):
            try:
                busy.append(torch.cuda.utilization(device) / 100)
            except Exception:  # without NVML, or with one that does not answer: of many types
                self._next = math.inf
                return

    def read(self):
        """The :class:`Usage` of each device (of the process, on the CPU)."""
        if self._devices:
            return [
                Usage(torch.cuda.max_memory_allocated(device) / MIB, busy=sum(busy) / len(busy) if busy else None)
                for device, busy in zip(self._devices, self._busy)
            ]
        peak = None if self.since_start else _resident("VmHWM")
        if peak is None:
            import resource

            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            peak = peak / MIB if sys.platform == "darwin" else peak / 1024
        return [Usage(peak, self._before)]


def _resident(name):
    """MiB of a line of this process's status, as Linux tells it; None elsewhere."""
    with contextlib.suppress(OSError), open("/proc/self/status", "rb") as file:  # its name may be in any encoding
        for line in file:
            if line.startswith(name.encode() + b":"):
                return int(line.split()[1]) / 1024
    return None


class Bar:
    """Progress through an epoch, as a context manager: a bar on a terminal, else a line every now and then.

    The loss and the error come from the device, which has to finish its work before it can tell them; so they are asked
    for seldom.

    Args:
        title: What it stands before.
        images: Images of the epoch.
        done: How many of them an earlier run has seen.
        visible: Whether there is a bar; None where a terminal decides.
        say: Prints a line.

    Attributes:
        images_per_s: Training speed, when the epoch is over.
    """

    REFRESH, REMIND = 1.0, 60.0  # seconds

    def __init__(self, title, images, done, visible, say):
        visible = sys.stderr.isatty() if visible is None else visible
        self._bar = tqdm(
            total=images, initial=done, desc=title, unit=" images", leave=False, dynamic_ncols=True, disable=not visible
        )
        self._title, self._images, self._first, self._done, self._say = title, images, done, done, say
        self._began = time.monotonic()
        self._next = self._began + (self.REFRESH if visible else self.REMIND)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.images_per_s = self._rate()
        self._bar.close()

    def _rate(self):
        return (self._done - self._first) / max(time.monotonic() - self._began, 1e-9)

    def advance(self, images, totals):
        """Counts images of all ranks; ``totals`` are this rank's so far."""
        self._done += images
        self._bar.update(images)
        if time.monotonic() < self._next:
            return
        loss, error = totals.means()
        now = f"loss {loss:.4f}, error {error:.4f}"
        if self._bar.disable:
            left = duration((self._images - self._done) / self._rate())
            speed = f"{self._rate():.0f} images/s"
            self._say(f"{self._title}: {self._done:,} of {self._images:,} images, {now}, {speed}, {left} left")
            self._next = time.monotonic() + self.REMIND
        else:
            self._bar.set_postfix_str(now)
            self._next = time.monotonic() + self.REFRESH


class Clock:
    """Foretells the end of a run from the epochs that it has seen."""

    def __init__(self):
        self._began, self._epochs = time.monotonic(), 0

    def left(self, epochs):
        """The time that so many more epochs will take; an epoch has just ended."""
        self._epochs += 1
        return (time.monotonic() - self._began) / self._epochs * epochs


def duration(seconds):
    """Hours, minutes and seconds: ``1:02:05``."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def epoch_line(row, n_epochs, usages, seconds_left):
    """An epoch in one line.

    Args:
        row: Its row of results.csv.
        n_epochs: Epochs of the run.
        usages: The :class:`Usage` of every device (or process), in order.
        seconds_left: Estimated time to the end of the run.
    """
    parts = [f"train loss {row['train_loss']:.4f} error {row['train_error']:.4f}"]
    if row["valid_error"] is not None:
        parts.append(f"valid loss {row['valid_loss']:.4f} error {row['valid_error']:.4f}")
    peaks = " + ".join(f"{usage.peak:.0f}" for usage in usages)
    parts += [f"lr {row['lr']:.4g}", f"{row['images_per_s']:.0f} images/s", f"peak {peaks} MiB"]
    if usages[0].before:
        own = " + ".join(f"{usage.peak - usage.before:.0f}" for usage in usages)
        parts[-1] += f" ({own} of it for training)"
    if all(usage.busy is not None for usage in usages):
        parts.append(f"busy {' + '.join(f'{usage.busy:.0%}' for usage in usages)}")
    if row["epoch"] < n_epochs:
        parts.append(f"{duration(seconds_left)} left")
    return f"epoch {row['epoch']}/{n_epochs}: " + ", ".join(parts)
