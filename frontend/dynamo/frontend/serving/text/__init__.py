"""Text generation, from text to text.

| module | holds |
|---|---|
| `deltas` | what engines respond step by step, read within bounds |
| `generation` | one generation: tokenized, dispatched, moved to another instance if its own dies, detokenized |
| `reported_usage` | what engines report, within what a request allows, and of a whole response |
| `text_models` | the text side of each language model: prepared when it appears, loaded when it is used |
"""
