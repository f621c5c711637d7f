//! Builds the one tree over a row of keys and closed subtrees: the general algorithm of inversion.
//!
//! `indexer/atproto/inversion.py` explains the row, and builds the tree from the top down. Here, the tree grows from
//! left to right, and only its right edge is open, one node on each layer:
//!
//! ```text
//! layer 2    … key d ─┐
//!                     │
//! layer 1             └─ key e ── key f ─┐
//!                                        │
//! layer 0                                └─ key g ── key h
//! ```
//!
//! A key of height n completes the open nodes below layer n: each is encoded, and its CID is linked in the open node
//! above it. Then the key is appended to the open node of layer n.
//!
//! A closed subtree of layer n is linked in the open node of layer n + 1, but not before the next item of the row is
//! known:
//!
//! - The next item is a key above layer n, or there is none: the subtree is linked as it is.
//! - The next item is a key on layer n or below: it belongs into the same gap between two keys, so into the same
//!   subtree. The closed subtree is opened, and its contents are added to the row instead of it. Its own last subtree
//!   is then the closed one.
//! - The next item is another closed subtree: both belong into the same gap. They are opened from the top down along
//!   the border between them, so that their nodes on each layer become one.
//!
//! Every method returns `None` if a node is missing or malformed, so that the reference decides.

use crate::cid::{cid_of, Cid};
use crate::mst::node::{
    assemble, empty_tree, key_height, write_key_fields, write_links, Node, MAX_HEIGHT, MAX_NODE_ENTRIES,
};
use crate::mst::partial_tree::PartialTree;
use crate::mst::NetOp;

/// Levels of recursion. A tree has at most `MAX_HEIGHT` layers, and opening a closed subtree starts again from its own.
const MAX_RECURSION: usize = 3 * MAX_HEIGHT;

/// The rightmost node of a layer, to which entries are appended.
#[derive(Default)]
struct OpenNode {
    left: Option<Cid>,
    count: usize,
    /// The encoded entries. Of the last one only fields "k" and "p".
    entries: Vec<u8>,
    /// The subtree after the last entry, and the record of the last entry.
    last_links: Option<(Option<Cid>, Cid)>,
    last_key: Vec<u8>,
}

impl OpenNode {
    /// Appends an entry without a subtree after it.
    fn append(&mut self, key: &[u8], value: &Cid) {
        self.complete_entry();
        write_key_fields(&self.last_key, key, &mut self.entries);
        self.set_last(key, value);
        self.count += 1;
    }

    /// Appends entries of another node with the subtrees between them, but without the subtree after the last one.
    fn extend(&mut self, node: &Node<'_>, start: usize, stop: usize) {
        self.complete_entry();
        let (first, last) = (&node.entries[start], &node.entries[stop - 1]);
        let previous = if start == 0 { &[] } else { node.key(start - 1) };
        self.entries.reserve(node.block.len());
        let mut copied_from = first.start;
        if self.last_key != previous {
            write_key_fields(&self.last_key, node.key(start), &mut self.entries);
            copied_from = first.tree_field;
        }
        self.entries.extend_from_slice(&node.block[copied_from..last.tree_field]);
        self.set_last(node.key(stop - 1), last.value);
        self.count += stop - start;
    }

    fn set_last(&mut self, key: &[u8], value: &Cid) {
        self.last_links = Some((None, *value));
        self.last_key.clear();
        self.last_key.extend_from_slice(key);
    }

    /// Links a subtree after the last entry.
    fn link(&mut self, subtree: &Cid) {
        match &mut self.last_links {
            Some((tree, _)) => *tree = Some(*subtree),
            None => self.left = Some(*subtree),
        }
    }

    /// Returns the CID of the node.
    fn encode(mut self) -> Option<Cid> {
        self.complete_entry();
        (self.count <= MAX_NODE_ENTRIES).then(|| cid_of(&assemble(self.count, &self.entries, self.left.as_ref())))
    }

    fn complete_entry(&mut self) {
        if let Some((tree, value)) = self.last_links.take() {
            write_links(tree.as_ref(), &value, &mut self.entries);
        }
    }
}

/// Takes a tree apart, undoes operations, and builds the tree before them.
pub struct TreeBuilder<'a, 'b> {
    tree: PartialTree<'a, 'b>,
    /// The open node of each layer, from layer 0 up. Those below layer `lowest` are empty.
    open_nodes: Vec<OpenNode>,
    lowest: usize,
    /// The CID and the layer of the closed subtree that was added last, until it is linked or opened. While there is
    /// one, the open nodes up to its layer are empty.
    closed: Option<(Cid, usize)>,
    last_key: Vec<u8>,
    recursion: usize,
}

impl<'a, 'b> TreeBuilder<'a, 'b> {
    /// Creates a builder that takes nodes from `tree`.
    pub fn new(tree: PartialTree<'a, 'b>) -> Self {
        let last_key = Vec::new();
        TreeBuilder { tree, open_nodes: Vec::new(), lowest: MAX_HEIGHT + 1, closed: None, last_key, recursion: 0 }
    }

