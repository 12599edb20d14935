"""The console: one page about the fleet, and the data it and `dynamo-local top` show.

| module | holds |
|---|---|
| `fleet` | the state of the fleet: models, their instances, the load of each, and names of operators |
| `operations` | `/console` and what the page reads |
"""
