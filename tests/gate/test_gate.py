"""The gate's own logic: the order, what makes it fail, and what it prints last."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.drill.faults import FAULTS
from tests.gate.__main__ import Downloads, Gate, Had, main
from tests.gate.commands import Commands, Finished
from tests.gate.outcomes import Outcome, by_lines, by_report, closing_line, missing_download, table, too_many
from tests.gate.skips import sentences, skipped_tests
from tests.gate.suites import EXAMPLES, HELM, SUITES, TRITON, VLLM, Download, Suite
from tests.support.environments import PACKAGES
from tests.support.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
LINES = Suite("lines", "make lines", 100, cases=r"^(\w+): (?:ok|FAILED)", failures=r"^(\w+): FAILED")
FIRST = replace(LINES, name="first", command="make first", is_first=True)
NEEDY = replace(LINES, name="needy", command="make needy", needs=(VLLM,))
TESTS = Suite("tests", "make tests", 100, uses=(HELM,))
REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"/>
<testcase classname=".test_c" name="c"><failure message="no&#10;why">>  assert x

E  no</failure></testcase>
<testcase classname=".test_c" name="d"><error/></testcase>
<testcase name="e"><skipped type="pytest.skip" message="helm-python-sdk is not installed; HELM_PYTHON">x.py:1</skipped></testcase>
</testsuite></testsuites>"""


class Machine:
    """Commands with prepared endings, and a clock that each of them advances."""

    def __init__(self, finished: Mapping[str, Finished] | None = None, *, seconds: float = 10.0, report: str = "") -> None:
        self.finished, self.seconds, self.report = finished or {}, seconds, report
        self.now = 0.0
        self.ran: list[tuple[str, float]] = []
        self.missing: dict[Download, Had] = {}

    def gate(self, limit_s: float = 1000.0) -> Gate:
        return Gate(self.run, lambda download, _: self.missing.get(download, Had()), lambda: self.now, limit_s)

    def run(self, command: str, limit_s: float, env: Mapping[str, str]) -> Finished:
        self.ran.append((command, limit_s))
        self.now += self.seconds
        if self.report:
            Path(env["PYTEST_ADDOPTS"].removeprefix("--junitxml=")).write_text(self.report)
        return self.finished.get(command, Finished(0, "a: ok\nb: ok\n"))


def test_what_is_fast_comes_first_and_every_target_exists() -> None:
    order = [suite.name for suite in SUITES]
    wanted = [
        "lint",
        "costs",
        "test",
        "simulate",
        "slow",
        "vllm",
        "clients",
        "backends",
        "differential",
        "triton-examples",
        "drill",
        "fuzz",
    ]
    assert [name for name in order if name in wanted] == wanted
    assert {suite.name for suite in SUITES if suite.is_first} == {"lint"}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert [suite.name for suite in SUITES if suite.command.split()[:1] != ["make"]] == []
    assert {suite.command.split()[1] for suite in SUITES} <= targets


