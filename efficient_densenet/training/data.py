"""The data sets, and the batches that each process draws from them."""

import contextlib
import gzip
import math
import os
import re
import secrets
import signal
import socket
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler
from torchvision import datasets, transforms
from torchvision.transforms import functional

from .class_folders import ClassFolders, look
from .config import FASHION_FILES, RunError, UsageError
from .distributed import cpus_per_process

try:
    import resource
except ImportError:  # not everywhere
    resource = None

CONNECT_SECONDS = 10  # a network that has not answered by then is taken for none
GRACE_SECONDS = 30  # what a process that loads images has left after SIGTERM
_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Mean and standard deviation of each channel in the training set, and whether a mirrored image is still of its class.
_FACTS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), True),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), True),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970), False),
    "fashion_mnist": ((0.2860,), (0.3530,), True),
    "imagefolder": (*_IMAGENET, True),
    "digits": ((0.3055,) * 3, (0.3235,) * 3, False),
}


@dataclass(frozen=True)
class Data:
    """Images for training, validation (None without) and test, and what the model has to know of them.

    Attributes:
        facts: What config.json says of the data: its name, why it was chosen, sizes, and how an image becomes an input.
        source: What the images are and where they come from, in words.
        remarks: What the person who trains should know of the files, line by line.
    """

    train: Dataset
    valid: Dataset | None
    test: Dataset
    num_classes: int
    in_channels: int
    facts: dict
    source: str
    remarks: tuple


class Images(Dataset):
    """A selection of a data set's images, as normalised tensors.

    An image is asked for by its number, or by number and a seed: all that is random in its augmentation comes from that
    seed, so a run can be repeated, and continued, with any number of worker processes.
    """

    def __init__(self, source, indices, transform):
        self.source, self.indices, self.transform = source, indices, transform

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, key):
        index, seed = key if isinstance(key, tuple) else (key, None)
        image, label = self.source[self.indices[index]]
        if seed is None:
            return self.transform(image), label
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(seed)
            return self.transform(image), label


class TrainSampler(Sampler):
    """This rank's share of an epoch, newly shuffled in every epoch, with a seed for each image's augmentation.

    Every rank gets equally many images; where they do not come out even, torch's ``DistributedSampler`` repeats some.
    Of the last batch, what BatchNorm cannot take a variance of is left out.

    Args:
        size: Images in the training set.
        world: The processes that share them.
        config: The flags. With the epoch, the order depends on nothing but ``seed``.
        least: Images that a batch must have (on each GPU, under DataParallel).

    Attributes:
        images: Images of this rank in an epoch.
        per_step: Images of this rank in a step.
        note: What is left out, to be said behind the step's description; mostly nothing.

    Raises:
        UsageError: No batch can be large enough.
    """

    def __init__(self, size, world, config, least=1):
        self._order = DistributedSampler(range(size), world.size, world.rank, shuffle=True, seed=config.seed)
        self._size, self._seed, self._first = size, config.seed, 0
        batch = config.batch_size * world.gpus
        self.per_step = batch * config.accumulation_steps
        share = min(self._order.num_samples, config.max_steps * self.per_step if config.max_steps else math.inf)
        self.images, self.note = share, ""
        while _smallest_part(self.images % batch, world.gpus) < least:
            self.images -= 1
        if self.images < share:
            self.note = f", {share - self.images} left over in an epoch: BatchNorm needs {least} in a batch here"
        if min(self.images, config.batch_size) < least:
            wanted = f"BatchNorm needs {least} in a batch (an image leaves it one value per channel)"
            raise UsageError(f"--batch_size {config.batch_size}: too few images, {wanted}")

    def set_epoch(self, epoch, first=0):
        """Chooses the epoch, and the image to start it at."""
        self._order.set_epoch(epoch)
        self._first = first

    def __len__(self):
        return self.images - self._first

    def __iter__(self):
        generator = torch.Generator().manual_seed(self._seed + self._order.epoch)
        seeds = torch.randint(2**62, (self._size,), generator=generator).tolist()
        for index in list(self._order)[self._first : self.images]:
            yield index, seeds[index]


