"""What optuna-dashboard shows of where trials were."""

from __future__ import annotations

from typing import Any

import optuna
from optuna_dashboard import get_note, save_note

from optuna_fleet.integrations.dashboard import note_flights
from optuna_fleet.sampler_bridge import compat
from tests.fleets import Leg, train


def note_of(study: optuna.Study, number: int) -> str:
    return get_note(compat.bare_trial(study, study.trials[number]))


def test_a_trials_page_says_where_it_was(fleet: Any) -> None:
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"x": [0, 1]}))
    fleet.script = {0: [Leg((0,), 2), Leg((1, 2))]}
    study.optimize(train, n_trials=1, executor=fleet, callbacks=[note_flights])
    rows = [line.split(" | ") for line in note_of(study, 0).splitlines() if line.startswith("| ")]
    assert [(row[0], row[1], row[5]) for row in rows[1:]] == [
        ("| 1", "0", "yielded |"),
        ("| 2", "1, 2", "returned |"),
    ]
    assert not study.trials[0].user_attrs.keys() - {"losses", "noise"}


def test_what_a_note_says_already_is_kept(fleet: Any) -> None:
    study = optuna.create_study()
    study.optimize(lambda trial: 1.0, n_trials=1, executor=fleet)
    trial = study.trials[0]
    save_note(compat.bare_trial(study, trial), "of my own")
    for _ in range(2):
        note_flights(study, trial)
    note = note_of(study, 0)
    assert note.startswith("of my own\n\n### On the fleet\n")
    assert note.count("### On the fleet") == 1
