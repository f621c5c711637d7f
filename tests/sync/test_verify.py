from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.atproto.car import split_car
from indexer.atproto.cid import cid_of
from indexer.atproto.crypto import PrivateKey, PublicKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst import EMPTY_TREE, MissingNodeError
from indexer.demo import dag_cbor
from indexer.demo.local_repo import Write, car, car_header, car_section
from indexer.errors import UnavailableError, UpstreamError
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.sync.events import CommitEvent
from indexer.sync.export import verify_snapshot
from indexer.sync.verify import VerifiedCommit, verify_commit, verify_record, verify_sync
from tests.profiles import scaled
from tests.sync.signing_account import POST, SigningAccount, decoded_event


def blocks_of(blocks: bytes) -> dict[bytes, bytes]:
    return split_car(blocks, DEFAULT_LIMITS, max_bytes=10**7)[1]


def verify(payload: dict[str, Any], key: PublicKey) -> VerifiedCommit:
    decoded = decoded_event("commit", payload)
    assert isinstance(decoded, CommitEvent), decoded
    return verify_commit(decoded, key, DEFAULT_LIMITS)


def account_with_posts(curve: Any = "k256", records: int = 40) -> SigningAccount:
    account = SigningAccount("alice", curve)
    account.commit(*(Write.create(f"{POST}/{n:03}", {"n": n}) for n in range(records)))
    return account


@pytest.mark.parametrize("curve", ["k256", "p256"])
def test_an_authentic_commit_is_verified_with_its_changes(curve: Any) -> None:
    account = account_with_posts(curve)
    before = account.repo.head
    old = cid_of(account.repo.records[f"{POST}/007"])
    payload = account.commit(
        Write.create(f"{POST}/zzz", {"n": 1}), Write.update(f"{POST}/007", {"n": -7}), Write.delete(f"{POST}/011")
    )
    verified = verify(payload, account.key.public)
    assert (verified.flaw, verified.prev_data, verified.whole) == (None, before.data, False)
    assert (verified.head.rev, verified.head.data) == (account.repo.head.rev, account.repo.head.data)
    changes = {change.path: change for change in verified.changes}
    assert changes[f"{POST}/007".encode()].old == old
    assert changes[f"{POST}/zzz".encode()].block == account.repo.records[f"{POST}/zzz"]
    assert changes[f"{POST}/011".encode()].new is None


def test_a_first_commit_contains_the_whole_repo() -> None:
    account = SigningAccount()
    assert verify(account.first_commit(), account.key.public).whole
    assert account.repo.head.data == EMPTY_TREE


def test_two_operations_on_one_path_are_one_change() -> None:
    account = account_with_posts()
    payload = account.commit(
        Write.delete(f"{POST}/003"),
        Write.create(f"{POST}/003", {"again": 1}),
        Write.create(f"{POST}/n", {}),
        Write.delete(f"{POST}/n"),
    )
    verified = verify(payload, account.key.public)
    assert verified.flaw is None
    assert [(change.path, change.old is None) for change in verified.changes] == [(f"{POST}/003".encode(), False)]


def rejection(payload: dict[str, Any], key: PublicKey) -> Rejection:
    with pytest.raises(UpstreamError) as caught:
        verify(payload, key)
    return caught.value.reason


def test_an_error_up_to_the_signature_is_a_rejection() -> None:
    account, mallory = account_with_posts(), SigningAccount("mallory")
    payload = account.commit_post("x")
    key, commit, blocks = account.key.public, payload["commit"], payload["blocks"]
    for changes, reason in (
        ({"repo": mallory.did}, Rejection.ENVELOPE_MISMATCH),
        ({"rev": "3jzfcijpj2z2a"}, Rejection.ENVELOPE_MISMATCH),
        ({"commit": EMPTY_TREE}, Rejection.COMMIT_MISMATCH),
        ({"blocks": blocks[:-1]}, Rejection.CAR_MALFORMED),
        ({"blocks": b""}, Rejection.CAR_MALFORMED),
        ({"blocks": blocks[:-1] + bytes([blocks[-1] ^ 1])}, Rejection.BLOCK_HASH_MISMATCH),
        ({"blocks": car({commit: b"not the commit"})}, Rejection.BLOCK_HASH_MISMATCH),
        ({"blocks": car_header(commit) + car_section(cid_of(b"x"), b"x")}, Rejection.COMMIT_MISSING),
    ):
        assert rejection(payload | changes, key) is reason, changes
    for other in (mallory.key.public, PrivateKey.from_seed("p256", b"x").public):
        assert rejection(payload, other) is Rejection.SIGNATURE_INVALID


def other(cid: bytes) -> bytes:
    return cid[:-1] + bytes([cid[-1] ^ 1])


