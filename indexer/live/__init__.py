"""The live path: read the firehose, look up keys, plan batches of messages, and write them."""
