"""The documentation names only what exists: links and anchors, flags, variables, files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from dynamo.common.config import markdown_table, replacements, variables
from dynamo.frontend.config import FrontendConfig
from dynamo.local.config import LocalConfig
from dynamo.local.replay.config import ReplayConfig
from dynamo.planner.config import PlannerConfig
from dynamo.planner.process.explain import ExplainConfig
from dynamo.worker.config import WorkerConfig
from examples.extending.option import ExampleConfig

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
CONFIGS = (FrontendConfig, WorkerConfig, PlannerConfig, ExplainConfig, LocalConfig, ReplayConfig, ExampleConfig)
FOLDERS = ("protos", "common", "frontend", "worker", "planner", "local", "tests", "docs", "deploy", "examples", "benchmarks")

FLAGS_OF_OTHERS = {
    "vLLM": "--allowed-media-domains --data-parallel-rank --data-parallel-size --dtype --enforce-eager --gpu-memory-utilization"
    " --kv-cache-memory-bytes --kv-events-config --kv-offloading-size --kv-transfer-config"
    " --enable-lora --enable-prompt-tokens-details --enable-sleep-mode --limit-mm-per-prompt --max-cpu-loras --max-lora-rank"
    " --max-loras --quantization --scheduling-policy --tensor-parallel-size",
    "SGLang": "--enable-deterministic-inference --enable-metrics --mem-fraction-static --tp-size",
    "AIPerf": "--concurrency --endpoint-type --output-tokens-mean --request-count --streaming --synthetic-input-tokens-mean",
    "NVIDIA Dynamo": "--custom-jinja-template --dyn-chat-processor --dyn-reasoning-parser --dyn-tool-call-parser"
    " --frontend-route-extension --grpc-metrics-port --metrics-prefix --migration-max-seq-len --reasoning-field-name"
    " --router-event-threads --router-min-initial-workers --router-policy-config"
    " --router-predicted-ttl-secs --serve-indexer --use-remote-indexer",
    "Triton": "--backend-config --cache-config --disable-auto-complete-config --exit-timeout-secs",
    "kubectl, helm, docker": "--all --build-arg --for --from-file --from-literal --set --target --timeout",
    "pytest, hypothesis, py-spy": "--hypothesis-profile --pdb --pid",
    "curl, etcdctl, pip, venv, mypy": "--cacert --cert --copies --prefix --print-value-only --no-deps --strict",
}
VARIABLES_OF_OTHERS = {
    "NVIDIA Dynamo": "DYN_DISABLE_FRONTEND_ADMIN_API DYN_HTTP_BODY_LIMIT_MB DYN_HTTP_OVERLOAD_STATUS_CODE"
    " DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS DYN_LOGGING_JSONL",
}

FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`+[^`\n]+`+")
LINK = re.compile(
    r"""\[[^\]]*\]\(([^)\s]+)(?:\s+"[^"]*")?\)|^ {0,3}\[[^\]^]+\]:\s+(\S+)|<(?:a|img)\s[^>]*?(?:href|src)=["']([^"']+)""",
    re.MULTILINE,
)
"""Links of the three kinds: beside their text, at the end of the page, and in HTML; pictures as well."""
FLAG = re.compile(r"(?<![\w-])--[a-z](?:[a-z0-9-]*[a-z0-9])?(?![\w…-])")
VARIABLE = re.compile(r"\bDYN(?:AMO)?_[A-Z0-9_]*[A-Z0-9](?![\w…])")
ARGUMENT = re.compile(r'add_argument\(\s*"(?:-\w", ")?(--[a-z-]+)"')

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def links(text: str) -> list[str]:
    return ["".join(groups) for groups in LINK.findall(text)]


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that headings get: lower case, without punctuation, with hyphens for spaces, numbered when repeated."""
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.+)$", FENCED.sub("", page.read_text()), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        again = found.count(slug)
        found.append(f"{slug}-{again}" if again else slug)
    return set(found)


@cache
def known_flags() -> set[str]:
    found = {"--help", "--version", "--config"}
    for config in CONFIGS:
        found.update(re.findall(r"`(--[a-z0-9-]+)`", markdown_table(config)))
        found.update(replacements(config))
    for folder in ("common", "frontend", "worker", "planner", "local", "benchmarks", "tests/simulation"):
        for source in (ROOT / folder).rglob("*.py"):
            found.update(ARGUMENT.findall(source.read_text()))
    return found


@cache
def known_variables() -> set[str]:
    return {"DYN_CONFIG", "DYN_API_KEY"}.union(*(variables(config) for config in CONFIGS))


def of_others(listed: dict[str, str]) -> set[str]:
    return set(" ".join(listed.values()).split())


def missing(names: Iterable[str], *known: set[str]) -> list[str]:
    return sorted(set(names).difference(*known))


def exists(name: str) -> bool:
    """Whether a file or folder has this name, or one that ends so; `…` stands for folders, and `.py` may be left out."""
    top, _, rest = name.rstrip("/").replace("…", "**").partition("/")
    return any(any(ROOT.glob(f"{top}/{within}{rest}{ending}")) for within in ("", "dynamo/*/") for ending in ("", ".py"))


@pages
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    for link in links(INLINE.sub("", FENCED.sub("", page.read_text()))):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_links_of_each_kind_are_found() -> None:
    page = 'a [b](c.md#d) ![e](f.svg "g")\n[h][i]\n<a class="j" href="k.md">l</a> <img src="m.png">\n\n[i]: n.md\n'
    assert links(page) == ["c.md#d", "f.svg", "k.md", "m.png", "n.md"]


@pages
def test_flags_exist(page: Path) -> None:
    assert missing(FLAG.findall(page.read_text()), known_flags(), of_others(FLAGS_OF_OTHERS)) == []


@pages
def test_targets_of_make_and_modules_to_run_exist(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert missing(re.findall(r"(?:^|`|&& |\$ )make ([a-z][\w-]*)", text, re.MULTILINE), targets) == []
    for module in re.findall(r"-m ((?:tests|benchmarks)[\w.]*)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


@pages
def test_variables_exist(page: Path) -> None:
    assert missing(VARIABLE.findall(page.read_text()), known_variables(), of_others(VARIABLES_OF_OTHERS)) == []


@pages
def test_files_exist(page: Path) -> None:
    for span in INLINE.findall(FENCED.sub("", page.read_text())):
        for name in span.strip("`").split():
            top, slash, _ = name.partition("/")
            if slash and top in FOLDERS and re.fullmatch(r"[\w./…*-]+", name):
                assert exists(name), name


@cache
def linked_pages() -> set[Path]:
    """The pages that one gets to from the README."""
    seen: set[Path] = set()
    open_ = [ROOT / "README.md"]
    while open_:
        here = open_.pop()
        if here in seen:
            continue
        seen.add(here)
        names = [link.partition("#")[0] for link in links(here.read_text())]
        open_ += [(here.parent / name).resolve() for name in names if name.endswith(".md") and "://" not in name]
    return seen


@pages
def test_every_page_can_be_found_from_the_readme(page: Path) -> None:
    assert page in linked_pages()


def test_the_lists_of_other_programs_hold_only_what_pages_name_and_nothing_of_ours() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    flags, names = of_others(FLAGS_OF_OTHERS), of_others(VARIABLES_OF_OTHERS)
    assert missing(flags, set(FLAG.findall(text))) == [] == missing(names, set(VARIABLE.findall(text)))
    assert flags & known_flags() == set() == names & known_variables()
