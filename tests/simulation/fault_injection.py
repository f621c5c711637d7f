"""Carry out each fault of a schedule in the world.

To add a fault, add its class to `fault_schedule.py`, draw it in `draw_schedule.py`, and carry it out here: a generator
that yields while the fault is in effect, and adds to `world.fired[fault]` when it has seen the effect. If the fault may
change the state of a repo, or open a gap, tell `world_oracle.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from copy import copy
from typing import Any, TypeVar

from indexer.atproto.syntax import tid_of
from indexer.demo.local_relay import message_frame
from indexer.demo.local_repo import TidClock
from indexer.demo.local_repo import Write as RepoWrite
from indexer.net.http.http_client import host_of
from tests import faulty_network
from tests.daemon.running_daemon import commit_payload
from tests.daemon_forks import Death
from tests.simulation.fault_schedule import (
    AccountChange,
    BrokenConnection,
    BrokenHost,
    ChangedScope,
    DamagedCommit,
    DelayedMessages,
    Fault,
    FaultyExport,
    Forgery,
    KilledAtPoint,
    KilledDaemon,
    LostCommit,
    LostWindow,
    LyingHost,
    Moment,
    OmittedCommit,
    RepeatedMessages,
    RestartedSequence,
    StoppedRelay,
    UndecodableMessages,
    UnreachableDatabase,
    UnreachableDirectory,
)
from tests.simulation.faulty_hosts import STRANGER, HighSKey, faulty_answer, no_single_records, wrong_answers
from tests.simulation.recording_servers import DAMAGES
from tests.simulation.simulated_world import World
from tests.simulation.world_oracle import GAPS
from tests.waiting import until

F = TypeVar("F", bound=Fault)
Injection = Callable[[World, Any], AbstractAsyncContextManager[None]]

GARBAGE = (b"\xff\x00 not CBOR", b"\xa0", b"\xa0\xa0\xa0")
"""Beginnings of messages that are no frames, whatever follows."""
OUTAGE_SECONDS = 0.3
"""Duration of an outage after its first effect."""
RESTARTED_SEQ = 9_000
MAX_MESSAGES = 1_000
"""No sequence has as many messages, so a number tells to which sequence it belongs."""
NO_CID = "bafyreigdyrzt5sfp7udm7hu76uh7y26nf3efuylqabf3oclgtqy55fbzdi"
"""The CID of a commit that nobody has."""
FAR_FUTURE = 4_000_000_000_000_000
"""Microseconds since 1970."""

_injections: dict[type[Fault], Injection] = {}


def inject(world: World, fault: Fault) -> AbstractAsyncContextManager[None]:
    """Return the context manager in whose block the fault is in effect."""
    return _injections[type(fault)](world, fault)


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


@_carries_out(OmittedCommit)
async def _omit_commit(world: World, fault: OmittedCommit) -> AsyncIterator[None]:
    relay = world.relays[fault.relay]
    before = relay.dropped[fault.did]
    relay.drop(fault.did)
    yield
    world.fired[fault] += relay.dropped[fault.did] == before + 1


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
    broken = faulty_answer(account, fault)
    account.pds.faults += [broken, no_single_records(fault.did)]
    yield
    world.unfinished.append((fault, lambda: broken.fired == fault.times))


@_carries_out(UnreachableDirectory)
async def _hide_directory(world: World, fault: UnreachableDirectory) -> AsyncIterator[None]:
    error = faulty_network.Fault("", times=None, status=503)
    waited = world.plc.waited
    if fault.kind == "hanging":
        world.plc.hang()
    else:
        world.plc.faults.append(error)
    yield
    await until(lambda: error.fired > 0 or world.plc.waited > waited, world.daemon.log_tail)
    await asyncio.sleep(OUTAGE_SECONDS)
    if fault.kind == "hanging":
        world.plc.go_on()
    else:
        world.plc.faults.remove(error)
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
    """Forge after the actions, when the account is quiet: whatever happens to it then, the forgery has caused."""
    yield
    watched = {fault.did, *world.schedule.bystanders}  # a forgery may have a commit of the other one
    for did in watched:
        await until(lambda did=did: world.is_quiet(did), world.daemon.log_tail)  # type: ignore[misc]
    await until(world.directory_is_asked, world.daemon.log_tail)
    desynchronized, fetched = await world.desynchronized(watched), [world.fetched()[did] for did in watched]
    kind, payload = _forged_message(world, fault)
    frames = []
    for relay in world.relays:
        frames.append(message_frame(kind, payload | {"seq": relay.seq + 1}))
        relay.inject(frames[-1])
        relay.newest = relay.seq
    await until(lambda: world.has_rejected(frames), world.daemon.log_tail)
    await world.caught_up()  # before the directory may be unreachable: without a key, the repo is fetched
    assert await world.desynchronized(watched) == desynchronized, f"{fault} has desynchronized a repo"
    assert [world.fetched()[did] for did in watched] == fetched, f"{fault} has caused a fetch"
    world.fired[fault] += 1


@_carries_out(UndecodableMessages)
async def _send_garbage(world: World, fault: UndecodableMessages) -> AsyncIterator[None]:
    def send() -> None:
        for relay in world.relays:
            for frame in frames:
                relay.inject(frame)

    world.garbage += 1
    frames = [GARBAGE[number % len(GARBAGE)] + b"%d.%d" % (world.garbage, number) for number in range(fault.count)]
    if not fault.late:
        send()
    yield
    if fault.late:
        send()
    for frame in frames:
        await until(lambda frame=frame: world.has_rejected([frame]), world.daemon.log_tail)  # type: ignore[misc]
    world.fired[fault] += 1


@_carries_out(RepeatedMessages)
async def _repeat_messages(world: World, fault: RepeatedMessages) -> AsyncIterator[None]:
    """Repeat messages while other faults are in effect, and once more when the daemon has read everything.

    What it receives then shows the effect. The first ones may be lost with the window or the sequence of the relay.
    """
    _repeat(world, fault)
    yield
    wanted = 0

    async def have_effect() -> bool:
        nonlocal wanted
        if not wanted:
            await world.caught_up()
            wanted = await world.received() + _repeat(world, fault)
        return await world.received() >= wanted

    world.unfinished.append((fault, have_effect))


def _repeat(world: World, fault: RepeatedMessages) -> int:
    """Repeat the newest messages of each relay; return how many the daemon has to receive at least."""
    repeated = min(len(relay.log[-fault.count :]) for relay in world.relays)
    assert repeated, "there is nothing to repeat"
    for relay in world.relays:
        if fault.renumbered:
            for sent in relay.log[-fault.count :]:
                payload = sent.payload and sent.payload | {"seq": relay.seq + 1}
                relay.inject(sent.frame if payload is None else message_frame(sent.kind, payload))
        else:
            relay.repeat(fault.count)
    return repeated


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


@_carries_out(KilledAtPoint)
async def _kill_daemon_at_point(world: World, fault: KilledAtPoint) -> AsyncIterator[None]:
    await world.kill()
    if not fault.late:
        world.daemon.start(_death(fault.moment))
    yield
    if fault.late:
        world.daemon.start(_death(fault.moment))
    await _wait_for_death(world, fault.moment)
    world.fired[fault] += 1


@_carries_out(LostWindow)
async def _lose_window(world: World, fault: LostWindow) -> AsyncIterator[None]:
    await world.caught_up()
    await world.kill()
    yield
    for relay in world.relays:
        relay.window, relay.announces = fault.remaining, fault.announced
    latest = await world.latest_gap()
    if fault.moment is None:
        world.daemon.start()
    else:
        world.daemon.start(_death(fault.moment))
        await _wait_for_death(world, fault.moment)
    # After a new sequence, the cursor may be unproven instead of outdated if the relay says nothing.
    await _wait_for_gap(world, latest, GAPS[LostWindow] | (frozenset() if fault.announced else GAPS[RestartedSequence]))
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
        if not await world.gap_reasons(after=latest) & GAPS[RestartedSequence] or not await world.gaps_are_closed():
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
    await asyncio.sleep(OUTAGE_SECONDS)
    world.proxy.open()
    world.fired[fault] += 1


@_carries_out(BrokenHost)
async def _break_host(world: World, fault: BrokenHost) -> AsyncIterator[None]:
    """Break the host for good."""
    host = world.hosts[fault.host]
    accounts = [account for account in world.accounts.values() if account.pds is host]
    answers = wrong_answers(fault.kind, accounts)
    if fault.kind == "dead":
        await host.stop()
    host.faults[:0] = [*answers, no_single_records()]
    yield

    async def has_failed() -> bool:
        dids = [account.did for account in accounts]
        return any(answer.fired for answer in answers) or await world.has_failed("unreachable", dids)

    world.unfinished.append((fault, has_failed))


@_carries_out(LyingHost)
async def _lie_in_list(world: World, fault: LyingHost) -> AsyncIterator[None]:
    """Lie when the daemon is quiet: whatever happens to an account then, the lies have caused."""
    await world.caught_up()
    await until(world.all_quiet, world.daemon.log_tail)
    host = world.hosts[fault.host]
    others = [
        account for account in world.accounts.values() if account.pds is not host and account.did not in host.hosted
    ]
    host.lies = [{"did": did, "head": NO_CID, "rev": fault.rev, "active": True} for did in fault.invented]
    for number, account in enumerate(others):
        status: dict[str, Any] = {"active": False, "status": "deleted"} if number % 2 else {"active": True}
        host.lies.append({"did": account.did, "head": NO_CID, "rev": fault.rev} | status)
    dids = list(world.accounts)
    desynchronized, fetched = await world.desynchronized(dids), world.fetched()
    unproven = await world.read_host_lists()
    assert unproven[host_of(host.url)] >= sum(lie["active"] for lie in host.lies), unproven
    assert await world.desynchronized(dids) == desynchronized, f"{fault} has desynchronized a repo"
    assert world.fetched() == fetched, f"{fault} has caused a fetch"
    world.fired[fault] += host.lied
    host.lies = []
    yield


@_carries_out(ChangedScope)
async def _change_scope(world: World, fault: ChangedScope) -> AsyncIterator[None]:
    before = await world.scope_version()
    await world.sql.execute("select atproto.set_collections($1)", list(fault.collections))
    world.fired[fault] += await world.scope_version() > before
    yield


def _death(moment: Moment) -> Death:
    return Death(moment.point, moment.committed, other=moment.other)


async def _wait_for_death(world: World, moment: Moment) -> None:
    """Wait until the daemon has killed itself, and start another one."""
    await world.daemon.wait_for_death(_death(moment))
    await world.forget_daemon()
    world.daemon.start()


async def _wait_for_gap(world: World, before: int, reasons: AbstractSet[str]) -> None:
    """Wait until there is a gap after number `before` for one of these reasons, and all gaps are closed."""

    async def closed() -> bool:
        return bool(await world.gap_reasons(after=before) & reasons) and await world.gaps_are_closed()

    await until(closed, world.daemon.log_tail)


def _forged_message(world: World, fault: Forgery) -> tuple[str, dict[str, Any]]:
    """Return kind and payload of a message that claims to be of the account."""
    target, time = world.accounts[fault.did], world.forgery_time(fault)
    other = next(world.accounts[did] for did in (*world.schedule.bystanders, *world.accounts) if did != fault.did)
    now = TidClock(lambda: time).now()
    writes = [RepoWrite.create("com.example.note/forged", {"text": "forged"})]
    match fault.kind:
        case "commit by another key":
            change = copy(target.repo).write(writes, STRANGER, tid_of(time))
        case "future commit":
            change = copy(target.repo).write(writes, target.key, tid_of(FAR_FUTURE))
        case "high-S signature":
            change = copy(target.repo).write(writes, HighSKey(target.key), tid_of(time))
        case "commit of another repo":
            change = copy(other.repo).write(writes, other.key, tid_of(time))
        case "sync by another key" | "sync of another repo":
            owner, key = (target, STRANGER) if fault.kind == "sync by another key" else (other, other.key)
            repo = copy(owner.repo)
            repo.write(writes, key, tid_of(time))
            return "#sync", {"did": fault.did, "rev": repo.head.rev, "blocks": repo.sync(), "time": now}
    return "#commit", commit_payload(fault.did, change, now)
