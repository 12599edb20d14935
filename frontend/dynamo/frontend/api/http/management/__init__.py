"""Operations that belong to the server rather than to a protocol.

| module | holds |
|---|---|
| `adapters` | LoRA adapters at run time, in the form of `vllm serve` |
| `names` | the names that operators give to models |
| `routing` | how requests are routed: busy thresholds, and the last decisions |
| `server` | health, metrics, the list of models |
| `usage` | what the keys have used |
"""
