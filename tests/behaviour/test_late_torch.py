"""An objective that imports torch by itself finds it as it would, had it been there before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

HELPER = """
def found():
    import random, numpy, torch
    import torch.distributed as dist
    return {
        "threads": torch.get_num_threads(),
        "drawn": [random.random(), numpy.random.rand(), float(torch.rand(()))],
        "size": dist.get_world_size() if dist.is_initialized() else None,
        "dtype": str(torch.get_default_dtype()),
    }
"""

SCRIPT = """
import json, os, pathlib, signal, sys, threading
import optuna
from optuna_fleet import FleetExecutor
import helper

def plain(trial):
    trial.set_user_attr("imported", "".join(["tor", "ch"]) in sys.modules)
    return 0.0

def late(trial):
    if trial.number == 0:
        import torch
        is_alone = torch.distributed.get_world_size() == 1  # at once
    elif trial.number == 1:
        import importlib
        importlib.import_module("torch.nn.functional")
    else:
        threads = [threading.Thread(target=__import__, args=["torch"]) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    trial.set_user_attr("found", helper.found())
    return 0.0

def late_and_rude(trial):
    late(trial)
    import torch
    torch.set_default_dtype(torch.float16)  # of no concern to the next trial
    torch.manual_seed(0)
    return 0.0

def dies_at_first(trial):
    found = helper.found()
    before = pathlib.Path(f"{trial.number}.json")
    if not before.exists():
        before.write_text(json.dumps(found))
        os.kill(os.getpid(), signal.SIGKILL)  # its successor has not imported torch
    trial.set_user_attr("found", found)
    trial.set_user_attr("before", json.loads(before.read_text()))
    return 0.0

def told(objective, *names, executor):
    study = optuna.create_study()
    study.optimize(objective, n_trials=3, executor=executor)
    return [[trial.user_attrs[name] for trial in study.trials] for name in names]

if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    told_all = {}
    with FleetExecutor(devices=3, device_type="cpu") as fleet:
        told_all["imported"] = told(plain, "imported", executor=fleet)
        for name in ("first", "second"):
            [told_all[name]] = told(late_and_rude, "found", executor=fleet)
        twice = told(dies_at_first, "before", "found", executor=fleet)
        told_all["before"], told_all["again"] = twice
    [told_all["inline"]] = told(late, "found", executor=FleetExecutor(cluster="inline"))
    told_all["group left"] = not sys.modules["torch"].distributed.is_initialized()
    finders = [type(finder).__module__ for finder in sys.meta_path]
    told_all["finders left"] = [name for name in finders if name.startswith("optuna_fleet")]
    print(json.dumps(told_all))
"""


def of_the_script(tmp_path: Path) -> dict[str, Any]:
    """What a script has found."""
    (tmp_path / "helper.py").write_text(HELPER)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert isinstance(told, dict)
    return told


def test_torch_is_set_up_whenever_it_is_imported(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # The folder's name is in the objective's pickle, where torch's would have it imported first.
    told = of_the_script(tmp_path_factory.mktemp("late"))
    assert told["imported"] == [[False, False, False]]
    first = told["first"]
    assert first == told["second"]
    assert len({tuple(found["drawn"]) for found in first}) == 3
    assert [found["size"] for found in first] == [1, 1, 1]
    assert len({found["threads"] for found in first}) == 1
    assert told["before"] == told["again"] == first
    assert {found["dtype"] for found in first} == {"torch.float32"}
    inline = [{**found, "threads": first[0]["threads"]} for found in told["inline"]]
    assert inline == first
    assert told["group left"]
    assert told["finders left"] == []
