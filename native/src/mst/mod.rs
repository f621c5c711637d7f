//! The Merkle search tree (docs/protocol.md#merkle-search-tree).

pub mod node;
