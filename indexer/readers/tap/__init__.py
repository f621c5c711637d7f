"""The feed for clients of tap."""
