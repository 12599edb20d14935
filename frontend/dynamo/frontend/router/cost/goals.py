"""Which requests are refused because latency goals would be missed otherwise: those of low priority first, and long ones first.

A request is admitted if some instance is predicted to reach its goals. Those that are more important and come meanwhile must
find room, too; those that are less important will be refused in its place. So

- of the TTFT goal, it may use the part that more important prompts leave of the instances' time, and
- the time between tokens is predicted as if instances also computed the more important prompts that have been refused of late,
  but none of the less important ones, and as if as many tokens had to be computed for each prompt as for this one, within limits:
  long ones are refused first. A short one counts for a little more than the mean: prompts come in bunches, and where the mean
  time between tokens just reaches the goal, half of the requests miss it.

A request is *late* if its prompt alone takes longer than the TTFT goal, on an idle instance, too. It is refused for what waits
before it, not for what it is: what is refused is never cached, so that its prefix would be too long for ever. Of its goal, only
the wait counts. Late requests may have half of the time that the others leave, those that were refused of late included, and a
little where these leave none: a prefix that is used again is worth its first prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from dynamo.common.errors import Overloaded
from dynamo.frontend.config import KvRouterOptions
from dynamo.frontend.router.base import RouteRequest, TooLate
from dynamo.frontend.router.cost.latency import LatencyModel, Predictions
from dynamo.frontend.router.cost.prompts import Prompt
from dynamo.frontend.router.cost.traffic import Traffic
from dynamo.frontend.router.loads.instance_load import Load

_SHORTEST = 1.1
"""For which part of the mean a request counts at least. If short ones counted for less, those alone could fill the fleet."""
_LONGEST = 1.5
"""For which part of the mean a request counts at most: a prefix that is nowhere cached must get its turn."""
_LATE_OF_REST = 0.5
"""The share of the time that others leave which late requests may have. With all of it, goodput is 36 to 41% less where every
tenth prompt is late; with half of this, 19% less after caches were cleared (`benchmarks.router_goals`, 12, 24/s, 2026-11-27)."""
_LATE_AT_LEAST = 0.1
"""The share of the time that late requests may have where others leave none."""
_MOST_PRIORITIES = 32
"""Clients choose priorities: above that many, the one with the least traffic is forgotten."""


class Competition(msgspec.Struct, frozen=True, gc=False):
    """Prompt tokens per second that this frontend placed or refused, as one request sees them."""

    above: float
    """Placed, more important."""
    refused_above: float
    below: float
    """Placed, less important."""
    mean_tokens: float
    """Mean prompt tokens of the placed requests that are at least as important; 0 if there are none."""
    late: float
    """Placed, at least as important, and late."""
    others: float
    """Placed or refused, at least as important, and not late."""


class Demand:
    """What requests of each priority would have instances compute, this frontend's refused ones included."""

    def __init__(self) -> None:
        self._placed: dict[int, Traffic] = {}
        self._late: dict[int, Traffic] = {}
        """The part of `_placed` that is late."""
        self._refused: dict[int, Traffic] = {}
        self._last_refused = ""

    def place(self, priority: int, tokens: int, now: float, *, is_late: bool = False) -> None:
        _add(self._placed, priority, tokens, now)
        if is_late:
            _add(self._late, priority, tokens, now)

    def refuse(self, priority: int, tokens: int, now: float, request_id: str) -> None:
        """Count a refused request; one that tries again and again, because it is the first in line, only once."""
        if not request_id or request_id != self._last_refused:
            _add(self._refused, priority, tokens, now)
        self._last_refused = request_id

    def competition(self, priority: int, now: float) -> Competition:
        above = refused_above = below = own = requests = late = refused = 0.0
        for each, traffic in self._placed.items():
            traffic.pass_time(now)
            if each < priority:
                below += traffic.tokens_per_s
                continue
            requests += traffic.requests_per_s
            if each > priority:
                above += traffic.tokens_per_s
            else:
                own = traffic.tokens_per_s
        for each, traffic in self._refused.items():
            if each >= priority:
                traffic.pass_time(now)
                refused += traffic.tokens_per_s
                refused_above += traffic.tokens_per_s if each > priority else 0.0
        for each, traffic in self._late.items():
            if each >= priority:
                traffic.pass_time(now)
                late += traffic.tokens_per_s
        mean_tokens = (above + own) / requests if requests else 0.0
        return Competition(above, refused_above, below, mean_tokens, late, above + own + refused - late)


def _add(by_priority: dict[int, Traffic], priority: int, tokens: int, now: float) -> None:
    traffic = by_priority.get(priority)
    if traffic is None:
        if len(by_priority) >= _MOST_PRIORITIES:
            del by_priority[min(by_priority, key=lambda each: by_priority[each].tokens_per_s)]
        traffic = by_priority[priority] = Traffic()
    traffic.pass_time(now)
    traffic.add(tokens)


