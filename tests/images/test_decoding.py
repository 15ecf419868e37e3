"""Decoding, and crops that are torchvision's."""

import hashlib
import io
import random
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import optuna_fleet
from optuna_fleet import RandomResizedCrop, read_image
from optuna_fleet.images import decoding

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


@pytest.fixture(params=["simplejpeg", "pillow"])
def decoder(request, monkeypatch):
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(decoding, "_simplejpeg", lambda: None)
    return request.param


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
        read_image(content)
    with pytest.raises(ValueError, match=r"0001.jpg' can't be decoded"):
        RandomResizedCrop(8)(path)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_image(tmp_path / "none.jpg")


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize(("kind", "options"), FORMATS)
def test_truncated_image(kind, options):
    data = encoded(photograph(), kind, **options)
    for share in (0.2, 0.5, 0.9):
        with pytest.raises(ValueError, match="can't be decoded"):
            read_image(data[: int(share * len(data))])


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize(("kind", "options"), FORMATS)
def test_damaged_image_is_an_image_or_one_clear_error(kind, options):
    """Whatever can be read is what PIL reads; and PIL reads no more."""
    data, dice = encoded(photograph(), kind, **options), random.Random(0)
    readable = 0
    for _ in range(100):
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


def test_same_pixels_in_another_process(nursery, tmp_path):
    (tmp_path / "image.jpg").write_bytes(encoded(photograph(400, 300)))
    code = (
        "import sys, hashlib, torch; from optuna_fleet import read_image, RandomResizedCrop;"
        "torch.manual_seed(3); crop = RandomResizedCrop(32)(sys.argv[1]);"
        "image = read_image(sys.argv[1]);"
        "print(hashlib.sha256(image.numpy().tobytes() + crop.numpy().tobytes()).hexdigest())"
    )
    path = str(tmp_path / "image.jpg")
    (tmp_path / "script.py").write_text(code)
    run = nursery.run(tmp_path / "script.py", path)
    torch.manual_seed(3)
    crop = RandomResizedCrop(32)(path)
    pixels = read_image(path).numpy().tobytes() + crop.numpy().tobytes()
    assert run.stdout.strip() == hashlib.sha256(pixels).hexdigest()


def test_loader_of_an_image_folder(tmp_path):
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "1.jpg").write_bytes(encoded(photograph()))
    plain = ImageFolder(str(tmp_path), transform=v2.PILToTensor())
    ours = ImageFolder(str(tmp_path), loader=read_image)
    assert torch.equal(plain[0][0], ours[0][0])


def test_public_names_are_lazy():
    assert optuna_fleet.read_image is read_image
    assert optuna_fleet.RandomResizedCrop is RandomResizedCrop
    with pytest.raises(AttributeError, match="no attribute 'read_picture'"):
        _ = optuna_fleet.read_picture
