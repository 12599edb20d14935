"""Audio and images, in bodies that only their model can read: they pass through to it as they are.

| module | holds |
|---|---|
| `operations` | the operations, and chats of models that make more than text |
| `realtime` | conversations over WebSockets |
| `relayed_bodies` | bodies that are relayed, and the model's name in them |
| `relayed_rights` | what callers may say in such bodies |
| `relays` | an endpoint whose requests and responses pass through |
| `spoken_tokens` | tokens of a conversation |
| `web_socket` | a WebSocket to a client |
"""
