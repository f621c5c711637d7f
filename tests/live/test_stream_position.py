"""The position in the stream of the connected relay."""

from indexer.live.stream_position import StreamPosition
from indexer.sync.repo import StreamPoint
from indexer.sync.stream import Watermark

RELAY = "wss://relay.test"


def test_last_stored_message_is_the_last_one_that_is_stored_with_all_before_it() -> None:
    known = False
    position = StreamPosition(lambda: known)
    watermark = Watermark(7, "2026-01-01T00:00:01Z")
    position.begin(RELAY, 2, Watermark())
    known = True
    assert position.last_stored() is None, "no message has arrived"
    known = False
    position.begin(RELAY, 2, watermark)
    assert position.last_stored() is None, "messages may be missing"
    known = True
    assert position.last_stored() == StreamPoint(RELAY, 2, 7, 1_767_225_601.0)
    watermark.add(8, "2026-01-01T00:00:02Z")
    watermark.add(9, "no time")
    watermark.mark_done([9])
    assert position.last_stored() == StreamPoint(RELAY, 2, 7, 1_767_225_601.0)
    watermark.mark_done([8])
    assert position.last_stored() == StreamPoint(RELAY, 2, 9, None)
