from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from tests.fuzz.__main__ import described, main
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).with_name("corpus")
MUTATIONS = 300

targets = pytest.mark.parametrize("name", TARGETS)


def inputs(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def mutated(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        position = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0:
                changed[position:position] = rng.randbytes(rng.randint(1, 8))
            case 1:
                del changed[position : position + rng.randint(1, 8)]
            case 2 if position < len(changed):
                changed[position] ^= 1 << rng.randrange(8)
            case _:
                changed[position:] = changed[position:] * 2
    return bytes(changed[:4096])


@targets
def test_a_target_accepts_a_part_of_its_corpus(name: str) -> None:
    accepted = [TARGETS[name](data) for data in inputs(name)]
    assert any(accepted)


@targets
def test_mutations_of_the_corpus_raise_only_what_is_handled(name: str) -> None:
    rng = random.Random(name)
    for data in inputs(name):
        for _ in range(MUTATIONS):
            TARGETS[name](mutated(data, rng))


OUT = """
 === Uncaught Python exception: ===
ValueError: no such thing:
  second line
Traceback (most recent call last):
  File "{root}/tests/fuzz/targets.py", line 73, in __call__
    self.run(data)
  File "{root}/worker/module.py", line 9, in parse
    raise ValueError("no such thing")
ValueError: no such thing:
  second line

"""


def test_what_is_found_is_described_by_the_exception_the_place_and_the_input(tmp_path: Path) -> None:
    (tmp_path / "crash-1").write_bytes(b"a  \n'\xff")
    error = f"INFO: Seed: 1\n==7== ERROR: libFuzzer: fuzz target exited\n; Test unit written to {tmp_path}/crash-1\nBase64: x\n"
    assert described("gguf", OUT.format(root=CORPUS.parents[2]), error).splitlines() == [
        "failed: gguf: ValueError: no such thing:",
        "      second line",
        '      File "tests/fuzz/targets.py", line 73, in __call__',
        "        self.run(data)",
        '      File "worker/module.py", line 9, in parse',
        '        raise ValueError("no such thing")',
        """    TARGETS['gguf'](b"a  \\n'\\xff")""",
    ]


def test_an_input_that_takes_too_long_is_described_as_well(tmp_path: Path) -> None:
    (tmp_path / "timeout-1").write_bytes(b"slow")
    error = f"==7== ERROR: libFuzzer: timeout after 11 seconds\n; Test unit written to {tmp_path}/timeout-1\n"
    assert described("gguf", "", error).splitlines() == [
        "failed: gguf: ERROR: libFuzzer: timeout after 11 seconds",
        "    TARGETS['gguf'](b'slow')",
    ]


def test_a_fuzzer_that_did_not_start_is_described_by_the_end_of_what_it_printed() -> None:
    lines = described("gguf", "", "".join(f"{number}\n" for number in range(50)) + "ImportError: no\n").splitlines()
    assert lines[0] == "failed: gguf: it ended before it had an input"
    assert lines[-1] == "    ImportError: no" and len(lines) == 9


EXECUTED = "stat::number_of_executed_units: 9\n"


def test_a_decoder_that_had_no_input_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = {"gguf": "", "http2": EXECUTED.replace("9", "0"), "registration": EXECUTED}

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, "", outputs[command[3]])

    monkeypatch.setattr(subprocess, "run", run)
    assert main([*outputs]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert {line for line in lines if "inputs" in line} == {
        "gguf: FAILED; 0 inputs, 0 a second",
        "http2: FAILED; 0 inputs, 0 a second",
        "registration: ok; 9 inputs, 0 a second",
    }


def test_one_decoder_that_fails_ends_no_other_and_is_described_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[str] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        runs.append(command[3])
        failed = command[3] == "gguf"
        return subprocess.CompletedProcess(command, int(failed), "", "ImportError: no\n" if failed else EXECUTED)

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["gguf", "http2", "registration"]) == 1
    assert sorted(runs) == ["gguf", "http2", "registration"]
    assert capsys.readouterr().out.endswith("failed: gguf: it ended before it had an input\n    ImportError: no\n")
