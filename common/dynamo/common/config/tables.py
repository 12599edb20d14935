"""A configuration class as tables for the documentation."""

from __future__ import annotations

from typing import Any

from dynamo.common.config.command_line import shown_default
from dynamo.common.config.settings import Setting, former_names_of, settings_of, with_negations


def replacements(cls: type[Any]) -> dict[str, str]:
    """Return what `cls` takes for the last time, with what replaces it: names, and values as `--flag value`."""
    settings = list(settings_of(cls))
    values = {f"{s.shown_as} {old}": f"{s.shown_as} {new}" for s in settings for old, new in s.option.replaced.items()}
    return former_names_of(settings) | values


def markdown_table(cls: type[Any]) -> str:
    """Return all options of `cls` as Markdown: one heading and one table per group."""
    groups: dict[str, list[Setting]] = {}
    for setting in settings_of(cls):
        groups.setdefault(setting.title, []).append(setting)
    parts = []
    for title, members in groups.items():
        rows = [_markdown_row(setting) for setting in members]
        head = "| flag | variable | file key | default | what it does |\n|---|---|---|---|---|"
        parts.append("\n".join([f"### {title}", "", head, *rows]))
    return "\n\n".join(parts) + "\n"


def _markdown_row(setting: Setting) -> str:
    shown = setting.file_flags if setting.option.secret else setting.flags
    env = (*setting.env, *setting.file_env)
    if setting.is_bool:
        shown = tuple(f"{flag}, {with_negations((flag,))[1]}" for flag in shown[:1]) + shown[1:]
    described = setting.option.help
    if setting.option.choices:
        described += f" One of: {', '.join(f'`{choice}`' for choice in setting.option.choices)}."
    default = shown_default(setting)
    cells = [
        ", ".join(f"`{part}`" for flag in shown for part in flag.split(", ")),
        ", ".join(f"`{name}`" for name in env),
        ", ".join(f"`{key}`" for key in (*setting.file_keys, *setting.file_file_keys)),
        "" if default is None else f"`{default}`",
        described,
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
