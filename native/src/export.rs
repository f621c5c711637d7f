//! One export: the proof of its signature and of its tree, and its records in path order (docs/protocol.md#exports).
//!
//! Everything here is about exports without a flaw. Of any other one, `prove` returns `None`, and the reference decides
//! with its reason (`indexer/sync/verify.py`). Records that are not ordinary are left to the reference, too
//! (`indexer/sync/changes.py`).

use std::collections::{HashSet, VecDeque};
use std::io;

use crate::cbor::{record_json, Shape};
use crate::cid::Cid;
use crate::commit::Commit;
use crate::copy_rows::{RecordRows, Repo};
use crate::keys::PublicKey;
use crate::limits::Limits;
use crate::mst::node::Node;
use crate::path::split_path;
use crate::patterns::Patterns;
use crate::spool::Spool;

/// Records up to this size spend nothing of the item budget.
const UNCOUNTED_BYTES: usize = 1_024;
/// What a change counts besides its path and its value (`RecordChange.size`).
const CHANGE_BYTES: u64 = 200;
/// Bytes of the longest character in UTF-8.
const MAX_CHARACTER_BYTES: u64 = 4;

/// Why a walk ended before the end of the tree.
#[derive(Debug)]
pub enum Stop {
    /// The reference decides.
    Unusual,
    /// The file could not be read.
    Failed(io::Error),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

/// What a verified export proves.
pub struct Proof {
    /// The rev of its commit.
    pub rev: String,
    /// The CID of the root of its tree.
    pub data: Cid,
    /// The number of its records.
    pub count: u64,
}

/// Verifies the commit `root` of `did`, and its whole tree.
pub fn prove(spool: &mut Spool, root: &[u8], did: &str, key: &PublicKey, limits: Limits) -> Result<Proof, Stop> {
    let mut block = Vec::new();
    if !spool.block(root, &mut block)? {
        return Err(Stop::Unusual);
    }
    let commit = Commit::decode(&block).ok_or(Stop::Unusual)?;
    if commit.did != did || !key.verify(commit.sig, &commit.unsigned) {
        return Err(Stop::Unusual);
    }
    let mut walk = Walk::new(*commit.data, limits);
    let mut count = 0;
    while walk.next(spool)?.is_some() {
        count += 1;
    }
    Ok(Proof { rev: commit.rev.to_owned(), data: *commit.data, count })
}

/// A path and the CID of its record.
pub type Leaf = (Vec<u8>, Cid);

/// A walk through a whole tree, in path order. It checks every node, and that the keys ascend over the whole tree.
///
/// Since the keys ascend, every subtree is between the keys beside it, and no subtree occurs twice.
pub struct Walk {
    limits: Limits,
    /// Taken from the end.
    steps: Vec<Step>,
    last_key: Vec<u8>,
    block: Vec<u8>,
}

enum Step {
    Root(Cid),
    Tree(Cid, usize),
    Record(Leaf),
}

impl Walk {
    /// Creates a walk from a root.
    pub fn new(root: Cid, limits: Limits) -> Self {
        Self { limits, steps: vec![Step::Root(root)], last_key: Vec::new(), block: Vec::new() }
    }

    /// Returns the next record; `None` at the end. The tree is proven at the end, and not before.
    pub fn next(&mut self, spool: &mut Spool) -> Result<Option<Leaf>, Stop> {
        while let Some(step) = self.steps.pop() {
            match step {
                Step::Record(leaf) => {
                    if leaf.0 <= self.last_key {
                        return Err(Stop::Unusual);
                    }
                    self.last_key.clone_from(&leaf.0);
                    return Ok(Some(leaf));
                }
                Step::Tree(cid, layer) => self.enter(&cid, Some(layer), spool)?,
                Step::Root(cid) => self.enter(&cid, None, spool)?,
            }
        }
        Ok(None)
    }

    /// Adds the steps of a node on `layer`; `None`: it is the root. A node of layer 0 has no subtrees.
    fn enter(&mut self, cid: &Cid, layer: Option<usize>, spool: &mut Spool) -> Result<(), Stop> {
        if !spool.block(cid, &mut self.block)? {
            return Err(Stop::Unusual);
        }
        let node = Node::decode(&self.block, &self.limits).ok_or(Stop::Unusual)?;
        let layer = match layer {
            None => node.root_layer(&self.limits).ok_or(Stop::Unusual)?.unwrap_or(0),
            Some(layer) if node.belongs_on(layer) => layer,
            Some(_) => return Err(Stop::Unusual),
        };
        let below = layer.saturating_sub(1);
        for (index, entry) in node.entries.iter().enumerate().rev() {
            self.steps.extend(entry.tree.map(|tree| Step::Tree(*tree, below)));
            self.steps.push(Step::Record((node.key(index).to_vec(), *entry.value)));
        }
        self.steps.extend(node.left.map(|tree| Step::Tree(*tree, below)));
        Ok(())
    }
}

/// The bounds of a chunk (`indexer/sync/changes.py`).
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Records of a chunk.
    pub max_records: usize,
    /// Bytes of values after which a chunk takes no further record.
    pub max_bytes: u64,
    /// Items that the records of the export may still have.
    pub items_left: usize,
    /// Bytes of values that the export may still have.
    pub bytes_left: u64,
}

