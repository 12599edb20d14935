"""What frontends and the planner tell each other about how many instances a model needs.

| module | holds |
|---|---|
| `demand` | what frontends report: how many requests arrive, and how much they would have instances compute |
| `pool` | the instances of one model in one role, which are scaled together |
| `standby` | models that can be started when there are requests, in etcd |
| `processes` | which processes have the instances of a pool, and which of them are to end |
| `targets` | what the planner wants: an absolute number of instances for each pool, in etcd |
"""
