"""The migrations, in order of their revision numbers."""
