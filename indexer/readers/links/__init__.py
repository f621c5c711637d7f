"""Links between records, derived from the change log."""
