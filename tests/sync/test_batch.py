from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.localnet.repo import Write
from indexer.reasons import Desync, Rejection
from indexer.sync.batch import DEAD_LETTER_BYTES, BatchPlan, Received, plan_batch
from indexer.sync.events import MalformedEvent, UnknownEvent
from indexer.sync.plan import NeedsKey, RecordChange
from indexer.sync.planning import UNAVAILABLE, Signer
from indexer.sync.repo import Outcome, Repo, SyncStatus
from tests.sync.people import GROUND, Person, received

PEOPLE = ("ann", "bob", "cyn")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(PEOPLE), st.sampled_from(["post", "edit", "empty", "lose", "sync", "off", "on", "again"])
    ),
    max_size=25,
)


def messages(steps: Sequence[tuple[str, str]]) -> tuple[list[Received], dict[str, Person]]:
    """What a relay would send of these steps, numbered from 1."""
    people = {name: Person(name) for name in PEOPLE}
    sent: list[Received] = [received("commit", person.first()) for person in people.values()]
    for place, (name, step) in enumerate(steps):
        person = people[name]
        match step:
            case "post":
                sent.append(received("commit", person.post(f"p{place}")))
            case "edit" if person.repo.records:
                path = max(person.repo.records)
                sent.append(received("commit", person.write(Write.update(path, {"edit": place}))))
            case "empty":
                sent.append(received("commit", person.write()))
            case "lose":
                person.post(f"lost{place}")
            case "sync":
                sent.append(received("sync", person.sync()))
            case "off" | "on":
                sent.append(received("account", person.account(active=step == "on")))
            case "again":
                sent.append(sent[place % len(sent)])
    return [replace(message, seq=seq) for seq, message in enumerate(sent, start=1)], people


def run(
    batches: Sequence[Sequence[Received]], people: dict[str, Person]
) -> tuple[dict[str, Repo], list[RecordChange], list[Outcome]]:
    """Batches one after the other, the rows of one being the ground of the next."""
    signers = {person.did: person.signer for person in people.values()}
    rows: dict[str, Repo] = {}
    changes: list[RecordChange] = []
    outcomes: list[Outcome] = []
    for batch in batches:
        plan = plan_batch(batch, rows, lambda did: replace(signers[did], final=True), GROUND)
        assert not plan.waiting
        for write in plan.writes:
            assert write.expected == rows.get(write.repo.did, Repo(write.repo.did)).version
            rows[write.repo.did] = write.repo
            changes += write.changes
        outcomes += [settled.outcome for settled in plan.settled]
    return rows, changes, outcomes


@settings(max_examples=60, deadline=None)
@given(STEPS, st.data())
def test_batches_cut_anywhere_leave_the_same_rows(steps: list[tuple[str, str]], data: st.DataObject) -> None:
    sent, people = messages(steps)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=5)))
    pieces = [sent[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    rows, changes, outcomes = run(pieces, people)
    alone_rows, alone_changes, alone_outcomes = run([[message] for message in sent], people)
    assert rows == alone_rows
    assert sorted(map(repr, changes)) == sorted(map(repr, alone_changes))
    assert outcomes == alone_outcomes
    assert len(outcomes) == len(sent), "one outcome each"


def plan_of(batch: Sequence[Received], signer: Signer | None, rows: dict[str, Repo] | None = None) -> BatchPlan:
    return plan_batch(batch, rows or {}, lambda _: signer, GROUND)


def test_all_messages_of_a_did_behind_a_waiting_one_wait() -> None:
    ann, bob = Person("ann"), Person("bob")
    batch = [received("commit", payload) for payload in (ann.first(), ann.post("a"), bob.first(), ann.post("b"))]
    plan = plan_batch(batch, {}, lambda did: bob.signer if did == bob.did else None, GROUND)
    assert plan.waiting == [batch[0], batch[1], batch[3]]
    assert plan.needs == {ann.did: NeedsKey(ann.did, refresh=False)}
    assert [item.received for item in plan.settled] == [batch[2]]
    assert [write.repo.did for write in plan.writes] == [bob.did]


def test_what_came_before_a_waiting_message_is_settled() -> None:
    ann, mallory = Person("ann"), Person("mallory")
    batch = [received("commit", ann.first())]
    ann.key, good = mallory.key, ann.signer
    batch.append(received("commit", ann.post("by a new key")))
    plan = plan_of(batch, good)
    assert [item.outcome for item in plan.settled] == [Outcome.APPLIED]
    assert plan.needs == {ann.did: NeedsKey(ann.did, refresh=True)}
    assert plan.waiting == [batch[1]]


def test_after_an_identity_event_the_old_key_is_not_used() -> None:
    ann = Person("ann")
    batch = [received("commit", ann.first()), received("identity", ann.identity()), received("commit", ann.post("a"))]
    plan = plan_of(batch, ann.signer)
    assert plan.stale_identities == {ann.did}
    assert plan.waiting == [batch[2]]
    assert plan.needs == {ann.did: NeedsKey(ann.did, refresh=False)}


def test_refused_messages_become_dead_letters_and_change_nothing() -> None:
    ann = Person("ann")
    long = MalformedEvent(Rejection.FIELD_INVALID, "rev", "#commit", 7, ann.did)
    forged = received("commit", ann.first())
    batch = [Received(7, b"x" * 200_000, long), forged, Received(9, b"", UnknownEvent("#new", 9))]
    plan = plan_of(batch, replace(Person("mallory").signer, final=True))
    assert [item.outcome for item in plan.settled] == [Outcome.REJECTED, Outcome.REJECTED, Outcome.IGNORED]
    assert [letter.reason for letter in plan.dead_letters] == [Rejection.FIELD_INVALID, Rejection.SIGNATURE_INVALID]
    assert len(plan.dead_letters[0].frame) == DEAD_LETTER_BYTES
    assert plan.dead_letters[1].frame == forged.frame
    assert plan.writes == ()


def test_kept_frames_come_with_the_row_that_counts_them() -> None:
    ann = Person("ann")
    row = Repo(ann.did, version=3, status=SyncStatus.IN_PROGRESS, lease=1)
    batch = [received("commit", ann.post("a")), received("commit", ann.post("b"))]
    (write,) = plan_of(batch, ann.signer, {ann.did: row}).writes
    assert [kept.frame for kept in write.kept] == [message.frame for message in batch]
    assert write.repo.buffered_events == 2
    assert write.repo.buffered_bytes == sum(len(message.frame) for message in batch)
    assert write.expected == 3


def test_a_key_that_can_not_be_had_settles_all() -> None:
    ann = Person("ann")
    batch = [received("commit", ann.first()), received("commit", ann.post("a"))]
    plan = plan_of(batch, UNAVAILABLE)
    assert [(item.outcome, item.why) for item in plan.settled] == [
        (Outcome.DESYNCHRONIZED, Desync.IDENTITY),
        (Outcome.IGNORED, Desync.IDENTITY),
    ]
