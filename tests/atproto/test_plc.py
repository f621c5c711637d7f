"""The rules of did:plc. Most cases are those of the list that the specification's readers share, in its order."""

import json
from collections.abc import Callable
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.crypto import PrivateKey
from indexer.atproto.did_document import DidDocument
from indexer.atproto.plc import MAX_OPERATIONS, PlcChain, did_of, parse_operation, verify_log
from indexer.demo import dag_cbor
from indexer.demo.plc_operations import sign, tombstone
from indexer.errors import PlcLogError
from indexer.reasons import LogFlaw
from tests.atproto.plc_logs import K256_ONE, KEYS, P256_ONE, START, Log, did_keys, operation
from tests.atproto.plc_oracle import InvalidOperationError, Oracle
from tests.vectors import vectors

HIGH, MIDDLE, LOW, OTHER = KEYS
ED25519 = "did:key:z6MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2doK"
MILLISECOND = 1 / 3_600_000
"""A millisecond, in hours."""

# Signed with published test keys (secret 1); the signatures are those of RFC 6979.
GENESIS = {
    **operation(K256_ONE, P256_ONE),
    "sig": "CdqpZ0GkkJ8s57BAQUi5i4DYDFfFD1ELqNovauivS4oH2YD7ClyHMDzfqOEcwMue3nOK1gCG0r7VxeH7lUh-RQ",
}
GENESIS_CID = "bafyreiat26u7zymokxijdslekwvuqihfjseeuaaetwvzsgasrmtabnoqrm"
TOMBSTONE = {
    **tombstone(GENESIS_CID),
    "sig": "nVRimpePa7cB8i7D2ymFxoNLcBKGfQkVI486OplkejItk0RQXlo6LRbWbP3HSEasFARhKulliS694_ZmALVFiQ",
}
LEGACY = {
    "type": "create",
    "signingKey": P256_ONE.public.did_key(),
    "recoveryKey": K256_ONE.public.did_key(),
    "handle": "alice.example",
    "service": "https://pds.example",
    "prev": None,
    "sig": "gHBS--cREx_tw2zQ0sLumAPOqHoSVVQ-t_AAESDfcPFPI_ofxQJW0iTtSZxOAg0xcQzLq6wk_kt5YT8_2kDXgg",
}
DID, LEGACY_DID = "did:plc:cpl2t7hbrzk5beojmrk2wsba", "did:plc:t2conpiu5kgdinowfymabize"


def verified(log: Log) -> DidDocument | None:
    """Verify a log whose operations are all valid."""
    return verify_log(log.did, log.marked(), allow_http=False)


def flaw(log: Log) -> LogFlaw:
    """Verify a log without marks of nullified operations, which has a flaw."""
    return flaw_of(lambda: verify_log(log.did, log.entries, allow_http=False))


def flaw_of(call: Callable[[], object]) -> LogFlaw:
    with pytest.raises(PlcLogError) as error:
        call()
    return error.value.reason


def begin(did: str, first: Any) -> PlcChain:
    chain = PlcChain(did)
    chain.append(parse_operation(first), START)
    return chain


def flaw_of_genesis(first: dict[str, Any]) -> LogFlaw:
    return flaw_of(lambda: begin(did_of(dag_cbor.encode(first)), first))


def test_published_operations_are_valid() -> None:
    for first, size, did, cid in (
        (GENESIS, 362, DID, GENESIS_CID),
        (LEGACY, 209, LEGACY_DID, "bafyreie6qttl2fhkrq2dlvrodaakgjh263dly5zbx6bsxi4dngn2d4ok5u"),
    ):
        parsed = parse_operation(first)
        assert (len(parsed.signed), parsed.cid) == (size, cid)
        assert begin(did, first).head == parsed
    assert parse_operation(GENESIS).state == GENESIS
    chain = begin(DID, GENESIS)
    assert chain.append(parse_operation(TOMBSTONE), START) == []
    assert chain.head == parse_operation(TOMBSTONE)
    assert chain.head.cid == "bafyreie7aepujfbz43zwwr4un6znlxe5obusjmvssdtlhnxbkfgiautzwi"
    assert chain.head.state is None


def test_logs_give_key_host_handle_and_tombstone() -> None:
    log = Log(K256_ONE, P256_ONE)
    assert verified(log) == DidDocument(log.did, "alice.example", "https://pds.example", P256_ONE.public)
    log.update(P256_ONE, alsoKnownAs=["at://bob.example"], verificationMethods={"atproto": did_keys(LOW)[0]})
    assert verified(log) == DidDocument(log.did, "bob.example", "https://pds.example", LOW.public)
    log.end(K256_ONE)
    assert verified(log) is None