@pytest.mark.parametrize(
    ("change", "flaw", "changes"),
    [
        (lambda p: {"prevData": other(p["prevData"])}, Desync.INVERSION, 3),
        (lambda p: {"ops": p["ops"][1:]}, Desync.INVERSION, 2),
        (lambda p: {"ops": [p["ops"][0] | {"cid": other(p["ops"][0]["cid"])}, *p["ops"][1:]]}, Desync.OPS, 3),
        (lambda p: {"ops": [*p["ops"], p["ops"][0] | {"path": f"{POST}/missing"}]}, Desync.OPS, 4),
        (lambda p: {"ops": [p["ops"][0] | {"action": "delete"}, *p["ops"][1:]]}, Desync.OPS, 0),
        (lambda p: {"ops": [*p["ops"][:2], {**p["ops"][2], "prev": None}]}, Desync.LEGACY, 0),
    ],
)
def test_an_error_after_a_valid_signature_is_a_flaw(change: Any, flaw: Desync, changes: int) -> None:
    account = account_with_posts()
    payload = account.commit(
        Write.create(f"{POST}/zzz", {"n": 1}), Write.update(f"{POST}/007", {"n": -7}), Write.delete(f"{POST}/011")
    )
    changed = payload | change(payload)
    verified = verify(changed, account.key.public)
    assert verified.flaw is flaw
    assert (verified.did, verified.head, verified.first) == (account.did, account.head, False)
    assert verified.prev_data == changed["prevData"]
    assert len(verified.changes) == changes


def test_a_flaw_has_a_detail_that_names_the_operation() -> None:
    account = account_with_posts()
    payload = account.commit(Write.create(f"{POST}/zzz", {"n": 1}), Write.delete(f"{POST}/011"))
    create, delete = payload["ops"]
    blocks = blocks_of(payload["blocks"])
    head = {payload["commit"]: blocks[payload["commit"]]}
    record_missing = car(head | {cid: block for cid, block in blocks.items() if cid != create["cid"]})
    for changes, flaw, detail in (
        ({"prevData": None}, Desync.LEGACY, "no prevData"),
        ({"ops": [create, delete | {"prev": None}]}, Desync.LEGACY, f"delete of {POST}/011 without prev"),
        ({"ops": [create | {"cid": None}, delete]}, Desync.OPS, f"create of {POST}/zzz: cid is None"),
        ({"blocks": record_missing}, Desync.RECORD_MISSING, f"{POST}/zzz"),
    ):
        verified = verify(payload | changes, account.key.public)
        assert (verified.flaw, verified.detail) == (flaw, detail)
    legacy = verify(payload | {"prevData": None}, account.key.public)
    assert (legacy.prev_data, legacy.changes) == (b"", ())


def test_a_missing_block_is_a_flaw_if_it_is_needed() -> None:
    account = account_with_posts(records=200)
    payload = account.commit(Write.create(f"{POST}/zzz", {"n": 1}), Write.delete(f"{POST}/011"))
    blocks = blocks_of(payload["blocks"])
    flaws = set()
    for left_out in blocks:
        remaining = {payload["commit"]: blocks[payload["commit"]]} | blocks
        del remaining[left_out]
        if left_out == payload["commit"]:
            continue
        flaw = verify(payload | {"blocks": car(remaining)}, account.key.public).flaw
        assert flaw in {None, Desync.UNDECIDABLE, Desync.RECORD_MISSING}
        flaws.add(flaw)
        if left_out == cid_of(account.repo.records[f"{POST}/zzz"]):
            assert flaw is Desync.RECORD_MISSING
    assert Desync.UNDECIDABLE in flaws


def test_a_malformed_tree_node_under_a_valid_signature_is_a_flaw() -> None:
    account = account_with_posts(records=3)
    payload = account.commit_post("x")
    bad_node = dag_cbor.encode({"e": [], "l": cid_of(b"nowhere")})
    fields = {"did": account.did, "rev": payload["rev"], "data": cid_of(bad_node), "prev": None, "version": 3}
    block = dag_cbor.encode(fields | {"sig": account.key.sign(dag_cbor.encode(fields))})
    forged = payload | {"commit": cid_of(block), "blocks": car({cid_of(block): block, cid_of(bad_node): bad_node})}
    assert verify(forged, account.key.public).flaw is Desync.STRUCTURE


def test_a_commit_without_operations_needs_no_tree_nodes() -> None:
    account = account_with_posts()
    payload = account.commit()
    alone = payload | {"blocks": car({payload["commit"]: blocks_of(payload["blocks"])[payload["commit"]]})}
    verified = verify(alone, account.key.public)
    assert (verified.flaw, verified.changes) == (None, ())
    assert verify(alone | {"prevData": EMPTY_TREE}, account.key.public).flaw is Desync.INVERSION


