"""Signing keys on secp256k1 and P-256; the only module that knows the curve libraries (spec §3.1, §5.4).

A signature is the 64 bytes r‖s over the SHA-256 of the message, with s in the lower half of the curve's order.
"""

from functools import lru_cache
from hashlib import sha256
from typing import Literal, Self

from coincurve import PrivateKey as Secp256k1PrivateKey
from coincurve import PublicKey as Secp256k1PublicKey
from coincurve._libsecp256k1 import ffi, lib
from coincurve.context import GLOBAL_CONTEXT
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed, decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from multiformats import multibase, multicodec

from indexer.errors import UpstreamError
from indexer.reasons import Rejection

Curve = Literal["k256", "p256"]

SIGNATURE_BYTES = 64
_CODECS: dict[str, Curve] = {"secp256k1-pub": "k256", "p256-pub": "p256"}
_CODEC_OF = {curve: codec for codec, curve in _CODECS.items()}
_LEGACY: dict[str, Curve] = {
    "EcdsaSecp256k1VerificationKey2019": "k256",
    "EcdsaSecp256r1VerificationKey2019": "p256",
}
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_KEY_TEXT_CHARACTERS = 200
_POINT_FORMS = (b"\x02", b"\x03", b"\x04")  # libsecp256k1 reads the hybrid forms 06 and 07, too
_PREHASHED = ec.ECDSA(Prehashed(SHA256()))
_K256 = GLOBAL_CONTEXT.ctx


class PublicKey:
    """A parsed key: parse once, verify often. Verifying on secp256k1 releases the interpreter's lock.

    Nothing but bytes, as hundreds of thousands are kept: 64 in libsecp256k1's own form, or a point of P-256.
    """

    __slots__ = ("_parsed", "compressed", "curve")

    def __init__(self, curve: Curve, point: bytes) -> None:
        """`point` is 33 bytes compressed or 65 uncompressed; raises `UpstreamError` if it is on no curve."""
        if not point.startswith(_POINT_FORMS):
            raise UpstreamError(Rejection.NO_SIGNING_KEY, f"a point of form {point[:1].hex()}")
        self.curve = curve
        try:
            if curve == "k256":
                key = Secp256k1PublicKey(point)
                self.compressed = key.format(compressed=True)
                self._parsed = bytes(ffi.buffer(key.public_key))
            else:
                self.compressed = _p256(point).public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
                self._parsed = self.compressed
        except (ValueError, TypeError) as error:
            raise UpstreamError(Rejection.NO_SIGNING_KEY, f"not a point of {curve}: {error}") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublicKey) and (self.curve, self.compressed) == (other.curve, other.compressed)

    def __hash__(self) -> int:
        return hash(self.compressed)

    def __repr__(self) -> str:
        return f"PublicKey({self.did_key()})"

    def verify(self, sig: bytes, message: bytes) -> bool:
        """Whether `sig` is the signature of `message`: exactly 64 bytes, low-S, r and s in range."""
        if len(sig) != SIGNATURE_BYTES:
            return False
        digest = sha256(message).digest()
        return self._verify_k256(sig, digest) if self.curve == "k256" else self._verify_p256(sig, digest)

    def _verify_k256(self, sig: bytes, digest: bytes) -> bool:
        parsed = ffi.new("secp256k1_ecdsa_signature *")
        if not lib.secp256k1_ecdsa_signature_parse_compact(_K256, parsed, sig):
            return False
        key = ffi.from_buffer("secp256k1_pubkey *", self._parsed)
        return bool(lib.secp256k1_ecdsa_verify(_K256, parsed, digest, key))  # refuses high-S itself

    def _verify_p256(self, sig: bytes, digest: bytes) -> bool:
        r, s = int.from_bytes(sig[:32], "big"), int.from_bytes(sig[32:], "big")
        if not (0 < r < _P256_ORDER and 0 < s <= _P256_ORDER // 2):
            return False
        try:
            _p256(self._parsed).verify(encode_dss_signature(r, s), digest, _PREHASHED)
        except InvalidSignature:
            return False
        return True

    def multikey(self) -> str:
        """`z` and base58btc of codec and compressed point, as in DID documents."""
        return multibase.encode(multicodec.wrap(_CODEC_OF[self.curve], self.compressed), "base58btc")

    def did_key(self) -> str:
        return f"did:key:{self.multikey()}"


@lru_cache(maxsize=2_048)
def _p256(point: bytes) -> ec.EllipticCurvePublicKey:
    """OpenSSL's form of a point, of a kilobyte or two; raises ValueError."""
    return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)


