//! Limits on everything that comes from outside.

/// The limits of `indexer/atproto/limits.py` that the native core needs, with the same names.
///
/// Every value that the settings allow fits into `usize` on 64-bit platforms.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct Limits {
    /// The CAR slice of a commit, in bytes.
    pub commit_blocks_bytes: usize,
    /// Operations of a commit.
    pub commit_ops: usize,
    /// One record, in bytes of DAG-CBOR.
    pub record_bytes: usize,
    /// The JSON of one record, in bytes.
    pub record_json_bytes: usize,
    /// Items of one record: containers, keys, values and tags at all levels.
    pub record_items: usize,
    /// Entries of a tree node.
    pub node_entries: usize,
    /// Layers of a tree.
    pub tree_depth: usize,
}
