import ast
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.atproto.car import split_car
from indexer.atproto.cid import cid_of
from indexer.atproto.commit import decode_commit
from indexer.atproto.crypto import PrivateKey, PublicKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst import EMPTY_TREE, MissingNodeError
from indexer.errors import UpstreamError
from indexer.localnet import dag_cbor
from indexer.localnet.repo import Write, car, car_header
from indexer.reasons import Desync, Rejection
from indexer.sync.events import CommitEvent
from indexer.sync.verify import VerifiedCommit, verify_commit, verify_snapshot, verify_sync
from tests.sync.people import POST, Person, event

INDEXER = Path(__file__).parents[2] / "indexer"


def blocks_of(blocks: bytes) -> dict[bytes, bytes]:
    return split_car(blocks, DEFAULT_LIMITS, max_bytes=10**7)[1]


def verify(payload: dict[str, Any], key: PublicKey) -> VerifiedCommit:
    decoded = event("commit", payload)
    assert isinstance(decoded, CommitEvent), decoded
    return verify_commit(decoded, key, DEFAULT_LIMITS)


def busy(curve: Any = "k256", records: int = 40) -> Person:
    person = Person("busy", curve)
    person.write(*(Write.create(f"{POST}/{n:03}", {"n": n}) for n in range(records)))
    return person


@pytest.mark.parametrize("curve", ["k256", "p256"])
def test_a_genuine_commit_is_proven_with_its_changes(curve: Any) -> None:
    person = busy(curve)
    before = person.repo.head
    old = cid_of(person.repo.records[f"{POST}/007"])
    payload = person.write(
        Write.create(f"{POST}/zzz", {"n": 1}), Write.update(f"{POST}/007", {"n": -7}), Write.delete(f"{POST}/011")
    )
    proven = verify(payload, person.key.public)
    assert (proven.flaw, proven.prev_data, proven.whole) == (None, before.data, False)
    assert (proven.head.rev, proven.head.data) == (person.repo.head.rev, person.repo.head.data)
    changes = {change.path: change for change in proven.changes}
    assert changes[f"{POST}/007".encode()].old == old
    assert changes[f"{POST}/zzz".encode()].block == person.repo.records[f"{POST}/zzz"]
    assert changes[f"{POST}/011".encode()].new is None


def test_first_commits_carry_the_whole_repo() -> None:
    person = Person()
    assert verify(person.first(), person.key.public).whole
    assert person.repo.head.data == EMPTY_TREE


def test_a_path_named_twice_counts_once() -> None:
    person = busy()
    payload = person.write(
        Write.delete(f"{POST}/003"),
        Write.create(f"{POST}/003", {"again": 1}),
        Write.create(f"{POST}/n", {}),
        Write.delete(f"{POST}/n"),
    )
    proven = verify(payload, person.key.public)
    assert proven.flaw is None
    assert [(change.path, change.old is None) for change in proven.changes] == [(f"{POST}/003".encode(), False)]


def refusal(payload: dict[str, Any], key: PublicKey) -> Rejection:
    with pytest.raises(UpstreamError) as caught:
        verify(payload, key)
    return caught.value.reason


def test_what_is_wrong_before_the_signature_holds_is_refused() -> None:
    person, stranger = busy(), Person("stranger")
    payload = person.post("x")
    key = person.key.public
    commit = payload["commit"]
    assert refusal(payload | {"repo": stranger.did}, key) is Rejection.ENVELOPE_MISMATCH
    assert refusal(payload | {"rev": "3jzfcijpj2z2a"}, key) is Rejection.ENVELOPE_MISMATCH
    assert refusal(payload | {"commit": EMPTY_TREE}, key) is Rejection.COMMIT_MISMATCH
    assert refusal(payload, stranger.key.public) is Rejection.SIGNATURE_INVALID
    assert refusal(payload, PrivateKey.from_seed("p256", b"x").public) is Rejection.SIGNATURE_INVALID
    assert refusal(payload | {"blocks": payload["blocks"][:-1]}, key) is Rejection.CAR_MALFORMED
    assert refusal(payload | {"blocks": b""}, key) is Rejection.CAR_MALFORMED
    flipped = payload["blocks"][:-1] + bytes([payload["blocks"][-1] ^ 1])
    assert refusal(payload | {"blocks": flipped}, key) is Rejection.BLOCK_HASH_MISMATCH
    headless = car({commit: b"not the commit"})
    assert refusal(payload | {"blocks": headless}, key) is Rejection.BLOCK_HASH_MISMATCH
    rootless = car_header(commit) + car({EMPTY_TREE: blocks_of(Person("z").first()["blocks"])[EMPTY_TREE]})[59:]
    assert refusal(payload | {"blocks": rootless}, key) is Rejection.COMMIT_MISSING


