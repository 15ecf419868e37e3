"""What decoding an image costs, by each decoder that is installed, and a random crop of it.

python benchmarks/decoders.py           # about a minute
python benchmarks/decoders.py --quick   # every row once; for trying out
python benchmarks/decoders.py --only decoded    # the crop alone

CPU microseconds per image of one thread, the decoders in alternation: each row is the median of
the rounds, with the lowest and the highest. One JSON line per row. The photographs are cut from
the two that come with scikit-learn, mirrored at their edges where a larger one is wanted.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision import io as torchvision_io
from torchvision.transforms import v2

from optuna_fleet import RandomResizedCrop, images, read_image

Decode = Callable[[Any], Any]

NUM_PHOTOGRAPHS = 8
OUTPUT_PX = 224
FORMATS: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 90},
    "PNG": {},
    "WEBP": {"quality": 80},
}


def photographs(width: int, height: int, kind: str, count: int) -> list[bytes]:
    """Pieces of the two photographs, encoded."""
    pictures = load_sample_images().images
    files = []
    for number in range(count):
        pixels = pictures[number % len(pictures)]
        missing = max(0, height - pixels.shape[0]), max(0, width - pixels.shape[1])
        pixels = np.pad(pixels, ((0, missing[0]), (0, missing[1]), (0, 0)), mode="symmetric")
        spare = pixels.shape[0] - height, pixels.shape[1] - width
        top, left = (space * number // count for space in spare)
        buffer = io.BytesIO()
        piece = Image.fromarray(pixels[top : top + height, left : left + width])
        piece.save(buffer, kind, **FORMATS[kind])
        files.append(buffer.getvalue())
    return files


def by_pillow(data: bytes) -> torch.Tensor:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def by_torchvision(data: bytes) -> torch.Tensor:
    encoded = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
    return torchvision_io.decode_image(encoded, mode="RGB")


def by_simplejpeg(data: bytes) -> torch.Tensor:
    import simplejpeg

    return torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1)


def decoders(kind: str) -> dict[str, Decode]:
    """The decoders of a format by name, ours last."""
    found: dict[str, Decode] = {"pillow": by_pillow, "torchvision": by_torchvision}
    if kind == "JPEG" and importlib.util.find_spec("simplejpeg"):
        found["simplejpeg"] = by_simplejpeg
    return found | {"read_image": read_image}


def crops() -> dict[str, Decode]:
    """Ways from a JPEG file to a random crop of it."""
    crop = v2.RandomResizedCrop(OUTPUT_PX, antialias=True)
    ours = RandomResizedCrop(OUTPUT_PX)
    return {
        "pillow, v2": lambda data: crop(by_pillow(data)),
        "PIL image, v2": lambda data: crop(Image.open(io.BytesIO(data)).convert("RGB")),
        "torchvision, v2": lambda data: crop(by_torchvision(data)),
        "read_image, v2": lambda data: crop(read_image(data)),
        "ours, full decoding": RandomResizedCrop(OUTPUT_PX, scaled_decoding=False),
        "ours": ours,
    }


def decoded_crops() -> dict[str, Decode]:
    """Ways from a decoded image to a random crop of it, flipped and with channels first."""
    flip = v2.RandomHorizontalFlip()
    theirs = v2.Compose([v2.RandomResizedCrop(OUTPUT_PX, antialias=True), flip])
    ours = RandomResizedCrop(OUTPUT_PX, flip=0.5)
    return {
        "v2": lambda image: theirs(image).contiguous(),
        "ours": ours,
        "ours without a compiler": lambda image: _without_compiler(ours, image),
    }


def _without_compiler(crop: RandomResizedCrop, image: torch.Tensor) -> torch.Tensor:
    compiled, images.crops._resample = images.crops._resample, None
    try:
        return crop(image)
    finally:
        images.crops._resample = compiled


def cpu_us(decode: Decode, files: Sequence[Any]) -> float:
    """CPU microseconds per image; the same crops for everyone."""
    torch.manual_seed(0)
    begin = time.process_time()
    for data in files:
        decode(data)
    return 1e6 * (time.process_time() - begin) / len(files)


def compare(
    what: str, size: tuple[int, int], ways: dict[str, Decode], files: Sequence[Any], rounds: int
) -> None:
    """Prints a row for each way, measured in alternation after one warm-up."""
    measured: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, decode in ways.items():
            cost = cpu_us(decode, files)
            if number:
                measured[name].append(cost)
    for name, costs in measured.items():
        row = {
            "what": what,
            "size": "x".join(map(str, size)),
            "way": name,
            "cpu_us": round(statistics.median(costs)),
            "lowest": round(min(costs)),
            "highest": round(max(costs)),
        }
        print(json.dumps(row), flush=True)


def measure_decoding(rounds: int, quick: bool) -> None:
    for kind in FORMATS:
        files = photographs(500, 375, kind, NUM_PHOTOGRAPHS) * (1 if quick else 4)
        compare(f"decode {kind}", (500, 375), decoders(kind), files, rounds)


def measure_files(rounds: int, quick: bool) -> None:
    for size, times in (((500, 375), 8), ((2000, 1500), 1), ((4000, 3000), 0.5)):
        count = 2 if quick else min(NUM_PHOTOGRAPHS, int(NUM_PHOTOGRAPHS * times))
        files = photographs(*size, "JPEG", count) * (1 if quick else max(1, int(times)))
        compare(f"JPEG to a crop of {OUTPUT_PX}", size, crops(), files, rounds)


def measure_decoded(rounds: int, quick: bool) -> None:
    images = [read_image(data) for data in photographs(500, 375, "JPEG", 4 if quick else 32)]
    what = f"decoded to a crop of {OUTPUT_PX}"
    compare(what, (500, 375), decoded_crops(), images, 3 * rounds)


MEASURES = {"decoding": measure_decoding, "files": measure_files, "decoded": measure_decoded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, few images")
    parser.add_argument("--only", choices=MEASURES, action="append", help="may be repeated")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DeprecationWarning)  # torchvision's decoders
    for name in arguments.only or MEASURES:
        MEASURES[name](1 if arguments.quick else 7, arguments.quick)


if __name__ == "__main__":
    main()
