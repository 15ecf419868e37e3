"""The search over ResNets and DenseNets: its split, and two trials of it."""

import shutil
import sys
from pathlib import Path

import optuna
from optuna.trial import TrialState

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import nas_images  # noqa: E402

CLASS_SIZES = [("001.ak47", 40), ("002.american-flag", 10), ("003.backpack", 2)]


def test_split_is_stratified_and_always_the_same():
    classes = {name: [f"{name}/{n}.jpg" for n in range(count)] for name, count in CLASS_SIZES}
    train, val = nas_images.split(classes)
    backwards = {name: paths[::-1] for name, paths in reversed(classes.items())}
    assert nas_images.split(backwards) == (train, val)
    assert sorted(train + val) == sorted(
        (path, label) for label, paths in enumerate(classes.values()) for path in paths
    )
    assert [sum(label == held for _, held in val) for label in range(3)] == [8, 2, 1]


def test_two_trials_run_to_their_end(nursery, tmp_path):
    photographs = nas_images.find_photographs(nas_images.make_photographs(tmp_path / "all"))
    assert {name: len(paths) for name, paths in photographs.items()} == {
        "001.china": 104,
        "002.flower": 104,
    }
    for name, paths in photographs.items():
        (tmp_path / "few" / name).mkdir(parents=True)
        for path in paths[:10]:
            shutil.copy(path, tmp_path / "few" / name)
    storage = f"sqlite:///{tmp_path}/nas.db"
    options = ["--space", "small", "--trials", "2", "--devices", "2", "--epochs", "1"]
    options += ["--image-size", "32", "--storage", storage, "--picture", "nas.html"]
    script, folder = EXAMPLES / "nas_images.py", str(tmp_path / "few")
    ended = nursery.run(script, folder, *options, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "Best trial:" in ended.stdout
    assert (tmp_path / "nas.html").stat().st_size > 1000
    (summary,) = optuna.get_all_study_summaries(storage)
    study = optuna.load_study(study_name=summary.study_name, storage=storage)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 2