def test_the_documentation_lists_the_suites_in_their_order() -> None:
    section = (ROOT / "docs" / "testing.md").read_text().partition("\n## The gate\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE) == [suite.name for suite in SUITES]


def test_files_that_no_other_target_collects_are_run_by_that_of_their_environment() -> None:
    listed = re.findall(r"^(VLLM|BACKEND)_TESTS \??:?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    run = {target: set(files.split()) for target, files in listed}
    for file, package in PACKAGES.items():
        assert f"tests/{file}" in run["VLLM" if package == "vllm" else "BACKEND"]
    assert run.keys() == {"VLLM", "BACKEND"}


def test_suites_run_in_their_order_and_all_that_pass_make_status_0() -> None:
    machine = Machine()
    gate = machine.gate()
    assert gate.run([FIRST, LINES, NEEDY])
    assert machine.ran == [("make first", 100), ("make lines", 100), ("make needy", 100)]
    text, status = gate.verdict({})
    assert status == 0
    assert text.splitlines()[-1] == " 6 passed in 30.00s (0:00:30) ".center(80, "=")


def test_a_failure_of_a_first_suite_ends_the_gate_and_another_one_does_not() -> None:
    machine = Machine({"make lines": Finished(1, "a: ok\nb: FAILED\n")})
    gate = machine.gate()
    assert gate.run([LINES, NEEDY])
    assert [(outcome.passed, outcome.failed) for outcome in gate.outcomes] == [(1, 1), (2, 0)]
    assert gate.verdict({})[1] == 1

    machine = Machine({"make first": Finished(1, "")})
    gate = machine.gate()
    assert not gate.run([FIRST, LINES, NEEDY])
    assert machine.ran == [("make first", 100)]
    text, status = gate.verdict({})
    assert status == 1
    assert text.count("not run, after a failure of first") == 2


@pytest.mark.parametrize(
    ("finished", "note"),
    [
        (Finished(0, "nothing that counts\n"), "ran nothing"),
        (Finished(2, "make: *** No rule to make target\n"), "ended with status 2"),
        (Finished(None, "a: ok\n"), "hung, and was ended"),
    ],
)
def test_a_suite_that_did_not_run_to_its_end_fails(finished: Finished, note: str) -> None:
    gate = Machine({"make lines": finished}).gate()
    gate.run([LINES])
    [outcome] = gate.outcomes
    assert (outcome.failed, outcome.note, gate.verdict({})[1]) == (1, note, 1)


def test_pytest_that_wrote_no_report_fails() -> None:
    gate = Machine().gate()
    gate.run([TESTS])
    assert [(outcome.failed, outcome.note) for outcome in gate.outcomes] == [(1, "ran nothing")]


def test_a_suite_for_which_no_time_is_left_fails() -> None:
    machine = Machine(seconds=70.0)
    gate = machine.gate(limit_s=120.0)
    gate.run([FIRST, LINES, NEEDY])
    assert machine.ran == [("make first", 100), ("make lines", 50.0)]
    assert gate.outcomes[2].note == "did not run: the gate's 2 minutes were over"
    assert gate.verdict({})[1] == 1


def test_a_download_for_which_the_gate_has_no_time_left_fails_its_suite() -> None:
    machine = Machine(seconds=70.0)
    machine.missing[VLLM] = Had("it was not there in time")
    gate = machine.gate(limit_s=60.0)
    gate.run([LINES, NEEDY])
    assert gate.outcomes[1].note == "did not run: the gate's 1 minutes were over"
    assert gate.verdict({})[1] == 1


def test_a_download_that_could_not_be_had_is_counted_as_a_skip_and_a_mistake_in_it_fails() -> None:
    machine = Machine()
    machine.missing[VLLM] = Had("no route")
    gate = machine.gate()
    gate.run([LINES, NEEDY])
    text, status = gate.verdict({})
    assert status == 0
    assert "1 × vLLM could not be downloaded: no route" in text
    assert text.splitlines()[-1] == " 2 passed, 1 skipped in 10.00s (0:00:10) ".center(80, "=")

    machine.missing[VLLM] = Had(
        "status 2", is_mistake=True, output="Setting up\n\nERROR: No matching distribution found for vlm\n"
    )
    gate = machine.gate()
    gate.run([LINES, NEEDY])
    assert gate.outcomes[1].note == "did not run: vLLM cannot be installed: status 2"
    text, status = gate.verdict({})
    assert status == 1
    assert "needy: the end of its output:\n    Setting up\n    ERROR: No matching distribution found for vlm\n" in text


def test_more_skips_than_are_permitted_fail_unless_a_download_is_missing() -> None:
    machine = Machine(report=REPORT.replace("<failure", "<x").replace("</failure", "</x").replace("<error/>", ""))
    gate = machine.gate()
    gate.run([TESTS])
    text, status = gate.verdict({})
    assert status == 1
    assert "tests: 1 tests are skipped and 0 are permitted: helm-python-sdk is not installed; HELM_PYTHON\n" in text
    assert gate.verdict({"tests": {"helm-python-sdk is not installed; HELM_PYTHON": 1}})[1] == 0

    machine.missing[HELM] = Had("no route")
    gate = machine.gate()
    gate.run([TESTS])
    assert gate.verdict({})[1] == 0


def test_the_last_lines_name_the_tests_that_failed() -> None:
    gate = Machine(report=REPORT).gate()
    gate.run([TESTS])
    text, _ = gate.verdict({})
    assert "\ntests: .test_c::c: no\n    >  assert x\n    E  no\ntests: .test_c::d: \n" in text


def test_a_suite_that_does_not_say_what_failed_is_shown_by_the_end_of_its_output() -> None:
    output = "".join(f"line {number}\n" for number in range(100)) + "make: *** [Makefile:9: lines] Error 2\n"
    gate = Machine({"make lines": Finished(2, output)}).gate()
    gate.run([LINES])
    shown = gate.verdict({})[0].partition("\n\n")[0].splitlines()
    assert shown == [
        "lines: the end of its output:",
        *(f"    line {number}" for number in range(82, 100)),
        "    make: *** [Makefile:9: lines] Error 2",
    ]


def test_why_something_failed_is_told_within_twenty_lines_however_much_failed() -> None:
    why = "".join(f"\n{number}" for number in range(100))
    assert Outcome("a", failures=["x" + why]).why() == ["a: x", *(f"    {number}" for number in range(81, 100))]
    assert Outcome("a", failures=[f"x{why}"] * 3).why() == ["a: x", *(f"    {number}" for number in range(95, 100))] * 3
    assert Outcome("a", failures=[f"x{why}"] * 50).why() == [*["a: x"] * 20, "a: 30 more"]


def test_skips_are_compared_by_suite_and_reason() -> None:
    outcomes = [Outcome("a", skips={"x": 2, "y": 1}), Outcome("b", skips={"x": 1})]
    permitted = {"a": {"x": 2, "y": 1}, "b": {"x": 1}}
    assert too_many(outcomes, permitted, []) == []
    assert len(too_many(outcomes, {**permitted, "b": {"y": 1}}, [])) == 1
    assert len(too_many(outcomes, {**permitted, "a": {"x": 1, "y": 1}}, [])) == 1
    assert len(too_many(outcomes, {}, ["x"])) == 1


TOO_HARD = ("x.py", 2, "Skipped: it is too hard")


def test_a_run_of_pytest_ends_with_what_the_gate_would_say_of_its_skips() -> None:
    where = ("x.py", 1, "Skipped: no Go toolchain is installed")
    reports = [
        pytest.TestReport("x", ("x.py", 1, "x"), {}, "skipped", longrepr, "setup") for longrepr in (where, where, TOO_HARD)
    ]
    assert skipped_tests(reports) == [
        "1 × it is too hard (THE GATE FAILS: 0 are permitted by tests/gate/skips.toml)",
        "2 × no Go toolchain is installed (the gate installs it and runs them)",
    ]


def test_as_many_skips_as_are_permitted_do_not_fail_the_gate() -> None:
    assert sentences({"x": 2}, {"test": {"x": 1}, "slow": {"x": 1}}) == ["2 × x (permitted by tests/gate/skips.toml)"]


def test_a_report_of_pytest_is_counted() -> None:
    failures = [".test_c::c: no\n>  assert x\nE  no", ".test_c::d: "]
    assert by_report(REPORT) == (2, failures, {"helm-python-sdk is not installed; HELM_PYTHON": 1})


OUTPUTS = {
    "costs": (
        "120 kept\nGREW: x | calls: 3 → 4\n      9.00 calls of f\nNOT IN THE FILE: y\nNOT KEPT: z: 4 → 3\n12 passed, 3 failed\n",
        (12, 3, ["GREW: x | calls: 3 → 4", "NOT IN THE FILE: y", "NOT KEPT: z: 4 → 3"]),
    ),
    "simulate": (
        "seeds 7-506\nseed 9:\n    lost r1\n    lost r2\n312 seeds, 9000 requests, 31 virtual minutes in 110 s\n"
        "2 broke an invariant; replay",
        (310, 2, ["seed 9:\n    lost r1\n    lost r2"]),
    ),
    "fuzz": (
        "http2: FAILED; 3 inputs, 1 a second\nINFO\ngguf: ok; 12000 inputs, 200 a second\n"
        "failed: http2: KeyError: 1\n      File x\n    TARGETS['http2'](b'a  b')\n",
        (1, 1, ["failed: http2: KeyError: 1\n      File x\n    TARGETS['http2'](b'a  b')"]),
    ),
    "differential": (
        "status,words REST: no shape\n        Triton: 400 no\n        here:   500 oh\nfamily   cases\nmodel     12  12\n"
        "all      4600  4590\n3 requests differ\naccepted.toml: 'x' explains nothing\n",
        (
            4597,
            3,
            [
                "status,words REST: no shape\n        Triton: 400 no\n        here:   500 oh",
                "accepted.toml: 'x' explains nothing",
            ],
        ),
    ),
    "triton-examples": (
        "a.py -d    Triton: runs; here: runs\nb.py  Triton: runs; here: 1: no\nc.py  Triton: 1: x; here: runs\n",
        (2, 1, ["b.py  Triton: runs; here: 1: no"]),
    ),
    "drill": (
        "| fault | requests |\n| --- | --- |\n| SIGKILL of x | 900 | 0 |\nnot as promised: SIGKILL of x: memory grew\n"
        "not as promised: SIGKILL of x: open files grew\n| SIGKILL of y | 900 | 0 |\n",
        (1, 1, ["not as promised: SIGKILL of x: memory grew", "not as promised: SIGKILL of x: open files grew"]),
    ),
    "lint": (
        "12 files already formatted\nAll checks passed!\nSuccess: no issues found in 7\nContracts: 9 kept, 0 broken.\n",
        (4, 0, []),
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_lines_of_suites_that_run_no_pytest_are_counted_and_those_that_say_what_failed_are_kept(name: str) -> None:
    output, expected = OUTPUTS[name]
    assert by_lines(next(suite for suite in SUITES if suite.name == name), output) == expected


@pytest.mark.parametrize(
    ("name", "output", "expected"),
    [
        (
            "costs",
            "| path |\nNO FIGURES of this version of Python: python3.12.json does not exist\n0 passed, 1 failed\n",
            (0, 1, ["NO FIGURES of this version of Python: python3.12.json does not exist"]),
        ),
        (
            "simulate",
            "40 seeds, 900 requests, 3 virtual minutes in 110 s\ntoo few: 40 histories of at least 100\n",
            (39, 1, ["too few: 40 histories of at least 100"]),
        ),
    ],
)
def test_what_proves_too_little_fails_with_its_reason(name: str, output: str, expected: object) -> None:
    assert by_lines(next(suite for suite in SUITES if suite.name == name), output) == expected


def test_the_simulation_of_the_gate_has_a_least_number_of_histories() -> None:
    [simulate] = [suite for suite in SUITES if suite.name == "simulate"]
    assert "--within-s 110 --at-least 100" in simulate.command


def test_each_suite_counts_cases_or_is_pytest() -> None:
    recipes = (ROOT / "Makefile").read_text()
    by_pytest = {suite.name for suite in SUITES if not suite.cases}
    assert {suite.name for suite in SUITES} - by_pytest == OUTPUTS.keys()
    for suite in SUITES:
        recipe = recipes.partition(f"\n{suite.command.split()[1]}:")[2].partition("\n\n")[0]
        assert (" -m pytest" in recipe) == (suite.name in by_pytest), suite.name


def test_the_table_has_a_row_for_each_suite_and_the_closing_line_is_that_of_pytest() -> None:
    outcomes = [Outcome("lint", 61.4, passed=4), Outcome("test", 431.0, 6873, 1, {"no root": 2}, "ended with status 1")]
    assert table(outcomes).splitlines() == [
        "suite  seconds  passed  failed  skipped  reason",
        "lint        61       4       0        0",
        "test       431    6873       1        2  ended with status 1; 2 × no root",
    ]
    assert closing_line(outcomes, 3893.1).strip("= ") == "1 failed, 6877 passed, 2 skipped in 3893.10s (1:04:53)"


UNKNOWN = (
    "ERROR: Could not find a version that satisfies the requirement A_package>=2 (from versions: none)\n"
    "ERROR: No matching distribution found for A_package>=2"
)
NO_INDEX = (
    "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnectionError(\"Failed to establish a new"
    " connection: [Errno 111] Connection refused\")': /simple/a-package/"
)
NO_HOST = "fatal: unable to access 'https://…/client/': Could not resolve host: …"


@pytest.mark.parametrize(
    ("output", "missing"),
    [
        (line, line)
        for line in (
            "W: Failed to fetch http://…/InRelease  Temporary failure resolving '…'",
            "fatal: unable to access 'https://…/': The requested URL returned error: 503",
            "E: Could not open lock file /var/lib/dpkg/lock-frontend, are you root?",
        )
    ]
    + [
        (f"{NO_INDEX}\n{UNKNOWN}", NO_INDEX),
        (UNKNOWN, ""),
        (f"{NO_INDEX.replace('a-package', 'another')}\n{UNKNOWN}", ""),
        (f"{NO_INDEX.replace('total=0', 'total=4')}\n{UNKNOWN}", ""),
        (f"{NO_INDEX}\nerror: metadata-generation-failed", ""),
        ("E: Unable to locate package golnag-go", ""),
        ("fatal: unable to access 'https://…/': The requested URL returned error: 404", ""),
        ("remote: Repository not found.\nfatal: repository 'https://…/' not found", ""),
        ("ERROR: Could not install requirement x because of HTTP error 404 Client Error: Not Found", ""),
        (f"Setting up\n{NO_HOST}\nmake: *** [Makefile:1: x] Error 128\n", NO_HOST),
        ("ERROR: Could not find a version that satisfies the requirement x==9 (from versions: 1.0, 2.0)", ""),
        ("ERROR: Cannot install a and b because these package versions have conflicting dependencies.", ""),
        ("WARNING: Retrying … Read timed out.\nERROR: Cannot install a and b because these package versions have conflicts.", ""),
        ("cp: cannot stat 'python_backend_stubs/3.14': No such file or directory", ""),
    ],
)
def test_a_missing_download_is_told_from_a_mistake_in_what_is_installed(output: str, missing: str) -> None:
    assert missing_download(output) == missing


def test_a_download_that_takes_too_long_is_a_mistake_unless_the_network_is() -> None:
    slow = Download("slow", "make slow", 1.0)
    for output, error, is_mistake in (("Installing\n", "not within 1 s", True), (f"{NO_HOST}\n", NO_HOST, False)):

        class Slow(Commands):
            def run(self, command: str, limit_s: float, *arguments: Any, output: str = output, **options: Any) -> Finished:
                return Finished(None, output)

        with Slow() as commands, ThreadPoolExecutor(1) as pool:
            downloads = Downloads(commands, pool)
            downloads.begin([replace(LINES, needs=(slow,))])
            assert downloads.result(slow, 120) == Had(error, is_mistake, output)


@contextmanager
def index_without_packages() -> Iterator[int]:
    """Yield the port of a server on this machine that knows no package."""

    class Nothing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            """The test shows what matters."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Nothing) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever, 0.01)
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def test_a_misspelt_package_fails_and_an_index_that_cannot_be_reached_is_a_missing_download(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    pip = f"{sys.executable} -m pip install -qq --no-cache-dir --retries 1 dynamo-misspelt --index-url http://127.0.0.1"
    with index_without_packages() as port:
        misspelt = _downloaded(commands, f"{pip}:{port}")
    unreachable = _downloaded(commands, f"{pip}:{port}")
    assert misspelt.is_mistake
    assert "No matching distribution found for dynamo-misspelt" in misspelt.output
    assert not unreachable.is_mistake
    assert "refused" in unreachable.error


def _downloaded(commands: Commands, command: str) -> Had:
    download = Download("a package", command, 120.0)
    with ThreadPoolExecutor(1) as pool:
        downloads = Downloads(commands, pool)
        downloads.begin([replace(LINES, needs=(download,))])
        return downloads.result(download, 120)


def test_suites_have_at_least_the_size_that_the_documentation_promises() -> None:
    section = (ROOT / "docs" / "testing.md").read_text().partition("\n## The gate\n")[2].partition("\n## ")[0]
    commands = {suite.name: suite.command for suite in SUITES}
    assert re.findall(r"with (\d+) kills each", section) == re.findall(r"KILLS=(\d+)", commands["kills"])
    assert "each for 40 seconds" in section and "--seconds 40 " in commands["fuzz"]


def test_the_drill_of_the_gate_has_every_fault_that_it_names() -> None:
    [drill] = [suite for suite in SUITES if suite.name == "drill"]
    names = re.findall(r"'([^']+)'", drill.command)
    assert len(names) == 3 and all(any(name in fault.name for fault in FAULTS) for name in names)


def test_downloads_of_suites_are_made_before_they_run() -> None:
    by_name = {suite.name: suite for suite in SUITES}
    assert by_name["differential"].needs == (TRITON,)
    assert by_name["triton-examples"].needs == (TRITON, EXAMPLES)
    assert by_name["vllm"].needs == (VLLM,)
    assert HELM in by_name["test"].uses


@pytest.fixture
def commands() -> Iterator[Commands]:
    with Commands() as commands:
        yield commands


def test_a_command_that_hangs_is_ended(commands: Commands) -> None:
    assert commands.run("sleep 1000", 0.0).status is None


def test_what_a_command_has_started_ends_with_the_gate(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with Commands() as commands, ThreadPoolExecutor(1) as pool:
        running = pool.submit(commands.run, f"sleep 1000 & echo $! >{fifo}; wait", 1000.0)
        child = os.pidfd_open(int(fifo.read_text()))
        commands.close()
        assert running.result().status == -signal.SIGTERM
    try:
        assert select.select([child], [], [], WAIT_S)[0] == [child]  # readable when the process has ended
    finally:
        os.close(child)


def test_a_command_shows_what_it_prints_and_one_in_the_background_does_not(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.run("echo out; echo $WORD >&2; exit 3", 60.0, {"WORD": "error"}) == Finished(3, "out\nerror\n")
    assert capsys.readouterr().out == "out\nerror\n"
    assert commands.run("nice", 60.0, in_background=True) == Finished(0, "19\n")
    assert capsys.readouterr().out == ""


def test_no_variable_of_the_caller_makes_a_suite_smaller(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    makefile = (ROOT / "Makefile").read_text()
    used = set(re.findall(r"\$\(([A-Z_]+)\)|\$\((?:or|if) \$\(([A-Z_]+)\)", makefile))
    defined = set(re.findall(r"^([A-Z_]+) :=", makefile, re.MULTILINE)) | {"CURDIR", "MAKEFILE_LIST"}
    variables = {name for names in used for name in names if name} - defined
    places = {"PYTHON", "TRITON", "EXAMPLES", "BASE", "GPU_PYTHON", "DEVICE"}
    """Where something is, or nothing that a suite of the gate uses."""
    assert {"FLAGS", "TESTS", "PYTEST_FLAGS", "VLLM_TESTS"} <= variables
    for name in variables - places | {"MAKEFLAGS", "PYTEST_ADDOPTS"}:
        monkeypatch.setenv(name, "narrow")
    monkeypatch.setenv("KEPT", "kept")
    assert "narrow" not in (output := commands.run("env", 60.0).output) and "KEPT=kept" in output
    assert "PYTEST_ADDOPTS=--junitxml=x\n" in commands.run("env", 60.0, {"PYTEST_ADDOPTS": "--junitxml=x"}).output


def test_lint_is_all_of_its_checks() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    checks = ["ruff format --check .", "ruff check .", "mypy --strict", "lint-imports"]
    assert re.findall(r"^\t\$\(BIN\)/(.+)$", recipe, re.MULTILINE) == checks


def test_nothing_is_begun_after_the_gate_has_ended(commands: Commands) -> None:
    commands.close()
    assert commands.run("true", 60.0).status is None


def test_a_suite_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "lnit"]) == 2
    assert capsys.readouterr().err == "no such suite: lnit\n"
