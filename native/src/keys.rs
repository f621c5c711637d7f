//! Signatures on the curves secp256k1 and P-256, as in `indexer/atproto/crypto.py` (docs/protocol.md#commit-objects).
//!
//! A signature is `r` and `s`, 32 bytes each, over the SHA-256 of the message. Only the smaller of the two possible
//! values of `s` is valid (low-S).

use ring::signature::{UnparsedPublicKey, ECDSA_P256_SHA256_FIXED};
use secp256k1::{ecdsa, Message, PublicKey as Secp256k1Key};

use crate::hash::sha256;

/// Size of a signature in bytes.
pub const SIGNATURE_BYTES: usize = 64;
/// Size of an uncompressed point in bytes.
pub const POINT_BYTES: usize = 65;

const UNCOMPRESSED: u8 = 4;
/// Half the order of P-256, rounded down: the largest valid `s`.
const P256_MAX_S: [u8; 32] = [
    0x7F, 0xFF, 0xFF, 0xFF, 0x80, 0x00, 0x00, 0x00, 0x7F, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xDE, 0x73, 0x7D,
    0x56, 0xD3, 0x8B, 0xCF, 0x42, 0x79, 0xDC, 0xE5, 0x61, 0x7E, 0x31, 0x92, 0xA8,
];

/// A public key.
pub enum PublicKey {
    /// A point of secp256k1.
    K256(Secp256k1Key),
    /// An uncompressed point of P-256. Verification checks that it is on the curve.
    P256([u8; POINT_BYTES]),
}

impl PublicKey {
    /// Returns the key of an uncompressed point (65 bytes) of the curve `k256` or `p256`, else `None`.
    pub fn parse(curve: &str, point: &[u8]) -> Option<Self> {
        let point: [u8; POINT_BYTES] = point.try_into().ok()?;
        if point[0] != UNCOMPRESSED {
            return None;
        }
        match curve {
            "k256" => Secp256k1Key::from_byte_array_uncompressed(point).ok().map(PublicKey::K256),
            "p256" => Some(PublicKey::P256(point)),
            _ => None,
        }
    }

    /// Returns `true` if `sig` is a valid signature of `message`: `r` and `s` in range, low-S.
    pub fn verify(&self, sig: &[u8; SIGNATURE_BYTES], message: &[u8]) -> bool {
        match self {
            PublicKey::K256(key) => match ecdsa::Signature::from_compact(sig) {
                // libsecp256k1 rejects high-S.
                Ok(parsed) => ecdsa::verify(&parsed, Message::from_digest(sha256(message)), key).is_ok(),
                Err(_) => false,
            },
            PublicKey::P256(point) => {
                sig[32..] <= P256_MAX_S[..]
                    && UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point).verify(message, sig).is_ok()
            }
        }
    }
}
