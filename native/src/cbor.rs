//! Strict DAG-CBOR: heads, and records as AT Protocol JSON (docs/protocol.md#record-json).
//!
//! `record_json` returns the JSON of ordinary records only. For everything else, valid or not, it returns `None`, and
//! the reference decides (`indexer/atproto/record.py`).

use memchr::memchr_iter;

use crate::cid::{as_cid, write_text, Cid};

/// Levels of nesting up to which a record is converted.
pub const MAX_DEPTH: usize = 64;

/// Major types of RFC 8949.
pub mod major {
    #![allow(missing_docs)]
    pub const UNSIGNED: u8 = 0;
    pub const NEGATIVE: u8 = 1;
    pub const BYTES: u8 = 2;
    pub const TEXT: u8 = 3;
    pub const ARRAY: u8 = 4;
    pub const MAP: u8 = 5;
    pub const TAG: u8 = 6;
    pub const SIMPLE: u8 = 7;
}

const NULL_HEAD: u8 = 0xF6;
// Arguments of major type 7.
const FALSE: u64 = 20;
const TRUE: u64 = 21;
const NULL: u64 = 22;

const LINK_TAG: u64 = 42;
const LARGEST_IN_HEAD: u64 = 23;

/// Reads heads and strings of canonical DAG-CBOR. Every method returns `None` at bytes that are not canonical.
#[derive(Clone)]
pub struct Reader<'a> {
    data: &'a [u8],
    position: usize,
    items_left: usize,
}

impl<'a> Reader<'a> {
    /// Creates a reader at the first byte.
    pub fn new(data: &'a [u8]) -> Self {
        Self::limited(data, usize::MAX)
    }

    /// Creates a reader that reads at most this number of items: containers, keys, values and tags at all levels.
    pub fn limited(data: &'a [u8], max_items: usize) -> Self {
        Reader { data, position: 0, items_left: max_items }
    }

    /// Returns the offset of the next byte.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Returns `true` if there are no more bytes.
    pub fn at_end(&self) -> bool {
        self.position == self.data.len()
    }

    /// Returns the next bytes.
    pub fn take(&mut self, size: usize) -> Option<&'a [u8]> {
        let end = self.position.checked_add(size)?;
        let bytes = self.data.get(self.position..end)?;
        self.position = end;
        Some(bytes)
    }

    /// Reads these bytes.
    pub fn expect(&mut self, bytes: &[u8]) -> Option<()> {
        (self.take(bytes.len())? == bytes).then_some(())
    }

    /// Returns the major type and the argument of the next item. For major type 7, the argument is the lower 5 bits.
    pub fn head(&mut self) -> Option<(u8, u64)> {
        let first = *self.data.get(self.position)?;
        self.position += 1;
        self.items_left = self.items_left.checked_sub(1)?;
        let (major, argument) = (first >> 5, u64::from(first & 31));
        if argument <= LARGEST_IN_HEAD || major == major::SIMPLE {
            return Some((major, argument));
        }
        let (size, smallest) = match argument {
            24 => (1, 24),
            25 => (2, 1 << 8),
            26 => (4, 1 << 16),
            27 => (8, 1 << 32),
            _ => return None,
        };
        let value = self.take(size)?.iter().fold(0, |value, byte| value << 8 | u64::from(*byte));
        (value >= smallest).then_some((major, value))
    }

    /// Returns the next item if it is a text.
    pub fn text(&mut self) -> Option<&'a str> {
        match self.head()? {
            (major::TEXT, size) => self.utf8(size),
            _ => None,
        }
    }

    /// Returns the next key of a map. `last` is the key before it: keys have an order, and none occurs twice.
    pub fn key(&mut self, last: Option<&str>) -> Option<&'a str> {
        let key = self.text()?;
        last.is_none_or(|last| (last.len(), last) < (key.len(), key)).then_some(key)
    }

    /// Returns the next item if it is an unsigned integer.
    pub fn unsigned(&mut self) -> Option<u64> {
        match self.head()? {
            (major::UNSIGNED, value) => Some(value),
            _ => None,
        }
    }

    /// Returns the number of items if the next item is a list.
    pub fn list(&mut self) -> Option<u64> {
        match self.head()? {
            (major::ARRAY, count) => Some(count),
            _ => None,
        }
    }

    /// Returns the number of entries if the next item is a map.
    pub fn map(&mut self) -> Option<u64> {
        match self.head()? {
            (major::MAP, count) => Some(count),
            _ => None,
        }
    }

    /// Returns `Some(None)` if the next item is null; otherwise the item that `read` reads.
    pub fn optional<T>(&mut self, read: impl FnOnce(&mut Self) -> Option<T>) -> Option<Option<T>> {
        if self.data.get(self.position) != Some(&NULL_HEAD) {
            return read(self).map(Some);
        }
        self.head()?;
        Some(None)
    }

    /// Reads any item, with at most `levels` levels of containers. Floats are not read.
    pub fn skip(&mut self, levels: usize) -> Option<()> {
        match self.head()? {
            (major::UNSIGNED | major::NEGATIVE, _) | (major::SIMPLE, FALSE | TRUE | NULL) => {}
            (major::BYTES, size) => drop(self.take(usize::try_from(size).ok()?)?),
            (major::TEXT, size) => drop(self.utf8(size)?),
            (major::TAG, LINK_TAG) => drop(self.tagged_cid()?),
            (major::ARRAY, count) => {
                let below = levels.checked_sub(1)?;
                for _ in 0..count {
                    self.skip(below)?;
                }
            }
            (major::MAP, count) => {
                let (below, mut last) = (levels.checked_sub(1)?, None);
                for _ in 0..count {
                    last = Some(self.key(last)?);
                    self.skip(below)?;
                }
            }
            _ => return None,
        }
        Some(())
    }

    /// Returns the next item if it is a byte string.
    pub fn bytes(&mut self) -> Option<&'a [u8]> {
        match self.head()? {
            (major::BYTES, size) => self.take(usize::try_from(size).ok()?),
            _ => None,
        }
    }

    /// Returns the next item if it is a link to a CID of the protocol's form.
    pub fn link(&mut self) -> Option<&'a Cid> {
        match self.head()? {
            (major::TAG, LINK_TAG) => self.tagged_cid(),
            _ => None,
        }
    }

    fn utf8(&mut self, size: u64) -> Option<&'a str> {
        std::str::from_utf8(self.take(usize::try_from(size).ok()?)?).ok()
    }

    /// Returns the CID after the head of tag 42.
    fn tagged_cid(&mut self) -> Option<&'a Cid> {
        let (prefix, cid) = self.bytes()?.split_first()?;
        if *prefix == 0 {
            as_cid(cid)
        } else {
            None
        }
    }
}

