"""A relay that breaks, repeats itself, talks nonsense, or has forgotten."""

from collections import Counter
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from indexer.localnet import dag_cbor
from indexer.localnet.load import Scenario
from indexer.localnet.network import LocalNetwork
from indexer.localnet.relay import message_frame
from indexer.localnet.repo import Write
from indexer.service import sweep
from tests.daemon.stage import POST, Stage, commit_payload, post, staged
from tests.serving import until
from tests.test_crash import assert_nothing_doubled

NONSENSE = [
    b"",
    b"\xff\x00 nonsense",
    b"\xa0" * 3,
    b"\x9f" * 10_000,
    b"\x81" * 100_000,
    dag_cbor.encode({"op": 1, "t": "#commit"}),
    dag_cbor.encode({"op": 1, "t": "#commit"}) + dag_cbor.encode([]),
    dag_cbor.encode({"op": "1", "t": "#commit"}) + dag_cbor.encode({}),
    dag_cbor.encode({"op": 1}) + dag_cbor.encode({}),
]
FIELDS = [
    message_frame("#commit", {}),
    message_frame("#account", {"seq": -1, "did": "did:plc:x", "active": True}),
    message_frame("#identity", {"seq": "1", "did": "did:web:example.com"}),
    message_frame("#sync", {"seq": 2**64 - 1, "did": "did:web:example.com", "rev": "3", "blocks": b""}),
]


async def test_nonsense_is_put_aside_and_the_stream_goes_on(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path) as stage:
        account = stage.account("ada.test")
        await stage.equal()
        for frame in NONSENSE + FIELDS:
            stage.network.relay.inject(frame)
        account.create(POST, post("behind the nonsense"))
        await stage.equal()
        expected = {"frame-malformed": len(NONSENSE), "field-invalid": len(FIELDS)}
        assert Counter(reason for _, reason in await stage.rejected()) == expected
        for reason, count in expected.items():
            assert stage.metric("rejected", reason=reason) == count
        frames = [row["frame"] for row in await stage.execute("select frame from indexer.dead_letter order by id")]
        assert frames == NONSENSE + FIELDS
        assert stage.total("events_received") == stage.total("events")
        assert stage.running.ready() is None
        assert stage.exports == 0


async def test_messages_of_other_kinds_are_ignored(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path) as stage:
        account = stage.account("ada.test")
        stage.inject("#later", {"did": account.did})
        stage.network.relay.inject(dag_cbor.encode({"op": 7}) + dag_cbor.encode({}))
        stage.network.relay.inject(message_frame("#info", {"name": "Hello", "message": "all is well"}))
        account.create(POST, post("behind them"))
        await stage.equal()
        assert stage.metric("events", kind="unknown", outcome="ignored") == 2
        assert stage.metric("events", kind="info", outcome="ignored") == 1
        assert await stage.rejected() == []
        assert stage.running.reader.gaps == 0


async def test_true_commits_that_were_damaged_on_the_way(database: str, tmp_path: Path) -> None:
    """Each is refused for its own reason and changes nothing, and the true one still fits."""
    async with staged(database, tmp_path) as stage:
        account, network = stage.account("ada.test"), stage.network
        await stage.equal()
        write = Write.create(f"{POST}/damaged", post("damaged"))
        change = copy(account.repo).write([write], account.key, network.clock.tid())
        now = network.clock.now()
        flipped = change.blocks[:-1] + bytes([change.blocks[-1] ^ 1])
        damages: dict[str, dict[str, Any]] = {
            "block-hash-mismatch": {"blocks": flipped},
            "car-malformed": {"blocks": change.blocks[:-1]},
            "commit-mismatch": {"commit": account.repo.head.cid},
            "field-invalid": {"rev": "never"},
            "future-rev": {"rev": "3zzzzzzzzzzzz"},
            "too-many-ops": {"ops": change.ops * 201},
            "blocks-too-large": {"blocks": bytes(2_000_001)},
        }
        for changes in damages.values():
            stage.inject("#commit", commit_payload(account.did, change, now, **changes))
        account.create(POST, post("the true one"))
        await stage.equal()
        assert [reason for _, reason in await stage.rejected()] == list(damages)
        assert {did for did, _ in await stage.rejected()} == {account.did}
        assert stage.exports == 0


async def test_a_commit_whose_operations_do_not_explain_its_tree(database: str, tmp_path: Path) -> None:
    """It is authentic, so it can't just be dropped: the repo has moved on, and is fetched."""
    async with staged(database, tmp_path) as stage:
        account, network = stage.account("ada.test"), stage.network
        await stage.equal()
        write = Write.create(f"{POST}/unexplained", post("unexplained"))
        change = account.apply_writes([write], lost=True)
        stage.inject("#commit", commit_payload(account.did, change, network.clock.now(), ops=[]))
        account.create(POST, post("behind it"))
        await stage.equal()
        assert stage.metric("desynchronized", reason="inversion") >= 1
        await stage.counted(0, "resync", result="synchronized")
        assert stage.metric("resync", result="synchronized") == 1
        assert stage.exports == 1


