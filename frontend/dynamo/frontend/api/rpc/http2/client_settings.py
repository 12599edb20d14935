"""What the settings of a client change: how it is sent to."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.frontend.api.rpc.http2 import frames
from dynamo.frontend.api.rpc.http2.frames import ConnectionFailure, ErrorCode
from dynamo.frontend.api.rpc.http2.sender import Outgoing, Sender
from dynamo.frontend.api.rpc.http2.windows import WindowOverflow


def apply_settings(payload: bytes, sender: Sender, outs: Sequence[Outgoing]) -> None:
    """Apply the payload of a SETTINGS frame to what a connection sends, and to the windows of its streams.

    Raises ConnectionFailure for a setting that is not valid.
    """
    window = sender.initial_window
    for key, value in frames.decode_settings(payload):
        if key == frames.INITIAL_WINDOW_SIZE:
            window = _checked_window(value)
        else:
            _apply(key, value, sender)
    _resize(window, sender, outs)  # once for a frame: all streams have one


def _apply(key: int, value: int, sender: Sender) -> None:
    if key == frames.MAX_FRAME_SIZE:
        if not frames.DEFAULT_FRAME_BYTES <= value <= frames.MAX_FRAME_BYTES:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_MAX_FRAME_SIZE is {value}")
        sender.max_frame_bytes = value
    elif key == frames.HEADER_TABLE_SIZE:
        sender.encoder.table_resized(value)
    elif key == frames.ENABLE_PUSH and value > 1:
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_ENABLE_PUSH is {value}")


def _resize(size: int, sender: Sender, outs: Sequence[Outgoing]) -> None:
    more, sender.initial_window = size - sender.initial_window, size
    if not more:
        return
    for out in outs:
        try:
            out.window.grow(more)
        except WindowOverflow:
            raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, "a window is over 2^31-1") from None


def _checked_window(size: int) -> int:
    if size > frames.MAX_WINDOW_BYTES:
        raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE is {size}")
    return size