/// The form of a record, as `Problem` of `indexer/atproto/record.py` describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A map whose `$type` is the collection.
    Usual = 0,
    /// Not a map.
    NotAMap = 1,
    /// A map without a text `$type`.
    NoType = 2,
    /// A map with another `$type` than the collection.
    OtherType = 3,
}

/// An ordinary record as AT Protocol JSON.
#[derive(Debug, PartialEq, Eq)]
pub struct RecordJson {
    /// The JSON, without spaces, keys in the order of the record.
    pub json: String,
    /// Number of items: containers, keys, values and tags at all levels.
    pub items: usize,
    /// The form of the record.
    pub shape: Shape,
}

/// A container whose items are being converted.
struct Open<'a> {
    is_map: bool,
    left: u64,
    first: bool,
    last_key: Option<&'a str>,
}

/// Returns the JSON of an ordinary record of `collection`, else `None`.
///
/// Not ordinary are: bytes that are not canonical; floats, and integers beyond those of 64 bits with a sign; links of
/// other forms; byte strings that may be a CID; the texts `$link` and `$bytes`, and U+0000, anywhere; more than
/// `MAX_DEPTH` levels; more than `max_items` items or `max_json_bytes` bytes of JSON.
pub fn record_json(block: &[u8], collection: &str, max_items: usize, max_json_bytes: usize) -> Option<RecordJson> {
    if has_reserved_key(block) {
        return None;
    }
    let mut converter = Converter {
        reader: Reader::new(block),
        out: Vec::with_capacity((block.len() + block.len() / 2).min(max_json_bytes)),
        open: Vec::new(),
        items: 0,
        type_: None,
    };
    let is_map = converter.reader.data.first()? >> 5 == major::MAP;
    converter.item()?;
    while let Some(top) = converter.open.last_mut() {
        if top.left == 0 {
            converter.out.push(if top.is_map { b'}' } else { b']' });
            converter.open.pop();
        } else {
            top.left -= 1;
            converter.entry()?;
        }
        if converter.items > max_items || converter.out.len() > max_json_bytes {
            return None;
        }
    }
    if !converter.reader.at_end() || converter.items > max_items || converter.out.len() > max_json_bytes {
        return None;
    }
    let shape = match converter.type_ {
        _ if !is_map => Shape::NotAMap,
        Some(type_) if type_ == collection => Shape::Usual,
        Some(_) => Shape::OtherType,
        None => Shape::NoType,
    };
    // All parts are texts that were checked, or ASCII.
    Some(RecordJson { json: String::from_utf8(converter.out).ok()?, items: converter.items, shape })
}

fn has_reserved_key(block: &[u8]) -> bool {
    memchr_iter(b'$', block).any(|at| block[at + 1..].starts_with(b"link") || block[at + 1..].starts_with(b"bytes"))
}

