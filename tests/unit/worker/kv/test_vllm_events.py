"""A corpus of engine events in the shapes seen in the wild, and what they mean."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.errors import EngineError
from dynamo.common.generation import pack_tokens
from dynamo.common.kv.events import KvState
from dynamo.common.kv.hashes import sequence_hashes, space_hash
from dynamo.common.kv.tiers import Tier
from dynamo.worker.kv.vllm_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    Translated,
    Translator,
    decode_batch,
    fold_hash,
    parts,
)

TOKENS = list(range(100, 108))
HASHES = sequence_hashes(pack_tokens(TOKENS), 4)
BASE = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": TOKENS, "block_size": 4}


def batch(*events: object, rank: int | None = None) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events)] if rank is None else [1.5, list(events), rank])


def stored(*events: object, tier: Tier = Tier.GPU) -> list[int]:
    """The sequence hashes that a fresh translator makes of the events on one tier."""
    translator, state = Translator(), KvState()
    for event in decode_batch(batch(*events)).events:
        translated = translator.translate(event)
        state.remove(translated.removed, tier=translated.tier)
        state.store(translated.stored, tier=translated.tier)
        if translated.cleared:
            state.clear()
    return list(state.held(tier))


DIGEST = bytes(range(24)) + (2).to_bytes(8, "big")

# (what is seen, the events, the sequence hashes they lead to)
CORPUS: list[tuple[str, list[object], list[int]]] = [
    ("the old shape in full", [["BlockStored", [1, 2], None, TOKENS, 4, None, "GPU", None, [None, None], 0]], HASHES),
    ("the old shape, shortest", [["BlockStored", [1, 2], None, TOKENS, 4]], HASHES),
    (
        "the old shape with a longer tail",
        [["BlockStored", [1, 2], None, TOKENS, 4, None, "GPU", None, None, 0, "full_attention", None, "?"]],
        HASHES,
    ),
    (
        "the new shape as 0.26.0 sends it",
        [
            BASE
            | {
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None, None],
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        ],
        HASHES,
    ),
    ("the new shape, shortest", [BASE], HASHES),
    ("unknown keys", [BASE | {"colour": "blue", "nested": {"a": [1]}}], HASHES),
    ("unknown types before and after", [{"type": "BlockMoved", "x": 1}, BASE, ["Heartbeat"]], HASHES),
    ("negative hashes", [BASE | {"block_hashes": [-1, -2]}, ["BlockRemoved", [2**64 - 2]]], HASHES[:1]),
    (
        "hashes of 32 bytes, removed as integers",
        [BASE | {"block_hashes": [b"\x01" * 32, DIGEST]}, ["BlockRemoved", [2]]],
        HASHES[:1],
    ),
    (
        "a child of a known parent",
        [BASE | {"block_hashes": [1], "token_ids": TOKENS[:4]}, ["BlockStored", [2], 1, TOKENS[4:], 4]],
        HASHES,
    ),
    ("a child of a missing parent", [BASE | {"parent_block_hash": 77}], []),
    (
        "removal in the new shape",
        [BASE, {"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU", "group_idx": 0}],
        HASHES[:1],
    ),
    ("removal of unknown blocks", [BASE, ["BlockRemoved", [5, 6]]], HASHES),
    ("all cleared, old", [BASE, ["AllBlocksCleared"]], []),
    ("all cleared, new", [BASE, {"type": "AllBlocksCleared"}], []),
    ("blocks in host memory", [BASE | {"medium": "CPU"}], []),
    ("offload without tokens", [BASE | {"token_ids": [], "medium": "GPU"}], []),
    ("leaving host memory leaves the GPU's alone", [BASE, ["BlockRemoved", [1, 2], "CPU"]], HASHES),
    ("two copies, one removed", [BASE, BASE, ["BlockRemoved", [1, 2]]], HASHES),
    ("two copies, both removed", [BASE, BASE, ["BlockRemoved", [1, 2]], ["BlockRemoved", [2]]], HASHES[:1]),
    (
        "a hybrid model's other groups",
        [
            BASE | {"group_idx": 0, "kv_cache_spec_kind": "full_attention"},
            BASE | {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "block_hashes": [8, 9]},
            ["BlockRemoved", [1], "GPU", 1],
        ],
        HASHES,
    ),
    (
        "full attention in a later group",
        [
            BASE | {"group_idx": 0, "kv_cache_spec_kind": "mamba"},
            BASE | {"group_idx": 2, "kv_cache_spec_kind": "full_attention"},
            ["BlockRemoved", [1], "GPU", 0],
            ["BlockRemoved", [2], "GPU", 2],
        ],
        HASHES[:1],
    ),
    (
        "an adapter by name",
        [BASE | {"lora_name": "sql", "lora_id": 3, "extra_keys": [["sql"], ["sql"]]}],
        sequence_hashes(pack_tokens(TOKENS), 4, space_hash("sql")),
    ),
    ("an adapter by number only", [BASE | {"lora_id": 3}], sequence_hashes(pack_tokens(TOKENS), 4, space_hash("lora:3"))),
    ("a salt", [BASE | {"extra_keys": [["tenant"], None]}], sequence_hashes(pack_tokens(TOKENS), 4, space_hash("", "tenant"))),
    (
        "an adapter and a salt",
        [BASE | {"lora_name": "sql", "extra_keys": [["sql", "tenant"], ["sql"]]}],
        sequence_hashes(pack_tokens(TOKENS), 4, space_hash("sql", "tenant")),
    ),
    ("a handle given to another block", [BASE, BASE | {"block_hashes": [2], "token_ids": TOKENS[:4]}], HASHES[:1]),
    (
        "malformed ones in between",
        [
            {"type": "BlockStored"},
            ["BlockStored", "x", None, TOKENS, 4],
            ["BlockStored", [1.5], None, TOKENS, 4],
            BASE | {"block_size": 0},
            BASE | {"block_size": -4, "token_ids": []},
            BASE | {"token_ids": ["a"]},
            BASE | {"extra_keys": 5},
            [],
            17,
            None,
            BASE,
        ],
        HASHES,
    ),
    ("token ids that do not fit", [BASE | {"token_ids": [*TOKENS[:4], -1, 0, 0, 2**40]}], HASHES[:1]),
]


CPU, STORE = BASE | {"medium": "CPU"}, BASE | {"medium": "STORAGE"}
UNTOLD = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": [],
    "block_size": 0,
    "medium": "CPU",
}

SALTED = BASE | {"extra_keys": [["tenant"], None]}
SALTED_HASHES = sequence_hashes(pack_tokens(TOKENS), 4, space_hash("", "tenant"))

# (what is seen, the events, the tier, the sequence hashes there)
SLOW: list[tuple[str, list[object], Tier, list[int]]] = [
    ("host memory", [CPU], Tier.CPU, HASHES),
    ("pinned host memory of SGLang", [BASE | {"medium": "CPU_PINNED"}], Tier.CPU, HASHES),
    ("the first tier of host memory", [BASE | {"medium": "CPU_TIER1"}], Tier.CPU, HASHES),
    ("the second tier of host memory", [BASE | {"medium": "CPU_TIER2"}], Tier.DISK, HASHES),
    ("a disk", [BASE | {"medium": "DISK"}], Tier.DISK, HASHES),
    ("a fast disk", [BASE | {"medium": "NVMe"}], Tier.DISK, HASHES),
    ("a local store", [STORE | {"locality": "LOCAL"}], Tier.DISK, HASHES),
    ("a remote store", [STORE | {"locality": "REMOTE"}], Tier.SHARED, HASHES),
    (
        "a remote store in the old shape",
        [["BlockStored", [1, 2], None, TOKENS, 4, None, "STORAGE", None, None, 0, "", None, "REMOTE"]],
        Tier.SHARED,
        HASHES,
    ),
    ("a store of unknown place", [STORE], Tier.SHARED, []),
    (
        "host memory is left by its own removals",
        [BASE, CPU, ["BlockRemoved", [2], "CPU"], ["BlockRemoved", [1, 2], "GPU"]],
        Tier.CPU,
        HASHES[:1],
    ),
    (
        "a removal from a store",
        [STORE | {"locality": "LOCAL"}, {"type": "BlockRemoved", "block_hashes": [2], "medium": "STORAGE", "locality": "LOCAL"}],
        Tier.DISK,
        HASHES[:1],
    ),
    ("offload of what the GPU announced, without tokens", [BASE, UNTOLD], Tier.CPU, HASHES),
    ("offload of what nothing announced, without tokens", [UNTOLD], Tier.CPU, []),
    (
        "offload of what the GPU dropped, without tokens",
        [BASE, CPU, ["BlockRemoved", [1, 2]], UNTOLD | {"medium": "DISK"}],
        Tier.DISK,
        HASHES,
    ),
    ("blocks on the GPU without tokens and size", [BASE, UNTOLD | {"block_hashes": [3], "medium": "GPU"}], Tier.GPU, HASHES),
    ("offload after blocks on the GPU without size", [BASE, UNTOLD | {"medium": "GPU"}, CPU], Tier.CPU, HASHES),
    ("offload without tokens in larger blocks", [BASE, UNTOLD | {"block_size": 8}], Tier.CPU, []),
    (
        "a child whose parent is on the GPU only",
        [BASE, CPU | {"block_hashes": [2], "parent_block_hash": 1, "token_ids": TOKENS[4:]}],
        Tier.CPU,
        HASHES[1:],
    ),
    ("a block with the tokens of two", [BASE, CPU | {"block_hashes": [2], "block_size": 8}], Tier.CPU, HASHES),
    (
        "a block with the tokens of two leaves with both",
        [BASE, CPU | {"block_hashes": [2], "block_size": 8}, ["BlockRemoved", [2], "CPU"]],
        Tier.CPU,
        [],
    ),
    ("a block with the tokens of one and a half", [BASE, CPU | {"block_hashes": [2], "block_size": 6}], Tier.CPU, []),
    ("offload of salted blocks, without their salt", [SALTED, CPU], Tier.CPU, SALTED_HASHES),
    (
        "offload of salted blocks that the GPU dropped, without their salt",
        [SALTED, ["BlockRemoved", [1, 2]], CPU],
        Tier.CPU,
        [],
    ),
    (
        "offload of the second of two blocks before the first",
        [
            BASE,
            CPU | {"block_hashes": [2], "parent_block_hash": 1, "token_ids": TOKENS[4:]},
            CPU | {"block_hashes": [1], "token_ids": TOKENS[:4]},
        ],
        Tier.CPU,
        HASHES,
    ),
    ("all cleared", [BASE, CPU, ["AllBlocksCleared"]], Tier.CPU, []),
    ("host memory of another attention group", [CPU | {"kv_cache_spec_kind": "sliding_window"}], Tier.CPU, []),
]


@pytest.mark.parametrize(("events", "tier", "expected"), [case[1:] for case in SLOW], ids=[case[0] for case in SLOW])
def test_events_mean_these_blocks_on_slower_tiers(events: list[object], tier: Tier, expected: list[int]) -> None:
    assert sorted(stored(*events, tier=tier)) == sorted(expected)


def test_blocks_on_unknown_media_are_counted_and_on_no_tier() -> None:
    events = [BASE | {"medium": "TAPE"}, STORE, {"type": "BlockRemoved", "block_hashes": [1], "medium": "TAPE"}]
    translator = Translator()
    for event in decode_batch(batch(*events)).events:
        assert translator.translate(event) == Translated()
    assert (translator.unknown, len(translator)) == (5, 0)


def test_a_store_that_announces_no_removals_is_bounded_and_loses_the_oldest() -> None:
    translator = Translator(max_stored=2)
    chain = sequence_hashes(pack_tokens(list(range(12))), 4)

    def store(handle: int) -> Translated:
        tokens = list(range(4 * handle + 4))
        event = {**STORE, "locality": "REMOTE", "block_hashes": list(range(handle + 1)), "token_ids": tokens}
        [event] = decode_batch(batch(event)).events
        return translator.translate(event)

    assert store(1) == Translated(chain[:2], tier=Tier.SHARED)
    assert store(0) == Translated(tier=Tier.SHARED)
    assert store(2) == Translated(chain[2:], chain[:1], tier=Tier.SHARED)


def test_blocks_beyond_what_a_rank_may_have_are_left_out() -> None:
    translator = Translator(max_blocks=1)
    [event] = decode_batch(batch(BASE)).events
    assert translator.translate(event) == Translated(HASHES[:1])
    assert translator.translate(event) == Translated()
    assert translator.translate(BlocksRemoved([1, 2])) == Translated(), "it has two copies"
    assert translator.translate(BlocksRemoved([1])) == Translated(removed=HASHES[:1])


def long_event(count: int, size: int, **changes: object) -> dict[str, object]:
    tokens = [number % 1000 for number in range(count * size)]
    return {**BASE, "block_hashes": [*range(count)], "token_ids": tokens, "block_size": size} | changes


@pytest.mark.parametrize(
    "events",
    [
        [long_event(1500, 1)],
        [long_event(700, 16, extra_keys=[[f"image-{number}"] for number in range(700)])],
        [long_event(3, 8192, lora_name="adapter", extra_keys=[["salt"], None, None])],
        [long_event(1500, 2, token_ids=[1] * 2999)],
        [long_event(1500, 1, parent_block_hash=77)],
        [long_event(1500, 1, token_ids=[7] * 700 + [-1] + [7] * 799)],
        [long_event(1500, 1), {"type": "BlockRemoved", "block_hashes": [*range(1400)]}],
        [long_event(1500, 1), long_event(1500, 0, token_ids=[], medium="CPU")],
        [long_event(1500, 1), long_event(700, 2, medium="CPU", block_hashes=[*range(10_000, 10_700)])],
    ],
)
@pytest.mark.parametrize("tier", [Tier.GPU, Tier.CPU])
def test_the_parts_of_an_event_mean_the_same_and_are_short(events: list[object], tier: Tier) -> None:
    whole, split, state = Translator(), Translator(), KvState()
    for event in decode_batch(batch(*events)).events:
        whole.translate(event)
        for part in parts(event):
            assert not isinstance(part, AllCleared)
            assert len(part.hashes) <= 512 or not isinstance(part, BlocksStored) or len(part.token_ids) < 2 * len(part.hashes)
            translated = split.translate(part)
            state.remove(translated.removed, tier=translated.tier)
            state.store(translated.stored, tier=translated.tier)
    assert list(state.held(tier)) == stored(*events, tier=tier)
    assert len(split) == len(whole)


@pytest.mark.parametrize(("events", "expected"), [case[1:] for case in CORPUS], ids=[case[0] for case in CORPUS])
def test_events_mean_these_blocks(events: list[object], expected: list[int]) -> None:
    assert sorted(stored(*events)) == sorted(expected)


def test_both_shapes_read_as_the_same_event() -> None:
    new = {**BASE, "lora_id": None, "medium": "GPU", "lora_name": "sql", "extra_keys": [["sql"], None], "group_idx": 1}
    old = ["BlockStored", [1, 2], None, TOKENS, 4, None, "GPU", "sql", [["sql"], None], 1]
    assert decode_batch(batch(new)) == decode_batch(batch(old))
    assert decode_batch(batch({"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU", "group_idx": 2})).events == [
        BlocksRemoved([1], "CPU", 2)
    ]


def test_a_batch_may_be_a_map_and_names_its_rank() -> None:
    as_map = msgspec.msgpack.encode({"ts": 1.0, "events": [["AllBlocksCleared"]], "data_parallel_rank": 3, "new": 1})
    assert decode_batch(as_map).events == [AllCleared()]
    assert decode_batch(as_map).rank == 3
    assert decode_batch(batch(["AllBlocksCleared"], rank=2)).rank == 2
    assert decode_batch(batch(["AllBlocksCleared"])).rank == 0


def test_skipped_events_are_counted() -> None:
    read = decode_batch(batch(BASE, {"type": "Unknown"}, ["BlockRemoved", None]))
    assert (len(read.events), read.skipped) == (1, 2)


def test_blocks_of_another_group_and_with_an_unknown_parent_are_left_out() -> None:
    translator = Translator()
    for event in decode_batch(batch(BASE | {"group_idx": 1}, BASE | {"parent_block_hash": 77})).events:
        translator.translate(event)
    assert len(translator) == 0


def test_images_keep_equal_tokens_apart() -> None:
    plain = stored(BASE)
    one = stored(BASE | {"extra_keys": [[["image-1", 0], None], [["image-1", 0]]]})
    other = stored(BASE | {"extra_keys": [[["image-2", 0], None], [["image-2", 0]]]})
    assert len({*plain, *one, *other}) == 6


def test_hashes_of_either_form_fold_alike() -> None:
    assert fold_hash(DIGEST) == fold_hash(2) == 2
    assert fold_hash(-1) == fold_hash(b"\xff" * 32) == 2**64 - 1
    for bad in (True, None, "1", 1.0):
        with pytest.raises(TypeError):
            fold_hash(bad)


JSONISH: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=4) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
ODD = st.fixed_dictionaries(
    {"type": st.sampled_from(["BlockStored", "BlockRemoved"])},
    optional=dict.fromkeys(
        [
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "medium",
            "lora_name",
            "extra_keys",
            "group_idx",
            "locality",
        ],
        JSONISH,
    ),
)


@given(st.lists(ODD | JSONISH, max_size=5))
def test_odd_events_never_break_the_reader(events: list[Any]) -> None:
    translator = Translator()
    read = decode_batch(batch(*events))
    assert len(read.events) + read.skipped == len(events)
    for event in read.events:
        translator.translate(event)


@given(st.binary(max_size=60))
def test_random_bytes_are_an_engine_error_or_a_batch(payload: bytes) -> None:
    with contextlib.suppress(EngineError):
        decode_batch(payload)


def test_a_batch_that_is_none_is_an_engine_error() -> None:
    for payload in (b"", b"\xc1", msgspec.msgpack.encode("x"), msgspec.msgpack.encode([1.0]), msgspec.msgpack.encode({})):
        with pytest.raises(EngineError):
            decode_batch(payload)


def test_events_are_plain_values() -> None:
    assert decode_batch(batch(BASE)).events == [BlocksStored([1, 2], None, TOKENS, 4)]
