//! Decodes frames for Python. `indexer/core/core.py` is the only user.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString, PyTuple, PyType};

use crate::frame::{decode_commit, CommitFields, FrameLimits};
use crate::hash::sha256;
use crate::python_tuple::NamedTuple;
use crate::verify::RepoOp;

const COMMIT_FIELDS: [&str; 10] =
    ["seq", "did", "commit", "rev", "since", "prev_data", "ops", "blocks", "time", "kind"];
const OP_FIELDS: [&str; 4] = ["action", "path", "cid", "prev"];
const OTHER_FIELDS: [&str; 4] = ["seq", "kind", "did", "time"];

/// Decodes frames within limits for a set of buckets.
#[pyclass(frozen, module = "atproto_indexer_native")]
pub struct FrameDecoder {
    limits: FrameLimits,
    /// For each bucket, if it is in the set. `None`: all buckets are.
    owned: Option<[bool; 256]>,
    commit: NamedTuple,
    op: NamedTuple,
    other: NamedTuple,
}

/// The named tuples of `indexer/sync/events.py`.
#[derive(FromPyObject)]
struct Classes {
    #[pyo3(attribute("CommitEvent"))]
    commit: Py<PyType>,
    #[pyo3(attribute("RepoOp"))]
    op: Py<PyType>,
    #[pyo3(attribute("OtherShardEvent"))]
    other: Py<PyType>,
}

#[pymethods]
impl FrameDecoder {
    /// Takes the module of the events, an object with the limits as attributes, and the buckets; None for all. Raises
    /// `ValueError` if the events have other fields than this crate gives them.
    #[new]
    fn new(py: Python<'_>, events: Classes, limits: FrameLimits, buckets: Option<Vec<u8>>) -> PyResult<Self> {
        let commit = NamedTuple::new(events.commit.bind(py), &COMMIT_FIELDS)?;
        let op = NamedTuple::new(events.op.bind(py), &OP_FIELDS)?;
        let other = NamedTuple::new(events.other.bind(py), &OTHER_FIELDS)?;
        let owned = buckets.map(|buckets| {
            let mut owned = [false; 256];
            buckets.into_iter().for_each(|bucket| owned[usize::from(bucket)] = true);
            owned
        });
        Ok(Self { limits, owned, commit, op, other })
    }

    /// Returns the event of a frame; None if the reference has to decide.
    fn decode<'py>(&self, py: Python<'py>, frame: &[u8]) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(commit) = decode_commit(frame, &self.limits) else { return Ok(None) };
        let bucket = || usize::from(sha256(commit.did.as_bytes())[0]);
        if self.owned.is_none_or(|owned| owned[bucket()]) {
            return self.event(py, &commit).map(Some);
        }
        self.other.create(py, (commit.seq, intern!(py, "commit"), commit.did, commit.time)).map(Some)
    }
}

impl FrameDecoder {
    fn event<'py>(&self, py: Python<'py>, commit: &CommitFields<'_>) -> PyResult<Bound<'py, PyAny>> {
        let ops = commit.ops.iter().map(|op| self.operation(py, op)).collect::<PyResult<Vec<_>>>()?;
        let fields = (
            commit.seq,
            commit.did,
            PyBytes::new(py, commit.commit),
            commit.rev,
            commit.since,
            commit.prev_data.map(|cid| PyBytes::new(py, cid)),
            PyTuple::new(py, ops)?,
            PyBytes::new(py, commit.blocks),
            commit.time,
            intern!(py, "commit"),
        );
        self.commit.create(py, fields)
    }

    fn operation<'py>(&self, py: Python<'py>, op: &RepoOp<'_>) -> PyResult<Bound<'py, PyAny>> {
        let action = match op.action {
            "create" => intern!(py, "create").clone(),
            "update" => intern!(py, "update").clone(),
            "delete" => intern!(py, "delete").clone(),
            other => PyString::new(py, other),
        };
        let bytes = |cid: Option<&[u8]>| cid.map(|cid| PyBytes::new(py, cid));
        self.op.create(py, (action, op.path, bytes(op.cid), bytes(op.prev)))
    }
}
