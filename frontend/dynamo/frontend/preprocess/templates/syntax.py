"""Syntax that Jinja compiles to plain Python, rewritten so that its operands pass through filters of the environment."""

from __future__ import annotations

from typing import Any, Final

import jinja2
from jinja2 import nodes

from dynamo.frontend.preprocess.templates.budget import MAX_KEYS

_NODES_PER_STEP: Final = 16
COUNTED, READ, SEARCHED, MADE, SLICED, CONCAT, BODY = (f"operation_{number}__" for number in range(7))
"""Names of the filters that syntax is rewritten to."""


def rewrite(template: nodes.Template) -> None:
    """Make everything that a template does pass through the filters that are named here."""
    for comparison in list(template.find_all(nodes.Compare)):
        comparison.expr = _operand(comparison.expr, READ)
        for operand in comparison.ops:
            operand.expr = _operand(operand.expr, SEARCHED if operand.op in ("in", "notin") else READ)
    for item in list(template.find_all(nodes.Getitem)):
        if isinstance(item.arg, nodes.Slice):
            item.node = _filtered(item.node, SLICED)
        elif not isinstance(item.arg, nodes.Const):
            item.arg = _filtered(item.arg, READ)
    for loop in list(template.find_all(nodes.For)):
        loop.iter = _filtered(loop.iter, COUNTED)
    for kind in (nodes.For, nodes.Macro, nodes.CallBlock):
        block: Any  # jinja2 declares no common type of those with a body
        for block in list(template.find_all(kind)):
            steps = sum(1 for _ in block.find_all(nodes.Node)) // _NODES_PER_STEP
            if steps:
                block.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(steps), BODY), lineno=block.lineno))
    _replace_children(template)


def _replace_children(node: nodes.Node) -> None:
    """Replace operators and literals in `node` by filters, from the inside out."""
    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, name, [_replaced(item) if isinstance(item, nodes.Node) else item for item in value])
        elif isinstance(value, nodes.Node):
            setattr(node, name, _replaced(value))


def _replaced(node: nodes.Node) -> nodes.Node:
    _replace_children(node)
    if isinstance(node, nodes.Dict) and sum(not _is_text(pair.key) for pair in node.items) > MAX_KEYS:
        raise jinja2.TemplateSyntaxError(f"a dict has more than {MAX_KEYS} keys that are not text", node.lineno)
    if isinstance(node, nodes.Concat):
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), CONCAT)
    if isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
        return _filtered(node, MADE)
    return node


def _is_text(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, str)


def _operand(node: nodes.Expr, name: str) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filtered(node, name)


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
