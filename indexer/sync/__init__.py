"""The sync rules of the protocol, as pure functions: time, keys and limits are arguments, and there is no I/O."""
