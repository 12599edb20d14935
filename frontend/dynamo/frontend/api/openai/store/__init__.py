"""What is stored for API keys: responses, their events, conversations; and how much each key may store.

| module | holds |
|---|---|
| `background` | responses that are generated in the background |
| `conversations` | items under an id of their own, to which responses add |
| `event_log` | the events of a response in the background, stored in chunks |
| `events` | write responses of the Responses API as numbered events |
| `owners` | to whom records belong |
| `pages` | lists as OpenAI pages them |
| `quota` | how much each key may store |
| `storage` | what stored responses and conversations share |
| `stored` | responses in JetStream, bound to the API key that made them |
"""
