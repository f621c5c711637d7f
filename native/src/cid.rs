//! CIDs of the protocol's form: CIDv1 with SHA-256 and codec dag-cbor or raw (docs/protocol.md#car-files).
//!
//! Links in records may have any CIDv1 form. Objects with such links are left to the reference.

use crate::hash::{sha256, DIGEST_BYTES};

/// Size of a CID of the protocol in bytes.
pub const CID_BYTES: usize = PREFIX_BYTES + DIGEST_BYTES;
/// First bytes of the CID of a DAG-CBOR block. The SHA-256 of the block follows.
pub const DAG_CBOR: [u8; PREFIX_BYTES] = [0x01, 0x71, 0x12, 0x20];
/// First bytes of the CID of a raw block. The SHA-256 of the block follows.
pub const RAW: [u8; PREFIX_BYTES] = [0x01, 0x55, 0x12, 0x20];

const PREFIX_BYTES: usize = 4;
const BASE32: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";

/// The bytes of a CID of the protocol's form.
pub type Cid = [u8; CID_BYTES];

/// Returns the CID of a DAG-CBOR block.
pub fn cid_of(block: &[u8]) -> Cid {
    let mut cid = [0; CID_BYTES];
    cid[..PREFIX_BYTES].copy_from_slice(&DAG_CBOR);
    cid[PREFIX_BYTES..].copy_from_slice(&sha256(block));
    cid
}

/// Returns the CID if the bytes are one of the protocol's form, else `None`.
pub fn as_cid(data: &[u8]) -> Option<&Cid> {
    let cid: &Cid = data.try_into().ok()?;
    (cid.starts_with(&DAG_CBOR) || cid.starts_with(&RAW)).then_some(cid)
}

/// Returns the CID if the bytes are one of a DAG-CBOR block, else `None`.
pub fn as_dag_cbor_cid(data: &[u8]) -> Option<&Cid> {
    let cid: &Cid = data.try_into().ok()?;
    cid.starts_with(&DAG_CBOR).then_some(cid)
}

/// Returns `true` if the block has this CID.
pub fn matches(cid: &Cid, block: &[u8]) -> bool {
    cid[PREFIX_BYTES..] == sha256(block)
}

/// Appends the text form of a CID: `b` and lower-case base32 without padding.
pub fn write_text(cid: &Cid, out: &mut Vec<u8>) {
    out.push(b'b');
    let (mut bits, mut size) = (0_u32, 0);
    for byte in cid {
        bits = (bits << 8 | u32::from(*byte)) & 0xFFF;
        size += 8;
        while size >= 5 {
            size -= 5;
            out.push(BASE32[(bits >> size & 31) as usize]);
        }
    }
    if size > 0 {
        out.push(BASE32[(bits << (5 - size) & 31) as usize]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_known_cid() {
        // The empty tree of the AT Protocol.
        let mut text = Vec::new();
        write_text(&cid_of(b"\xa2\x61e\x80\x61l\xf6"), &mut text);
        assert_eq!(text, b"bafyreie5737gdxlw5i64vzichcalba3z2v5n6icifvx5xytvske7mr3hpm");
    }

    #[test]
    fn other_forms_are_not_cids() {
        let cid = cid_of(b"");
        assert_eq!(as_cid(&cid), Some(&cid));
        assert_eq!(as_cid(&cid[..35]), None);
        assert_eq!(as_cid(&[0; 36]), None);
    }
}
