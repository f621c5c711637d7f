//! Verify one commit: split and hash its slice, check the signature, invert its operations, convert its records.

use std::collections::HashSet;

use crate::car::{split, Blocks};
use crate::cbor::{record_json, RecordJson};
use crate::cid::{as_cid, as_dag_cbor_cid, Cid};
use crate::commit::Commit;
use crate::keys::PublicKey;
use crate::limits::Limits;
use crate::mst::{inverts, NetOp};
use crate::patterns::Patterns;

/// Bytes of JSON of even a small commit. Beyond this and `JSON_PER_BYTE`, the reference converts the records.
const MIN_JSON_BYTES: usize = 1 << 16;
/// Bytes of JSON per byte of the commit. Posts have about 1.3.
const JSON_PER_BYTE: usize = 4;
/// Items of the records of even a small commit, as `MIN_ITEMS` of `indexer/atproto/record.py`.
const MIN_ITEMS: usize = 16_384;
/// Bytes of a commit for each further item, as `BYTES_PER_ITEM` of `indexer/atproto/record.py`.
const BYTES_PER_ITEM: usize = 4;

/// An operation of a commit, as the message names it.
pub struct RepoOp<'a> {
    /// "create", "update" or "delete".
    pub action: &'a str,
    /// The path of the record.
    pub path: &'a str,
    /// The CID of the record after the operation.
    pub cid: Option<&'a [u8]>,
    /// The CID of the record before the operation.
    pub prev: Option<&'a [u8]>,
}

/// The fields of a `#commit`, and the signing key of its account.
pub struct CommitEvent<'a> {
    /// The account.
    pub did: &'a str,
    /// The rev.
    pub rev: &'a str,
    /// The CID of the commit object.
    pub commit: &'a [u8],
    /// The root of the tree before the commit; the empty tree for a first commit.
    pub prev_data: &'a [u8],
    /// The operations.
    pub ops: Vec<RepoOp<'a>>,
    /// The CAR slice.
    pub blocks: &'a [u8],
    /// The curve of the key, `k256` or `p256`.
    pub curve: &'a str,
    /// The uncompressed point of the key.
    pub point: &'a [u8],
}

/// The record that an operation wrote.
pub struct Record<'a> {
    /// The block; `None` for a delete.
    pub block: Option<&'a [u8]>,
    /// The JSON; `None` if the record is not selected or not ordinary, or an earlier operation wrote the same block.
    pub json: Option<RecordJson>,
}

/// A commit without any flaw.
pub struct VerifiedCommit<'a> {
    /// The root of the tree after the commit.
    pub data: &'a Cid,
    /// One item for each operation, in their order.
    pub records: Vec<Record<'a>>,
}

/// Returns the commit if it is without any flaw and of the usual form. Otherwise `None`: the reference decides.
pub fn verify_commit<'a>(event: &CommitEvent<'a>, patterns: &Patterns, limits: &Limits) -> Option<VerifiedCommit<'a>> {
    if event.blocks.len() > limits.commit_blocks_bytes || event.ops.len() > limits.commit_ops {
        return None;
    }
    let ops = event.ops.iter().map(net_op).collect::<Option<Vec<_>>>()?;
    let prev_data = as_dag_cbor_cid(event.prev_data)?;
    let (root, blocks) = split(event.blocks)?;
    if root != event.commit {
        return None;
    }
    let commit = Commit::decode(blocks.get(root)?)?;
    if commit.did != event.did || commit.rev != event.rev {
        return None;
    }
    if !PublicKey::parse(event.curve, event.point)?.verify(commit.sig, &commit.unsigned) {
        return None;
    }
    if !inverts(&blocks, commit.data, &ops, prev_data, limits) {
        return None;
    }
    let records = convert_records(event, &ops, &blocks, patterns, limits)?;
    Some(VerifiedCommit { data: commit.data, records })
}

/// Returns the effect of an operation of the usual form: a create without `prev`, an update from another CID, or a
/// delete.
fn net_op<'a>(op: &RepoOp<'a>) -> Option<NetOp<'a>> {
    let (old, new) = match (op.action, op.prev, op.cid) {
        ("create", None, Some(new)) => (None, Some(as_cid(new)?)),
        ("update", Some(old), Some(new)) if old != new => (Some(as_cid(old)?), Some(as_cid(new)?)),
        ("delete", Some(old), None) => (Some(as_cid(old)?), None),
        _ => return None,
    };
    Some(NetOp { key: op.path.as_bytes(), old, new })
}

/// Returns the record of each operation. `None` if a record is missing.
fn convert_records<'a>(
    event: &CommitEvent<'a>,
    ops: &[NetOp<'a>],
    blocks: &Blocks<'a>,
    patterns: &Patterns,
    limits: &Limits,
) -> Option<Vec<Record<'a>>> {
    let size = event.blocks.len();
    let mut converter = Converter {
        patterns,
        limits,
        json_left: MIN_JSON_BYTES + JSON_PER_BYTE * size,
        items_left: MIN_ITEMS + size / BYTES_PER_ITEM,
        tried: HashSet::new(),
    };
    let mut records = Vec::with_capacity(ops.len());
    for (op, event_op) in ops.iter().zip(&event.ops) {
        let Some(cid) = op.new else {
            records.push(Record { block: None, json: None });
            continue;
        };
        let block = *blocks.get(cid)?;
        records.push(Record { block: Some(block), json: converter.convert(event_op.path, cid, block) });
    }
    Some(records)
}

/// Converts the records of one commit. Its work and its memory are bounded by the size of the commit.
struct Converter<'a> {
    patterns: &'a Patterns,
    limits: &'a Limits,
    json_left: usize,
    items_left: usize,
    tried: HashSet<Cid>,
}

impl Converter<'_> {
    fn convert(&mut self, path: &str, cid: &Cid, block: &[u8]) -> Option<RecordJson> {
        let (collection, _) = path.split_once('/')?;
        if !self.patterns.matches(collection) || block.len() > self.limits.record_bytes || !self.tried.insert(*cid) {
            return None;
        }
        let max_items = self.limits.record_items.min(self.items_left);
        let converted = record_json(block, collection, max_items, self.limits.record_json_bytes.min(self.json_left))?;
        self.items_left -= converted.items;
        self.json_left -= converted.json.len();
        Some(converted)
    }
}
