"""A deployment on one machine, and tools around it.

| module | holds |
|---|---|
| `app` | `dynamo-local`: starts a deployment and shows what it serves |
| `ask` | sends a model one request over KServe v2 gRPC and prints the response as it arrives |
| `child` | a child process with a log file |
| `config` | the configuration of `dynamo-local` |
| `deployment` | a whole deployment on one machine |
| `logins` | logins of etcd and nats-server, made at each start |
| `replay` | router modes compared on a trace |
| `scaling` | as many workers as the targets in etcd want |
| `servers` | a real etcd and a real nats-server as supervised child processes |
| `supervisor` | the processes of a deployment: started in stages, restarted when they end |
| `top` | `dynamo-local top` |
| `view` | which workers have registered, read from etcd |
| `workers` | the workers of a deployment, added and ended while the others serve |
"""
