"""An indexer whose only stream is the Jetstream of another one, which follows Bluesky's own PDS."""

import asyncio
import json
import signal
from asyncio.subprocess import Process
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from time import time
from typing import NamedTuple

import httpx
import pytest

from indexer.sync.hints import Hint, decode_hint
from tests.background import running
from tests.daemon_harness import run_daemon, settings_for
from tests.daemon_process import daemon_process, log_tail
from tests.database_checks import assert_change_log_consistent, fetch
from tests.database_server import DatabaseServer
from tests.passed_time import EXPIRE_LEASES, expire_waits
from tests.realnet.compare_with_pdses import records_of, wait_until_equal
from tests.realnet.real_network import RealPds, Records, real_network
from tests.realnet.test_network import stream_url
from tests.realnet.test_random_scenario import wait_until_hidden
from tests.realnet.test_sparse import COLLECTIONS, RandomWriter
from tests.relay_proxy import RelayProxy, content_of
from tests.waiting import until

WANTED = COLLECTIONS[3]
RECORDS = "select did, rkey, cid, value from atproto.records where collection = $1 order by did, rkey"
COMPLETE = "select bool_and(coalesce(complete_at > to_timestamp($1), false)) from atproto.repos where visible"


class Addresses(NamedTuple):
    relay_url: str
    plc_url: str


class OmittingProxy(RelayProxy):
    """Stands before a Jetstream, and omits events: again and again if they are sent again.

    Attributes:
        silenced: The DIDs of which it omits all events, and each second event of others; None: it omits nothing.
        omits: Whether it omits each of the events so far.
    """

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.silenced: set[str] | None = None
        self.omits: dict[Hint, bool] = {}

    def passes(self, kind: str, message: bytes) -> bool:
        hint = decode_hint(content_of(message)) if kind == "server message" else None
        if hint is None:
            return True
        is_due = self.silenced is not None and (hint.did in self.silenced or len(self.omits) % 2 == 0)
        return not self.omits.setdefault(hint, is_due)

    async def wait_for_more(self, directory: Path) -> None:
        """Wait until it has omitted some more events."""
        wanted = sum(self.omits.values()) + 20
        await until(lambda: sum(self.omits.values()) > wanted, lambda: log_tail(directory))


@pytest.mark.proof("realnet")
async def test_indexer_behind_the_jetstream_of_another_one_has_its_records(
    database: str, postgres: DatabaseServer, tmp_path: Path
) -> None:
    """It is killed while accounts write. Only the comparison with the PDS tells what silenced accounts have done."""
    full = postgres.create(migrated=True)
    with real_network(1, tmp_path) as network:
        pds = network.pds[0]
        addresses = Addresses(stream_url(pds), network.plc_url)
        options = {"upstream": "pds", "resync_source": "pds", "roles": "live,resync,feed", "http_bind": "127.0.0.1:0"}
        async with (
            run_daemon(settings_for(*addresses, tmp_path, **options), full) as first,
            first.serve_http() as feed,
            (proxy := OmittingProxy(feed.port)).serve(),
            running(expire_waits(database)),
            asyncio.TaskGroup() as group,
        ):
            second = partial(
                daemon_process, addresses, database, tmp_path, "tests.realnet.hurried_daemon",
                upstream="jetstream", jetstreams=proxy.relay_url, collections=WANTED, sparse_resync="always",
                sweep_interval="60", start="live",
            )  # fmt: skip
            async with second() as daemon:
                await until(lambda: first.jetstream_reader.subscribers > 0, lambda: log_tail(tmp_path))
                writers = [await create_writer(pds, f"account{number}") for number in range(5)]
                _, _, silent, paused, deleted = [writer.account for writer in writers]
                await wait_until_equal(database, await wanted_records(writers))
                proxy.silenced, stop = {silent.did, paused.did, deleted.did}, asyncio.Event()
                writing = group.create_task(write(writers[:3], stop))
                await proxy.wait_for_more(tmp_path)
                await kill(daemon, database)
            await asyncio.to_thread(paused.deactivate)
            await asyncio.to_thread(deleted.delete_account)
            async with second() as daemon:
                writers[3:] = [await create_writer(pds, "later")]
                await proxy.wait_for_more(tmp_path)
                await kill(daemon, database)
            async with second():
                await proxy.wait_for_more(tmp_path)
                stop.set()
                await writing
                ended = time()
                await wait_until_equal(database, await wanted_records(writers))
                await wait_until_hidden(database, {paused.did: "deactivated", deleted.did: "deleted"})
                await until(lambda: is_current(database, tmp_path, ended), lambda: log_tail(tmp_path))
            assert await fetch(database, RECORDS, WANTED) == await fetch(full, RECORDS, WANTED)
    await assert_change_log_consistent(database)
    proofs = {proof for (proof,) in await fetch(database, "select distinct proof from atproto.records")}
    assert {"range"} <= proofs <= {"range", "export"}
    postgres.drop(full)


async def create_writer(pds: RealPds, name: str) -> RandomWriter:
    """Create an account with records."""
    writer = RandomWriter(await asyncio.to_thread(pds.create_account, name), seed=ord(name[-1]))
    await asyncio.to_thread(writer.write, 60)
    return writer


async def write(writers: Iterable[RandomWriter], stop: asyncio.Event) -> None:
    """Let accounts write until told to stop."""
    while not stop.is_set():
        await asyncio.gather(*[asyncio.to_thread(writer.write, 3) for writer in writers])


async def wanted_records(writers: Iterable[RandomWriter]) -> dict[str, Records]:
    listed = await records_of(*[writer.account for writer in writers])
    return {did: {p: one for p, one in all_.items() if p.startswith(f"{WANTED}/")} for did, all_ in listed.items()}


async def kill(daemon: Process, dsn: str) -> None:
    daemon.kill()
    assert await daemon.wait() == -signal.SIGKILL
    await fetch(dsn, EXPIRE_LEASES)


async def is_current(dsn: str, directory: Path, since: float) -> bool:
    """Return True if the daemon that was started last is ready, and all repos are complete until after `since`."""
    started = [line for line in (directory / "daemon.log").read_text().splitlines() if '"daemon.started"' in line]
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"{json.loads(started[-1])['health']}/readyz")
    return answer.json() == {"status": "ok"} and bool((await fetch(dsn, COMPLETE, since))[0][0])
