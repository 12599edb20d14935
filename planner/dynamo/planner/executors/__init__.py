"""Who carries out what the planner decides: platforms whose programs do not follow the key with the targets.

| module | holds |
|---|---|
| `base` | the protocol, and how it fails |
| `choice` | the executor that the options name |
| `kubernetes` | the scale of Deployments and StatefulSets |
| `options` | the options of all of them |
| `virtual` | the keys in etcd of NVIDIA Dynamo's virtual connector |
"""
