"""The rules of CONTRIBUTING that a machine can check hold in all packages."""

import ast

import pytest
from layers.law import RULES, Module, offenses


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_holds(rule: str) -> None:
    assert offenses(rule) == [], RULES[rule].__doc__


BREAKERS = {
    "attribute-probe": "print(hasattr(1, 'real'))",
    "docstring-opening": 'def f():\n    """Of a model, its size."""',
    "docstring-section": 'def f(x):\n    """Return x.\n\n    Args:\n    x: any.\n    """',
    "long-file": "x = 1\n" * 701,
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
