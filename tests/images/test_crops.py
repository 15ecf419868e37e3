"""Random crops: torchvision's, to the last bit, by the compiled step and without it."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from test_decoding import encoded, photograph
from torchvision import tv_tensors
from torchvision.transforms import v2

from optuna_fleet import RandomResizedCrop, read_image
from optuna_fleet.images import crops


@pytest.fixture(params=["compiled", "torch"])
def kernel(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(crops, "_resample", None)
    elif crops._resample is None:
        pytest.skip("not compiled: python setup.py build_ext --inplace")


SIZES = [(375, 500), (64, 97), (64, 2000), (2000, 64), (3, 5), (1, 1)]


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize(
    "arguments", [{}, {"scale": (0.5, 0.6)}, {"scale": (0.9, 1.0), "ratio": (1.9, 2.0)}]
)
def test_draws_torchvisions_crops(height, width, arguments):
    theirs, ours = v2.RandomResizedCrop(16, **arguments), RandomResizedCrop(16, **arguments)
    empty = torch.empty(3, height, width)
    for seed in range(60):
        torch.manual_seed(seed)
        drawn = (
            getattr(theirs, "make_params", None) or theirs._get_params
        )  # so torchvision 0.19 calls it
        wanted = drawn([empty])
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        box = ours.draw(height, width)
        assert box == tuple(wanted[side] for side in ("top", "left", "height", "width"))
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("decoder", "kernel")
@pytest.mark.parametrize("size", [24, (24,), (20, 31)])
def test_pixels_of_torchvision(size):
    data = encoded(photograph())
    image = read_image(data)
    theirs, ours = v2.RandomResizedCrop(size), RandomResizedCrop(size)
    for seed in range(30):
        crops = []
        inputs = [image, image.contiguous(), image.float(), Image.open(io.BytesIO(data))]
        for crop, given in [*((theirs, i) for i in inputs), *((ours, i) for i in inputs)]:
            torch.manual_seed(seed)
            crops.append(crop(given))
        for wanted, got in zip(crops[:3], crops[4:7], strict=True):
            assert torch.equal(wanted, got)
        assert crops[3].tobytes() == crops[7].tobytes()
        torch.manual_seed(seed)
        assert torch.equal(ours(data), crops[0])


def layouts(pixels):
    """The same image [3, H, W] in memory in every way there is."""
    image = torch.from_numpy(pixels)
    _, height, width = image.shape
    wide = torch.zeros(height + 3, width + 5, 3, dtype=torch.uint8)
    wide[1:-2, 2:-3] = image.permute(1, 2, 0)
    return {
        "channels first": image.contiguous(),
        "channels last": image.permute(1, 2, 0).contiguous().permute(2, 0, 1),
        "part of another": wide[1:-2, 2:-3].permute(2, 0, 1),
        "columns first": image.permute(0, 2, 1).contiguous().permute(0, 2, 1),
        "tv_tensor": tv_tensors.Image(image.contiguous()),
    }


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("flip", [0.0, 0.5, 1.0])
def test_bits_of_torchvision(flip):
    """Crops and outputs of all sizes, larger and smaller than each other."""
    dice = np.random.default_rng(int(10 * flip))
    for seed in range(30):
        height, width = dice.integers(1, 300, 2)
        size = tuple(int(n) for n in dice.integers(1, (240, 40)[seed % 2], 2))
        theirs = v2.RandomResizedCrop(size, scale=(0.01, 1))
        ours = RandomResizedCrop(size, scale=(0.01, 1), flip=flip)
        pixels = dice.integers(0, 256, (3, height, width), dtype=np.uint8)
        both = v2.Compose([theirs, v2.RandomHorizontalFlip(flip)]) if flip else theirs
        for name, image in layouts(pixels).items():
            torch.manual_seed(seed)
            wanted = both(image)
            state = torch.get_rng_state()
            torch.manual_seed(seed)
            got = ours(image)
            assert type(got) is type(image)
            assert got.is_contiguous()
            assert torch.equal(got, wanted), (name, pixels.shape, size)
            assert torch.equal(torch.get_rng_state(), state)


def test_compiled_step_refuses_what_would_lie_outside():
    if crops._resample is None:
        pytest.skip("not compiled: python setup.py build_ext --inplace")
    image, out = np.zeros((3, 8, 9), np.uint8), np.zeros((3, 4, 4), np.uint8)
    boxes = [(0, 0, 9, 9), (0, 1, 8, 9), (-1, 0, 4, 4), (0, 0, 0, 4), (8, 0, 1, 1)]
    for box in boxes:
        with pytest.raises(ValueError, match="not a box"):
            crops._resample.resized_crop(image, box, out, False)
    others = [(image[0], out), (image.astype(np.int16), out), (image, out[:, :0]), (out[:2], out)]
    for source, target in others:
        with pytest.raises(ValueError, match="not a box"):
            crops._resample.resized_crop(source, (0, 0, 4, 4), target, False)
    with pytest.raises((ValueError, BufferError)):
        crops._resample.resized_crop(image, (0, 0, 4, 4), out[:, ::2], False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "`size` is 0"),
        ({"size": (1, 2, 3)}, "`size` is"),
        ({"size": 8, "scale": (0.0, 1.0)}, "`scale` is"),
        ({"size": 8, "ratio": (2.0, 1.0)}, "`ratio` is"),
        ({"size": 8, "scale": 0.5}, "`scale` is 0.5, but must be a pair"),
        ({"size": 8, "flip": 1.5}, "`flip` is 1.5"),
    ],
)
def test_arguments_that_can_not_work(arguments, message):
    with pytest.raises(ValueError, match=message):
        RandomResizedCrop(**arguments)
