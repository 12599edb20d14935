"""Many tenants with long system prompts on eight workers, after llm-d's published comparison of prefix cache aware routing.

    python -m benchmarks.router_tenants

150 tenants share 6,000 tokens each, five users of each ask 1,200 more, again and again, at 3 to 60 requests per second; eight
workers of 307,328 KV tokens. Here in virtual time, with blocks of 512 tokens. The publication gives neither the lengths of
outputs nor those of steps: `--output-tokens` and `--stage-s` set what it leaves open, and the steps are estimates for a model of
32 billion parameters on two H100 (12 ms, 0.08 ms per prompt token, 0.37 ms per sequence).
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

from dynamo.local.replay.config import ReplayConfig, ReplayMode
from dynamo.local.replay.figures import summary, table
from dynamo.local.replay.fleet import Replay
from dynamo.local.replay.trace import BLOCK_TOKENS, Row

_TENANTS, _USERS = 150, 5
_PREFIX_BLOCKS, _OWN_BLOCKS = 6_000 // BLOCK_TOKENS + 1, 1_200 // BLOCK_TOKENS
_RATES = (3, 6, 10, 15, 20, 30, 40, 50, 60)
_STEPS = [(tokens, sequences) for tokens in (0, 1024, 8192) for sequences in (1, 16, 64)]
_MODES = (ReplayMode.RANDOM, ReplayMode.ROUND_ROBIN, ReplayMode.LEAST_LOADED, ReplayMode.KV)


def requests(stage_s: float, output_tokens: int, seed: int) -> list[Row]:
    """Return requests that come at each of the rates for `stage_s`."""
    rng = random.Random(seed)
    first_own = _TENANTS * _PREFIX_BLOCKS
    rows: list[Row] = []
    now_s = 0.0
    for stage, rate in enumerate(_RATES, 1):
        while now_s < stage * stage_s:
            now_s += rng.expovariate(rate)
            tenant = rng.randrange(_TENANTS)
            prefix = range(tenant * _PREFIX_BLOCKS, (tenant + 1) * _PREFIX_BLOCKS)
            prompt = first_own + (tenant * _USERS + rng.randrange(_USERS)) * _OWN_BLOCKS
            rows.append(Row(now_s * 1e3, output_tokens, [*prefix, *range(prompt, prompt + _OWN_BLOCKS)]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage-s", type=float, default=20.0)
    parser.add_argument("--output-tokens", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = requests(options.stage_s, options.output_tokens, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        timing = Path(folder) / "steps.csv"
        lines = [f"{tokens},{sequences},{12 + 0.08 * tokens + 0.37 * sequences}" for tokens, sequences in _STEPS]
        timing.write_text("\n".join(("prefill_tokens,decoding,step_ms", *lines)))
        config = ReplayConfig(workers=8, blocks=307_328 // BLOCK_TOKENS, timing=timing)
        results = {mode.value: summary(Replay(rows, mode, config).run()) for mode in _MODES}
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
