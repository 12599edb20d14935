"""How many instances each model needs: decided from what arrives, and carried out by whatever starts workers.

| module | holds |
|---|---|
| `app` | a planner process: its parts, started and ended in order |
| `budget` | what several pools get of GPUs that are fewer than they want |
| `capacity` | how many instances a demand needs, by formula |
| `config` | every option |
| `decide` | how many instances one pool is to have, anew at each interval |
| `executors` | who carries out what is decided |
| `forecast` | what a rate will be some time ahead |
| `observe` | what the planner sees of the fleet |
| `pools` | what a planner sees of a pool at one moment, what it is to reach, and what it decides |
| `process` | one leader, its rounds of decisions, and what it shows |
| `schedule` | lower bounds by weekday and time of day |
| `whatif` | what another number of instances would do to the arrivals of the last minutes |
"""
