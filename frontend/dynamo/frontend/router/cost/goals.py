"""Which requests are refused because latency goals would be missed otherwise: those of low priority first, and long ones first.

A request is admitted if some instance is predicted to reach its goals. Those that are more important and come meanwhile must
find room, too; those that are less important will be refused in its place. So

- of the TTFT goal, it may use the part that more important prompts leave of the instances' time, and
- the time between tokens is predicted as if instances also computed the more important prompts that have been refused of late,
  but none of the less important ones, and as if as many tokens had to be computed for each prompt as for this one, within limits:
  long ones are refused first. A short one counts for a little more than the mean: prompts come in bunches, and where the mean
  time between tokens just reaches the goal, half of the requests miss it.
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


class Demand:
    """What requests of each priority would have instances compute, this frontend's refused ones included."""

    def __init__(self) -> None:
        self._placed: dict[int, Traffic] = {}
        self._refused: dict[int, Traffic] = {}
        self._last_refused = ""

    def place(self, priority: int, tokens: int, now: float) -> None:
        _add(self._placed, priority, tokens, now)

    def refuse(self, priority: int, tokens: int, now: float, request_id: str) -> None:
        """Count a refused request; one that tries again and again, because it is the first in line, only once."""
        if not request_id or request_id != self._last_refused:
            _add(self._refused, priority, tokens, now)
        self._last_refused = request_id

    def competition(self, priority: int, now: float) -> Competition:
        above = refused_above = below = own = requests = 0.0
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
            if each > priority:
                traffic.pass_time(now)
                refused_above += traffic.tokens_per_s
        return Competition(above, refused_above, below, (above + own) / requests if requests else 0.0)


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
) -> None:
    """Raises Overloaded if no instance is predicted to reach the goals.

    What the request has waited counts for its time to first token. It is TooLate, so that it does not wait, if
    - no instance can reach its goal for that any more,
    - it has such a goal and is a long one, which at the head of a line would keep short ones from the room there is, or
    - not even an idle instance reaches its goal between tokens, or it brought that along: others would wait behind it.
    """
    if (request.pinned is not None and not request.needs_room) or request.is_prefilled or request.was_admitted:
        return
    competition = demand.competition(request.priority, now)
    above, refused_above, below = (
        latency.share_of_time(rate, len(loads), predicted.prefilling)
        if request.pinned is None
        else 0.0  # of the fleet, not of the one in `loads`
        for rate in (competition.above, competition.refused_above, competition.below)
    )
    goal_s = math.inf if config.ttft_goal_s is None else config.ttft_goal_s - request.waited_s
    longest_s = goal_s * max(0.0, 1.0 - above - refused_above) if above or refused_above else goal_s
    slowest_s = math.inf if config.itl_goal_s is None else config.itl_goal_s
    mean = competition.mean_tokens
    helps_to_wait = latency.steps.times.step_s(1, prompt.blocks) <= slowest_s and "itl_goal" not in request.overrides
    may_wait = config.ttft_goal_s is None and helps_to_wait
    least_itl_s = math.inf
    for position, (ttft_s, load) in enumerate(zip(predicted.ttft_s, loads, strict=True)):
        if ttft_s <= longest_s:
            tokens = prompt.tokens - overlaps.get(position, 0) * prompt.block_size
            ratio = min(max(tokens / mean, _SHORTEST), _LONGEST) if mean else 1.0
            itl_s = latency.itl_s(prompt, load, (predicted.prefilling - below) * ratio + refused_above)
            if itl_s <= slowest_s:
                return
            least_itl_s = min(least_itl_s, itl_s)
            may_wait = may_wait or (ratio <= _SHORTEST and helps_to_wait)
    missing_tokens = prompt.tokens - max(overlaps.values(), default=0) * prompt.block_size
    demand.refuse(request.priority, missing_tokens, now, request.request_id)
    best_s = min(predicted.ttft_s)
    refusal = Overloaded if may_wait else TooLate
    missed = (
        f"the first token would come after about {best_s:.2f} s, and {max(longest_s, 0.0):.2f} s of the goal are left"
        if least_itl_s == math.inf
        else f"a token would come every {least_itl_s * 1e3:.0f} ms on average, not {slowest_s * 1e3:.0f}"
    )
    raise refusal(
        f"no instance of model '{request.model}' is predicted to reach the goals: {missed}",
        retry_after_s=max(1.0, best_s - longest_s),
    )
