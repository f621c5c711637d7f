"""Limits of the HTTP server: connections and websockets by network."""
