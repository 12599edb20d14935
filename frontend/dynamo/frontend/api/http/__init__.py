"""What protocols over HTTP share: the server, its operations, and the exchange that a handler gets.

| module | holds |
|---|---|
| `allowed_values` | the values of fields that take only a few, for the errors of requests that have others |
| `app` | the application of the port: finds a request's operation, asks the guard, runs its handler |
| `body_fields` | fields of a body that are changed on its way to where it is served |
| `compression` | compressed bodies of requests |
| `cors` | which pages of other sites may use this server from a browser |
| `errors` | how errors are written, and the form that OpenAI clients expect |
| `event_stream` | a response as server-sent events |
| `exchange` | one HTTP request and its response |
| `guard` | who may use an operation, and the record of what administrators do |
| `json_body` | decoding of JSON request bodies |
| `json_pieces` | JSON with long parts, which are written in steps and put between the pieces of the rest |
| `json_scan` | bound a JSON text before anything is built from it |
| `management` | operations that belong to the server rather than to a protocol |
| `multipart` | bodies of the type multipart/form-data, as clients upload files |
| `openapi` | GET /openapi.json and GET /docs |
| `operation` | an operation: one method of one path, with everything the server derives from it |
| `paths` | which resource of a server a request's path names |
| `request_reader` | read requests of protocols that others define and extend |
| `server` | the HTTP port, which is up from the start of the process until its end |
| `unknown_fields` | fields of requests that this server does not have: ignored and counted, or refused |
"""
