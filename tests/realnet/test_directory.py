"""Bluesky's own PLC directory: an import gives each DID the identity in the directory's own document."""

import json
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from indexer.app.clients import make_plc_operations, open_outbound_client
from indexer.atproto.crypto import PrivateKey
from indexer.atproto.did_document import parse_did_document
from indexer.atproto.plc import parse_operation
from indexer.db import Database
from indexer.demo.plc_operations import sign
from indexer.net.identity.did_resolver import identity_of
from indexer.telemetry.conditions import Conditions
from indexer.telemetry.metrics import Metrics
from tests.atproto.test_plc import LEGACY, LEGACY_DID
from tests.daemon_harness import settings_for
from tests.database_checks import fetch
from tests.realnet.real_network import RealAccount, RealPds, real_network

pytestmark = pytest.mark.proof("realnet")

OWNER = PrivateKey.from_seed("k256", b"the recovery key of an owner")
INSERT_LEGACY = """
    insert into operations (did, operation, cid, nullified, "createdAt")
    values ($1, $2, $3, false, now() - interval '3 years')
"""


def create_owned(pds: RealPds, name: str) -> RealAccount:
    """Create an account with a recovery key of its owner."""
    fields = {"handle": f"{name}.test", "email": f"{name}@example.com", "password": "correct-horse"}
    session = pds.procedure("com.atproto.server.createAccount", fields | {"recoveryKey": OWNER.public.did_key()})
    return RealAccount(pds, session["did"], session["handle"], session["accessJwt"])


def recover(http: httpx.Client, account: RealAccount) -> None:
    """Replace the last operation of the account by one that its owner signs."""
    first, *_ = http.get(f"/{account.did}/log").json()
    unsigned = {name: value for name, value in first.items() if name != "sig"} | {"prev": parse_operation(first).cid}
    signed = sign(unsigned | {"alsoKnownAs": ["at://recovered.example"]}, OWNER)
    assert http.post(f"/{account.did}", json=signed).is_success


def documents(http: httpx.Client, dids: Sequence[str]) -> list[tuple[str, httpx.Response]]:
    return [(did, http.get(f"/{did}")) for did in dids]


async def test_import_equals_the_documents_of_the_directory(db: Database, empty_database: str, tmp_path: Path) -> None:
    with real_network(2, tmp_path, empty_database) as network, httpx.Client(base_url=network.plc_url) as http:
        first, second = network.pds
        still, rotated, renamed, moved, ended = [first.create_account(f"person{number}") for number in range(5)]
        recovered = create_owned(first, "owned")
        rotated.rotate_key()
        renamed.set_handle("renamed")
        moved.migrate(second)
        first.control("plcTombstone", did=ended.did)
        recovered.set_handle("stolen")
        recover(http, recovered)
        await fetch(empty_database, INSERT_LEGACY, LEGACY_DID, json.dumps(LEGACY), parse_operation(LEGACY).cid)
        accounts = [still, rotated, renamed, moved, ended, recovered]
        dids = [LEGACY_DID, *(account.did for account in accounts)]
        settings = settings_for("ws://127.0.0.1:1", network.plc_url, tmp_path)
        async with open_outbound_client(settings) as outbound:
            reading = make_plc_operations(settings, db, outbound, Conditions(), Metrics())
            begun = await reading.begin(everything=True)
            progress = await reading.read(begun, reading.export.pages(None))
            again = await reading.read(progress, reading.export.pages(progress.cursor))
        assert (again.cursor, again.found) == (progress.cursor, progress.found)
        assert not reading.conditions.active()
        stored = await db.identities.stored(dids)
        for did, answer in documents(http, dids):
            if did == ended.did:
                assert (answer.status_code, stored[did].gone) == (404, True)
                continue
            document = parse_did_document(answer.json(), did, allow_http=True)
            assert stored[did].fingerprint == identity_of(document, 0.0).fingerprint, did
            assert stored[did].is_exported
        assert stored[moved.did].pds != stored[still.did].pds
        assert (stored[recovered.did].handle, stored[renamed.did].handle) == ("recovered.example", "renamed.test")
