"""`python -m benchmarks.guard`: compare the CPU time of each stage with the floor, and report stages that became slow.

Stage and floor are measured in turns, several rounds of each, and the lowest CPU time counts. The ratio of the two
depends little on the speed of the machine and on other processes. It depends on the versions of Python and of the
libraries: the usual ratios below are those of Python 3.11. A stage exceeds its bound if its ratio is `MAX_SLOWDOWN`
times the usual one.
"""

import asyncio
import gc
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path

import click
import orjson
from rich.console import Console
from rich.table import Table

from benchmarks import doubled_stages, guard_stages
from benchmarks.doubled_stages import Doubling
from benchmarks.guard_stages import GuardSizes, GuardWorkload, Round
from benchmarks.report import MICRO
from indexer.telemetry.log import configure_logging

SMOKE_SIZES = GuardSizes(repos=20, records=30, planned=20, received=100, export_records=50, exports=1, max_rounds=5)
"""The amount of work for `--smoke`."""
MAX_SLOWDOWN = 1.5
MIN_ROUNDS = 5
"""More rounds follow, up to `GuardSizes.max_rounds`, as long as a stage exceeds its bound."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """The cost of one stage.

    Attributes:
        stage: The name of the stage.
        cpu: CPU seconds of the fastest round.
        floor: CPU seconds of the fastest round of the floor.
        usual: The usual ratio of the two.
    """

    stage: str
    cpu: float
    floor: float
    usual: float

    @property
    def ratio(self) -> float:
        """The ratio of the stage to its floor."""
        return self.cpu / self.floor

    @property
    def bound(self) -> float:
        """The highest ratio that is accepted."""
        return self.usual * MAX_SLOWDOWN

    @property
    def exceeded(self) -> bool:
        """True if the ratio is above the bound."""
        return self.ratio > self.bound


@dataclass(frozen=True, slots=True)
class StageGroup:
    """Stages that are measured together.

    Attributes:
        unit: The unit of the reported costs.
        count_of: Returns the number of units that one round processes.
        measure: Prepares the measurement in an empty directory.
        measure_doubled: The same for a doubled stage, if that needs another preparation.
        usual: The usual ratio to the floor by stage. Stages without an entry are not checked.
        doubled: The doubled stages of `benchmarks.doubled_stages`.
    """

    unit: str
    count_of: Callable[[GuardSizes], int]
    measure: Callable[[GuardWorkload, Path], AbstractAsyncContextManager[Round]]
    usual: Mapping[str, float]
    doubled: Mapping[tuple[str, ...], Doubling]
    measure_doubled: Callable[[GuardWorkload, Path], AbstractAsyncContextManager[Round]] | None = None


# The floor is the verification of the same commits or exports, and for "client", "apply" and "database" the bare script
# that writes the same rows. "other" of a resync is not checked: it consists of round trips, whose cost varies too much.
GROUPS = {
    "planning": StageGroup(
        "commit",
        lambda sizes: sizes.planned,
        guard_stages.planning,
        {
            "decode": 0.18,
            "split": 0.255,
            "commit": 0.24,
            "signature": 0.85,
            "inversion": 1.8,
            "values": 0.059,
            "plan": 0.49,
            "interleaved": 4.2,
        },
        doubled_stages.PLANNING,
    ),
    "receiving": StageGroup(
        "message",
        lambda sizes: sizes.received,
        guard_stages.receiving,
        {"socket": 0.135},
        doubled_stages.RECEIVING,
        partial(guard_stages.receiving, messages_per_frame=2),
    ),
    "writing": StageGroup(
        "commit",
        lambda sizes: sizes.repos,
        guard_stages.writing,
        {"client": 0.95, "database": 1.4},
        doubled_stages.WRITING,
    ),
    "resyncing": StageGroup(
        "record",
        lambda sizes: sizes.exports * sizes.export_records,
        guard_stages.resyncing,
        {"fetch": 4.7, "verify": 2.25, "diff": 6.7, "apply": 0.45, "database": 1.27},
        doubled_stages.RESYNCING,
    ),
}


async def lowest_costs(measure: Round, usual: Mapping[str, float], max_rounds: int) -> list[StageCost]:
    """Repeat the measurement and return the lowest cost of each stage and of its floor.

    After `MIN_ROUNDS` rounds, stop as soon as no stage exceeds its bound.
    """
    cpu, floor = dict.fromkeys(usual, inf), dict.fromkeys(usual, inf)
    costs: list[StageCost] = []
    for number in range(1, max_rounds + 1):
        round_cpu, round_floor = await measure()
        for stage in usual:
            cpu[stage], floor[stage] = min(cpu[stage], round_cpu[stage]), min(floor[stage], round_floor[stage])
        costs = [StageCost(stage, cpu[stage], floor[stage], usual[stage]) for stage in usual]
        if number >= MIN_ROUNDS and not any(cost.exceeded for cost in costs):
            break
    return costs


async def measure_group(
    group: StageGroup, workload: GuardWorkload, doubling: Doubling | None = None
) -> list[StageCost]:
    """Measure the stages of one group, with the work of some stages doubled if `doubling` is given."""
    measure = group.measure if doubling is None else group.measure_doubled or group.measure
    with (
        tempfile.TemporaryDirectory(prefix="indexer-benchmark-") as directory,
        doubling() if doubling else nullcontext(),
    ):
        async with measure(workload, Path(directory)) as measure_round:
            return await lowest_costs(measure_round, group.usual, workload.sizes.max_rounds)


def undetected(costs: Sequence[StageCost], doubled: Sequence[str]) -> list[str]:
    """Return the doubled stages that do not exceed their bound."""
    exceeded = {cost.stage for cost in costs if cost.exceeded}
    return [stage for stage in doubled if stage not in exceeded]


@click.command()
@click.option("--check", is_flag=True, help="Exit with code 1 if a stage exceeds its bound.")
@click.option(
    "--prove", is_flag=True, help="Double the work of each stage, and exit with code 1 if that goes unnoticed."
)
@click.option("--group", "names", type=click.Choice(list(GROUPS)), multiple=True, help="Measure only this group.")
@click.option(
    "--smoke", is_flag=True, help="Use a tiny workload, to test that everything runs. The figures mean nothing."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(check: bool, prove: bool, names: Sequence[str], smoke: bool, as_json: bool) -> None:
    """Measure the CPU time of each stage and compare it with the floor of the same run."""
    configure_logging(level="warning")
    workload = GuardWorkload.load(SMOKE_SIZES if smoke else GuardSizes())
    gc.collect()
    gc.freeze()  # so that no garbage collection during the rounds scans the workload
    groups = {name: GROUPS[name] for name in names or GROUPS}
    failed = _prove(groups, workload) if prove else _measure(groups, workload, as_json=as_json)
    sys.exit(1 if failed and (check or prove) else 0)


def _measure(groups: Mapping[str, StageGroup], workload: GuardWorkload, *, as_json: bool) -> bool:
    """Measure and print all stages; return True if one exceeds its bound."""
    costs = {name: asyncio.run(measure_group(group, workload)) for name, group in groups.items()}
    if as_json:
        print(orjson.dumps(_as_json(costs, workload.sizes), option=orjson.OPT_INDENT_2).decode())
    else:
        _print_tables(costs, workload.sizes)
    return any(cost.exceeded for group in costs.values() for cost in group)


def _prove(groups: Mapping[str, StageGroup], workload: GuardWorkload) -> bool:
    """Measure each doubled stage and print whether it exceeds its bound; return True if one does not."""
    failed = False
    for name, group in groups.items():
        for stages, doubling in group.doubled.items():
            costs = asyncio.run(measure_group(group, workload, doubling))
            missed = undetected(costs, stages)
            failed = failed or bool(missed)
            for cost in costs:
                if cost.stage in stages:
                    verdict = "NOT DETECTED" if cost.stage in missed else "detected"
                    print(f"{name}: {cost.stage} doubled: ratio {cost.ratio:.3g}, bound {cost.bound:.3g}: {verdict}")
    return failed


def _print_tables(costs: Mapping[str, Sequence[StageCost]], sizes: GuardSizes) -> None:
    console = Console()
    for name, group in costs.items():
        unit, count = GROUPS[name].unit, GROUPS[name].count_of(sizes)
        table = Table(title=f"{name}, CPU time per {unit}", title_justify="left", width=72)
        table.add_column("stage", ratio=1)
        for column in ("stage, µs", "floor, µs", "ratio", "bound", ""):
            table.add_column(column, justify="right")
        for cost in group:
            figures = (cost.cpu / count * MICRO, cost.floor / count * MICRO, cost.ratio, cost.bound)
            verdict = "EXCEEDED" if cost.exceeded else "ok"
            table.add_row(cost.stage, *(f"{figure:.3g}" for figure in figures), verdict)
        console.print(table)


def _as_json(costs: Mapping[str, Sequence[StageCost]], sizes: GuardSizes) -> dict[str, dict[str, dict[str, object]]]:
    return {
        name: {cost.stage: _stage_json(cost, GROUPS[name].unit, GROUPS[name].count_of(sizes)) for cost in group}
        for name, group in costs.items()
    }


def _stage_json(cost: StageCost, unit: str, count: int) -> dict[str, object]:
    return {
        f"CPU, µs per {unit}": cost.cpu / count * MICRO,
        f"floor, µs per {unit}": cost.floor / count * MICRO,
        "ratio": cost.ratio,
        "bound": cost.bound,
        "exceeded": cost.exceeded,
    }


if __name__ == "__main__":
    main()
