"""Requests that wait while all instances are busy, in an order that is fair between API keys.

| module | holds |
|---|---|
| `admission` | requests that wait for an instance while all are busy |
| `fair_queue` | a queue that is fair between API keys, however many requests each has in it |
| `fair_slots` | so much work of API keys at once, in an order that is fair between them |
| `line_order` | which request in line is next |
| `turns` | which requests are held back here for requests of another frontend |
"""
