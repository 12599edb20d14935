"""Parsers for the tool calls that models write, one file per format.

All parsers follow the same rules:

- Text that may be the beginning of a marker is held back until that is decided. At the end of the text it is content.
- Text that turns out not to be a call is content, unchanged, without the markers around it.
- Arguments are streamed if the format writes them as one JSON text. Where that stops being JSON, the call ends and the rest is
  content.
- A call that the end of the text cuts off keeps the arguments so far. If its name was not complete, its text is content.
- White space between calls, or between calls and the beginning or end of the text, is dropped.
- At most MAX_HELD_CHARS are held back; longer text is content.
"""
