"""A guard against silent slow-down: what we add to the work that can't be avoided, as a ratio within one run.

The bounds are twice what was measured when they were written: a gross regression fails, a busy machine doesn't.
"""

from collections.abc import Callable
from random import Random
from time import process_time

import pytest

from benchmarks import floor
from indexer.atproto.car import split_car
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.localnet.repo import Write
from indexer.sync.batch import Received, plan_batch
from indexer.sync.diff import Diff
from indexer.sync.events import CommitEvent
from indexer.sync.frames import decode_frame
from indexer.sync.planning import record_change
from indexer.sync.repo import Head, Outcome, Repo, SyncStatus
from indexer.sync.verify import VerifiedChange, verify_snapshot
from tests.sync.people import EVERYTHING, GROUND, Person, frame

pytestmark = pytest.mark.slow

RECORDS, COMMITS, ROUNDS = 1_200, 150, 7
LIKE = "app.bsky.feed.like"
SUBJECT = {"uri": f"at://did:plc:{24 * 'a'}/app.bsky.feed.post/3laaaaaaaaaaa", "cid": "bafyreia" + 51 * "a"}
LIVE_PER_PROOF = 2 * 4.3  # decoding and planning a commit, by its decoding, hashing and signature alone
RESYNC_PER_EXPORT = 2 * 10.6  # walking, comparing and preparing an export's rows, by hashing and decoding it alone


def least(work: Callable[[], object]) -> float:
    """Seconds of this process, the best of some rounds."""
    seconds = []
    for _ in range(ROUNDS):
        began = process_time()
        work()
        seconds.append(process_time() - began)
    return min(seconds)


@pytest.fixture(scope="module")
def person() -> Person:
    ann, random = Person(), Random(1)
    paths = [f"{LIKE}/3l{random.randrange(10**11):011}" for _ in range(RECORDS)]
    ann.write(*(Write.create(path, {"$type": LIKE, "subject": SUBJECT, "place": n}) for n, path in enumerate(paths)))
    return ann


def test_the_live_path(person: Person) -> None:
    head = person.repo.head
    repo = Repo(person.did, 1, SyncStatus.SYNCHRONIZED, None, Head(head.rev, head.data, head.cid))
    record = {"$type": LIKE, "subject": SUBJECT}
    frames = [frame("commit", person.write(Write.create(f"{LIKE}/3m{n:011}", record))) for n in range(COMMITS)]
    proofs = [floor.take_apart(one, {person.did: person.key.public}).proof for one in frames]

    def plan() -> None:
        events = [decode_frame(one, DEFAULT_LIMITS) for one in frames]
        batch = [Received(n, one, event) for n, (one, event) in enumerate(zip(frames, events, strict=True))
                 if isinstance(event, CommitEvent)]  # fmt: skip
        settled = plan_batch(batch, {repo.did: repo}, lambda _did: person.signer, GROUND).settled
        assert [item.outcome for item in settled] == [Outcome.APPLIED] * COMMITS

    assert least(plan) < LIVE_PER_PROOF * least(lambda: floor.prove(proofs))


def test_a_resync(person: Person) -> None:
    repo, key = person.repo, person.key.public
    export = b"".join(repo.export())
    _, blocks = split_car(export, DEFAULT_LIMITS, max_bytes=len(export))

    def compare() -> None:
        snapshot = verify_snapshot(person.did, repo.head.cid, blocks.get, key, DEFAULT_LIMITS)
        changes = [
            record_change(VerifiedChange(path, old, new, blocks[new] if new else None), snapshot.head.rev, EVERYTHING)
            for path, old, new in Diff(snapshot.records()).rest()
        ]
        assert len(changes) == len(repo.records)

    assert least(compare) < RESYNC_PER_EXPORT * least(lambda: floor.read_exports([export]))
