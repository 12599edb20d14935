"""Numbers for texts: embeddings, rerank, score, classify and pooling.

| module | holds |
|---|---|
| `embeddings` | POST /v1/embeddings |
| `text_task_objects` | requests and responses of rerank, score, classify and pooling |
| `text_tasks` | rerank, score, classify and pooling |
| `text_tensors` | the tensors of requests about texts |
| `vectors` | rows of floating-point numbers, read from responses of models and written as JSON |
"""
