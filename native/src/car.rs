//! CAR files, version 1 (docs/protocol.md#car-files).

use std::collections::HashMap;

use crate::cbor::Reader;
use crate::cid::{as_cid, matches, Cid, CID_BYTES};

/// Bytes of the length of a section. More are not usual: four bytes are lengths up to 256 MiB.
const MAX_VARINT_BYTES: usize = 4;

/// A slice of a commit has sections of about 400 bytes. A few more of them fit without another allocation.
const USUAL_SECTION_BYTES: usize = 256;

/// Blocks of a CAR slice by CID.
pub type Blocks<'a> = HashMap<&'a Cid, &'a [u8]>;

/// Returns the root of a whole CAR file, and its blocks by CID. Each block has been compared with its CID.
///
/// `None` if the file is malformed, a block has another hash, or a CID is not of the protocol's form.
pub fn split(data: &[u8]) -> Option<(&Cid, Blocks<'_>)> {
    let (root, mut position) = usual_header(data)?;
    let mut blocks = Blocks::with_capacity(data.len() / USUAL_SECTION_BYTES);
    while position < data.len() {
        let (cid, block, end) = section(data, position)?;
        if !matches(cid, block) {
            return None;
        }
        blocks.insert(cid, block);
        position = end;
    }
    Some((root, blocks))
}

/// Returns the CID and the block of the section at `position`, and the position after it. The hash is not checked.
///
/// `None` if the data ends inside the section, its length is not in its shortest form, or its CID is not of the
/// protocol's form.
pub fn section(data: &[u8], position: usize) -> Option<(&Cid, &[u8], usize)> {
    let (size, start) = read_varint(data, position)?;
    let end = start.checked_add(size)?;
    let bytes = data.get(start..end)?;
    let cid = as_cid(bytes.get(..CID_BYTES)?)?;
    Some((cid, &bytes[CID_BYTES..], end))
}

/// Returns the root of a CAR file and the position of its first section. `None` for other than the usual header.
///
/// The usual header has 59 bytes and one root: see `indexer/atproto/car.py`.
pub fn usual_header(data: &[u8]) -> Option<(&Cid, usize)> {
    let mut reader = Reader::new(data);
    reader.expect(b"\x3a\xa2\x65roots\x81")?;
    let root = reader.link()?;
    reader.expect(b"\x67version\x01")?;
    Some((root, reader.position()))
}

/// Returns the value of a LEB128 varint that is not zero, and the position after it.
pub fn read_varint(data: &[u8], position: usize) -> Option<(usize, usize)> {
    let mut value = 0;
    for index in 0..MAX_VARINT_BYTES {
        let byte = *data.get(position + index)?;
        value |= usize::from(byte & 0x7F) << (7 * index);
        if byte < 0x80 {
            let shortest = value != 0 && (byte != 0 || index == 0);
            return shortest.then_some((value, position + index + 1));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn varints() {
        assert_eq!(read_varint(b"\x01", 0), Some((1, 1)));
        assert_eq!(read_varint(b"\xff\x01", 0), Some((255, 2)));
        for data in [&b""[..], b"\x00", b"\x80", b"\x80\x00", b"\x81\x00", b"\xff\xff\xff\xff\x01"] {
            assert_eq!(read_varint(data, 0), None, "{data:?}");
        }
    }
}
