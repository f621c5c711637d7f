//! The bytes of one export as they arrive: each block is hashed and indexed by its CID.
//!
//! The most recent bytes are in a buffer, the others in a file without a name. `feed` returns false at anything that is
//! not ordinary, and does not say why. Ordinary is a CAR file with one root and with CIDs of the protocol's form, within
//! the limits. The caller then takes the bytes that are not indexed, and the reference goes on with them.
//!
//! The index holds 12 bytes per slot: a part of a keyed hash, and the offset of a section, where the whole CID is
//! compared. Its key is random, so nobody can construct collisions. The file is read in pages, not mapped.

use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use crate::car::{read_varint, section, usual_header};
use crate::cid::{as_cid, matches, Cid, CID_BYTES};

/// Size of the usual header.
const HEADER_BYTES: usize = 59;
/// Bytes of the longest length that is read: 256 MiB.
const MAX_LENGTH_BYTES: usize = 4;
const PAGES: usize = 64;
const TABLES: usize = 256;
const FIRST_SLOTS: usize = 16;
/// Bytes of a block's length and CID in [`Spool::size`].
const HEAD_BYTES: u64 = 4 + CID_BYTES as u64;

/// The limits of a file, with the names of `indexer/atproto/limits.py`.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct FileLimits {
    /// One block, in bytes.
    pub block_bytes: usize,
    /// The whole file, in bytes.
    pub repo_bytes: u64,
    /// Blocks of the file.
    pub repo_blocks: usize,
}

/// The sizes of the buffers of a spool.
#[derive(Clone, Copy, Debug)]
pub struct Buffers {
    /// Bytes after which the buffer is written to the file.
    pub buffer_bytes: usize,
    /// Bytes that are read from the file at once, at least 1.
    pub page_bytes: usize,
}

/// A spool that several threads use, and that can be closed at any time.
pub struct SharedSpool {
    spool: Mutex<Spool>,
    closed: Arc<AtomicBool>,
}

/// Access to the spool for one thread. Its end frees the memory and the file if the spool was closed meanwhile.
pub struct SpoolGuard<'a> {
    shared: &'a SharedSpool,
    guard: Option<MutexGuard<'a, Spool>>,
}

impl SharedSpool {
    /// Shares an empty spool.
    pub fn new(directory: PathBuf, limits: FileLimits, buffers: Buffers) -> Self {
        let closed = Arc::new(AtomicBool::new(false));
        let spool = Mutex::new(Spool::new(directory, limits, buffers, closed.clone()));
        Self { spool, closed }
    }

    /// Waits for the spool. Fails if an earlier call has panicked.
    pub fn lock(&self) -> Result<SpoolGuard<'_>, PoisonError<MutexGuard<'_, Spool>>> {
        Ok(SpoolGuard { shared: self, guard: Some(self.spool.lock()?) })
    }

    /// Frees the memory and the file now, or at the end of the call that uses them, which fails at its next block.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.clear_if_closed();
    }

    fn clear_if_closed(&self) {
        if self.closed.load(Ordering::SeqCst) {
            match self.spool.try_lock() {
                Ok(mut spool) => spool.clear(),
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().clear(),
                Err(TryLockError::WouldBlock) => {} // the guard of that thread does it
            }
        }
    }
}

impl std::ops::Deref for SpoolGuard<'_> {
    type Target = Spool;

    fn deref(&self) -> &Spool {
        self.guard.as_ref().expect("the lock is held until the guard ends")
    }
}

impl std::ops::DerefMut for SpoolGuard<'_> {
    fn deref_mut(&mut self) -> &mut Spool {
        self.guard.as_mut().expect("the lock is held until the guard ends")
    }
}

impl Drop for SpoolGuard<'_> {
    fn drop(&mut self) {
        self.guard = None; // release the lock first, because `close` does not wait for it
        self.shared.clear_if_closed();
    }
}

/// One export. `feed` all of it, call `is_whole`, then read any `block`.
pub struct Spool {
    closed: Arc<AtomicBool>,
    directory: PathBuf,
    limits: FileLimits,
    buffers: Buffers,
    file: Option<File>,
    file_size: u64,
    buffer: Vec<u8>,
    /// The sections up to this position of the buffer are indexed.
    parsed: usize,
    root: Option<Cid>,
    header_read: bool,
    sections: usize,
    blocks: usize,
    size: u64,
    index: Index,
    pages: Vec<Page>,
}

struct Page {
    number: u64,
    bytes: Vec<u8>,
}

enum Step {
    Done(usize),
    Incomplete,
    Unusual,
}

impl Spool {
    /// Creates an empty spool whose file will be in `directory`.
    fn new(directory: PathBuf, limits: FileLimits, buffers: Buffers, closed: Arc<AtomicBool>) -> Self {
        Self {
            closed,
            directory,
            limits,
            buffers,
            file: None,
            file_size: 0,
            buffer: Vec::new(),
            parsed: 0,
            root: None,
            header_read: false,
            sections: 0,
            blocks: 0,
            size: 0,
            index: Index::new(),
            pages: Vec::new(),
        }
    }

