"""What makes the planner a process: one leader, its rounds of decisions, and what it shows.

| module | holds |
|---|---|
| `explain` | the command that prints what a planner sees and why it decided so |
| `leader` | which of the planners of a namespace decides |
| `metrics` | `dynamo_planner_*` |
| `planning` | the rounds: look, decide, carry out |
| `standby` | records of the models that can be started, so that frontends take requests for them |
| `state` | what a planner shows of itself: its view, its targets, the last decisions |
| `status` | the status port |
| `targets_key` | the key in etcd that holds the targets, written by the leader alone |
"""