struct Converter<'a> {
    reader: Reader<'a>,
    out: Vec<u8>,
    open: Vec<Open<'a>>,
    items: usize,
    type_: Option<&'a str>,
}

impl<'a> Converter<'a> {
    /// Converts the next entry of the innermost container.
    fn entry(&mut self) -> Option<()> {
        let at_root = self.open.len() == 1;
        let top = self.open.last_mut()?;
        if !top.first {
            self.out.push(b',');
        }
        if !top.is_map {
            top.first = false;
            return self.item();
        }
        let key = self.reader.key(top.last_key)?;
        top.first = false;
        top.last_key = Some(key);
        self.items += 1;
        write_string(key, &mut self.out)?;
        self.out.push(b':');
        if at_root && key == "$type" {
            self.type_ = self.reader.clone().text();
        }
        self.item()
    }

    /// Converts the next item. Of a container only the beginning.
    fn item(&mut self) -> Option<()> {
        self.items += 1;
        match self.reader.head()? {
            (major::UNSIGNED, value) => write_integer(i64::try_from(value).ok()?, &mut self.out),
            (major::NEGATIVE, value) => write_integer(-1 - i64::try_from(value).ok()?, &mut self.out),
            (major::BYTES, size) => {
                let bytes = self.reader.take(usize::try_from(size).ok()?)?;
                if may_be_cid(bytes) {
                    return None;
                }
                self.out.extend_from_slice(b"{\"$bytes\":\"");
                write_base64(bytes, &mut self.out);
                self.out.extend_from_slice(b"\"}");
            }
            (major::TEXT, size) => write_string(self.reader.utf8(size)?, &mut self.out)?,
            (major::ARRAY, left) => self.begin(false, left)?,
            (major::MAP, left) => self.begin(true, left)?,
            (major::TAG, LINK_TAG) => {
                self.items += 1;
                let cid = self.reader.tagged_cid()?;
                self.out.extend_from_slice(b"{\"$link\":\"");
                write_text(cid, &mut self.out);
                self.out.extend_from_slice(b"\"}");
            }
            (major::SIMPLE, FALSE) => self.out.extend_from_slice(b"false"),
            (major::SIMPLE, TRUE) => self.out.extend_from_slice(b"true"),
            (major::SIMPLE, NULL) => self.out.extend_from_slice(b"null"),
            _ => return None,
        }
        Some(())
    }

    fn begin(&mut self, is_map: bool, left: u64) -> Option<()> {
        if self.open.len() >= MAX_DEPTH {
            return None;
        }
        self.out.push(if is_map { b'{' } else { b'[' });
        self.open.push(Open { is_map, left, first: true, last_key: None });
        Some(())
    }
}

/// Returns `true` if a lenient parser may take the bytes for a CID: those of version 1 begin with 01, of version 0
/// with 12.
fn may_be_cid(bytes: &[u8]) -> bool {
    matches!(bytes.first(), Some(0x01 | 0x12))
}

fn write_integer(value: i64, out: &mut Vec<u8>) {
    out.extend_from_slice(value.to_string().as_bytes());
}

/// Appends a JSON string as orjson writes it. Returns `None` if it contains U+0000, which `jsonb` cannot hold.
fn write_string(text: &str, out: &mut Vec<u8>) -> Option<()> {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    out.push(b'"');
    let bytes = text.as_bytes();
    let mut copied = 0;
    for (at, byte) in bytes.iter().enumerate() {
        if *byte >= b' ' && *byte != b'"' && *byte != b'\\' {
            continue;
        }
        out.extend_from_slice(&bytes[copied..at]);
        copied = at + 1;
        match byte {
            0 => return None,
            b'"' => out.extend_from_slice(b"\\\""),
            b'\\' => out.extend_from_slice(b"\\\\"),
            0x08 => out.extend_from_slice(b"\\b"),
            b'\t' => out.extend_from_slice(b"\\t"),
            b'\n' => out.extend_from_slice(b"\\n"),
            0x0C => out.extend_from_slice(b"\\f"),
            b'\r' => out.extend_from_slice(b"\\r"),
            _ => {
                out.extend_from_slice(b"\\u00");
                out.push(HEX[usize::from(byte >> 4)]);
                out.push(HEX[usize::from(byte & 15)]);
            }
        }
    }
    out.extend_from_slice(&bytes[copied..]);
    out.push(b'"');
    Some(())
}

/// Appends base64 without padding.
fn write_base64(bytes: &[u8], out: &mut Vec<u8>) {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for chunk in bytes.chunks(3) {
        let bits = chunk.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for index in 0..=chunk.len() {
            out.push(ALPHABET[(bits >> (18 - 6 * index) & 63) as usize]);
        }
    }
}
