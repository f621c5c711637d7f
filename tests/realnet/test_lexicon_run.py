"""`indexer run --lexicon` alone leads from records on Bluesky's own PDS to typed rows."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest

from indexer.net.lexicons import COLLECTION
from tests.cli.test_run_lexicon import running
from tests.daemon_harness import run_daemon, settings_for
from tests.daemon_process import log_tail
from tests.database_checks import fetch
from tests.database_server import DatabaseServer
from tests.lexicons.samples import DEFS_DOCUMENT, REVIEW, REVIEW_DOCUMENT
from tests.net.identity.name_server import NameServer
from tests.realnet.real_network import RealAccount, RealNetwork, real_network
from tests.realnet.test_network import stream_url
from tests.waiting import until

pytestmark = pytest.mark.proof("realnet")

CREATED = "2026-01-01T00:00:00.000Z"
TABLE = f'lexicon."{REVIEW}"'
Row = tuple[str, str, int, datetime]


class Addresses(NamedTuple):
    relay_url: str
    plc_url: str


@asynccontextmanager
async def jetstream(network: RealNetwork, dsn: str, directory: Path) -> AsyncIterator[str]:
    """Serve a Jetstream that follows the first PDS: that of another indexer. Yield its URL."""
    options = {"upstream": "pds", "roles": "live,resync,feed", "http_bind": "127.0.0.1:0", "start": "live"}
    settings = settings_for(stream_url(network.pds[0]), network.plc_url, directory / "jetstream", **options)
    async with run_daemon(settings, dsn) as indexer, indexer.serve_http() as address:
        yield f"ws://{address}"


def review(title: str, stars: int) -> dict[str, object]:
    return {"title": title, "stars": stars, "createdAt": CREATED}


def row(account: RealAccount, title: str, stars: int) -> Row:
    return account.did, title, stars, datetime.fromisoformat(CREATED).astimezone(UTC)


async def wait_for_rows(dsn: str, directory: Path, *expected: Row) -> None:
    found: object = None

    async def equal() -> bool:
        nonlocal found
        if (await fetch(dsn, "select to_regclass($1) is not null", TABLE))[0][0]:
            query = f"select did, title, stars, created_at from {TABLE}"  # noqa: S608
            found = sorted(tuple(row) for row in await fetch(dsn, query))
        return found == sorted(expected)

    await until(equal, lambda: (found, log_tail(directory)))


@pytest.mark.parametrize("upstream", [None, "relay", "pds"])
async def test_one_lexicon_leads_to_typed_rows_of_a_real_pds(
    empty_database: str, postgres: DatabaseServer, tmp_path: Path, upstream: str | None
) -> None:
    """Without a setting for the upstream, from a Jetstream. The PDS stands for the relay, and lists like one.

    As the upstream, it does not offer the list by collection.
    """
    of_jetstream = postgres.create(migrated=True)
    with real_network(1, tmp_path) as network:
        pds = network.pds[0]
        publisher, ada, grace, linus = [pds.create_account(name) for name in ("publisher", "ada", "grace", "linus")]
        for document in (REVIEW_DOCUMENT, DEFS_DOCUMENT):
            publisher.put(COLLECTION, document["id"], {"$type": COLLECTION} | document)
        ada.put(REVIEW, "one", review("old", 5))
        linus.create("com.example.other", {"n": 1})
        if upstream != "pds":
            listed = json.dumps({"repos": [{"did": ada.did}]})
            pds.control("fault", rules=[{"path": "listReposByCollection", "status": 200, "body": listed}])
        async with jetstream(network, of_jetstream, tmp_path) as jetstream_url, NameServer() as dns:
            dns.texts["_lexicon.example.com"] = [f'"did={publisher.did}"']
            settings = {"INDEXER_JETSTREAMS": jetstream_url, "INDEXER_DNS_SERVERS": "{}:{}".format(*dns.address)}
            if upstream:
                settings["INDEXER_UPSTREAM"] = upstream
            addresses = Addresses(stream_url(pds), network.plc_url)
            async with running(addresses, empty_database, tmp_path, "--lexicon", REVIEW, **settings):
                await wait_for_rows(empty_database, tmp_path, row(ada, "old", 5))
                await asyncio.to_thread(ada.put, REVIEW, "one", review("changed", 4))
                await asyncio.to_thread(grace.put, REVIEW, "one", review("new", 3))
                await wait_for_rows(empty_database, tmp_path, row(ada, "changed", 4), row(grace, "new", 3))
                await asyncio.to_thread(ada.delete, REVIEW, "one")
                await wait_for_rows(empty_database, tmp_path, row(grace, "new", 3))
        stored = await fetch(empty_database, "select distinct collection from atproto.records")
        assert [tuple(row) for row in stored] == [(REVIEW,)]
    postgres.drop(of_jetstream)