def test_legacy_operation_names_scheme_or_not() -> None:
    for handle, service in (
        ("alice.example", "https://pds.example"),
        ("at://alice.example", "pds.example"),
        ("http://alice.example", "pds.example"),
        ("https://alice.example", "https://pds.example"),
    ):
        unsigned = {key: value for key, value in LEGACY.items() if key != "sig"}
        first = sign(unsigned | {"handle": handle, "service": service}, P256_ONE)
        did = did_of(dag_cbor.encode(first))
        entry = {"did": did, "operation": first, "cid": parse_operation(first).cid, "nullified": False}
        document = verify_log(did, [entry | {"createdAt": "2022-11-17T01:07:13.996Z"}], allow_http=False)
        assert document == DidDocument(did, "alice.example", "https://pds.example", P256_ONE.public)


def test_recovery_key_of_a_legacy_operation_outranks_the_signing_key() -> None:
    """The first operation after it names the CID of the legacy form."""
    legacy = parse_operation(LEGACY)
    first = parse_operation(sign(operation(LOW, prev=legacy.cid), P256_ONE))
    second = parse_operation(sign(operation(HIGH, prev=legacy.cid), K256_ONE))
    chain = begin(LEGACY_DID, LEGACY)
    chain.append(first, START)
    assert chain.append(second, START + timedelta(hours=1)) == [first.cid]
    assert flaw_of(lambda: chain.append(first, START + timedelta(hours=2))) is LogFlaw.SIGNATURE_INVALID


@pytest.mark.parametrize(
    "did", [LEGACY_DID, DID + "a", DID[:-1], DID.upper(), DID[:-1] + "A", *(DID[:-1] + digit for digit in "0189")]
)
def test_did_is_the_hash_of_the_first_operation(did: str) -> None:
    assert flaw_of(lambda: begin(did, GENESIS)) is LogFlaw.OTHER_DID


def test_first_operation_is_signed_by_one_of_its_own_rotation_keys() -> None:
    assert flaw_of_genesis(sign(operation(LOW), P256_ONE)) is LogFlaw.SIGNATURE_INVALID  # its `verificationMethods`
    assert flaw_of_genesis(sign(operation(), LOW)) is LogFlaw.SIGNATURE_INVALID


def test_only_a_whole_state_without_predecessor_is_a_first_operation() -> None:
    assert flaw_of_genesis(TOMBSTONE) is LogFlaw.BROKEN_CHAIN
    assert flaw_of_genesis(sign(operation(LOW, prev=GENESIS_CID), LOW)) is LogFlaw.BROKEN_CHAIN


def test_legacy_operation_is_only_the_first_one() -> None:
    log = Log(K256_ONE)
    log.append(LEGACY)
    assert flaw(log) is LogFlaw.BROKEN_CHAIN


SIG = GENESIS["sig"]


@pytest.mark.parametrize(
    "sig", [SIG + "==", SIG + "\n", SIG[:-1] + "R", SIG[:-1] + "+", SIG[:-1] + "/", SIG[:-1], SIG + "A", ""]
)
def test_signature_has_one_text(sig: str) -> None:
    assert flaw_of(lambda: parse_operation(GENESIS | {"sig": sig})) is LogFlaw.SIGNATURE_INVALID


def test_last_character_of_a_signature_has_two_bits() -> None:
    for character in "AQgw":
        assert parse_operation(GENESIS | {"sig": SIG[:-1] + character}).sig[:63] == parse_operation(GENESIS).sig[:63]


@pytest.mark.parametrize("wrong", ["null", "json", "other order"])
def test_signature_of_other_bytes_is_invalid(wrong: str) -> None:
    unsigned = operation(LOW)
    encoded = {
        "null": dag_cbor.encode(unsigned | {"sig": None}),
        "json": json.dumps(unsigned).encode(),
        "other order": b"\xa6"
        + b"".join(dag_cbor.encode(name) + dag_cbor.encode(unsigned[name]) for name in sorted(unsigned)),
    }[wrong]

    class Signer(PrivateKey):
        def sign(self, message: bytes) -> bytes:
            assert message == dag_cbor.encode(unsigned)
            return super().sign(encoded)

    signed = sign(unsigned, Signer("k256", bytes(31) + b"\7"))
    assert flaw_of_genesis(signed) is LogFlaw.SIGNATURE_INVALID


