//! Exports for Python. `indexer/core/core.py` is the only user.
//!
//! All objects of one export share its spool. `Export.close` frees the file and the memory, whoever still holds an
//! object. A call that waits for the spool, reads the file or walks the tree releases the interpreter's lock.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use pyo3::exceptions::{PyOverflowError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::copy_rows::{Layout, Repo};
use crate::export::{self, Bounds, Stop};
use crate::hash::sha256;
use crate::keys::PublicKey;
use crate::limits::Limits;
use crate::patterns::Patterns;
use crate::spool::{Buffers, FileLimits, SharedSpool, SpoolGuard};

type Entry<'py> = (Bound<'py, PyBytes>, Bound<'py, PyBytes>);

/// Adds the classes to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Export>()?;
    module.add_class::<Proof>()?;
    module.add_class::<Records>()?;
    module.add_class::<Chunk>()
}

/// One export that is received.
#[pyclass(frozen, module = "atproto_indexer_native")]
pub struct Export {
    spool: Arc<SharedSpool>,
    limits: Limits,
    layout: Layout,
}

#[pymethods]
impl Export {
    /// Takes the directory of the file, an object with the limits as attributes, the sizes of the buffer and a page, and
    /// the columns of the rows for the tables of records and of changes. `ValueError`: a column is unknown.
    #[new]
    fn new(
        directory: PathBuf,
        limits: &Bound<'_, PyAny>,
        buffer_bytes: usize,
        page_bytes: usize,
        record_columns: Vec<String>,
        change_columns: Vec<String>,
    ) -> PyResult<Self> {
        let layout =
            Layout::new(&record_columns, &change_columns).map_err(|name| PyValueError::new_err(name.to_owned()))?;
        let buffers = Buffers { buffer_bytes, page_bytes: page_bytes.max(1) };
        let spool = SharedSpool::new(directory, limits.extract::<FileLimits>()?, buffers);
        Ok(Self { spool: Arc::new(spool), limits: limits.extract()?, layout })
    }

    /// Adds received bytes; `False` if they, or the bytes before them, are not ordinary. `OSError`: the disk failed.
    fn feed(&self, py: Python<'_>, chunk: &[u8]) -> PyResult<bool> {
        py.detach(|| Ok(spool(&self.spool)?.feed(chunk)?))
    }

    /// Frees the file and the memory. A call in another thread frees them at its end; it fails at its next block.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.spool.close());
    }

    /// Returns `True` if the file does not end inside its header or a section.
    fn is_whole(&self) -> PyResult<bool> {
        Ok(spool(&self.spool)?.is_whole())
    }

    /// Removes the bytes that are not indexed; returns them, and the number of bytes and of sections before them.
    ///
    /// The next call of `feed` begins with a section.
    fn take_rest<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyBytes>, u64, usize)> {
        let mut spool = spool(&self.spool)?;
        let (bytes, sections) = spool.indexed();
        Ok((PyBytes::new(py, &spool.take_rest()), bytes, sections))
    }

    /// The CID of the commit; `None` if no usual header was read.
    #[getter]
    fn root<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        Ok(spool(&self.spool)?.root().map(|root| PyBytes::new(py, root)))
    }

    /// The size of all different blocks, each with a length of 4 bytes and its CID.
    #[getter]
    fn size(&self) -> PyResult<u64> {
        Ok(spool(&self.spool)?.size())
    }

    /// Returns the number of different blocks.
    fn __len__(&self) -> PyResult<usize> {
        Ok(spool(&self.spool)?.blocks())
    }

    /// Returns the block of a CID; `None` if there is none.
    fn block<'py>(&self, py: Python<'py>, cid: &[u8]) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let mut block = Vec::new();
        let found = py.detach(|| -> PyResult<_> { Ok(spool(&self.spool)?.block(cid, &mut block)?) })?;
        Ok(found.then(|| PyBytes::new(py, &block)))
    }

    /// Verifies the commit `root` of `did` and its tree; `None`: the reference decides. `point` is uncompressed.
    fn prove(&self, py: Python<'_>, root: &[u8], did: &str, curve: &str, point: &[u8]) -> PyResult<Option<Proof>> {
        py.detach(|| {
            let Some(key) = PublicKey::parse(curve, point) else { return Ok(None) };
            match export::prove(&mut *spool(&self.spool)?, root, did, &key, self.limits) {
                Ok(proof) => Ok(Some(Proof {
                    spool: self.spool.clone(),
                    limits: self.limits,
                    layout: self.layout.clone(),
                    did: did.into(),
                    proof,
                })),
                Err(Stop::Unusual) => Ok(None),
                Err(Stop::Failed(error)) => Err(error.into()),
            }
        })
    }
}

