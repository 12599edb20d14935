"""HTTP/1.1, as both processes serve and use it.

| module | holds |
|---|---|
| `accepting` | connections, counted from when they are accepted, and their TLS handshakes |
| `asgi` | the types of an ASGI application |
| `client` | a client of one HTTP/1.1 server |
| `connection` | one connection, parsed by httptools, whose requests an ASGI application serves one after another |
| `request` | one HTTP request |
| `server` | one HTTP port, served inside the process's event loop |
| `web_pages` | what browsers say about a request: for which page they make it, and under which name |
"""
