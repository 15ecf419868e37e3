"""What can't be pickled is named as the user's script names it."""

import functools
import threading
from typing import Any

import pytest
import torch

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.executor.fleet_runner import _packed
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.wire.packing import pack
from optuna_fleet.wire.unpicklable import explained
from tests.scripted import script

SCRIPT = """
class Log:
    def __init__(self): self.handle = lock

class Seen:
    lock = lock
    def look(self): pass

class Hidden:
    def __getstate__(self): return {"shown": lock}

class Objective:
    def __init__(self): self.log = [Log()]
    def __call__(self, trial): return 0.0
    def run(self, trial): return 0.0

config = {"lr": 0.1, "log": Log()}
config["itself"] = config
numbers = (i for i in range(3))

def helper(x, log=lock, *, most=3): return x
def keyword(x, *, log=lock): return x

def use_global(trial): return lock
def use_item(trial): return config["lr"]
def use_default(trial): return helper(1)
def use_keyword(trial): return keyword(1)
def use_class(trial): return Seen()
def use_generator(trial): return next(numbers)
def use_hidden(trial): return hidden
def use_nested(trial):
    def inner(): return lock
    return inner()
hidden = [Hidden()]

def around(lock):
    def inner(trial): return lock
    return inner
use_closure = around(lock)

def use_attribute(trial): return 0.0
use_attribute.log = lock

use_call = Objective()
use_method = Objective().run
use_lambda = lambda trial: lock
"""


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return script(SCRIPT, lock=threading.Lock())


def words_for(value: Any, name: str = "objective") -> str:
    with pytest.raises(Exception, match=r".") as caught:
        pack(value)
    return explained({name: value}, "given", caught.value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ("use_global", "`lock`, which use_global() (train.py:24) uses, is of type `_thread.lock`"),
        ("use_item", "`config['log'].handle`, which use_item() (train.py:25) uses, is of type `_"),
        ("use_default", "`log`, which helper() (train.py:21) uses, is of type `_thread.lock`; it"),
        ("use_keyword", "`log`, which keyword() (train.py:22) uses, is of type `_thread.lock`"),
        ("use_class", "`Seen.lock`, which use_class() (train.py:28) uses, is of type `_thread.l"),
        ("use_generator", "is of type `generator`; it can't be pickled (TypeError: "),
        ("use_hidden", "`hidden[0].shown`, which use_hidden() (train.py:30) uses"),
        ("use_nested", "`lock`, which use_nested() (train.py:31) uses, is of type `_thread.lock`"),
        ("use_closure", "`lock`, which around.<locals>.inner() (train.py:37) uses, is of type `_"),
        ("use_attribute", "`log`, which use_attribute() (train.py:41) uses, is of type `_thread"),
        ("use_call", "`objective.log[0].handle`, given, is of type `_thread.lock`"),
        ("use_method", "`self.log[0].handle`, the object of the method Objective.run, is of typ"),
        ("use_lambda", "`lock`, which <lambda>() (train.py:46) uses, is of type `_thread.lock`"),
    ],
)
def test_what_cannot_be_sent_is_named(names: dict[str, Any], objective: str, words: str) -> None:
    assert words in words_for(names[objective])


def test_arguments_of_a_partial_are_named(names: dict[str, Any]) -> None:
    partial = functools.partial(names["around"], names["lock"])
    assert "`objective.args[0]`, given, is of type `_thread.lock`" in words_for(partial)


def test_the_search_ends() -> None:
    many: list[Any] = [[i] for i in range(60_000)]
    for _ in range(20_000):
        many = [many]
    assert "can't be pickled (" in words_for(many)
    for _ in range(20_000):  # or its end would be too deep for Python
        many = many.pop()


def test_the_message_says_what_to_do(names: dict[str, Any]) -> None:
    import optuna

    with pytest.raises(FleetConfigError, match=r"`lock`, which use_glob.*Create such a thing"):
        _packed(names["use_global"], optuna.create_study())


class HasALock(torch.utils.data.Dataset[int]):
    def __init__(self) -> None:
        self.locks = [threading.Lock()]

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


def test_the_part_of_a_data_set_is_named() -> None:
    with pytest.raises(
        FleetConfigError, match=r"`train\.locks\[0\]`, given to SharedPipeline, is of type"
    ):
        SharedPipeline(train=HasALock()).payload()


@pytest.mark.parametrize("argument", ["collate_fn", "prepare"])
def test_the_variable_of_a_stage_is_named(names: dict[str, Any], argument: str) -> None:
    pipeline = SharedPipeline(train=[1, 2], **{argument: names["use_global"]})
    with pytest.raises(FleetConfigError, match=r"`lock`, which use_global\(\) \(train\.py"):
        pipeline.packed().setup(1)
