"""Write docs/configuration.md, and what replaces what in docs/operations.md, from the configuration classes.

With `--check`, fail if a page is out of date.
"""

from __future__ import annotations

import sys
from inspect import cleandoc
from pathlib import Path

from dynamo.common.config import markdown_table, replacements
from dynamo.frontend.config import FrontendConfig
from dynamo.local.config import LocalConfig
from dynamo.local.replay.config import ReplayConfig
from dynamo.planner.config import PlannerConfig
from dynamo.planner.process.explain import ExplainConfig
from dynamo.worker.config import WorkerConfig

PAGE = Path(__file__).with_name("configuration.md")
UPGRADES = Path(__file__).with_name("operations.md")
BEGIN, END = "<!-- replacements: written by make docs -->\n", "<!-- end of replacements -->\n"

INTRODUCTION = """\
# Configuration

Every process reads one set of options from four places. A flag takes precedence over an environment variable, a variable over the
configuration file, and the file over the default.

- **Flags.** Switches have a negative form: `--grpc` and `--no-grpc`. Of a flag that is given twice the later one counts;
  repeatable flags add up. `--help` lists all, `--version` shows the version, and which Python runs it.
- **Environment.** Variables that are set but empty count as unset. Lists are separated by commas.
- **File.** YAML, named by `--config FILE` or `DYN_CONFIG`. The keys in the tables are paths: `nats.servers` is `servers`
  inside `nats`. One file may serve several processes: keys of another one are accepted and have no effect.
- **Secrets** are never flags, which every user of a machine can read in its process list. They come from a variable, or from
  a file that a `…-file` flag or `…_FILE` variable names.

Names and values of the version before [work once more](operations.md#upgrades), with a warning that names the new ones. What does
not fit prevents the start, with one sentence and exit status 2: an unknown flag, `DYN_…` variable or key of the file (with the
nearest known name), a value out of range, a port in use, and an option that has different values in the file and on the command
line.

```yaml
# frontend.yaml: dynamo-frontend --config frontend.yaml
grpc_service:
  host: 0.0.0.0
  port: 8001
http:
  host: 0.0.0.0
  port: 8000
etcd:
  endpoints: [http://etcd-0:2379, http://etcd-1:2379]
nats:
  servers: [nats://nats:4222]
  user: frontend
  password_file: /run/secrets/nats
log:
  format: json
```

This page is generated from the code by `make docs`.
"""

PROCESSES = (
    ("dynamo-frontend", FrontendConfig),
    ("dynamo-worker", WorkerConfig),
    ("dynamo-planner", PlannerConfig),
    ("dynamo-planner explain", ExplainConfig),
    ("dynamo-local", LocalConfig),
    ("dynamo-local replay", ReplayConfig),
)


def page() -> str:
    parts = [INTRODUCTION]
    for program, cls in PROCESSES:
        parts.append(f"## {program}\n\n{cleandoc(cls.__doc__)}\n\n{markdown_table(cls)}")
    return "\n".join(parts)


def upgrades(before: str) -> str:
    rows = [f"| {program} | `{old}` | `{new}` |" for program, cls in PROCESSES for old, new in replacements(cls).items()]
    table = "\n".join(["| program | deprecated | use |", "|---|---|---|", *rows]) if rows else "None at present."
    head, begin, rest = before.partition(BEGIN)
    _, end, tail = rest.partition(END)
    return f"{head}{begin}\n{table}\n\n{end}{tail}"


def main() -> None:
    for path, text in ((PAGE, page()), (UPGRADES, upgrades(UPGRADES.read_text(encoding="utf-8")))):
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is out of date; run `make docs`")


if __name__ == "__main__":
    main()
