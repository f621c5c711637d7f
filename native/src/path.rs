//! Syntax of the paths of records, as in `indexer/atproto/syntax.py` (docs/protocol.md#limits).

const MAX_NSID_BYTES: usize = 317;
const MAX_SEGMENT_BYTES: usize = 63;
const MIN_SEGMENTS: usize = 3;
const MAX_RKEY_BYTES: usize = 512;

/// Returns the collection and the record key of a path; `None` if it is not valid.
pub fn split_path(path: &[u8]) -> Option<(&str, &str)> {
    let path = std::str::from_utf8(path).ok()?;
    let (collection, rkey) = path.split_once('/')?;
    (is_nsid(collection) && is_record_key(rkey)).then_some((collection, rkey))
}

fn is_nsid(text: &str) -> bool {
    let Some((authority, name)) = text.rsplit_once('.') else { return false };
    let starts_with_letter = |segment: &str| segment.starts_with(|first: char| first.is_ascii_alphabetic());
    text.len() <= MAX_NSID_BYTES
        && authority.split('.').count() >= MIN_SEGMENTS - 1
        && starts_with_letter(authority)
        && authority.split('.').all(is_domain_label)
        && starts_with_letter(name)
        && name.len() <= MAX_SEGMENT_BYTES
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

fn is_domain_label(label: &str) -> bool {
    (1..=MAX_SEGMENT_BYTES).contains(&label.len())
        && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        && !label.starts_with('-')
        && !label.ends_with('-')
}

fn is_record_key(text: &str) -> bool {
    (1..=MAX_RKEY_BYTES).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_~.:-".contains(&byte))
        && text != "."
        && text != ".."
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths() {
        for path in ["a.b.c/self", "app.bsky.feed.post/3jzfcijpj2z2a", "a-b.c0.Ab/_~.:-", "a.0.b/..."] {
            assert!(split_path(path.as_bytes()).is_some(), "{path}");
        }
        let long = format!("a.b.c/{}", "k".repeat(MAX_RKEY_BYTES + 1));
        for path in
            ["", "/", "a.b.c", "a.b.c/", "a.b/k", "a.b.c/k/k", "a.b.c/.", "a.b.c/..", "0a.b.c/k", "a.b.0c/k", &long]
        {
            assert_eq!(split_path(path.as_bytes()), None, "{path}");
        }
        for path in ["a..c/k", "-a.b.c/k", "a-.b.c/k", "a.b.c-d/k", "a.b.c/k k", "a.b.c/é", "é.b.c/k"] {
            assert_eq!(split_path(path.as_bytes()), None, "{path}");
        }
        assert_eq!(split_path(b"a.b.c/\xff"), None);
    }
}
