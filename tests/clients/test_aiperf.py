"""AIPerf, a load generator of NVIDIA's, runs unmodified and finds what it measures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REQUESTS = 20
OUTPUT_TOKENS = 6


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A folder with a tokenizer of AIPerf's own, which it would load from a hub otherwise."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    vocabulary = {"[UNK]": 0} | {f"w{number}": number for number in range(1, 500)}
    made = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = WhitespaceSplit()
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "eos_token": "[UNK]"})
    )
    return folder


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses"])
def test_aiperf_measures_streams_of_a_deployment(url: str, tokenizer: Path, tmp_path: Path, endpoint: str) -> None:
    results = tmp_path / "results"
    options = {
        "--model": "sim",
        "--url": url,
        "--endpoint-type": endpoint,
        "--tokenizer": tokenizer,
        "--request-count": REQUESTS,
        "--concurrency": 4,
        "--synthetic-input-tokens-mean": 20,
        "--output-tokens-mean": OUTPUT_TOKENS,
        "--extra-inputs": "ignore_eos:true",
        "--artifact-dir": results,
        "--ui": "none",
    }
    command = [Path(sys.executable).with_name("aiperf"), "profile", "--streaming", "--use-server-token-count"]
    command += [str(word) for option in options.items() for word in option]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    measured = json.loads((results / "profile_export_aiperf.json").read_text())
    assert (measured["request_count"]["avg"], measured["error_summary"]) == (REQUESTS, [])
    if endpoint != "responses":  # it reads the usage in `response.completed` only, and these end with `response.incomplete`
        assert measured["output_sequence_length"]["avg"] == OUTPUT_TOKENS
    assert measured["time_to_first_token"]["avg"] > 0
