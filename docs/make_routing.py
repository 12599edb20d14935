"""Draws docs/routing.svg: the terms of the KV router's cost in seconds for one prompt and three instances.

A term is what the cost loses when its weight is 0.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from dynamo.common.discovery import Instance
from dynamo.common.generation import pack_tokens
from dynamo.common.kv.events import KvUpdate, LoadReport
from dynamo.common.kv.hashes import pack_hashes, sequence_hashes
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.frontend.router.base import RouteRequest
from dynamo.frontend.router.cost_terms import COST_TERMS, CostTerms
from dynamo.frontend.router.kv import KvRouter

PICTURE = Path(__file__).with_name("routing.svg")
BLOCK_TOKENS = 512
PROMPT_BLOCKS = 16
SITUATIONS = (("A", 15, 48, 16), ("B", 10, 2, 6), ("C", 0, 0, 1))
"""Instances: name, blocks of the prompt that it has cached, blocks that wait there for prefill, running requests."""
TERMS = (
    ("wait + prefill", replace(COST_TERMS, first_token=0.0)),
    ("output · later", replace(COST_TERMS, decoding=0.0)),
    ("prefill · requests there", replace(COST_TERMS, delayed=0.0)),
    ("prefill · arrivals · (wait + prefill)", replace(COST_TERMS, arriving=0.0)),
    ("prefill · further · (1 + mean requests)", replace(COST_TERMS, evicted=0.0)),
)
"""Terms of the cost: name, and the cost without it."""
_ARRIVALS_PER_S = 12
_COLOURS = ("C0", "C9", "C1", "C3", "C2")


def prompt(number: int) -> bytes:
    first = number * PROMPT_BLOCKS * BLOCK_TOKENS
    return pack_tokens(range(first, first + PROMPT_BLOCKS * BLOCK_TOKENS))


def costs(terms: CostTerms) -> list[float]:
    """Return the cost of each instance, in seconds."""
    now = 0.0
    llm = LlmInfo(context_length=1 << 20, tokenizer="", block_size=BLOCK_TOKENS, total_blocks=600)
    card = ModelCard(name="m", kind=ModelKind.LLM, llm=llm)
    router = KvRouter(clock=lambda: now, terms=terms)
    fleet = [
        Instance(id=InstanceId(number), endpoint=Endpoint(), subject="", card=card, started_at=0.0)
        for number in range(1, len(SITUATIONS) + 1)
    ]
    for number in range(20 * _ARRIVALS_PER_S):  # the router counts what arrives
        now += 1.0 / _ARRIVALS_PER_S
        router.pick(RouteRequest(model="m", booking_id=str(number), prompt=pack_tokens(range(BLOCK_TOKENS))), fleet)
        router.finished(str(number))
    for instance, (_, cached, waiting, running) in zip(fleet, SITUATIONS, strict=True):
        for turn in range(400):  # a quarter of the blocks that the instance computes had been evicted
            again = pack_hashes(sequence_hashes(prompt(2), BLOCK_TOKENS))
            others = (pack_hashes(sequence_hashes(prompt(10 + 3 * turn + each), BLOCK_TOKENS)) for each in range(3))
            router.apply("m", instance.id, KvUpdate(0, removed=again))
            router.apply("m", instance.id, KvUpdate(0, stored=b"".join((again, *others))))
        held = sequence_hashes(prompt(1), BLOCK_TOKENS)[:cached]
        router.apply("m", instance.id, KvUpdate(0, stored=pack_hashes(held)))
        report = LoadReport(running=running, queued_prefill_tokens=waiting * BLOCK_TOKENS, total_blocks=600)
        router.loads.report(instance.id, report, now)
    decision = router.pick(RouteRequest(model="m", booking_id="r", prompt=prompt(1)), fleet, explain=True)
    by_instance = {str(each["instance"]): float(each["cost"]) for each in decision.candidates}
    return [by_instance[f"{instance.id:x}"] for instance in fleet]


def main() -> None:
    mpl.rcParams["svg.hashsalt"] = "routing"  # one input, one file
    figure = Figure(figsize=(8.5, 4.8), layout="constrained")
    axes = figure.subplots()
    names = [
        f"{name}: {cached} of {PROMPT_BLOCKS} blocks cached\nwaiting: {waiting} blocks, running: {running}"
        for name, cached, waiting, running in SITUATIONS
    ]
    totals = costs(COST_TERMS)
    left = [0.0] * len(names)
    for (title, without), colour in zip(TERMS, _COLOURS, strict=True):
        widths = [total - rest for total, rest in zip(totals, costs(without), strict=True)]
        axes.barh(names, widths, 0.55, left=left, color=colour, label=title)
        left = [one + two for one, two in zip(left, widths, strict=True)]
    for position, total in enumerate(totals):
        axes.annotate(f"{total:.1f} s", (total, position), (6, -4), textcoords="offset points")
    axes.invert_yaxis()
    axes.set_xlim(right=1.1 * max(totals))
    axes.set_xlabel("cost in seconds: what the request adds to the latencies of all; the lowest wins")
    figure.legend(*axes.get_legend_handles_labels(), fontsize=9, ncols=2, loc="outside upper center")
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
