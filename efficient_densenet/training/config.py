"""The command line: python-fire takes it apart, a frozen :class:`Config` makes checked settings of the texts."""

import contextlib
import dataclasses
import difflib
import glob
import inspect
import io
import math
import os
import re
import sys
import types
import typing
from dataclasses import dataclass

import fire

from ..models import MODES

FASHION_FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
IMAGENET_SHAPES = ("densenet121", "densenet161", "densenet169", "densenet201", "densenet264")
IMAGE_FILES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class UsageError(ValueError):
    """A mistake of the person at the keyboard: shown as one line, exit code 2, before any work."""

    exit_code = 2


class RunError(RuntimeError):
    """A fault that ends a run, explained by one line: an unreadable image, a full disk, a loss that is not finite."""

    exit_code = 1

    def __init__(self, message):  # a DataLoader's worker sends its traceback instead, which ends in the message
        super().__init__(message.rpartition(f"{__name__}.RunError: ")[2].strip())


def bytes_of(text):
    """The bytes of ``"8GiB"``, ``"1.5GiB"``, ``"500MiB"``, ``"1000KiB"`` or ``"1000000"``; None for any other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])iB|(\d+)", text, re.IGNORECASE)
    if found is None:
        return None
    number, unit, whole = found.groups()
    return int(whole) if whole else int(float(number) * 1024 ** (1 + "KMGT".index(unit.upper())))


def dataset_in(folder, default):
    """The data set that a folder holds: ``default`` if that is there, or nothing that is known by its files.

    Class folders beside each other, without train/ and test/, are an image folder too, which will say what it lacks.
    """

    def holds(*names):
        return all(os.path.exists(os.path.join(folder, name)) for name in names)

    def images():
        paths = glob.iglob(os.path.join(glob.escape(folder), "*", "*"))
        return any(path.lower().endswith(IMAGE_FILES) for path in paths)

    found = {
        "cifar10": holds("cifar-10-batches-py") or holds("cifar-10-python.tar.gz"),
        "cifar100": holds("cifar-100-python") or holds("cifar-100-python.tar.gz"),
        "svhn": holds("train_32x32.mat", "test_32x32.mat"),
        "fashion_mnist": holds("FashionMNIST") or holds(*(f"{file}-ubyte.gz" for file in FASHION_FILES)),
        "imagefolder": any(map(holds, ("train/", "test/", "val/"))) or images(),
    }
    names = [name for name, there in found.items() if there]
    return default if default in names or not names else names[0]


def _flag(default, choices=(), path=False, **bounds):
    """A field of :class:`Config`.

    Args:
        default: Its value where the flag is not given.
        choices: The words that it takes, in small letters; ``N`` stands for a number.
        path: Whether its text is a place on the disk.
        bounds: Of its numbers: ``at_least``, ``above``, ``at_most``, ``below``.
    """
    return dataclasses.field(default=default, metadata={"choices": choices, "path": path, "bounds": bounds})


@dataclass(frozen=True, kw_only=True)
class Config:
    """Train a DenseNet in a fraction of the memory, with the same numbers.

    Batch size and learning rate are per GPU (or process): the global batch is batch_size x GPUs x accumulation_steps,
    and the learning rate grows likewise. Several GPUs: torchrun --nproc_per_node=N demo.py [flags]. Words may be
    written in capitals, and ~ is the home folder.

    Args:
        efficient: How dense blocks use memory: False or "naive" (plain autograd), "checkpoint", ..., True or "auto"
            (the best one available). All compute the same numbers.
        data: Folder of the data set; what can be downloaded is put there.
        dataset: cifar10, cifar100, svhn, fashion_mnist, imagefolder (class folders under train/ and test/ or val/),
            digits (ships with scikit-learn), or auto: with --data what that folder holds, else cifar10 if it is in
            ./data or can be downloaded, and digits if not.
        image_size: Resize images to this many pixels; from 128 on, training takes random resized crops.
        image_max: The value of white in images of more than 8 bits, e.g. 4095 for 12 bits in files of 16; no grey level
            is lost, and what is above it is brighter than white. Default: the largest that their type holds.
        save: Folder of the results. Default: ./results/<date-time>.
        overwrite: Replace the results that --save already holds.
        depth: Depth of the DenseNet-BC: 4 more than a multiple of 6, e.g. 40, 100, 190, 250.
        growth_rate: Features that each layer adds.
        compression: Share of the features that a transition keeps, 0 to 1.
        drop_rate: Dropout after each layer.
        model: An ImageNet shape instead of a depth: densenet121, densenet161, densenet169, densenet201, densenet264.
        n_epochs: Passes over the training set.
        batch_size: Images per GPU and step; auto for as many as fit into --memory_budget.
        lr: Learning rate per GPU.
        wd: Weight decay.
        momentum: Nesterov momentum.
        lr_scaling: How the rate grows with the number of GPUs: linear, sqrt or none.
        schedule: multistep (to a tenth after 50 % and again after 75 % of the epochs) or cosine.
        warmup_epochs: Epochs of rising rate. Default: 5 when the rate is scaled up, else 0.
        valid_size: Training images held out to choose the best weights. Default: 5000, at most a tenth of them.
        seed: Seed of split, weights, order and augmentation. Default: drawn, and written to config.json.
        num_workers: Processes that load images, per GPU. Default: the CPUs per GPU, at most 8.
        device: auto, cpu, cuda or cuda:N.
        parallel: auto, ddp (under torchrun), dp (DataParallel, without it) or none.
        progress: Show a progress bar. Default: on a terminal.
        amp: off, bf16 or fp16: the precision of convolutions and products (mixed precision).
        channels_last: Keep feature maps in channels-last order, which convolutions prefer.
        accumulation_steps: Batches whose gradients make one step; the learning rate grows with them like with GPUs.
        ema_decay: Average the weights exponentially with this decay, e.g. 0.999, and evaluate and keep the averages.
        sync_bn: BatchNorm takes its statistics over the images of all processes, not of each alone.
        clip_grad: Scale gradients down to this norm where theirs is greater; 0 for never.
        label_smoothing: Share of each label that is spread evenly over the classes.
        compile: Compile the model with torch.compile.
        resume: True (with --save) or a run's folder or checkpoint.pt, to go on exactly where it stopped, or from the
            start if it has no checkpoint yet. Only n_epochs, num_workers, progress and tensorboard may change.
        save_every_steps: Write a checkpoint after every so many steps, not only after each epoch.
        evaluate: Test a saved model and train nothing; takes a run's folder, model.dat or another file of weights.
        memory_budget: What training may allocate per GPU (on a CPU: for its tensors), e.g. 8GiB, 500MiB or bytes. It is
            measured before the start, and the fastest way (--efficient) that fits is picked; an explicit one is used or
            refused. Without it there is no limit; for --batch_size auto it is 90 % of what the GPU has free.
        teacher: Learn from a trained network too (knowledge distillation): a run's folder, its model.dat, or a file of
            weights with --teacher_model. It runs without gradients, on every GPU; its train loss is the weighted one.
        teacher_model: The ImageNet shape of the teacher, where no config.json beside its weights says it.
        distill: What is learned from the teacher: soft (its probabilities) or hard (the class that it takes for right).
        distill_alpha: Weight of the teacher's part of the loss; the labels have the rest.
        distill_temperature: Divides the logits of both before the soft probabilities are taken.
        tensorboard: Write the curves for TensorBoard too.
        max_steps: At most so many training steps in each epoch, for trying things out.
    """

    efficient: bool | str = _flag(True, choices=MODES)
    data: str = _flag("./data", path=True)
    dataset: str = _flag(
        "auto", choices=("auto", "cifar10", "cifar100", "svhn", "fashion_mnist", "imagefolder", "digits")
    )
    image_size: int | None = _flag(None, at_least=1)
    image_max: float | None = _flag(None, above=0)
    save: str | None = _flag(None, path=True)
    overwrite: bool = _flag(False)
    depth: int = _flag(100, at_least=1)
    growth_rate: int = _flag(12, at_least=1)
    compression: float = _flag(0.5, above=0, at_most=1)
    drop_rate: float = _flag(0.0, at_least=0, below=1)
    model: str | None = _flag(None, choices=IMAGENET_SHAPES)
    n_epochs: int = _flag(300, at_least=1)
    batch_size: int | str = _flag(64, choices=("auto",), at_least=1)
    lr: float = _flag(0.1, above=0)
    wd: float = _flag(1e-4, at_least=0)
    momentum: float = _flag(0.9, at_least=0, below=1)
    lr_scaling: str = _flag("linear", choices=("linear", "sqrt", "none"))
    schedule: str = _flag("multistep", choices=("multistep", "cosine"))
    warmup_epochs: int | None = _flag(None, at_least=0)
    valid_size: int | None = _flag(None, at_least=0)
    seed: int | None = _flag(None, at_least=0, below=2**32)
    num_workers: int | None = _flag(None, at_least=0)
    device: str = _flag("auto", choices=("auto", "cpu", "cuda", "cuda:N"))
    parallel: str = _flag("auto", choices=("auto", "ddp", "dp", "none"))
    progress: bool | None = _flag(None)
    amp: str = _flag("off", choices=("off", "bf16", "fp16"))
    channels_last: bool = _flag(True)
    accumulation_steps: int = _flag(1, at_least=1)
    ema_decay: float = _flag(0.0, at_least=0, below=1)
    sync_bn: bool = _flag(False)
    clip_grad: float = _flag(0.0, at_least=0)
    label_smoothing: float = _flag(0.0, at_least=0, below=1)
    compile: bool = _flag(False)
    resume: bool | str = _flag(False, path=True)
    save_every_steps: int | None = _flag(None, at_least=1)
    evaluate: str | None = _flag(None, path=True)
    memory_budget: str | None = _flag(None)
    teacher: str | None = _flag(None, path=True)
    teacher_model: str | None = _flag(None, choices=IMAGENET_SHAPES)
    distill: str = _flag("soft", choices=("soft", "hard"))
    distill_alpha: float = _flag(0.5, at_least=0, at_most=1)
    distill_temperature: float = _flag(1.0, above=0)
    tensorboard: bool = _flag(False)
    max_steps: int | None = _flag(None, at_least=1)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = _checked(field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        if self.memory_budget is not None:
            if not bytes_of(self.memory_budget):
                raise UsageError(f"--memory_budget {self.memory_budget}: expected bytes, or e.g. 8GiB or 500MiB")
            unit = re.sub("[kmgt]ib", lambda found: f"{found[0][0].upper()}iB", self.memory_budget, flags=re.IGNORECASE)
            object.__setattr__(self, "memory_budget", unit)
        if self.teacher is None and not self.resume:  # which brings its teacher
            for name in ("teacher_model", "distill", "distill_alpha", "distill_temperature"):
                if getattr(self, name) != self.__dataclass_fields__[name].default:
                    raise UsageError(f"--{name} {getattr(self, name)}: from whom? add --teacher PATH")
        if self.distill == "hard" and self.distill_temperature != 1:
            raise UsageError(f"--distill_temperature {self.distill_temperature:g}: has no meaning for --distill hard")
        if self.warmup_epochs is not None and self.warmup_epochs > self.n_epochs:
            raise UsageError(f"--warmup_epochs {self.warmup_epochs}: the run has {self.n_epochs} epochs, take no more")


def _types(field):
    """The types that a field takes."""
    return typing.get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)


def _kinds(field):
    """What a field takes, in words."""
    names = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", type(None): "None"}
    if field.metadata["choices"]:
        names[str] = " or ".join(field.metadata["choices"])
    return " or ".join(names[kind] for kind in _types(field))


def _checked(field, value):
    """The value in the field's type, or a :class:`UsageError` that says what would do."""
    types_ = _types(field)
    if isinstance(value, str):
        value = _meant(field, value)
    if float in types_ and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) not in types_:
        raise UsageError(f"--{field.name} {value}: expected {_kinds(field)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"--{field.name} {value}: expected a finite number")
    holds = {
        "at_least": lambda bound: value >= bound,
        "above": lambda bound: value > bound,
        "at_most": lambda bound: value <= bound,
        "below": lambda bound: value < bound,
    }
    bounds = field.metadata["bounds"] if isinstance(value, (int, float)) else {}
    if not all(holds[name](bound) for name, bound in bounds.items()):
        wanted = " and ".join(f"{name.replace('_', ' ')} {bound}" for name, bound in bounds.items())
        raise UsageError(f"--{field.name} {value}: must be {wanted}")
    return value


def _meant(field, text):
    """What a text stands for in a field: True, False, None and words in any case; numbers; paths with ~; else itself.

    Fire's ``True`` for a flag without a value is no value where a text is expected.
    """
    types_, word = _types(field), text.lower()
    if text == "" or text == "True" and str in types_ and bool not in types_:
        raise UsageError(f"--{field.name} needs a value" + (", not an empty text" if text == "" else ""))
    if bool in types_ and word in ("true", "false"):
        return word == "true"
    if type(None) in types_ and word == "none":
        return None
    for number in {int, float}.intersection(types_):
        with contextlib.suppress(ValueError):
            return number(text)
    if str not in types_:
        return text
    choices = field.metadata["choices"]
    if choices:
        if not any(re.fullmatch(choice.replace("N", "[0-9]+"), word) for choice in choices):
            wanted = f"one of {', '.join(choices)}" if {int, bool}.isdisjoint(types_) else _kinds(field)
            raise UsageError(f"--{field.name} {text}: expected {wanted}")
        return word
    if field.metadata["path"]:
        path = os.path.expanduser(text)
        if path.startswith("~"):
            user = path.partition(os.sep)[0]
            raise UsageError(f"--{field.name} {text}: there is no home folder {user} (a folder of that name: ./{path})")
        return path
    return text


def read_flags(settings, arguments, program, as_text=False):
    """The flags on a command line, by name; nothing is made of them yet.

    Fire calls a function as soon as it has its arguments and complains about what is left over afterwards; here that
    function only notes them, so a misspelt flag is refused before anything runs.

    Args:
        settings: A dataclass whose fields are the flags, and whose docstring is the help.
        arguments: The arguments as in ``sys.argv[1:]``. ``--help`` prints the flags and exits.
        program: The name that the help shows.
        as_text: Give the values as they were typed, not what Fire makes of them, to which 2024 is never a folder.

    Raises:
        UsageError: An unknown flag, or an argument that is none.
    """
    given = {}

    def note(**flags):
        given.update(flags)

    note.__signature__ = inspect.signature(settings)
    note.__doc__ = settings.__doc__
    if not {"-h", "--help"} & set(arguments):  # the marks that parsers leave on a function would show in its help
        if "--" in arguments:
            raise UsageError("unexpected argument '--': every setting is a flag, --name value")
        if as_text:
            fire.decorators.SetParseFn(str)(note)
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):  # Fire explains a mistake in a page; a line is enough
            fire.Fire(note, list(arguments), name=program)
    except fire.core.FireExit as stop:
        if stop.code == 0:  # --help, below a line about how Fire got there
            print(messages.getvalue().partition("\n\n")[2].rstrip())
            sys.exit(0)
        names = [field.name for field in dataclasses.fields(settings)]
        raise UsageError(_explain(messages.getvalue(), names)) from None
    return given