/// A verified export.
#[pyclass(frozen, module = "atproto_indexer_native")]
pub struct Proof {
    spool: Arc<SharedSpool>,
    limits: Limits,
    layout: Layout,
    did: String,
    proof: export::Proof,
}

#[pymethods]
impl Proof {
    /// The rev of the commit.
    #[getter]
    fn rev(&self) -> &str {
        &self.proof.rev
    }

    /// The CID of the root of the tree.
    #[getter]
    fn data<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.proof.data)
    }

    /// The number of records.
    #[getter]
    fn count(&self) -> u64 {
        self.proof.count
    }

    /// Returns the records of the collections that match one of the patterns.
    fn records(&self, patterns: Vec<String>) -> Records {
        let patterns = Patterns::new(patterns.iter().map(String::as_str));
        let did = self.did.clone();
        let bucket = i16::from(sha256(did.as_bytes())[0]);
        Records {
            spool: self.spool.clone(),
            repo: Arc::new(Repo { did, bucket, rev: self.proof.rev.clone(), layout: self.layout.clone() }),
            records: Mutex::new(export::Records::new(self.proof.data, self.limits, patterns)),
        }
    }
}

/// The records of a verified export, in path order. An iterator of paths and CIDs.
#[pyclass(frozen, module = "atproto_indexer_native")]
pub struct Records {
    spool: Arc<SharedSpool>,
    repo: Arc<Repo>,
    records: Mutex<export::Records>,
}

#[pymethods]
impl Records {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Entry<'py>>> {
        let leaf = py.detach(|| lock(&self.records)?.next(&mut *spool(&self.spool)?).map_err(error))?;
        Ok(leaf.map(|(path, cid)| (PyBytes::new(py, &path), PyBytes::new(py, &cid))))
    }

    /// Takes and converts the next records: none at the end. `None`: the reference converts the next chunk.
    ///
    /// `items_left` and `bytes_left` are the bounds of all values of the export that are left.
    fn chunk(
        &self,
        py: Python<'_>,
        max_records: usize,
        max_bytes: u64,
        items_left: usize,
        bytes_left: u64,
    ) -> PyResult<Option<Chunk>> {
        let bounds = Bounds { max_records, max_bytes, items_left, bytes_left };
        py.detach(|| {
            let chunk = lock(&self.records)?.chunk(&mut *spool(&self.spool)?, &self.repo, bounds).map_err(error)?;
            Ok(chunk.map(|chunk| Chunk { repo: self.repo.clone(), chunk }))
        })
    }
}

/// New records that were converted.
#[pyclass(frozen, module = "atproto_indexer_native")]
pub struct Chunk {
    repo: Arc<Repo>,
    chunk: export::Chunk,
}

#[pymethods]
impl Chunk {
    /// The number of records.
    #[getter]
    fn count(&self) -> usize {
        self.chunk.rows.count()
    }

    /// The items that the records spent of the export's budget.
    #[getter]
    fn items(&self) -> usize {
        self.chunk.items
    }

    /// The bytes that the records count, as `RecordChange.size` counts them.
    #[getter]
    fn size(&self) -> u64 {
        self.chunk.bytes
    }

    /// Returns at most `size` bytes of the rows of records for COPY, from `start` on; empty bytes at the end.
    fn record_rows<'py>(&self, py: Python<'py>, mut start: usize, size: usize) -> Bound<'py, PyBytes> {
        for part in self.chunk.rows.parts() {
            if let Some(rest) = part.get(start..).filter(|rest| !rest.is_empty()) {
                return PyBytes::new(py, &rest[..rest.len().min(size)]);
            }
            start -= part.len();
        }
        PyBytes::new(py, &[])
    }

    /// Returns the rows of the change log, for COPY.
    fn change_rows<'py>(
        &self,
        py: Python<'py>,
        segment: i16,
        batch: i64,
        first_ordinal: i32,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let rows = py.detach(|| self.chunk.rows.changes(&self.repo, segment, batch, first_ordinal));
        Ok(PyBytes::new(py, &rows.ok_or_else(|| PyOverflowError::new_err("a value is too long"))?))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> PyResult<MutexGuard<'_, T>> {
    mutex.lock().map_err(|_| PyRuntimeError::new_err("an earlier call has panicked"))
}

fn spool(shared: &SharedSpool) -> PyResult<SpoolGuard<'_>> {
    shared.lock().map_err(|_| PyRuntimeError::new_err("an earlier call has panicked"))
}

fn error(stop: Stop) -> PyErr {
    match stop {
        Stop::Unusual => PyRuntimeError::new_err("a tree that was proven is no longer the same"),
        Stop::Failed(error) => error.into(),
    }
}
