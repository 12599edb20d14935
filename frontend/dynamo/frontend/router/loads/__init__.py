"""The load of each instance as one frontend sees it, and from which load on it is busy.

| module | holds |
|---|---|
| `busy` | whether instances are busy, by their load |
| `instance_load` | the load of one instance |
| `rows` | a cache of the table rows of routing candidates |
| `shared_bookings` | the messages in which frontends share their bookings |
| `table` | the load of each instance, as one frontend sees it |
| `thresholds` | from which load on an instance is busy |
"""
