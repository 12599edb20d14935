"""Requests that wait while all instances are busy, in an order that is fair between API keys, or while the first one starts.

| module | holds |
|---|---|
| `admission` | requests that wait for an instance while all are busy |
| `fair_queue` | a queue that is fair between API keys, however many requests each has in it |
| `fair_slots` | so much work of API keys at once, in an order that is fair between them |
| `queue_order` | which request of a queue is next |
| `fair_share` | which requests are held back here for requests of another frontend |
| `starting` | requests that wait while the first instance of their model starts |
"""
