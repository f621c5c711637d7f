"""The event loop answers health checks while hostile content is received, decoded, planned, converted and written.

`run_daemon` fails every test in which the daemon blocks the event loop.
"""

import asyncio
import threading
from pathlib import Path
from time import thread_time
from typing import Any

import pytest

from indexer.demo import dag_cbor
from indexer.demo.local_pds import GET_REPO
from indexer.demo.local_repo import Write
from indexer.sync.batch import ReceivedMessage
from indexer.sync.resync import Completion
from tests.daemon.running_daemon import POST, RunningDaemon, post, running_daemon
from tests.faulty_network import Fault
from tests.waiting import until

DELAYS = "indexer_event_loop_delay_seconds"
DEEP = b"\x81" * 240 + b"\x00"
COSTLY = b"\x7a" + (1_000_000).to_bytes(4) + b"\x01" * 1_000_000
"""A text of control characters: each one takes six bytes in JSON."""
FRAMES = {"lists": b"\x80", "maps": b"\xa0", "deep lists": DEEP, "deep maps": b"\xa1\x61a" * 240 + b"\x00"}


def spin(seconds: float) -> None:
    """Use this much processor time."""
    began = thread_time()
    while thread_time() - began < seconds:
        pass


def delays_above(daemon: RunningDaemon, seconds: float) -> float:
    """Return how many timers ran later than this."""
    registry = daemon.stages.metrics.registry
    total = registry.get_sample_value(f"{DELAYS}_count")
    short = registry.get_sample_value(f"{DELAYS}_bucket", {"le": str(seconds)})
    assert total is not None
    assert short is not None
    return total - short


async def buffer_costly_commits(daemon: RunningDaemon, record: bytes) -> None:
    """Let the resync of a repo last until the stream has brought four commits with this record, three times each."""
    hostile = daemon.create_account("eve.test", records=30)
    await daemon.wait_until_equal()
    slow = Fault(GET_REPO, hostile.did, rate=100)
    hostile.pds.faults.append(slow)
    daemon.lose_commit(hostile)
    await until(lambda: slow.fired == 1)
    for number in range(4):
        hostile.apply_writes([Write.create(f"{POST}/{number}-{path}", record) for path in range(3)])
    await daemon.wait_for_counter("events", above=3, kind="commit", outcome="buffered")
    slow.rate = 1 << 30  # the rest is sent at once


@pytest.mark.slow
async def test_daemon_that_blocks_the_event_loop_fails_its_test(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def receive_slowly(*arguments: Any) -> ReceivedMessage:
        spin(0.5)
        return ReceivedMessage(*arguments)

    with pytest.raises(AssertionError, match=r"the event loop was blocked for 0\.[5-9]"):  # noqa: PT012
        async with running_daemon(database, tmp_path) as daemon:
            account = daemon.create_account("ada.test")
            spin(0.5)  # work of the test does not count
            await daemon.wait_until_equal()
            before = delays_above(daemon, 0.25)
            with monkeypatch.context() as patched:
                patched.setattr("indexer.live.firehose_consumer.ReceivedMessage", receive_slowly)
                account.create(POST, post("costly"))
                await daemon.wait_until_equal()
                await until(lambda: delays_above(daemon, 0.25) > before)


@pytest.mark.proof("daemon")
@pytest.mark.parametrize("name", FRAMES)
async def test_frames_with_millions_of_items_do_not_block_the_event_loop(
    database: str, tmp_path: Path, name: str
) -> None:
    count = 4_990_000 // len(FRAMES[name])
    frame = dag_cbor.encode({"op": 1, "t": "#commit"}) + b"\xa1\x63ops\x9a" + count.to_bytes(4) + FRAMES[name] * count
    async with running_daemon(database, tmp_path) as daemon:
        bystander = daemon.create_account("bob.test")
        await daemon.wait_until_equal()
        for number in range(5):
            daemon.network.relay.inject(frame)
            bystander.create(POST, post(number))
        await daemon.wait_until_equal()
        assert await daemon.dead_letters() == 5 * [(None, "frame-too-large")]
        assert daemon.counter("rejected", reason="frame-too-large") == 5


@pytest.mark.proof("daemon")
async def test_many_commits_with_many_changes_do_not_block_the_event_loop(database: str, tmp_path: Path) -> None:
    """250 commits with 50,000 changes are received at once. A batch has at most 5,000, and those of one commit."""
    async with running_daemon(database, tmp_path) as daemon:
        hostile = [daemon.create_account(f"eve{number}.test") for number in range(25)]
        bystander = daemon.create_account("bob.test")
        await daemon.wait_until_equal()
        daemon.stages.shard_ownership.owned.clear()  # the writer waits, so that a full batch is received
        for number in range(10):
            for account in hostile:
                account.apply_writes([Write.create(f"{POST}/{number}-{path}", {"$type": POST}) for path in range(200)])
            await asyncio.sleep(0)
        bystander.create(POST, post("after the commits"))
        daemon.stages.shard_ownership.owned.set()
        await daemon.wait_until_equal()


@pytest.mark.proof("daemon")
async def test_commits_of_others_are_stored_while_the_events_of_a_repo_are_drained(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch with a commit of the repo does not wait until all its buffered events are planned."""
    planning, go_on, plan_slice = threading.Event(), threading.Event(), Completion.plan_slice

    def plan_slowly(completion: Completion) -> bool:
        if completion.waiting_bytes > 4_000_000:
            planning.set()
            assert go_on.wait(60)
        return plan_slice(completion)

    monkeypatch.setattr(Completion, "plan_slice", plan_slowly)
    async with running_daemon(database, tmp_path, resync_source="pds") as daemon:
        bystander = daemon.create_account("bob.test")
        await buffer_costly_commits(daemon, COSTLY)
        await until(planning.is_set)
        try:
            hostile = daemon.network.accounts[next(did for did in daemon.network.accounts if did != bystander.did)]
            hostile.create(POST, post("to the locked row"))
            bystander.create(POST, post("meanwhile"))
            await daemon.wait_for_cursor()
            assert len(await daemon.record_rows(bystander)) == 6
        finally:
            go_on.set()
        await daemon.wait_until_equal()
