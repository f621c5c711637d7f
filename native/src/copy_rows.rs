//! Rows for COPY in the binary format of Postgres, without its header and trailer.
//!
//! ```text
//! int16 number of fields, and for each field: int32 size (-1: null), bytes
//! ```
//!
//! All numbers are big-endian. The columns are those of `indexer/db/write.py`
//! and `indexer/db/change_log.py`.

use crate::cid::Cid;

const JSONB_VERSION: u8 = 1;
const RECORD_FIELDS: i16 = 9;
const CHANGE_FIELDS: i16 = 11;
const NULL: i32 = -1;

/// The values that all new records of one repo share.
pub struct Repo {
    /// The DID of the repo.
    pub did: String,
    /// The bucket of the DID.
    pub bucket: i16,
    /// The rev of the export.
    pub rev: String,
}

/// Rows of new records, with the values that their rows in the change log need.
#[derive(Default)]
pub struct RecordRows {
    /// The rows for `indexer.record`.
    pub bytes: Vec<u8>,
    keys: Vec<Key>,
}

struct Key {
    /// The offset of the field `collection` in the row.
    collection: usize,
    /// The offset after the field `rkey`.
    end: usize,
    cid: Cid,
}

impl RecordRows {
    /// Returns the number of rows.
    pub fn count(&self) -> usize {
        self.keys.len()
    }

    /// Appends the row of a record. `None`: a value is too long for a row.
    pub fn push(
        &mut self,
        repo: &Repo,
        (collection, rkey): (&str, &str),
        cid: &Cid,
        json: &str,
        problem: Option<&str>,
    ) -> Option<()> {
        let out = &mut self.bytes;
        out.extend_from_slice(&RECORD_FIELDS.to_be_bytes());
        put(out, repo.did.as_bytes())?;
        let start = out.len();
        put(out, collection.as_bytes())?;
        put(out, rkey.as_bytes())?;
        let end = out.len();
        put(out, &repo.bucket.to_be_bytes())?;
        put(out, cid)?;
        put(out, repo.rev.as_bytes())?;
        out.extend_from_slice(&i32::try_from(json.len() + 1).ok()?.to_be_bytes());
        out.push(JSONB_VERSION);
        out.extend_from_slice(json.as_bytes());
        match problem {
            Some(problem) => put(out, problem.as_bytes())?,
            None => out.extend_from_slice(&NULL.to_be_bytes()),
        }
        out.extend_from_slice(&NULL.to_be_bytes()); // original
        self.keys.push(Key { collection: start, end, cid: *cid });
        Some(())
    }

    /// Returns the rows for `indexer.change`: creates that were not caused by the stream. `ordinal` is the first one.
    pub fn changes(&self, repo: &Repo, segment: i16, batch: i64, ordinal: i32) -> Option<Vec<u8>> {
        let mut out = Vec::with_capacity(self.keys.len() * 256);
        for (key, ordinal) in self.keys.iter().zip(ordinal..) {
            out.extend_from_slice(&CHANGE_FIELDS.to_be_bytes());
            put(&mut out, &segment.to_be_bytes())?;
            put(&mut out, &batch.to_be_bytes())?;
            put(&mut out, &ordinal.to_be_bytes())?;
            put(&mut out, &repo.bucket.to_be_bytes())?;
            put(&mut out, &[0])?; // live
            put(&mut out, b"create")?;
            put(&mut out, repo.did.as_bytes())?;
            out.extend_from_slice(&self.bytes[key.collection..key.end]);
            put(&mut out, repo.rev.as_bytes())?;
            put(&mut out, &key.cid)?;
        }
        Some(out)
    }
}

fn put(out: &mut Vec<u8>, value: &[u8]) -> Option<()> {
    out.extend_from_slice(&i32::try_from(value.len()).ok()?.to_be_bytes());
    out.extend_from_slice(value);
    Some(())
}
