"""Which instances hold which prefixes, and for how long.

| module | holds |
|---|---|
| `doubts` | blocks that a store announced and that were not there |
| `evictions` | how many blocks have to be computed again because others took their place |
| `hashing` | the sequence hashes of one prompt, at once or in steps |
| `holders` | sets of instances, as one Python integer each |
| `index` | a flat map from sequence hash to the set of instances |
| `predicted` | prefixes that instances will hold soon, predicted from the router's own decisions |
| `prefixes` | which blocks are in use, by how many prompts |
| `thinning` | thins out the blocks of long prompts |
"""
