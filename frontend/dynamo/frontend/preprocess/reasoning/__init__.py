"""Parsers for the reasoning that models write before their response, one file per format.

| module | holds |
|---|---|
| `budget` | how many tokens a response may spend on reasoning |
| `kinds` | how families of models mark their reasoning |
| `think` | `<think>…</think>` and other tags around reasoning |
"""