def test_order_of_fields_does_not_matter() -> None:
    assert parse_operation(dict(reversed(GENESIS.items()))).block == parse_operation(GENESIS).block


@pytest.mark.parametrize("signer", KEYS[:3])
def test_any_rotation_key_of_the_operation_before_signs_an_update(signer: PrivateKey) -> None:
    log = Log(HIGH, MIDDLE, LOW)
    log.update(signer, OTHER)
    log.update(OTHER)
    assert verified(log) is not None
    log.update(signer)
    assert flaw(log) is LogFlaw.SIGNATURE_INVALID


def test_update_is_not_signed_by_a_key_that_it_introduces() -> None:
    log = Log(HIGH)
    log.update(LOW, LOW)
    assert flaw(log) is LogFlaw.SIGNATURE_INVALID


@pytest.mark.parametrize(
    ("hours", "expected"),
    [(1, None), (72, None), (72 + MILLISECOND, LogFlaw.RECOVERY_LATE), (0, LogFlaw.RECOVERY_LATE)],
)
def test_key_of_higher_priority_replaces_an_operation_within_72_hours(hours: float, expected: LogFlaw | None) -> None:
    log = Log(HIGH, LOW)
    log.update(LOW, LOW)
    log.update(HIGH, prev=log.entries[0]["cid"], hours=hours, alsoKnownAs=["at://recovered.example"])
    if expected:
        assert flaw(log) is expected
        return
    document = verified(log)
    assert document is not None
    assert document.handle == "recovered.example"
    assert [entry["nullified"] for entry in log.marked()] == [False, True, False]


@pytest.mark.parametrize("signer", [MIDDLE, LOW, OTHER])
def test_key_of_the_same_or_a_lower_priority_replaces_nothing(signer: PrivateKey) -> None:
    log = Log(HIGH, MIDDLE, LOW)
    log.update(MIDDLE)
    log.update(signer, prev=log.entries[0]["cid"])
    assert flaw(log) is LogFlaw.SIGNATURE_INVALID


@pytest.mark.parametrize("hours", [71, 73])
def test_age_of_the_first_replaced_operation_counts(hours: float) -> None:
    """Who signed the later ones does not matter, and neither does their age."""
    log = Log(HIGH, LOW)
    first = log.update(LOW)
    second = log.update(HIGH, hours=hours - 1)
    log.update(HIGH, prev=log.entries[0]["cid"])
    if hours > 72:
        assert flaw(log) is LogFlaw.RECOVERY_LATE
    else:
        assert [entry["cid"] for entry in log.marked() if entry["nullified"]] == [first, second]
        assert verified(log) is not None


@pytest.mark.parametrize(("signer", "valid"), [(HIGH, True), (MIDDLE, False), (LOW, False)])
def test_second_recovery_needs_a_key_above_that_of_the_first(signer: PrivateKey, valid: bool) -> None:
    log = Log(HIGH, MIDDLE, LOW)
    for one in (LOW, MIDDLE, signer):
        log.update(one, prev=log.entries[0]["cid"])
    if valid:
        assert verified(log) is not None
    else:
        assert flaw(log) is LogFlaw.SIGNATURE_INVALID


def test_operation_follows_only_one_in_force() -> None:
    log = Log(HIGH, LOW)
    nullified = log.update(LOW)
    log.update(HIGH, prev=log.entries[0]["cid"])
    for prev in (nullified, GENESIS_CID, "x"):
        later = deepcopy(log)
        later.update(HIGH, prev=prev)
        assert flaw(later) is LogFlaw.BROKEN_CHAIN


def test_nothing_follows_a_tombstone_but_it_can_be_replaced() -> None:
    log = Log(HIGH, LOW)
    log.end(LOW)
    later = deepcopy(log)
    later.update(HIGH, HIGH)
    assert flaw(later) is LogFlaw.BROKEN_CHAIN
    log.update(HIGH, HIGH, prev=log.entries[0]["cid"])
    assert verified(log) is not None
    final = Log(HIGH, LOW)
    final.end(HIGH)
    final.update(HIGH, HIGH, prev=final.entries[0]["cid"])
    assert flaw(final) is LogFlaw.SIGNATURE_INVALID


