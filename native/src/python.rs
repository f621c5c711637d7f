//! The Python module `atproto_indexer_native`.

use std::collections::HashMap;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};
use rayon::prelude::*;

use crate::car::Blocks;
use crate::cid::{as_cid, Cid};
use crate::limits::Limits;
use crate::mst::NetOp;
use crate::patterns::Patterns;
use crate::python_frame::FrameDecoder;
use crate::verify::{verify_commit, CommitEvent, RepoOp, VerifiedCommit};

/// The number of this interface. `indexer/sync/native_core.py` needs the same one.
const INTERFACE: u32 = 4;

type OpArguments = (PyBackedStr, PyBackedStr, Option<PyBackedBytes>, Option<PyBackedBytes>);

/// A commit as it comes from Python: did, rev, commit, prev_data, ops, blocks, curve and point.
#[derive(FromPyObject)]
struct CommitArguments(
    PyBackedStr,
    PyBackedStr,
    PyBackedBytes,
    PyBackedBytes,
    Vec<OpArguments>,
    PyBackedBytes,
    PyBackedStr,
    PyBackedBytes,
);

impl CommitArguments {
    fn event(&self) -> CommitEvent<'_> {
        let ops = self.4.iter().map(|(action, path, cid, prev)| RepoOp {
            action,
            path,
            cid: cid.as_deref(),
            prev: prev.as_deref(),
        });
        CommitEvent {
            did: &self.0,
            rev: &self.1,
            commit: &self.2,
            prev_data: &self.3,
            ops: ops.collect(),
            blocks: &self.5,
            curve: &self.6,
            point: &self.7,
        }
    }
}

/// The native core, with its own threads.
#[pyclass(frozen)]
struct Core {
    /// `None` if the calling thread does the work.
    pool: Option<rayon::ThreadPool>,
}

#[pymethods]
impl Core {
    /// Creates a core that works with `threads` threads at once; with 1, in the calling thread.
    #[new]
    fn new(threads: usize) -> PyResult<Self> {
        if threads == 0 {
            return Err(PyValueError::new_err("threads must be at least 1"));
        }
        if threads == 1 {
            return Ok(Core { pool: None });
        }
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|index| format!("verify-{index}"));
        let pool = pool.build().map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        Ok(Core { pool: Some(pool) })
    }

    /// Verifies commits without the interpreter's lock; returns an item for each one, in their order.
    ///
    /// An item is None if the reference has to decide. Otherwise it is the CID of the new tree's root, and for each
    /// operation its block and its record: (JSON, number of items, number of the shape). The block is None for a
    /// delete. The record is None if the reference has to convert it.
    ///
    /// Args:
    ///     commits: Tuples of did, rev, commit, prev_data, ops (tuples of action, path, cid, prev), blocks, curve and
    ///         uncompressed point.
    ///     patterns: The collections whose records are converted.
    ///     limits: An object with the limits as attributes.
    fn verify_commits<'py>(
        &self,
        py: Python<'py>,
        commits: Vec<CommitArguments>,
        patterns: Vec<PyBackedStr>,
        limits: Limits,
    ) -> PyResult<Bound<'py, PyList>> {
        let verified = py.detach(|| {
            let patterns = Patterns::new(patterns.iter().map(|pattern| &**pattern));
            self.each(&commits, |commit| verify_arguments(commit, &patterns, &limits))
        });
        let results = verified.into_iter().map(|commit| commit.map(|commit| commit_result(py, commit)).transpose());
        PyList::new(py, results.collect::<PyResult<Vec<_>>>()?)
    }

    /// Panics while it works on one of `items` items. For tests, because no input is known that causes a panic.
    fn panic(&self, py: Python<'_>, items: usize) {
        let items: Vec<_> = (1..=items).collect();
        py.detach(|| self.each(&items, |item| assert!(*item < items.len(), "the test asked for a panic")));
    }
}

impl Core {
    /// Returns the result of `work` for each item, in their order. A panic in a worker thread continues in the calling
    /// thread.
    fn each<'a, T: Sync, R: Send>(&self, items: &'a [T], work: impl Fn(&'a T) -> R + Send + Sync) -> Vec<R> {
        match &self.pool {
            Some(pool) if items.len() > 1 => pool.install(|| items.par_iter().map(work).collect()),
            _ => items.iter().map(work).collect(),
        }
    }
}

fn verify_arguments<'a>(
    commit: &'a CommitArguments,
    patterns: &Patterns,
    limits: &Limits,
) -> Option<VerifiedCommit<'a>> {
    verify_commit(&commit.event(), patterns, limits)
}

fn commit_result<'py>(py: Python<'py>, commit: VerifiedCommit<'_>) -> PyResult<Bound<'py, PyTuple>> {
    // Many operations may name one block. It is copied once, and found by its address in the slice.
    let mut copies: HashMap<*const u8, Bound<'py, PyBytes>> = HashMap::new();
    let mut records = Vec::with_capacity(commit.records.len());
    for record in commit.records {
        let copy = |block: &[u8]| copies.entry(block.as_ptr()).or_insert_with(|| PyBytes::new(py, block)).clone();
        let block = record.block.map(copy);
        let json = record.json.map(|record| (PyString::new(py, &record.json), record.items, record.shape as u8));
        records.push((block, json));
    }
    (PyBytes::new(py, commit.data), records).into_pyobject(py)
}

/// Returns the JSON, the number of items and the number of the shape of a record; None if the reference decides.
///
/// For tests: it is a part of `verify_commits`.
#[pyfunction]
fn record_json(block: &[u8], collection: &str, max_items: usize, max_json_bytes: usize) -> Option<(String, usize, u8)> {
    let record = crate::cbor::record_json(block, collection, max_items, max_json_bytes)?;
    Some((record.json, record.items, record.shape as u8))
}

/// Returns the root of the tree before operations; None if the reference decides.
///
/// For tests: it is a part of `verify_commits`. Blocks are tuples of CID and bytes, operations of key, old and new CID.
#[pyfunction]
fn root_before<'py>(
    py: Python<'py>,
    blocks: Vec<(PyBackedBytes, PyBackedBytes)>,
    root: &[u8],
    ops: Vec<(PyBackedBytes, Option<PyBackedBytes>, Option<PyBackedBytes>)>,
    prev_data: &[u8],
    limits: Limits,
) -> Option<Bound<'py, PyBytes>> {
    let blocks = blocks.iter().map(|(cid, block)| Some((as_cid(cid)?, &**block))).collect::<Option<Blocks<'_>>>()?;
    let ops = ops.iter().map(|(key, old, new)| Some(NetOp { key, old: optional(old)?, new: optional(new)? }));
    let ops = ops.collect::<Option<Vec<_>>>()?;
    let before = crate::mst::root_before(&blocks, as_cid(root)?, &ops, as_cid(prev_data)?, &limits)?;
    Some(PyBytes::new(py, &before))
}

/// Returns `Some(None)` for no CID, and `None` for a CID that is not of the protocol's form.
fn optional(cid: &Option<PyBackedBytes>) -> Option<Option<&Cid>> {
    cid.as_ref().map_or(Some(None), |cid| as_cid(cid).map(Some))
}

#[pymodule]
fn atproto_indexer_native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("INTERFACE", INTERFACE)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(record_json, module)?)?;
    module.add_function(wrap_pyfunction!(root_before, module)?)?;
    module.add_class::<Core>()?;
    module.add_class::<FrameDecoder>()?;
    crate::python_export::register(module)
}
