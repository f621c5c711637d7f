"""Remove secrets from text for people: passwords, tokens and keys in URLs, connection parameters and headers."""

import re

REDACTED = "***"

_NAME = r"(?:password|passwd|passphrase|secret|token|api[_-]?key|authorization)[\w.-]{0,32}"
_VALUE = r"(?:(?:Bearer|Basic)\s+)?(?:'[^']*'|\"[^\"]*\"|[^\s&,;\"'(){}\[\]]+)"
_is_secret_name = re.compile(_NAME, re.IGNORECASE).search
_CREDENTIALS = re.compile(r"(://[^\s/?#:@\"']*):[^\s/?#\"']*@")
# A colon follows a name in quotes or the name of a header; in a sentence ("unexpected token: x") it means nothing.
_ASSIGNMENT = re.compile(rf"({_NAME}(?:[\"']?\s*=|[\"']\s*:)\s*|\bauthorization:\s*){_VALUE}", re.IGNORECASE)
_BEARER = re.compile(r"\b(Bearer)\s+[\w.~+/=-]{8,}", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Return True if a field, a parameter or a header of this name holds a secret."""
    return _is_secret_name(name) is not None


def without_secrets(text: str) -> str:
    """Return the text with `***` in place of each secret that its form reveals."""
    text = _CREDENTIALS.sub(rf"\1:{REDACTED}@", text)
    text = _ASSIGNMENT.sub(rf"\1{REDACTED}", text)
    return _BEARER.sub(rf"\1 {REDACTED}", text)