    /// Adds a subtree (`None`: an empty one) and undoes `ops`: the operations on keys that belong into it, by key.
    pub fn add_subtree(&mut self, cid: Option<Cid>, layer: usize, ops: &[NetOp<'_>]) -> Option<()> {
        match cid {
            None => ops.iter().try_for_each(|op| self.add_key(op.key, op.old)),
            Some(cid) if ops.is_empty() => self.add_closed(cid, layer),
            Some(cid) => self.add_contents(&cid, layer, ops),
        }
    }

    /// Returns the root of the tree.
    ///
    /// If only a closed subtree is left and its node is missing, it is the root if its CID is `prev_data`.
    pub fn finish(mut self, prev_data: &Cid) -> Option<Cid> {
        if let Some(top) = self.open_nodes.len().checked_sub(1) {
            self.complete_below(top)?;
            return self.open_nodes.pop()?.encode();
        }
        match self.closed {
            None => Some(empty_tree()),
            Some((cid, layer)) => self.first_with_keys(cid, layer, prev_data),
        }
    }

    /// Opens a subtree: adds its subtrees and keys in order, and undoes `ops`.
    fn add_contents(&mut self, cid: &Cid, layer: usize, mut ops: &[NetOp<'_>]) -> Option<()> {
        self.recursion += 1;
        if self.recursion > MAX_RECURSION {
            return None;
        }
        let node = self.tree.node(cid, layer)?;
        let below = layer.saturating_sub(1); // on layer 0 there are no subtrees
        let count = node.entries.len();
        let mut index = 0;
        while index < count {
            let upper = node.key(index);
            let (inside, rest) = ops.split_at(ops.partition_point(|op| op.key < upper));
            self.add_subtree(node.subtree_before(index).copied(), below, inside)?;
            ops = rest;
            match ops.first() {
                Some(op) if op.key == upper => {
                    self.add_key(upper, op.old)?;
                    ops = &ops[1..];
                    index += 1;
                }
                next => {
                    // Entries up to the next operation remain as they are, so their subtrees are linked and not added.
                    let stop = next.map_or(count, |op| node.position(op.key));
                    self.open_node_for(upper, layer)?.extend(&node, index, stop);
                    self.set_last_key(node.key(stop - 1));
                    index = stop;
                }
            }
        }
        self.add_subtree(node.subtree_before(count).copied(), below, ops)?;
        self.recursion -= 1;
        Some(())
    }

    fn add_closed(&mut self, cid: Cid, layer: usize) -> Option<()> {
        self.open_closed(layer)?;
        if self.closed.is_some() || self.lowest <= layer {
            return self.add_contents(&cid, layer, &[]);
        }
        self.closed = Some((cid, layer));
        Some(())
    }

    /// Adds a key with its old value; `None`: the key did not exist.
    fn add_key(&mut self, key: &[u8], value: Option<&Cid>) -> Option<()> {
        if let Some(value) = value {
            self.open_node_for(key, key_height(key))?.append(key, value);
            self.set_last_key(key);
        }
        Some(())
    }

    fn set_last_key(&mut self, key: &[u8]) {
        self.last_key.clear();
        self.last_key.extend_from_slice(key);
    }

    /// Returns the open node that the key belongs into, after completing the nodes below it.
    fn open_node_for(&mut self, key: &[u8], height: usize) -> Option<&mut OpenNode> {
        if key <= self.last_key.as_slice() {
            return None;
        }
        self.open_closed(height)?;
        self.complete_below(height)?;
        self.open_nodes.get_mut(height)
    }

    /// Opens the last closed subtree until none is left that reaches up to `layer`.
    fn open_closed(&mut self, layer: usize) -> Option<()> {
        while let Some((cid, closed_layer)) = self.closed.filter(|(_, closed_layer)| *closed_layer >= layer) {
            self.closed = None;
            self.add_contents(&cid, closed_layer, &[])?;
        }
        Some(())
    }

    /// Links the last closed subtree, then encodes and links each open node below layer `height`.
    ///
    /// If there is a layer between without keys, its node has only a link to the layer below.
    fn complete_below(&mut self, height: usize) -> Option<()> {
        while self.open_nodes.len() <= height {
            self.open_nodes.push(OpenNode::default());
        }
        if let Some((cid, layer)) = self.closed.take() {
            self.lowest = layer + 1;
            self.open_nodes.get_mut(self.lowest)?.link(&cid);
        }
        for layer in self.lowest..height {
            let completed = std::mem::take(&mut self.open_nodes[layer]).encode()?;
            self.open_nodes[layer + 1].link(&completed);
        }
        self.lowest = height;
        Some(())
    }

    /// Returns the root if only one closed subtree is left: its first node that has keys.
    fn first_with_keys(&mut self, mut cid: Cid, mut layer: usize, prev_data: &Cid) -> Option<Cid> {
        loop {
            if !self.tree.contains(&cid) {
                return (cid == *prev_data).then_some(cid);
            }
            let node = self.tree.node(&cid, layer)?;
            match node.left {
                Some(left) if node.entries.is_empty() => {
                    cid = *left;
                    layer = layer.saturating_sub(1);
                }
                _ => return Some(cid),
            }
        }
    }
}
