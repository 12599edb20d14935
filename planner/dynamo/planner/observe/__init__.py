"""What the planner sees of the fleet, at each moment.

| module | holds |
|---|---|
| `bus` | demand and load reports, received from NATS |
| `cache_worth` | what the caches of instances save |
| `demand` | what arrived since the last look, from the totals of all frontends |
| `fleet` | the views of all pools: what is registered, what arrives, how fast engines are |
| `startup` | how long instances take from the decision that wants them until they serve |
"""
