"""Write docs/configuration.md from the configuration classes; with `--check`, fail if the page is out of date."""

from __future__ import annotations

import sys
from pathlib import Path

from dynamo.common.config import markdown_table
from dynamo.frontend.config import FrontendConfig
from dynamo.local.config import LocalConfig
from dynamo.local.replay.config import ReplayConfig
from dynamo.worker.config import WorkerConfig

PAGE = Path(__file__).with_name("configuration.md")

INTRODUCTION = """\
# Configuration

Every process reads one set of options from four places. A flag takes precedence over an environment variable, a variable over the
configuration file, and the file over the default.

- **Flags.** Switches have a negative form: `--grpc` and `--no-grpc`. Of a flag that is given twice the later one counts;
  repeatable flags add up. `--help` lists all, `--version` shows the version.
- **Environment.** Variables that are set but empty count as unset. Lists are separated by commas.
- **File.** YAML, named by `--config FILE` or `DYN_CONFIG`. The keys in the tables are paths: `nats.servers` is `servers`
  inside `nats`. One file may serve several processes: keys of another one are accepted and have no effect.
- **Secrets** are never flags, which every user of a machine can read in its process list. They come from a variable, or from
  a file that a `…-file` flag or `…_FILE` variable names.

What does not fit prevents the start, with one sentence and exit status 2: an unknown flag, `DYN_…` variable or key of the file
(with the nearest known name), a value out of range, a port in use, and an option that has different values in the file and on
the command line.

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
    ("dynamo-local", LocalConfig),
    ("dynamo-local replay", ReplayConfig),
)


def page() -> str:
    parts = [INTRODUCTION]
    for program, cls in PROCESSES:
        parts.append(f"## {program}\n\n{cls.__doc__}\n\n{markdown_table(cls)}")
    return "\n".join(parts)


def main() -> None:
    if "--check" in sys.argv[1:]:
        sys.exit(PAGE.read_text(encoding="utf-8") != page() and f"{PAGE} is out of date; run `make docs`")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
