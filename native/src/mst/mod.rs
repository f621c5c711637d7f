//! The Merkle search tree: nodes, and inversion (docs/protocol.md#inversion).
//!
//! The tree depends only on its keys and values. So if undoing the operations of a commit gives the root that it names
//! as its `prevData`, they are the whole difference between the two trees. `indexer/atproto/inversion.py` explains
//! the algorithm.

pub mod builder;
pub mod node;
pub mod partial_tree;

use crate::car::Blocks;
use crate::cid::Cid;
use crate::limits::Limits;
use builder::TreeBuilder;
use partial_tree::PartialTree;

/// The net operation of a commit on one key: `old` is `None` for a create, `new` is `None` for a delete.
#[derive(Clone, Copy, Debug)]
pub struct NetOp<'a> {
    /// The path of the record.
    pub key: &'a [u8],
    /// The CID of the record before the commit.
    pub old: Option<&'a Cid>,
    /// The CID of the record after the commit.
    pub new: Option<&'a Cid>,
}

/// Returns `true` if undoing `ops` on the tree with this root gives `prev_data`, and the tree shows their effects.
///
/// `false` means that the reference decides: also if a node is missing or malformed, or a key occurs twice.
pub fn inverts(blocks: &Blocks<'_>, root: &Cid, ops: &[NetOp<'_>], prev_data: &Cid, limits: &Limits) -> bool {
    if ops.is_empty() {
        return root == prev_data;
    }
    root_before(blocks, root, ops, prev_data, limits).is_some_and(|before| before == *prev_data)
}

/// Returns the root of the tree before one or more operations. `None` means that the reference decides.
///
/// `prev_data` matters only if nothing but one subtree is left and its node is missing.
pub fn root_before(
    blocks: &Blocks<'_>,
    root: &Cid,
    ops: &[NetOp<'_>],
    prev_data: &Cid,
    limits: &Limits,
) -> Option<Cid> {
    let mut tree = PartialTree::new(blocks, root, limits)?;
    for op in ops {
        if tree.find(op.key)? != op.new {
            return None;
        }
    }
    let mut sorted = ops.to_vec();
    sorted.sort_unstable_by_key(|op| op.key);
    if sorted.windows(2).any(|pair| pair[0].key == pair[1].key) {
        return None;
    }
    let (root, layer) = (tree.root, tree.layer);
    let mut builder = TreeBuilder::new(tree);
    builder.add_subtree(root, layer, &sorted)?;
    builder.finish(prev_data)
}
