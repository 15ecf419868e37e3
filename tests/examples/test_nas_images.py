"""The search over ResNets and DenseNets: its photographs, its split, and two trials of it."""

import shutil
import sys
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from PIL import Image

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import nas_images  # noqa: E402


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
