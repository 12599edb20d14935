"""Draw the pictures of docs/concepts.md and README.md: `python docs/pictures/make.py` writes them to its own folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
LINE = 17
STYLE = """text{font:13px system-ui,sans-serif;fill:#1f2933}.title{font-weight:600}.small{font-size:12px;fill:#52606d}
rect{stroke:#52606d;rx:7}.client{fill:#fff}.process{fill:#dcebfb}.store{fill:#fdf0d5}.block{fill:#cfeccf}.empty{fill:#fff}.busy{fill:#f7d9d9}
path{fill:none;stroke:#3e4c59;stroke-width:1.6}.quiet{stroke-dasharray:5 4;stroke:#829ab1}.life{stroke:#cbd2d9}"""
HEAD = '<defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
ARROW = HEAD + '<path d="M1 1 9 5 1 9" style="fill:#3e4c59"/></marker></defs>'


@dataclass
class Picture:
    """An SVG that is drawn piece by piece; sizes and places in pixels."""

    name: str
    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, *lines: str) -> None:
        """A box with centred lines, of which the first is its title."""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>')
        top = y + height / 2 - LINE * (len(lines) - 1) / 2 + 5
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + LINE * number, line, "small" if number else "title")

    def line(self, points: str, kind: str = "", start: bool = False, end: bool = True) -> None:
        """Draw an SVG path, with an arrow at its end unless `end` is False."""
        marks = (' marker-start="url(#a)"' if start else "") + (' marker-end="url(#a)"' if end else "")
        self.parts.append(f'<path d="{points}" class="{kind}"{marks}/>')

    def write(self) -> None:
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
        head = f"{svg}<title>{escape(self.title)}</title><style>{STYLE}</style>{ARROW}"
        paper = '<rect width="100%" height="100%" style="fill:#fff;stroke:none;rx:0"/>'
        (FOLDER / f"{self.name}.svg").write_text("\n".join([head, paper, *self.parts, "</svg>", ""]))


def fleet() -> Picture:
    drawn = Picture("fleet", 860, 330, "Clients, frontends, NATS, workers and etcd")
    drawn.box(16, 60, 150, 130, "client", "clients", "KServe v2: gRPC, REST", "OpenAI, Anthropic", "HTTP")
    for number, y in enumerate((40, 140)):
        drawn.box(236, y, 140, 70, "process", f"frontend {number + 1}", "validates, tokenizes,", "chooses a worker")
        drawn.line(f"M166 {100 + 50 * number} H200 V{y + 35} H234", start=True)
        drawn.line(f"M376 {y + 35} H444", start=True)
    drawn.box(446, 40, 96, 170, "store", "NATS", "requests,", "responses,", "cache events,", "loads, files")
    workers = (
        ("language model", "vLLM, llama.cpp, sim"),
        ("language model", "vLLM, llama.cpp, sim"),
        ("tensor models", "ONNX, Python"),
    )
    for number, (what, engines) in enumerate(workers):
        y = 14 + 76 * number
        drawn.box(636, y, 208, 62, "process", f"worker {number + 1}", what, engines)
        drawn.line(f"M542 {y + 31} H634", start=True)
    drawn.box(446, 272, 96, 42, "store", "etcd")
    drawn.line("M740 228 V293 H544", "quiet")
    drawn.text(640, 285, "register under a lease", "small")
    drawn.line("M446 293 H306 V212", "quiet")
    drawn.text(376, 285, "list and watch", "small")
    return drawn


def request() -> Picture:
    drawn = Picture("request", 860, 520, "Lifecycle of a tensor request and of a text request")
    lanes = {"client": 80, "frontend": 330, "worker": 600, "engine": 780}
    for name, x in lanes.items():
        drawn.box(x - 60, 12, 120, 34, "client" if name == "client" else "process", name)
        drawn.line(f"M{x} 46 V508", "life", end=False)

    def step(y: int, start: str, end: str, words: str, kind: str = "") -> None:
        a, b = lanes[start], lanes[end]
        drawn.line(f"M{a} {y} H{b - 2 if b > a else b + 2}", kind)
        drawn.text((a + b) / 2, y - 6, words, "small")

    def note(y: int, lane: str, *lines: str) -> None:
        drawn.box(lanes[lane] - 88, y, 176, 12 + LINE * len(lines), "empty")
        for number, line in enumerate(lines):
            drawn.text(lanes[lane], y + LINE * (number + 1), line, "small")

    drawn.text(12, 76, "Tensors", "title", "start")
    step(84, "client", "frontend", "ModelInfer: names, shapes, bytes")
    note(92, "frontend", "checks it against the model,", "chooses an instance")
    step(160, "frontend", "worker", "OPEN: the request's own bytes")
    note(168, "worker", "joins it with others", "to a batch")
    step(240, "worker", "engine", "a batch")
    step(264, "engine", "worker", "outputs")
    step(264, "worker", "frontend", "END: the response's own bytes")
    step(264, "frontend", "client", "ModelInferResponse")
    drawn.text(12, 300, "Text", "title", "start")
    step(308, "client", "frontend", "messages or a prompt")
    note(316, "frontend", "template, tokens, hashes;", "chooses by cache and load")
    step(384, "frontend", "worker", "OPEN: token ids, settings, time left")
    step(384, "worker", "engine", "a sequence")
    step(420, "engine", "worker", "tokens of a step")
    step(420, "worker", "frontend", "DATA: tokens of all streams, one message")
    step(420, "frontend", "client", "text, as it comes")
    step(452, "client", "frontend", "reads slowly, or disconnects", "quiet")
    step(452, "frontend", "worker", "less CREDIT, or CANCEL", "quiet")
    step(452, "worker", "engine", "waits, or stops", "quiet")
    step(490, "worker", "frontend", "END: finish reason, counts")
    step(490, "frontend", "client", "the end")
    return drawn


def caches() -> Picture:
    drawn = Picture("caches", 860, 330, "How a frontend follows the KV caches of instances")
    drawn.text(16, 30, "A prompt, cut into blocks; each hash stands for its block and all before it", "small", "start")
    for number, name in enumerate("abcd"):
        drawn.box(16 + 66 * number, 42, 58, 34, "block" if number < 3 else "empty", name)
    drawn.box(16, 112, 380, 200, "process")
    drawn.text(206, 134, "frontend: index from hash to instances", "title")
    for number, (name, holders) in enumerate((("a", "1, 2"), ("b", "1, 2"), ("c", "1"), ("d", "none"))):
        drawn.box(36, 146 + 38 * number, 58, 30, "block" if number < 3 else "empty", name)
        drawn.text(110, 166 + 38 * number, holders, "small", "start")
    drawn.text(190, 168, "instance 1: 3 held, but busy", "small", "start")
    drawn.text(190, 198, "instance 2: 2 held, idle", "small", "start")
    drawn.text(190, 228, "cost = prefill left to compute", "small", "start")
    drawn.text(190, 246, "+ prefill queue + blocks in use", "small", "start")
    drawn.text(190, 280, "the lowest cost wins", "title", "start")
    drawn.line("M146 78 V110")
    for number, (held, state, kind) in enumerate((("abc", "long queue", "busy"), ("ab", "short queue", "process"))):
        y = 60 + 140 * number
        drawn.box(610, y, 234, 104, kind)
        drawn.text(727, y + 22, f"instance {number + 1}: {state}", "title")
        for place, name in enumerate(held):
            drawn.box(626 + 66 * place, y + 40, 58, 34, "block", name)
        drawn.text(727, y + 94, "the engine's KV cache", "small")
        drawn.line(f"M610 {y + 34} H498 V{190 + 20 * number} H398", "quiet")
    drawn.text(548, 50, "numbered updates:", "small")
    drawn.text(548, 66, "stored, removed;", "small")
    drawn.text(548, 82, "load reports", "small")
    drawn.line("M398 284 H608")
    drawn.text(503, 276, "the request", "small")
    drawn.text(503, 304, "a hole in the numbers:", "small")
    drawn.text(503, 320, "updates since, or a snapshot", "small")
    return drawn


def main() -> None:
    for picture in (fleet(), request(), caches()):
        picture.write()


if __name__ == "__main__":
    main()