/// New records that were converted.
pub struct Chunk {
    /// Their rows.
    pub rows: RecordRows,
    /// The items that they spent of the export's budget.
    pub items: usize,
    /// The bytes that they count (`RecordChange.size`).
    pub bytes: u64,
}

/// The records of the selected collections, in path order.
pub struct Records {
    walk: Walk,
    patterns: Patterns,
    /// Records of the walk that were not taken yet.
    pending: VecDeque<Leaf>,
}

impl Records {
    /// Creates the records of a proven tree.
    pub fn new(data: Cid, limits: Limits, patterns: Patterns) -> Self {
        Self { walk: Walk::new(data, limits), patterns, pending: VecDeque::new() }
    }

    /// Takes the next record; `None` at the end.
    pub fn next(&mut self, spool: &mut Spool) -> Result<Option<Leaf>, Stop> {
        if let Some(leaf) = self.pending.pop_front() {
            return Ok(Some(leaf));
        }
        while let Some(leaf) = self.walk.next(spool)? {
            if is_selected(&self.patterns, &leaf.0) {
                return Ok(Some(leaf));
            }
        }
        Ok(None)
    }

    /// Takes and converts the next records, none at the end.
    ///
    /// `None`: one of them is not ordinary, so none is taken, and the reference converts this chunk. A chunk ends
    /// where it ends in the reference.
    pub fn chunk(&mut self, spool: &mut Spool, repo: &Repo, bounds: Bounds) -> Result<Option<Chunk>, Stop> {
        let limits = self.walk.limits;
        let mut chunk = Chunk { rows: RecordRows::default(), items: 0, bytes: 0 };
        let mut taken = Vec::new();
        let mut counted = HashSet::new();
        let mut block = Vec::new();
        while chunk.rows.count() < bounds.max_records && chunk.bytes < bounds.max_bytes {
            let Some(leaf) = self.next(spool)? else { break };
            let found = spool.block(&leaf.1, &mut block)?; // after an error, the export is fetched again
            let converted = if found { chunk.add(repo, &leaf, &block, (&limits, bounds), &mut counted) } else { None };
            taken.push(leaf);
            if converted.is_none() {
                taken.into_iter().rev().for_each(|leaf| self.pending.push_front(leaf));
                return Ok(None);
            }
        }
        // The chunk stays in memory until the previous chunk is written.
        chunk.rows.shrink();
        Ok(Some(chunk))
    }
}

impl Chunk {
    /// Adds a record; `None` if it is not ordinary or exceeds a limit.
    fn add(
        &mut self,
        repo: &Repo,
        (path, cid): &Leaf,
        block: &[u8],
        (limits, bounds): (&Limits, Bounds),
        counted: &mut HashSet<(Cid, String)>,
    ) -> Option<()> {
        let (collection, rkey) = split_path(path)?;
        if block.len() > limits.record_bytes {
            return None;
        }
        let counts = block.len() > UNCOUNTED_BYTES;
        let max_items = if counts { limits.record_items } else { usize::MAX };
        let record = record_json(block, collection, max_items, limits.record_json_bytes)?;
        // Within a chunk, the reference decodes a block once for a collection.
        if counts && counted.insert((*cid, collection.to_owned())) {
            self.items += record.items;
        }
        self.bytes += CHANGE_BYTES + (collection.len() + rkey.len()) as u64 + value_bytes(&record.json);
        if self.items > bounds.items_left || self.bytes > bounds.bytes_left {
            return None;
        }
        self.rows.push(repo, (collection, rkey), cid, &record.json, problem(record.shape))
    }
}

/// Returns `true` if the collection of a path is selected, or is not a text, so that the reference decides.
fn is_selected(patterns: &Patterns, path: &[u8]) -> bool {
    let end = path.iter().position(|byte| *byte == b'/').unwrap_or(path.len());
    std::str::from_utf8(&path[..end]).map_or(true, |collection| patterns.matches(collection))
}

/// Returns the value of `Problem` in `indexer/atproto/record.py`.
fn problem(shape: Shape) -> Option<&'static str> {
    match shape {
        Shape::Usual => None,
        Shape::NotAMap => Some("not-a-map"),
        Shape::NoType => Some("no-type"),
        Shape::OtherType => Some("other-type"),
    }
}

/// Returns the bytes that JSON text counts: its length, or 4 bytes per character if it is not ASCII.
fn value_bytes(json: &str) -> u64 {
    if json.is_ascii() {
        json.len() as u64
    } else {
        MAX_CHARACTER_BYTES * json.chars().count() as u64
    }
}
