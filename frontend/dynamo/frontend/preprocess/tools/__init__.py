"""Parsers for the tool calls that models write. `dynamo.frontend.preprocess.parser_registry` has the table of formats.

| module | holds |
|---|---|
| `call_ids` | ids of earlier calls in the form that some chat templates expect |
| `formats` | formats that need code of their own |
| `json_call` | calls written as a JSON object |
| `json_calls` | calls written as JSON objects, alone or in a list, between markers |
| `marked_calls` | calls written as a name and JSON arguments between markers, most of which are special tokens |
| `markers` | find markers in text that is streamed in pieces |
| `names` | names and parameter schemas of a request's tools |
| `prompt` | describe tools, calls and results in plain messages, for chat templates that have none of these |
| `reader` | the base of output parsers: a state machine that reads text step by step |
| `xml_calls` | calls written as tags, with one tag for each argument |

All parsers follow the same rules:

- Text that may be the beginning of a marker is held back until that is decided. At the end of the text it is content.
- Text that turns out not to be a call is content, unchanged, without the markers around it.
- Arguments are streamed if the format writes them as one JSON text. Where that stops being JSON, the call ends and the rest is
  content.
- A call that the end of the text cuts off keeps the arguments so far. If its name was not complete, its text is content.
- White space between calls, or between calls and the beginning or end of the text, is dropped.
- At most MAX_HELD_CHARS are held back; longer text is content.
"""
