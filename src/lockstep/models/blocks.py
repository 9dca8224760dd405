"""The repeated layers of any module, where it can be partitioned, sharded or recomputed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn


def repeated_blocks(module: nn.Module) -> list[str]:
    """Return the qualified names of the repeated layers, in the order of the module; empty if there are none.

    A ModuleList or Sequential has repeated layers if it has at least two modules, of at most half as many classes
    (layers may alternate between two classes); lists in a list, such as stages, are one list. If some layers have
    children, those without are ignored.
    """
    lists = list(_outermost_lists("", module))
    composite = [children for children in lists if any([*child.children()] for child in children.values())]
    return [name for children in composite or lists for name in children]


def blocks_in_line(module: nn.Module, blocks: Sequence[str]) -> Sequence[str]:
    """Return the names of the modules that a forward can be partitioned between.

    These are the layers in the pipeline plan of a transformers model; or all children of a Sequential that the module
    is, or of the longest that has all `blocks` inside; or `blocks`.
    """
    plan = getattr(getattr(module, "config", None), "base_model_pp_plan", None) or {}
    inner = getattr(module, "base_model", module)
    prefix = next((f"{name}." for name, child in module.named_modules() if child is inner and name), "")
    for name in plan:
        layers = getattr(inner, name, None)
        if isinstance(layers, nn.ModuleList):
            return [f"{prefix}{name}.{child}" for child, _ in layers.named_children()]
    chains = [
        [f"{name}.{key}".lstrip(".") for key, _ in child.named_children()]
        for name, child in module.named_modules()
        if type(child).forward is nn.Sequential.forward and all(block.startswith(f"{name}.") for block in blocks)
    ]
    if type(module).forward is nn.Sequential.forward:
        return [name for name, _ in module.named_children()]
    return max(chains, key=len, default=blocks)


def _outermost_lists(name: str, module: nn.Module) -> Iterator[dict[str, nn.Module]]:
    children = dict(_children(name, module))
    if _repeats(module, list(children.values())):
        yield children
        return
    for child_name, child in children.items():
        yield from _outermost_lists(child_name, child)


def _children(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children; instead of a list in a list, which has no forward, its children."""
    for key, child in module.named_children():
        full = f"{name}.{key}" if name else key
        if isinstance(module, nn.ModuleList) and isinstance(child, nn.ModuleList):
            yield from _children(full, child)
        else:
            yield full, child


def _repeats(module: nn.Module, children: list[nn.Module]) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential) or len(children) < 2:
        return False
    if any(isinstance(child, nn.ModuleDict) for child in children):
        return False
    owns_parameters = all(any(True for _ in child.parameters()) for child in children)
    return owns_parameters and 2 * len({type(child) for child in children}) <= max(len(children), 2)
