"""What the protocols for text generation share.

| module | holds |
|---|---|
| `gathering` | what a whole response is put together from |
| `generations` | combine the generations of one HTTP request, one per prompt, into a single stream of deltas |
| `model_names` | requests that do not name their model |
| `reasoning_tokens` | count how many tokens of a response are reasoning |
| `rules` | checks and small helpers that every API for text generation shares |
| `token_texts` | single tokens as text and as bytes, for responses with log probabilities |
| `tool_choice` | tool calls that `tool_choice` requires |
"""
