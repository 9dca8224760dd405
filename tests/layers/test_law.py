"""The rules of CONTRIBUTING that a machine can check hold, apart from the entries of the shrinking allow-lists."""

import ast

import pytest
from layers.law import RULES, Module, allowed, offenses

REWRITE = "run `python tests/layers/law.py`"


@pytest.mark.parametrize("rule", RULES)
def test_no_file_breaks_the_rule_more_often_than_allowed(rule: str) -> None:
    limits = allowed()
    broken = {path: spots for path, spots in offenses(rule).items() if len(spots) > limits.get((rule, path), 0)}
    assert not broken, f"{RULES[rule].__doc__}\n" + "\n".join(
        f"  src/lockstep/{path}:{spot}" for path, spots in broken.items() for spot in spots
    )


@pytest.mark.parametrize("rule", RULES)
def test_the_allow_list_has_no_entry_that_is_no_longer_needed(rule: str) -> None:
    counts = {path: len(spots) for path, spots in offenses(rule).items()}
    stale = {path for (name, path), limit in allowed().items() if name == rule and counts.get(path, 0) < limit}
    assert not stale, f"{rule} is broken less often than the allow-list has it; {REWRITE}: {sorted(stale)}"


BREAKERS = {
    "attribute-probe": "print(hasattr(1, 'real'))",
    "docstring-opening": 'def f():\n    """Of a model, its size."""',
    "docstring-section": 'def f(x):\n    """Return x.\n\n    Args:\n    x: any.\n    """',
    "long-file": "x = 1\n" * 401,
    "long-function": "def f():\n" + "    x = 1\n" * 60,
    "raw-collective": "import torch.distributed as dist\ndist.all_reduce(x)",
    "vague-local": "for one in range(3):\n    pass",
}


@pytest.mark.parametrize("rule", BREAKERS)
def test_each_rule_detects_a_breach(rule: str) -> None:
    text = BREAKERS[rule]
    assert list(RULES[rule](Module("models/new.py", len(text.splitlines()), ast.parse(text))))


def test_a_collective_is_detected_however_it_is_imported() -> None:
    for text in (
        "import torch\ntorch.distributed.barrier()",
        "from torch import distributed\ndistributed.barrier()",
        "from torch.distributed import barrier",
    ):
        assert list(RULES["raw-collective"](Module("models/new.py", 2, ast.parse(text))))
    assert not list(RULES["raw-collective"](Module("distributed/new.py", 2, ast.parse(text))))
