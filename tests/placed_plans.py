"""Plans that are written down, device by device, in place of decided ones."""

from collections.abc import Mapping, Sequence

from optuna_fleet.alloc import AllocationProblem, Assignment, Flotilla, Plan


def placed_plan(
    problem: AllocationProblem,
    placed: Mapping[int, tuple[int, ...]],
    groups: Sequence[Sequence[int]],
) -> Plan:
    """The plan in which trials have these devices, in these flotillas."""

    def assignment(number: int) -> Assignment:
        devices = placed[number]
        rates = problem.by_number[number].rates_on(problem.kind_of(devices))
        return Assignment(number=number, devices=devices, rate=rates[len(devices) - 1])

    flotillas = tuple(Flotilla(assignments=tuple(map(assignment, group))) for group in groups)
    return Plan(flotillas=flotillas, allocator="placed", reason="by hand", status="by hand")
