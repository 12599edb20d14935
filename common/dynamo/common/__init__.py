"""What frontends and workers both use.

| module | holds |
|---|---|
| `adapters` | LoRA adapters that are loaded at run time |
| `admin_api` | the admin API of a frontend, as programs of operators use it |
| `admission` | what a worker and the frontends say about whether these have admitted it |
| `config` | one frozen dataclass per process, filled from flags, the environment, a file and defaults |
| `discovery` | which instances serve which models: the format of a registration, and the view of a set of them |
| `errors` | every failure a caller can see, as one tree |
| `etcd` | an asyncio client of etcd: range, put, delete, lease, watch |
| `generation` | a request for text generation and its response, as they travel |
| `generation_rules` | ranges of generation parameters |
| `guided_rules` | what structured output may cost, by its text alone |
| `http` | HTTP/1.1: a server, its connections and requests, and a client |
| `kv` | hashes of blocks, updates and snapshots of KV caches |
| `lifecycle` | the life of a process: its event loop, the signals that stop it, the order in which it closes |
| `logs` | log records as text for people or as one JSON object per line, with the id of the request they belong to |
| `messaging` | NATS: the connection, the request plane, and what is kept in JetStream |
| `model_card` | the description of a model that a worker serves |
| `names` | names that processes agree on |
| `observability` | metrics, traces, and the log and trace settings that clients change |
| `options` | groups of options that several processes share |
| `output_formats` | the formats in which models write tool calls and reasoning, and what shows them in a chat template |
| `process` | what runs in every process: tasks with an owner, long work in steps, freed memory |
| `protocol` | the version of what frontends and workers send one another |
| `repository` | the state of a worker's model repository, and the requests that change it |
| `scaling` | how many instances a model needs: what frontends and the planner tell each other of it |
| `security` | TLS, and files that are read again when they change |
| `shared_memory` | bodies by reference between the processes of one host |
| `tensors` | tensors of KServe v2: their bytes, requests and responses with them, checks and limits |
"""
