"""How many instances each model needs: decided from what arrives, and carried out by whatever starts workers.

| module | holds |
|---|---|
| `pools` | what a planner sees of a pool at one moment, what it is to reach, and what it decides |
"""
