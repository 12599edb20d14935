"""The data plane: what every protocol calls.

| module | holds |
|---|---|
| `call` | what a request is here: `Call` (who sent it) and `Work` (what has to be done) |
| `carried` | requests that a gateway carries: placed and booked as all others |
| `data_plane` | what every protocol edge calls |
| `dispatch` | requests to instances, and to other ones when that is safe |
| `model_catalog` | the models that requests can name |
| `names` | requests by names of operators |
| `output_lengths` | how long outputs are, by model, API key and session |
| `prompt_tokens` | tokens that only a tensor model can count |
| `queue` | requests that wait while all instances are busy |
| `request_scope` | one request, from its admission to its outcome |
| `shadows` | copies of requests to shadow models |
| `tensor_responses` | the responses to one tensor request |
| `text` | text generation, from text to text |
"""
