"""Class folders: a file that cannot be used is named before the training, and no level of the others is lost."""

import io
import os
import re
import struct
import zlib
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from efficient_densenet.training import class_folders, data
from efficient_densenet.training.config import Config, RunError, UsageError
from efficient_densenet.training.distributed import World


def load(folder, **flags):
    flags = {"dataset": "imagefolder", "data": str(folder), "num_workers": 0, "valid_size": 0} | flags
    return data.load(Config(**flags), World(), 0)


@pytest.fixture
def folders(tmp_path):
    """Two classes of two images of noise for training and one for the test."""
    for part, count in (("train", 2), ("test", 1)):
        for name in "ab":
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                Image.effect_noise((32, 32), 50).convert("RGB").save(tmp_path / part / name / f"{i}.png")
    return tmp_path


def png(values, size=None):
    """A PNG of 16 bits from height, width and channels (grey, with transparency; colours, with transparency)."""
    height, width, channels = values.shape
    width, height = size or (width, height)
    header = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )


def tiff(values, order="<", compressed=False, photometric=None):
    """A TIFF of one strip, in either order of bytes."""
    height, width, channels = values.shape
    kind = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    strip = values.astype(values.dtype.newbyteorder(order)).tobytes()
    strip = zlib.compress(strip) if compressed else strip
    shorts = {258: [8 * values.itemsize] * channels, 339: [kind] * channels}
    shorts |= {259: [8 if compressed else 1], 262: [photometric or (2 if channels > 2 else 1)], 277: [channels]}
    shorts |= {338: [2]} if channels == 4 and photometric is None else {}
    longs = {256: width, 257: height, 278: height, 279: len(strip), 273: None}
    end = 8 + 2 + 12 * (len(shorts) + len(longs)) + 4
    entries, behind = [], b""
    for tag in sorted({**shorts, **longs}):
        if tag in longs:
            entries.append(struct.pack(order + "HHII", tag, 4, 1, longs[tag] or 0))
            continue
        packed = struct.pack(f"{order}{len(shorts[tag])}H", *shorts[tag])
        if len(packed) > 4:
            packed, behind = struct.pack(order + "I", end + len(behind)), behind + packed
        entries.append(struct.pack(order + "HHI", tag, 3, len(shorts[tag])) + packed.ljust(4, b"\0"))
    where = struct.pack(order + "I", end + len(behind))
    entries = [entry[:8] + where if entry[:2] == struct.pack(order + "H", 273) else entry for entry in entries]
    start = {"<": b"II", ">": b"MM"}[order] + struct.pack(order + "HI", 42, 8)
    return start + struct.pack(order + "H", len(entries)) + b"".join(entries) + b"\0" * 4 + behind + strip


def frames(kind, count=2, **options):
    file = io.BytesIO()
    images = [Image.new("RGB", (32, 32), (50 * i, 0, 0)) for i in range(count)]
    images[0].save(file, kind, save_all=True, append_images=images[1:], **options)
    return file.getvalue()


def saved(mode, kind, size=(32, 32)):
    file = io.BytesIO()
    Image.effect_noise((size), 50).convert(mode).save(file, kind)
    return file.getvalue()


UNUSABLE = {
    "too large": (lambda: png(numpy.ones((1, 1, 3)), size=(20000, 10000)), "could be decompression bomb"),
    "empty": (bytes, "it is empty"),
    "no image": (lambda: b"<html>404</html>", "no format that PIL reads"),
    "PNG cut in the middle": (lambda: saved("RGB", "PNG")[:700], "truncated"),
    "PNG cut in its header": (lambda: saved("RGB", "PNG")[:20], ""),
    "JPEG cut": (lambda: saved("RGB", "JPEG")[:-30], "truncated"),
    "WebP cut": (lambda: saved("RGB", "WEBP")[:-30], ""),
    "BMP cut": (lambda: saved("RGB", "BMP")[:-30], "truncated"),
    "PPM cut": (lambda: saved("RGB", "PPM")[:-30], "truncated"),
    "TIFF cut": (lambda: tiff(numpy.ones((32, 32, 1), "uint8"))[:-30], "truncated"),
    "16-bit TIFF cut": (lambda: tiff(numpy.ones((32, 32, 3), "uint16"))[:-30], "truncated"),
    "GIF of two frames": (lambda: frames("GIF"), "it holds 2 images"),
    "PNG of two frames": (lambda: frames("PNG"), "it holds 2 images"),
    "WebP of three frames": (lambda: frames("WEBP", 3), "it holds 3 images"),
    "TIFF of two pages": (lambda: frames("TIFF"), "it holds 2 images"),
    "CMYK of 16 bits": (lambda: tiff(numpy.ones((32, 32, 4), "uint16"), photometric=5), "drops the lower 8 bits"),
    "grey and transparency of 16 bits": (lambda: png(numpy.ones((32, 32, 2), "uint16")), "drops the lower 8 bits"),
    "PPM of 16 bits": (lambda: b"P6 32 32 4095\n" + bytes(32 * 32 * 6), "drops the lower 8 bits"),
}