def _smallest_part(images, gpus):
    """The fewest images on a GPU where DataParallel spreads some, as ``torch.chunk`` does; infinite for none."""
    part = -(-images // gpus)
    return (images % part or part) if images else math.inf


class EvalSampler(Sampler):
    """This rank's share of a data set for evaluation, maybe none: over all ranks every image exactly once."""

    def __init__(self, size, world):
        self._share = range(world.rank, size, world.size)

    def __len__(self):
        return len(self._share)

    def __iter__(self):
        return iter(self._share)


def seed(config):
    """The seed of the flags, or a new one."""
    return secrets.randbelow(2**32) if config.seed is None else config.seed


def load(config, world, seed):
    """Finds, downloads if needed, splits and prepares the data set.

    One process at a time downloads: rank 0, then one on every other machine (which finds the files on a shared disk).

    Args:
        config: The flags.
        world: The processes; all of them call this.
        seed: Which training images are held out for validation. The test images never depend on it.

    Raises:
        UsageError: The data are not there and cannot be had, or do not fit the flags.
    """
    world.together((True, lambda: allow_files(_workers(config))))
    name, note = world.on_main(lambda: _choose(config))
    train, test = world.together(
        (world.rank == 0, lambda: _open(name, config, download=True)),
        (world.rank > 0 and world.local_rank == 0, lambda: _open(name, config, download=True)),
        (world.local_rank > 0, lambda: _open(name, config, download=False)),
    )

    held_out = min(5000, len(train) // 10) if config.valid_size is None else config.valid_size
    if held_out >= len(train):
        raise UsageError(
            f"--valid_size {held_out}: {name} has {len(train)} training images, some must remain to train on"
        )
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
    mean, std, flip = _FACTS[name]
    (width, height), said = world.on_main(lambda: _look(name, train, test, config))
    if config.image_size:
        width = height = config.image_size
    augment, prepare = _transforms(config.image_size, (height, width), mean, std, flip)
    facts = {
        "name": name,
        "note": note,
        "train_images": len(train) - held_out,
        "valid_images": held_out,
        "test_images": len(test),
        "classes": list(train.classes),
        "image_size": [height, width],
        "mean": list(mean),
        "std": list(std),
    }
    return Data(
        train=Images(train, sorted(order[held_out:]), augment),
        valid=Images(train, sorted(order[:held_out]), prepare) if held_out else None,
        test=Images(test, range(len(test)), prepare),
        num_classes=len(train.classes),
        in_channels=len(mean),
        facts=facts,
        source=_source(name, config.data, test),
        remarks=tuple(filter(None, (_left_out(name, train, test), said))),
    )


class _Loader(DataLoader):
    def check_worker_number_rationality(self):
        """Says nothing: more worker processes than CPUs is what was asked for."""


def _workers(config):
    return min(8, cpus_per_process()) if config.num_workers is None else config.num_workers


def batches(images, sampler, config, world):
    """The batches of one rank, loaded by worker processes that live as long as the run."""
    workers = _workers(config)
    return _Loader(
        images,
        batch_size=config.batch_size * world.gpus,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=_leave_signals_to_the_trainer,
        pin_memory=world.device.type == "cuda",
        generator=torch.Generator(),  # the loader draws from it, and must leave the model's random numbers alone
    )


def allow_files(workers):
    """Sees to it that the worker processes of three loaders can be talked to: that takes open files.

    Raises:
        UsageError: The system does not allow so many. Later, torch would say so in many words, or wait for ever.
    """
    if resource is None or not workers:
        return
    needed = len(os.listdir("/dev/fd")) + 16 * (workers + 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            few = f"takes about {needed} open files, the limit is {hard}"
            raise UsageError(f"--num_workers {workers}: {few}; a larger ulimit -n or fewer --num_workers (0) helps")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@contextlib.contextmanager
def closing(*loaders):
    """Ends the loaders' worker processes with the block, also by an error (whose traceback would keep them)."""
    try:
        yield
    finally:
        for loader in loaders:
            iterator = getattr(loader, "_iterator", None)
            if iterator is not None:
                iterator._shutdown_workers()


def explained(error):
    """An error that came from elsewhere (another process, the system) in a line; None for any other."""
    lines = str(error).strip().splitlines() or [""]
    line = lines[0]
    of_worker = "DataLoader worker" in line or isinstance(error, ConnectionError)
    caught = "Caught " in line and of_worker
    if caught:  # the worker's traceback follows
        line = lines[-1]
    if "onnection closed by peer" in line or "onnection reset by peer" in line and not of_worker:
        return RunError(f"another process of the run has ended: {line}")
    if isinstance(error, torch.cuda.OutOfMemoryError):
        reason = line.partition(". ")[0]
        return RunError(
            f"{reason}. A smaller --batch_size (with --accumulation_steps), or --efficient True, takes less"
        )
    helps = next((help for cause, help in _HELP if re.search(cause, f"{type(error).__name__}: {line}")), None)
    if helps is None and (caught or not of_worker):
        return None
    died = "a process that loads images has died: " if of_worker else ""
    return RunError(f"{died}{line or type(error).__name__}" + (f" ({helps})" if helps else ""))


_HELP = (  # against what the system or torch complains of
    ("oo many open files|ancdata", "a larger ulimit -n or fewer --num_workers helps"),
    ("/torch_|shared memory|Bus error", "more shared memory, /dev/shm, or --num_workers 0 helps"),
    ("llocate memory|MemoryError", "fewer --num_workers or a smaller --batch_size takes less"),
    ("signal: Killed", "was the memory short?"),
    ("start new thread|Resource temporarily unavailable", "a larger ulimit -u or fewer --num_workers helps"),
)


def _leave_signals_to_the_trainer(_):
    """Ctrl-C and SIGTERM may reach all processes; those that load images stay until the trainer has ended its step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE_SECONDS))


def _transforms(image_size, size, mean, std, flip):
    """How an image becomes a tensor: in training (padded crop, mirrored where that makes sense), and in evaluation.

    The paper's augmentation: a shift by up to an eighth (4 of 32 pixels), or, from ``image_size`` 128 on, the random
    resized crop of ImageNet training with the centre crop that belongs to it.
    """
    to_tensor = [_to_tensor, transforms.Normalize(mean, std)]
    mirror = [transforms.RandomHorizontalFlip()] if flip else []
    if image_size is not None and image_size >= 128:
        resized = [transforms.RandomResizedCrop(image_size)]
        prepared = [transforms.Resize(image_size * 8 // 7), transforms.CenterCrop(image_size)]
    else:
        prepared = [transforms.Resize(image_size), transforms.CenterCrop(image_size)] if image_size is not None else []
        resized = [*prepared, transforms.RandomCrop(size, padding=max(size) // 8)]
    return transforms.Compose([*resized, *mirror, *to_tensor]), transforms.Compose([*prepared, *to_tensor])


def _choose(config):
    """The data set that will be used, and why where the flags left it open."""
    if config.dataset != "auto":
        return config.dataset, None
    try:
        _torchvision("cifar10", config.data, download=True)
    except UsageError as error:
        return "digits", str(error).removeprefix("--dataset cifar10: ")
    return "cifar10", None


def _open(name, config, download):
    """The training and the test images: sequences of (image, class number) with ``classes``."""
    if name == "digits":
        return _digits()
    if name == "imagefolder":
        return _class_folders(config)
    if name == "fashion_mnist" and all(os.path.isfile(_gz(config.data, file)) for file in FASHION_FILES):
        return _fashion_files(config.data)
    return _torchvision(name, config.data, download)


def _class_folders(config):
    """The images under train/ and test/, or val/ where there is no test/."""
    parts = {part: os.path.join(config.data, part) for part in ("train", "test", "val")}
    test = "test" if os.path.isdir(parts["test"]) or not os.path.isdir(parts["val"]) else "val"
    for part in ("train", test):
        if not os.path.isdir(parts[part]):
            wanted = "class folders are expected under train/ and test/ (or val/)"
            raise UsageError(f"--data {config.data}: there is no folder {part}/ in it; {wanted}")
    images = train, tested = [ClassFolders(parts[part], config.image_max) for part in ("train", test)]
    different = set(train.classes) ^ set(tested.classes)
    if different:
        raise UsageError(f"--data {config.data}: class {min(different)!r} is not in both of train/ and {test}/")
    if len(train.classes) == 1:
        one = f"there is one class, {train.classes[0]!r}; telling apart takes two and more"
        raise UsageError(f"--data {config.data}: {one}")
    return images


def _source(name, folder, test):
    """What the images are and where they come from, in words."""
    if name == "imagefolder":
        return f"{name} in {folder} (class folders under train/ and {os.path.basename(test.root)}/)"
    return name if name == "digits" else f"{name} in {folder}"


def _left_out(name, train, test):
    """Names a file in the class folders that is no image by its name, if there are any."""
    others = train.others + test.others if name == "imagefolder" else ()
    return f"left out, as no images by their names: {len(others):,} files, such as {others[0]}" if others else None


def _look(name, train, test, config):
    """Width and height of the images, and what to say of their values; see :func:`class_folders.look`."""
    if name == "imagefolder":
        return look((test,) if config.evaluate else (train, test), config)
    return train[0][0].size, "--image_max changes nothing: it is for class folders" if config.image_max else None


def _to_tensor(image):
    """Three channels in which white is 1 (one, of images in memory that are grey); a class folder may give tensors."""
    return image.expand(3, -1, -1) if torch.is_tensor(image) else functional.to_tensor(image)


class _Arrays:
    """Images in memory."""

    def __init__(self, images, labels, classes):
        self.images, self.labels, self.classes = images, labels, classes

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return Image.fromarray(self.images[index]), int(self.labels[index])


def _digits():
    """Handwritten digits of scikit-learn (UCI), 8x8, as 32x32 in three channels; every fifth image is for the test."""
    import numpy
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = numpy.round(digits.images * (255 / 16)).astype("uint8")
    large = [Image.fromarray(image).resize((32, 32), Image.Resampling.BILINEAR).convert("RGB") for image in small]
    images, test = numpy.stack(large), numpy.arange(len(large)) % 5 == 0
    classes = [str(digit) for digit in digits.target_names]
    return tuple(_Arrays(images[part], digits.target[part], classes) for part in (~test, test))


def _gz(folder, name):
    return os.path.join(folder, f"{name}-ubyte.gz")


def _fashion_files(folder):
    """Fashion-MNIST from its four published files."""
    import numpy

    def read(name, offset):
        try:
            with gzip.open(_gz(folder, name)) as file:
                return numpy.frombuffer(file.read(), dtype="uint8", offset=offset)
        except (OSError, EOFError, ValueError) as error:
            raise UsageError(f"--data {folder}: cannot read {name}-ubyte.gz: {error}") from None

    parts = []
    for images, labels in (FASHION_FILES[:2], FASHION_FILES[2:]):
        pixels, targets = read(images, 16), read(labels, 8)
        if pixels.size != targets.size * 28 * 28:
            raise UsageError(f"--data {folder}: {images}-ubyte.gz and {labels}-ubyte.gz do not belong together")
        parts.append(_Arrays(pixels.reshape(-1, 28, 28), targets, datasets.FashionMNIST.classes))
    return tuple(parts)


def _torchvision(name, folder, download):
    """A data set that torchvision reads and, where the network is there, downloads."""
    kind, source, offline = {
        "cifar10": (datasets.CIFAR10, datasets.CIFAR10.url, datasets.CIFAR10.filename),
        "cifar100": (datasets.CIFAR100, datasets.CIFAR100.url, datasets.CIFAR100.filename),
        "svhn": (datasets.SVHN, datasets.SVHN.split_list["train"][0], "train_32x32.mat and test_32x32.mat"),
        "fashion_mnist": (datasets.FashionMNIST, datasets.FashionMNIST.mirrors[0], "its four .gz files"),
    }[name]
    splits = [{"split": "train"}, {"split": "test"}] if name == "svhn" else [{"train": True}, {"train": False}]

    def read(**options):
        parts = tuple(kind(folder, **split, **options) for split in splits)
        for part in parts:
            part.classes = getattr(part, "classes", [str(digit) for digit in range(10)])
        return parts

    try:
        return read()
    except RuntimeError:  # torchvision's word for absent and for damaged files
        pass
    missing = f"--dataset {name}: not in {folder} (or damaged) and"
    if not download:
        raise UsageError(f"{missing} another process did not bring it")
    reason = None if os.path.isfile(os.path.join(folder, offline)) else _unreachable(source)
    if reason is None:
        try:
            with _socket_timeout():
                return read(download=True)
        except (OSError, RuntimeError) as error:
            reason = error
    raise UsageError(f"{missing} not downloaded ({reason}); offline, put {offline} there or use --dataset digits")


def _unreachable(url):
    """Why the address does not answer, or None if it does. Looking up its name has no timeout, so a thread does it."""
    outcome = [f"no answer within {CONNECT_SECONDS} s"]

    def ask():
        try:
            request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "pytorch/vision"})
            with urllib.request.urlopen(request, timeout=CONNECT_SECONDS):
                outcome[0] = None
        except urllib.error.HTTPError:  # an answer, though not to this question: the download will tell
            outcome[0] = None
        except OSError as error:
            outcome[0] = getattr(error, "reason", None) or error

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS)
    return outcome[0]


@contextlib.contextmanager
def _socket_timeout():
    """Lets a download that stalls fail instead of wait for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(CONNECT_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