    /// Adds the next bytes of the file; false if they, or the bytes before them, are not ordinary.
    pub fn feed(&mut self, chunk: &[u8]) -> io::Result<bool> {
        self.buffer.extend_from_slice(chunk);
        if self.file_size + self.buffer.len() as u64 > self.limits.repo_bytes {
            return Ok(false);
        }
        loop {
            match self.next_section()? {
                Step::Done(end) => self.parsed = end,
                Step::Incomplete => break,
                Step::Unusual => return Ok(false),
            }
        }
        if self.parsed >= self.buffers.buffer_bytes {
            self.flush()?;
        }
        Ok(true)
    }

    /// Returns true if the file does not end inside its header or a section.
    pub fn is_whole(&self) -> bool {
        self.header_read && self.parsed == self.buffer.len()
    }

    /// Returns the number of indexed bytes, and of sections in them.
    pub fn indexed(&self) -> (u64, usize) {
        (self.file_size + self.parsed as u64, self.sections)
    }

    /// Returns the CID of the commit, if the usual header was read.
    pub fn root(&self) -> Option<&Cid> {
        self.root.as_ref()
    }

    /// Returns the number of different blocks.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Returns the size of all different blocks with a length of 4 bytes and a CID each.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Copies the block of a CID to `block`; false if there is none. Fails if the spool is closed.
    pub fn block(&mut self, cid: &[u8], block: &mut Vec<u8>) -> io::Result<bool> {
        if self.closed.load(Ordering::Relaxed) {
            return Err(io::Error::other("the export is closed"));
        }
        let Some(cid) = as_cid(cid) else { return Ok(false) };
        let Some((start, size)) = self.find(cid)? else { return Ok(false) };
        block.clear();
        self.read(start, size, block)?;
        Ok(true)
    }

    /// Removes the bytes that are not indexed, and returns them. The next call of `feed` begins with a section.
    pub fn take_rest(&mut self) -> Vec<u8> {
        self.header_read = true;
        self.buffer.split_off(self.parsed)
    }

    /// Frees the memory and the file. No block can be read any more.
    fn clear(&mut self) {
        self.file = None;
        self.file_size = 0;
        self.buffer = Vec::new();
        self.parsed = 0;
        self.index = Index::new();
        self.pages = Vec::new();
    }

    /// Indexes the section at `parsed`.
    fn next_section(&mut self) -> io::Result<Step> {
        let left = &self.buffer[self.parsed..];
        if !self.header_read {
            return Ok(self.header());
        }
        let Some((size, start)) = read_varint(left, 0) else {
            let incomplete = left.len() < MAX_LENGTH_BYTES && left.iter().all(|byte| *byte >= 0x80);
            return Ok(if incomplete { Step::Incomplete } else { Step::Unusual });
        };
        if size > self.limits.block_bytes.saturating_add(CID_BYTES) {
            return Ok(Step::Unusual);
        }
        if left.len() < start + size {
            return Ok(Step::Incomplete);
        }
        let Some((cid, block, end)) = section(left, 0) else { return Ok(Step::Unusual) };
        if self.sections >= self.limits.repo_blocks || !matches(cid, block) {
            return Ok(Step::Unusual);
        }
        self.sections += 1;
        let (cid, block_bytes) = (*cid, block.len() as u64);
        if self.find(&cid)?.is_none() {
            self.index.add(&cid, self.file_size + self.parsed as u64);
            self.blocks += 1;
            self.size += HEAD_BYTES + block_bytes;
        }
        Ok(Step::Done(self.parsed + end))
    }

    fn header(&mut self) -> Step {
        let has_other_size = self.buffer.first().is_some_and(|first| usize::from(*first) + 1 != HEADER_BYTES);
        if self.buffer.len() < HEADER_BYTES && !has_other_size {
            return Step::Incomplete;
        }
        match usual_header(&self.buffer) {
            Some((root, end)) => {
                self.root = Some(*root);
                self.header_read = true;
                Step::Done(end)
            }
            None => Step::Unusual,
        }
    }

    /// Returns the offset and the size of a block.
    fn find(&mut self, cid: &Cid) -> io::Result<Option<(u64, usize)>> {
        let (table, hash) = self.index.place(cid);
        let mut last = None;
        while let Some((slot, offset)) = self.index.tables[table].next_candidate(hash, last) {
            last = Some(slot);
            let mut head = Vec::new();
            self.read(offset, MAX_LENGTH_BYTES + CID_BYTES, &mut head)?;
            let Some((size, start)) = read_varint(&head, 0) else { continue };
            if head.get(start..start + CID_BYTES) == Some(cid) {
                return Ok(Some((offset + (start + CID_BYTES) as u64, size - CID_BYTES)));
            }
        }
        Ok(None)
    }

