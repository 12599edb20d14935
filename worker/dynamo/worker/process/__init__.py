"""The parts of a worker process around its engines.

| module | holds |
|---|---|
| `adapters` | LoRA adapters at run time: the records in etcd, carried out |
| `admission` | whether the frontends have admitted the instance |
| `cards` | complete the cards that engines return with what the operator configured |
| `engine_factory` | which engine a `--model` means, and that engine |
| `model_files` | tokenizers and templates, kept in the object store |
| `offer` | what the process offers to the fleet, as models come and go |
| `parsers` | how frontends parse a model's output, by its chat template |
| `publisher` | publishes what an engine has cached and how busy it is, for routers |
| `registration` | a worker's registrations in etcd |
| `servers` | engine servers that come and go while the process runs |
| `sleep` | a worker that sleeps: its accelerators' memory is free for others |
| `status` | the status port: liveness, readiness, metrics and sleep |
"""
