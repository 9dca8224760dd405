import pickle
import sys
from pathlib import Path

import pytest

from lockstep.core.errors import ConfigError
from lockstep.core.importing import construct, import_target, source_file


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_a_module_and_a_file(written):
    assert import_target("pathlib:Path") is Path
    assert import_target("os:path.join") is __import__("os").path.join
    path = written("my_things.py", "class Thing:\n    size = 3\n")
    thing = import_target(f"{path}:Thing")
    assert thing.size == 3
    assert import_target(f"{path}:Thing") is thing
    assert pickle.loads(pickle.dumps(thing())).size == 3
    assert source_file(thing) == path
    assert source_file(thing()) == path


def test_a_file_called_like_a_module_of_pythons(written):
    path = written("json.py", "x = 1\n")
    assert import_target(f"{path}:x") == 1
    assert import_target("json:dumps")({}) == "{}"


def test_a_file_imports_its_neighbours(written):
    written("my_neighbour.py", "value = 5\n")
    path = written("my_model.py", "from my_neighbour import value\n")
    assert import_target(f"{path}:value") == 5


def test_what_is_wrong_is_said(written):
    path = written("nets.py", "class Network:\n    def __init__(self, width): raise ValueError('too wide')\n")
    raising = written("raising.py", "import math\nmath.sqrt(-1)\n")
    broken = written("broken.py", "def f(:\n")
    needy = written("needy.py", "import surely_not_installed\n")
    for target, message in [
        ("Network", "write package.module:Name or path/to/file.py:Name"),
        (f"{path.parent}/net.py:Network", "there is no file .*net.py; did you mean nets.py?"),
        (f"{path}:Netwrok", "nets.py has no Netwrok; did you mean Network?"),
        ("surely_missing.module:Name", "there is no module surely_missing"),
        (f"{raising}:x", r"running raising.py raised ValueError: .* \(.*raising.py:2\)"),
        (f"{broken}:f", r"running broken.py raised SyntaxError: .*broken.py:1"),
        (f"{needy}:x", "raised ModuleNotFoundError: No module named 'surely_not_installed'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            import_target(target)
    with pytest.raises(ConfigError, match=r"Network\(width=9\) raised ValueError: too wide \(.*nets.py:2\)"):
        construct(f"{path}:Network", {"width": 9})
    with pytest.raises(ConfigError, match=r"unexpected keyword argument 'widht'|missing a required argument: 'width'"):
        construct(f"{path}:Network", {"widht": 9})
    with pytest.raises(ConfigError, match="is a float, not a class or function"):
        construct("math:pi", {})