def test_first_index_of_a_repeated_key_counts() -> None:
    log = Log(HIGH, LOW, HIGH)
    log.update(HIGH)
    assert verified(log) is not None
    log.update(HIGH, prev=log.entries[0]["cid"])
    assert flaw(log) is LogFlaw.SIGNATURE_INVALID


def test_nothing_follows_a_state_without_rotation_keys() -> None:
    log = Log(HIGH)
    log.update(HIGH, rotationKeys=[])
    assert verified(log) is not None
    log.update(HIGH, HIGH)
    assert flaw(log) is LogFlaw.SIGNATURE_INVALID


def test_update_may_have_the_time_of_the_operation_before() -> None:
    """The directory does not compare these times; another implementation refuses equal ones."""
    log = Log(HIGH)
    log.update(HIGH, hours=0)
    assert verified(log) is not None


def test_rotation_key_that_cannot_be_parsed_invalidates_what_it_is_tried_on() -> None:
    log = Log(HIGH, rotationKeys=[*did_keys(HIGH), ED25519, *did_keys(LOW)])
    log.update(HIGH)
    assert verified(log) is not None
    log.update(LOW)
    assert flaw(log) is LogFlaw.SIGNATURE_INVALID


@pytest.mark.parametrize(
    "changes",
    [
        {"verificationMethods": {"atproto": ED25519}},
        {"verificationMethods": {}},
        {"verificationMethods": {"other": P256_ONE.public.did_key()}},
    ],
)
def test_state_without_a_usable_key_is_valid(changes: dict[str, Any]) -> None:
    log = Log(HIGH, **changes)
    assert verified(log) == DidDocument(log.did, "alice.example", "https://pds.example", None)


def test_state_without_a_usable_host_or_handle_is_valid() -> None:
    log = Log(HIGH, alsoKnownAs=["https://alice.example"], services={"atproto_pds": {"type": "Other", "endpoint": "x"}})
    assert verified(log) == DidDocument(log.did, None, None, P256_ONE.public)


def test_unknown_fields_hide_no_account() -> None:
    """Directories accepted them in operations until 2023, and in services until 2025."""
    service = {"type": "AtprotoPersonalDataServer", "endpoint": "https://pds.example", "since": {"year": 2023}}
    log = Log(HIGH, services={"atproto_pds": service}, note=[1, None, True])
    assert verified(log) == DidDocument(log.did, "alice.example", "https://pds.example", P256_ONE.public)
    log.entries[0]["operation"] = log.entries[0]["operation"] | {"note": [1, None, False]}
    assert flaw(log) is LogFlaw.INCONSISTENT, "they are part of the hash"


@pytest.mark.parametrize("first", [GENESIS, TOMBSTONE, LEGACY])
def test_value_with_another_form_is_refused(first: dict[str, Any]) -> None:
    for name in first:
        cut = {other: first[other] for other in first if other != name}
        assert flaw_of(lambda cut=cut: parse_operation(cut)) is LogFlaw.MALFORMED  # type: ignore[misc]
        assert flaw_of(lambda name=name: parse_operation(first | {name: 7})) is LogFlaw.MALFORMED  # type: ignore[misc]
    others: list[Any] = [None, [], {}, "x", {"type": []}]
    for raw in (*others, first | {"type": "other"}):
        assert flaw_of(lambda raw=raw: parse_operation(raw)) is LogFlaw.MALFORMED  # type: ignore[misc]


@pytest.mark.parametrize(
    "changes",
    [
        {"rotationKeys": [1]},
        {"alsoKnownAs": [None]},
        {"alsoKnownAs": ["\ud800"]},
        {"verificationMethods": {"atproto": 1}},
        {"services": {"atproto_pds": "https://pds.example"}},
        {"services": {"atproto_pds": {"type": "x"}}},
        {"services": {"atproto_pds": {"type": "x", "endpoint": 1}}},
    ],
)
def test_part_with_another_form_is_refused(changes: dict[str, Any]) -> None:
    assert flaw_of(lambda: parse_operation(GENESIS | changes)) is LogFlaw.MALFORMED


@pytest.mark.parametrize(
    ("changes", "valid"),
    [
        ({"alsoKnownAs": ["at://a.example"] * 20}, True),
        ({"alsoKnownAs": ["x" * 99_000]}, True),
        ({"alsoKnownAs": ["x" * 100_000]}, False),
        ({"rotationKeys": did_keys(HIGH) * 10}, True),
        ({"rotationKeys": did_keys(HIGH) * 11}, False),
    ],
)
def test_size_and_rotation_keys_of_an_operation_are_bounded(changes: dict[str, Any], valid: bool) -> None:
    """The limits that directories have today do not apply, because they have accepted larger operations."""
    log = Log(HIGH, **changes)
    if valid:
        assert verified(log) is not None
    else:
        assert flaw(log) is LogFlaw.TOO_LARGE


