"""Invalid, repeated and missing messages of the relay, and broken connections."""

from collections import Counter
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from indexer.demo import dag_cbor
from indexer.demo.local_relay import message_frame
from indexer.demo.local_repo import Write
from indexer.demo.scenario import Scenario
from tests.daemon.running_daemon import POST, commit_payload, post, running_daemon
from tests.database_checks import assert_change_log_consistent, stored_seq
from tests.waiting import until

UNDECODABLE_FRAMES = [
    b"",
    b"\xff\x00 not CBOR",
    b"\xa0" * 3,
    b"\x9f" * 10_000,
    b"\x81" * 10_000,
    dag_cbor.encode({"op": 1, "t": "#commit"}),
    dag_cbor.encode({"op": 1, "t": "#commit"}) + dag_cbor.encode([]),
    dag_cbor.encode({"op": "1", "t": "#commit"}) + dag_cbor.encode({}),
    dag_cbor.encode({"op": 1}) + dag_cbor.encode({}),
]
FRAMES_WITH_INVALID_FIELDS = [
    message_frame("#commit", {}),
    message_frame("#account", {"seq": -1, "did": "did:plc:x", "active": True}),
    message_frame("#identity", {"seq": "1", "did": "did:web:example.com"}),
    message_frame("#sync", {"seq": 2**64 - 1, "did": "did:web:example.com", "rev": "3", "blocks": b""}),
]


@pytest.mark.slow
async def test_invalid_messages_become_dead_letters_and_the_stream_continues(database: str, tmp_path: Path) -> None:
    """Frames that cannot be decoded, and damaged commits. Unknown kinds are ignored, and the valid commits are applied.

    A signed commit with wrong operations proves that the repo has changed, so it is fetched.
    """
    async with running_daemon(database, tmp_path) as daemon:
        account, other, network = daemon.create_account("ada.test"), daemon.create_account("bob.test"), daemon.network
        await daemon.wait_until_equal()
        for frame in UNDECODABLE_FRAMES + FRAMES_WITH_INVALID_FIELDS:
            network.relay.inject(frame)
        daemon.inject("#later", {"did": account.did})
        network.relay.inject(dag_cbor.encode({"op": 7}) + dag_cbor.encode({}))
        network.relay.inject(message_frame("#info", {"name": "Hello", "message": "nothing to do"}))
        change = copy(account.repo).write(
            [Write.create(f"{POST}/damaged", post("damaged"))], account.key, network.clock.tid()
        )
        flipped = change.blocks[:-1] + bytes([change.blocks[-1] ^ 1])
        damaged_fields: dict[str, dict[str, Any]] = {
            "block-hash-mismatch": {"blocks": flipped},
            "car-malformed": {"blocks": change.blocks[:-1]},
            "commit-mismatch": {"commit": account.repo.head.cid},
            "field-invalid": {"rev": "never"},
            "future-rev": {"rev": "3zzzzzzzzzzzz"},
            "too-many-ops": {"ops": change.ops * 201},
            "blocks-too-large": {"blocks": bytes(2_000_001)},
        }
        for changes in damaged_fields.values():
            daemon.inject("#commit", commit_payload(account.did, change, network.clock.now(), **changes))
        account.create(POST, post("after the invalid messages"))
        await daemon.wait_until_equal()
        letters = await daemon.dead_letters()
        expected = Counter(
            {"frame-malformed": len(UNDECODABLE_FRAMES), "field-invalid": len(FRAMES_WITH_INVALID_FIELDS)}
        )
        assert Counter(reason for did, reason in letters if did != account.did) == expected
        assert [reason for did, reason in letters if did == account.did] == list(damaged_fields)
        for reason, count in (expected + Counter(damaged_fields.keys())).items():
            assert daemon.counter("rejected", reason=reason) == count
        frames = [row["frame"] for row in await daemon.execute("select frame from indexer.dead_letter order by id")]
        assert frames[: expected.total()] == UNDECODABLE_FRAMES + FRAMES_WITH_INVALID_FIELDS
        assert daemon.counter("events", kind="unknown", outcome="ignored") == 2
        assert daemon.counter("events", kind="info", outcome="ignored") == 1
        assert daemon.counter_sum("events_received") == daemon.counter_sum("events")
        assert daemon.stages.open_gaps.gaps == []
        assert daemon.export_requests == 0
        change = other.apply_writes([Write.create(f"{POST}/missing", post("missing operation"))], lost=True)
        daemon.inject("#commit", commit_payload(other.did, change, network.clock.now(), ops=[]))
        await daemon.wait_until_equal()
        assert daemon.counter("desynchronized", reason="inversion") == 1
        assert daemon.export_requests == 1


