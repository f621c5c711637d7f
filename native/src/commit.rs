//! Commit objects of the usual form (docs/protocol.md#commit-objects).

use memchr::memmem;

use crate::cbor::Reader;
use crate::cid::Cid;
use crate::keys::SIGNATURE_BYTES;
use crate::syntax::{is_did, is_tid};

/// Maximum size of a commit in bytes.
pub const MAX_COMMIT_BYTES: usize = 8_192;

const MAP_OF_6: u8 = 0xA6;
const SIG_KEY_AND_HEAD: &[u8] = b"\x63sig\x58\x40";
const NULL: u8 = 0xF6;

/// A decoded commit.
#[derive(Debug)]
pub struct Commit<'a> {
    /// The DID.
    pub did: &'a str,
    /// The rev, a TID.
    pub rev: &'a str,
    /// The CID of the tree's root.
    pub data: &'a Cid,
    /// The signature.
    pub sig: &'a [u8; SIGNATURE_BYTES],
    /// The bytes without the entry `sig`: the message that `sig` signs.
    pub unsigned: Vec<u8>,
}

impl<'a> Commit<'a> {
    /// Returns the commit in a block. `None` if it is malformed, or has more or fewer fields than the usual six.
    pub fn decode(block: &'a [u8]) -> Option<Self> {
        if block.len() > MAX_COMMIT_BYTES {
            return None;
        }
        let mut reader = Reader::new(block);
        reader.expect(&[MAP_OF_6])?;
        reader.expect(b"\x63did")?;
        let did = reader.text()?;
        reader.expect(b"\x63rev")?;
        let rev = reader.text()?;
        let sig_start = reader.position();
        reader.expect(SIG_KEY_AND_HEAD)?;
        let sig = reader.take(SIGNATURE_BYTES)?.try_into().ok()?;
        let sig_end = reader.position();
        reader.expect(b"\x64data")?;
        let data = reader.link()?;
        reader.expect(b"\x64prev")?;
        if block.get(reader.position()) == Some(&NULL) {
            reader.take(1)?;
        } else {
            reader.link()?;
        }
        reader.expect(b"\x67version\x03")?;
        // The bytes of the entry `sig` could occur again only after it, because DIDs and TIDs contain no "@" (0x40).
        let again = memmem::find(&block[sig_end..], SIG_KEY_AND_HEAD).is_some();
        if !reader.at_end() || again || !is_did(did) || !is_tid(rev) {
            return None;
        }
        let unsigned = [&[MAP_OF_6 - 1], &block[1..sig_start], &block[sig_end..]].concat();
        Some(Commit { did, rev, data, sig, unsigned })
    }
}
