"""When an objective counts as changed, and when not."""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

import pytest

from optuna_fleet.sampler_bridge.objective_code import code_digest

SCRIPT = """
import functools, json

RATE = 0.5
NAMES = {"b", "a"}

class Model:
    def __init__(self, size): self.size = size
    def depth(self): return 3

def build(trial): return Model(RATE)

def decorated(function):
    @functools.wraps(function)
    def call(trial): return function(trial)
    return call

@decorated
def objective(trial, epochs=10):
    def inner(x): return x in {"p", "q"}
    return build(trial).depth() + epochs + len(NAMES) + inner(json.dumps(1))
"""


def digest_of(script: str) -> str:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script, "script.py", "exec"), names)
    found = code_digest(names["objective"])
    assert found
    return found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("RATE = 0.5", "RATE = 0.25"),
        ("return 3", "return 4"),
        ("epochs=10", "epochs=20"),
        ("Model(RATE)", "Model(-RATE)"),
        ('{"p", "q"}', '{"p", "r"}'),
        ("return function(trial)", "return 2 * function(trial)"),
        ("json.dumps", "json.loads"),
    ],
)
def test_it_has_changed(old: str, new: str) -> None:
    assert old in SCRIPT
    assert digest_of(SCRIPT.replace(old, new)) != digest_of(SCRIPT)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\n\nclass", "\n# A model.\n\nclass"),
        ('{"b", "a"}', '{"a", "b"}'),
        ('{"p", "q"}', '{"q", "p"}'),
        ("RATE = 0.5", "RATE, OTHER = 0.5, 1"),
    ],
)
def test_it_has_not_changed(old: str, new: str) -> None:
    assert old in SCRIPT
    assert digest_of(SCRIPT.replace(old, new)) == digest_of(SCRIPT)


def scaled(trial: Any, factor: float) -> float:
    return factor


class Objective:
    def __init__(self, factor: float) -> None:
        self.factor, self.itself = factor, self

    def __call__(self, trial: Any) -> float:
        return self.factor


@pytest.mark.parametrize(
    "make", [lambda factor: functools.partial(scaled, factor=factor), Objective]
)
def test_what_it_is_bound_to_counts(make: Any) -> None:
    assert code_digest(make(1.0)) == code_digest(make(1.0)) != code_digest(make(2.0))


def test_an_objective_that_can_not_be_looked_at_has_none() -> None:
    class Evil:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("no")

        def __call__(self, trial: Any) -> float:
            return 0.0

    assert code_digest(Evil()) == ""


def test_a_function_that_calls_itself() -> None:
    def objective(trial: Any) -> Any:
        return objective(trial)

    assert isinstance(objective, FunctionType)
    assert code_digest(objective)
