"""Draws docs/routing.svg: the terms of the KV router's cost by weights for one prompt and three instances."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from dynamo.common.discovery import Instance
from dynamo.common.generation import pack_tokens
from dynamo.common.kv.events import KvUpdate, LoadReport
from dynamo.common.kv.hashes import pack_hashes, sequence_hashes
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.frontend.config import KvCost, KvRouterOptions
from dynamo.frontend.router.base import RouteRequest
from dynamo.frontend.router.kv import KvRouter

PICTURE = Path(__file__).with_name("routing.svg")
BLOCK_TOKENS = 16
PROMPT_BLOCKS = 40
SITUATIONS = (("A", 30, 150, 200), ("B", 12, 10, 300), ("C", 0, 0, 20))
"""Instances: name, blocks of the prompt it has cached, blocks waiting for prefill, blocks held by running requests."""


def costs() -> list[float]:
    llm = LlmInfo(context_length=1 << 20, tokenizer="", block_size=BLOCK_TOKENS, total_blocks=10_000)
    card = ModelCard(name="m", kind=ModelKind.LLM, llm=llm)
    router = KvRouter(KvRouterOptions(cost=KvCost.WEIGHTS), clock=lambda: 0.0)
    prompt = pack_tokens(range(PROMPT_BLOCKS * BLOCK_TOKENS))
    hashes = sequence_hashes(prompt, BLOCK_TOKENS)
    fleet: list[Instance] = []
    for number, (_, cached, waiting, held) in enumerate(SITUATIONS, 1):
        instance = Instance(id=InstanceId(number), endpoint=Endpoint(), subject="", card=card, started_at=0.0)
        router.apply("m", instance.id, KvUpdate(0, stored=pack_hashes(hashes[:cached])))
        report = LoadReport(active_blocks=held, queued_prefill_tokens=waiting * BLOCK_TOKENS, total_blocks=10_000)
        router.loads.report(instance.id, report, 0.0)
        fleet.append(instance)
    decision = router.pick(RouteRequest(model="m", booking_id="r", prompt=prompt), fleet, explain=True)
    by_instance = {str(each["instance"]): float(each["cost"]) for each in decision.candidates}
    return [by_instance[f"{instance.id:x}"] for instance in fleet]


def main() -> None:
    settings = KvRouter().config
    scale, weight = settings.prefill_load_scale, settings.overlap_score_weight
    mpl.rcParams["svg.hashsalt"] = "routing"  # one input, one file
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    names = [
        f"{name}\n{cached} of {PROMPT_BLOCKS} blocks cached\n{waiting} waiting, {held} held"
        for name, cached, waiting, held in SITUATIONS
    ]
    own = [scale * PROMPT_BLOCKS] * len(SITUATIONS)
    waiting = [scale * each[2] for each in SITUATIONS]
    held = [float(each[3]) for each in SITUATIONS]
    cached = [-scale * weight * each[1] for each in SITUATIONS]
    below = [one + two for one, two in zip(own, waiting, strict=True)]
    axes.bar(names, own, 0.5, color="C0", label=f"{scale:g} · blocks of the prompt")
    axes.bar(names, waiting, 0.5, bottom=own, color="C9", label=f"{scale:g} · blocks waiting for prefill")
    axes.bar(names, held, 0.5, bottom=below, color="C1", label="blocks held by running requests")
    axes.bar(names, cached, 0.5, color="C2", label=f"−{scale:g} · {weight:g} · blocks cached")
    totals = costs()
    axes.plot(names, totals, "kD", label="cost: the sum; the lowest wins")
    for position, cost in enumerate(totals):
        axes.annotate(f"{cost:g}", (position, cost), (50, -4), textcoords="offset points")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_ylabel("KV blocks")
    axes.legend(fontsize=9, loc="upper right")
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
