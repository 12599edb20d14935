"""What the frontends of a namespace tell one another, and planners.

| module | holds |
|---|---|
| `bookings` | the bookings of each, with `--router-replica-sync` |
| `demand` | how many requests arrive for each pool, for planners |
| `exchange` | how they tell it: messages of one kind, paced |
| `limits` | what each uses of the limits of API keys |
| `response_changes` | changes of stored responses, for those that follow them |
| `shared_state` | busy thresholds and places of sessions |
| `usage` | the usage ledger in JetStream |
| `waiting_keys` | which API keys wait |
"""
