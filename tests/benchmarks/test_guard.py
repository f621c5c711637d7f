"""The comparison of `benchmarks.guard`, with made-up numbers."""

from collections.abc import Iterator
from itertools import chain, repeat

import pytest

from benchmarks.guard import GROUPS, MAX_SLOWDOWN, MIN_ROUNDS, StageCost, lowest_costs, undetected
from benchmarks.guard_stages import Round, Seconds

USUAL = {"decode": 0.5, "plan": 2.0}
ROUNDS = MIN_ROUNDS + 3


def rounds(*measured: tuple[Seconds, Seconds]) -> tuple[Round, Iterator[tuple[Seconds, Seconds]]]:
    """Return a measurement that gives these rounds, the last one repeatedly, and its remaining rounds."""
    left = chain(measured, repeat(measured[-1], ROUNDS - len(measured)))

    async def measure() -> tuple[Seconds, Seconds]:
        return next(left)

    return measure, left


@pytest.mark.parametrize(("cpu", "exceeded"), [(0.5, False), (0.5 * MAX_SLOWDOWN, False), (1.0, True)])
def test_stage_exceeds_its_bound(cpu: float, exceeded: bool) -> None:
    cost = StageCost("decode", cpu=cpu * 3.0, floor=3.0, usual=0.5)
    assert cost.ratio == pytest.approx(cpu)
    assert cost.bound == 0.5 * MAX_SLOWDOWN
    assert cost.exceeded is exceeded


async def test_lowest_cost_of_stage_and_floor_counts() -> None:
    measure, left = rounds(
        ({"decode": 5.0, "plan": 20.0, "other": 1.0}, {"decode": 10.0, "plan": 12.0}),
        ({"decode": 6.0, "plan": 30.0, "other": 1.0}, {"decode": 12.0, "plan": 10.0}),
    )
    costs = await lowest_costs(measure, USUAL, ROUNDS)
    assert costs == [StageCost("decode", 5.0, 10.0, 0.5), StageCost("plan", 20.0, 10.0, 2.0)]
    assert not any(cost.exceeded for cost in costs)
    assert len(list(left)) == ROUNDS - MIN_ROUNDS


async def test_slow_stage_is_measured_in_all_rounds() -> None:
    measure, left = rounds(({"decode": 10.0, "plan": 20.0}, {"decode": 10.0, "plan": 10.0}))
    costs = await lowest_costs(measure, USUAL, ROUNDS)
    assert [cost.stage for cost in costs if cost.exceeded] == ["decode"]
    assert list(left) == []


async def test_stage_that_becomes_fast_enough_ends_the_measurement() -> None:
    slow = ({"decode": 10.0, "plan": 20.0}, {"decode": 10.0, "plan": 10.0})
    fast = ({"decode": 5.0, "plan": 20.0}, {"decode": 10.0, "plan": 10.0})
    measure, left = rounds(*[slow] * MIN_ROUNDS, fast)
    costs = await lowest_costs(measure, USUAL, ROUNDS)
    assert not any(cost.exceeded for cost in costs)
    assert len(list(left)) == ROUNDS - MIN_ROUNDS - 1


def test_doubled_stage_below_its_bound_is_undetected() -> None:
    costs = [StageCost("decode", 2.0, 1.0, 1.0), StageCost("plan", 1.0, 1.0, 1.0), StageCost("socket", 1.0, 1.0, 1.0)]
    assert undetected(costs, ("decode", "plan")) == ["plan"]
    assert undetected(costs, ("decode",)) == []


@pytest.mark.parametrize("name", GROUPS)
def test_every_stage_can_be_doubled(name: str) -> None:
    group = GROUPS[name]
    assert sorted(stage for stages in group.doubled for stage in stages) == sorted(group.usual)
    for doubling in group.doubled.values():
        with doubling():
            pass
