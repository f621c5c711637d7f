"""Public keys and signatures, against the libraries `multiformats` and `cryptography`."""

import json
from base64 import b64decode
from random import Random

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from multiformats import multibase, multicodec

from indexer.atproto.crypto import (
    PublicKey,
    decode_base58btc,
    encode_base58btc,
    parse_did_key,
    parse_legacy_key,
    parse_multikey,
)
from indexer.errors import UpstreamError
from tests.fuzz.comparison import DifferenceError, accepted
from tests.fuzz.fuzz_target import FuzzTarget, MutateBytes, text_of
from tests.fuzz.outcome_counts import OutcomeCounts
from tests.fuzz.seed_files import seed_files
from tests.fuzz.seeds import accounts

CURVES: dict[str, ec.EllipticCurve] = {"k256": ec.SECP256K1(), "p256": ec.SECP256R1()}
CODECS = {"secp256k1-pub": "k256", "p256-pub": "p256"}
LEGACY_TYPES = {"k256": "EcdsaSecp256k1VerificationKey2019", "p256": "EcdsaSecp256r1VerificationKey2019"}
ORDERS = {
    "k256": 0xFFFFFFFF_FFFFFFFF_FFFFFFFF_FFFFFFFE_BAAEDCE6_AF48A03B_BFD25E8C_D0364141,
    "p256": 0xFFFFFFFF_00000000_FFFFFFFF_FFFFFFFF_BCE6FAAD_A7179E84_F3B9CAC2_FC632551,
}
SIGNATURE_FILE = "atproto-interop-tests/crypto/signature-fixtures.json"
DID_KEY = "did:key:"


class Keys(FuzzTarget):
    """Texts of keys, as did:key, as Multikey and as legacy key: those that the libraries read are accepted."""

    def __init__(self) -> None:
        self.counts = OutcomeCounts("did:key", "multikeys", "legacy keys", "refused")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return the texts of our keys and of published ones in each form."""
        keys = [owner.key.public for owner in accounts()] + [key for key, _, _ in published_signatures()]
        points = [encode_base58btc(point) for key in keys for point in (key.compressed, key.uncompressed)]
        texts = [text for key in keys for text in (key.did_key(), key.multikey())] + points
        return [random.choice(texts).encode() for _ in range(count)]

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return mutated bytes, or a text of mutated bytes of the key."""
        start, _, digits = data.rpartition(b"z")
        try:
            point = decode_base58btc("z" + digits.decode())
        except (UpstreamError, UnicodeDecodeError):
            return mutate_bytes(data)
        if random.random() < 0.4:
            return mutate_bytes(data)
        return start + encode_base58btc(mutate_bytes(point)).encode()

    def compare(self, data: bytes) -> None:
        """Parse a text in each form. Raises `DifferenceError`."""
        self.counts.executions += 1
        text = text_of(data)
        multikey, did_key = accepted(lambda: parse_multikey(text)), accepted(lambda: parse_did_key(text))
        short = text.removeprefix(DID_KEY) if text.startswith(DID_KEY) else ""
        for name, found, of in (("multikeys", multikey, text), ("did:key", did_key, short)):
            if (found and found.uncompressed) != (expected := _reference_key(of)):
                raise DifferenceError(f"{name}: {found} instead of {expected!r}")
            if found is not None and found.multikey() != of:
                raise DifferenceError(f"{text} becomes {found.multikey()}")
            self.counts.add(name, found is not None)
        legacy = [self._compare_legacy(curve, text) for curve in CURVES]
        self.counts.add("legacy keys", sum(legacy))
        self.counts.add("refused", not (multikey or did_key or any(legacy)))

    def _compare_legacy(self, curve: str, text: str) -> bool:
        """Return True if the text is a point of the curve."""
        found = accepted(lambda: parse_legacy_key(LEGACY_TYPES[curve], text))
        expected = _point(curve, _from_multibase(text))
        if (found and found.uncompressed) != expected:
            raise DifferenceError(f"{LEGACY_TYPES[curve]}: {found} instead of {expected!r}")
        return found is not None


