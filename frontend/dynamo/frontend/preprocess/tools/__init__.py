"""How models write calls of tools, one file for each format.

All parsers keep the same rules:

- Text that may be the beginning of a marker is held back until it is certain. At the end of the text it is content.
- What turns out to be no call is content: as it was written, without the markers around it.
- Arguments are given as they come where the format has them as one JSON text. If something comes that cannot be JSON, the call
  ends there, and the rest is content.
- A call that the text's end cuts off stays as far as it was given. If its name was not certain, what there is of it is content.
- White space that only separates calls from each other, or from the answer's beginning and end, is layout, and left out.
- No more than MAX_HELD_CHARS are held back; a longer text is not waited for, and is content.
"""
