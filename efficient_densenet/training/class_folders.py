"""Class folders of image files: which files there are, what can be known before they are read, and their pixels."""

import contextlib
import functools
import os
import re
import stat
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import torch
from PIL import Image, UnidentifiedImageError

from .config import IMAGE_FILES, RunError, UsageError

LOOKED_AT = 50  # images of more than 8 bits, to see which values they use
_END = {"PNG": b"IEND\xaeB`\x82", "JPEG": b"\xff\xd9", "MPO": b"\xff\xd9"}  # of a file that was copied whole
_GREY = ("I;16", "I;16B", "I;16L", "I;16N", "I", "F")  # PIL's modes of more than 8 bits


class ClassFolders:
    """Class folders of image files.

    An image is one of PIL's, in RGB, where its values have 8 bits. Where they have more, it is a float tensor in which
    black is 0 and white 1, with every level of the file: of one channel or three, height and width.

    Args:
        root: The folder that holds the class folders. What is hidden is neither a class nor an image, and a link that
            leads back to a folder above it is not followed.
        image_max: The value of white in images of more than 8 bits; None for the largest that their type holds.

    Attributes:
        root: That folder.
        classes: The names of the class folders, in order.
        samples: Path and class number of every image.
        others: Files whose names are not those of images.

    Raises:
        UsageError: There is no class folder, or one without images, or one that cannot be read.
    """

    def __init__(self, root, image_max=None):
        self.root, self.image_max, self.samples, self.others = root, image_max, [], []
        try:
            self.classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and entry.name[0] != ".")
            for label, name in enumerate(self.classes):
                top, before = os.path.join(root, name), len(self.samples)
                above = {*Path(top).absolute().parents, *Path(top).resolve().parents}
                for path in sorted(_files(top, {_identity(folder) for folder in above}), key=os.path.split):
                    if path.lower().endswith(IMAGE_FILES):
                        self.samples.append((path, label))
                    else:
                        self.others.append(path)
                if len(self.samples) == before:
                    raise UsageError(f"--data: no image in the class folder {top} ({', '.join(IMAGE_FILES)})")
        except OSError as error:
            raise UsageError(f"--data: cannot read {error.filename}: {error.strerror}") from None
        if not self.classes:
            raise UsageError(f"--data: there is no class folder in {root}")

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        with _quiet(), _opened(path, RunError) as file:
            return _pixels(file, self.image_max), label


def look(parts, config):
    """Looks at all files without reading the pixels of all: an image that cannot be used is found before the training.

    A file's header is read, and its end, which is missing in a file that was not copied whole. What is damaged in
    between shows when it is read.

    Args:
        parts: The folders whose images will be used.
        config: The flags.

    Returns:
        Width and height of the first image, and what to say of the values in images of more than 8 bits, if anything.

    Raises:
        UsageError: An image cannot be used, or the images have different sizes and are not resized.
    """
    first, deep = None, []
    with _quiet():
        for path, size, mode, white in _headers([path for part in parts for path, _ in part.samples]):
            if white is None and config.image_max is None:
                raise UsageError(f"--image_max: which value is white in {path}? Its type ({mode}) does not say")
            if white != 255:
                deep.append((path, config.image_max or white))
            first = first or size
            if size != first and config.image_size is None:
                pixels = "{}x{} pixels, the first image has {}x{}".format(*size, *first)
                raise UsageError(f"--image_size: the image {path} has {pixels}; --image_size N makes them all alike")
        return first, _values_used(deep, config)


