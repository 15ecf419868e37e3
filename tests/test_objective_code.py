"""When an objective counts as changed, and when not."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import pytest

from optuna_fleet.sampler_bridge.objective_code import ObjectiveDigest, digest_of

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


def digest_in(script: str) -> ObjectiveDigest:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script, "script.py", "exec"), names)
    found = digest_of(names["objective"])
    assert found.code
    assert found.whole
    return found


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("return 3", "return 4", "code"),
        ("Model(RATE)", "Model(-RATE)", "code"),
        ('{"p", "q"}', '{"p", "r"}', "code"),
        ("return function(trial)", "return 2 * function(trial)", "code"),
        ("json.dumps", "json.loads", "code"),
        ("RATE = 0.5", "RATE = 0.25", "value"),
        ("RATE = 0.5", "RATE = __import__('time').time()", "value"),
        ("epochs=10", "epochs=20", "value"),
        ('"b", "a"', '"b", "c"', "value"),
        ("\n\nclass", "\n# A model.\n\nclass", ""),
        ('{"b", "a"}', '{"a", "b"}', ""),
        ('{"p", "q"}', '{"q", "p"}', ""),
        ("RATE = 0.5", "RATE, OTHER = 0.5, 1", ""),
        ("RATE = 0.5", "RATE, depth = 0.5, __import__('time').time()", ""),  # names no global
    ],
)
def test_code_and_values_are_told_apart(old: str, new: str, changes: str) -> None:
    assert old in SCRIPT
    changed, before = digest_in(SCRIPT.replace(old, new)), digest_in(SCRIPT)
    assert (changed.code != before.code) == (changes == "code")
    assert (changed.whole != before.whole) == bool(changes)


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
    assert digest_of(make(1.0)) == digest_of(make(1.0)) != digest_of(make(2.0))


def test_an_objective_that_can_not_be_looked_at_has_none() -> None:
    class Evil:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("no")

        def __call__(self, trial: Any) -> float:
            return 0.0

    assert digest_of(Evil()) == ObjectiveDigest("", "")


UNSTABLE = """
import dataclasses, enum, functools, os, random, tempfile, time, uuid
from pathlib import Path

class Kind(enum.Enum):
    A = "a"
    B = "b"

@dataclasses.dataclass
class Config:
    kinds: set = dataclasses.field(default_factory=lambda: {Kind.A, Kind.B})
    started: float = dataclasses.field(default_factory=time.time)

@functools.lru_cache
def cached(x): return x

FOLDER, RUN, STARTED = tempfile.gettempdir() + str(os.getpid()), uuid.uuid4(), time.time()
PATH, CONFIG, NAMES = Path(FOLDER), Config(), list({"x", "y", "z", "u", "v", "w"})
STEPS = {name: lambda: 1 for name in NAMES} | {"longer": lambda x: 2}
ORDERED = list({f for f in (lambda: 3, lambda: 4, lambda: 5, lambda: 6)})

def objective(trial):
    if Kind(trial) in {Kind.A, Kind.B} or trial in {"p", "q", "r", 1, None, (1, "s")}:
        return cached(FOLDER), RUN, STARTED, PATH, CONFIG, NAMES, STEPS, ORDERED, os.environ

from optuna_fleet.sampler_bridge.objective_code import digest_of
print(digest_of(objective).code)
"""


def test_the_code_is_the_same_in_each_process() -> None:
    """Whatever order its sets have, whenever it runs and wherever objects lie."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", UNSTABLE],
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "3")  # which order all of these sets otherwise
    ]
    (digest,) = {run.communicate()[0].strip() for run in runs}
    assert digest
