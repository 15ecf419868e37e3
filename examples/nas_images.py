"""A neural architecture search over ResNets and DenseNets on a folder of photographs.

python examples/nas_images.py                        # small models, tiles of two photographs
python examples/nas_images.py 256_ObjectCategories   # ResNet-50..152, DenseNet-121..201, 224 px
python examples/nas_images.py FOLDER --space small --classes 10 --image-size 64

FOLDER has one folder per class, as Caltech-256 has: `001.ak47/001_0001.jpg`. Without it the
search runs on the two pictures that come with scikit-learn, about two minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import optuna
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torchvision.models import DenseNet, ResNet
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.transforms import v2

from optuna_fleet import FleetExecutor, SharedPipeline, take_apart
from optuna_fleet.visualization import plot_timeline

Photographs = list[tuple[str, int]]

HELD_OUT = 0.2
BATCH_SIZES = [16, 32]
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
TILE_PX = 48


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is searched: a (lowest, highest) number of blocks per stage, and how wide they are."""

    num_trials: int
    num_epochs: int
    image_size: int
    families: tuple[str, ...]
    resnet_blocks: tuple[tuple[int, int], ...]
    width_per_group: int
    densenet_blocks: tuple[tuple[int, int], ...]
    growth_rates: tuple[int, ...]


SPACES = {
    "small": Space(
        num_trials=16,
        num_epochs=5,
        image_size=TILE_PX,
        families=("basic", "bottleneck", "densenet"),
        resnet_blocks=((1, 2), (1, 2), (1, 2), (1, 2)),
        width_per_group=16,
        densenet_blocks=((2, 4), (2, 6), (2, 6), (2, 4)),
        growth_rates=(8, 12, 16),
    ),
    # ResNet-50 to -152, DenseNet-121 to -201, and DenseNet-161 with its growth rate of 48.
    "large": Space(
        num_trials=100,
        num_epochs=30,
        image_size=224,
        families=("bottleneck", "densenet"),
        resnet_blocks=((3, 3), (4, 8), (6, 36), (3, 3)),
        width_per_group=64,
        densenet_blocks=((6, 6), (12, 12), (24, 48), (16, 32)),
        growth_rates=(32, 48),
    ),
}


# -- photographs ----------------------------------------------------------------------------------


