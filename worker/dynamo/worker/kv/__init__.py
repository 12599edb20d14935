"""KV events of engines, read as they come and translated.

| module | holds |
|---|---|
| `vllm_events` | vLLM's KV events, read as they come, and translated into sequence hashes |
| `vllm_subscriber` | follows the KV events that vLLM publishes over ZMQ |
"""
