"""The command line: one module per command family, and the modules that do the work beside them."""
