"""What is sent of a user's script arrives."""

import functools
import inspect
import runpy
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torchvision  # noqa: F401  torch.ops.torchvision

from optuna_fleet.wire.packing import pack, unpack
from tests.scripted import script


def sent(value: Any) -> Any:
    return unpack(pack(value))


@pytest.mark.parametrize(
    "expression",
    [
        "torch.backends.cudnn.benchmark",
        "torch.backends.cuda.matmul.allow_tf32",
        "torch.backends.mps.is_available()",
        "torch.ops.aten.add(1, 2)",
        "torch.ops.torchvision.nms is not None",
        "torch._dynamo.config.verbose",
        "torch.utils.data.Dataset is not None",
    ],
)
def test_an_objective_may_mention_any_module(expression: str) -> None:
    objective = script(f"def objective(trial): return {expression}", torch=torch)["objective"]
    assert sent(objective)(None) == objective(None)


def test_settings_of_modules_are_those_of_the_process_that_sets_them() -> None:
    code = "def objective(trial): torch.backends.cudnn.benchmark = True"
    packed = pack(script(code, torch=torch)["objective"])
    over_there = (
        "import pickle, sys; pickle.load(sys.stdin.buffer)(None); import torch; "
        "assert torch.backends.cudnn.benchmark"
    )
    subprocess.run([sys.executable, "-c", over_there], input=packed, check=True)


@pytest.mark.parametrize(
    "thing",
    [
        torch.backends.cudnn,
        torch.ops,
        torch.ops.aten,
        torch.ops.aten.add,
        torch.ops.aten.add.Tensor,
        torch._C._profiler,
        torch._dynamo.config,
    ],
)
def test_a_module_or_operator_is_that_of_the_process_it_comes_to(thing: Any) -> None:
    assert sent(thing) is thing


def test_a_module_that_cannot_be_imported_travels_by_value() -> None:
    class Lazy(types.ModuleType):
        pass

    for module in types.ModuleType("made_up"), Lazy("made_up"), Lazy("not.there"):
        module.rate = 0.1  # type: ignore[attr-defined]
        arrived = sent(module)
        assert arrived is not module
        assert (arrived.__name__, arrived.rate) == (module.__name__, 0.1)


CACHED = """
import functools, typing

@functools.lru_cache(maxsize=5)
def double(x): return 2 * x

class Folder:
    @functools.cached_property
    def size(self): return double(3)

def objective(trial): return double(1), Folder().size, double.cache_parameters()["maxsize"]
"""


def test_functions_and_properties_of_the_script_may_be_cached() -> None:
    over_there = "import pickle, sys; print(pickle.load(sys.stdin.buffer)(None))"
    packed = pack(script(CACHED)["objective"])
    answer = subprocess.run(
        [sys.executable, "-c", over_there], input=packed, check=True, capture_output=True
    )
    assert answer.stdout.decode().strip() == "(2, 6, 5)"


@functools.cache
def importable() -> int:
    return 1


def test_a_cached_function_that_can_be_imported_is_the_one_over_there() -> None:
    assert sent(importable) is importable


COMPILED = """
import functools, torch
shift = 2

@torch.compile(backend="eager")
def shifted(x): return x + shift

@functools.wraps(shifted)
def doubled(x): return 2 * shifted(x)

def objective(trial): return doubled(torch.zeros(1)).item()
"""


def test_functions_of_the_script_may_be_compiled() -> None:
    assert sent(script(COMPILED)["objective"])(None) == 4


def test_the_code_of_a_script_still_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "sweep.py"
    path.write_text("def objective(trial):\n    return lambda: trial\n")
    objective = sent(runpy.run_path(str(path), run_name="__main__")["objective"])
    assert inspect.getsource(objective) == path.read_text()
    assert objective(None).__code__.co_filename == str(path)
