"""The generator of the documentation."""
