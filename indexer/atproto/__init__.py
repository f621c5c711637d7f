"""Data formats of the AT Protocol, as pure functions: no I/O, clock, randomness or environment (docs/protocol.md)."""