class PhotographFolder(torch.utils.data.Dataset[tuple[Any, int]]):
    """Photographs decoded from their files; cropped and flipped at random if `augment`."""

    def __init__(self, photographs: Photographs, *, image_size: int, augment: bool) -> None:
        self.photographs = photographs
        crop = _random_crop(image_size) if augment else _centre_crop(image_size)
        self.transform = v2.Compose(
            [*crop, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        )

    def __len__(self) -> int:
        return len(self.photographs)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.photographs[index]
        return self.transform(decode(path)), label


def make_pipeline(
    train: Photographs, val: Photographs, *, image_size: int, seed: int = 0
) -> SharedPipeline:
    """Return both sets as the trials share them: photographs are decoded once."""
    dataset, augment, finish = take_apart(
        PhotographFolder(train, image_size=image_size, augment=True), augment=0, finish=2
    )
    return SharedPipeline(
        seed=seed,
        train=dataset,
        val=PhotographFolder(val, image_size=image_size, augment=False),
        augment=augment,
        finish={"train": finish},
    )


def decode(path: str) -> torch.Tensor:
    """Return the photograph as bytes of 3 x height x width, whatever its file holds."""
    with Image.open(path) as image:
        # Not torchvision.io, whose decoders are deprecated since torchvision 0.29.
        return v2.functional.pil_to_tensor(image.convert("RGB"))


def _random_crop(size: int) -> list[nn.Module]:
    return [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]


def _centre_crop(size: int) -> list[nn.Module]:
    return [v2.Resize(size * 8 // 7, antialias=True), v2.CenterCrop(size)]


def find_photographs(folder: Path, max_classes: int | None = None) -> dict[str, list[str]]:
    """Return the paths of the JPEG and PNG files of each class, in the order of their names."""
    classes: dict[str, list[str]] = {}
    for subfolder in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = sorted(subfolder.iterdir())
        paths = [str(file) for file in files if file.suffix.lower() in (".jpg", ".jpeg", ".png")]
        if len(paths) > 1:  # one to train on, and one to hold out
            classes[subfolder.name] = paths
    if len(classes) < 2:
        raise SystemExit(
            f"{folder} must have a folder of photographs for each of several classes, "
            "as 001.ak47/001_0001.jpg."
        )
    return dict(list(classes.items())[:max_classes])


def split(classes: dict[str, list[str]]) -> tuple[Photographs, Photographs]:
    """Return what is trained on and what is held out, a fifth of every class; always the same."""
    train: Photographs = []
    val: Photographs = []
    for label, (name, paths) in enumerate(sorted(classes.items())):
        shuffled = random.Random(name).sample(sorted(paths), len(paths))
        num_held_out = max(1, round(HELD_OUT * len(paths)))
        val += [(path, label) for path in shuffled[:num_held_out]]
        train += [(path, label) for path in shuffled[num_held_out:]]
    return train, val


# -- two photographs, cut into many ---------------------------------------------------------------


def make_photographs(folder: Path) -> Path:
    """Fill `folder` with tiles, which do not overlap, of the pictures that scikit-learn has."""
    for name, tile in _tiles():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        tile.save(folder / name, quality=95)
    return folder


def _tiles() -> Iterator[tuple[str, Image.Image]]:
    from sklearn.datasets import load_sample_images

    samples = load_sample_images()
    for number, (path, pixels) in enumerate(
        zip(samples.filenames, samples.images, strict=True), 1
    ):
        height, width = pixels.shape[:2]
        corners = product(
            range(0, height - TILE_PX + 1, TILE_PX), range(0, width - TILE_PX + 1, TILE_PX)
        )
        for index, (top, left) in enumerate(corners, 1):
            tile = Image.fromarray(pixels[top : top + TILE_PX, left : left + TILE_PX])
            yield f"{number:03}.{Path(path).stem}/{number:03}_{index:04}.jpg", tile


# -- models ---------------------------------------------------------------------------------------


def build_model(trial: optuna.Trial, space: Space, num_classes: int) -> nn.Module:
    """A ResNet or a DenseNet; family, blocks of each stage and growth rate are searched."""
    family = trial.suggest_categorical("family", space.families)
    if family == "densenet":
        growth_rate = trial.suggest_categorical("growth_rate", space.growth_rates)
        return DenseNet(
            growth_rate=growth_rate,
            block_config=suggest_blocks(trial, family, space.densenet_blocks),
            num_init_features=2 * growth_rate,
            num_classes=num_classes,
        )
    return ResNet(
        block=BasicBlock if family == "basic" else Bottleneck,
        layers=suggest_blocks(trial, family, space.resnet_blocks),
        num_classes=num_classes,
        width_per_group=64 if family == "basic" else space.width_per_group,
    )


def suggest_blocks(
    trial: optuna.Trial, family: str, ranges: Sequence[tuple[int, int]]
) -> tuple[int, ...]:
    """The number of blocks of each stage."""
    return tuple(
        trial.suggest_int(f"{family}_blocks_{stage}", low, high)
        for stage, (low, high) in enumerate(ranges, 1)
    )


def objective(trial: Any, space: Space, num_classes: int, num_epochs: int) -> float:
    """Train one architecture and return its accuracy on the held-out photographs."""
    model = build_model(trial, space, num_classes)
    lr = trial.suggest_float("lr", 3e-3, 0.1, log=True)
    batch_size = trial.suggest_categorical("batch_size", BATCH_SIZES)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_epochs)
    model, optimizer, schedule = trial.prepare(model, optimizer, schedule)
    accuracy = 0.0
    for epoch in trial.epochs(num_epochs):
        model.train()
        for images, labels in trial.batches("train", batch_size=batch_size):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        accuracy = held_out_accuracy(trial, model)
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return accuracy


@torch.no_grad()
def held_out_accuracy(trial: Any, model: nn.Module) -> float:
    """The share of held-out photographs that the model names rightly."""
    model.eval()
    correct = total = 0
    for images, labels in trial.batches("val", batch_size=64):
        correct += int((model(images).argmax(1) == labels).sum())
        total += len(labels)
    return float(trial.sum(correct) / trial.sum(total))


# -- the search -----------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; what depends on the space and was not given is filled in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="a folder of photographs per class")
    parser.add_argument("--space", choices=SPACES, help="default: large with FOLDER, else small")
    parser.add_argument("--trials", type=int, help="default: 16 (small) or 100 (large)")
    parser.add_argument("--devices", type=int, help="default: all GPUs, or 4 CPU slots")
    parser.add_argument("--epochs", type=int, help="default: 5 (small) or 30 (large)")
    parser.add_argument("--image-size", type=int, help="in pixels; default: 48 or 224 (large)")
    parser.add_argument("--classes", type=int, help="use the first so many; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storage", help="Optuna storage URL; default: in memory")
    parser.add_argument("--picture", default="nas.html", help="where to draw the timeline")
    arguments = parser.parse_args(argv)
    arguments.space = SPACES[arguments.space or ("large" if arguments.folder else "small")]
    arguments.trials = arguments.trials or arguments.space.num_trials
    arguments.epochs = arguments.epochs or arguments.space.num_epochs
    arguments.image_size = arguments.image_size or arguments.space.image_size
    if arguments.devices is None and not torch.cuda.device_count():
        arguments.devices = 4
    return arguments


def search(
    classes: dict[str, list[str]], arguments: argparse.Namespace
) -> tuple[optuna.Study, FleetExecutor]:
    """Run the trials; return the study, and the executor with its summary."""
    train, val = split(classes)
    pipeline = make_pipeline(train, val, image_size=arguments.image_size, seed=arguments.seed)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=arguments.seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=2),
        storage=arguments.storage,
    )
    with FleetExecutor(pipeline, devices=arguments.devices) as fleet:
        study.optimize(
            partial(
                objective,
                space=arguments.space,
                num_classes=len(classes),
                num_epochs=arguments.epochs,
            ),
            n_trials=arguments.trials,
            catch=torch.cuda.OutOfMemoryError,
            executor=fleet,
        )
    return study, fleet


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.folder or make_photographs(Path(made))
        classes = find_photographs(folder, arguments.classes)
        num_photographs = sum(map(len, classes.values()))
        print(f"{num_photographs} photographs of {len(classes)} classes in {folder}.")
        study, fleet = search(classes, arguments)
    best = study.best_trial
    print(f"Best trial: {best.number}, accuracy {best.value:.4f} with {best.params}")
    if fleet.summary is not None:
        uses = fleet.summary.sharing_factor
        print(f"Each photograph that was decoded and cropped was used {uses:.1f} times.")
    plot_timeline(study).write_html(arguments.picture)
    print(f"The timeline is drawn in {os.path.abspath(arguments.picture)}.")


if __name__ == "__main__":
    main()
