"""Certificates, and files that are read again when they change.

| module | holds |
|---|---|
| `files` | values that are read again when their files change |
| `tls` | certificates for servers and clients; each new connection uses the newest ones |
"""
