//! The Python module `atproto_indexer_native`.

use std::collections::HashMap;
use std::iter::Enumerate;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, PoisonError};
use std::vec::IntoIter;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::sync::MutexExt;
use pyo3::types::{PyBytes, PyList, PyTuple, PyType};
use rayon::prelude::*;

use crate::car::Blocks;
use crate::cbor::RecordJson;
use crate::cid::{as_cid, Cid};
use crate::job::Job;
use crate::limits::Limits;
use crate::mst::NetOp;
use crate::patterns::Patterns;
use crate::python_frame::FrameDecoder;
use crate::python_tuple::NamedTuple;
use crate::verify::{verify_commit, CommitEvent, RepoOp, VerifiedCommit};

/// The number of this interface. `indexer/core/core.py` needs the same one.
const INTERFACE: u32 = 8;

const COMMIT_FIELDS: [&str; 9] = ["did", "head", "prev_data", "first", "changes", "flaw", "detail", "ops_hold", "size"];
const HEAD_FIELDS: [&str; 3] = ["rev", "data", "commit"];
const CHANGE_FIELDS: [&str; 5] = ["path", "old", "new", "block", "converted"];
const RECORD_FIELDS: [&str; 3] = ["json", "items", "problem"];

/// An operation: action, path, cid and prev.
#[derive(FromPyObject)]
struct Operation(PyBackedStr, PyBackedStr, Option<PyBackedBytes>, Option<PyBackedBytes>);

impl Operation {
    fn operation(&self) -> RepoOp<'_> {
        let Operation(action, path, cid, prev) = self;
        RepoOp { action, path, cid: cid.as_deref(), prev: prev.as_deref() }
    }
}

/// What is needed of a `CommitEvent` of `indexer/sync/events.py`.
#[derive(FromPyObject)]
struct Event {
    did: PyBackedStr,
    commit: PyBackedBytes,
    rev: PyBackedStr,
    since: Option<Py<PyAny>>,
    ops: Vec<Operation>,
    blocks: PyBackedBytes,
}

/// A commit as it comes from Python: the event, the root before it, and curve and point of the key.
#[derive(FromPyObject)]
struct Given(Event, Option<PyBackedBytes>, PyBackedStr, PyBackedBytes);

impl Given {
    /// Returns the event; `None` without a root before it.
    fn event(&self) -> Option<CommitEvent<'_>> {
        let Given(Event { did, commit, rev, ops, blocks, .. }, prev_data, curve, point) = self;
        Some(CommitEvent {
            did,
            rev,
            commit,
            prev_data: prev_data.as_deref()?,
            ops: ops.iter().map(Operation::operation).collect(),
            blocks,
            curve,
            point,
        })
    }
}

/// The classes of `indexer/sync/verify.py`.
#[derive(FromPyObject)]
struct Classes {
    #[pyo3(attribute("VerifiedCommit"))]
    commit: Py<PyType>,
    #[pyo3(attribute("Head"))]
    head: Py<PyType>,
    #[pyo3(attribute("VerifiedChange"))]
    change: Py<PyType>,
    #[pyo3(attribute("ConvertedRecord"))]
    record: Py<PyType>,
}

/// Creates the results of `indexer/sync/verify.py`.
struct Results {
    commit: NamedTuple,
    head: NamedTuple,
    change: NamedTuple,
    record: NamedTuple,
    /// For each shape of a record, its problem, or None.
    problems: [Py<PyAny>; 4],
}

impl Results {
    fn commit<'py>(&self, py: Python<'py>, given: &Given, verified: Verified) -> PyResult<Bound<'py, PyAny>> {
        let Given(Event { did, commit, rev, since, ops, blocks }, prev_data, _, _) = given;
        // Many operations may name one block. It is copied once.
        let mut copies: HashMap<usize, Bound<'py, PyBytes>> = HashMap::new();
        let mut changes = Vec::with_capacity(ops.len());
        for (Operation(_, path, new, old), (block, json)) in ops.iter().zip(verified.records) {
            let copy = |block: Range<usize>| {
                copies.entry(block.start).or_insert_with(|| PyBytes::new(py, &blocks[block])).clone()
            };
            let record = json.map(|json| self.record(py, json)).transpose()?;
            let path = PyBytes::new(py, path.as_bytes());
            changes.push(self.change.create(py, (path, old, new, block.map(copy), record))?);
        }
        let head = self.head.create(py, (rev, PyBytes::new(py, &verified.data), commit))?;
        let changes = PyTuple::new(py, changes)?;
        let fields = (did, head, prev_data, since.is_none(), changes, py.None(), intern!(py, ""), true, blocks.len());
        self.commit.create(py, fields)
    }

    fn record<'py>(&self, py: Python<'py>, record: RecordJson) -> PyResult<Bound<'py, PyAny>> {
        self.record.create(py, (record.json, record.items, &self.problems[record.shape as usize]))
    }
}

