//! Frames of the stream: the fields of an ordinary `#commit` (docs/protocol.md#frames).
//!
//! `decode_commit` returns what `indexer/sync/events.py` returns. It returns `None`, and the reference decides, for any
//! other message, for a commit with an invalid or unusual field, and for a frame that is not canonical.

use crate::cbor::Reader;
use crate::cid::Cid;
use crate::syntax::{is_did, is_tid};
use crate::verify::RepoOp;

/// The header of every `#commit` in its canonical form: `{"t": "#commit", "op": 1}`.
const COMMIT_HEADER: &[u8] = b"\xa2\x61t\x67#commit\x62op\x01";
/// The map, its two keys and its two values; `expect` does not count them.
const HEADER_ITEMS: usize = 5;
const MAX_SEQ: u64 = i64::MAX as u64;
/// The reference counts characters. A text of at most N bytes has at most N characters.
const MAX_PATH_BYTES: usize = 1_024;
const MAX_TIME_BYTES: usize = 64;
/// Levels of containers in the value of an unknown field.
const MAX_LEVELS: usize = 16;

/// The limits of `indexer/atproto/limits.py` for a frame, with the same names.
///
/// Every value that the settings allow fits into `usize` on 64-bit platforms.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct FrameLimits {
    /// The frame, in bytes.
    pub frame_bytes: usize,
    /// Items of the frame.
    pub frame_items: usize,
    /// The CAR slice, in bytes.
    pub commit_blocks_bytes: usize,
    /// Operations.
    pub commit_ops: usize,
}

/// The fields of a `#commit`, as `CommitEvent` of `indexer/sync/events.py` describes them.
#[allow(missing_docs)]
pub struct CommitFields<'a> {
    pub seq: u64,
    pub did: &'a str,
    pub commit: &'a Cid,
    pub rev: &'a str,
    pub since: Option<&'a str>,
    pub prev_data: Option<&'a Cid>,
    pub ops: Vec<RepoOp<'a>>,
    pub blocks: &'a [u8],
    pub time: &'a str,
}

/// Returns the fields of the `#commit` in a frame if all of them are valid and of the usual form, else `None`.
pub fn decode_commit<'a>(frame: &'a [u8], limits: &FrameLimits) -> Option<CommitFields<'a>> {
    if frame.len() > limits.frame_bytes {
        return None;
    }
    let mut reader = Reader::limited(frame, limits.frame_items.checked_sub(HEADER_ITEMS)?);
    reader.expect(COMMIT_HEADER)?;
    let (mut seq, mut did, mut commit, mut rev, mut ops) = (None, None, None, None, None);
    let (mut since, mut prev_data, mut blocks, mut time) = (None, None, None, None);
    let mut key = None;
    for _ in 0..reader.map()? {
        let name = reader.key(key)?;
        match name {
            "seq" => seq = Some(reader.unsigned().filter(|seq| (1..=MAX_SEQ).contains(seq))?),
            "repo" => did = Some(reader.text().filter(|did| is_did(did))?),
            "commit" => commit = Some(reader.link()?),
            "rev" => rev = Some(tid(&mut reader)?),
            "since" => since = reader.optional(tid)?,
            "prevData" => prev_data = reader.optional(Reader::link)?,
            "ops" => ops = Some(operations(&mut reader, limits)?),
            "blocks" => blocks = Some(reader.bytes().filter(|blocks| blocks.len() <= limits.commit_blocks_bytes)?),
            "time" => time = Some(reader.text().filter(|time| time.len() <= MAX_TIME_BYTES)?),
            _ => reader.skip(MAX_LEVELS)?,
        }
        key = Some(name);
    }
    let (seq, did, commit, rev, ops) = (seq?, did?, commit?, rev?, ops?);
    let fields = CommitFields { seq, did, commit, rev, since, prev_data, ops, blocks: blocks?, time: time? };
    reader.at_end().then_some(fields)
}

fn tid<'a>(reader: &mut Reader<'a>) -> Option<&'a str> {
    reader.text().filter(|text| is_tid(text))
}

fn operations<'a>(reader: &mut Reader<'a>, limits: &FrameLimits) -> Option<Vec<RepoOp<'a>>> {
    let count = usize::try_from(reader.list()?).ok().filter(|count| *count <= limits.commit_ops)?;
    (0..count).map(|_| operation(reader)).collect()
}

