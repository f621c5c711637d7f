"""Audit logs of did:plc, against the rules in their most obvious form."""

import json
from random import Random
from typing import Any

from indexer.atproto.did_document import DidDocument
from indexer.atproto.plc import did_of, verify_log
from indexer.demo import dag_cbor
from indexer.demo.plc_operations import sign, tombstone
from indexer.errors import PlcLogError
from indexer.reasons import LogFlaw
from tests.atproto.plc_logs import KEYS, Log, operation, with_marks
from tests.atproto.plc_oracle import InvalidOperationError, cid_of, verified_state
from tests.fuzz.comparison import DifferenceError
from tests.fuzz.fuzz_target import FuzzTarget, MutateBytes
from tests.fuzz.json_mutation import mutate_json
from tests.fuzz.outcome_counts import OutcomeCounts
from tests.fuzz.seed_files import seed_files

HOURS = (0, 1, 71, 72, 73)
ONLY_MUTATED = 0.3
"""Share of mutated logs that are not signed again."""
ONLY_SIGNED_AGAIN = 0.3
"""Share of logs in which only the signers change."""


class PlcLogs(FuzzTarget):
    """Audit logs in JSON: exactly those are verified that the oracle accepts, with the same last operation."""

    def __init__(self) -> None:
        self.counts = OutcomeCounts("verified", "with nullified operations", "tombstones", *LogFlaw)

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return random logs, most of them valid, published ones, and two of kinds that are rare among them."""
        rare = [json.dumps(log).encode() for log in (_recovered(), _of_another_did())]
        made = rare + list(seed_files("did-plc/**/*log_*.json"))[: count // 2]
        return made + [json.dumps(_log(random)).encode() for _ in range(count - len(made))]

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return mutated JSON, mostly with new signatures and links, so that it gets past these checks."""
        mutated = data if random.random() < ONLY_SIGNED_AGAIN else mutate_json(data, random, mutate_bytes)
        if random.random() < ONLY_MUTATED:
            return mutated
        try:
            return json.dumps(_signed_again(json.loads(mutated), random)).encode()
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
            return mutated

    def compare(self, data: bytes) -> None:
        """Verify a log. Raises `DifferenceError`."""
        self.counts.executions += 1
        try:
            log = json.loads(data)
        except (ValueError, RecursionError):
            return
        did = str(log[0].get("did")) if isinstance(log, list) and log and isinstance(log[0], dict) else ""
        expected = verified_state(did, log)
        try:
            found = verify_log(did, log, allow_http=True)
        except PlcLogError as error:
            if expected is not None:
                raise DifferenceError(f"{error} instead of {expected}") from error
            self.counts.add(error.reason)
            return
        if expected is None or (found is None) != (expected["type"] == "plc_tombstone"):
            raise DifferenceError(f"{found} instead of {expected}")
        _check_key(found, expected)
        self.counts.add("verified")
        self.counts.add("tombstones", found is None)
        self.counts.add("with nullified operations", any(entry["nullified"] for entry in log))


def _check_key(found: DidDocument | None, expected: dict[str, Any]) -> None:
    """Raise `DifferenceError` unless the key is that of the operation."""
    if found is None or found.signing_key is None:
        return
    methods = expected.get("verificationMethods", {"atproto": expected.get("signingKey")})
    if methods["atproto"] != found.signing_key.did_key():
        raise DifferenceError(f"{found.signing_key} instead of {methods}")


def _recovered() -> list[dict[str, Any]]:
    """Return a log in which the first key undoes an operation of the second one."""
    log = Log(*KEYS[:2])
    log.update(KEYS[1])
    log.update(KEYS[0], *KEYS[:2], prev=log.entries[0]["cid"])
    return log.marked()


def _of_another_did() -> list[dict[str, Any]]:
    return [entry | {"did": Log(KEYS[1]).did} for entry in Log(KEYS[0]).entries]


def _log(random: Random) -> list[dict[str, Any]]:
    """Return a log of valid operations; sometimes the last one is not valid."""
    log = Log(*random.sample(KEYS, random.randrange(1, 4)) * random.choice((1, 1, 1, 2, 4)))
    for _ in range(random.randrange(8)):
        before = list(log.entries)
        prev = random.choice([log.entries[-1]["cid"]] * 2 + [entry["cid"] for entry in log.entries])
        keys = random.sample(KEYS, random.randrange(4))
        unsigned = tombstone(prev) if random.random() < 0.2 else operation(*keys, prev=prev)
        log.append(sign(unsigned, random.choice(KEYS)), random.choice(HOURS))
        if not _is_valid(log.entries):
            if random.random() < 0.2:
                break
            log.entries = before
    return log.marked() if _is_valid(log.entries) else log.entries


def _is_valid(entries: list[dict[str, Any]]) -> bool:
    try:
        with_marks(entries)
    except InvalidOperationError:
        return False
    return True


def _signed_again(log: list[dict[str, Any]], random: Random) -> list[dict[str, Any]]:
    """Return a log whose operations have the right CIDs and links, and signatures by known keys, mostly valid ones."""
    renamed: dict[str, str] = {}
    rotation_keys = set[str]()
    for entry in log:
        unsigned = {name: value for name, value in entry["operation"].items() if name != "sig"}
        unsigned["prev"] = renamed.get(unsigned["prev"], unsigned["prev"])
        rotation_keys |= set(unsigned.get("rotationKeys", ()))
        signer = random.choice([key for key in KEYS if key.public.did_key() in rotation_keys] or KEYS)
        entry["operation"] = sign(unsigned, signer)
        renamed[entry["cid"]] = entry["cid"] = cid_of(entry["operation"])
    did = did_of(dag_cbor.encode(log[0]["operation"]))
    log = [entry | {"did": did} for entry in log]
    return with_marks(log) if _is_valid(log) else log
