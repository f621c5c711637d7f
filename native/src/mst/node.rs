//! Nodes of the Merkle search tree, in their only valid encoding (docs/protocol.md#merkle-search-tree).
//!
//! `indexer/atproto/mst.py` describes the fields. A node with a record whose CID is not of the protocol's form is left
//! to the reference. The bytes in hexadecimal:
//!
//! ```text
//! A2                                map of 2 fields
//!   61 65  80+n | 98 nn | 99 nn nn    "e": list of n entries
//!     A4                                map of 4 fields
//!       61 6B  40+n | 58 nn | 59 nn nn    "k": byte string of n bytes, the end of the key
//!       <n bytes>
//!       61 70  00+n | 18 nn | 19 nn nn    "p": the key begins with n bytes of the previous key
//!       61 74  F6 | <link>                "t": null or link, the subtree after the key
//!       61 76  <link>                     "v": link, the record
//!   61 6C  F6 | <link>                "l": null or link, the subtree before the first key
//! ```
//!
//! Of the forms for n, only the shortest one is valid. A link is `D8 2A 58 25 00` and the 36 bytes of the CID.

use crate::cbor::{major, Reader};
use crate::cid::{as_dag_cbor_cid, cid_of, Cid, CID_BYTES};
use crate::hash::sha256;
use crate::limits::Limits;

/// Height of a key whose SHA-256 is zero.
pub const MAX_HEIGHT: usize = 128;
/// Maximum size of a key in bytes.
pub const MAX_KEY_BYTES: usize = 1_024;
/// Maximum number of entries in a node that is written. Its head then has two bytes of argument.
pub const MAX_NODE_ENTRIES: usize = 0xFFFF;
/// The block of the empty tree.
pub const EMPTY_NODE: &[u8] = b"\xa2\x61e\x80\x61l\xf6";

const NODE_START: &[u8] = b"\xa2\x61e";
const ENTRY_START: &[u8] = b"\xa4\x61k";
const NULL: u8 = 0xF6;
const LINK_START: &[u8] = b"\xd8\x2a\x58\x25\x00"; // the 36 bytes of a CID follow

/// Returns the CID of the empty tree.
pub fn empty_tree() -> Cid {
    cid_of(EMPTY_NODE)
}

/// An entry of a node. Positions are in the block, except those of the key.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// The CID of the record.
    pub value: &'a Cid,
    /// The CID of the subtree after the key.
    pub tree: Option<&'a Cid>,
    /// Position of the first byte of the entry.
    pub start: usize,
    /// Position of its field "t".
    pub tree_field: usize,
    key: (usize, usize),
}

/// Entries of the largest node that `indexer/atproto/mst.py` decodes: their number has at most two bytes.
const MAX_ENTRIES: usize = 0xFFFF;
/// Bytes of the smallest entry: a key of one byte, and no subtree.
const MIN_ENTRY_BYTES: usize = 54;

/// A decoded node, which is canonical.
#[derive(Debug)]
pub struct Node<'a> {
    /// The block.
    pub block: &'a [u8],
    /// The CID of the subtree before the first key.
    pub left: Option<&'a Cid>,
    /// The height of the keys; `None` without keys.
    pub height: Option<usize>,
    /// The entries, by key.
    pub entries: Vec<Entry<'a>>,
    keys: Vec<u8>,
}

impl<'a> Node<'a> {
    /// Returns the node in a block. `None` if it is not canonical, or has more entries than `limits.node_entries`.
    ///
    /// A node without entries is returned. `belongs_on` and `root_layer` check whether it is allowed where it is.
    pub fn decode(block: &'a [u8], limits: &Limits) -> Option<Self> {
        let mut reader = Reader::new(block);
        reader.expect(NODE_START)?;
        let (major::ARRAY, count) = reader.head()? else { return None };
        let count = usize::try_from(count).ok().filter(|count| *count <= limits.node_entries.min(MAX_ENTRIES))?;
        let entries = Vec::with_capacity(count.min(block.len() / MIN_ENTRY_BYTES));
        let keys = Vec::with_capacity(block.len() / 2); // enough for usual keys
        let mut node = Node { block, left: None, height: None, entries, keys };
        for _ in 0..count {
            node.decode_entry(&mut reader)?;
        }
        reader.expect(b"\x61l")?;
        node.left = tree_link(&mut reader)?;
        if !reader.at_end() {
            return None;
        }
        node.check_heights()?;
        Some(node)
    }

    fn decode_entry(&mut self, reader: &mut Reader<'a>) -> Option<()> {
        let start = reader.position();
        reader.expect(ENTRY_START)?;
        let suffix = reader.bytes()?;
        reader.expect(b"\x61p")?;
        let (major::UNSIGNED, shared) = reader.head()? else { return None };
        let shared = usize::try_from(shared).ok()?;
        let (first, last) = self.entries.last().map_or((0, 0), |entry| entry.key);
        let previous = &self.keys[first..last];
        // A key shares exactly `shared` bytes with the previous key, and is above it, if the next byte is greater.
        let next = *suffix.first()?;
        let follows = shared == previous.len() || previous.get(shared).is_some_and(|byte| next > *byte);
        if !follows || shared + suffix.len() > MAX_KEY_BYTES {
            return None;
        }
        let key_start = self.keys.len();
        self.keys.extend_from_within(first..first + shared);
        self.keys.extend_from_slice(suffix);
        let tree_field = reader.position();
        reader.expect(b"\x61t")?;
        let tree = tree_link(reader)?;
        reader.expect(b"\x61v")?;
        let value = reader.link()?;
        self.entries.push(Entry { value, tree, start, tree_field, key: (key_start, self.keys.len()) });
        Some(())
    }