def test_number_of_operations_is_bounded() -> None:
    log = Log(HIGH)
    log.entries *= MAX_OPERATIONS + 1
    assert flaw(log) is LogFlaw.TOO_LARGE
    log.entries.pop()
    assert flaw(log) is LogFlaw.BROKEN_CHAIN


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"cid": GENESIS_CID}, LogFlaw.INCONSISTENT),
        ({"cid": None}, LogFlaw.INCONSISTENT),
        ({"nullified": True}, LogFlaw.INCONSISTENT),
        ({"nullified": "false"}, LogFlaw.MALFORMED),
        ({"did": DID}, LogFlaw.OTHER_DID),
        ({"createdAt": "2025-01-01T00:00:00"}, LogFlaw.MALFORMED),
        ({"createdAt": "yesterday"}, LogFlaw.MALFORMED),
        ({"createdAt": 7}, LogFlaw.MALFORMED),
        ({"operation": None}, LogFlaw.MALFORMED),
    ],
)
def test_entry_that_contradicts_its_operation_is_refused(changes: dict[str, Any], expected: LogFlaw) -> None:
    log = Log(HIGH)
    log.entries[0] |= changes
    assert flaw(log) is expected


def test_mark_that_is_missing_makes_the_log_inconsistent() -> None:
    log = Log(HIGH, LOW)
    log.update(LOW)
    log.update(HIGH, prev=log.entries[0]["cid"])
    assert flaw(log) is LogFlaw.INCONSISTENT


@pytest.mark.parametrize("log", [None, {}, [], [None], ["x"]])
def test_other_value_is_no_log(log: Any) -> None:
    assert flaw_of(lambda: verify_log(DID, log, allow_http=False)) is LogFlaw.MALFORMED


def test_times_at_the_end_of_the_calendar_are_compared() -> None:
    last = datetime.max.replace(tzinfo=UTC)
    chain = PlcChain(DID)
    chain.append(parse_operation(GENESIS), last - timedelta(hours=1))
    update = parse_operation(sign(operation(LOW, prev=GENESIS_CID), P256_ONE))
    chain.append(update, last - timedelta(minutes=1))
    recovery = parse_operation(sign(operation(HIGH, prev=GENESIS_CID), K256_ONE))
    assert chain.append(recovery, last) == [update.cid]


PUBLISHED_FLAWS = {
    "nullification_reused_key": LogFlaw.SIGNATURE_INVALID,
    "nullification_too_slow": LogFlaw.RECOVERY_LATE,
    "sig_b64_newline": LogFlaw.SIGNATURE_INVALID,
    "sig_b64_padding_bits": LogFlaw.SIGNATURE_INVALID,
    "sig_b64_padding_chars": LogFlaw.SIGNATURE_INVALID,
    "sig_der": LogFlaw.SIGNATURE_INVALID,
    "sig_k256_high_s": LogFlaw.SIGNATURE_INVALID,
    "sig_p256_high_s": LogFlaw.SIGNATURE_INVALID,
    "update_nullified": LogFlaw.BROKEN_CHAIN,
    "update_tombstoned": LogFlaw.BROKEN_CHAIN,
}


def test_published_logs_are_judged() -> None:
    paths = sorted(vectors("did-plc").rglob("*log_*.json"))
    assert len(paths) > 10
    for path in paths:
        log = json.loads(path.read_text())
        did, name = log[0]["did"], path.stem.removeprefix("log_")
        if name.startswith("invalid_"):
            found = flaw_of(lambda did=did, log=log: verify_log(did, log, allow_http=False))  # type: ignore[misc]
            assert found is PUBLISHED_FLAWS[name.removeprefix("invalid_")], name
            continue
        document = verify_log(did, log, allow_http=False)
        last = [entry["operation"] for entry in log if not entry["nullified"]][-1]
        assert (document is None) == (last["type"] == "plc_tombstone"), name
        if document is not None:
            handles = [alias.removeprefix("at://") for alias in last["alsoKnownAs"] if "." in alias]
            assert document.handle == (handles[0] if handles else None)
            assert document.pds == last["services"].get("atproto_pds", {}).get("endpoint")
            key = document.signing_key and document.signing_key.did_key()
            assert key == last["verificationMethods"].get("atproto")


