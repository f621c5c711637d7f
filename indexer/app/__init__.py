"""The settings, the stages, and the daemon that is put together from them."""