class Signatures(FuzzTarget):
    """Signatures: one byte that selects the key, 64 bytes, and the message. Exactly the low-S ones are valid."""

    def __init__(self) -> None:
        self._owners = accounts()
        self._published = published_signatures()
        self._keys = [owner.key.public for owner in self._owners] + [key for key, _, _ in self._published]
        self.counts = OutcomeCounts("valid", "invalid", "high-S")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return published signatures, and new ones of random messages."""
        start = len(self._owners)
        made = [bytes([start + n]) + sig + message for n, (_, sig, message) in enumerate(self._published)][:count]
        while len(made) < count:
            number, message = random.randrange(len(self._owners)), random.randbytes(random.choice((0, 1, 100)))
            made.append(bytes([number]) + self._owners[number].key.sign(message) + message)
        return made

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return mutated bytes, or another number as `r` or `s`."""
        if random.random() < 0.4 or len(data) < 65:
            return mutate_bytes(data)
        order = ORDERS[self._keys[data[0] % len(self._keys)].curve]
        place = random.choice((1, 33))
        number = int.from_bytes(data[place : place + 32])
        other = random.choice(((order - number) % order, 0, 1, order // 2, order // 2 + 1, order - 1, order))
        return data[:place] + other.to_bytes(32) + data[place + 32 :]

    def compare(self, data: bytes) -> None:
        """Verify a signature. Raises `DifferenceError`."""
        self.counts.executions += 1
        key, sig, message = self._keys[(data or b"\0")[0] % len(self._keys)], data[1:65], data[65:]
        valid = _is_signature(key, sig, message)
        low = int.from_bytes(sig[32:]) <= ORDERS[key.curve] // 2
        if key.verify(sig, message) != (valid and low):
            raise DifferenceError(f"{key}: {key.verify(sig, message)} for {sig.hex()}")
        self.counts.add(("valid" if low else "high-S") if valid else "invalid")


def published_signatures() -> list[tuple[PublicKey, bytes, bytes]]:
    """Return the published signatures of 64 bytes: the key, the signature and the message."""
    cases = [case for text in seed_files(SIGNATURE_FILE) for case in json.loads(text)]
    found = [
        (parse_did_key(case["publicKeyDid"]), _decoded(case["signatureBase64"]), _decoded(case["messageBase64"]))
        for case in cases
    ]
    return [row for row in found if len(row[1]) == 64]


def _decoded(text: str) -> bytes:
    return b64decode(text + "=" * (-len(text) % 4))


def _reference_key(text: str) -> bytes | None:
    """Return the point of a Multikey; None for other texts."""
    try:
        codec, point = multicodec.unwrap(_from_multibase(text) or b"")
    except (ValueError, KeyError):
        return None
    return _point(CODECS.get(codec.name, ""), point if len(point) == 33 else None)


def _from_multibase(text: str) -> bytes | None:
    try:
        return multibase.decode(text) if text.startswith("z") and len(text) <= 200 else None
    except (ValueError, KeyError):
        return None


def _point(curve: str, point: bytes | None) -> bytes | None:
    """Return the uncompressed form of a point; None if it is not one of the curve."""
    try:
        key = ec.EllipticCurvePublicKey.from_encoded_point(CURVES[curve], point or b"")
    except (ValueError, KeyError):
        return None
    return key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)


def _is_signature(key: PublicKey, sig: bytes, message: bytes) -> bool:
    """Return True if the signature is valid, with any `s`."""
    r, s = int.from_bytes(sig[:32]), int.from_bytes(sig[32:])
    if len(sig) != 64 or not (0 < r < ORDERS[key.curve] and 0 < s < ORDERS[key.curve]):
        return False
    reference = ec.EllipticCurvePublicKey.from_encoded_point(CURVES[key.curve], key.uncompressed)
    try:
        reference.verify(encode_dss_signature(r, s), message, ec.ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return True