def other(cid: bytes) -> bytes:
    return cid[:-1] + bytes([cid[-1] ^ 1])


@pytest.mark.parametrize(
    ("change", "flaw"),
    [
        (lambda p: {"prevData": other(p["prevData"])}, Desync.INVERSION),
        (lambda p: {"ops": p["ops"][1:]}, Desync.INVERSION),
        (lambda p: {"ops": [p["ops"][0] | {"cid": other(p["ops"][0]["cid"])}, *p["ops"][1:]]}, Desync.OPS),
        (lambda p: {"ops": [*p["ops"], p["ops"][0] | {"path": f"{POST}/unheard"}]}, Desync.OPS),
        (lambda p: {"ops": [p["ops"][0] | {"action": "delete"}, *p["ops"][1:]]}, Desync.OPS),
        (lambda p: {"ops": [*p["ops"][:2], {**p["ops"][2], "prev": None}]}, Desync.LEGACY),
    ],
)
def test_what_is_wrong_behind_a_good_signature_is_a_flaw(change: Any, flaw: Desync) -> None:
    person = busy()
    payload = person.write(
        Write.create(f"{POST}/zzz", {"n": 1}), Write.update(f"{POST}/007", {"n": -7}), Write.delete(f"{POST}/011")
    )
    assert verify(payload | change(payload), person.key.public).flaw is flaw


def test_a_commit_in_mid_chain_without_prev_data_is_legacy() -> None:
    person = busy()
    payload = person.post("x")
    del payload["prevData"]
    assert verify(payload, person.key.public).flaw is Desync.LEGACY


def test_every_block_that_is_left_out_is_missed() -> None:
    person = busy(records=200)
    payload = person.write(Write.create(f"{POST}/zzz", {"n": 1}), Write.delete(f"{POST}/011"))
    blocks = blocks_of(payload["blocks"])
    seen = set()
    for left_out in blocks:
        kept = {payload["commit"]: blocks[payload["commit"]]} | blocks
        del kept[left_out]
        if left_out == payload["commit"]:
            continue
        flaw = verify(payload | {"blocks": car(kept)}, person.key.public).flaw
        assert flaw in {None, Desync.UNDECIDABLE, Desync.RECORD_MISSING}
        seen.add(flaw)
        if left_out == cid_of(person.repo.records[f"{POST}/zzz"]):
            assert flaw is Desync.RECORD_MISSING
    assert Desync.UNDECIDABLE in seen


def test_nodes_that_break_the_rules_under_a_good_signature_are_a_flaw() -> None:
    person = busy(records=3)
    payload = person.post("x")
    bad_node = dag_cbor.encode({"e": [], "l": cid_of(b"nowhere")})
    fields = {"did": person.did, "rev": payload["rev"], "data": cid_of(bad_node), "prev": None, "version": 3}
    block = dag_cbor.encode(fields | {"sig": person.key.sign(dag_cbor.encode(fields))})
    forged = payload | {
        "commit": cid_of(block),
        "blocks": car({cid_of(block): block, cid_of(bad_node): bad_node}),
    }
    assert verify(forged, person.key.public).flaw is Desync.STRUCTURE


def test_an_empty_commit_needs_no_tree() -> None:
    person = busy()
    payload = person.write()
    alone = payload | {"blocks": car({payload["commit"]: blocks_of(payload["blocks"])[payload["commit"]]})}
    proven = verify(alone, person.key.public)
    assert (proven.flaw, proven.changes) == (None, ())
    assert verify(alone | {"prevData": EMPTY_TREE}, person.key.public).flaw is Desync.INVERSION


