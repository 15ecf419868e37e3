"""The search over ResNets and DenseNets: its photographs, its split, and two trials of it."""

import shutil
import sys
from pathlib import Path

import optuna
import pytest
import torch
from optuna.trial import TrialState
from PIL import Image

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import nas_images  # noqa: E402

LARGEST_RESNET = {"family": "bottleneck"} | {
    f"bottleneck_blocks_{stage}": count for stage, count in enumerate((3, 8, 36, 3), 1)
}
LARGEST_DENSENET = {"family": "densenet", "growth_rate": 32} | {
    f"densenet_blocks_{stage}": count for stage, count in enumerate((6, 12, 48, 32), 1)
}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """The folder that the example makes."""
    return nas_images.make_photographs(tmp_path_factory.mktemp("nas") / "deep" / "photographs")


def few_photographs(photographs, folder, number):
    """The first so many photographs of each class, in a folder of their own."""
    for name, paths in nas_images.find_photographs(photographs).items():
        (folder / name).mkdir(parents=True)
        for path in paths[:number]:
            shutil.copy(path, folder / name)
    return folder


def test_makes_real_jpegs_of_two_classes(photographs):
    classes = nas_images.find_photographs(photographs)
    assert list(classes) == ["001.china", "002.flower"]
    assert [len(paths) for paths in classes.values()] == [104, 104]
    assert classes["001.china"][0].endswith("001.china/001_0001.jpg")
    images = [Image.open(path) for paths in classes.values() for path in paths]
    assert {(image.format, image.mode, image.size) for image in images} == {
        ("JPEG", "RGB", (48, 48))
    }
    assert len({image.tobytes() for image in images}) > 200


def test_the_made_folder_is_reused_and_alone(photographs):
    before = {path: path.stat().st_mtime_ns for path in photographs.rglob("*.jpg")}
    assert nas_images.make_photographs(photographs) == photographs
    assert before == {path: path.stat().st_mtime_ns for path in photographs.rglob("*.jpg")}
    assert list(photographs.parent.iterdir()) == [photographs]


def test_does_not_make_photographs_over_other_files(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("...")
    with pytest.raises(SystemExit, match="choose another with --make-folder"):
        nas_images.make_photographs(tmp_path / "mine")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "thesis.txt"]


def test_split_is_stratified_and_always_the_same():
    classes = {name: [f"{name}/{n}.jpg" for n in range(count)] for name, count in CLASS_SIZES}
    train, val = nas_images.split(classes)
    backwards = {name: paths[::-1] for name, paths in reversed(classes.items())}
    assert nas_images.split(backwards) == (train, val)
    assert sorted(train + val) == sorted(
        (path, label) for label, paths in enumerate(classes.values()) for path in paths
    )
    assert [sum(label == held for _, held in val) for label in range(3)] == [8, 2, 1]


CLASS_SIZES = [("001.ak47", 40), ("002.american-flag", 10), ("003.backpack", 2)]


def test_any_photograph_becomes_three_normalised_channels(tmp_path):
    Image.new("L", (50, 30), 128).save(tmp_path / "grey.png")
    for augment in (False, True):
        dataset = nas_images.PhotographFolder(
            [(str(tmp_path / "grey.png"), 1)], image_size=32, augment=augment
        )
        image, label = dataset[0]
        assert (tuple(image.shape), image.dtype, label) == ((3, 32, 32), torch.float32, 1)
        assert image[0].mean().item() == pytest.approx((128 / 255 - 0.485) / 0.229, abs=1e-5)


def test_a_broken_photograph_is_named(tmp_path):
    (tmp_path / "cut.jpg").write_bytes(b"\xff\xd8\xff\xe0 and no more")
    dataset = nas_images.PhotographFolder(
        [(str(tmp_path / "cut.jpg"), 0)], image_size=32, augment=True
    )
    with pytest.raises(RuntimeError, match=r"cut\.jpg can't be decoded, remove it"):
        dataset[0]


def test_what_is_no_photograph_is_left_out(tmp_path, capsys, photographs):
    folder = few_photographs(photographs, tmp_path, 3)
    (folder / "001.china" / "RENAME2").write_text("a script, as Caltech-256 has one")
    (folder / "001.china" / "page.jpg").write_text("<html>")
    (folder / "000.empty").mkdir()
    assert [len(paths) for paths in nas_images.find_photographs(folder).values()] == [3, 3]
    assert "page.jpg is left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (None, "is not a folder"),
        ({}, "has no JPEG or PNG photographs"),
        ({"one": 0}, "has no JPEG or PNG photographs"),
        ({"one": 2}, "photographs of one class only, one,"),
        ({"one": 2, "two": 1}, "Class two of .* has one photograph"),
    ],
)
def test_a_bad_folder_ends_with_a_sentence(tmp_path, counts, message):
    folder = tmp_path / "photographs"
    for name, count in ({} if counts is None else {".": 0} | counts).items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            Image.new("RGB", (8, 8)).save(folder / name / f"{index}.jpg")
    with pytest.raises(SystemExit, match=message):
        nas_images.main([str(folder)])


@pytest.mark.parametrize(
    ("params", "num_parameters"),
    [(LARGEST_RESNET, 60_192_808), (LARGEST_DENSENET, 20_013_928)],
    ids=["resnet152", "densenet201"],
)
def test_the_large_space_holds_torchvisions_largest(params, num_parameters):
    with torch.device("meta"):
        model = nas_images.build_model(
            optuna.trial.FixedTrial(params), nas_images.SPACES["large"], num_classes=1000
        )
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def test_two_trials_run_to_their_end(nursery, tmp_path, photographs):
    folder = few_photographs(photographs, tmp_path / "few", 10)
    storage = f"sqlite:///{tmp_path}/nas.db"
    options = ["--space", "small", "--trials", "2", "--devices", "2", "--epochs", "1"]
    options += ["--image-size", "32", "--storage", storage, "--picture", "nas.html"]
    ended = nursery.run(EXAMPLES / "nas_images.py", str(folder), *options, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "Best trial:" in ended.stdout
    assert (tmp_path / "nas.html").stat().st_size > 1000
    (summary,) = optuna.get_all_study_summaries(storage)
    study = optuna.load_study(study_name=summary.study_name, storage=storage)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 2
    assert all(0 <= trial.value <= 1 for trial in study.trials)
