"""Signatures on P-256, for `crypto`, which imports this module with the first one.

The library takes 8 MiB of memory, and few processes need it: the reference PDS makes only keys on secp256k1, and the
native core verifies nearly all signatures.
"""

from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed, decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

_INTEGER_BYTES = 32
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_PREHASHED = ec.ECDSA(Prehashed(SHA256()))


@lru_cache(maxsize=2_048)  # because the form of OpenSSL needs one to two kilobytes for each key
def _public_key(point: bytes) -> ec.EllipticCurvePublicKey:
    return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)


def verify(point: bytes, sig: bytes, digest: bytes) -> bool:
    """Return True if `sig`, 64 bytes, is a valid signature of a message with this SHA-256: in range, low-S."""
    r = int.from_bytes(sig[:_INTEGER_BYTES], "big")
    s = int.from_bytes(sig[_INTEGER_BYTES:], "big")
    if not (0 < r < _ORDER and 0 < s <= _ORDER // 2):
        return False
    try:
        _public_key(point).verify(encode_dss_signature(r, s), digest, _PREHASHED)
    except InvalidSignature:
        return False
    return True


class PrivateKey:
    """A private key of 32 bytes, for the local network and for tests."""

    __slots__ = ("_key",)

    def __init__(self, secret: bytes) -> None:
        self._key = ec.derive_private_key(int.from_bytes(secret, "big"), ec.SECP256R1())

    @property
    def point(self) -> bytes:
        """The point of its public key in the compressed form, 33 bytes."""
        return self._key.public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)

    def sign(self, digest: bytes) -> bytes:
        """Return the signature of a message with this SHA-256: 64 bytes, low-S."""
        r, s = decode_dss_signature(self._key.sign(digest, _PREHASHED))
        low_s = min(s, _ORDER - s)
        return r.to_bytes(_INTEGER_BYTES, "big") + low_s.to_bytes(_INTEGER_BYTES, "big")
