"""`python -m benchmarks.live`: commits from a websocket to committed rows, through the real daemon.

One database, one stream, four parts of it: as fast as it goes; at an offered rate, for the latency; one stage after
the other in this process, for what each costs; and the rows alone, by a bare script. With `--known`, the daemon is
made to hold the identities of so many more repos first. In the end the database must equal the world.
"""

import asyncio
import gc
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from time import monotonic

import click

from benchmarks import floor, stages, stand, tables, usage
from benchmarks.floor import Message
from benchmarks.report import MIB, MICRO, Figures, Report, costs, cpu_of, machine, making, show
from benchmarks.stand import PATIENCE, BenchmarkError, Daemon, Database, Load
from benchmarks.watch import Watch, watch
from benchmarks.world import Spec, World, load_world
from indexer.atproto.crypto import parse_did_key
from indexer.log import configure_logging
from indexer.sync.repo import SyncStatus

_IDENTITIES = "indexer_identity_cache_total database"  # brought into memory, where 200,000 stay


@dataclass(frozen=True, slots=True)
class Plan:
    """How many commits go which way, at what offered rate a second the paced ones, to how many processes."""

    fast: int
    paced: int
    staged: int
    bare: int
    rate: int
    shards: int
    known: int
    idle_repos: int
    idle_records: int

    def parts(self) -> list[range]:
        ends = accumulate((0, self.fast, self.paced, self.staged, self.bare))
        return [range(start + 1, end + 1) for start, end in pairwise(ends)]


@click.command()
@click.option("--repos", default=1_000, show_default=True, help="Repos that commit.")
@click.option("--records", default=1_200, show_default=True, help="Records of each, on average.")
@click.option("--fast", default=30_000, show_default=True, help="Commits sent as fast as they are taken.")
@click.option("--paced", default=10_000, show_default=True, help="Commits sent at --rate.")
@click.option("--rate", default=1_000, show_default=True, help="Commits offered a second, for the latency.")
@click.option("--staged", default=5_000, show_default=True, help="Commits applied stage by stage, without a daemon.")
@click.option("--bare", default=10_000, show_default=True, help="Commits whose rows a bare script writes.")
@click.option("--shards", default=1, show_default=True, help="Processes that share the stream.")
@click.option(
    "--known", default=0, show_default=True, help="Idle repos that the daemon meets first, at most a million."
)
@tables.idle_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(repos: int, records: int, as_json: bool, **plan: int) -> None:
    """Commits a second from a websocket to committed rows; exit code 1 if the database isn't the world's in the end."""
    chosen = Plan(**plan)
    commits = chosen.fast + chosen.paced + chosen.staged + chosen.bare
    world = load_world(Spec(repos, records, sigma=0.4, commits=commits), making)
    configure_logging(level="warning")
    with tempfile.TemporaryDirectory(prefix="indexer-benchmark-") as directory:
        report, wrong = asyncio.run(measure(world, chosen, Path(directory)))
    show(report, as_json=as_json)
    for difference in wrong:
        click.echo(f"DIFFERENT: {difference}", err=True)
    sys.exit(1 if wrong else 0)


async def measure(world: World, plan: Plan, directory: Path) -> tuple[Report, list[str]]:
    """The figures, and what the database has otherwise than the world."""
    _, _, staged, bare = plan.parts()
    keys = {account.did: parse_did_key(account.key) for account in world.accounts}
    async with stand.database(directory) as database, stand.load("relay", world) as load:
        await tables.fill(database.dsn, world, lambda _: load.url, status=SyncStatus.SYNCHRONIZED)
        await tables.add_idle(database.dsn, world, max(plan.idle_repos, plan.known), plan.idle_records)
        await tables.add_identities(database.dsn, plan.known)
        await tables.settle(database.dsn)
        report = await _through_daemons(world, plan, database, load, directory)

        received = await _receive(load, staged)
        spent = await stages.apply(database.dsn, list(world.frames(staged)), keys, load.url)
        report["one after the other"] = costs("commit", {"socket": received} | spent, len(staged))

        verifiers = {did: floor.verifier(key) for did, key in keys.items()}
        messages = [floor.take_apart(frame, verifiers) for frame in world.frames(bare)]
        report["floor"] = await _floor(report["as fast as it goes"], database, messages)

        changes = sum((Counter(account.changes) for account in world.accounts), Counter[str]())
        wrong = await tables.differences(database.dsn, world, changes - floor.changes(messages))
    return report | {"machine": machine()}, wrong


async def _receive(load: Load, seqs: range) -> float:
    receiving = asyncio.create_task(stages.receive(load.url, len(seqs)))
    await load.subscribed(1)
    await load.tell(seqs[0], seqs[-1], 0)
    return await receiving


