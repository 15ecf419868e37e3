"""Data sets taken apart at their first random step, and put together again without any loss."""

import random
import subprocess
import sys
from collections import namedtuple
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import nn
from torch.utils.data import ConcatDataset, Subset, default_collate
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import FakeData, ImageFolder, VisionDataset
from torchvision.transforms import v2

from optuna_fleet.pipeline.chunks.columns import without_images
from optuna_fleet.pipeline.chunks.structure import map_leaves
from optuna_fleet.pipeline.preprocessor.comparing import nbytes, same
from optuna_fleet.pipeline.preprocessor.decoded_samples import pack, unpack
from optuna_fleet.pipeline.preprocessor.order import seed_sample
from optuna_fleet.pipeline.preprocessor.splitting import (
    Stages,
    agrees,
    may_split,
    split,
    through_store,
)

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
NONE = Stages()
Pair = namedtuple("Pair", ["image", "label"])


def picture(index, mode="RGB", size=(40, 30)):
    pixels = np.random.default_rng(index).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


class Pictures(VisionDataset):
    """Sample i is (transform(picture i), i)."""

    def __init__(self, transform, *, load=picture):
        super().__init__(transform=transform)
        self.load = load
        self.num_loaded = 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.num_loaded += 1
        return self.transform(self.load(index)), index


class Shaped(Pictures):
    """Puts its samples together as ``shape`` says."""

    def __init__(self, transform, shape, **options):
        super().__init__(transform, **options)
        self.shape = shape

    def __getitem__(self, index):
        return self.shape(self.transform, self.load(index), index)


class Joint(VisionDataset):
    """Transforms image, boxes and mask together, as detection does."""

    def __init__(self, transforms, *, star):
        super().__init__(transforms=transforms)
        self.star = star

    def __len__(self):
        return 8

    def __getitem__(self, index):
        image = tv_tensors.Image(picture(index))
        target = {
            "boxes": tv_tensors.BoundingBoxes(
                [[1, 2, 20, 25 - index]], format="XYXY", canvas_size=(30, 40)
            ),
            "mask": tv_tensors.Mask(torch.full((1, 30, 40), index)),
            "name": f"number {index}",
        }
        if self.star:
            image, target = self.transforms(image, target)
            return image, target
        return self.transforms((image, target))


def seeding(index):
    return lambda epoch: seed_sample(7, "train", epoch, index)


def whole(dataset, index, epoch=0):
    seeding(index)(epoch)
    return dataset[index]


def divided(dataset, stages=NONE, index=0):
    found = split(dataset, stages, index=index, begin=seeding(index))
    assert found is not None
    return found


def by_way_of_the_store(parts, index, epoch=0):
    stored = parts.prepared(index)
    if parts.augment is not None:
        stored = through_store(stored)
    seeding(index)(epoch)
    return parts.augmented(stored)


def assert_same_samples(parts, dataset):
    for index in range(len(dataset)):
        for epoch in range(2):
            augmented = by_way_of_the_store(parts, index, epoch)
            assert same(parts.finished(augmented), whole(dataset, index, epoch))
        assert agrees(parts, dataset, index, seeding(index))


CROP = [v2.RandomResizedCrop(16, antialias=True), v2.RandomHorizontalFlip()]
END = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
IMAGE = [v2.ToImage()]
V1_CROP = [v1.RandomResizedCrop(16), v1.RandomHorizontalFlip()]


def add_noise(image):
    return image + torch.rand(image.shape)


def scale_in_place(image):
    return image.mul_(random.choice([1, 2, 3]))


def upright(image):
    return ImageOps.exif_transpose(image)


