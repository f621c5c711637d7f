from hashlib import sha256

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st
from multiformats import multibase, multicodec

from indexer.atproto.crypto import Curve, PrivateKey, PublicKey, parse_did_key, parse_legacy_key, parse_multikey
from indexer.errors import UpstreamError
from indexer.reasons import Rejection

CURVES: tuple[Curve, ...] = ("k256", "p256")
ORDERS = {
    "k256": 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141,
    "p256": 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551,
}


@given(st.sampled_from(CURVES), st.binary(min_size=1, max_size=8), st.binary(max_size=200))
def test_only_the_low_s_signature_of_the_same_message_and_key_is_valid(
    curve: Curve, seed: bytes, message: bytes
) -> None:
    key = PrivateKey.from_seed(curve, seed)
    signature = key.sign(message)
    order = ORDERS[curve]
    r, s = int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:], "big")
    assert key.public.verify(signature, message)
    assert s <= order // 2
    high = signature[:32] + (order - s).to_bytes(32, "big")
    assert not key.public.verify(high, message), "high-S"
    assert not key.public.verify(encode_dss_signature(r, s), message), "DER"
    assert not key.public.verify(signature + b"\0", message)
    assert not key.public.verify(signature[:63], message)
    assert not key.public.verify(signature, message + b"\0")
    assert not PrivateKey.from_seed(curve, seed + b"x").public.verify(signature, message)


@pytest.mark.parametrize("curve", CURVES)
def test_signature_with_a_number_out_of_range_is_invalid(curve: Curve) -> None:
    key = PrivateKey.from_seed(curve, b"range")
    valid = key.sign(b"m")
    order = ORDERS[curve]
    for number in (0, order, order + 1, 2**256 - 1):
        out_of_range = number.to_bytes(32, "big")
        assert not key.public.verify(out_of_range + valid[32:], b"m")
        assert not key.public.verify(valid[:32] + out_of_range, b"m")


def signature_with(curve: Curve, s: int, message: bytes) -> tuple[PublicKey, bytes]:
    """Return a signature whose second number is `s`, and the key that makes it one."""
    order, nonce = ORDERS[curve], 12_345
    point = ec.derive_private_key(nonce, ec.SECP256K1() if curve == "k256" else ec.SECP256R1()).public_key()
    r = point.public_numbers().x % order
    digest = int.from_bytes(sha256(message).digest(), "big")
    secret = (s * nonce - digest) * pow(r, -1, order) % order
    return PrivateKey(curve, secret.to_bytes(32, "big")).public, r.to_bytes(32, "big") + s.to_bytes(32, "big")


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize(("from_half", "valid"), [(-1, True), (0, True), (1, False), (2, False)])
def test_second_number_of_a_signature_is_at_most_half_of_the_order(curve: Curve, from_half: int, valid: bool) -> None:
    key, signature = signature_with(curve, ORDERS[curve] // 2 + from_half, b"m")
    assert key.verify(signature, b"m") is valid
    key, smallest = signature_with(curve, 1, b"m")
    assert key.verify(smallest, b"m")


@pytest.mark.parametrize("curve", CURVES)
def test_multikey_and_did_key_are_parsed_to_the_same_key(curve: Curve) -> None:
    key = PrivateKey.from_seed(curve, b"forms").public
    assert parse_multikey(key.multikey()) == parse_did_key(key.did_key()) == key
    assert hash(parse_multikey(key.multikey())) == hash(key) != hash(PrivateKey.from_seed(curve, b"other").public)
    assert key.multikey().startswith("zQ3sh" if curve == "k256" else "zDna")


def uncompressed(curve: Curve) -> bytes:
    native = ec.SECP256K1() if curve == "k256" else ec.SECP256R1()
    key = ec.EllipticCurvePublicKey.from_encoded_point(native, PrivateKey.from_seed(curve, b"forms").public.compressed)
    return key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)


