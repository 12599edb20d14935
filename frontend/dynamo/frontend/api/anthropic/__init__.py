"""The Anthropic API.

| module | holds |
|---|---|
| `messages` | `/v1/messages` and `/v1/messages/count_tokens` |
| `requests` | request bodies of the Anthropic API, and their translation into text requests |
"""
