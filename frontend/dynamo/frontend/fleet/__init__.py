"""What this process knows of the other processes of its fleet.

| module | holds |
|---|---|
| `adapters` | LoRA adapters of the fleet's models: loaded and unloaded in all instances |
| `admission` | whether this process has admitted an instance, which waits for that until it is ready |
| `canary` | every instance is probed now and then whether its engine works |
| `directory` | a live view of all registrations |
| `event_bus` | events that may be lost: KV events, load reports, bookings |
| `kv` | KV caches of instances, kept in step |
| `peers` | what the frontends of a namespace tell one another |
| `presence` | whether instances that etcd does not list any more are still there |
| `repository` | the model repositories of the fleet |
| `standby` | models that can be started when there are requests |
| `statistics` | aggregates the statistics of several instances |
| `targets` | how many instances a planner wants |
| `worker_streams` | streams of JetStream that workers write, made by frontends |
"""