def parse_multikey(text: str) -> PublicKey:
    """A DID document's `publicKeyMultibase` of type Multikey; raises `UpstreamError`."""
    codec, point = _unwrap(_decode_multibase(text))
    if len(point) != 33:  # noqa: PLR2004
        raise UpstreamError(Rejection.NO_SIGNING_KEY, f"a point of {len(point)} bytes")
    return PublicKey(codec, point)


def parse_did_key(text: str) -> PublicKey:
    """`did:key:z…`; raises `UpstreamError`."""
    if not text.startswith("did:key:"):
        raise UpstreamError(Rejection.NO_SIGNING_KEY, "not a did:key")
    return parse_multikey(text.removeprefix("did:key:"))


def parse_legacy(type_: str, text: str) -> PublicKey:
    """The key types of old DID documents: a bare point, compressed or not; raises `UpstreamError`."""
    curve = _LEGACY.get(type_)
    if curve is None:
        raise UpstreamError(Rejection.NO_SIGNING_KEY, f"key type {type_:.60}")
    return PublicKey(curve, _decode_multibase(text))


def _decode_multibase(text: str) -> bytes:
    if not text.startswith("z") or len(text) > _KEY_TEXT_CHARACTERS:
        raise UpstreamError(Rejection.NO_SIGNING_KEY, "not base58btc")
    try:
        return bytes(multibase.decode(text))
    except (ValueError, KeyError) as error:
        raise UpstreamError(Rejection.NO_SIGNING_KEY, f"not base58btc: {error!s:.60}") from None


def _unwrap(data: bytes) -> tuple[Curve, bytes]:
    try:
        codec, point = multicodec.unwrap(data)
    except (ValueError, KeyError) as error:
        raise UpstreamError(Rejection.NO_SIGNING_KEY, f"no multicodec: {error!s:.60}") from None
    if codec.name not in _CODECS:
        raise UpstreamError(Rejection.NO_SIGNING_KEY, f"a key of codec {codec.name}")
    return _CODECS[codec.name], bytes(point)


class PrivateKey:
    """A key that signs: for the local network and for tests."""

    __slots__ = ("_key", "curve")

    def __init__(self, curve: Curve, secret: bytes) -> None:
        self.curve = curve
        self._key: Secp256k1PrivateKey | ec.EllipticCurvePrivateKey = (
            Secp256k1PrivateKey(secret)
            if curve == "k256"
            else ec.derive_private_key(int.from_bytes(secret, "big"), ec.SECP256R1())
        )

    @classmethod
    def from_seed(cls, curve: Curve, seed: bytes) -> Self:
        """The same key for the same seed."""
        return cls(curve, sha256(seed).digest())

    @property
    def public(self) -> PublicKey:
        if isinstance(self._key, Secp256k1PrivateKey):
            return PublicKey("k256", self._key.public_key.format())
        return PublicKey("p256", self._key.public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint))

    def sign(self, message: bytes) -> bytes:
        """64 bytes r‖s, low-S."""
        digest = sha256(message).digest()
        if isinstance(self._key, Secp256k1PrivateKey):
            return self._key.sign_recoverable(digest, hasher=None)[:SIGNATURE_BYTES]
        r, s = decode_dss_signature(self._key.sign(digest, _PREHASHED))
        return r.to_bytes(32, "big") + min(s, _P256_ORDER - s).to_bytes(32, "big")
