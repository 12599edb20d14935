"""How many instances each model needs: decided from what arrives, and carried out by whatever starts workers.

| module | holds |
|---|---|
| `capacity` | how many instances a demand needs, by formula |
| `decide` | how many instances one pool is to have, anew at each interval |
| `forecast` | what a rate will be some time ahead |
| `observe` | what the planner sees of the fleet |
| `pools` | what a planner sees of a pool at one moment, what it is to reach, and what it decides |
| `whatif` | what another number of instances would do to the arrivals of the last minutes |
"""
