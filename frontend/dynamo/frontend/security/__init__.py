"""API keys: what each may use, and what it has used.

| module | holds |
|---|---|
| `__main__` | `dynamo-keys`, a command that makes keys and the file of their hashes |
| `accounts` | on whose behalf a request is made, and what that caller has used of its limits |
| `derived_accounts` | accounts that do as another one, but for what they change |
| `keys` | API keys, stored as salted hashes only |
| `ledger` | what the keys have used, by day, key and model, as far as this process served it |
| `salts` | salts of cached prompts, by which those of a key are kept apart from those of others |
| `sharing` | the limits of a key, while all processes of a fleet use them together |
| `surfaces` | what can be protected, and what a key may be allowed to use |
"""
