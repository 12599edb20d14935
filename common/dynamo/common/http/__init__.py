"""HTTP/1.1, as both processes serve and use it.

| module | holds |
|---|---|
| `accepting` | connections, counted from when they are accepted, and their TLS handshakes |
| `client` | a client of one HTTP/1.1 server |
| `connection` | one connection, parsed by httptools, whose requests an application serves one after another |
| `request` | one HTTP request of a connection |
| `served` | what an application gets of a request, and how it responds |
| `server` | one HTTP port, served inside the process's event loop |
| `status_port` | a port that shows the state of a process, without keys |
| `web_pages` | what browsers say about a request: for which page they make it, and under which name |
"""
