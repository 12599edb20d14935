"""One frozen dataclass per process, filled from flags, the environment, a YAML file and defaults, in this order.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class WorkerConfig:
        drain_timeout_s: float = option(30.0, minimum=0, flags=("--drain-timeout",), help="Longest drain, in seconds.")
        nats: NatsOptions = group("NATS", prefix="nats")

    config = load_or_exit(WorkerConfig, program="dynamo-worker")

A field without explicit names gets `--drain-timeout-s`, `DYN_DRAIN_TIMEOUT_S` and the file key `drain_timeout_s`;
inside a group with a prefix `--nats-…`, `DYN_NATS_…` and `nats.…`. What does not fit stops the start with one sentence
(`ConfigError`). Names and values of the version before are declared beside the new ones (`formerly`, `replaced`), and
work with a warning.

| module | holds |
|---|---|
| `command_line` | flags, and the text of `--help` |
| `environment` | environment variables |
| `fields` | fields of a configuration class |
| `file` | the file of a configuration, in YAML |
| `former` | names of the version before, which work with a warning |
| `loading` | make a configuration of flags, the environment and a file |
| `settings` | a configuration class, read |
| `tables` | a configuration class as tables for the documentation |
| `values` | values, from whichever source |
"""

from dynamo.common.config.command_line import project_version
from dynamo.common.config.environment import variables
from dynamo.common.config.fields import ConfigError, group, option, parse_bytes, parse_port
from dynamo.common.config.loading import EXIT_CONFIG, exit_with, load, load_or_exit
from dynamo.common.config.tables import markdown_table, replacements
from dynamo.common.config.values import FileSecret

__all__ = [
    "EXIT_CONFIG",
    "ConfigError",
    "FileSecret",
    "exit_with",
    "group",
    "load",
    "load_or_exit",
    "markdown_table",
    "option",
    "parse_bytes",
    "parse_port",
    "project_version",
    "replacements",
    "variables",
]
