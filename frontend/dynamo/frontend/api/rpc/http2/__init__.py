"""This project's gRPC server: HTTP/2 (RFC 9113) as far as gRPC uses it.

| module | holds |
|---|---|
| `call` | one call |
| `call_host` | what a call needs of its connection |
| `client_settings` | what the settings of a client change |
| `connection` | one connection of a client: its frames, and what they do to its calls |
| `deadlines` | deadlines of all calls of a process, with one timer among them |
| `frames` | frames: their constants and errors, and a reader that splits received bytes into them |
| `headers` | header blocks: decoded, checked and remembered |
| `messages` | messages of gRPC in the DATA of one call |
| `method` | a method as the server calls it |
| `owner` | what a connection needs of its server |
| `pings` | which PINGs a client may send, and which are sent to it |
| `sender` | what one connection sends |
| `server` | a gRPC port on the event loop |
| `windows` | flow control, budgets and the least pace |
"""