@pytest.mark.parametrize("flags", [{}, {"image_size": 16}], ids=["as they are", "resized"])
@pytest.mark.parametrize("name", UNUSABLE)
def test_a_file_that_cannot_be_used_is_named_before_the_training(folders, name, flags):
    """Kills: a look at the headers where sizes matter alone, and one at the headers alone."""
    content, words = UNUSABLE[name]
    path = folders / "train/b/1.png"
    path.write_bytes(content())
    with pytest.raises(UsageError) as caught:
        load(folders, **flags)
    message = str(caught.value)
    assert message.startswith(f"--data: cannot read the image {path}: ") and words in message and "\n" not in message
    assert not message.endswith(": ") and "BytesIO" not in message and "BufferedReader" not in message


def link(path, target):
    path.unlink()
    path.symlink_to(target)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda path: link(path, "nowhere"), "No such file or directory"),
        (lambda path: link(path, path.name), "Too many levels of symbolic links"),
        (pipe, "it is no file"),
    ],
)
def test_a_name_without_a_file_is_said(folders, spoil, words):
    spoil(folders / "test/a/0.png")
    with pytest.raises(UsageError, match=f"cannot read .*test/a/0.png: {words}"):
        load(folders)


def test_what_may_not_be_read_is_said(folders, monkeypatch):
    """For root nothing is forbidden."""
    real = os.scandir

    def forbidden(path):
        if str(path).endswith("train/b"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(class_folders.os, "scandir", forbidden)
    with pytest.raises(UsageError, match="--data: cannot read .*train/b: Permission denied"):
        load(folders)


def test_a_test_needs_no_training_images(folders):
    (folders / "train/a/0.png").write_bytes(b"")
    assert len(load(folders, evaluate="model.dat").test) == 2
    (folders / "test/a/0.png").write_bytes(b"")
    with pytest.raises(UsageError, match="test/a/0.png: it is empty"):
        load(folders, evaluate="model.dat")


@pytest.mark.parametrize(
    "content",
    [
        lambda: saved("CMYK", "JPEG"),
        lambda: saved("P", "PNG"),
        lambda: saved("1", "PNG"),
        lambda: saved("LA", "PNG"),
        lambda: saved("RGBA", "WEBP"),
        lambda: saved("L", "PPM"),
        lambda: saved("RGB", "JPEG") + b"what some cameras add",
        lambda: saved("RGB", "PNG")[:-12],  # the pixels are there
        lambda: frames("MPO"),
        lambda: tiff(numpy.ones((32, 32, 3), "uint8"), ">", compressed=True),
        lambda: b"P4 32 32\n" + bytes(128),
        lambda: b"P1 32 32\n" + b"1 0 " * 512,
        lambda: b"P5 32 32 15\n" + bytes(1024),
    ],
)
def test_what_can_be_used_is(folders, content):
    (folders / "train/b/1.png").write_bytes(content())
    found = load(folders)
    assert found.train[3][0].shape == (3, 32, 32) and found.remarks == ()


def test_pages_that_are_previews_or_masks_do_not_count(folders, monkeypatch):
    (folders / "train/b/1.png").write_bytes(frames("TIFF", 3))
    kinds = iter((0, 1, 4))
    monkeypatch.setattr("PIL.TiffImagePlugin.ImageFileDirectory_v2.get", lambda self, tag, other=None: (
        next(kinds) if tag == 254 else self[tag] if tag in self else other))  # fmt: skip
    assert len(load(folders).train) == 4


def test_large_images_and_odd_metadata_are_no_warnings(folders, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # the 1024 pixels are below twice as many
    assert load(folders).test[0][0].shape == (3, 32, 32)


def test_colours_that_pil_does_not_turn_into_rgb(folders, monkeypatch):
    """As Lab, in older releases of it."""
    real = Image.Image.convert

    def convert(self, mode):
        if self.mode == "LAB":
            raise ValueError("conversion from LAB to RGB not supported")
        return real(self, mode)

    monkeypatch.setattr(Image.Image, "convert", convert)
    (folders / "train/b/1.png").write_bytes(tiff(numpy.ones((32, 32, 3), "uint8"), photometric=8))
    with pytest.raises(UsageError, match="1.png: conversion from LAB to RGB not supported"):
        load(folders)


def test_damage_in_the_middle_is_named_when_it_is_read(folders):
    path = folders / "train/b/1.png"
    whole = path.read_bytes()
    path.write_bytes(whole[:200] + bytes(200) + whole[400:])
    found = load(folders)
    with pytest.raises(RunError, match=f"^cannot read the image {path}: [^\n]+$"):
        found.train[3]


def test_a_link_that_leads_back_is_not_followed(folders):
    for name, target in (("self", "."), ("up", ".."), ("top", "../.."), ("b", "../b")):
        (folders / "train/a" / name).symlink_to(target)
    (folders / "train/b/a").symlink_to("../a")
    (folders / "train/a/more.png").mkdir()  # a folder, whatever its name
    Image.new("RGB", (32, 32)).save(folders / "train/a/more.png/x.jpg")
    (folders / "train/a/.thumbnails").mkdir()
    Image.new("RGB", (8, 8)).save(folders / "train/a/.thumbnails/x.jpg")
    (folders / "train/a/notes.txt").write_text("mine")
    found = load(folders)
    names = [os.path.relpath(path, folders / "train") for path, _ in found.train.source.samples]
    assert names == ["a/0.png", "a/1.png", "a/b/0.png", "a/b/1.png", "a/more.png/x.jpg",
                     "b/0.png", "b/1.png", "b/a/0.png", "b/a/1.png", "b/a/more.png/x.jpg"]  # fmt: skip
    (said,) = found.remarks
    assert said == f"left out, as no images by their names: 2 files, such as {folders}/train/a/notes.txt"


def test_names_in_no_encoding(folders):
    odd = Path(os.fsdecode(bytes(folders) + b"/train/b/\xff\n\xfe.png"))
    odd.write_bytes((folders / "train/b/1.png").read_bytes())
    assert len(load(folders).train) == 5
    odd.write_bytes(b"")
    with pytest.raises(UsageError) as caught:
        load(folders)
    assert "\udcff" in str(caught.value)


# More than 8 bits

LEVELS = numpy.arange(65536).reshape(256, 256, 1)


def deep(folders, content, **flags):
    """The one image of 256 x 256, as the network gets it but for the normalisation."""
    for path in folders.rglob("*.png"):
        Image.new("L", (256, 256)).save(path)
    (folders / "train/b/1.png").write_bytes(content)
    found = load(folders, **flags)
    mean, std = (torch.tensor(found.facts[name], dtype=torch.float64)[:, None, None] for name in ("mean", "std"))
    return data.Images(found.train.source, [3], found.test.transform)[0][0].double() * std + mean, found


@pytest.mark.parametrize(
    "content, white",
    [
        (lambda: png(LEVELS), 65535),
        (lambda: tiff(LEVELS.astype("uint16")), 65535),
        (lambda: tiff(LEVELS.astype("uint16"), ">"), 65535),
        (lambda: tiff(LEVELS.astype("uint16"), compressed=True), 65535),
        (lambda: b"P5 256 256 65535\n" + LEVELS.astype(">u2").tobytes(), 65535),
        (lambda: tiff(LEVELS.astype("int32")), 100000),
        (lambda: tiff((LEVELS - 32768).astype("int16"), ">"), 32767),
        (lambda: tiff(LEVELS.astype("float32")), 1e6),
    ],
    ids=["png", "tiff", "big-endian", "compressed", "pgm", "int32", "int16", "float32"],
)
def test_no_grey_level_is_lost(folders, content, white):
    """Kills: 8 bits, a signed reading of 16, values that PIL clips."""
    got, _ = deep(folders, content(), image_max=None if white == 65535 else white)
    wanted = LEVELS[..., 0] - (32768 if white == 32767 else 0)
    assert torch.allclose(got, torch.from_numpy(wanted / white).expand(3, -1, -1), atol=1e-6)
    assert len(torch.unique((got[0] * white).round())) == 65536


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("write", [png, tiff, lambda values: tiff(values, ">"), lambda values: tiff(values, ">", True)])
def test_no_level_of_a_colour_is_lost(folders, write, channels):
    """PIL keeps 8 of the 16 bits. Kills: the same 8 bits twice, the bytes exchanged, channels as rows."""
    values = torch.randint(65536, (256, 256, channels)).numpy().astype("uint16")
    got, _ = deep(folders, write(values))
    assert torch.allclose(got, torch.from_numpy(values[..., :3] / 65535).permute(2, 0, 1), atol=1e-6)


def test_12_bits_stay_4096_levels_through_resize_crop_and_flip(folders):
    values = torch.randperm(65536).numpy().reshape(LEVELS.shape) % 4096
    got, found = deep(folders, png(values), image_max=4095)
    assert len(torch.unique(got[0])) == 4096 and got.min().abs() < 1e-6 and (got.max() - 1).abs() < 1e-6
    images = data.Images(found.train.source, [3], data._transforms(64, (64, 64), (0.5,) * 3, (0.5,) * 3, True)[0])
    views = [images[0, seed][0] for seed in range(4)]
    assert {view.shape for view in views} == {(3, 64, 64)} and len(torch.unique(views[0])) > 1000
    images = data.Images(found.train.source, [3], data._transforms(128, (128, 128), (0.5,) * 3, (0.5,) * 3, True)[0])
    assert images[0, 0][0].shape == (3, 128, 128) and len(torch.unique(images[0, 0][0])) > 4096


def test_what_is_above_white_is_kept(folders):
    got, found = deep(folders, png(LEVELS), image_max=4095)
    assert (got.max() - 65535 / 4095).abs() < 1e-5
    said = "images of more than 8 bits: values up to 65,535, white is 4,095; what is above it is kept, as brighter"
    assert found.remarks[0].startswith(said)


@pytest.mark.parametrize(
    "content, flags, words",
    [
        (lambda: png(LEVELS % 4096), {}, "values up to 4,095, white is 65,535: most of .*, --image_max 4095 uses it"),
        (lambda: png(LEVELS % 3000), {}, "values up to 2,999, white is 65,535: most of .*, --image_max 4095 uses it"),
        (lambda: png(LEVELS % 4097), {}, "values up to 4,096, white is 65,535$"),
        (lambda: png(LEVELS * 0), {}, "values up to 0, white is 65,535$"),
        (lambda: tiff(LEVELS.astype("float32") / 1e6), {"image_max": 2}, "values up to 0.06554.*--image_max 0.0655 "),
    ],
)
def test_a_range_that_is_hardly_used_is_said(folders, content, flags, words):
    _, found = deep(folders, content(), **flags)
    (said,) = found.remarks
    assert re.search(f"^images of more than 8 bits: {words}", said)


def test_white_that_no_type_tells_has_to_be_given(folders):
    for values, mode in ((LEVELS.astype("int32"), "I"), (LEVELS.astype("float32"), "F")):
        with pytest.raises(UsageError, match=rf"--image_max: which value is white in .*1.png\? Its type \({mode}\)"):
            deep(folders, tiff(values))
    values = LEVELS.astype("float32")
    values[9, 9] = numpy.nan
    with pytest.raises(UsageError, match="cannot read the image .*1.png: some of its values are not finite"):
        deep(folders, tiff(values), image_max=65535)


def test_image_max_where_it_changes_nothing_is_said(folders):
    assert load(folders, image_max=4095).remarks == ("--image_max changes nothing: no image has more than 8 bits",)
    said = data.load(Config(dataset="digits", image_max=4095), World(), 0).remarks
    assert said == ("--image_max changes nothing: it is for class folders",)
