"""What each flag of the router does to a request: the same situation with and without it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from dynamo.common.config import load
from dynamo.common.discovery import Instance
from dynamo.common.errors import Overloaded
from dynamo.common.generation import pack_tokens
from dynamo.common.kv.events import KvUpdate, LoadReport
from dynamo.common.kv.hashes import pack_hashes, sequence_hashes
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.frontend.config import FrontendConfig, RouterOptions
from dynamo.frontend.router.base import Router, RouteRequest
from dynamo.frontend.router.kv import KvRouter
from dynamo.frontend.router.loads.table import LoadTable
from dynamo.frontend.router.select import follows_loads, make_router

SIZE = 4
CARD = ModelCard(name="m", kind=ModelKind.LLM, llm=LlmInfo(context_length=4096, tokenizer="", block_size=SIZE, total_blocks=100))
A, B, C = (
    Instance(id=InstanceId(number), endpoint=Endpoint(), subject="", card=CARD, started_at=0.0) for number in (0xA, 0xB, 0xC)
)
ALL = (A, B, C)


class Situation:
    """A router made from options, and a clock."""

    def __init__(self, options: RouterOptions) -> None:
        self.now = 100.0
        self.loads = LoadTable()
        self.router: Router = make_router(options, self.loads, lambda: self.now)
        self._count = 0

    def report(self, instance: Instance, **load: int) -> None:
        self.loads.report(instance.id, LoadReport(**load), self.now)

    def store(self, instance: Instance, prompt: bytes, blocks: int) -> None:
        assert isinstance(self.router, KvRouter)
        hashes = sequence_hashes(prompt, SIZE)[:blocks]
        self.router.apply("m", instance.id, KvUpdate(0, stored=pack_hashes(hashes)))

    def ask(
        self, prompt: bytes, candidates: Sequence[Instance] = ALL, *, computed: bool = False, **fields: object
    ) -> tuple[str, int]:
        """Name of the instance that the request goes to, and its overlap; `computed`: the prompt is, at once."""
        self._count += 1
        request = RouteRequest(model="m", booking_id=str(self._count), prompt=prompt, **fields)  # type: ignore[arg-type]
        decision = self.router.pick(request, candidates)
        if computed:
            self.router.first_token(request.booking_id)
        return f"{decision.instance.id:X}", decision.overlap_blocks


def prompt(number: int, blocks: int = 10) -> bytes:
    return pack_tokens(range(number * 1000, number * 1000 + blocks * SIZE))


P = prompt(1)


def cached_but_waiting(s: Situation) -> object:
    s.store(A, P, 5)
    s.report(A, queued_prefill_tokens=40)
    s.report(C, queued_prefill_tokens=1000)
    return s.ask(P)[0]


def holding_or_computing(s: Situation) -> object:
    s.report(A, active_blocks=30)
    s.report(B, queued_prefill_tokens=2 * SIZE)
    return s.ask(P, (A, B))[0]


def cached_at_one(s: Situation) -> object:
    s.store(A, P, 10)
    found = set()
    for number in range(1, 201):
        found.add(s.ask(P)[0])
        s.router.finished(str(number))
    return len(found)


def told_and_chosen(s: Situation) -> object:
    s.store(A, P, 10)
    received = s.ask(P, (A,))[1]
    chosen = s.ask(prompt(2), (B,))[1]
    s.now += 1.0
    return received, chosen, s.ask(prompt(2), (B,))[1]


def a_minute_later(s: Situation) -> object:
    s.ask(P, (A,))
    s.now += 60.0
    return s.ask(P, (A,))[1]


def twenty_prompts_later(s: Situation) -> object:
    for number in range(20):
        s.ask(prompt(number), (A,))
    return s.ask(prompt(0), (A,))[1], s.ask(prompt(19), (A,))[1]


def remembered_of_eleven(s: Situation) -> object:
    for number in range(11):
        s.ask(prompt(number), (A,))
    pairs = re.search(r"<PredictedIndex pairs=(\d+)", repr(s.router))
    assert pairs is not None
    return int(pairs[1])


def siblings(s: Situation) -> object:
    s.ask(P, (A,))
    return s.ask(P + prompt(7, 1), (A,))[1]


def held_blocks(s: Situation) -> object:
    s.report(A, active_blocks=500)
    s.report(B, queued_prefill_tokens=SIZE)
    return s.ask(P, (A, B))[0]


def long_answer_ahead(s: Situation) -> object:
    s.ask(P, (A,), computed=True, expected_output_tokens=400)
    s.report(B, active_blocks=50)
    return s.ask(prompt(2), (A, B))[0]


def same_prompt_twice(s: Situation) -> object:
    for _ in range(2):
        s.ask(P, (A,), computed=True)
    s.report(B, active_blocks=15)
    return s.ask(prompt(2), (A, B))[0]


def outcome(s: Situation, candidates: Sequence[Instance]) -> str:
    try:
        return s.ask(P, candidates)[0]
    except Overloaded:
        return "refused"


def full_caches(s: Situation) -> object:
    for instance, blocks in ((A, 60), (B, 90)):
        s.report(instance, active_blocks=blocks, total_blocks=100, running=1 if instance is A else 0)
    if isinstance(s.router, KvRouter):
        s.store(B, P, 10)
    return [outcome(s, candidates) for candidates in ((A, B), (B,))]


def waiting_prompts(s: Situation) -> object:
    s.report(A, queued_prefill_tokens=10, running=1)
    s.report(B, queued_prefill_tokens=120)
    if isinstance(s.router, KvRouter):
        s.store(B, P, 10)
    return [outcome(s, candidates) for candidates in ((A, B), (B,))]


def one_is_loaded(s: Situation) -> object:
    s.report(A, running=50)
    return sorted({s.ask(P)[0] for _ in range(60)})


@dataclass(frozen=True)
class Case:
    flag: str
    """With its value."""
    variable: str
    """The same by the environment."""
    situation: Callable[[Situation], object]
    without: object
    with_it: object
    mode: str = "kv"
    also: tuple[str, ...] = ()
    """Flags that both runs have."""


GUESS = ("--no-router-kv-events",)
WEIGHTS = ("--router-cost=weights",)
CASES = [
    Case("--overlap-score-weight=0", "DYN_OVERLAP_SCORE_WEIGHT=0", cached_but_waiting, "A", "B", also=WEIGHTS),
    Case("--overlap-score-credit=0", "DYN_OVERLAP_SCORE_CREDIT=0", cached_but_waiting, "A", "B", also=WEIGHTS),
    Case("--router-prefill-load-scale=1", "DYN_ROUTER_PREFILL_LOAD_SCALE=1", holding_or_computing, "A", "B"),
    Case("--router-temperature=10", "DYN_ROUTER_TEMPERATURE=10", cached_at_one, 1, 3),
    Case("--no-use-kv-events", "DYN_USE_KV_EVENTS=false", told_and_chosen, (10, 0, 10), (0, 0, 10)),
    Case("--no-router-kv-events", "DYN_ROUTER_KV_EVENTS=false", told_and_chosen, (10, 0, 10), (0, 0, 10)),
    Case("--router-ttl=30", "DYN_ROUTER_TTL=30", a_minute_later, 10, 0, also=GUESS),
    Case("--router-max-tree-size=50", "DYN_ROUTER_MAX_TREE_SIZE=50", twenty_prompts_later, (10, 10), (0, 10), also=GUESS),
    Case(
        "--router-prune-target-ratio=0.2",
        "DYN_ROUTER_PRUNE_TARGET_RATIO=0.2",
        remembered_of_eleven,
        80,
        20,
        also=(*GUESS, "--router-max-tree-size=100"),
    ),
    Case("--router-speculative-ttl-s=0", "DYN_ROUTER_SPECULATIVE_TTL_S=0", siblings, 10, 0),
    Case("--no-router-track-active-blocks", "DYN_ROUTER_TRACK_ACTIVE_BLOCKS=false", held_blocks, "B", "A", also=WEIGHTS),
    Case("--router-cost=weights", "DYN_ROUTER_COST=weights", cached_but_waiting, "B", "A"),
    Case("--router-track-output-blocks", "DYN_ROUTER_TRACK_OUTPUT_BLOCKS=true", long_answer_ahead, "A", "B", also=WEIGHTS),
    Case("--no-router-assume-kv-reuse", "DYN_ROUTER_ASSUME_KV_REUSE=false", same_prompt_twice, "A", "B", also=WEIGHTS),
    *(
        Case(
            "--active-decode-blocks-threshold=0.8",
            "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD=0.8",
            full_caches,
            ["B", "B"],
            ["A", "refused"],
            mode,
        )
        for mode in ("kv", "least-loaded", "power-of-two")
    ),
    *(
        Case(
            "--active-prefill-tokens-threshold=100",
            "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD=100",
            waiting_prompts,
            ["B", "B"],
            ["A", "refused"],
            mode,
        )
        for mode in ("kv", "least-loaded", "power-of-two")
    ),
    Case("--load-aware", "DYN_LOAD_AWARE=true", one_is_loaded, ["A", "B", "C"], ["B", "C"], "round-robin"),
    Case("--load-aware", "DYN_LOAD_AWARE=true", one_is_loaded, ["A", "B", "C"], ["B", "C"], "random"),
]


def options(*flags: str, **environ: str) -> RouterOptions:
    return load(FrontendConfig, flags, environ, program="dynamo-frontend").router


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.flag} {case.mode}")
def test_a_flag_makes_the_difference_that_it_is_there_for(case: Case) -> None:
    common = (f"--router-mode={case.mode}", *case.also)
    name, _, value = case.variable.partition("=")
    assert case.situation(Situation(options(*common))) == case.without
    assert case.situation(Situation(options(*common, case.flag))) == case.with_it
    assert options(*common, case.flag) == options(*common, **{name: value})


@pytest.mark.parametrize("mode", ["round-robin", "random"])
def test_thresholds_keep_modes_that_ignore_loads_from_busy_instances(mode: str) -> None:
    plain, careful = (
        Situation(options(f"--router-mode={mode}", *flags)) for flags in ((), ("--active-prefill-tokens-threshold=100",))
    )
    for s in (plain, careful):
        s.report(B, queued_prefill_tokens=200)
    assert {plain.ask(b"")[0] for _ in range(60)} == {"A", "B", "C"}
    assert {careful.ask(b"")[0] for _ in range(60)} == {"A", "C"}
    assert careful.ask(b"", pinned=B.id)[0] == "B"
    with pytest.raises(Overloaded):
        careful.ask(b"", pinned=B.id, needs_room=True)
    assert careful.ask(b"", pinned=A.id, needs_room=True)[0] == "A"
    assert outcome(careful, (B,)) == "refused"


def test_what_was_sent_counts_before_it_is_reported_and_until_it_is_computed() -> None:
    s = Situation(options("--active-prefill-tokens-threshold=30"))
    assert s.ask(P, (A,))[0] == "A"
    assert outcome(s, (A,)) == "refused"
    s.router.first_token("1")
    assert outcome(s, (A,)) == "A"


@pytest.mark.parametrize(
    ("flags", "follows"),
    [
        ((), False),
        (("--load-aware",), True),
        (("--router-mode=kv",), True),
        (("--router-mode=random", "--active-decode-blocks-threshold=0.9"), True),
        (("--router-mode=direct",), False),
    ],
)
def test_loads_are_followed_only_where_they_matter(flags: tuple[str, ...], follows: bool) -> None:
    assert follows_loads(options(*flags)) is follows
