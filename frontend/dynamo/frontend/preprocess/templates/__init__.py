"""Chat templates: rendered within bounds, and conversations shortened to fit.

| module | holds |
|---|---|
| `budget` | what one rendering of a chat template may cost, in steps and in bytes |
| `shortening` | drop the beginning of a conversation that is too long for a model's context |
| `syntax` | syntax that Jinja compiles to plain Python, rewritten so that its operands are counted |
| `template` | render a conversation to one prompt with the model's own Jinja chat template |
"""