@settings(max_examples=200)
@given(st.data())
def test_no_byte_of_a_message_can_change_unseen(data: st.DataObject) -> None:
    """Whatever is flipped in the slice: it is refused, a flaw, or it was no part of what is proven."""
    person = PERSON
    payload, genuine = PAYLOAD, PROVEN
    at = data.draw(st.integers(0, len(payload["blocks"]) - 1))
    bit = data.draw(st.integers(0, 7))
    blocks = bytearray(payload["blocks"])
    blocks[at] ^= 1 << bit
    decoded = event("commit", payload | {"blocks": bytes(blocks)})
    try:
        proven = verify_commit(decoded, person.key.public, DEFAULT_LIMITS)
    except UpstreamError:
        return
    assert proven.flaw is not None or proven == genuine


PERSON = busy(records=60)
PAYLOAD = PERSON.write(Write.create(f"{POST}/zzz", {"n": 1}), Write.delete(f"{POST}/011"))
PROVEN = verify(PAYLOAD, PERSON.key.public)


def test_a_sync_gives_the_signed_head_alone() -> None:
    person = busy()
    payload = person.sync()
    proven = verify_sync(event("sync", payload), person.key.public, DEFAULT_LIMITS)
    assert (proven.head.rev, proven.head.data) == (person.repo.head.rev, person.repo.head.data)
    with pytest.raises(UpstreamError) as caught:
        verify_sync(event("sync", payload | {"rev": "3jzfcijpj2z2a"}), person.key.public, DEFAULT_LIMITS)
    assert caught.value.reason is Rejection.ENVELOPE_MISMATCH


def exported(person: Person) -> dict[bytes, bytes]:
    return blocks_of(b"".join(person.repo.export()))


def test_a_whole_export_is_a_snapshot() -> None:
    person = busy(records=300)
    blocks = exported(person)
    snapshot = verify_snapshot(person.did, person.repo.head.cid, blocks.get, person.key.public, DEFAULT_LIMITS)
    truth = {path.encode(): cid_of(block) for path, block in person.repo.records.items()}
    assert list(snapshot.records()) == sorted(truth.items())
    assert snapshot.count == 300


def test_an_export_with_any_node_missing_is_no_snapshot() -> None:
    person = busy(records=120)
    blocks = exported(person)
    records = {cid_of(block) for block in person.repo.records.values()}
    nodes = blocks.keys() - records - {person.repo.head.cid}
    assert len(nodes) > 20
    for node in nodes:
        rest = {cid: block for cid, block in blocks.items() if cid != node}
        with pytest.raises(MissingNodeError):
            verify_snapshot(person.did, person.repo.head.cid, rest.get, person.key.public, DEFAULT_LIMITS)


def test_an_export_of_somebody_else_or_by_another_key_is_refused() -> None:
    person, stranger = busy(), Person("stranger")
    blocks = exported(person)
    for did, key, reason in (
        (stranger.did, person.key.public, Rejection.ENVELOPE_MISMATCH),
        (person.did, stranger.key.public, Rejection.SIGNATURE_INVALID),
    ):
        with pytest.raises(UpstreamError) as caught:
            verify_snapshot(did, person.repo.head.cid, blocks.get, key, DEFAULT_LIMITS)
        assert caught.value.reason is reason


def test_a_commit_of_another_version_is_refused() -> None:
    person = busy()
    fields = {"did": person.did, "rev": person.repo.head.rev, "data": EMPTY_TREE, "prev": None, "version": 2}
    block = dag_cbor.encode(fields | {"sig": person.key.sign(dag_cbor.encode(fields))})
    with pytest.raises(UpstreamError) as caught:
        decode_commit(block, cid_of(block))
    assert caught.value.reason is Rejection.COMMIT_MALFORMED


@pytest.mark.parametrize("made", ["VerifiedCommit", "VerifiedSync", "VerifiedChange", "Snapshot"])
def test_verified_values_are_made_by_verify_alone(made: str) -> None:
    """A `VerifiedChange` is also what a resync makes of a proven snapshot's difference."""
    makers = {
        str(module.relative_to(INDEXER))
        for module in INDEXER.rglob("*.py")
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == made
    }
    allowed = {"sync/verify.py", "service/resync.py"} if made == "VerifiedChange" else {"sync/verify.py"}
    assert makers == allowed
