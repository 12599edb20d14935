"""Certificates, and files that are read again when they change.

| module | holds |
|---|---|
| `files` | values that are read again when their files change |
| `paced_tls` | TLS, of which each turn of the event loop does a little |
| `tls` | certificates for servers and clients; each new connection uses the newest ones |
"""