@pytest.mark.slow
async def test_broken_connections_lose_no_message(database: str, tmp_path: Path) -> None:
    breaks = 3
    async with running_daemon(database, tmp_path) as daemon:
        scenario, total = Scenario(daemon.network, seed=5), 50 * breaks
        for step in range(total):
            scenario.perform(step, total)
            if step % 50 == 25:
                await until(lambda: daemon.network.relay.subscribers == 1)
                assert daemon.network.relay.abort_connections() == 1
                await until(lambda: daemon.network.relay.subscribers == 0)
        await daemon.wait_until_equal()
        assert daemon.network.relay.subscribers == 1
        assert daemon.counter_sum("events_received") == daemon.counter_sum("events") >= len(daemon.network.relay.log)
        await assert_change_log_consistent(database)


@pytest.mark.slow
async def test_repeated_messages_are_ignored_and_decreasing_sequence_numbers_are_reported(
    database: str, tmp_path: Path
) -> None:
    """Relays send the last message again after a reconnect. Older ones show that the relay lost its position.

    A commit that has got other sequence numbers is replayed, too.
    """
    async with running_daemon(database, tmp_path) as daemon:
        account = daemon.create_account("ada.test")
        await daemon.wait_until_equal()
        before = await daemon.record_rows(account)
        daemon.network.relay.repeat(1)
        await daemon.wait_for_counter("events", kind="commit", outcome="replayed")
        assert daemon.stages.probe.not_ready() == []
        daemon.network.relay.repeat(4)  # the last message is among them twice
        await daemon.wait_for_counter("rejected", above=1, reason="seq-not-increasing")
        assert "lower sequence numbers" in str(daemon.stages.probe.not_ready())
        assert await daemon.record_rows(account) == before
        account.create(POST, post("after the repeated messages"))
        await daemon.wait_until_equal()
        assert daemon.stages.probe.not_ready() == []
        assert daemon.counter("rejected", reason="seq-not-increasing") == 2
        replayed = daemon.counter("events", kind="commit", outcome="replayed")
        change = account.apply_writes([Write.create(f"{POST}/once", post("once"))])
        for _ in range(3):
            daemon.inject("#commit", commit_payload(account.did, change, daemon.network.clock.now()))
        await daemon.wait_until_equal()
        assert daemon.counter("events", kind="commit", outcome="replayed") == replayed + 3
        assert daemon.export_requests == 0
        await assert_change_log_consistent(database)


@pytest.mark.proof("daemon")
async def test_start_ahead_of_the_relay_is_reported_and_not_changed(database: str, tmp_path: Path) -> None:
    """The daemon continues when the relay has reached the cursor."""
    async with running_daemon(database, tmp_path, start="2") as daemon:
        await until(lambda: "FutureCursor" in str(daemon.stages.probe.not_ready()))
        assert await stored_seq(daemon.db, daemon.network.relay_url) is None
        assert daemon.counter("events", kind="error", outcome="ignored") >= 1
        daemon.create_account("ada.test")
        await daemon.wait_until_equal()
        assert daemon.stages.probe.not_ready() == []


@pytest.mark.proof("daemon")
async def test_several_too_large_messages_lose_no_other_message(database: str, tmp_path: Path) -> None:
    """The first two are received and rejected. The third ends the connection; the next one has new messages only."""
    async with running_daemon(database, tmp_path, narrow={"frame_bytes": 20_000}) as daemon:
        account = daemon.create_account("ada.test")
        await daemon.wait_until_equal()
        for size in (20_001, 20_001, 80_001, 80_001):
            daemon.network.relay.inject(bytes(size))
        account.create(POST, post("after the large messages"))
        daemon.create_account("bob.test")

        async def gaps() -> int:
            return len(await daemon.execute("select from atproto.gaps"))

        async def has_gap() -> bool:
            return await gaps() > 0

        await until(has_gap)
        account.create(POST, post("after the new connection"))
        await daemon.wait_until_equal()
        assert {reason for _, reason in await daemon.dead_letters()} == {"frame-too-large"}
        assert daemon.counter("rejected", reason="frame-too-large") == 2
        assert await gaps() == 1
