//! The native core of atproto-indexer: decodes `#commit` frames, verifies commits and exports, and converts records to
//! JSON.
//!
//! **The Python code is the reference.** For a commit without any flaw, whose values are ordinary, this crate returns
//! exactly what `indexer/sync/events.py`, `indexer/sync/verify.py` and `indexer/atproto/record.py` return. In every
//! other case it returns `None`, and the caller asks the reference: for a malformed byte, a wrong hash or signature, a
//! missing block, and also for anything valid that is rare. So there are no reasons and no messages in this crate, and
//! it is correct if it never *accepts* something with another result. `tests/core/test_native_core.py`,
//! `tests/core/test_native_frames.py` and `tests/core/test_native_reader.py` compare the two.
//!
//! What comes from outside is bounded before it is used: sizes first, then counts, then depth. Nothing recurses
//! without a limit on the depth, and there is no `unsafe`.

pub mod car;
pub mod cbor;
pub mod cid;
pub mod commit;
pub mod copy_rows;
pub mod export;
pub mod frame;
pub mod hash;
pub mod job;
pub mod keys;
pub mod limits;
pub mod mst;
pub mod path;
pub mod patterns;
#[cfg(feature = "python")]
mod python;
#[cfg(feature = "python")]
mod python_export;
#[cfg(feature = "python")]
mod python_frame;
#[cfg(feature = "python")]
mod python_tuple;
pub mod spool;
pub mod syntax;
pub mod verify;
