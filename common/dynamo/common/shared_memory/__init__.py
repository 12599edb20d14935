"""Bodies by reference between the processes of one host.

| module | holds |
|---|---|
| `units` | which parts of an arena are free: plain computation |
| `layout` | what an arena's file looks like, and what a reference is |
| `files` | how such a file is created, opened, checked and removed |
| `arena` | the owner's side: lends regions and gets them back |
| `neighbour` | the reader's side: views of regions, in place |
| `sharing` | the arena of this process and those of its neighbours; what the request plane uses |

`docs/architecture.md`, section "Bodies by reference", has the protocol.
"""
