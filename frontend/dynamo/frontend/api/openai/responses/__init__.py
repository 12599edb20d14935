"""The Responses API and conversations: their endpoints. What is stored is in `store`.

| module | holds |
|---|---|
| `conversation_operations` | the endpoints under /v1/conversations |
| `endpoint` | POST /v1/responses |
| `operations` | the operations of the Responses API and of conversations |
| `requests` | request bodies of the Responses API, and their translation into chat requests |
| `stored_operations` | GET and DELETE /v1/responses/{id}, its input items, and cancelling |
| `tools` | which kinds of tools a model gets, in the form of functions |
"""
