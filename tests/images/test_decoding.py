"""Decoding, and crops that are torchvision's."""

import io
import random
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from optuna_fleet import RandomResizedCrop, read_image

FORMATS = [
    ("JPEG", {"quality": 90}),
    ("JPEG", {"quality": 90, "progressive": True}),
    ("JPEG", {"quality": 90, "subsampling": 0}),
    ("PNG", {}),
    ("WEBP", {"quality": 80}),
    ("WEBP", {"lossless": True}),
    ("BMP", {}),
]


def photograph(width=97, height=64, seed=0):
    """Smooth shapes with some noise on them."""
    noise = np.random.default_rng(seed)
    small = noise.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    smooth = np.array(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))
    grain = noise.normal(0, 3, smooth.shape)
    return Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8))


def encoded(picture, kind="JPEG", **options):
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def by_pil(data):
    pixels = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)


# -- read_image -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize(("kind", "options"), FORMATS)
def test_reads_what_pil_reads(kind, options, tmp_path):
    data = encoded(photograph(), kind, **options)
    path = tmp_path / f"image.{kind.lower()}"
    path.write_bytes(data)
    image = read_image(data)
    assert (image.dtype, tuple(image.shape)) == (torch.uint8, (3, 64, 97))
    assert torch.equal(image, by_pil(data))
    assert torch.equal(image, read_image(path))
    assert torch.equal(image, read_image(str(path)))
    image += 1  # it is writable, and nobody else's
    assert not torch.equal(image, read_image(data))


def unusual():
    rgb = photograph()
    rgba = rgb.convert("RGBA")
    rgba.putalpha(photograph(seed=1).convert("L"))
    deep = Image.fromarray((np.arange(64 * 97).reshape(64, 97) * 10).astype(np.uint16))
    exif = Image.Exif()
    exif[0x0112] = 6  # on its side
    return {
        "cmyk jpeg": encoded(rgb.convert("CMYK")),
        "gray jpeg": encoded(rgb.convert("L")),
        "rotated jpeg": encoded(rgb, exif=exif),
        "palette png": encoded(rgb.convert("P"), "PNG"),
        "transparent palette png": encoded(rgb.convert("P"), "PNG", transparency=3),
        "transparent colour png": encoded(rgb, "PNG", transparency=(1, 2, 3)),
        "rgba png": encoded(rgba, "PNG"),
        "gray png": encoded(rgb.convert("L"), "PNG"),
        "gray alpha png": encoded(rgba.convert("LA"), "PNG"),
        "16-bit png": encoded(deep, "PNG"),
        "1-bit png": encoded(rgb.convert("1"), "PNG"),
        "rgba webp": encoded(rgba, "WEBP"),
        "animated webp": encoded(
            rgb, "WEBP", save_all=True, append_images=[photograph(seed=2)], lossless=True
        ),
    }


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("name", unusual())
def test_unusual_images_come_out_as_from_pil(name):
    data = unusual()[name]
    assert torch.equal(read_image(data), by_pil(data))


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("content", [b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"Not an image."])
def test_no_image_at_all(content, tmp_path):
    path = tmp_path / "0001.jpg"
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"0001.jpg' can't be decoded: .*truncated, corrupt or no"
    ):
        read_image(path)
    with pytest.raises(ValueError, match=f"An image of {len(content)} bytes can't be decoded"):
        RandomResizedCrop(8)(content)


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize(("kind", "options"), FORMATS)
def test_damaged_image_is_an_image_or_one_clear_error(kind, options):
    """Whatever can be read is what PIL reads; and PIL reads no more."""
    data, dice = encoded(photograph(), kind, **options), random.Random(0)
    readable = 0
    for _ in range(40):
        damaged = bytearray(data)
        for _ in range(dice.choice([1, 3, 20])):
            damaged[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL's, about odd EXIF data
            try:
                wanted = by_pil(bytes(damaged))
            except Exception:
                with pytest.raises(ValueError, match="can't be decoded"):
                    read_image(bytes(damaged))
            else:
                assert torch.equal(read_image(bytes(damaged)), wanted)
                readable += 1
    assert readable > 0 or kind == "PNG"


@pytest.mark.usefixtures("decoder")
def test_image_that_claims_to_be_huge(monkeypatch):
    data = encoded(photograph())
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ValueError, match="can't be decoded: Image size"):
        read_image(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert torch.equal(read_image(data), by_pil(data))