def parse_flags(arguments):
    """Turns command-line arguments into a :class:`Config`, and the names of the flags that were typed.

    Args:
        arguments: The arguments as in ``sys.argv[1:]``. ``--help`` prints the flags and exits.

    Raises:
        UsageError: An unknown flag, or a value that a flag does not take.
    """
    given = read_flags(Config, arguments, "demo.py", as_text=True)
    config = Config(**given)
    if "data" in given and config.dataset == "auto":  # someone who names a folder wants what is in it
        config = dataclasses.replace(config, dataset=dataset_in(config.data, "cifar10"))
    fixed = [name for name in ("depth", "growth_rate", "compression") if name in given]
    if config.model is not None and fixed:
        raise UsageError(f"--{fixed[0]} does not go with --model {config.model}, whose shape is fixed")
    return config, set(given)


def _explain(message, names):
    """One line for what Fire refused, with the flag that was probably meant."""
    line = next((line for line in message.splitlines() if line.startswith("ERROR: ")), message).removeprefix("ERROR: ")
    unknown = line.removeprefix("Could not consume arg: ")
    if unknown == line:
        return line
    if not unknown.startswith("-"):
        return f"unexpected argument {unknown!r}: every setting is a flag, --name value"
    near = difflib.get_close_matches(unknown.lstrip("-").partition("=")[0].replace("-", "_"), names, n=1)
    return f"unknown flag {unknown}" + (f", did you mean --{near[0]}?" if near else "; --help lists the flags")
