"""The HTTP server: health, metrics, the status document and the status page."""