def check_goals(
    request: RouteRequest,
    config: KvRouterOptions,
    prompt: Prompt,
    loads: Sequence[Load],
    overlaps: Mapping[int, int],
    predicted: Predictions,
    latency: LatencyModel,
    demand: Demand,
    now: float,
) -> bool:
    """Return whether the request is late. Raises Overloaded if no instance is predicted to reach the goals.

    If it is late, its wait has to reach the goal for the first token, and late ones must not take too much of the time.
    What the request has waited counts for its time to first token. It is TooLate, so that it does not wait, if
    - no instance can reach its goal for that any more,
    - it has such a goal and is a long one, or late, which at the head of a line would keep short ones from the room there is, or
    - not even an idle instance reaches its goal between tokens, or it brought that along: others would wait behind it.
    """
    if (request.pinned is not None and not request.needs_room) or request.is_prefilled or request.was_admitted:
        return False
    competition = demand.competition(request.priority, now)

    def share(tokens_per_s: float) -> float:
        if request.pinned is not None:
            return 0.0  # of the fleet, not of the one in `loads`
        return latency.share_of_time(tokens_per_s, len(loads), predicted.prefilling)

    above, refused_above, below = share(competition.above), share(competition.refused_above), share(competition.below)
    whole_s = math.inf if config.ttft_goal_s is None else config.ttft_goal_s
    goal_s = whole_s - request.waited_s
    longest_s = goal_s * max(0.0, 1.0 - above - refused_above) if above or refused_above else goal_s
    slowest_s = math.inf if config.itl_goal_s is None else config.itl_goal_s
    missing_tokens = prompt.tokens - max(overlaps.values(), default=0) * prompt.block_size
    least_s = latency.alone_s(missing_tokens)
    is_late = least_s > whole_s
    counted_s = predicted.ttft_s  # what counts for the goal
    if is_late:
        so_far = latency.traffic.counted_share  # the first ones are not taken to go on
        _check_room(request.model, least_s, whole_s, so_far * share(competition.late), so_far * share(competition.others))
        counted_s = [
            ttft_s - latency.alone_s(prompt.tokens - overlaps.get(position, 0) * prompt.block_size)
            for position, ttft_s in enumerate(predicted.ttft_s)
        ]
    mean = competition.mean_tokens
    helps_to_wait = latency.steps.times.step_s(1, prompt.blocks) <= slowest_s and "itl_goal" not in request.overrides
    may_wait = config.ttft_goal_s is None and helps_to_wait
    least_itl_s = math.inf
    for position, (needed_s, load) in enumerate(zip(counted_s, loads, strict=True)):
        if needed_s <= longest_s:
            tokens = prompt.tokens - overlaps.get(position, 0) * prompt.block_size
            ratio = min(max(tokens / mean, _SHORTEST), _LONGEST) if mean else 1.0
            itl_s = latency.itl_s(prompt, load, (predicted.prefilling - below) * ratio + refused_above)
            if itl_s <= slowest_s:
                return is_late
            least_itl_s = min(least_itl_s, itl_s)
            may_wait = may_wait or (ratio <= _SHORTEST and helps_to_wait and not is_late)
    if not is_late:  # else it would not be in time if less important ones made room for it
        demand.refuse(request.priority, missing_tokens, now, request.request_id)
    best_s = min(counted_s)
    refusal = Overloaded if may_wait else TooLate
    what = "the prompt would wait for" if is_late else "the first token would come after"
    missed = (
        f"{what} about {best_s:.2f} s, and {max(longest_s, 0.0):.2f} s of the goal are left"
        if least_itl_s == math.inf
        else f"a token would come every {least_itl_s * 1e3:.0f} ms on average, not {slowest_s * 1e3:.0f}"
    )
    raise refusal(
        f"no instance of model '{request.model}' is predicted to reach the goals: {missed}",
        retry_after_s=max(1.0, best_s - longest_s),
    )


def _check_room(model: str, alone_s: float, goal_s: float, late: float, others: float) -> None:
    """Raise TooLate if late requests have as much of the instances' time as they may. `late`, `others`: shares of it."""
    if late >= max(_LATE_AT_LEAST, _LATE_OF_REST * (1.0 - others)):
        raise TooLate(
            f"no instance of model '{model}' is predicted to reach the goals: the prompt alone would take {alone_s:.2f} s, the "
            f"goal is {goal_s:.2f} s, and such prompts have {late:.0%} of the instances' time",
            retry_after_s=max(1.0, alone_s),
        )
