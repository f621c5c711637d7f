"""Identities: resolve DIDs to signing keys, hosts and handles, and verify handles (docs/protocol.md#identity)."""
