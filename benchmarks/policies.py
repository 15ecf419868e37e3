"""Real sweeps under each policy, in alternation.

python benchmarks/policies.py                # 3 sweeps, 3 policies, 2 rounds: about 15 minutes
python benchmarks/policies.py --policies mip elastic greedy --rounds 3

Digits (24 trials of 12 epochs), the same with three quarters of the trials pruned, and photographs
(16 architectures of 5 epochs) on 4 CPU slots. Parameters and pruning are the same in each run of
a round. The slots share the machine's cores, so unlike in `emulated.py` a device that idles makes
the others faster.
"""

from __future__ import annotations

import argparse

from pairing import Row, note, print_table, ratios, row, run

from optuna_fleet.policies import POLICIES

SWEEPS = ("digits", "digits-pruned", "photographs")


def measure(sweep: str, policies: list[str], rounds: int) -> list[Row]:
    """Makespans of all policies over those of the first."""
    durations_s: dict[str, list[float]] = {policy: [] for policy in policies}
    for seed in range(rounds):
        for policy, seconds in durations_s.items():
            (answer,) = run(("sweep_policy.py", sweep, policy, seed)).answers
            note(f"{sweep}, {policy}: {answer}")
            seconds.append(answer["duration_s"])
    first, *others = policies
    made = []
    for policy in others:
        longer = ratios(durations_s[policy], durations_s[first])
        made.append(row(f"{sweep}: `{policy}` / `{first}`", longer, "x"))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--policies", choices=POLICIES, nargs="+", default=["mip", "elastic", "baseline"]
    )
    parser.add_argument("--sweeps", choices=SWEEPS, nargs="+", default=list(SWEEPS))
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    print_table(
        one
        for sweep in arguments.sweeps
        for one in measure(sweep, arguments.policies, arguments.rounds)
    )


if __name__ == "__main__":
    main()
