"""Parsers for the reasoning that models write before their response.

| module | holds |
|---|---|
| `budget` | how many tokens a response may spend on reasoning |
| `think` | `<think>…</think>` and other tags around reasoning |
"""
