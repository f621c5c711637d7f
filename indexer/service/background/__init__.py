"""Background tasks of the daemon: identities, handles, erasure, change log retention and shard ownership."""
