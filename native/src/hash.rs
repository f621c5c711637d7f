//! SHA-256.

use ring::digest::{digest, SHA256};

/// Size of a SHA-256 digest in bytes.
pub const DIGEST_BYTES: usize = 32;

/// Returns the SHA-256 of `data`.
pub fn sha256(data: &[u8]) -> [u8; DIGEST_BYTES] {
    let mut result = [0; DIGEST_BYTES];
    result.copy_from_slice(digest(&SHA256, data).as_ref());
    result
}
