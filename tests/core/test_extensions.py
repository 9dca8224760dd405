import pickle
import sys
from pathlib import Path

import pytest
from kit.failures import fails

from lockstep.core.errors import ConfigError
from lockstep.core.extensions import construct, import_target, load, registered, source_file


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_a_module_and_a_file_are_imported(written):
    assert import_target("pathlib:Path") is Path
    assert import_target("os:path.join") is __import__("os").path.join
    path = written("my_things.py", "class Thing:\n    size = 3\n")
    thing = import_target(f"{path}:Thing")
    assert thing.size == 3
    assert import_target(f"{path}:Thing") is thing
    assert pickle.loads(pickle.dumps(thing())).size == 3
    assert source_file(thing) == path
    assert source_file(thing()) == path


def test_a_file_with_the_name_of_a_standard_module_is_imported(written):
    path = written("json.py", "x = 1\n")
    assert import_target(f"{path}:x") == 1
    assert import_target("json:dumps")({}) == "{}"


def test_a_file_imports_its_neighbors(written):
    written("my_neighbor.py", "value = 5\n")
    path = written("my_model.py", "from my_neighbor import value\n")
    assert import_target(f"{path}:value") == 5


def test_errors_state_the_target_and_the_nearest_name(written):
    path = written("nets.py", "class Network:\n    def __init__(self, width): raise ValueError('too wide')\n")
    raising = written("raising.py", "import math\nmath.sqrt(-1)\n")
    broken = written("broken.py", "def f(:\n")
    needy = written("needy.py", "import surely_not_installed\n")
    for target, message in [
        ("Network", "write package.module:Name or path/to/file.py:Name"),
        (f"{path.parent}/net.py:Network", "there is no file .*net.py; did you mean nets.py?"),
        (f"{path}:Networt", "nets.py has no Networt; did you mean Network?"),
        ("surely_missing.module:Name", "there is no module surely_missing"),
        (f"{raising}:x", r"running raising.py raised ValueError: .* \(.*raising.py:2\)"),
        (f"{broken}:f", r"running broken.py raised SyntaxError: .*broken.py:1"),
        (f"{needy}:x", "raised ModuleNotFoundError: No module named 'surely_not_installed'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            import_target(target)
    with pytest.raises(ConfigError, match=r"Network\(width=9\) .* ValueError: too wide \(.*nets.py:2\)"):
        construct("models", f"{path}:Network", {"width": 9})
    with pytest.raises(ConfigError, match=r"'widht'|'width'"):
        construct("models", f"{path}:Network", {"widht": 9})
    with fails(ConfigError, "float"):
        construct("models", "math:pi", {})


@pytest.fixture
def package(written, tmp_path):
    """Return a function that installs a package whose entry points are `declared`."""
    sys.path.insert(0, str(tmp_path))

    def install(name: str, declared: str) -> None:
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(declared)

    return install


def test_entry_points_are_loaded_by_name(written, package):
    written("messages_for_test.py", "class Message:\n    def __init__(self, to): self.to = to\n")
    package("messages", "[lockstep.monitors]\nmessage = messages_for_test:Message\nbroken = nowhere_at_all:x\n")
    assert registered("monitors") == {"message": "messages_for_test:Message", "broken": "nowhere_at_all:x"}
    assert load("monitors", "message") is load("monitors", "messages_for_test:Message")
    assert construct("monitors", "message", {"to": "me"}).to == "me"
    for name, message in [
        (
            "mesage",
            r"monitors\[0\]: 'mesage' is not registered in lockstep.monitors \(there are tensorboard, broken, "
            r"message\); did you mean message\?; write package.module:Name",
        ),
        ("tensorbord", r"did you mean tensorboard\?"),
        ("broken", "broken: importing nowhere_at_all:x raised ModuleNotFoundError"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load("monitors", name, key="monitors[0]", builtin=("tensorboard",))
    with fails(ConfigError, "'message'", "lockstep.transforms"):
        load("transforms", "message")
    with fails(ConfigError, "monitors[0]", "message", "arguments"):
        construct("monitors", "message", {"form": 1}, key="monitors[0]")
    package("others", "[lockstep.monitors]\nmessage = pathlib:Path\n")
    with fails(ConfigError, "messages_for_test:Message, pathlib:Path"):
        load("monitors", "message")