    /// Appends the bytes at `offset` to `target`: fewer than `size` if the file or the buffer ends before.
    ///
    /// No section is partly in the file and partly in the buffer.
    fn read(&mut self, offset: u64, size: usize, target: &mut Vec<u8>) -> io::Result<()> {
        if offset >= self.file_size {
            let start = usize::try_from(offset - self.file_size).unwrap_or(usize::MAX).min(self.buffer.len());
            let end = start.saturating_add(size).min(self.buffer.len());
            target.extend_from_slice(&self.buffer[start..end]);
            return Ok(());
        }
        let page_bytes = self.buffers.page_bytes as u64;
        let end = offset.saturating_add(size as u64).min(self.file_size);
        let mut position = offset;
        while position < end {
            let start = position % page_bytes;
            let page = self.page(position / page_bytes)?;
            let stop = (start + end - position).min(page.len() as u64);
            if stop <= start {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            target.extend_from_slice(&page[start as usize..stop as usize]);
            position += stop - start;
        }
        Ok(())
    }

    fn page(&mut self, number: u64) -> io::Result<&[u8]> {
        let slot = (number % PAGES as u64) as usize;
        if self.pages.is_empty() {
            self.pages.resize_with(PAGES, || Page { number: u64::MAX, bytes: Vec::new() });
        }
        let page = &mut self.pages[slot];
        if page.number != number {
            page.number = u64::MAX;
            page.bytes.resize(self.buffers.page_bytes, 0);
            let file = self.file.as_ref().ok_or(io::ErrorKind::NotFound)?;
            let read = read_full(file, &mut page.bytes, number * self.buffers.page_bytes as u64)?;
            page.bytes.truncate(read);
            page.number = number;
        }
        Ok(&page.bytes)
    }

    /// Writes the indexed sections to the file.
    fn flush(&mut self) -> io::Result<()> {
        if self.file.is_none() {
            self.file = Some(tempfile::tempfile_in(&self.directory)?);
        }
        if let Some(file) = &mut self.file {
            file.write_all(&self.buffer[..self.parsed])?;
        }
        self.file_size += self.parsed as u64;
        self.buffer.drain(..self.parsed);
        self.parsed = 0;
        self.pages.clear(); // the last page was incomplete
        Ok(())
    }
}

fn read_full(file: &File, target: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut read = 0;
    while read < target.len() {
        match file.read_at(&mut target[read..], offset + read as u64) {
            Ok(0) => break,
            Ok(count) => read += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(read)
}

/// Offsets by CID, in many small tables, because the event loop waits while a table grows.
struct Index {
    key: RandomState,
    tables: Vec<Table>,
}

impl Index {
    fn new() -> Self {
        Self { key: RandomState::new(), tables: (0..TABLES).map(|_| Table::default()).collect() }
    }

    /// Returns the table of a CID, and its hash within the table.
    fn place(&self, cid: &Cid) -> (usize, u32) {
        let hash = self.key.hash_one(cid);
        ((hash % TABLES as u64) as usize, (hash >> 32) as u32)
    }

    fn add(&mut self, cid: &Cid, offset: u64) {
        let (table, hash) = self.place(cid);
        self.tables[table].add(hash, offset);
    }
}

/// An open-addressing hash table, at most two thirds full. It holds offsets plus 1: 0 marks an empty slot.
#[derive(Default)]
struct Table {
    hashes: Vec<u32>,
    offsets: Vec<u64>,
    count: usize,
}

impl Table {
    /// Returns the next slot, after `last`, and the offset in it that `hash` may have.
    fn next_candidate(&self, hash: u32, last: Option<usize>) -> Option<(usize, u64)> {
        let mask = self.offsets.len().checked_sub(1)?;
        let mut slot = last.map_or(hash as usize, |slot| slot + 1) & mask;
        while self.offsets[slot] != 0 {
            if self.hashes[slot] == hash {
                return Some((slot, self.offsets[slot] - 1));
            }
            slot = (slot + 1) & mask;
        }
        None
    }

    fn add(&mut self, hash: u32, offset: u64) {
        self.count += 1;
        if 3 * self.count > 2 * self.offsets.len() {
            self.grow();
        }
        self.put(hash, offset + 1);
    }

    fn put(&mut self, hash: u32, offset: u64) {
        let mask = self.offsets.len() - 1;
        let mut slot = hash as usize & mask;
        while self.offsets[slot] != 0 {
            slot = (slot + 1) & mask;
        }
        self.offsets[slot] = offset;
        self.hashes[slot] = hash;
    }

    fn grow(&mut self) {
        let slots = (2 * self.offsets.len()).max(FIRST_SLOTS);
        let hashes = std::mem::replace(&mut self.hashes, vec![0; slots]);
        let offsets = std::mem::replace(&mut self.offsets, vec![0; slots]);
        for (hash, offset) in hashes.into_iter().zip(offsets) {
            if offset != 0 {
                self.put(hash, offset);
            }
        }
    }
}