ACCOUNT = account_with_posts(records=60)
PAYLOAD = ACCOUNT.commit(Write.create(f"{POST}/zzz", {"n": 1}), Write.delete(f"{POST}/011"))
VERIFIED = verify(PAYLOAD, ACCOUNT.key.public)


@settings(max_examples=scaled(200))
@given(st.data())
def test_a_flipped_bit_never_changes_the_verified_commit(data: st.DataObject) -> None:
    """The commit is rejected, has a flaw, or is the same because the bit is not used."""
    blocks = bytearray(PAYLOAD["blocks"])
    blocks[data.draw(st.integers(0, len(blocks) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    decoded = decoded_event("commit", PAYLOAD | {"blocks": bytes(blocks)})
    try:
        verified = verify_commit(decoded, ACCOUNT.key.public, DEFAULT_LIMITS)
    except UpstreamError:
        return
    assert verified.flaw is not None or verified == VERIFIED


def test_the_head_of_a_sync_is_that_of_the_signed_commit() -> None:
    account = account_with_posts()
    payload = account.sync_event()
    head = verify_sync(decoded_event("sync", payload), account.key.public, DEFAULT_LIMITS)
    assert (head.rev, head.data) == (account.repo.head.rev, account.repo.head.data)
    with pytest.raises(UpstreamError) as caught:
        verify_sync(decoded_event("sync", payload | {"rev": "3jzfcijpj2z2a"}), account.key.public, DEFAULT_LIMITS)
    assert caught.value.reason is Rejection.ENVELOPE_MISMATCH


def exported(account: SigningAccount) -> dict[bytes, bytes]:
    return blocks_of(b"".join(account.repo.export()))


def test_a_complete_export_is_a_snapshot() -> None:
    account = account_with_posts(records=300)
    blocks = exported(account)
    snapshot = verify_snapshot(account.did, account.repo.head.cid, blocks.get, account.key.public, DEFAULT_LIMITS, 0)
    expected = {path.encode(): cid_of(block) for path, block in account.repo.records.items()}
    assert list(snapshot.records()) == sorted(expected.items())
    assert snapshot.count == 300


def test_an_export_without_any_one_tree_node_is_incomplete() -> None:
    account = account_with_posts(records=120)
    blocks = exported(account)
    records = {cid_of(block) for block in account.repo.records.values()}
    nodes = blocks.keys() - records - {account.repo.head.cid}
    assert len(nodes) > 20
    for node in nodes:
        remaining = {cid: block for cid, block in blocks.items() if cid != node}
        with pytest.raises(MissingNodeError):
            verify_snapshot(account.did, account.repo.head.cid, remaining.get, account.key.public, DEFAULT_LIMITS, 0)


def test_an_export_or_a_record_of_another_account_or_signed_by_another_key_is_rejected() -> None:
    account, mallory = account_with_posts(), SigningAccount("mallory")
    blocks, path = exported(account), f"{POST}/007"
    proof = account.repo.record_proof(path)
    for did, key, reason in (
        (mallory.did, account.key.public, Rejection.ENVELOPE_MISMATCH),
        (account.did, mallory.key.public, Rejection.SIGNATURE_INVALID),
    ):
        for verify_one in (
            lambda did=did, key=key: verify_snapshot(did, account.repo.head.cid, blocks.get, key, DEFAULT_LIMITS, 0),
            lambda did=did, key=key: verify_record(did, path, proof, key, DEFAULT_LIMITS),
        ):
            with pytest.raises(UpstreamError) as caught:
                verify_one()
            assert caught.value.reason is reason


def test_a_record_with_its_proof_or_its_absence_is_verified() -> None:
    account = account_with_posts()
    for path in [f"{POST}/{rkey}" for rkey in ("000", "007", "039", "0000")] + ["a.a.a/a", "z.z.z/z"]:
        proof = account.repo.record_proof(path)
        found = verify_record(account.did, path, proof, account.key.public, DEFAULT_LIMITS)
        assert found == account.repo.records.get(path)


def test_a_proof_without_any_one_block_proves_nothing() -> None:
    account = account_with_posts(records=400)
    path = f"{POST}/007"
    blocks = blocks_of(account.repo.record_proof(path))

    def outcome(missing: bytes) -> bytes | str | None:
        sections = [car_section(cid, block) for cid, block in blocks.items() if cid != missing]
        proof = b"".join([car_header(account.repo.head.cid), *sections])
        try:
            return verify_record(account.did, path, proof, account.key.public, DEFAULT_LIMITS)
        except (UpstreamError, UnavailableError) as error:
            return error.reason

    outcomes = [outcome(cid) for cid in blocks]
    expected = {FetchFailure.EXPORT_INCOMPLETE, FetchFailure.BAD_ANSWER, Rejection.COMMIT_MISSING}
    assert set(outcomes) == expected
