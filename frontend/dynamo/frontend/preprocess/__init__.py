"""From text to token ids and back: chat templates, tokenizers, media, and what models write for tools and as reasoning.

| module | holds |
|---|---|
| `checks` | what is checked of requests for text, whatever their model takes |
| `media` | images and other media |
| `offload` | the Python code that a large request needs, beside other requests |
| `parser_registry` | the parser of each format of tool calls and reasoning, as a table |
| `parsers` | split a model's output into content, reasoning and tool calls |
| `pipeline` | one model's text pipeline |
| `plain` | the text side of a model whose engine takes text and generates text |
| `reasoning` | parsers of reasoning |
| `shared` | values that are costly to make and to keep, shared and evicted by size |
| `templates` | chat templates |
| `text` | requests and responses of text generation in terms of text |
| `text_files` | tokenizers and chat templates in memory, by the digests of their files |
| `tokens` | tokenizers, and token ids back to text |
| `tools` | parsers of tool calls |
"""
