"""Bodies by reference between the processes of one host.

| module | holds |
|---|---|
| `arena` | the owner's side: lends regions and gets them back |
| `files` | how such a file is created, opened, checked and removed |
| `layout` | what an arena's file looks like, and what a reference is |
| `neighbour` | the reader's side: views of regions, in place |
| `sharing` | the arena of this process and those of its neighbours; what the request plane uses |
| `units` | which parts of an arena are free: plain computation |

`docs/architecture/bodies-by-reference.md` has the protocol.
"""