@st.composite
def steps(draw: st.DrawFn) -> tuple[Any, ...]:
    """Draw who signs an operation, with which keys, after which one, and when."""
    keys = draw(st.lists(st.sampled_from(KEYS), max_size=4))
    follows = draw(st.sampled_from(("last", "last", "last", "any", "none")))
    hours = draw(st.sampled_from((0, MILLISECOND, 1, 24, 71, 72, 72 + MILLISECOND)))
    kind = draw(st.sampled_from(("update", "update", "update", "update", "tombstone", "bad key", "bad signature")))
    return draw(st.sampled_from(KEYS)), keys, follows, draw(st.integers(0, 9)), hours, kind


@given(st.lists(st.sampled_from(KEYS), min_size=1, max_size=4), st.lists(steps(), max_size=12))
def test_chain_agrees_with_the_oracle(first_keys: list[PrivateKey], drawn: list[tuple[Any, ...]]) -> None:
    log = Log(*first_keys)
    oracle, chain, cids = Oracle(log.did), PlcChain(log.did), [log.entries[0]["cid"]]
    first, now = log.entries[0]["operation"], START
    oracle.accept(first, now)
    chain.append(parse_operation(first), now)
    for signer, keys, follows, number, hours, kind in drawn:
        now += timedelta(hours=hours)
        prev = {"last": cids[-1], "any": cids[number % len(cids)], "none": None}[follows]
        unsigned = operation(*keys, prev=prev)
        if kind == "bad key":
            unsigned["rotationKeys"].insert(number % (len(keys) + 1), ED25519)
        if kind == "tombstone" and prev is not None:
            unsigned = tombstone(prev)
        signed = sign(unsigned, signer)
        if kind == "bad signature":
            signed["sig"] = signed["sig"][:-1] + "B"
        before = chain.head, oracle.nullified()
        try:
            oracle.accept(signed, now)
        except InvalidOperationError:
            flaw_of(lambda signed=signed, now=now: chain.append(parse_operation(signed), now))  # type: ignore[misc]
            assert chain.head == before[0]
            continue
        nullified = chain.append(parse_operation(signed), now)
        assert set(nullified) == oracle.nullified() - before[1]
        assert chain.head is not None
        assert chain.head.cid == oracle.accepted[-1].cid
        cids.append(chain.head.cid)


@given(st.lists(st.sampled_from(KEYS), min_size=1, max_size=4), st.lists(steps(), max_size=12))
def test_chain_from_its_bytes_judges_each_next_operation_as_the_whole_chain(
    first_keys: list[PrivateKey], drawn: list[tuple[Any, ...]]
) -> None:
    """The chain is packed after each operation. Only the reasons of refusals differ."""
    log = Log(*first_keys)
    whole, now, cids = begin(log.did, log.entries[0]["operation"]), START, [log.entries[0]["cid"]]
    part = PlcChain.from_bytes(log.did, whole.to_bytes())
    for signer, keys, follows, number, hours, kind in drawn:
        now += timedelta(hours=hours)
        prev = {"last": cids[-1], "any": cids[number % len(cids)], "none": None}[follows]
        unsigned = tombstone(prev) if kind == "tombstone" and prev is not None else operation(*keys, prev=prev)
        parsed = parse_operation(sign(unsigned, signer))
        try:
            nullified = whole.append(parsed, now)
        except PlcLogError:
            flaw_of(partial(part.append, parsed, now))
            continue
        assert part.append(parsed, now) == nullified
        part = PlcChain.from_bytes(log.did, part.to_bytes())
        assert part.accepted_at == now
        assert part.to_bytes() == whole.to_bytes()
        assert parsed.cid in part
        cids.append(parsed.cid)


def test_packed_chain_has_few_bytes() -> None:
    log = Log(K256_ONE, P256_ONE)
    chain = begin(log.did, log.entries[0]["operation"])
    assert len(chain.to_bytes()) == 42 + 2 * 33
    for hour in range(1, 300, 80):
        log.update(P256_ONE)
        chain.append(parse_operation(log.entries[-1]["operation"]), START + timedelta(hours=hour))
    assert len(chain.to_bytes()) == 42 + 2 * 33 + 42  # the last one may be replaced, and has the same keys