fn operation<'a>(reader: &mut Reader<'a>) -> Option<RepoOp<'a>> {
    let (mut action, mut path, mut cid, mut prev) = (None, None, None, None);
    let mut key = None;
    for _ in 0..reader.map()? {
        let name = reader.key(key)?;
        match name {
            "action" => action = Some(reader.text()?),
            "path" => path = Some(reader.text().filter(|path| path.len() <= MAX_PATH_BYTES)?),
            "cid" => cid = reader.optional(Reader::link)?,
            "prev" => prev = reader.optional(Reader::link)?,
            _ => reader.skip(MAX_LEVELS)?,
        }
        key = Some(name);
    }
    Some(RepoOp { action: action?, path: path?, cid: cid.map(Cid::as_slice), prev: prev.map(Cid::as_slice) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cid::cid_of;

    const LIMITS: FrameLimits =
        FrameLimits { frame_bytes: 10_000, frame_items: 100, commit_blocks_bytes: 3, commit_ops: 1 };
    const DID: &str = "did:plc:z72i7hdynmk6r22z27h6tvur";
    const REV: &str = "3lwafzkjqm25s";

    fn text(text: &str) -> Vec<u8> {
        let size = u8::try_from(text.len()).expect("a short text");
        let head = if size < 24 { vec![0x60 | size] } else { vec![0x78, size] };
        [&head, text.as_bytes()].concat()
    }

    fn link() -> Vec<u8> {
        [b"\xd8\x2a\x58\x25\x00".as_slice(), &cid_of(b"")].concat()
    }

    fn op() -> Vec<u8> {
        [b"\x81\xa3\x63cid".as_slice(), &link(), b"\x64path", &text("a.b.c/d"), b"\x66action", &text("create")].concat()
    }

    /// Returns the entries of a commit in their order.
    fn entries() -> Vec<(&'static str, Vec<u8>)> {
        vec![
            ("ops", op()),
            ("rev", text(REV)),
            ("seq", vec![0x07]),
            ("repo", text(DID)),
            ("time", text("2026-01-01T00:00:00Z")),
            ("since", vec![0xF6]),
            ("blocks", b"\x43abc".to_vec()),
            ("commit", link()),
        ]
    }

    fn frame(entries: &[(&str, Vec<u8>)]) -> Vec<u8> {
        let size = u8::try_from(entries.len()).expect("few entries");
        let entries = entries.iter().flat_map(|(name, value)| [text(name), value.clone()].concat());
        COMMIT_HEADER.iter().copied().chain([0xA0 | size]).chain(entries).collect()
    }

    #[test]
    fn a_commit_has_its_fields() {
        let frame = frame(&entries());
        let commit = decode_commit(&frame, &LIMITS).expect("a commit");
        assert_eq!((commit.seq, commit.did, commit.rev, commit.since), (7, DID, REV, None));
        assert_eq!((commit.blocks, commit.time, commit.prev_data), (&b"abc"[..], "2026-01-01T00:00:00Z", None));
        assert_eq!(commit.commit, &cid_of(b""));
        let op = &commit.ops[0];
        assert_eq!((op.action, op.path, op.cid, op.prev), ("create", "a.b.c/d", Some(&cid_of(b"")[..]), None));
    }

    #[test]
    fn a_frame_without_a_field_or_with_another_order_is_not_decoded() {
        for index in 0..entries().len() {
            let mut changed = entries();
            let (name, _) = changed.remove(index);
            assert_eq!(decode_commit(&frame(&changed), &LIMITS).is_some(), name == "since", "{name}");
            let mut swapped = entries();
            swapped.swap(index, (index + 1) % entries().len());
            assert!(decode_commit(&frame(&swapped), &LIMITS).is_none());
        }
        assert!(decode_commit(&[frame(&entries()), vec![0]].concat(), &LIMITS).is_none());
    }

    #[test]
    fn limits_are_exact() {
        let frame = frame(&entries());
        // Header, map, entries, the operation with its fields, and what is below the tags of two links.
        let items = 5 + 1 + 2 * entries().len() + 7 + 2;
        let exact = FrameLimits { frame_bytes: frame.len(), frame_items: items, ..LIMITS };
        assert!(decode_commit(&frame, &exact).is_some());
        for less in [
            FrameLimits { frame_bytes: exact.frame_bytes - 1, ..exact },
            FrameLimits { frame_items: exact.frame_items - 1, ..exact },
            FrameLimits { frame_items: 0, ..exact },
            FrameLimits { commit_blocks_bytes: 2, ..exact },
            FrameLimits { commit_ops: 0, ..exact },
        ] {
            assert!(decode_commit(&frame, &less).is_none(), "{less:?}");
        }
    }

    #[test]
    fn unknown_fields_are_skipped_if_they_are_canonical() {
        let with = |value: &[u8]| {
            let mut changed = entries();
            changed.push(("unknown", value.to_vec()));
            decode_commit(&frame(&changed), &LIMITS).is_some()
        };
        for value in [&b"\xf4"[..], b"\x20", b"\x81\x01", b"\xa2\x61a\x00\x61b\xf6", &link(), b"\x40"] {
            assert!(with(value), "{value:?}");
        }
        for value in [&b"\xf7"[..], b"\x18\x01", b"\xfb\0\0\0\0\0\0\0\0", b"\xa2\x61b\x00\x61a\x00", b"\x61\xff", b""] {
            assert!(!with(value), "{value:?}");
        }
        assert!(with(&[&[0x81; 15][..], &[0x80]].concat()));
        assert!(!with(&[&[0x81; 16][..], &[0x80]].concat()));
    }
}
