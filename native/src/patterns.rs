//! Selects collections by patterns, as `CollectionFilter` of `indexer/atproto/syntax.py`.

use std::collections::HashSet;

/// Valid patterns: an NSID, `prefix.*`, or `*` for all. Without patterns, no collection is selected.
pub struct Patterns {
    exact: HashSet<String>,
    prefixes: Vec<String>,
}

impl Patterns {
    /// Creates the selection by these patterns.
    pub fn new<'a>(patterns: impl IntoIterator<Item = &'a str>) -> Self {
        let (mut exact, mut prefixes) = (HashSet::new(), Vec::new());
        for pattern in patterns {
            match pattern.strip_suffix('*') {
                Some(prefix) => prefixes.push(prefix.to_owned()),
                None => {
                    exact.insert(pattern.to_owned());
                }
            }
        }
        Patterns { exact, prefixes }
    }

    /// Returns `true` if one of the patterns matches the collection.
    pub fn matches(&self, collection: &str) -> bool {
        self.prefixes.iter().any(|prefix| collection.starts_with(prefix)) || self.exact.contains(collection)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_select_collections() {
        let patterns = Patterns::new(["com.example.*", "app.bsky.feed.like"]);
        assert!(patterns.matches("com.example.thing"));
        assert!(patterns.matches("app.bsky.feed.like"));
        assert!(!patterns.matches("com.examples.thing"));
        assert!(!patterns.matches("app.bsky.feed.likes"));
        assert!(Patterns::new(["*"]).matches("a.b.c"));
        assert!(!Patterns::new([]).matches("a.b.c"));
    }
}