RANDOM = {
    "image first": [*IMAGE, *CROP, *END],
    "picture first": [*CROP, *IMAGE, *END],
    "nothing after": CROP,
    "resized first": [v2.Resize(20), v2.CenterCrop(18), *IMAGE, *CROP, *END],
    "float first": [*IMAGE, *END, *CROP],
    "nested": [v2.Compose([*IMAGE, v2.Compose(CROP)]), v2.Compose(END)],
    "sequential": [nn.Sequential(*IMAGE, *CROP), *END],
    "containers": [*IMAGE, v2.RandomApply([v2.ColorJitter(0.5)]), v2.RandomChoice(CROP), *END],
    "pure": [*IMAGE, *CROP, v2.ToPureTensor(), *END],
    "ended by a callable": [*IMAGE, *CROP, *END, add_noise],
    "in place": [*IMAGE, scale_in_place, v2.RandomErasing(inplace=True), *END],
    "in place by torchvision": [*IMAGE, v2.RandomErasing(1.0, inplace=True), *END],
    "lambda": [v2.Lambda(lambda image: image.rotate(random.randrange(90))), *IMAGE, *END],
    "v1": [*V1_CROP, v1.ToTensor(), v1.Normalize(MEAN, STD)],
    "v1 erasing": [*V1_CROP, v1.ToTensor(), v1.Normalize(MEAN, STD), v1.RandomErasing(p=1)],
    "v1 tensor first": [v1.Resize(20), v1.ToTensor(), *V1_CROP, v1.Normalize(MEAN, STD)],
    "v1 in place": [*V1_CROP, v1.ToTensor(), v1.Normalize(MEAN, STD, inplace=True)],
    "v1 bytes": [v1.PILToTensor(), *V1_CROP, v1.ConvertImageDtype(torch.float32)],
    "policies": [v2.TrivialAugmentWide(), v2.PILToTensor(), *END],
}


@pytest.mark.parametrize("name", RANDOM)
def test_nothing_differs(name):
    compose = v1.Compose if name.startswith("v1") else v2.Compose
    dataset = Pictures(compose(RANDOM[name]))
    parts = divided(dataset)
    assert parts.augment is not None
    assert_same_samples(parts, dataset)


def test_random_part_is_drawn_anew_and_the_rest_is_not():
    dataset = Pictures(v2.Compose(RANDOM["picture first"]))
    parts = divided(dataset)
    num_loaded = dataset.num_loaded
    stored = parts.prepared(3)
    samples = []
    for epoch in range(3):
        seeding(3)(epoch)
        samples.append(parts.finished(parts.augmented(through_store(stored))))
    assert not any(torch.equal(samples[0][0], sample[0]) for sample in samples[1:])
    assert dataset.num_loaded == num_loaded  # the user's own data set is left alone


@pytest.mark.parametrize(
    ("steps", "dtype", "num_bytes"),
    [
        ([*IMAGE, *CROP, *END], torch.uint8, 3 * 30 * 40),
        ([*IMAGE, *END, *CROP], torch.float32, 3 * 30 * 40),  # stored before it is made float
        ([v2.Resize(15), v2.CenterCrop(12), *IMAGE, *END, *CROP], torch.float32, 3 * 12 * 12),
        ([v2.Resize(60), *IMAGE, *CROP, *END], torch.uint8, 3 * 30 * 40),  # before it is enlarged
        ([v2.Grayscale(), *CROP, *IMAGE, v2.ToDtype(torch.float32)], torch.uint8, 30 * 40),
        ([*V1_CROP, v1.ToTensor(), v1.Normalize(MEAN, STD)], torch.uint8, 3 * 30 * 40),
        ([v1.ToTensor(), *V1_CROP], torch.float32, 3 * 30 * 40),
    ],
)
def test_the_smallest_is_stored_and_sent(steps, dtype, num_bytes):
    dataset = Pictures(v2.Compose(steps))
    parts = divided(dataset)
    assert nbytes(parts.prepared(0)[0]) == num_bytes
    assert by_way_of_the_store(parts, 0)[0].dtype == dtype
    assert (parts.finish is not None) == (dtype is torch.uint8)
    assert_same_samples(parts, dataset)


@pytest.mark.parametrize(
    ("steps", "has_finish"),
    [
        ([v2.Resize(20), v2.CenterCrop(18), *IMAGE, *END], True),
        ([v2.Resize(20), *IMAGE, *END, v2.Resize(10)], False),
        ([*IMAGE], False),
        ([v1.Resize(20), v1.ToTensor(), v1.Normalize(MEAN, STD)], True),
        ([v2.Resize(20), *IMAGE, v2.Normalize(MEAN, STD, inplace=False)], None),
    ],
)
def test_nothing_random(steps, has_finish):
    dataset = Pictures(v2.Compose(steps))
    if has_finish is None:  # bytes can't be normalised: what the data set raises is not hidden
        with pytest.raises(TypeError, match="float"):
            split(dataset, NONE, index=0, begin=seeding(0))
        return
    parts = divided(dataset)
    assert ((parts.augment is not None), (parts.finish is not None)) == (False, has_finish)
    assert_same_samples(parts, dataset)
    sample = parts.prepared(1)
    assert parts.augmented(sample) is sample


