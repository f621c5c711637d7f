"""Carry out each fault of a schedule in the world.

To add a fault, add its class to `fault_schedule.py`, draw it in `draw_schedule.py`, and carry it out here: a generator
that yields while the fault is in effect, and adds to `world.fired[fault]` when it has seen the effect. If the fault may
change the state of a repo, or open a gap, tell `world_oracle.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from copy import copy
from typing import Any, TypeVar

from indexer.atproto.crypto import PrivateKey
from indexer.localnet import http_server
from indexer.localnet.local_account import LocalAccount
from indexer.localnet.local_pds import CAR_TYPE, GET_REPO
from indexer.localnet.local_relay import message_frame
from indexer.localnet.local_repo import LocalRepo
from indexer.localnet.local_repo import Write as RepoWrite
from indexer.localnet.tid_clock import TidClock, tid
from tests.daemon.running_daemon import commit_payload
from tests.simulation.fault_schedule import (
    AccountChange,
    BrokenConnection,
    ChangedScope,
    DamagedCommit,
    DelayedMessages,
    Fault,
    FaultyExport,
    Forgery,
    KilledDaemon,
    LostCommit,
    LostWindow,
    RepeatedMessages,
    RestartedSequence,
    StoppedRelay,
    UndecodableMessages,
    UnreachableDatabase,
    UnreachableDirectory,
)
from tests.simulation.recording_servers import DAMAGES
from tests.simulation.simulated_world import World
from tests.waiting import until

F = TypeVar("F", bound=Fault)
Injection = Callable[[World, Any], AbstractAsyncContextManager[None]]

STRANGER = PrivateKey.from_seed("k256", b"a key that no account has")
GARBAGE = (b"\xff\x00 not CBOR", b"", b"\xa0\xa0\xa0")
SLOW_BYTES_PER_SECOND = 400
RESTARTED_SEQ = 9_000
MAX_MESSAGES = 1_000
"""No sequence has as many messages, so a number tells to which sequence it belongs."""
FAR_FUTURE = 4_000_000_000_000_000
"""Microseconds since 1970."""

_injections: dict[type[Fault], Injection] = {}


def inject(world: World, fault: Fault) -> AbstractAsyncContextManager[None]:
    """Return the context manager in whose block the fault is in effect."""
    return _injections[type(fault)](world, fault)


def injected_kinds() -> set[type[Fault]]:
    """Return all faults that can be carried out."""
    return set(_injections)


def _carries_out(kind: type[F]) -> Callable[[Callable[[World, F], AsyncIterator[None]]], None]:
    def register(injection: Callable[[World, F], AsyncIterator[None]]) -> None:
        _injections[kind] = asynccontextmanager(injection)

    return register


@_carries_out(LostCommit)
async def _lose_commit(world: World, fault: LostCommit) -> AsyncIterator[None]:
    before = [relay.dropped[fault.did] for relay in world.relays]
    for relay in world.relays:
        relay.drop(fault.did)
    yield
    world.fired[fault] += all(
        relay.dropped[fault.did] == dropped + 1 for relay, dropped in zip(world.relays, before, strict=True)
    )


@_carries_out(DamagedCommit)
async def _damage_commit(world: World, fault: DamagedCommit) -> AsyncIterator[None]:
    before = [relay.damaged[fault.did] for relay in world.relays]
    for relay in world.relays:
        relay.damages[fault.did] = DAMAGES[fault.damage]
    yield
    world.fired[fault] += all(
        relay.damaged[fault.did] == damaged + 1 for relay, damaged in zip(world.relays, before, strict=True)
    )


@_carries_out(DelayedMessages)
async def _delay_messages(world: World, fault: DelayedMessages) -> AsyncIterator[None]:
    relays = [world.relays[number] for number in fault.relays]
    for relay in relays:
        relay.held[fault.did] = []
    yield
    released = [relay.release(fault.did) for relay in relays]
    world.fired[fault] += all(released)


@_carries_out(FaultyExport)
async def _break_export(world: World, fault: FaultyExport) -> AsyncIterator[None]:
    account = world.accounts[fault.did]
    for relay in world.relays:
        relay.drop(fault.did)
    broken = _export_fault(account, fault)
    account.pds.faults.append(broken)
    yield
    world.unfinished.append((fault, lambda: broken.fired == fault.times))


@_carries_out(UnreachableDirectory)
async def _hide_directory(world: World, fault: UnreachableDirectory) -> AsyncIterator[None]:
    answer: dict[str, Any] = {"hang": True} if fault.kind == "hanging" else {"status": 503}
    outage = http_server.Fault("", times=None, **answer)
    world.plc.faults.append(outage)
    yield
    await until(lambda: outage.fired > 0, world.daemon.log_tail)
    world.plc.faults.remove(outage)
    world.fired[fault] += 1


@_carries_out(AccountChange)
async def _change_account(world: World, fault: AccountChange) -> AsyncIterator[None]:
    def state() -> tuple[object, ...]:
        return world.plc.identities[fault.did], world.accounts[fault.did].status

    before = state()
    yield
    world.fired[fault] += state() != before


@_carries_out(Forgery)
async def _forge(world: World, fault: Forgery) -> AsyncIterator[None]:
    yield
    kind, payload = _forged_message(world, fault)
    for relay in world.relays:
        relay.inject(message_frame(kind, payload | {"seq": relay.seq + 1}))
        relay.newest = relay.seq
    await world.caught_up()  # before the directory may be unreachable: without a key, the repo is fetched
    world.fired[fault] += 1


@_carries_out(UndecodableMessages)
async def _send_garbage(world: World, fault: UndecodableMessages) -> AsyncIterator[None]:
    for relay in world.relays:
        for number in range(fault.count):
            relay.inject(GARBAGE[number % len(GARBAGE)])
    world.fired[fault] += 1
    yield


@_carries_out(RepeatedMessages)
async def _repeat_messages(world: World, fault: RepeatedMessages) -> AsyncIterator[None]:
    for relay in world.relays:
        if fault.renumbered:
            for sent in relay.log[-fault.count :]:
                relay.inject(sent.renumbered(relay.seq + 1).frame)
        else:
            relay.repeat(fault.count)
    world.fired[fault] += all(relay.log for relay in world.relays)
    yield


@_carries_out(BrokenConnection)
async def _break_connection(world: World, fault: BrokenConnection) -> AsyncIterator[None]:
    yield
    await until(lambda: world.relay is not None, world.daemon.log_tail)
    assert world.relay is not None
    world.fired[fault] += world.relay.abort_connections() > 0


@_carries_out(KilledDaemon)
async def _kill_daemon(world: World, fault: KilledDaemon) -> AsyncIterator[None]:
    await world.kill()
    world.fired[fault] += 1
    yield
    world.daemon.start()


@_carries_out(LostWindow)
async def _lose_window(world: World, fault: LostWindow) -> AsyncIterator[None]:
    await world.caught_up()
    await world.kill()
    yield
    for relay in world.relays:
        relay.window, relay.announces = fault.remaining, fault.announced
    latest = await world.latest_gap()
    world.daemon.start()
    await _wait_for_gap(world, latest)
    for relay in world.relays:
        relay.window, relay.announces = None, True
    world.fired[fault] += 1


@_carries_out(RestartedSequence)
async def _restart_sequence(world: World, fault: RestartedSequence) -> AsyncIterator[None]:
    await world.caught_up()
    latest = await world.latest_gap()
    yield
    for relay in world.relays:  # the daemon may return to any of them
        relay.announces = fault.announced
        relay.restart_sequence(RESTARTED_SEQ - len(relay.ended) * MAX_MESSAGES)

    async def has_gap() -> bool:
        if await world.latest_gap() == latest or not await world.gaps_are_closed():
            return False
        for relay in world.relays:
            relay.announces = True
            if not fault.announced:  # the daemon may wait for messages that were sent before it connected
                relay.abort_connections()
        return True

    world.unfinished.append((fault, has_gap))


@_carries_out(StoppedRelay)
async def _stop_relay(world: World, fault: StoppedRelay) -> AsyncIterator[None]:
    await until(lambda: world.relay is not None, world.daemon.log_tail)
    stopped = world.relay
    assert stopped is not None
    await stopped.stop()
    yield
    await until(lambda: world.relay not in (None, stopped), world.daemon.log_tail)
    await stopped.start()
    world.fired[fault] += 1


@_carries_out(UnreachableDatabase)
async def _hide_database(world: World, fault: UnreachableDatabase) -> AsyncIterator[None]:
    await until(world.has_backends, world.daemon.log_tail)
    before = world.proxy.disturbed
    if fault.kind == "hanging":
        world.proxy.hang()
    else:
        world.proxy.refuse()
    yield
    await until(lambda: world.proxy.disturbed > before, world.daemon.log_tail)
    await asyncio.sleep(0.1)
    world.proxy.open()
    world.fired[fault] += 1


@_carries_out(ChangedScope)
async def _change_scope(world: World, fault: ChangedScope) -> AsyncIterator[None]:
    await world.sql.execute("select atproto.set_collections($1)", list(fault.collections))
    world.fired[fault] += 1
    yield


async def _wait_for_gap(world: World, before: int) -> None:
    """Wait until there is a gap after number `before`, and all of them are closed."""

    async def closed() -> bool:
        return await world.latest_gap() > before and await world.gaps_are_closed()

    await until(closed, world.daemon.log_tail)


def _export_fault(account: LocalAccount, fault: FaultyExport) -> http_server.Fault:
    """Return the fault of the next exports of the account."""
    answers: dict[str, dict[str, Any]] = {
        "cut": {"cut": 200},
        "truncated": {"sections": 3},
        "hanging": {"hang": True},
        "slow": {"rate": SLOW_BYTES_PER_SECOND},
        "error": {"status": 500},
        "foreign signature": {
            "status": 200, "headers": {"Content-Type": CAR_TYPE}, "body": _foreign_export(account.repo)
        },
    }  # fmt: skip
    return http_server.Fault(GET_REPO, fault.did, fault.times, **answers[fault.kind])


def _foreign_export(repo: LocalRepo) -> bytes:
    """Return an export of the repo that a stranger has signed."""
    foreign = copy(repo)
    foreign.write([], STRANGER, repo.head.rev)
    return b"".join(foreign.export())


def _forged_message(world: World, fault: Forgery) -> tuple[str, dict[str, Any]]:
    """Return kind and payload of a message that claims to be of the account."""
    target, now = world.accounts[fault.did], TidClock(lambda: fault.time).now()
    writes = [RepoWrite.create("com.example.note/forged", {"text": "forged"})]
    match fault.kind:
        case "commit by another key":
            change = copy(target.repo).write(writes, STRANGER, tid(fault.time))
        case "future commit":
            change = copy(target.repo).write(writes, target.key, tid(FAR_FUTURE))
        case "commit of another repo":
            other = next(account for did, account in world.accounts.items() if did != fault.did)
            change = copy(other.repo).write(writes, other.key, tid(fault.time))
        case "sync by another key":
            repo = copy(target.repo)
            repo.write(writes, STRANGER, tid(fault.time))
            return "#sync", {"did": fault.did, "rev": repo.head.rev, "blocks": repo.sync(), "time": now}
    return "#commit", commit_payload(fault.did, change, now)
