"""The code rules that no linter has: `RULES` yields each place of src/lockstep that breaks one."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "lockstep"

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60

COLLECTIVES = frozenset(
    {
        "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
        "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast",
        "broadcast_object_list", "destroy_process_group", "gather", "gather_object", "init_process_group",
        "irecv", "isend", "monitored_barrier", "new_group", "new_subgroups", "recv", "recv_object_list",
        "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
        "send_object_list",
    }
)  # fmt: skip

FRAGMENT_WORDS = frozenset(
    {
        "about", "above", "across", "after", "against", "among", "around", "as", "at", "because", "before",
        "behind", "beneath", "beside", "besides", "between", "beyond", "but", "by", "despite", "during",
        "except", "for", "from", "he", "her", "him", "his", "if", "in", "inside", "into", "it", "its", "like",
        "near", "of", "off", "on", "once", "onto", "our", "out", "outside", "over", "past", "per", "she",
        "since", "such", "than", "that", "their", "them", "then", "there", "these", "they", "this", "those",
        "though", "through", "till", "to", "toward", "under", "unless", "until", "unto", "up", "upon", "us",
        "we", "what", "whatever", "when", "whence", "where", "whether", "which", "whichever", "while", "who",
        "whoever", "whom", "whose", "why", "with", "within", "without", "you",
    }
)  # fmt: skip
"""First words of a docstring that doesn't state what the thing does or is."""

VAGUE_NAMES = frozenset({"asked", "found", "one", "said", "told"})

SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):(.*)")


@dataclass(frozen=True)
class Module:
    """A source file, parsed.

    Attributes:
        path: Relative to `src/lockstep`, with slashes.
        lines: Number of lines.
        tree: The syntax tree.
    """

    path: str
    lines: int
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.path.split("/")[0] if "/" in self.path else "lockstep"

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree, which each rule looks at."""
        return list(ast.walk(self.tree))


@cache
def modules() -> tuple[Module, ...]:
    """Parse every file of the package, once a process."""
    parsed = []
    for file in sorted(SOURCE.rglob("*.py")):
        text = file.read_text()
        parsed.append(Module(file.relative_to(SOURCE).as_posix(), len(text.splitlines()), ast.parse(text)))
    return tuple(parsed)


# --- rules: each yields the places where it is broken ---------------------------------------------------------------


def raw_collectives(module: Module) -> Iterator[str]:
    """Yield each use of a collective of `torch.distributed` outside `distributed/`, or of `simulation/`'s backend."""
    if module.package in ("distributed", "simulation"):
        return
    aliases = {"torch.distributed"}
    for node in module.nodes:
        if isinstance(node, ast.Import):
            aliases |= {name.asname for name in node.names if name.name == "torch.distributed" and name.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            aliases |= {name.asname or name.name for name in node.names if name.name == "distributed"}
        elif isinstance(node, ast.ImportFrom) and node.module in ("torch.distributed", "torch.distributed.nn"):
            yield from (f"{node.lineno}: {name.name}" for name in node.names if name.name in COLLECTIVES)
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES and ast.unparse(node.value) in aliases:
            yield f"{node.lineno}: {ast.unparse(node)}"


def attribute_probes(module: Module) -> Iterator[str]:
    """Yield each call of `hasattr`."""
    for node in module.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr":
            yield f"{node.lineno}: {ast.unparse(node)}"


def long_files(module: Module) -> Iterator[str]:
    """Yield the file if it is too long."""
    if module.lines > MAX_FILE_LINES:
        yield f"{module.lines} lines"


def long_functions(module: Module) -> Iterator[str]:
    """Yield each function that is too long."""
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {length} lines"


def docstring_openings(module: Module) -> Iterator[str]:
    """Yield each docstring that begins with a pronoun, a preposition, a question word or a section."""
    for line, docstring in _docstrings(module):
        word = re.match(r"\W*([A-Za-z']+)", docstring)
        if SECTION.match(docstring) or (word is not None and word[1].lower() in FRAGMENT_WORDS):
            yield f"{line}: {docstring.splitlines()[0]}"


def docstring_sections(module: Module) -> Iterator[str]:
    """Yield each section, such as `Args:`, that isn't alone on its line with indented contents below."""
    for line, docstring in _docstrings(module):
        lines = docstring.splitlines()
        for text, below in zip(lines, [*lines[1:], ""], strict=True):
            section = SECTION.fullmatch(text)
            if section is not None and (section[2].strip() or not below.startswith("    ")):
                yield f"{line}: {text}"


def vague_locals(module: Module) -> Iterator[str]:
    """Yield each variable or argument whose name doesn't show what it holds."""
    for node in module.nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE_NAMES:
            yield f"{node.lineno}: {node.id}"
        elif isinstance(node, ast.arg) and node.arg in VAGUE_NAMES:
            yield f"{node.lineno}: {node.arg} (argument)"


def repeated_classes(module: Module) -> Iterator[str]:
    """Yield each class that shares its name with another class."""
    for node in module.nodes:
        if isinstance(node, ast.ClassDef) and _class_names()[node.name] > 1:
            yield f"{node.lineno}: class {node.name}"


RULES: dict[str, Callable[[Module], Iterable[str]]] = {
    "attribute-probe": attribute_probes,
    "docstring-opening": docstring_openings,
    "docstring-section": docstring_sections,
    "long-file": long_files,
    "long-function": long_functions,
    "raw-collective": raw_collectives,
    "repeated-class": repeated_classes,
    "vague-local": vague_locals,
}


def _docstrings(module: Module) -> Iterator[tuple[int, str]]:
    """Yield docstrings of modules, classes and functions, and of attributes (a string below an assignment)."""
    for node in module.nodes:
        body: list[ast.stmt] = getattr(node, "body", [])
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for before, statement in zip([None, *body], body, strict=False):
            documents = before is None or isinstance(before, ast.Assign | ast.AnnAssign)
            constant = statement.value if isinstance(statement, ast.Expr) else None
            if documents and isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                yield statement.lineno, inspect.cleandoc(constant.value)


@cache
def _class_names() -> Counter[str]:
    return Counter(node.name for module in modules() for node in module.nodes if isinstance(node, ast.ClassDef))


def offenses(rule: str) -> list[str]:
    """Return the places that break `rule`."""
    return [f"src/lockstep/{module.path}:{spot}" for module in modules() for spot in RULES[rule](module)]
