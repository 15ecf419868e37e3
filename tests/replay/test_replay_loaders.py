"""Files that people write by hand: what is read, and the line that says what is wrong."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.replay.trace import load_trace
from optuna_fleet.replay.workload import believed_profiles, bftrainer_trials, load_ensemble

TRIAL = {"name": "a", "rates": {"1": 100.0, "2": 190.0}, "epochs": 14}
ENSEMBLE = {"samples_per_epoch": 30606, "rescale_s": 34, "trials": [TRIAL]}
TRACE = {
    "time_s": np.array([0.0, 10.0, 30.0]),
    "initial_idle": np.array([1, 0, 1], dtype=np.int8),
    "change_event": np.array([1, 1, 2]),
    "change_node": np.array([0, 1, 0]),
    "change_delta": np.array([-1, 1, 1]),
    "node_name": np.array(["b1", "c1", "a1"]),
}


def refused(load, path, *arguments):
    """The line that says why a file is refused."""
    with pytest.raises(FleetConfigError) as error:
        load(path, *arguments)
    line = str(error.value)
    assert line.startswith(str(path))
    assert "\n" not in line
    return line.removeprefix(str(path))


def ensemble(folder: Path, *trials, **changes) -> Path:
    content = {**ENSEMBLE, **({"trials": trials} if trials else {}), **changes}
    (folder / "file.json").write_text(json.dumps(content))
    return folder / "file.json"


def trace(folder: Path, **changes) -> Path:
    arrays = {k: v for k, v in {**TRACE, **changes}.items() if v is not None}
    np.savez(folder / "trace.npz", **arrays)
    return folder / "trace.npz"


@pytest.mark.parametrize("loader", [(load_ensemble, 2), (load_trace,)])
def test_files_that_can_not_be_read(loader, tmp_path):
    load, *arguments = loader
    for path in (tmp_path / "missing", tmp_path):
        assert refused(load, path, *arguments).startswith(" can't be read: ")


@pytest.mark.parametrize("content", [b"{", b"[" * 100_000, b'{"a": 1} x', b"\xff\xfe\x00"])
def test_what_is_not_json(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    assert refused(load_ensemble, tmp_path / "file", 2).startswith(" is not JSON: ")


def test_an_ensemble_is_read_in_order_of_submission(tmp_path):
    late = {**TRIAL, "submit_s": 5.5, "min_devices": 2}
    path = ensemble(tmp_path, late, {"rates": {"2": 20}, "max_epochs": 3, "max_devices": 2})
    first, second = load_ensemble(path, 3)
    assert (first.name, first.rates) == ("trial 1", (10.0, 20.0))
    assert (first.submit_s, first.min_devices, first.rescale_up_s) == (0.0, 1, 34.0)
    assert (first.epochs, first.max_epochs) == (3, 3)
    assert (second.submit_s, second.min_devices) == (5.5, 2)
    assert len(second.rates) == 3
    assert second.work == 14 * 30606


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"samples_per_epoch": 0}, "`samples_per_epoch` is 0"),
        ({"pruned": 1.5}, "`pruned` is 1.5"),
        ({"trials": []}, "`trials` is []"),
        ({"trials": [TRIAL, 7]}, "`trials[1]` is none of this kind"),
        ({"trials": [TRIAL, {**TRIAL, "rates": {"1": 7}}]}, "two trials are named 'a'"),
        *(
            ({"trials": [{**TRIAL, name: value}]}, told)
            for name, value, told in (
                ("epochs", 0, "`epochs` is 0"),
                ("max_epochs", 9, "`epochs` is 14"),
                ("min_devices", 5, "`min_devices` is 5"),
                ("max_devices", 0, "`max_devices` is 0"),
                ("rates", {}, "`rates` is {}"),
                ("rates", {"0": 1}, "`rates` is {'0': 1}"),
                ("rates", {"1": -1.0}, "`rates` is -1.0"),
                ("rates", {"one": 1}, "invalid literal"),
            )
        ),
    ],
)
def test_wrong_fields_of_an_ensemble_are_named(changes, told, tmp_path):
    assert told in refused(load_ensemble, ensemble(tmp_path, **changes), 4)


def test_a_share_of_trials_is_pruned_at_each_epochs_end(tmp_path):
    path = ensemble(tmp_path, *[{**TRIAL, "epochs": 20, "max_epochs": 20}] * 2000, pruned=0.1)
    lengths = [trial.epochs for trial in load_ensemble(path, 1)]
    assert 0.08 < lengths.count(1) / 2000 < 0.12
    assert 0.9**19 * 0.7 < lengths.count(20) / 2000 < 0.9**19 * 1.3
    assert max(lengths) == 20
    assert lengths == [trial.epochs for trial in load_ensemble(path, 1)]
    assert lengths != [trial.epochs for trial in load_ensemble(path, 1, seed=1)]


def test_bftrainers_trials_take_turns():
    trials = bftrainer_trials(("AlexNet", "VGG-16"), 3)
    assert [t.name for t in trials] == ["AlexNet", "VGG-16", "AlexNet"]
    assert [t.submit_s for t in trials] == [0.0, 36.0, 72.0]
    assert {(t.rescale_up_s, t.rescale_down_s, t.work) for t in trials} == {(18.0, 12.0, 130e6)}
    assert trials[0].rates[:4] == pytest.approx((7100, 13100, 17100, 21100))
    assert len(trials[1].rates) == 64


@pytest.mark.parametrize(("widest", "known"), [(None, 64), (1, 1), (0, None)])
def test_of_rates_as_many_are_believed_as_are_known(widest, known):
    found = believed_profiles(bftrainer_trials(("AlexNet",), 2), ("a",), widest=widest)
    assert [len(profile.measured) for profile in found.values()] == [known] * (widest != 0)


# -- TRACE.npz ----------------------------------------------------------------------------------


def changes_of(changes):
    return [(c.time_s, c.joined, c.left) for c in changes]


def test_a_trace_has_its_nodes_in_order_of_their_names_and_can_begin_again(tmp_path):
    found = load_trace(trace(tmp_path))
    assert found.names == ("a1", "b1", "c1")
    assert len(found.fleet()) == 3
    assert found.end_s == 30.0
    once = [(0.0, (0, 1), ()), (10.0, (2,), (1,)), (30.0, (1,), ())]
    assert changes_of(found.changes) == once
    # The wrap takes the mean distance of events, 15 s. Then node 2 is taken, 0 and 1 go on.
    again = [(45.0, (), (2,)), (55.0, (2,), (1,)), (75.0, (1,), ())]
    assert changes_of(itertools.islice(found.repeated(), 6)) == [*once, *again]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("time_s", None, " has no array `time_s`"),
        ("time_s", np.array(["a", "b", "c"]), " is no trace: could not convert string"),
        ("time_s", np.array([0.0]), "`time_s` must"),
        ("time_s", np.array([0.0, 5.0, 5.0]), "`time_s` must"),
        ("initial_idle", np.ones(2, bool), "`initial_idle` must"),
        ("change_node", np.array([0, 1]), "all arrays of changes as many"),
        ("change_event", np.array([2, 1, 2]), "`change_event` must"),
        ("change_node", np.array([0, 1, 3]), "`change_node` must"),
        ("change_delta", np.array([-1, 2, 1]), "`change_delta` must"),
    ],
)
def test_wrong_arrays_of_a_trace_are_named(name, value, told, tmp_path):
    assert told in refused(load_trace, trace(tmp_path, **{name: value}))


def test_what_is_not_an_archive(tmp_path):
    path = trace(tmp_path)
    whole = path.read_bytes()
    for content in (b"", b"text", whole[:200], whole[:-30]):
        path.write_bytes(content)
        assert refused(load_trace, path).startswith(
            " is not a NumPy archive (.npz) of plain arrays"
        )


def test_pickled_objects_are_not_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    path = trace(tmp_path, node_name=np.array([Bomb(), 1, 2], dtype=object))
    assert "of plain arrays" in refused(load_trace, path)
    assert not (tmp_path / "exploded").exists()
