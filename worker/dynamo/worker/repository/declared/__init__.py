"""What lies in a model's folder and what its configuration declares; what a backend is.

| module | holds |
|---|---|
| `agents` | model repository agents: Triton's `checksum` |
| `config_checks` | settings of a configuration that contradict each other or themselves |
| `execution` | what a backend is, and what a request looks like to it |
| `layout` | what lies in a model repository |
| `model_config` | model configurations |
| `ragged` | ragged batches: requests whose tensors differ in shape run together |
| `sequence_batching` | the options of sequence batching: read, checked and completed; tensors that it adds to requests |
"""
