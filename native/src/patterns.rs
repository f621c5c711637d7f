//! Selects collections by patterns, as `CollectionFilter` of `indexer/atproto/syntax.py`.

use std::collections::HashSet;

/// Valid patterns: an NSID, `prefix.*`, or `*` for all; `!` and an NSID excludes a collection. Without patterns, no
/// collection is selected.
pub struct Patterns {
    exact: HashSet<String>,
    prefixes: Vec<String>,
    excluded: HashSet<String>,
}

impl Patterns {
    /// Creates the selection by these patterns.
    pub fn new<'a>(patterns: impl IntoIterator<Item = &'a str>) -> Self {
        let (mut exact, mut prefixes, mut excluded) = (HashSet::new(), Vec::new(), HashSet::new());
        for pattern in patterns {
            if let Some(prefix) = pattern.strip_suffix('*') {
                prefixes.push(prefix.to_owned());
            } else if let Some(collection) = pattern.strip_prefix('!') {
                excluded.insert(collection.to_owned());
            } else {
                exact.insert(pattern.to_owned());
            }
        }
        Patterns { exact, prefixes, excluded }
    }

    /// Returns `true` if one of the patterns matches the collection, and none excludes it.
    pub fn matches(&self, collection: &str) -> bool {
        (self.prefixes.iter().any(|prefix| collection.starts_with(prefix)) || self.exact.contains(collection))
            && !self.excluded.contains(collection)
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
        assert!(!Patterns::new(["*", "!a.b.c"]).matches("a.b.c"));
        assert!(Patterns::new(["*", "!a.b.c"]).matches("a.b.cd"));
        assert!(!Patterns::new([]).matches("a.b.c"));
    }
}
