"""The long-running parts of the daemon: live path, resyncs, crawls and background tasks."""
