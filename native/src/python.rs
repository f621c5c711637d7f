//! The Python module `atproto_indexer_native`.

use std::collections::HashMap;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::Arc;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};
use rayon::prelude::*;

use crate::car::Blocks;
use crate::cbor::RecordJson;
use crate::cid::{as_cid, Cid};
use crate::job::Job;
use crate::limits::Limits;
use crate::mst::NetOp;
use crate::patterns::Patterns;
use crate::python_frame::FrameDecoder;
use crate::verify::{verify_commit, CommitEvent, RepoOp, VerifiedCommit};

/// The number of this interface. `indexer/sync/native_core.py` needs the same one.
const INTERFACE: u32 = 5;

type OpArguments = (PyBackedStr, PyBackedStr, Option<PyBackedBytes>, Option<PyBackedBytes>);

/// A commit as it comes from Python: did, rev, commit, prev_data, ops, blocks, curve and point.
#[derive(FromPyObject)]
struct CommitArguments(
    PyBackedStr,
    PyBackedStr,
    PyBackedBytes,
    Option<PyBackedBytes>,
    Vec<OpArguments>,
    PyBackedBytes,
    PyBackedStr,
    PyBackedBytes,
);

impl CommitArguments {
    /// Returns the event; `None` without `prev_data`.
    fn event(&self) -> Option<CommitEvent<'_>> {
        let ops = self.4.iter().map(|(action, path, cid, prev)| RepoOp {
            action,
            path,
            cid: cid.as_deref(),
            prev: prev.as_deref(),
        });
        Some(CommitEvent {
            did: &self.0,
            rev: &self.1,
            commit: &self.2,
            prev_data: self.3.as_deref()?,
            ops: ops.collect(),
            blocks: &self.5,
            curve: &self.6,
            point: &self.7,
        })
    }
}

/// The native core, with its own threads.
#[pyclass(frozen)]
struct Core {
    pool: rayon::ThreadPool,
}

#[pymethods]
impl Core {
    /// Creates a core that works with `threads` threads at once.
    #[new]
    fn new(threads: usize) -> PyResult<Self> {
        if threads == 0 {
            return Err(PyValueError::new_err("threads must be at least 1"));
        }
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|index| format!("verify-{index}"));
        let pool = pool.build().map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        Ok(Core { pool })
    }

    /// Begins to verify commits, in the threads of the core; returns at once.
    ///
    /// Args:
    ///     commits: Tuples of did, rev, commit, prev_data, ops (tuples of action, path, cid, prev), blocks, curve and
    ///         uncompressed point.
    ///     patterns: The collections whose records are converted.
    ///     limits: An object with the limits as attributes.
    fn verify_commits(
        &self,
        commits: Vec<CommitArguments>,
        patterns: Vec<PyBackedStr>,
        limits: Limits,
    ) -> CommitVerification {
        let patterns = Patterns::new(patterns.iter().map(|pattern| &**pattern));
        let commits = Arc::new(commits);
        let job = Job::begin(&self.pool, {
            let commits = Arc::clone(&commits);
            move || commits.par_iter().map(|commit| verify_arguments(commit, &patterns, &limits)).collect()
        });
        CommitVerification { commits, job }
    }

    /// Panics while it works on one of `items` items. For tests, because no input is known that causes a panic.
    fn panic(&self, items: usize) -> CommitVerification {
        let job = Job::begin(&self.pool, move || {
            (1..=items).into_par_iter().for_each(|item| assert!(item < items, "the test asked for a panic"));
            Vec::new()
        });
        CommitVerification { commits: Arc::default(), job }
    }
}

/// A verification of commits that has begun.
#[pyclass(frozen)]
struct CommitVerification {
    commits: Arc<Vec<CommitArguments>>,
    job: Arc<Job<Vec<Option<OwnedCommit>>>>,
}

#[pymethods]
impl CommitVerification {
    /// Returns True if `results` need not wait.
    fn is_done(&self) -> bool {
        self.job.is_done()
    }

    /// Waits until the verification is done, without the interpreter's lock.
    fn wait(&self, py: Python<'_>) {
        py.detach(|| self.job.wait());
    }

    /// Waits, and returns an item for each commit, in their order. It can be called once.
    ///
    /// An item is None if the reference has to decide. Otherwise it is the CID of the new tree's root, and for each
    /// operation its block and its record: (JSON, number of items, number of the shape). The block is None for a
    /// delete. The record is None if the reference has to convert it.
    fn results<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let verified = py.detach(|| self.job.take());
        let verified = verified.ok_or_else(|| PyRuntimeError::new_err("the results were taken before"))?;
        let verified = verified.unwrap_or_else(|panic| resume_unwind(panic));
        let results = self.commits.iter().zip(verified);
        let results = results.map(|(given, commit)| commit.map(|commit| commit_result(py, given, commit)).transpose());
        PyList::new(py, results.collect::<PyResult<Vec<_>>>()?)
    }
}

/// What a [`VerifiedCommit`] has, without references: blocks are ranges of the slice.
struct OwnedCommit {
    data: Cid,
    records: Vec<(Option<Range<usize>>, Option<RecordJson>)>,
}

fn verify_arguments(commit: &CommitArguments, patterns: &Patterns, limits: &Limits) -> Option<OwnedCommit> {
    let VerifiedCommit { data, records } = verify_commit(&commit.event()?, patterns, limits)?;
    let slice_begin = commit.5.as_ptr() as usize;
    let range_of = |block: &[u8]| {
        let begin = block.as_ptr() as usize - slice_begin;
        begin..begin + block.len()
    };
    let records = records.into_iter().map(|record| (record.block.map(range_of), record.json));
    Some(OwnedCommit { data: *data, records: records.collect() })
}

fn commit_result<'py>(py: Python<'py>, given: &CommitArguments, commit: OwnedCommit) -> PyResult<Bound<'py, PyTuple>> {
    // Many operations may name one block. It is copied once.
    let mut copies: HashMap<usize, Bound<'py, PyBytes>> = HashMap::new();
    let mut records = Vec::with_capacity(commit.records.len());
    for (range, json) in commit.records {
        let copy = |range: Range<usize>| {
            copies.entry(range.start).or_insert_with(|| PyBytes::new(py, &given.5[range])).clone()
        };
        let block = range.map(copy);
        let json = json.map(|record| (PyString::new(py, &record.json), record.items, record.shape as u8));
        records.push((block, json));
    }
    (PyBytes::new(py, &commit.data), records).into_pyobject(py)
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
