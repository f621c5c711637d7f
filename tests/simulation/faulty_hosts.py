"""Wrong answers of hosts to requests for exports."""

import json
from collections.abc import Sequence
from copy import copy
from typing import Any

from aiohttp import hdrs

from indexer.atproto.crypto import PrivateKey
from indexer.atproto.syntax import tid_of
from indexer.demo.local_pds import CAR_TYPE, GET_RECORD, GET_REPO
from indexer.demo.local_repo import LocalRepo, Write
from tests.atproto.test_crypto import ORDERS
from tests.faulty_network import Fault, FaultyAccount
from tests.simulation.fault_schedule import BEGINNING, FaultyExport, HostProblem

STRANGER = PrivateKey.from_seed("k256", b"a key that no account has")
SLOW_BYTES_PER_SECOND = 400
TOO_SLOW_BYTES_PER_SECOND = 40
"""Below the minimum rate of exports, also for a small one."""
FORGED_REV = tid_of(BEGINNING + 30 * 24 * 3_600_000_000)
"""A rev after those of all worlds, and before the present."""
HEADER_AND_COMMIT = 2
"""The sections of a truncated export. With more, it might have all records that the scope selects, and be accepted."""
NOT_FOUND = json.dumps({"error": "RepoNotFound", "message": "Could not find repo"}).encode()


class HighSKey(PrivateKey):
    """The same key, whose signatures have the other, high S: valid ECDSA, but not in the form that AT Protocol demands.

    Anybody can compute them from an honest signature.
    """

    def __init__(self, honest: PrivateKey) -> None:
        self.curve = honest.curve
        self._honest = honest

    def sign(self, message: bytes) -> bytes:
        signature = self._honest.sign(message)
        high_s = ORDERS[self.curve] - int.from_bytes(signature[32:])
        return signature[:32] + high_s.to_bytes(32)


def no_single_records(did: str | None = None) -> Fault:
    """Return the fault of a host that does not send the proofs of single records, so that its exports are fetched."""
    return Fault(GET_RECORD, did, times=None, status=404)


def faulty_answer(account: FaultyAccount, fault: FaultyExport) -> Fault:
    """Return the fault of the next exports of the account."""
    answers: dict[str, dict[str, Any]] = {
        "cut": {"cut": 200},
        "truncated": {"sections": HEADER_AND_COMMIT},
        "hanging": {"hang": True},
        "slow": {"rate": SLOW_BYTES_PER_SECOND},
        "error": {"status": 500},
        "foreign signature": _serving(_signed_by_stranger(account.repo, [], account.rev)),
    }
    return Fault(GET_REPO, account.did, fault.times, **answers[fault.kind])


def wrong_answers(kind: HostProblem, accounts: Sequence[FaultyAccount]) -> list[Fault]:
    """Return the faults of a host of these accounts that answers wrongly for good; none if it does not answer."""
    match kind:
        case "dead":
            return []
        case "failing":
            return [Fault("", times=None, status=500)]
        case "hanging":
            return [Fault("", times=None, hang=True)]
        case "slow":
            return [Fault(GET_REPO, times=None, rate=TOO_SLOW_BYTES_PER_SECOND)]
        case "denying":
            return [Fault("", None, None, 400, {hdrs.CONTENT_TYPE: "application/json"}, NOT_FOUND)]
        case "cut exports":
            return [Fault(GET_REPO, times=None, sections=HEADER_AND_COMMIT)]
        case "old exports":
            exports = {account.did: b"".join(account.repo.export()) for account in accounts}
        case "forging":
            forged = [Write.create("com.example.note/forged", {"text": "forged"})]
            exports = {account.did: _signed_by_stranger(account.repo, forged, FORGED_REV) for account in accounts}
    return [Fault(GET_REPO, did, None, **_serving(export)) for did, export in exports.items()]


def _serving(export: bytes) -> dict[str, Any]:
    return {"status": 200, "headers": {hdrs.CONTENT_TYPE: CAR_TYPE}, "body": export}


def _signed_by_stranger(repo: LocalRepo, writes: Sequence[Write], rev: str) -> bytes:
    """Return an export of the repo after more writes, as a stranger would sign it."""
    foreign = copy(repo)
    foreign.write(writes, STRANGER, rev)
    return b"".join(foreign.export())
