"""Timelines of made-up studies: what the figure shows."""

import dataclasses
import logging
import re

import optuna
import plotly.graph_objects as go
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState

from optuna_fleet import FleetConfigError
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.records import DEVICES_KEY, FLIGHTS_KEY, DeviceSpan
from optuna_fleet.visualization import plot_timeline

START = 1.7e9
PRUNED, FAILED, MOVED, LOST = "pruned", "failed", "checkpointed to move", "devices lost"


def flight(devices, start, end, *, rnd=1, ending="returned"):
    return {
        "devices": devices,
        "start": START + start,
        "end": START + end,
        "round": rnd,
        "ending": ending,
        "probing_s": 0.5,
        "profiling_s": 1.0,
        "data_wait_s": 0.25,
    }


def add_trial(study, *flights, state=TrialState.COMPLETE, params=None, began=0):
    params = params or {"lr": 0.1}
    study.add_trial(
        optuna.create_trial(
            state=state,
            value=0.75 if state is TrialState.COMPLETE else None,
            params=params,
            distributions={
                name: CategoricalDistribution([value]) for name, value in params.items()
            },
        )
    )
    number = len(study.trials) - 1
    records = [{"trial": number, **record} for record in flights]
    key = FLIGHTS_KEY.format(began=START + began, index=number)
    compat.set_study_record(study, key, records)


@pytest.fixture
def study():
    """Four trials on devices 0, 1 and 4: a whole one, a moved, a pruned and a failed one."""
    study = optuna.create_study(study_name="mixed")
    add_trial(study, flight([0, 1], 10, 20))
    add_trial(
        study,
        flight([4], 10, 14, ending="yielded"),
        flight([0], 20, 28, rnd=2, ending="lost"),
        flight([1], 28, 40, rnd=3),
    )
    add_trial(study, flight([4], 14, 18, ending="raised"), state=TrialState.PRUNED)
    add_trial(study, flight([4], 18, 30, ending="raised"), state=TrialState.FAIL)
    return study


def drawn(figure):
    """What a figure's bars show: device row, start, length, text, hatch."""
    return sorted(
        row
        for trace in figure.data
        if trace.type == "bar" and trace.x != (None,)
        for row in zip(
            trace.y, trace.base, trace.x, trace.text, trace.marker.pattern.shape, strict=True
        )
    )


def test_only_the_last_flight_carries_the_trials_end():
    study = optuna.create_study()
    moved, last = flight([0], 0, 1, ending="yielded"), flight([1], 1, 2, ending="lost")
    add_trial(study, moved, last, state=TrialState.PRUNED)
    figure = plot_timeline(study)
    assert [t.name for t in figure.data if t.type == "scatter"] == [MOVED]
    assert [row[-1] for row in drawn(figure)] == ["", "/"]


def test_each_optimize_call_counts_its_rounds_anew():
    study = optuna.create_study()
    add_trial(study, flight([0], 0, 5, rnd=1))
    add_trial(study, flight([0], 5, 9, rnd=2))
    add_trial(study, flight([0], 50, 55, rnd=1), began=50)
    add_trial(study, flight([0], 55, 60, rnd=2), began=50)
    assert [line.x0 for line in plot_timeline(study).layout.shapes] == [5, 55]


def test_the_figure_draws_the_bars(study):
    figure = plot_timeline(study)
    assert isinstance(figure, go.Figure)
    assert drawn(figure) == [
        (0, 0, 10, "0", ""),
        (0, 10, 8, "1", ""),
        (1, 0, 10, "0", ""),
        (1, 18, 12, "1", ""),
        (2, 0, 4, "1", ""),
        (2, 4, 4, "2", "/"),
        (2, 8, 12, "3", ""),
    ]
    assert figure.layout.yaxis.ticktext == ("0", "1", "4")
    assert figure.layout.title.text == "mixed: 4 trials on 3 devices"
    marks = {t.name: (t.x, t.y) for t in figure.data if t.type == "scatter"}
    assert marks == {FAILED: ((20,), (2,)), MOVED: ((4,), (2,)), LOST: ((18,), (0,))}
    legend = [
        entry.name
        for entry in (*figure.data, *figure.layout.shapes)
        if entry.showlegend is not False
    ]
    assert legend == [PRUNED, FAILED, MOVED, LOST, "new round"]


def test_bars_tell_their_story_on_hover(study):
    texts = plot_timeline(study).data[0].customdata
    text = next(text for text in texts if "flight 2 of 3" in text)
    assert text.split("<br>") == [
        "<b>trial 1</b> (complete)",
        "value: 0.75",
        "lr: 0.1",
        "devices: 0",
        "round: 2",
        "flight 2 of 3: 10.0 s to 18.0 s",
        "waited for data: 0.2 s, probing: 0.5 s",
        "the flight ended: lost",
    ]


def test_parameters_cannot_inject_html():
    study = optuna.create_study()
    add_trial(study, flight([0], 0, 1), params={"x": "<b>bold</b>"})
    assert "x: &lt;b&gt;bold&lt;/b&gt;" in plot_timeline(study).data[0].customdata[0]


def test_a_study_that_never_flew_gives_an_empty_figure_and_a_warning(caplog):
    optuna.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        figure = plot_timeline(optuna.create_study())
    optuna.logging.disable_propagation()
    assert "does not have any flights" in caplog.text
    assert figure.data == ()
    assert ["No flights are recorded" in a.text for a in figure.layout.annotations] == [True]


def test_what_is_no_study_is_refused_in_words():
    with pytest.raises(FleetConfigError, match="`study` is 'sweep', but must be a study, as of"):
        plot_timeline("sweep")


# -- nodes ---------------------------------------------------------------------------------------


def add_stays(study, *stays, began=0):
    """Of devices: (device, node, start, end)."""
    spans = [
        DeviceSpan(
            device=device,
            node=node,
            kind="cpu",
            start=START + start,
            end=None if end is None else START + end,
        )
        for device, node, start, end in stays
    ]
    records = [dataclasses.asdict(span) for span in spans]
    compat.set_study_record(study, DEVICES_KEY.format(began=START + began, index=0), records)


@pytest.fixture
def on_nodes(study):
    """Node b comes late, leaves at 22 s and comes back; device 1 is on it at last."""
    stays = [
        (0, "a", 5, None),
        (4, "b", 9, 22),
        (7, "b", 9, 22),
        (1, "a", 5, 25),
        (4, "b", 26, 31),
    ]
    add_stays(study, *stays, (1, "b", 26, None))
    return study


def test_devices_of_drivers_that_run_at_once_are_told_apart():
    study = optuna.create_study()
    for began, node in ((0, "a"), (5, "b")):
        add_stays(study, (0, node, began, 40), (1, node, began, 40), began=began)
        add_trial(study, flight([0], began, began + 1), began=began)
        add_trial(study, flight([1], 10 + began, 30), began=began)
    figure = plot_timeline(study)
    (bars,) = figure.data
    nodes = {
        (n, re.search("node: (.)", text)[1])
        for n, text in zip(bars.text, bars.customdata, strict=True)
    }
    assert nodes == {("0", "a"), ("1", "a"), ("2", "b"), ("3", "b")}


def test_rows_are_grouped_by_node_and_say_which(on_nodes):
    figure = plot_timeline(on_nodes)
    assert figure.layout.yaxis.ticktext == ("a  0", "1", "b  1", "4")
    assert "on 4 devices of 2 nodes" in figure.layout.title.text
    assert any("node: b" in text for trace in figure.data for text in trace.customdata or ())
