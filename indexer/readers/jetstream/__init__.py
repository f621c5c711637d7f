"""The feed for clients of Jetstream."""