def _values_used(deep, config):
    """What to say of images of more than 8 bits; ``deep``: their paths, and the value of white in each."""
    if not deep:
        return "--image_max changes nothing: no image has more than 8 bits" if config.image_max else None
    used = []
    for path, white in deep[:: -(-len(deep) // LOOKED_AT)]:
        with _opened(path, _before_any_work) as file:
            used.append((_pixels(file, 1).max().item(), white))
    top, white = max(used, key=lambda pair: pair[0] / pair[1])
    said = f"images of more than 8 bits: values up to {_number(top)}, white is {_number(white)}"
    if top > white:
        return f"{said}; what is above it is kept, as brighter than white"
    if 0 < top <= white / 16:
        fits = f"{2 ** int(top).bit_length() - 1}" if top.is_integer() else f"{top:.3g}"
        return f"{said}: most of the range lies idle, --image_max {fits} uses it"
    return said


def _headers(paths):
    """Path, size, mode and largest value of the type of each image; by several threads, as disks may be far away."""
    slices = [paths[start : start + 64] for start in range(0, len(paths), 64)]
    Image.init()  # which the threads would do at once
    with ThreadPoolExecutor(8) as threads, contextlib.closing(threads.map(_some_headers, slices)) as results:
        for headers in results:
            yield from headers


def _some_headers(paths):
    headers = []
    for path in paths:
        with _opened(path, _before_any_work) as file:
            image = Image.open(file)
            _refuse(image)
            headers.append((path, image.size, image.mode, _white(image)))
            _refuse_cut(image, file)
    return headers


def _number(value):
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def _before_any_work(line):
    return UsageError(f"--data: {line}")


def _identity(folder):
    """What a folder is, whatever it is called."""
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _files(folder, above):
    """The files in a folder and those in it; ``above``: the folders that it is in."""
    above = above | {_identity(folder)}
    with os.scandir(folder) as entries:
        entries = [entry for entry in entries if entry.name[0] != "."]
    for entry in entries:
        if not entry.is_dir():
            yield entry.path
        elif _identity(entry.path) not in above:
            yield from _files(entry.path, above)


@contextlib.contextmanager
def _quiet():
    """PIL warns of large images and odd metadata, which are no matter here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _opened(path, kind):
    """An open image file; all that goes wrong with it is an error of this kind which names it in a line."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for
            raise ValueError("it is no file but a device or a pipe")
        with open(path, "rb") as file:
            yield file
    except UnidentifiedImageError:
        empty = os.path.getsize(path) == 0
        raise kind(f"cannot read the image {path}: {'it is empty' if empty else 'no format that PIL reads'}") from None
    except Exception as error:  # PIL has no common type for what a damaged file makes it raise
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise kind(f"cannot read the image {path}: {reason}") from None


def _refuse(image):
    """Raises a ValueError for a file that holds several images, or one whose pixels PIL does not give."""
    if (pages := _pages(image)) > 1:
        raise ValueError(f"it holds {pages} images; save the one that is meant")
    if _white(image) == 255:
        _convert(image.mode)
    elif image.mode not in _GREY and not _lower_bytes(image):
        raise ValueError(f"PIL drops the lower 8 bits of its colours ({_raw_mode(image)}); save it as RGB or grey")


def _pages(image):
    """How many images a file holds: frames, or pages that are more than a preview or a mask of another one."""
    count = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)  # a photograph, and what a camera adds to it
    if image.format != "TIFF" or count == 1:
        return count
    kinds = []
    for page in range(count):
        image.seek(page)
        kinds.append(image.tag_v2.get(254, 0))
    image.seek(0)
    return sum(not kind & 5 for kind in kinds)


@functools.cache
def _convert(mode):
    """Raises what PIL raises for colours of 8 bits that it cannot turn into RGB."""
    Image.new(mode, (1, 1)).convert("RGB")


def _refuse_cut(image, file):
    """Raises what PIL raises for an image whose file ends too early.

    To look at the file's end is enough where it is as it should be; else the image is read, which takes longer.
    """
    file.seek(0)
    head, size = file.read(8), file.seek(0, os.SEEK_END)
    if image.format in _END:
        end = _END[image.format]
        file.seek(-len(end), os.SEEK_END)
        whole = file.read() == end
    elif image.format == "TIFF":  # its strips or tiles: where they begin, how long they are
        parts = (273, 279) if 273 in image.tag_v2 else (324, 325)
        starts, lengths = (image.tag_v2.get(part, ()) for part in parts)
        whole = len(starts) == len(lengths) > 0 and max(map(sum, zip(starts, lengths))) <= size
    else:
        length = {"WEBP": int.from_bytes(head[4:8], "little") + 8, "BMP": int.from_bytes(head[2:6], "little")}
        whole = 0 < length.get(image.format, 0) <= size
    if not whole:
        file.seek(0)
        Image.open(file).load()


def _raw_mode(image):
    """How PIL reads the file's values: ``RGB;16B`` are three times 16 bits, the first byte the higher one."""
    arguments = image.tile[0][3] if image.tile else ""
    return arguments if isinstance(arguments, str) else str(next(iter(arguments or [""])))


def _white(image):
    """The largest value of the file's type: 255 where it has 8 bits; None where it may be anything."""
    raw = _raw_mode(image)
    if image.mode == "F" or image.mode == "I" and image.format not in ("PNG", "PPM"):
        return None
    if image.mode in _GREY or re.search(";16[LBN]$", raw):  # PIL stretches what a PGM has to 16 bits
        return 4095 if raw == "I;12" else 65535
    if image.format == "PPM" and isinstance(image.tile[0][3], tuple) and image.tile[0][3][-1] > 255:
        return 65535
    return 255


def _lower_bytes(image):
    """How PIL gives the lower bytes of 16-bit colours, of which it keeps the higher: in the other order of bytes."""
    found = re.fullmatch("(RGB[AX]?;16)([LBN])", _raw_mode(image))
    return found and found[1] + {"L": "B", "B": "L", "N": "B" if sys.byteorder == "little" else "L"}[found[2]]


def _pixels(file, image_max):
    """An image of 8 bits in RGB, or the values of one that has more, as a tensor in which white is 1."""
    image = Image.open(file)
    white, lower_bytes = _white(image), _lower_bytes(image)
    if white == 255:
        return image.convert("RGB")
    image.load()
    if image.mode in _GREY:
        values = numpy.asarray(image)[None]
    else:
        file.seek(0)
        lower = Image.open(file)
        lower.tile = [_with_raw_mode(tile, lower_bytes) for tile in lower.tile]
        lower.load()
        values = numpy.asarray(image).astype("uint16") * 256 + numpy.asarray(lower)
        values = values[..., :3].transpose(2, 0, 1)
    if not numpy.isfinite(values).all():
        raise ValueError("some of its values are not finite")
    return torch.from_numpy(numpy.divide(values, image_max or white, dtype="float64").astype("float32"))


def _with_raw_mode(tile, raw):
    arguments = raw if isinstance(tile[3], str) else (raw, *tile[3][1:])
    return tile._replace(args=arguments) if hasattr(tile, "_replace") else (*tile[:3], arguments)  # of older PIL