def test_single_transforms_and_pictures_as_results():
    for transform, has_augment in ((v1.ToTensor(), False), (v2.RandomCrop(8), True)):
        dataset = Pictures(transform)
        parts = divided(dataset)
        assert (parts.augment is not None) == has_augment
        assert_same_samples(parts, dataset)


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize(
    "name", ["image first", "picture first", "pure", "v1", "v1 bytes", "in place"]
)
def test_batches_are_finished_as_samples_are(name, batch_size):
    dataset = Pictures(v2.Compose(RANDOM[name]))
    parts = divided(dataset)
    assert parts.finish is not None
    plain = partial(map_leaves, function=without_images)
    batch = default_collate(
        [plain(by_way_of_the_store(parts, index)) for index in range(batch_size)]
    )
    assert batch[0].dtype is torch.uint8
    wanted = default_collate([plain(whole(dataset, index)) for index in range(batch_size)])
    assert same(parts.finished(batch), wanted)


SHAPES = {
    "alone": lambda transform, image, index: transform(image),
    "list": lambda transform, image, index: [index, transform(image)],
    "dict": lambda transform, image, index: {"y": index, "x": {"image": transform(image)}},
    "namedtuple": lambda transform, image, index: Pair(transform(image), index),
    "beside others": lambda transform, image, index: (
        torch.tensor(index),
        torch.ones(3, 4, 5),
        transform(image),
        "name",
        None,
        np.arange(4.0)[::2],
        1e300,
        True,
        2**70,
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_samples_of_any_shape(shape):
    for steps in (RANDOM["image first"], [v2.Resize(20), *IMAGE, *END]):
        dataset = Shaped(v2.Compose(steps), SHAPES[shape])
        parts = divided(dataset)
        assert_same_samples(parts, dataset)
        assert parts.finish is not None


def test_images_of_unlike_size_and_mode():
    def load(index):
        mode = ["RGB", "L", "RGBA", "P", "1", "CMYK", "I", "I;16"][index]
        source = picture(index, "L" if mode.startswith("I") else "RGB", (20 + index, 30))
        if mode == "I;16":
            return Image.fromarray(np.array(source).astype(np.uint16) * 200)
        return source.convert(mode)

    dataset = Pictures(v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(16)]), load=load)
    assert_same_samples(divided(dataset), dataset)
    dataset = Pictures(v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor()]), load=load)
    assert_same_samples(divided(dataset), dataset)


def test_memory_format_is_kept():
    """Kernels for channels last may round otherwise, and crops of it are resized faster."""

    def load(index):
        return torch.rand(40, 30, 3, generator=torch.Generator().manual_seed(index)).permute(
            2, 0, 1
        )

    seen = []

    def watch(image):
        seen.append(image.stride())
        return image

    dataset = Pictures(v2.Compose([watch, *CROP]), load=load)
    parts = divided(dataset)
    assert_same_samples(parts, dataset)
    assert set(seen) == {(1, 90, 3)}


def test_exif_reaches_code_that_may_look_at_it():
    def load(index):
        image = picture(index)
        if index == 5:
            exif = Image.Exif()
            exif[0x0112] = 6
            image.info["exif"] = exif.tobytes()
        return image

    dataset = Pictures(v2.Compose([upright, *CROP, *IMAGE, *END]), load=load)
    assert whole(Pictures(upright, load=load), 5)[0].size == (30, 40)
    assert_same_samples(divided(dataset), dataset)


