"""Keys and signatures on the curves secp256k1 and P-256 (docs/protocol.md#commit-objects).

A signature is `r` and `s`, 32 bytes each, over the SHA-256 of the message. Only the smaller of the two possible values
of `s` is valid (low-S). Only this module and `p256` use the curve libraries.
"""

from hashlib import sha256
from typing import TYPE_CHECKING, Literal, Self

from coincurve import PrivateKey as Secp256k1PrivateKey
from coincurve import PublicKey as Secp256k1PublicKey
from coincurve._libsecp256k1 import ffi, lib
from coincurve.context import GLOBAL_CONTEXT

from indexer.errors import UpstreamError
from indexer.reasons import Rejection

if TYPE_CHECKING:
    from indexer.atproto.p256 import PrivateKey as P256PrivateKey

Curve = Literal["k256", "p256"]

SIGNATURE_BYTES = 64
COMPRESSED_POINT_BYTES = 33
UNCOMPRESSED_POINT_BYTES = 65
_MAX_KEY_CHARACTERS = 200
_COORDINATE_BYTES = 32
_SECP256K1_CONTEXT = GLOBAL_CONTEXT.ctx

# The curve P-256 is y² = x³ - 3x + b modulo this prime (SEC 2, 2.4.2).
_P256_PRIME = 2**256 - 2**224 + 2**192 + 2**96 - 1
_P256_B = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B

# First byte of a point: compressed with even or odd y, or uncompressed. libsecp256k1 would also accept the hybrid forms
# 06 and 07, which the protocol does not allow.
_UNCOMPRESSED = b"\x04"
_POINT_FORMS = (b"\x02", b"\x03", _UNCOMPRESSED)

# The codes of secp256k1-pub and p256-pub as varints (https://github.com/multiformats/multicodec).
_PREFIX_OF_CURVE: dict[Curve, bytes] = {"k256": b"\xe7\x01", "p256": b"\x80\x24"}
_PREFIX_BYTES = 2
_CURVE_OF_PREFIX = {prefix: curve for curve, prefix in _PREFIX_OF_CURVE.items()}
_CURVE_OF_LEGACY_TYPE: dict[str, Curve] = {
    "EcdsaSecp256k1VerificationKey2019": "k256",
    "EcdsaSecp256r1VerificationKey2019": "p256",
}

# base58btc, in which DID documents write keys. The library `multiformats` does the same in 30 times the time. The first
# character stands for a byte of zero at the start.
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BASE58_VALUES = {character: value for value, character in enumerate(_BASE58)}


class PublicKey:
    """A public key, parsed once for many verifications. Verification on secp256k1 releases the GIL.

    It contains only bytes, because the identity cache holds hundreds of thousands of keys: 64 bytes in the form of
    libsecp256k1, or an uncompressed point of P-256.

    Attributes:
        uncompressed: The point in its uncompressed form, 65 bytes: the form that other programs parse fastest.
    """

    __slots__ = ("_parsed", "curve", "uncompressed")

    def __init__(self, curve: Curve, point: bytes) -> None:
        """Parse a point of 33 bytes (compressed) or 65 bytes (uncompressed).

        Raises:
            UpstreamError: With NO_SIGNING_KEY, if this is not a point of the curve.
        """
        if not point.startswith(_POINT_FORMS):
            raise UpstreamError(Rejection.NO_SIGNING_KEY, f"a point of form {point[:1].hex()}")
        self.curve = curve
        try:
            if curve == "k256":
                key = Secp256k1PublicKey(point)
                self.uncompressed = key.format(compressed=False)
                self._parsed = bytes(ffi.buffer(key.public_key))
            else:
                self.uncompressed = self._parsed = _p256_uncompressed(point)
        except (ValueError, TypeError) as error:
            raise UpstreamError(Rejection.NO_SIGNING_KEY, f"not a point of {curve}: {error}") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublicKey) and (self.curve, self.uncompressed) == (other.curve, other.uncompressed)

    def __hash__(self) -> int:
        return hash(self.uncompressed)

    def __repr__(self) -> str:
        return f"PublicKey({self.did_key()})"

    def verify(self, sig: bytes, message: bytes) -> bool:
        """Return True if `sig` is a valid signature of `message`: 64 bytes, `r` and `s` in range, low-S."""
        if len(sig) != SIGNATURE_BYTES:
            return False
        digest = sha256(message).digest()
        if self.curve == "k256":
            return self._verify_k256(sig, digest)
        from indexer.atproto import p256  # noqa: PLC0415 - loads cryptography, which few processes need

        return p256.verify(self._parsed, sig, digest)

    def _verify_k256(self, sig: bytes, digest: bytes) -> bool:
        parsed = ffi.new("secp256k1_ecdsa_signature *")
        if not lib.secp256k1_ecdsa_signature_parse_compact(_SECP256K1_CONTEXT, parsed, sig):
            return False
        key = ffi.from_buffer("secp256k1_pubkey *", self._parsed)
        return bool(lib.secp256k1_ecdsa_verify(_SECP256K1_CONTEXT, parsed, digest, key))  # rejects high-S

    @property
    def compressed(self) -> bytes:
        """The point in its compressed form, 33 bytes: whether y is odd, and x."""
        return (b"\x03" if self.uncompressed[-1] & 1 else b"\x02") + self.uncompressed[1:COMPRESSED_POINT_BYTES]

    def multikey(self) -> str:
        """Return the key as in a Multikey of a DID document: `z` and base58btc of codec and compressed point."""
        return encode_base58btc(_PREFIX_OF_CURVE[self.curve] + self.compressed)

    def did_key(self) -> str:
        """Return the key as `did:key:z…`."""
        return f"did:key:{self.multikey()}"


