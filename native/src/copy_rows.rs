//! Rows for COPY in the binary format of Postgres, without its header and trailer.
//!
//! ```text
//! int16 number of fields, and for each field: int32 size (-1: null), bytes
//! ```
//!
//! All numbers are big-endian. Whoever opens the export names the columns of both tables, in their order.

use std::ops::Range;

use crate::cid::Cid;

const JSONB_VERSION: u8 = 1;
const NULL: i32 = -1;

/// A column of a table of records.
#[derive(Clone, Copy)]
enum RecordColumn {
    Did,
    Collection,
    Rkey,
    Bucket,
    Cid,
    Rev,
    /// The JSON, as `jsonb`.
    Value,
    /// Why the value is unusual.
    Problem,
    /// Null: only records whose JSON holds all of them are converted here.
    Original,
    /// How the record was proven, as `"char"`: by an export.
    Proof,
}

impl RecordColumn {
    fn named(name: &str) -> Option<Self> {
        Some(match name {
            "did" => Self::Did,
            "collection" => Self::Collection,
            "rkey" => Self::Rkey,
            "bucket" => Self::Bucket,
            "cid" => Self::Cid,
            "rev" => Self::Rev,
            "value" => Self::Value,
            "value_problem" => Self::Problem,
            "original" => Self::Original,
            "proof" => Self::Proof,
            _ => return None,
        })
    }
}

/// A column of a change log. All changes are creates that the stream did not cause.
#[derive(Clone, Copy)]
enum ChangeColumn {
    Segment,
    Batch,
    Ordinal,
    Live,
    Action,
    Did,
    Collection,
    Rkey,
    Bucket,
    Cid,
    Rev,
}

impl ChangeColumn {
    fn named(name: &str) -> Option<Self> {
        Some(match name {
            "segment" => Self::Segment,
            "batch" => Self::Batch,
            "ordinal" => Self::Ordinal,
            "live" => Self::Live,
            "action" => Self::Action,
            "did" => Self::Did,
            "collection" => Self::Collection,
            "rkey" => Self::Rkey,
            "bucket" => Self::Bucket,
            "cid" => Self::Cid,
            "rev" => Self::Rev,
            _ => return None,
        })
    }
}

/// The columns of the two tables, in the order in which the rows have them.
#[derive(Clone)]
pub struct Layout {
    records: Vec<RecordColumn>,
    changes: Vec<ChangeColumn>,
}

impl Layout {
    /// Returns the layout with these names of columns, or the name of one that is unknown, or that rows of records lack:
    /// the rows of changes copy the fields `collection` and `rkey` of those of records.
    pub fn new<'a>(records: &'a [String], changes: &'a [String]) -> Result<Self, &'a str> {
        if let Some(missing) =
            ["collection", "rkey"].into_iter().find(|name| !records.iter().any(|other| other == name))
        {
            return Err(missing);
        }
        Ok(Self {
            records: records
                .iter()
                .map(|name| RecordColumn::named(name).ok_or(name.as_str()))
                .collect::<Result<_, _>>()?,
            changes: changes
                .iter()
                .map(|name| ChangeColumn::named(name).ok_or(name.as_str()))
                .collect::<Result<_, _>>()?,
        })
    }
}

/// The values that all new records of one repo share.
pub struct Repo {
    /// The DID of the repo.
    pub did: String,
    /// The bucket of the DID.
    pub bucket: i16,
    /// The rev of the export.
    pub rev: String,
    /// The columns of the rows.
    pub layout: Layout,
}

/// Rows of new records, with the values that their rows in the change log need.
///
/// An index page that is full while keys arrive in order is split in halves, and the lower half stays half empty. So
/// of seven records in the order of the keys, three come after all others: they fill the pages.
#[derive(Default)]
pub struct RecordRows {
    first: Vec<u8>,
    second: Vec<u8>,
    keys: Vec<Key>,
}

struct Key {
    /// True if the row is in `second`.
    is_second: bool,
    /// The field `collection` in the row, with its size.
    collection: Range<usize>,
    /// The field `rkey` in the row, with its size.
    rkey: Range<usize>,
    cid: Cid,
}

