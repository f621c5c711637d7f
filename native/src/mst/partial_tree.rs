//! A tree of which only the nodes in a CAR slice are known.

use std::collections::HashMap;
use std::rc::Rc;

use crate::car::Blocks;
use crate::cid::Cid;
use crate::limits::Limits;
use crate::mst::node::Node;

/// The tree of a commit. Each node is decoded at most once, when it is needed.
pub struct PartialTree<'a, 'b> {
    blocks: &'b Blocks<'a>,
    limits: &'b Limits,
    nodes: HashMap<Cid, Rc<Node<'a>>>,
    /// The CID of the root; `None` for the empty tree.
    pub root: Option<Cid>,
    /// The layer of the root.
    pub layer: usize,
}

impl<'a, 'b> PartialTree<'a, 'b> {
    /// Decodes the root. `None` if it is missing or malformed.
    pub fn new(blocks: &'b Blocks<'a>, root: &Cid, limits: &'b Limits) -> Option<Self> {
        let mut tree = PartialTree { blocks, limits, nodes: HashMap::new(), root: None, layer: 0 };
        if let Some(layer) = tree.load(root)?.root_layer(limits)? {
            tree.root = Some(*root);
            tree.layer = layer;
        }
        Some(tree)
    }

    /// Returns `true` if the slice contains a block with this CID.
    pub fn contains(&self, cid: &Cid) -> bool {
        self.blocks.contains_key(cid)
    }

    /// Returns the node with this CID, which must belong on `layer`. `None` if it is missing or malformed.
    pub fn node(&mut self, cid: &Cid, layer: usize) -> Option<Rc<Node<'a>>> {
        self.load(cid).filter(|node| node.belongs_on(layer))
    }

    /// Returns the value of a key, `Some(None)` if the tree does not contain the key. `None` if a node is missing or
    /// malformed.
    #[allow(clippy::option_option)]
    pub fn find(&mut self, key: &[u8]) -> Option<Option<&'a Cid>> {
        let (mut next, mut layer) = (self.root, self.layer);
        while let Some(cid) = next {
            let node = self.node(&cid, layer)?;
            let index = node.position(key);
            if index < node.entries.len() && node.key(index) == key {
                return Some(Some(node.entries[index].value));
            }
            next = node.subtree_before(index).copied();
            layer = layer.saturating_sub(1); // on layer 0 there are no subtrees
        }
        Some(None)
    }

    fn load(&mut self, cid: &Cid) -> Option<Rc<Node<'a>>> {
        if let Some(node) = self.nodes.get(cid) {
            return Some(Rc::clone(node));
        }
        let node = Rc::new(Node::decode(self.blocks.get(cid)?, self.limits)?);
        self.nodes.insert(*cid, Rc::clone(&node));
        Some(node)
    }
}