    fn check_heights(&mut self) -> Option<()> {
        if self.entries.is_empty() {
            return Some(());
        }
        let height = key_height(self.key(0));
        let same = (1..self.entries.len()).all(|index| key_height(self.key(index)) == height);
        let subtrees = self.left.is_some() || self.entries.iter().any(|entry| entry.tree.is_some());
        if !same || (height == 0 && subtrees) {
            return None;
        }
        self.height = Some(height);
        Some(())
    }

    /// Returns a key.
    pub fn key(&self, index: usize) -> &[u8] {
        let (start, end) = self.entries[index].key;
        &self.keys[start..end]
    }

    /// Returns the index of the first key that is not below `key`.
    pub fn position(&self, key: &[u8]) -> usize {
        self.entries.partition_point(|entry| &self.keys[entry.key.0..entry.key.1] < key)
    }

    /// Returns the CID of the subtree before the entry at `index`; with the number of entries, after the last one.
    pub fn subtree_before(&self, index: usize) -> Option<&'a Cid> {
        match index.checked_sub(1) {
            None => self.left,
            Some(before) => self.entries[before].tree,
        }
    }

    /// Returns the layer of a root. `Some(None)` is the empty tree; `None` if the node cannot be a root.
    pub fn root_layer(&self, limits: &Limits) -> Option<Option<usize>> {
        match self.height {
            None if self.left.is_some() => None,
            Some(height) if height > limits.tree_depth => None,
            height => Some(height),
        }
    }

    /// Returns `true` if a node other than the root belongs on `layer`.
    pub fn belongs_on(&self, layer: usize) -> bool {
        match self.height {
            None => self.left.is_some() && layer > 0,
            Some(height) => height == layer,
        }
    }
}

/// Returns the layer that a key belongs to: half the leading zero bits of its SHA-256, rounded down.
pub fn key_height(key: &[u8]) -> usize {
    let mut zeros = 0;
    for byte in sha256(key) {
        zeros += byte.leading_zeros() as usize;
        if byte != 0 {
            break;
        }
    }
    zeros / 2
}

/// Reads null, or a link to a node.
#[allow(clippy::option_option)]
fn tree_link<'a>(reader: &mut Reader<'a>) -> Option<Option<&'a Cid>> {
    let first = reader.take(1)?;
    if first == [NULL] {
        return Some(None);
    }
    if first != &LINK_START[..1] {
        return None;
    }
    reader.expect(&LINK_START[1..])?;
    Some(Some(as_dag_cbor_cid(reader.take(CID_BYTES)?)?))
}

/// Appends the fields "k" and "p" of an entry. The previous key is empty for the first entry of a node.
pub fn write_key_fields(previous: &[u8], key: &[u8], out: &mut Vec<u8>) {
    let shared = previous.iter().zip(key).take_while(|(left, right)| left == right).count();
    out.extend_from_slice(ENTRY_START);
    write_head(major::BYTES, key.len() - shared, out);
    out.extend_from_slice(&key[shared..]);
    out.extend_from_slice(b"\x61p");
    write_head(major::UNSIGNED, shared, out);
}

/// Appends the fields "t" and "v" of an entry.
pub fn write_links(tree: Option<&Cid>, value: &Cid, out: &mut Vec<u8>) {
    out.extend_from_slice(b"\x61t");
    write_link(tree, out);
    out.extend_from_slice(b"\x61v");
    write_link(Some(value), out);
}

/// Returns the block of a node from its encoded entries.
pub fn assemble(count: usize, entries: &[u8], left: Option<&Cid>) -> Vec<u8> {
    let mut block = Vec::with_capacity(entries.len() + 64);
    block.extend_from_slice(NODE_START);
    write_head(major::ARRAY, count, &mut block);
    block.extend_from_slice(entries);
    block.extend_from_slice(b"\x61l");
    write_link(left, &mut block);
    block
}

fn write_link(cid: Option<&Cid>, out: &mut Vec<u8>) {
    match cid {
        None => out.push(NULL),
        Some(cid) => {
            out.extend_from_slice(LINK_START);
            out.extend_from_slice(cid);
        }
    }
}

/// Appends a head with its argument in the shortest form.
fn write_head(major: u8, argument: usize, out: &mut Vec<u8>) {
    let major = major << 5;
    let bytes = (argument as u64).to_be_bytes();
    match argument {
        0..=23 => out.push(major | bytes[7]),
        24..=0xFF => out.extend_from_slice(&[major | 24, bytes[7]]),
        0x100..=0xFFFF => {
            out.push(major | 25);
            out.extend_from_slice(&bytes[6..]);
        }
        _ => {
            out.push(major | 26);
            out.extend_from_slice(&bytes[4..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heights_of_the_specification() {
        // https://atproto.com/specs/repository#mst-structure
        assert_eq!(key_height(b"2653ae71"), 0);
        assert_eq!(key_height(b"blue"), 1);
        assert_eq!(key_height(b"app.bsky.feed.post/454397e440ec"), 4);
        assert_eq!(key_height(b"app.bsky.feed.post/9adeb165882c"), 8);
    }
}