@pytest.mark.parametrize("star", [True, False])
@pytest.mark.parametrize(
    "steps",
    [
        [v2.RandomVerticalFlip(), v2.ClampBoundingBoxes(), v2.SanitizeBoundingBoxes(1, 1, None)],
        [v2.Resize(20), v2.RandomHorizontalFlip(), *END],
        [v2.Resize(20), v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True)],
    ],
)  # fmt: skip
def test_joint_transforms(steps, star):
    dataset = Joint(v2.Compose(steps), star=star)
    assert_same_samples(divided(dataset), dataset)


def test_finish_of_a_batch_that_would_take_the_wrong_tensor():
    """Without tv_tensors, v2 takes the first tensor for the image: not so in a batch of these."""

    class Reversed(Joint):
        def __getitem__(self, index):
            return self.transforms((torch.tensor([index]), tv_tensors.Image(picture(index))))

    dataset = Reversed(
        v2.Compose([v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32)]), star=False
    )
    parts = divided(dataset)
    assert not (parts.finish is not None)
    assert_same_samples(parts, dataset)


# -- data sets below others -----------------------------------------------------------------------


def test_subsets_and_concatenations():
    transform = v2.Compose(RANDOM["image first"])
    first, second = Pictures(transform), Pictures(transform, load=partial(picture, mode="L"))
    both = ConcatDataset([Subset(first, [3, 1]), Subset(Subset(second, [5, 6, 7]), [2, 0])])
    transform.transforms[-1] = v2.Normalize([0.5], [0.5])
    parts = divided(both)
    assert_same_samples(parts, both)
    assert first.transform is second.transform is transform
    unlike = ConcatDataset([first, Pictures(v2.Compose(RANDOM["image first"]))])
    assert split(unlike, NONE, index=0, begin=seeding(0)) is None


