"""Log lines, metrics, health checks and the status page."""
