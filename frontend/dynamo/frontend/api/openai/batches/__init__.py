"""Files and batches, as OpenAI has them.

| module | holds |
|---|---|
| `batch` | a batch, its lines, and where both lie in JetStream |
| `batch_key` | the API key of a batch, which may be refused for a moment |
| `files` | files in JetStream, bound to the API key that made them |
| `index` | what each key has of one kind of records, decoded and in order |
| `lines` | how lines use the account of their key |
| `long_texts` | results, joined and stored in steps |
| `operations` | `/v1/files` and `/v1/batches` |
| `result_files` | the output and error file of a batch that ends |
| `result_lines` | lines of the output and error files |
| `result_room` | what the results of a batch may take |
| `runner` | carries out the batches whose lease this process holds |
| `segments` | the results of some lines in a row, and the record that has them |
"""