/// The native core, with its own threads.
#[pyclass(frozen)]
struct Core {
    pool: rayon::ThreadPool,
    results: Arc<Results>,
}

#[pymethods]
impl Core {
    /// Creates a core that works with `threads` threads at once.
    ///
    /// Args:
    ///     threads: At least 1.
    ///     classes: An object with the classes of the results, which have the fields that this crate gives them.
    ///     problems: For each shape of a record, in the order of the numbers of `Shape`, its problem, or None.
    #[new]
    fn new(py: Python<'_>, threads: usize, classes: Classes, problems: [Py<PyAny>; 4]) -> PyResult<Self> {
        if threads == 0 {
            return Err(PyValueError::new_err("threads must be at least 1"));
        }
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|index| format!("verify-{index}"));
        let pool = pool.build().map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        let results = Results {
            commit: NamedTuple::new(classes.commit.bind(py), &COMMIT_FIELDS)?,
            head: NamedTuple::new(classes.head.bind(py), &HEAD_FIELDS)?,
            change: NamedTuple::new(classes.change.bind(py), &CHANGE_FIELDS)?,
            record: NamedTuple::new(classes.record.bind(py), &RECORD_FIELDS)?,
            problems,
        };
        Ok(Core { pool, results: Arc::new(results) })
    }

    /// Begins to verify commits, in the threads of the core; returns at once.
    ///
    /// Args:
    ///     commits: Tuples of event, root of the tree before it, curve, and uncompressed point.
    ///     patterns: The collections whose records are converted.
    ///     limits: An object with the limits as attributes.
    fn begin(&self, commits: Vec<Given>, patterns: Vec<PyBackedStr>, limits: Limits) -> Verification {
        let patterns = Patterns::new(patterns.iter().map(|pattern| &**pattern));
        let commits = Arc::new(commits);
        let job = Job::begin(&self.pool, {
            let commits = Arc::clone(&commits);
            move || commits.par_iter().map(|given| verify(given, &patterns, &limits)).collect()
        });
        Verification { commits, job, results: Arc::clone(&self.results), rest: Mutex::default() }
    }

    /// Begins to work on `items` items, and panics. For tests, because no input is known that causes a panic.
    fn panic(&self, items: usize) -> Verification {
        let job = Job::begin(&self.pool, move || {
            (1..=items).into_par_iter().for_each(|item| assert!(item < items, "the test asked for a panic"));
            Vec::new()
        });
        Verification { commits: Arc::default(), job, results: Arc::clone(&self.results), rest: Mutex::default() }
    }
}

/// A verification of commits that has begun.
#[pyclass(frozen)]
struct Verification {
    commits: Arc<Vec<Given>>,
    job: Arc<Job<Vec<Option<Verified>>>>,
    results: Arc<Results>,
    /// The results that were not returned yet, after the first ones were.
    rest: Mutex<Option<Enumerate<IntoIter<Option<Verified>>>>>,
}

#[pymethods]
impl Verification {
    /// Waits until the verification is done, without the interpreter's lock.
    fn wait(&self, py: Python<'_>) {
        py.detach(|| self.job.wait());
    }

    /// Waits, and returns the next results, at most `count`, in the order of the commits; no results at the end.
    ///
    /// A result is None if the reference has to decide. Otherwise it is what `verify_commit` returns. A record is None
    /// if the reference has to convert it.
    fn next_results<'py>(&self, py: Python<'py>, count: usize) -> PyResult<Bound<'py, PyList>> {
        let mut part = Vec::new();
        {
            let mut rest = self.rest.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
            if rest.is_none() {
                let verified = py.detach(|| self.job.take()).unwrap_or_else(|| Ok(Vec::new()));
                *rest = Some(verified.unwrap_or_else(|panic| resume_unwind(panic)).into_iter().enumerate());
            }
            part.extend(rest.iter_mut().flatten().take(count));
        }
        let results = part.into_iter().map(|(number, verified)| {
            verified.map(|verified| self.results.commit(py, &self.commits[number], verified)).transpose()
        });
        PyList::new(py, results.collect::<PyResult<Vec<_>>>()?)
    }
}

/// What a [`VerifiedCommit`] has, without references: blocks are ranges of the slice.
struct Verified {
    data: Cid,
    records: Vec<(Option<Range<usize>>, Option<RecordJson>)>,
}

fn verify(given: &Given, patterns: &Patterns, limits: &Limits) -> Option<Verified> {
    let event = given.event()?;
    let VerifiedCommit { data, records } = verify_commit(&event, patterns, limits)?;
    let slice_begin = event.blocks.as_ptr() as usize;
    let range_of = |block: &[u8]| {
        let begin = block.as_ptr() as usize - slice_begin;
        begin..begin + block.len()
    };
    let records = records.into_iter().map(|record| (record.block.map(range_of), record.json));
    Some(Verified { data: *data, records: records.collect() })
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
