"""`python -m benchmarks.live`: commits from a websocket to committed rows, through the real daemon.

One database, one stream, four parts of it: as fast as it goes; at an offered rate, for the latency; one stage after
the other in this process, for what each costs; and the rows alone, by a bare script. In the end the database must
equal the world.
"""

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median

import click

from benchmarks import floor, stages, stand, tables, usage
from benchmarks.report import MIB, MICRO, Figures, Report, machine, making, show
from benchmarks.stand import Daemon, Database, Load
from benchmarks.watch import Watch, watch
from benchmarks.world import Spec, World, load_world
from indexer.atproto.crypto import parse_did_key
from indexer.log import configure_logging
from indexer.sync.repo import SyncStatus


@dataclass(frozen=True, slots=True)
class Plan:
    """How many commits go which way, at what offered rate a second the paced ones, to how many processes."""

    fast: int
    paced: int
    staged: int
    bare: int
    rate: int
    shards: int
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
@click.option("--idle-repos", default=0, show_default=True, help="More repos in the table, without commits.")
@click.option("--idle-records", default=0, show_default=True, help="More records in the table.")
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
        await tables.add_idle(database.dsn, plan.idle_repos, plan.idle_records)
        await tables.settle(database.dsn)
        report = await _through_daemons(world, plan, database, load, directory)

        received = await stages.receive(load, staged)
        spent = await stages.apply(database.dsn, list(world.frames(staged)), keys, load.url)
        report["one after the other"] = _per_commit({"socket": received} | spent, len(staged))

        messages = [floor.take_apart(frame, keys) for frame in world.frames(bare)]
        proof = floor.prove([message.proof for message in messages])
        used = usage.cpu_seconds([database.pid])
        passed, script = await floor.write(database.dsn, messages)
        used = usage.cpu_seconds([database.pid]) - used
        report["floor"] = _floor(report["as fast as it goes"], len(bare), proof, passed, script + used)

        changes = sum((Counter(account.changes) for account in world.accounts), Counter[str]())
        wrong = await tables.differences(database.dsn, world, changes - floor.changes(messages))
    return report | {"machine": machine()}, wrong


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
        watching = await stack.enter_async_context(watch(database.dsn, world, daemons))
        parts = {"daemon": [daemon.process.pid for daemon in daemons], "Postgres": [database.pid]}
        parts["load"] = [load.process.pid]
        before = {name: usage.cpu_seconds(pids) for name, pids in parts.items()}
        await load.tell(fast[0], fast[-1], 0)
        await watching.until(fast)
        used = {name: usage.cpu_seconds(pids) - before[name] for name, pids in parts.items()}
        speed = _speed(watching, fast, used)
        metrics = await stand.sum_metrics(daemons)

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
        "the daemon's own clocks": _clocks(metrics, len(fast)),
        f"offered {plan.rate} commits/s": _latency(watching, paced, began, plan.rate),
    }


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
        **{f"CPU of the {name}, µs per commit": seconds / len(seqs) * MICRO for name, seconds in used.items()},
    }


def _clocks(metrics: Mapping[str, float], commits: int) -> Figures:
    """What passed in each stage, waiting for a core or the database included; the stages of a batch don't overlap."""
    return {
        f"{stage}, µs per commit": metrics[f"indexer_batch_seconds_sum {stage}"] / commits * MICRO
        for stage in ("load", "plan", "apply")
    }


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


def _per_commit(seconds: Mapping[str, float], commits: int) -> Figures:
    figures = {name: value / commits * MICRO for name, value in seconds.items()}
    return {f"{name}, µs per commit": value for name, value in (figures | {"all": sum(figures.values())}).items()}


def _floor(speed: Figures, commits: int, proof: float, passed: float, used: float) -> Figures:
    """`proof` is the time of one core for the proofs, `passed` and `used` the clock's and all cores' for the rows."""
    rate = float(speed["commits/s, verified and durable"])
    ours = sum(float(speed[f"CPU of the {name}, µs per commit"]) for name in ("daemon", "Postgres"))
    return {
        "proof alone, one core, µs per commit": proof / commits * MICRO,
        "rows alone, by the clock, µs per commit": passed / commits * MICRO,
        "rows alone, CPU of script and Postgres, µs per commit": used / commits * MICRO,
        "our rate to the proof's on one core": rate * proof / commits,
        "our rate to the bare script's": rate * passed / commits,
        "CPU of the floor to ours, Postgres included": (proof + used) / commits * MICRO / ours,
    }


if __name__ == "__main__":
    main()
