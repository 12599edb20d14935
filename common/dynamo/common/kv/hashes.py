"""Names for cached prefixes: block hashes and sequence hashes.

A *block hash* names the tokens of one full block. A *sequence hash* chains a block to everything before it, so that two equal
sequence hashes mean two equal prefixes. Every process computes them alike, from token ids alone:

    block hash           XXH3-64, seed 1337, over the block's token ids as little-endian u32
    sequence hash        XXH3-64, seed 1337, over (parent's sequence hash, block hash) as little-endian u64
    … of a first block   its block hash; with a LoRA adapter or a cache salt, chained to the hash of that pair instead

Only full blocks have hashes. All hashes are unsigned 64-bit integers.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from struct import Struct, iter_unpack

from xxhash import xxh3_64_intdigest

from dynamo.common.errors import InvalidRequest

SEED = 1337
TOKEN_BYTES = 4
HASH_BYTES = 8

_pair = Struct("<QQ").pack
_length = Struct("<I").pack

Buffer = bytes | bytearray | memoryview


def block_hash(tokens: Buffer) -> int:
    """Return the hash of one block of tokens, given as little-endian u32."""
    return xxh3_64_intdigest(tokens, SEED)


def chain(parent: int | None, block: int) -> int:
    """Return the sequence hash of a block after `parent`; None: it is the first block of a space without adapter and salt."""
    return block if parent is None else xxh3_64_intdigest(_pair(parent, block), SEED)


def space_hash(adapter: str = "", salt: str = "") -> int | None:
    """Return what first blocks are chained to, so that equal tokens share nothing across adapters or salts; None without both."""
    if not adapter and not salt:
        return None
    name = adapter.encode()
    return xxh3_64_intdigest(_length(len(name)) + name + salt.encode(), SEED)


def sequence_hashes(tokens: Buffer, block_size: int, parent: int | None = None) -> list[int]:
    """Return the sequence hash of every full block of `tokens`, first block first.

    `tokens` are little-endian u32; those after the last full block are left out. `parent` precedes the first block: a sequence
    hash, or the `space_hash`. About 0.15 µs per block and 0.1 µs per 64 tokens: 128k tokens take 1.3 ms.
    """
    if block_size < 1:
        raise InvalidRequest(f"a KV block of {block_size} tokens cannot be hashed")
    step = block_size * TOKEN_BYTES
    view = memoryview(tokens).cast("B")
    digest, pair, seed = xxh3_64_intdigest, _pair, SEED
    hashes: list[int] = []
    append = hashes.append
    blocks = iter_unpack(f"{step}s", view[: len(view) // step * step])  # the cheapest way to cut bytes
    if parent is None:
        for (block,) in blocks:
            parent = digest(block, seed)
            append(parent)
            break
    for (block,) in blocks:
        parent = digest(pair(parent, digest(block, seed)), seed)
        append(parent)
    return hashes


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Return hashes as little-endian u64, the form in which they are sent."""
    packed = array("Q", hashes)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_hashes(data: Buffer) -> list[int]:
    """Return the hashes that `pack_hashes` packed. Raises ValueError if `data` is not a whole number of hashes."""
    hashes = array("Q")
    hashes.frombytes(data)
    if sys.byteorder == "big":
        hashes.byteswap()
    return hashes.tolist()