@given(st.sampled_from([b"\2", b"\3", b"\4"]), st.binary(min_size=32, max_size=32) | st.integers(0, 5), st.data())
def test_point_on_p256_is_what_the_library_says(form: bytes, x: bytes | int, data: st.DataObject) -> None:
    """Numbers from the prime on are no coordinates, also not if they are on the curve modulo the prime."""
    prime = 2**256 - 2**224 + 2**192 + 2**96 - 1
    point = form + (x if isinstance(x, bytes) else (prime + x).to_bytes(32, "big"))
    if form == b"\4":
        valid = PrivateKey.from_seed("p256", point).public.uncompressed
        y = data.draw(st.sampled_from([valid[33:], valid[33:], (prime - 1).to_bytes(32, "big")]))
        point = data.draw(st.sampled_from([valid, point[:33] + y, valid[:33] + y]))
    try:
        key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)
    except ValueError:
        with pytest.raises(UpstreamError):
            PublicKey("p256", point)
    else:
        expected = key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
        assert PublicKey("p256", point).uncompressed == expected


LEGACY_TYPES: dict[Curve, str] = {
    "k256": "EcdsaSecp256k1VerificationKey2019",
    "p256": "EcdsaSecp256r1VerificationKey2019",
}


@pytest.mark.parametrize("curve", CURVES)
def test_legacy_key_is_a_compressed_or_an_uncompressed_point(curve: Curve) -> None:
    point, key = uncompressed(curve), PrivateKey.from_seed(curve, b"forms").public
    for valid in (point, key.compressed):
        assert parse_legacy_key(LEGACY_TYPES[curve], multibase.encode(valid, "base58btc")) == key
    hybrid = bytes([6 | point[-1] & 1]) + point[1:]
    for invalid in (hybrid, point[1:], point + b"\0", point[:-1], b"\0", b"\x04", b"\x02" + b"\xff" * 32, b""):
        with pytest.raises(UpstreamError) as caught:
            parse_legacy_key(LEGACY_TYPES[curve], multibase.encode(invalid, "base58btc"))
        assert caught.value.reason is Rejection.NO_SIGNING_KEY
    with pytest.raises(UpstreamError):
        parse_multikey(multibase.encode(multicodec.wrap("secp256k1-pub", point), "base58btc"))


LEGACY = "zQYEBzXeuTM9UR3rfvNag6L3RNAs5pQZyYPsomTsgQhsxLdEgCrPTLgFna8yqCnxPpNT7DBk6Ym3dgPKNu86vt9GR"


def test_published_legacy_key_is_parsed() -> None:
    legacy = parse_legacy_key("EcdsaSecp256k1VerificationKey2019", LEGACY)
    assert legacy.multikey() == "zQ3shXjHeiBuRCKmM36cuYnm7YEMzhGnCmCyW92sRJ9pribSF"


NOT_KEYS = """
    z zQ3sh mQ3shXjHeiBuRCKmM36cuYnm7YEMzhGnCmCyW92sRJ9pribSF z6MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2doK
    zQ3sh0OIl zQ3shXjHeiBuRCKmM36cuYnm7YEMzhGnCmCyW92sRJ9pribSG
"""


@pytest.mark.parametrize("text", ["", "z" + "1" * 300, *NOT_KEYS.split()])
def test_text_that_is_not_a_key_is_rejected(text: str) -> None:
    for parse in (parse_multikey, lambda text: parse_did_key(f"did:key:{text}"), parse_did_key):
        with pytest.raises(UpstreamError) as caught:
            parse(text)
        assert caught.value.reason is Rejection.NO_SIGNING_KEY
    with pytest.raises(UpstreamError):
        parse_legacy_key("Ed25519VerificationKey2020", text)


@given(st.text(max_size=60))
def test_arbitrary_text_raises_no_other_error(text: str) -> None:
    for parse in (
        parse_multikey,
        parse_did_key,
        lambda text: parse_legacy_key("EcdsaSecp256k1VerificationKey2019", text),
    ):
        for candidate in (text, "z" + text):
            try:
                parse(candidate)
            except UpstreamError:
                continue