def _p256_uncompressed(point: bytes) -> bytes:
    """Return a point of P-256 in its uncompressed form.

    Raises:
        ValueError: This is not a point of P-256.
    """
    if len(point) != (UNCOMPRESSED_POINT_BYTES if point[:1] == _UNCOMPRESSED else COMPRESSED_POINT_BYTES):
        raise ValueError(f"{len(point)} bytes")
    x, y = int.from_bytes(point[1:COMPRESSED_POINT_BYTES]), int.from_bytes(point[COMPRESSED_POINT_BYTES:])
    square = (x**3 - 3 * x + _P256_B) % _P256_PRIME
    if point[:1] != _UNCOMPRESSED:
        root = pow(square, (_P256_PRIME + 1) // 4, _P256_PRIME)
        y = root if root & 1 == point[0] & 1 else _P256_PRIME - root
    if max(x, y) >= _P256_PRIME or y * y % _P256_PRIME != square:
        raise ValueError("not on the curve")
    return _UNCOMPRESSED + x.to_bytes(_COORDINATE_BYTES) + y.to_bytes(_COORDINATE_BYTES)


def parse_multikey(text: str) -> PublicKey:
    """Return the key of a `publicKeyMultibase` of type Multikey (docs/protocol.md#identity).

    Raises:
        UpstreamError: With NO_SIGNING_KEY, if this is not a key on one of the two curves.
    """
    data = decode_base58btc(text)
    curve, point = _CURVE_OF_PREFIX.get(data[:_PREFIX_BYTES]), data[_PREFIX_BYTES:]
    if curve is None:
        raise UpstreamError(Rejection.NO_SIGNING_KEY, f"the multicodec prefix {data[:_PREFIX_BYTES].hex()}")
    if len(point) != COMPRESSED_POINT_BYTES:
        raise UpstreamError(Rejection.NO_SIGNING_KEY, f"a point of {len(point)} bytes")
    return PublicKey(curve, point)


def parse_did_key(text: str) -> PublicKey:
    """Return the key of a `did:key:z…`.

    Raises:
        UpstreamError: With NO_SIGNING_KEY, if this is not a key on one of the two curves.
    """
    if not text.startswith("did:key:"):
        raise UpstreamError(Rejection.NO_SIGNING_KEY, "not a did:key")
    return parse_multikey(text.removeprefix("did:key:"))


def parse_legacy_key(type_: str, text: str) -> PublicKey:
    """Return the key of a `publicKeyMultibase` of a legacy type: a point without codec, compressed or not.

    Raises:
        UpstreamError: With NO_SIGNING_KEY, if the type is unknown or this is not a point of its curve.
    """
    curve = _CURVE_OF_LEGACY_TYPE.get(type_)
    if curve is None:
        raise UpstreamError(Rejection.NO_SIGNING_KEY, f"key type {type_:.60}")
    return PublicKey(curve, decode_base58btc(text))


def decode_base58btc(text: str) -> bytes:
    """Return the bytes that a multibase text encodes: `z` and base58btc. It has at most 200 characters.

    Raises:
        UpstreamError: With NO_SIGNING_KEY, if it is another text.
    """
    digits = text[1:]
    if not text.startswith("z") or len(text) > _MAX_KEY_CHARACTERS or not set(digits) <= _BASE58_VALUES.keys():
        raise UpstreamError(Rejection.NO_SIGNING_KEY, "not base58btc")
    number = 0
    for character in digits:
        number = number * len(_BASE58) + _BASE58_VALUES[character]
    zeros = len(digits) - len(digits.lstrip(_BASE58[0]))
    return bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8)


def encode_base58btc(data: bytes) -> str:
    """Return the multibase text that encodes the bytes. The time grows with the square of their length."""
    number = int.from_bytes(data)
    digits = []
    while number:
        number, value = divmod(number, len(_BASE58))
        digits.append(_BASE58[value])
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "z" + _BASE58[0] * zeros + "".join(reversed(digits))


class PrivateKey:
    """A private key, for the local network and for tests."""

    __slots__ = ("_key", "curve")

    def __init__(self, curve: Curve, secret: bytes) -> None:
        self.curve = curve
        self._key: Secp256k1PrivateKey | P256PrivateKey
        if curve == "k256":
            self._key = Secp256k1PrivateKey(secret)
        else:
            from indexer.atproto import p256  # noqa: PLC0415 - as above

            self._key = p256.PrivateKey(secret)

    @classmethod
    def from_seed(cls, curve: Curve, seed: bytes) -> Self:
        """Return a key that depends only on the seed."""
        return cls(curve, sha256(seed).digest())

    @property
    def public(self) -> PublicKey:
        """The public key of this key."""
        if isinstance(self._key, Secp256k1PrivateKey):
            return PublicKey("k256", self._key.public_key.format())
        return PublicKey("p256", self._key.point)

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message: 64 bytes, low-S."""
        digest = sha256(message).digest()
        if isinstance(self._key, Secp256k1PrivateKey):
            return self._key.sign_recoverable(digest, hasher=None)[:SIGNATURE_BYTES]
        return self._key.sign(digest)
