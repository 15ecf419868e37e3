"""Names of checkpoints: no two runs share one, and what is not needed can be told from them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optuna_fleet.checkpoints.folder import (
    FileName,
    newest_first,
    resumable,
    superfluous,
    trial_of,
)

RUNS = ("0123abcd-9", "0123abcd-12", "99999999-0")


@st.composite
def names(draw: st.DrawFn) -> FileName:
    kind = draw(st.sampled_from(["", "best", "final"]))
    run = draw(st.sampled_from(RUNS if kind != "final" else (*RUNS, "")))
    place = draw(st.tuples(st.integers(1, 2), st.integers(1, 12)))
    position = () if kind == "final" else place
    return FileName(trial=draw(st.integers(0, 1)), position=position, run=run, kind=kind)


@given(names())
def test_a_name_is_read_as_it_was_written(name: FileName) -> None:
    assert FileName.parse(str(name)) == name
    assert trial_of(f".{name}.a_b1") == trial_of(str(name)) == name.trial
    assert FileName.parse(f".{name}.a_b1") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lock",
        "../trial-1.1-1.0123abcd-0.pt",
        "trial-1.1-1.0123abcd-0.pt/../../x",
        "trial-1.1-1.0123abcd-0.pt\n",
        "trial-1.1-1.0123abcd-0.pt\0",
        "trial-1.1-1.0123ABCD-0.pt",
        "trial-1.1.0123abcd-0.pt",
        "trial-1.0123abcd-0.pt",
        "trial-1.0123abcd-0.best.pt",
        "trial-1.best.pt",
        "trial-1.pt",
        "trial-1.pt.previous",
        "trial-1.1-1.0123abcd-0.final.pt",
        f"trial-{'1' * 5000}.final.pt",
        "trial-\u0661.final.pt",
    ],
)
def test_what_is_not_ours_has_no_name(text: str) -> None:
    assert FileName.parse(text) is None


def test_they_are_what_the_documentation_says() -> None:
    parts = {"trial": 7, "run": "3f9a1c02-12"}
    assert str(FileName(**parts, position=(1, 5))) == "trial-7.1-5.3f9a1c02-12.pt"
    assert str(FileName(**parts, position=(1, 5), kind="best")) == (
        "trial-7.1-5.3f9a1c02-12.best.pt"
    )
    assert str(FileName(**parts, kind="final")) == "trial-7.3f9a1c02-12.final.pt"
    assert str(FileName(trial=7, kind="final")) == "trial-7.final.pt"


@given(st.sets(names()), st.integers(1, 12), st.sampled_from(RUNS))
def test_what_is_needed_stays(found: set[FileName], epoch: int, run: str) -> None:
    newest = FileName(trial=0, position=(1, epoch), run=run)
    left = (found | {newest}) - superfluous(found | {newest}, newest)
    # A run that went on with it may have written, too.
    after = {n for n in found if n.trial == 0 and (run, n.run) == RUNS[:2]}
    assert after <= left
    found, left = found - after, left - after
    assert {name for name in found if name.trial == 1 or not name.run} <= left
    mine = {name for name in left if name.trial == 0 and name.run}
    later = {name for name in mine if name.run == run and name.position > newest.position}
    own_finals = {name for name in mine if name.kind == "final"}
    # It goes on writing while the driver hears of what it has written before.
    assert later == {n for n in found if (n.trial, n.run) == (0, run) and n.position > (1, epoch)}
    assert {name.run for name in own_finals} <= {run}
    here = mine - later - own_finals
    assert sum(name.kind == "" for name in here) <= 2
    assert sum(name.kind == "best" for name in here) <= 2
    assert resumable(left - later, newest) == resumable(found, newest)[:2]
    bests = newest_first(n for n in found if n.trial == 0 and n.kind == "best")
    usable = [best for best in bests if best.position <= newest.position]
    assert [best for best in bests if best in here][:1] == usable[:1]
    for one, other in itertools.pairwise(resumable(found, newest)):
        assert one == newest or one.position >= other.position
