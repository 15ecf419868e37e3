"""Files that people write by hand: what is read, and the line that says what is wrong."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.replay.trace import load_trace
from optuna_fleet.replay.trial_files import load_ensemble, load_jobs

TRIAL = {"name": "a", "rates": {"1": 100.0, "2": 190.0}, "epochs": 14}
ENSEMBLE = {"samples_per_epoch": 30606, "rescale_s": 34, "trials": [TRIAL]}
JOBS = {
    "scaling": {
        "A": {"nodes": [0, 1, 2, 4], "images_per_s": [0.0, 10.0, 18.0, 30.0]},
        "B": {"nodes": [1, 4], "images_per_s": [5.0, 20.0]},
    },
    "hpo_shufflenet": {
        "dnn": "A", "n_jobs": 2, "Jmin": 1, "Jmax": 3, "Tcup_s": 20.0, "Tcdw_s": 5,
        "Pmax_images": 1000, "spacing_s": 30,
    },
    "diverse": {
        "cycle": ["A", "B"], "n_jobs": 3, "Jmin": 1, "Jmax": 4, "Tcup_s": [1, 2, 3],
        "Tcdw_s": [4, 5, 6], "Pmax_images": 1000, "spacing_s": 0,
    },
}  # fmt: skip
TRACE = {
    "time_s": np.array([0.0, 10.0, 30.0]),
    "initial_idle": np.array([1, 0, 1], dtype=np.int8),
    "change_event": np.array([1, 1, 2]),
    "change_node": np.array([0, 1, 0]),
    "change_delta": np.array([-1, 1, 1]),
    "node_name": np.array(["b1", "c1", "a1"]),
}
NAN = math.nan


def refused(load, path, *arguments):
    """The line that says why a file is refused."""
    with pytest.raises(FleetConfigError) as error:
        load(path, *arguments)
    line = str(error.value)
    assert line.startswith(str(path))
    assert "\n" not in line
    return line.removeprefix(str(path))


def written(folder: Path, content) -> Path:
    path = folder / "file.json"
    path.write_text(json.dumps(content))
    return path


def saved(folder: Path, **changes) -> Path:
    arrays = {k: v for k, v in {**TRACE, **changes}.items() if v is not None}
    np.savez(folder / "trace.npz", **arrays)
    return folder / "trace.npz"


LOADERS = [(load_ensemble, 2), (load_jobs, "hpo"), (load_trace,)]


@pytest.mark.parametrize("loader", LOADERS)
def test_files_that_can_not_be_read(loader, tmp_path):
    load, *arguments = loader
    missing = refused(load, tmp_path / "missing", *arguments)
    assert missing == " can't be read: No such file or directory."
    assert refused(load, tmp_path, *arguments) == " can't be read: Is a directory."


@pytest.mark.parametrize("loader", LOADERS[:2])
@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b'{"a": 1} x', b"\xff\xfe\x00"])
def test_what_is_not_json(loader, content, tmp_path):
    load, *arguments = loader
    (tmp_path / "file").write_bytes(content)
    assert refused(load, tmp_path / "file", *arguments).startswith(" is not JSON: ")


# -- ENSEMBLE.json ------------------------------------------------------------------------------


def test_an_ensemble_is_read_in_order_of_submission(tmp_path):
    late = {**TRIAL, "submit_s": 5.5, "min_devices": 2}
    content = {**ENSEMBLE, "trials": [late, {"rates": {"2": 20}, "epochs": 1}]}
    first, second = load_ensemble(written(tmp_path, content), 2)
    assert (first.name, first.rates, first.epochs) == ("trial 1", (10.0, 20.0), 1)
    assert (first.submit_s, first.min_devices, first.rescale_up_s) == (0.0, 1, 34.0)
    assert (second.rates, second.submit_s, second.min_devices) == ((100.0, 190.0), 5.5, 2)
    assert second.work == 14 * 30606


NUMBER = ">= 1e-15 and <= 1000000000000000.0."


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"samples_per_epoch": 0}, f"`samples_per_epoch` is 0, but must be a number {NUMBER}"),
        ({"pruned": 1.5}, "`pruned` is 1.5, but must be a number >= 0 and <= 1."),
        ({"trials": []}, "`trials` is [], but must be a list that is not empty."),
        ({"trials": [TRIAL, 7]}, "`trials[1]` is none of this kind: "),
        ({"trials": [TRIAL, {**TRIAL, "rates": {"1": 7}}]}, "two trials are named 'a' but have"),
    ],
)
def test_wrong_fields_of_an_ensemble(changes, line, tmp_path):
    assert line in refused(load_ensemble, written(tmp_path, {**ENSEMBLE, **changes}), 4)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"epochs": 0}, "`epochs` is 0, but must be a whole number >= 1 and <= 1000000."),
        ({"max_epochs": 9}, "`epochs` is 14, but must be a whole number >= 1 and <= 9."),
        ({"min_devices": 5}, "`min_devices` is 5, but must be a whole number >= 1 and <= 4."),
        ({"spans_types": 1}, "`spans_types` is 1, but must be true or false."),
        ({"rates": {}}, "`rates` is {}, but must be by numbers of devices"),
        ({"rates": {"one": 1}}, "is none of this kind: invalid literal"),
    ],
)
def test_wrong_fields_of_a_trial(changes, line, tmp_path):
    path = written(tmp_path, {**ENSEMBLE, "trials": [{**TRIAL, **changes}]})
    found = refused(load_ensemble, path, 4)
    assert found.startswith(": `trials[0]`")
    assert line in found


def test_a_share_of_trials_is_pruned_at_each_epochs_end(tmp_path):
    many = [{**TRIAL, "epochs": 20, "max_epochs": 20}] * 2000
    path = written(tmp_path, {**ENSEMBLE, "pruned": 0.1, "trials": many})
    lengths = [trial.epochs for trial in load_ensemble(path, 1)]
    assert 0.08 < lengths.count(1) / 2000 < 0.12
    assert 0.9**19 * 0.7 < lengths.count(20) / 2000 < 0.9**19 * 1.3
    assert max(lengths) == 20
    assert lengths == [trial.epochs for trial in load_ensemble(path, 1)]
    assert lengths != [trial.epochs for trial in load_ensemble(path, 1, seed=1)]


# -- JOBS.json ----------------------------------------------------------------------------------


def test_workloads_are_read(tmp_path):
    path = written(tmp_path, JOBS)
    first, second = load_jobs(path, "hpo")
    assert (first.rates, second.submit_s) == ((10.0, 18.0, 24.0), 30.0)
    assert (first.epochs, first.work, first.rescale_up_s, first.rescale_down_s) == (1, 1e3, 20, 5)
    diverse = load_jobs(path, "diverse")
    assert [t.name for t in diverse] == ["A", "B", "A"]
    assert [t.rescale_up_s for t in diverse] == [1, 2, 3]
    assert diverse[1].rates == (5.0, 10.0, 15.0, 20.0)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"Jmin": 4}, "`min_devices` is 4, but must be a whole number >= 1 and <= 3."),
        ({"Jmax": 5}, "[0, 1, 2, 4], but must rise, from 0 or 1 up to at least 5."),
        ({"dnn": "Z"}, "`dnn` is 'Z', but must be 'A' or 'B'."),
        ({"Tcup_s": [1]}, "`Tcup_s` is [1], but must be a number, or a list of 2."),
        ({"Tcdw_s": [1, NAN]}, "`rescale_down_s` is nan, but must be a number >= 0"),
    ],
)
def test_wrong_fields_of_a_workload(changes, line, tmp_path):
    content = {**JOBS, "hpo_shufflenet": {**JOBS["hpo_shufflenet"], **changes}}
    assert line in refused(load_jobs, written(tmp_path, content), "hpo")


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ({"nodes": [1, 1, 4]}, "`nodes` is [1, 1, 4], but must rise"),
        ({"images_per_s": [1.0]}, "is none of this kind: fp and xp are not of the same length"),
        ({"images_per_s": [0.0, 1.0, 2.0]}, f"`rates` is 0.0, but must be a number {NUMBER}"),
    ],
)
def test_wrong_tables_of_a_workload(table, line, tmp_path):
    table = {"nodes": [1, 2, 4], "images_per_s": [5.0, 9.0, 15.0], **table}
    assert line in refused(load_jobs, written(tmp_path, {**JOBS, "scaling": {"A": table}}), "hpo")


# -- TRACE.npz ----------------------------------------------------------------------------------


def changes_of(changes):
    return [(c.time_s, c.joined, c.left) for c in changes]


def test_a_trace_is_read_with_its_nodes_in_order_of_their_names(tmp_path):
    trace = load_trace(saved(tmp_path))
    assert trace.names == ("a1", "b1", "c1")
    assert len(trace.fleet()) == 3
    assert trace.end_s == 30.0
    assert changes_of(trace.changes) == [(0.0, (0, 1), ()), (10.0, (2,), (1,)), (30.0, (1,), ())]


def test_a_repeated_trace_begins_again_with_the_same_idle_nodes(tmp_path):
    trace = load_trace(saved(tmp_path))
    # The wrap takes the mean distance of events, 15 s. Then node 2 is taken, 0 and 1 go on.
    assert changes_of(itertools.islice(trace.repeated(), 6))[3:] == [
        (45.0, (), (2,)),
        (55.0, (2,), (1,)),
        (75.0, (1,), ()),
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"time_s": None}, " has no array `time_s` of one dimension."),
        ({"time_s": np.array(["a", "b", "c"])}, " is no trace: could not convert string"),
        ({"time_s": np.array([0.0])}, "`time_s` must have at least 2 entries"),
        ({"time_s": np.array([0.0, 5.0, 5.0])}, "rising from 0 or more"),
        ({"initial_idle": np.ones(2, bool)}, "`initial_idle` must have an entry for each node"),
        ({"change_node": np.array([0, 1])}, "all arrays of changes as many"),
        ({"change_event": np.array([2, 1, 2])}, "`change_event` must not fall"),
        ({"change_node": np.array([0, 1, 3])}, "`change_node` must count the nodes from 0"),
        ({"change_delta": np.array([-1, 2, 1])}, "`change_delta` must be +1, -1 in turn"),
    ],
)
def test_wrong_arrays_of_a_trace(changes, line, tmp_path):
    assert line in refused(load_trace, saved(tmp_path, **changes))


def test_what_is_not_an_archive(tmp_path):
    path = saved(tmp_path)
    whole = path.read_bytes()
    np.save(tmp_path / "array.npy", np.zeros(3))
    for content in (b"", b"text", whole[:200], whole[:-30], (tmp_path / "array.npy").read_bytes()):
        path.write_bytes(content)
        assert refused(load_trace, path).startswith(" is not a NumPy archive (.npz): ")


def test_pickled_objects_are_not_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    path = saved(tmp_path, node_name=np.array([Bomb(), 1, 2], dtype=object))
    assert "Object arrays cannot be loaded" in refused(load_trace, path)
    assert not (tmp_path / "exploded").exists()
