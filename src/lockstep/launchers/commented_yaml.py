"""YAML that a person wants to read: texts on one line, indented lists, comments above keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml


def yaml_lines(data: Mapping[str, Any], comments: dict[str, str]) -> Iterator[str]:
    """Yield the lines of a document.

    Args:
        comments: Key -> a comment above its first line. Those that were written are removed.
    """
    for line in yaml.dump(data, Dumper=_CommentedDumper, sort_keys=False, width=float("inf")).splitlines():
        comment = comments.pop(line.strip().partition(":")[0], None)
        if comment is not None:
            yield f"{line[: len(line) - len(line.lstrip())]}# {comment}"
        yield line


class _CommentedDumper(yaml.SafeDumper):
    """Writes a text on one line, and indents lists."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _CommentedDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\n" in text else None)


def _null(dumper: _CommentedDumper, _: None) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:null", "")


_CommentedDumper.add_representer(str, _text)
_CommentedDumper.add_representer(type(None), _null)
