"""The cost of an instance in seconds: what a request would add to the latencies of all requests there.

    wait    = tokens of prompts that wait on the instance · token; half a step if none wait but requests run
    step    = base + sequence · requests there + block · their KV blocks
    prefill = tokens of this prompt that are not cached · token + step
    fetch   = its blocks on slower tiers · seconds to fetch one, where that is less than to compute one
    later   = step, with the requests that will run there while this one decodes

    cost    = wait + fetch + prefill + output · later                       its own latency
            + prefill · (requests there + arrivals · (wait + prefill))      each of them waits for the prefill
            + prefill · further · (1 + mean requests)                       what the placement evicts is computed again

`token`, `base`, `sequence`, `block` and the mean output of a request are learned (`step_model.py`; the output also by API key and
session, where requests bring it), and what it takes to fetch a
block, which delays no other request (`fetching.py`); `further` is estimated from what instances evict (`evictions.py`). Weights
and constants are in `cost_terms.py`; decision 17 says what each is for.

While this request decodes, requests that end make room for others, which level the fleet: an instance that runs `excess` more
than the mean runs `excess² / (1.5 · mean)` more on average, or `excess` where that is less. It is this number that `later` takes
for the requests there. KV blocks are not levelled: long contexts stay where they are.

The first token of a prompt that waits for others also comes 1.5 steps later: for the step that runs, and the one with the others.
That is predicted, but costs nothing: prompts that are computed in one step save those that run there a step.

While few steps compute prompts, what makes tokens late on an instance is how many requests run there. Then, where it is more than
one, each above the mean of the fleet costs extra (`_add_crowding`).

If prompts wait at the cheapest instance, the cost is compared once more, among those that have as much of the prompt cached
(`shorter_queue`). That some of them have more requests than others hardly matters there: requests that come later level it, the
sooner, the less it is. What one waits for others is not levelled.

Goals, where they are given, add to the cost of an instance that misses them: ten times the excess over the goal, for the time to
first token once, for the time between tokens for each token of this request and of those that run there.

A cached block is worth the prefill that it saves, which grows with the number of requests on the instance and with the queue. A
prefix that many requests share spreads by itself: an idle instance computes it as soon as that costs less than waiting for the
others that have it, or earlier, see `spreading.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.kv.events import LoadReport
from dynamo.common.kv.tiers import Tier
from dynamo.common.names import InstanceId
from dynamo.frontend.router.cache.evictions import Evictions, InstanceEvictions
from dynamo.frontend.router.cost.fetching import FetchModel
from dynamo.frontend.router.cost.prompts import Prompt
from dynamo.frontend.router.cost.step_model import StepModel
from dynamo.frontend.router.cost.traffic import FleetTraffic
from dynamo.frontend.router.cost_terms import COST_TERMS, CostTerms
from dynamo.frontend.router.fetch import TierFetch
from dynamo.frontend.router.loads.instance_load import Load
from dynamo.frontend.router.loads.rows import RowCache

_requests = attrgetter("requests")
_MOST_PREFILL = 0.95
"""Upper bound of the share of its time that an instance computes prompts."""


class Predictions(msgspec.Struct, frozen=True, gc=False):
    """What a request would do to each candidate, in seconds, by position."""

    costs: list[float]
    ttft_s: list[float]
    output: float
    """The expected tokens of the response."""
    mean: float
    """Requests per instance."""
    arrivals: float
    """Requests per second and instance."""
    prefilling: float
    """The share of its time that an instance computes prompts."""

    @property
    def idle(self) -> float:
        """The share of its time that an instance computes no prompts."""
        return 1.0 - min(self.prefilling, _MOST_PREFILL)


class LatencyModel:
    """Predicts latencies on the instances of one model with the same role and engine. Not for several threads."""

    def __init__(
        self, evictions: Evictions, terms: CostTerms = COST_TERMS, tier_prices: Mapping[Tier, float] | None = None
    ) -> None:
        self._terms = terms
        self.steps = StepModel()
        self.fetching = FetchModel(tier_prices)
        """To be told of first tokens of models whose instances have slow tiers."""
        self._eviction_rows = RowCache(evictions)
        self.traffic = FleetTraffic()
        """To be told of each placement."""
        self._output = self.steps.times.output_tokens
        """The mean of outputs that are limited to `_max_output` tokens, by the times `_output_of`."""
        self._max_output = 0
        self._output_of = self.steps.times

    def report(self, instance: InstanceId, report: LoadReport, now: float) -> None:
        """Learn from a load report of an instance."""
        self.steps.report(instance, report.totals, now)
        if report.totals.steps:
            self.traffic.report(instance, report.totals.prefill_tokens, report.queued_prefill_tokens, now)

    def remove_instance(self, instance: InstanceId) -> None:
        self.steps.remove_instance(instance)
        self.traffic.remove_instance(instance)

    def predict(
        self,
        prompt: Prompt,
        loads: Sequence[Load],
        overlaps: Mapping[int, int],
        confirmed: Mapping[int, int],
        candidates: Sequence[Instance],
        now: float,
        *,
        is_prefilled: bool,
        max_output: int,
        frontends: int,
        learned_output: float = 0.0,
        fetches: Mapping[int, TierFetch] | None = None,
    ) -> Predictions:
        """Return predictions for a request that arrives now. `overlaps`: in blocks by position, `confirmed`: without those
        that are being computed; `max_output`: 0 for no limit; `learned_output`: what to expect of this request, 0: what the
        model's have; `frontends`: how many get such requests; `fetches`: what each instance fetches of the blocks in `overlaps`.
        """
        times, terms = self.steps.times, self._terms
        if learned_output:  # of outputs with their limits
            output = min(learned_output, max_output) if max_output else learned_output
        else:
            is_known = max_output == self._max_output and times is self._output_of
            output = self._output if is_known else self._expected_output(max_output)
        self.traffic.pass_time(now)
        requests_per_s, tokens_per_s = self.traffic.of_fleet(frontends)
        arrivals, prefilling = requests_per_s / len(loads), tokens_per_s / len(loads) * times.token
        prefills = [0.0] * len(loads) if is_prefilled else _prefills_s(prompt, overlaps, len(loads), times.token)
        mean = sum(map(_requests, loads)) / len(loads)
        evicted = 0.0 if is_prefilled else terms.evicted * (1.0 + mean)
        rows = self._eviction_rows.rows(candidates)
        costs, ttfts = self._of_candidates(loads, prefills, rows, now, output, mean, arrivals, evicted)
        if fetches and not is_prefilled:
            for position, fetch in fetches.items():
                costs[position] += terms.first_token * fetch.seconds
                ttfts[position] += fetch.seconds
        if arrivals * times.base < terms.quiet_steps and prefilling < terms.quiet_prefilling:
            request_s = terms.decoding * output * times.sequence
            self._add_crowding(costs, loads, request_s, overlaps, confirmed, mean, arrivals, prefilling)
        return Predictions(costs, ttfts, output, mean, arrivals, prefilling)

    def _of_candidates(
        self,
        loads: Sequence[Load],
        prefills: Sequence[float],
        evictions: Sequence[InstanceEvictions],
        now: float,
        output: float,
        mean: float,
        arrivals: float,
        evicted: float,
    ) -> tuple[list[float], list[float]]:
        """Return the cost and the TTFT of each candidate, in seconds. `prefills`: the prompt alone; `evicted`: what a second that
        evicted blocks cost others counts; the others as in `Predictions`.
        """
        times, terms = self.steps.times, self._terms
        base, sequence, block = times.base, times.sequence, times.block
        batch_s = terms.batch_tokens * times.token
        levelling = 1.0 / (terms.levelled * max(mean, 1.0))
        # What decoding costs for each request there, and on an instance with the mean of the fleet.
        decoding = terms.decoding * output
        request_s, held_block_s = decoding * sequence, decoding * block
        mean_s = decoding * base + request_s * mean
        idle_s = mean_s - request_s * mean * min(1.0, mean * levelling)
        first_token, delayed, arriving = terms.first_token, terms.delayed, terms.arriving * arrivals
        queue_s, running, prefill_step = terms.queue * times.token, terms.running_step, terms.prefill_step
        costs: list[float] = []
        ttfts: list[float] = []
        for load, prefill, evicting in zip(loads, prefills, evictions, strict=True):
            requests, blocks, tokens = load.requests, load.decode_blocks, load.prefill_tokens
            if not (requests or blocks or tokens):  # the same as below, in less time
                prefill += prefill_step * base
                costs.append(idle_s + prefill * (first_token + arriving * prefill + evicting.further * evicted))
                ttfts.append(prefill)
                continue
            step = base + sequence * requests + block * blocks
            prefill += prefill_step * step
            delay = 0.0
            if tokens:
                delay = terms.shared_steps * step
                wait = tokens * queue_s
                progress = now - load.queued_since
                if progress > 0.0:
                    wait -= progress if progress < batch_s else batch_s
                ttft = prefill + wait if wait > 0.0 else prefill
            elif requests:
                ttft = prefill + running * step
            else:
                ttft = prefill
            excess = requests - mean
            lasting = excess * levelling
            if lasting < 0.0:
                lasting = -lasting
            decoding_s = mean_s + held_block_s * blocks + request_s * (excess * lasting if lasting < 1.0 else excess)
            delaying = delayed * requests + arriving * ttft + evicting.further * evicted
            costs.append(first_token * ttft + decoding_s + prefill * delaying)
            ttfts.append(ttft + delay)
        return costs, ttfts

    def shorter_queue(
        self,
        prompt: Prompt,
        loads: Sequence[Load],
        overlaps: Mapping[int, int],
        predicted: Predictions,
        chosen: int,
        misses: Sequence[float],
        busy: Sequence[bool] | None,
    ) -> int:
        """Return where a request goes if prompts wait at the chosen instance: there, or to another one with the same overlap.

        `misses`: what goals add to the cost of each; empty if there are none. `busy`: which of them may get no request.
        """
        if not self._terms.passes_queues:
            return chosen
        overlap, longest = overlaps.get(chosen, 0), predicted.ttft_s[chosen]
        rivals = [
            position
            for position, ttft_s in enumerate(predicted.ttft_s)
            if ttft_s < longest and overlaps.get(position, 0) == overlap and not (busy and busy[position])
        ]
        if not rivals:
            return chosen
        times, output, mean, arrivals = self.steps.times, predicted.output, predicted.mean, predicted.arrivals
        prefill_s = (prompt.tokens - overlap * prompt.block_size) * times.token
        best, least = chosen, math.inf
        for position in (chosen, *rivals):
            load, ttft_s = loads[position], predicted.ttft_s[position]
            excess = load.requests - mean
            # Without new requests, the excess would be gone after this share of the time that a request takes.
            lasting = min(1.0, abs(excess) / max(mean, 1.0))
            levelled = mean + excess * lasting
            step = times.step_s(levelled, load.decode_blocks)
            prefill = prefill_s + times.step_s(load.requests, load.decode_blocks)
            cost = ttft_s + output * step + prefill * (levelled + arrivals * ttft_s)
            if misses:
                cost += misses[position]
            if cost < least:
                best, least = position, cost
        return best

    def _add_crowding(
        self,
        costs: list[float],
        loads: Sequence[Load],
        decoding_s: float,
        overlaps: Mapping[int, int],
        confirmed: Mapping[int, int],
        mean: float,
        arrivals: float,
        prefilling: float,
    ) -> None:
        """Add to the costs of instances that have more requests than the mean, if prompts are computed in few steps.

        `decoding_s`: by how much one more request makes the decoding of another one longer. Where the prefix is being computed,
        requests of a burst stay together.
        """
        times, terms = self.steps.times, self._terms
        quiet = 1.0 - arrivals * (times.base + times.sequence * mean) / terms.quiet_steps
        if quiet <= 0.0:
            return
        free = 1.0 - prefilling / terms.quiet_prefilling
        most = max(mean, 1.0)  # that two requests run beside each other happens whatever one does
        each_s = quiet * free * min(terms.crowding_weight * decoding_s, terms.crowding_tokens * times.token)
        for position, load in enumerate(loads):
            if load.requests > most and overlaps.get(position, 0) <= confirmed.get(position, 0):
                costs[position] += each_s * (load.requests - mean)

    def premium_s(self, prompt: Prompt, load: Load, predicted: Predictions, position: int, overlap: int, most: int) -> float:
        """Return how much less the instance at `position`, with this overlap, would cost if it were `most` blocks.

        What a copy evicts is not part of it: credit would have to pay for that where it does harm.
        """
        token, size = self.steps.times.token, prompt.block_size
        saved_s = (most - overlap) * size * token
        rest_s = (prompt.tokens - most * size) * token
        return saved_s * (1.0 + load.requests + predicted.arrivals * (predicted.ttft_s[position] + rest_s))

    def _expected_output(self, max_output: int) -> float:
        """Return the mean length of outputs that are limited to `max_output` tokens, if lengths are distributed exponentially."""
        times = self.steps.times
        mean = times.output_tokens
        self._output = mean * (1.0 - math.exp(-max_output / mean)) if max_output else mean
        self._max_output, self._output_of = max_output, times
        return self._output

    def anticipated(self, predicted: Predictions, loads: Sequence[Load], frontends: int) -> Predictions:
        """Return predictions with the `prefilling` that soon will be, so that not too many requests are admitted before they
        show in the rates.

        It then includes what was placed after the last reports, which come once per step, and, while the rates have
        just begun, what they will have counted when the present traffic has lasted.
        """
        unreported = sum(load.prefill_tokens for load in loads) - self.traffic.queued
        _, tokens_per_s = self.traffic.of_fleet(frontends, max(0, unreported))
        prefilling = tokens_per_s / self.traffic.counted_share / len(loads) * self.steps.times.token
        return msgspec.structs.replace(predicted, prefilling=prefilling)

    def alone_s(self, tokens: int) -> float:
        """Return the time to first token on an idle instance that has to compute so many tokens of a prompt."""
        times = self.steps.times
        return tokens * times.token + self._terms.prefill_step * times.base

    def add_misses(
        self, predicted: Predictions, prompt: Prompt, loads: Sequence[Load], ttft_goal_s: float | None, itl_goal_s: float | None
    ) -> Sequence[float]:
        """Add to the costs of instances that miss a goal. Return what was added to each."""
        misses, weight = [0.0] * len(loads), self._terms.miss_weight
        if ttft_goal_s is not None:
            for position, ttft_s in enumerate(predicted.ttft_s):
                if ttft_s > ttft_goal_s:
                    misses[position] += weight * (ttft_s - ttft_goal_s)
        if itl_goal_s is not None:
            output = self.steps.times.output_tokens
            for position, load in enumerate(loads):
                excess_s = self.itl_s(prompt, load, predicted.prefilling) - itl_goal_s
                if excess_s > 0.0:
                    misses[position] += weight * excess_s * output * (load.requests + 1)
        for position, miss in enumerate(misses):
            predicted.costs[position] += miss
        return misses

    def itl_s(self, prompt: Prompt, load: Load, prefilling: float) -> float:
        """Return the mean time between tokens on an instance that computes prompts for this share of its time."""
        step_s = self.steps.times.step_s(load.requests + 1, load.decode_blocks + prompt.blocks)
        return step_s * _slowdown(prefilling)

    def share_of_time(self, tokens_per_s: float, instances: int, prefilling: float) -> float:
        """Return for which share of its time an instance computes what all frontends place of something.

        `tokens_per_s`: what this one places of it; `prefilling`: the share for all prompts.
        """
        own = self.traffic.tokens_per_s
        return tokens_per_s / own * prefilling if own else tokens_per_s / instances * self.steps.times.token


def _prefills_s(prompt: Prompt, overlaps: Mapping[int, int], count: int, token: float) -> list[float]:
    """Return how long each of `count` instances computes the prompt's tokens that it has not cached."""
    prefills, block_s = [prompt.tokens * token] * count, prompt.block_size * token
    for position, blocks in overlaps.items():
        prefills[position] -= blocks * block_s
    return prefills


def _slowdown(prefilling: float) -> float:
    """Return how much longer decoding takes on an instance that computes prompts for this share of its time."""
    return 1.0 / (1.0 - min(prefilling, _MOST_PREFILL))
