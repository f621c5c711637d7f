"""The connection to a relay's firehose."""