def test_standard_transform_of_torchvision():
    class Both(VisionDataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return self.transforms(picture(index), index)

    dataset = Both(transform=v2.Compose(RANDOM["picture first"]), target_transform=lambda y: -y)
    assert_same_samples(divided(dataset), dataset)
    assert whole(dataset, 3)[1] == -3


@pytest.mark.parametrize(
    ("make", "known"),
    [
        (lambda: FakeData(8, (3, 20, 20), transform=CALL), True),
        (lambda: Subset(FakeData(8, (3, 20, 20), transform=CALL), [3, 1]), True),
        (lambda: ConcatDataset([FakeData(8, (3, 20, 20), transform=CALL)]), True),
        (lambda: FakeData(8, (3, 20, 20)), False),  # it has no transform
        (lambda: type("Mine", (FakeData,), {})(8, (3, 20, 20), transform=CALL), False),
        (lambda: Subset(Pictures(CALL), [3, 1]), False),
        (lambda: Pictures(CALL), False),
    ],
)
def test_which_data_sets_are_split_by_themselves(make, known):
    dataset = make()
    may = [may_split(dataset, NONE, by_itself=by_itself) for by_itself in (None, True, False)]
    has_transform = type(dataset) is not FakeData or dataset.transform is not None
    assert may == [known, has_transform, False]
    assert may_split(dataset, Stages(augment=half), by_itself=False)
    if known:
        parts = divided(dataset)
        assert_same_samples(parts, dataset)


def test_images_in_folders(tmp_path):
    for index in range(6):
        (tmp_path / str(index % 2)).mkdir(exist_ok=True)
        picture(index).save(tmp_path / str(index % 2) / f"{index}.png")
    for steps in (RANDOM["image first"], RANDOM["v1"]):
        folder = ImageFolder(tmp_path, v2.Compose(steps), target_transform=lambda label: -label)
        assert may_split(folder, NONE, by_itself=None)
        assert_same_samples(divided(folder), folder)


# -- where there is nothing to split --------------------------------------------------------------


class Plain:
    def __init__(self, function, **attributes):
        self.function = function
        self.__dict__.update(attributes)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.function(self, index)


CALL = v2.Compose([*IMAGE, *CROP, *END])


NO_PLACE = {
    "no transform": Plain(lambda d, i: picture(i)),
    "transform of the user's": Pictures(lambda image: v2.functional.pil_to_tensor(image)),
    "subclass": Pictures(type("Mine", (v2.Compose,), {})(CROP)),
    "never called": Plain(lambda d, i: i, transform=CALL),
    "called twice": Plain(lambda d, i: [d.transform(picture(i)) for _ in "ab"], transform=CALL),
    "result is changed": Plain(lambda d, i: d.transform(picture(i)) + 1, transform=CALL),
    "result is there twice": Plain(lambda d, i: (d.transform(picture(i)),) * 2, transform=CALL),
    "draws before": Plain(
        lambda d, i: d.transform(picture(i).rotate(random.randrange(9))), transform=CALL
    ),
    "draws from numpy before": Plain(
        lambda d, i: (d.transform(picture(i)), np.random.rand() * 0), transform=CALL
    ),
    "draws from torch after": Plain(
        lambda d, i: (d.transform(picture(i)), torch.rand(()) * 0), transform=CALL
    ),
    "own generator": Plain(
        lambda d, i: (d.transform(picture(i)), d.dice.random()),
        transform=CALL,
        dice=np.random.default_rng(0),
    ),
    "looks at its transform": Plain(
        lambda d, i: d.transform(picture(i)) if d.transform.transforms else 0, transform=CALL
    ),
    "object without equality": Plain(
        lambda d, i: (d.transform(picture(i)), object()), transform=CALL
    ),
}


@pytest.mark.parametrize("name", NO_PLACE)
def test_no_place_to_split(name):
    dataset = NO_PLACE[name]
    assert split(dataset, NONE, index=1, begin=seeding(1)) is None


def test_a_data_set_that_keeps_its_results():
    def kept(dataset, index):
        if index not in dataset.cache:
            dataset.cache[index] = dataset.transform(picture(index))
        return dataset.cache[index]

    dataset = Plain(kept, transform=v2.Compose([v2.Resize(20), *IMAGE, *END]), cache={})
    assert split(dataset, NONE, index=0, begin=seeding(0)) is None
    assert dataset[0].dtype is torch.float32


def test_errors_of_the_data_set_are_not_hidden():
    def load(index):
        raise OSError(f"no file {index}")

    dataset = Pictures(CALL, load=load)
    with pytest.raises(OSError, match="no file 2"):
        split(dataset, NONE, index=2, begin=seeding(2))
    parts = divided(Pictures(CALL))
    with pytest.raises(OSError, match="no file 1"):
        agrees(parts, dataset, 1, seeding(1))


def test_odd_samples_do_not_agree():
    def odd(dataset, index):
        return dataset.transform(picture(index)) if index < 4 else torch.ones(3, 16, 16)

    dataset = Plain(odd, transform=CALL)
    parts = divided(dataset)
    assert agrees(parts, dataset, 3, seeding(3))
    assert not agrees(parts, dataset, 4, seeding(4))
    with pytest.raises(RuntimeError, match="Sample 4 goes another way"):
        parts.prepared(4)


def test_a_split_of_another_data_set_does_not_agree():
    parts = divided(Pictures(CALL))
    other = Pictures(CALL, load=lambda index: picture(index + 1))
    assert not agrees(parts, other, 0, seeding(0))
    longer = Pictures(v2.Compose([*IMAGE, *CROP, v2.RandomVerticalFlip(1.0), *END]))
    assert not agrees(parts, longer, 0, seeding(0))


# -- explicit stages ------------------------------------------------------------------------------


def half(image):
    return np.array(image, dtype=np.float32) / 2


def shifted(image):
    image += random.random() + np.random.rand() + torch.rand(()).item()
    return image


def doubled(image_or_batch):
    return image_or_batch * 2


@pytest.mark.parametrize(
    ("stages", "has_augment", "has_finish"),
    [
        (Stages(prepare=half, augment=shifted, finish=doubled), True, True),
        (Stages(prepare=half, augment=shifted), True, False),
        (Stages(prepare=half), False, False),
        (Stages(prepare=half, finish=doubled), False, True),
        (Stages(augment=lambda image: image.rotate(random.randrange(90))), True, False),
    ],
)
def test_explicit_stages(stages, has_augment, has_finish):
    dataset = Plain(lambda d, i: picture(i))
    parts = divided(dataset, stages)
    assert ((parts.augment is not None), (parts.finish is not None)) == (has_augment, has_finish)
    for index in range(3):
        assert agrees(parts, dataset, index, seeding(index))
        for epoch in range(2):
            sample = picture(index) if stages.prepare is None else stages.prepare(picture(index))
            seeding(index)(epoch)
            for stage in (stages.augment, stages.finish):
                sample = sample if stage is None else stage(sample)
            augmented = by_way_of_the_store(parts, index, epoch)
            assert same(parts.finished(augmented), sample)


def test_explicit_stages_that_are_not_what_they_must_be():
    dataset = Plain(lambda d, i: half(picture(i)))
    for stages in (
        Stages(prepare=shifted),
        Stages(augment=shifted, finish=lambda batch: batch - batch.mean()),
    ):
        assert split(dataset, stages, index=0, begin=seeding(0)) is None


def test_finish_alone_comes_after_the_split():
    dataset = Shaped(v2.Compose([*IMAGE, *CROP, v2.ToDtype(torch.float32)]), SHAPES["alone"])
    parts = divided(dataset, Stages(finish=doubled))
    augmented = by_way_of_the_store(parts, 2)
    assert augmented.dtype is torch.uint8
    assert same(parts.finished(augmented), doubled(whole(dataset, 2)))
    assert agrees(parts, dataset, 2, seeding(2))


# -- storing --------------------------------------------------------------------------------------


def test_stored_samples_come_back_as_they_were():
    image = picture(0)
    image.info["note"] = "kept"
    sample = {
        "tensors": (
            torch.rand(2, 3).t(),
            torch.tensor(1.5, dtype=torch.bfloat16),
            torch.rand(3, requires_grad=True),
            nn.Parameter(torch.rand(3)),
            torch.rand(0, 3),
            torch.tensor([1j]),
        ),
        "tv": [tv_tensors.Video(torch.rand(2, 3, 4, 5)), tv_tensors.Image(image)],
        "arrays": (np.arange(6).reshape(2, 3).T, np.array(["a"]), np.array(3.0), np.float16(2)),
        "others": [image, None, b"x", float("nan"), frozenset({1}), np.datetime64("2020-01-01")],
    }
    for copy in (False, True):
        again = unpack(memoryview(bytearray().join(pack(sample))), copy=copy)
        assert same(again, sample)
        assert again["others"][0].info == {"note": "kept"}


def test_same_is_strict():
    zero, nan = torch.zeros(2), torch.tensor([float("nan"), 1.0])
    alike = [zero, nan, [1, "a"], {"a": zero}, float("nan"), np.float32(1), picture(0)]
    assert all(same(value, value) for value in alike)
    assert same(nan, nan.clone())
    unlike = [
        (zero, -zero),
        (zero, zero.double()),
        (zero, zero.view(1, 2)),
        (zero, tv_tensors.Mask(zero[None])),
        (zero.numpy(), zero),
        (zero.numpy(), -zero.numpy()),
        ([zero], (zero,)),
        ({"a": 1}, {"b": 1}),
        (1, 1.0),
        (True, 1),
        (picture(0), picture(1)),
        (picture(0), picture(0, "L")),
        (object(), object()),
    ]
    assert not any(same(left, right) for left, right in unlike)
    boxes = [
        tv_tensors.BoundingBoxes([[1, 2, 3, 4]], format=form, canvas_size=(9, 9))
        for form in ("XYXY", "XYWH")
    ]
    assert not same(*boxes)


def test_torchvision_is_not_imported_for_others():
    code = """
import sys
from functools import partial
from optuna_fleet.pipeline.preprocessor.order import seed_sample
from optuna_fleet.pipeline.preprocessor.splitting import Stages, agrees, may_split, split
assert not {'torch', 'torchvision', 'PIL'} & set(sys.modules), 'at import'
class Numbers:
    transform = abs
    def __len__(self): return 3
    def __getitem__(self, index): return index
assert split(Numbers(), Stages(), index=0, begin=int) is None
assert not may_split(Numbers(), Stages(), by_itself=True)
seed = lambda epoch: seed_sample(0, "train", epoch, 0)
parts = split(Numbers(), Stages(augment=float), index=0, begin=seed)
assert agrees(parts, Numbers(), 1, seed)
assert not {'torchvision', 'PIL'} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
