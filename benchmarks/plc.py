"""`python -m benchmarks.plc`: verify audit logs of did:plc from JSON, in one process, and in one for each core.

Then import the same operations from a file into an embedded Postgres, as with `--all`.

The logs are like those of the network: one to five operations with the rotation keys that all accounts of a host share,
signed by the last one. In one log of ten, a P-256 key of the account comes first.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

import click
import orjson

from benchmarks.report import MICRO, Figures, Report, cpu_of, machine, show
from indexer import embedded
from indexer.app.clients import make_plc_operations, open_outbound_client
from indexer.app.process_setup import available_cores
from indexer.app.settings import Settings
from indexer.atproto.cid import cid_of, cid_text
from indexer.atproto.crypto import PrivateKey
from indexer.atproto.plc import did_of, verify_log
from indexer.db import Database
from indexer.db.migrate import migrate
from indexer.demo import dag_cbor
from indexer.demo.plc_operations import sign, update
from indexer.net.identity.plc_export import operations_in_file
from indexer.telemetry.conditions import Conditions
from indexer.telemetry.metrics import Metrics

MAX_OPERATIONS = 5
OWN_KEY_EVERY = 10
HOST_KEYS = [PrivateKey.from_seed("k256", seed) for seed in (b"recovery", b"host")]
PDS = "https://puffball.us-east.host.bsky.network"
START = datetime(2025, 1, 1, tzinfo=UTC)
SIZES = """
    select pg_total_relation_size('indexer.identity')::float / count(*), avg(pg_column_size(chain))::float
    from indexer.identity
"""

Logs = Sequence[tuple[str, bytes]]
"""DIDs with their logs in JSON."""


@click.command()
@click.option("--logs", default=10_000, show_default=True, help="Number of logs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(logs: int, as_json: bool) -> None:
    """Verify audit logs of did:plc."""
    made = [make_log(number) for number in range(logs)]
    operations = sum(1 + number % MAX_OPERATIONS for number in range(logs))
    report: Report = {"machine": machine(), "one process": figures(measure([made]), operations, made)}
    cores = available_cores()
    parts = [made[number::cores] for number in range(cores)]
    report[f"{cores} processes"] = figures(measure(parts), operations, made)
    report["import into Postgres"] = asyncio.run(measure_import(made))
    show(report, as_json=as_json)


def make_log(number: int) -> tuple[str, bytes]:
    """Return the DID and the log of account `number`."""
    keys = list(HOST_KEYS)
    if number % OWN_KEY_EVERY == 0:
        keys.insert(0, PrivateKey.from_seed("p256", str(number).encode()))
    rotation_keys = [key.public.did_key() for key in keys]
    signing_key = PrivateKey.from_seed("k256", str(number).encode()).public.did_key()
    did, prev, entries = "", None, []
    for place in range(1 + number % MAX_OPERATIONS):
        handle = f"account{number}-{place}.bsky.social"
        operation = sign(update(rotation_keys, prev, handle=handle, signing_key=signing_key, pds=PDS), keys[-1])
        block = dag_cbor.encode(operation)
        did, prev = did or did_of(block), cid_text(cid_of(block))
        entry = {"did": did, "operation": operation, "cid": prev, "nullified": False}
        entries.append(entry | {"createdAt": (START + timedelta(days=30 * place)).isoformat()})
    return did, orjson.dumps(entries)


def measure(parts: Sequence[Logs]) -> float:
    """Verify each part in a process of its own; return the seconds from the first to the last log."""
    with ProcessPoolExecutor(len(parts)) as processes:
        list(processes.map(verify, [part[:1] for part in parts]))  # start the processes
        begin = perf_counter()
        list(processes.map(verify, parts))
        return perf_counter() - begin


def verify(logs: Logs) -> None:
    """Verify logs."""
    for did, log in logs:
        verify_log(did, orjson.loads(log), allow_http=False)


async def measure_import(logs: Logs) -> Figures:
    """Import the operations in the order of their times, and measure the table, compacted."""
    entries = sorted((entry for _, log in logs for entry in orjson.loads(log)), key=itemgetter("createdAt"))
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory()))
        file = directory / "export"
        lines = [orjson.dumps(entry | {"seq": seq}) for seq, entry in enumerate(entries, 1)]
        file.write_bytes(b"\n".join(lines))
        dsn = await stack.enter_async_context(embedded.database(None, directory))
        await migrate(dsn)
        db = await Database.open(dsn)
        stack.push_async_callback(db.close)
        outbound = await stack.enter_async_context(open_outbound_client(settings := Settings(data_dir=directory)))
        reading = make_plc_operations(settings, db, outbound, Conditions(), Metrics())
        begun, began, cpu = await reading.begin(everything=True), perf_counter(), process_time()
        ended = await reading.read(begun, operations_in_file(file, None))
        seconds, cpu = perf_counter() - began, process_time() - cpu
        connection = await stack.enter_async_context(db.maintenance_connection())
        await connection.execute("vacuum full indexer.identity")
        [(row, chain)] = await connection.fetch(SIZES)
    return {
        "operations/s": ended.found / seconds,
        cpu_of("importing", "operation"): cpu * MICRO / ended.found,
        "bytes of a row and its indexes": row,
        "of these, bytes of the packed chain": chain,
    }


def figures(seconds: float, operations: int, logs: Logs) -> Figures:
    """Return the figures of a run."""
    return {
        "operations/s": operations / seconds,
        "logs/s": len(logs) / seconds,
        "µs per operation": seconds * MICRO / operations,
        "mean bytes of JSON per log": sum(len(log) for _, log in logs) / len(logs),
    }


if __name__ == "__main__":
    main()