async def _through_daemons(world: World, plan: Plan, database: Database, load: Load, directory: Path) -> Report:
    fast, paced, *_ = plan.parts()
    async with AsyncExitStack() as stack:
        daemons = [
            await stack.enter_async_context(_daemon(database, load, directory, f"{index}/{plan.shards}"))
            for index in range(plan.shards)
        ]
        await load.subscribed(plan.shards)
        for daemon in daemons:
            await daemon.counted()
        await _meet(load, daemons, plan.known)
        watching = await stack.enter_async_context(watch(database.dsn, world, daemons))
        parts = {"daemon": [daemon.process.pid for daemon in daemons], "Postgres": [database.pid]}
        parts["load"] = [load.process.pid]
        before = {name: usage.cpu_seconds(pids) for name, pids in parts.items()}
        begun = await stand.sum_metrics(daemons)
        await load.tell(fast[0], fast[-1], 0)
        await watching.until(fast)
        used = {name: usage.cpu_seconds(pids) - before[name] for name, pids in parts.items()}
        speed = _speed(watching, fast, used)
        metrics = await stand.sum_metrics(daemons)
        speed["identities in the daemons' memory"] = metrics[_IDENTITIES]
        metrics.subtract(begun)

        await load.told("began")
        await load.tell(paced[0], paced[-1], plan.rate)
        began = await load.told("began")
        await watching.until(paced)
        speed["peak RSS of the daemon, MiB"] = max(map(usage.peak_rss, parts["daemon"])) / MIB
        for daemon in daemons:
            await daemon.stop()
        await load.subscribed(0)
    return {
        "as fast as it goes": speed,
        "the daemon's own clocks": costs("commit", _clocks(metrics), len(fast)),
        f"offered {plan.rate} commits/s": _latency(watching, paced, began, plan.rate),
    }


async def _meet(load: Load, daemons: Sequence[Daemon], count: int) -> None:
    """Has the daemons look up the keys of so many idle repos, and so keep them."""
    if not count:
        return
    await load.tell(count)
    await load.told("began")
    began, found = monotonic(), 0.0
    while (now := (await stand.sum_metrics(daemons))[_IDENTITIES]) < count:
        began, found = (monotonic() if now > found else began), now
        if monotonic() - began > PATIENCE:
            raise BenchmarkError(f"of {count} identities only {found:.0f} are in the daemon's memory")
        await asyncio.sleep(0.1)


def _daemon(database: Database, load: Load, directory: Path, shard: str) -> AbstractAsyncContextManager[Daemon]:
    place = directory / f"daemon {shard.replace('/', ' of ')}"
    return stand.daemon(database.dsn, place, relays=load.url, start="oldest", roles="live", shard=shard)


def _speed(watching: Watch, seqs: range, used: Mapping[str, float]) -> Figures:
    """From the first batch that was seen, which is not counted, to the last one."""
    batches = Counter(watching.seen[seq] for seq in seqs)
    first, last = min(batches), max(batches)
    rate = (len(seqs) - batches[first]) / (last - first) if last > first else 0.0
    return {
        "commits/s, verified and durable": rate,
        "commits a batch, median": median(batches.values()),
        "commits a batch, most": max(batches.values()),
        **{cpu_of(name, "commit"): seconds / len(seqs) * MICRO for name, seconds in used.items()},
    }


def _clocks(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds in each stage, waiting for a core or the database included; the stages of a batch don't overlap."""
    return {stage: metrics[f"indexer_batch_seconds_sum {stage}"] for stage in ("load", "plan", "apply")}


def _latency(watching: Watch, seqs: range, began: float, rate: int) -> Figures:
    """From when a message was due to be sent to when its rows could be read."""
    waits = sorted((watching.seen[seq] - began - place / rate) * 1_000 for place, seq in enumerate(seqs, 1))
    batches = Counter(watching.seen[seq] for seq in seqs)
    return {
        "p50, ms": waits[len(waits) // 2],
        "p99, ms": waits[len(waits) * 99 // 100],
        "most, ms": waits[-1],
        "commits a batch, median": median(batches.values()),
    }


async def _floor(speed: Figures, database: Database, messages: Sequence[Message]) -> Figures:
    batches = [floor.statements(messages[at : at + floor.BATCH]) for at in range(0, len(messages), floor.BATCH)]
    gc.freeze()
    proof = floor.prove([message.proof for message in messages])
    async with floor.script(database.dsn, lambda: usage.cpu_seconds([database.pid])) as script:
        for batch in batches:
            await script.write(batch)
    rate = float(speed["commits/s, verified and durable"])
    return floor.compared("commit", speed, rate, proof / len(messages), script.clock, len(messages))


if __name__ == "__main__":
    main()
