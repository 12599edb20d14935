"""What is stored for API keys: responses, their events, conversations; and how much each key may store.

| module | holds |
|---|---|
| `background` | responses that are generated in the background |
| `conversations` | items under an id of their own, to which responses add |
| `event_log` | the events of a response in the background, stored in chunks |
| `events` | write responses of the Responses API as numbered events |
| `items` | items of responses and conversations: parsed, encoded, bounded, and their ids |
| `owned` | records that belong to API keys: what is common to files, batches, responses and conversations |
| `pages` | lists as OpenAI pages them |
| `quota` | how much each key may store |
| `stored` | responses in JetStream, bound to the API key that made them |
"""