impl RecordRows {
    /// Returns the number of rows.
    pub fn count(&self) -> usize {
        self.keys.len()
    }

    /// Returns the rows for the table of records in two parts, each in the order of `push`. The second one comes last.
    pub fn parts(&self) -> [&[u8]; 2] {
        [&self.first, &self.second]
    }

    /// Frees the memory that is not needed if no row is added.
    pub fn shrink(&mut self) {
        self.first.shrink_to_fit();
        self.second.shrink_to_fit();
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
        let is_second = self.keys.len() % 7 % 2 == 1;
        let out = if is_second { &mut self.second } else { &mut self.first };
        let mut key = Key { is_second, collection: 0..0, rkey: 0..0, cid: *cid };
        put_count(out, repo.layout.records.len())?;
        for column in &repo.layout.records {
            let start = out.len();
            match column {
                RecordColumn::Did => put(out, repo.did.as_bytes())?,
                RecordColumn::Collection => {
                    put(out, collection.as_bytes())?;
                    key.collection = start..out.len();
                }
                RecordColumn::Rkey => {
                    put(out, rkey.as_bytes())?;
                    key.rkey = start..out.len();
                }
                RecordColumn::Bucket => put(out, &repo.bucket.to_be_bytes())?,
                RecordColumn::Cid => put(out, cid)?,
                RecordColumn::Rev => put(out, repo.rev.as_bytes())?,
                RecordColumn::Value => {
                    out.extend_from_slice(&i32::try_from(json.len() + 1).ok()?.to_be_bytes());
                    out.push(JSONB_VERSION);
                    out.extend_from_slice(json.as_bytes());
                }
                RecordColumn::Problem => match problem {
                    Some(problem) => put(out, problem.as_bytes())?,
                    None => out.extend_from_slice(&NULL.to_be_bytes()),
                },
                RecordColumn::Original => out.extend_from_slice(&NULL.to_be_bytes()),
                RecordColumn::Proof => put(out, b"e")?,
            }
        }
        self.keys.push(key);
        Some(())
    }

    /// Returns the rows for the change log: creates that were not caused by the stream. `ordinal` is the first one.
    pub fn changes(&self, repo: &Repo, segment: i16, batch: i64, ordinal: i32) -> Option<Vec<u8>> {
        let mut out = Vec::with_capacity(self.keys.len() * 256);
        for (key, ordinal) in self.keys.iter().zip(ordinal..) {
            let row = if key.is_second { &self.second } else { &self.first };
            put_count(&mut out, repo.layout.changes.len())?;
            for column in &repo.layout.changes {
                match column {
                    ChangeColumn::Segment => put(&mut out, &segment.to_be_bytes())?,
                    ChangeColumn::Batch => put(&mut out, &batch.to_be_bytes())?,
                    ChangeColumn::Ordinal => put(&mut out, &ordinal.to_be_bytes())?,
                    ChangeColumn::Live => put(&mut out, &[0])?,
                    ChangeColumn::Action => put(&mut out, b"create")?,
                    ChangeColumn::Did => put(&mut out, repo.did.as_bytes())?,
                    ChangeColumn::Collection => out.extend_from_slice(&row[key.collection.clone()]),
                    ChangeColumn::Rkey => out.extend_from_slice(&row[key.rkey.clone()]),
                    ChangeColumn::Bucket => put(&mut out, &repo.bucket.to_be_bytes())?,
                    ChangeColumn::Cid => put(&mut out, &key.cid)?,
                    ChangeColumn::Rev => put(&mut out, repo.rev.as_bytes())?,
                }
            }
        }
        Some(out)
    }
}

fn put_count(out: &mut Vec<u8>, fields: usize) -> Option<()> {
    out.extend_from_slice(&i16::try_from(fields).ok()?.to_be_bytes());
    Some(())
}

fn put(out: &mut Vec<u8>, value: &[u8]) -> Option<()> {
    out.extend_from_slice(&i32::try_from(value.len()).ok()?.to_be_bytes());
    out.extend_from_slice(value);
    Some(())
}
