"""Decoding, verification and exports. Only this package knows whether the native core is used."""
