"""What pre-flight checks cost a sweep, and how many trials of an architecture search they clear.

python benchmarks/checks.py                    # 8 minutes or so on 2 cores, which must be quiet
python benchmarks/checks.py --rounds 5
python benchmarks/checks.py --only search      # the simulated one, seconds

*digits*: examples/digits.py with checks and without, in alternation, in processes of their own:
CPU seconds of all processes, and seconds from the first trial's beginning to the last one's end.
*search*: 100 trials of 10 device-minutes, each with 6 choices of 5; what one check takes is what
one of examples/digits.py took.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

NUM_TRIALS, NUM_PARAMETERS, NUM_CHOICES, NUM_DEVICES = 100, 6, 5, 8
MINUTES = 10


def sweep(is_checked: bool) -> dict[str, float]:
    """One sweep in this process, which does nothing else."""
    import digits
    import optuna

    from optuna_fleet import FleetExecutor

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(  # the same trials, all to their end
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=optuna.pruners.NopPruner(),
    )
    pipeline = digits.make_pipeline()
    with FleetExecutor(pipeline, devices=4, device_type="cpu", preflight=is_checked) as fleet:
        study.optimize(digits.objective, n_trials=24, executor=fleet)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    starts = [trial.datetime_start.timestamp() for trial in study.trials if trial.datetime_start]
    return {
        "cpu_s": sum(one.ru_utime + one.ru_stime for one in used),
        "makespan_s": time.time() - min(starts),
        "is_checked": is_checked,
    }


def swept(is_checked: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "--sweep", str(int(is_checked))]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(found), flush=True)
    return found


def compare_digits(rounds: int) -> None:
    pairs = [
        tuple(swept(is_checked) for is_checked in ((True, False), (False, True))[k % 2])
        for k in range(rounds)
    ]
    for what in ("cpu_s", "makespan_s"):
        ratios = []
        for pair in pairs:
            with_, without = sorted(pair, key=lambda one: -one["is_checked"])
            ratios.append(with_[what] / without[what])
        print(f"digits, {what}: {statistics.median(ratios):.3f} of {sorted(ratios)}")


def search(check_s: float, seed: int) -> dict[str, Any]:
    """A simulated architecture search, whose trials are proposed one after another."""
    from optuna_fleet.policies import policy_of
    from optuna_fleet.replay.simulation import Simulation
    from optuna_fleet.replay.workload import FleetChange, Rules, SimulatedTrial, believed_profiles
    from optuna_fleet.resources import Device, Fleet

    draw = random.Random(seed)
    trials = [
        SimulatedTrial(
            name=f"trial {number}",
            rates=tuple(100.0 * m**0.9 for m in range(1, NUM_DEVICES + 1)),
            epochs=20,
            samples_per_epoch=100.0 * 60 * MINUTES / 20,
            traits=frozenset(f"{p}={draw.randrange(NUM_CHOICES)}" for p in range(NUM_PARAMETERS)),
        )
        for number in range(NUM_TRIALS)
    ]
    devices = tuple(Device(index=d, node=0, kind="cpu") for d in range(NUM_DEVICES))
    named = policy_of("elastic")
    simulation = Simulation(
        Fleet(devices=devices),
        trials,
        named.rules(),
        named.new_allocator(seed),
        believed_profiles(trials, ["cpu"]),
        Rules(check_s=check_s),
    )
    everything = FleetChange(time_s=0.0, joined=tuple(range(NUM_DEVICES)))
    outcome = simulation.run(iter([everything]))
    passed = frozenset().union(*outcome.checked)
    return {
        "cleared": sum(trial.traits <= passed for trial in trials) / NUM_TRIALS,
        "checks": (num_checks := len(outcome.checked)),
        "share": num_checks * check_s / (outcome.end_s * NUM_DEVICES),
        "makespan_s": outcome.end_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["digits", "search"])
    parser.add_argument("--check-s", type=float, default=4.0, help="what one check takes")
    parser.add_argument("--sweep", type=int, choices=[0, 1], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.sweep is not None:
        print(json.dumps(sweep(bool(given.sweep))), flush=True)
        os._exit(0)
    if given.only != "search":
        compare_digits(given.rounds)
    if given.only != "digits":
        for check_s in (given.check_s, 10 * given.check_s):
            print(f"search, {check_s:g} s a check: {search(check_s, seed=0)}")


if __name__ == "__main__":
    main()