@pytest.mark.slow
async def test_the_connection_breaks_again_and_again(database: str, tmp_path: Path) -> None:
    cuts = 3
    async with staged(database, tmp_path) as stage:
        scenario, total = Scenario(stage.network, seed=5), 50 * cuts
        for step in range(total):
            scenario.perform(step, total)
            if step % 50 == 25:
                await until(lambda: stage.network.relay.subscribers == 1)
                assert stage.network.relay.cut() == 1
                await until(lambda: stage.network.relay.subscribers == 0)
        await stage.equal()
        assert stage.network.relay.subscribers == 1
        assert stage.total("events_received") == stage.total("events") >= len(stage.network.relay.log)
        await assert_nothing_doubled(database)


async def test_events_that_are_sent_again(database: str, tmp_path: Path) -> None:
    """The last one again is what relays do; older ones are a relay that lost its place, and say so."""
    async with staged(database, tmp_path) as stage:
        account = stage.account("ada.test")
        await stage.equal()
        before = await stage.stored(account)
        stage.network.relay.repeat(1)
        await stage.counted(0, "events", kind="commit", outcome="replayed")
        assert stage.running.ready() is None
        stage.network.relay.repeat(4)  # the last one twice by now
        await stage.counted(1, "rejected", reason="seq-not-increasing")
        assert "behind ours" in (stage.running.ready() or "")
        assert await stage.stored(account) == before
        account.create(POST, post("on it goes"))
        await stage.equal()
        assert stage.running.ready() is None
        assert stage.metric("rejected", reason="seq-not-increasing") == 2
        assert stage.metric("events", kind="commit", outcome="replayed") >= 1
        assert stage.exports == 0
        await assert_nothing_doubled(database)


async def test_the_same_commit_under_another_number(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path) as stage:
        account, network = stage.account("ada.test"), stage.network
        change = account.apply_writes([Write.create(f"{POST}/once", post("once"))])
        for _ in range(3):
            stage.inject("#commit", commit_payload(account.did, change, network.clock.now()))
        account.create(POST, post("twice"))
        await stage.equal()
        assert stage.metric("events", kind="commit", outcome="replayed") == 3
        await assert_nothing_doubled(database)


@pytest.mark.slow
async def test_the_cursor_is_older_than_the_relay_remembers(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gap is reported, and a sweep finds who has written in it and not since."""
    monkeypatch.setattr(sweep, "Pause", partial(sweep.Pause, settle=0.5))
    async with LocalNetwork() as network:
        async with staged(database, tmp_path, network) as stage:
            loud, quiet = stage.account("ada.test"), stage.account("bob.test")
            await stage.equal()
            assert stage.running.reader.gaps == 0
        network.relay.window = 3
        for account in (quiet, loud):
            account.create(POST, post("in the gap"))
        for _ in range(4):
            loud.create(POST, post("in the window"))
        async with staged(database, tmp_path, network) as stage:
            await until(lambda: stage.running.reader.gaps == 1)
            assert stage.metric("events", kind="info", outcome="ignored") == 1
            await stage.read()
            await until(lambda: loud_is_whole(stage, loud.did, len(loud.records)))
            await stage.equal()
            assert stage.metric("desynchronized", reason="behind") >= 1
            assert stage.running.sweep.listing is not None
            assert stage.running.sweep.listing.found >= 1
            assert stage.running.ready() is None


async def loud_is_whole(stage: Stage, did: str, records: int) -> bool:
    return len(await stage.running.store.visible_records(did)) == records


@pytest.mark.slow
async def test_the_cursor_is_ahead_of_the_relay(database: str, tmp_path: Path) -> None:
    """It is said and never reset; when the relay has come up to it, all goes on by itself."""
    async with staged(database, tmp_path, start="2") as stage:
        await until(lambda: "FutureCursor" in (stage.running.ready() or ""))
        assert await stage.running.store.cursor(stage.network.relay_url, "0/1") is None
        assert stage.metric("events", kind="error", outcome="ignored") >= 1
        stage.account("ada.test")
        await stage.equal()
        assert stage.running.ready() is None


@pytest.mark.slow
async def test_messages_over_the_limit_are_stepped_over(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path, frame_bytes="20000") as stage:
        account = stage.account("ada.test")
        await stage.equal()
        stage.network.relay.inject(bytes(20_001))
        account.create(POST, post("behind the large one"))
        await stage.equal()
        assert {reason for _, reason in await stage.rejected()} == {"frame-too-large"}
        assert stage.total("events_received") == stage.total("events")


@pytest.mark.slow
async def test_several_messages_over_the_limit(database: str, tmp_path: Path) -> None:
    """Some are received to be refused; those beyond all bounds end the connection, and nothing else is passed over."""
    async with staged(database, tmp_path, frame_bytes="20000") as stage:
        account = stage.account("ada.test")
        await stage.equal()
        for size in (20_001, 20_001, 80_001, 80_001):
            stage.network.relay.inject(bytes(size))
        account.create(POST, post("behind the large ones"))
        stage.account("bob.test")
        await stage.equal()
        assert {reason for _, reason in await stage.rejected()} == {"frame-too-large"}
        assert stage.metric("rejected", reason="frame-too-large") >= 3
        assert stage.exports == 0
