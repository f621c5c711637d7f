//! Syntax of identifiers, as in `indexer/atproto/syntax.py` (docs/protocol.md#limits).

const MAX_DID_BYTES: usize = 2_048;
const TID_BYTES: usize = 13;

/// Returns `true` if the text is a DID of any method.
pub fn is_did(text: &str) -> bool {
    let Some((method, id)) = text.strip_prefix("did:").and_then(|rest| rest.split_once(':')) else {
        return false;
    };
    let id_byte = |byte: &u8| byte.is_ascii_alphanumeric() || b"._:%-".contains(byte);
    text.len() <= MAX_DID_BYTES
        && !method.is_empty()
        && method.bytes().all(|byte| byte.is_ascii_lowercase())
        && id.as_bytes().iter().all(id_byte)
        && id.bytes().last().is_some_and(|byte| byte != b':' && byte != b'%')
}

/// Returns `true` if the text is a TID.
pub fn is_tid(text: &str) -> bool {
    text.len() == TID_BYTES
        && matches!(text.as_bytes()[0], b'2'..=b'7' | b'a'..=b'j')
        && text.bytes().all(|byte| matches!(byte, b'2'..=b'7' | b'a'..=b'z'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dids() {
        for text in ["did:plc:z72i7hdynmk6r22z27h6tvur", "did:web:a.example%3A80", "did:m:a:b"] {
            assert!(is_did(text), "{text}");
        }
        for text in
            ["", "did:", "did:plc", "did:plc:", "did::a", "did:PLC:a", "did:m:a:", "did:m:a%", "did:m:a/b", "did:m:é"]
        {
            assert!(!is_did(text), "{text}");
        }
    }

    #[test]
    fn tids() {
        assert!(is_tid("3jzfcijpj2z2a"));
        for text in ["", "3jzfcijpj2z2", "3jzfcijpj2z2aa", "kjzfcijpj2z2a", "3jzfcijpj2z21", "3JZFCIJPJ2Z2A"] {
            assert!(!is_tid(text), "{text}");
        }
    }
}
