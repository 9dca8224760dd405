"""Every config that `lockstep init` writes passes the check and trains; nothing is overwritten."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml
from kit.commands import run_lockstep
from kit.failures import gives

from lockstep.cli.main import main
from lockstep.config.init_templates import STARTS

QUICK = ("--launch.device", "cpu", "--monitor.tensorboard", "false", "--run.epochs", "null", "--run.steps", "2")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models with a tokenizer of a few words, and rows of text."""
    pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    folder = tmp_path_factory.mktemp("pretrained")
    words = {word: n for n, word in enumerate(["<eos>", "<unk>", "the", "a", "cat", "dog", "sat", "ran"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    gpt2 = AutoConfig.for_model("gpt2", n_layer=1, n_embd=16, n_head=2, vocab_size=8, n_positions=128)
    bert = AutoConfig.for_model(
        "bert", num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=32, vocab_size=8
    )
    for name, model in (
        ("finetune", AutoModelForCausalLM.from_config(gpt2)),
        ("classifier", AutoModelForSequenceClassification.from_config(bert)),
    ):
        model.save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    rows = [{"text": " ".join(list(words)[2 + n % 3 : 5 + n % 4] * 8), "label": n % 2} for n in range(80)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.mark.parametrize("kind", [kind for kind, start in STARTS.items() if start.template])
def test_every_template_passes_the_check_and_trains(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    words: list[object] = []
    if STARTS[kind].model is not None:
        pretrained = request.getfixturevalue("pretrained")
        words = ["--model", pretrained / kind, "--data", pretrained / "rows.jsonl"]
    written = run_lockstep("init", kind, "--folder", "mine", *words, cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    folder = tmp_path / "mine"
    if STARTS[kind].prepare:
        (folder / "corpus.txt").write_text("the cat sat on the mat. " * 500)
    commands = [line.strip().split() for line in written.stdout.partition("next:")[2].splitlines() if line.strip()]
    assert commands[0] == ["cd", "mine"]
    for _, *command in commands[1:]:  # the commands that it prints
        further = QUICK if command[0] == "train" else ()
        done = run_lockstep(*command, *further, cwd=folder)
        assert done.returncode == 0, (command, done.stderr)
    assert json.loads((folder / "run" / "summary.json").read_text())["steps"] == 2
    text = (folder / "run.yaml").read_text()
    assert "{model}" not in text
    assert "{data}" not in text
    assert text.count("#") >= 8, "a first config explains itself"


def test_nothing_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("precious")
    assert main(["init", "own"]) == 2
    assert gives(capsys.readouterr().err, "own.py")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["own.py"]
    assert (tmp_path / "own.py").read_text() == "precious"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "init needs a kind: lockstep init text|finetune|classifier|own"),
        (["fintune"], "init has no kind 'fintune'; did you mean finetune?"),
        (["own", "--model", "gpt2"], "init own has no --model"),
    ],
)
def test_without_a_terminal_flags_replace_questions(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail("asked without a terminal"))
    assert main(["init", *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_on_a_terminal_init_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    answers = iter(["3", "", "./re: views.jsonl"])
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    assert main(["init"]) == 0
    text = (tmp_path / "run.yaml").read_text()
    assert "pretrained: bert-base-uncased " in text
    assert "name: './re: views.jsonl' " in text


def test_files_are_relative_to_the_folder_where_training_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "null").mkdir()
    (tmp_path / "it's.txt").write_text("text")
    assert main(["init", "finetune", "--folder", "my runs", "--model", "null", "--data", "it's.txt"]) == 0
    written = yaml.safe_load((tmp_path / "my runs" / "run.yaml").read_text())
    assert written["model"]["pretrained"] == "../null"
    assert written["data"]["train"]["name"] == "../it's.txt"
    assert main(["init", "finetune", "--folder", "hub", "--model", "gpt2", "--data", str(tmp_path / "it's.txt")]) == 0
    written = yaml.safe_load((tmp_path / "hub" / "run.yaml").read_text())
    assert written["model"]["pretrained"] == "gpt2"
    assert written["data"]["train"]["name"] == str(tmp_path / "it's.txt")
    capsys.readouterr()
    assert main(["init", "text", "--folder", "text", "--data", "it's.txt"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if "data prepare" in line]
    assert lines[0][:4] == ["lockstep", "data", "prepare", "../it's.txt"]


@pytest.mark.parametrize(
    ("file", "content", "columns"),
    [
        ("a.jsonl", '{"review": "good", "stars": 1}\n{"review": "bad", "stars": 0}', ("review", "stars")),
        ("a.json", '[{"review": "good", "stars": 1}]', ("review", "stars")),
        ("a.csv", '"the text"\n"one, two"', ("the text", "label")),
        ("a.jsonl", '{"text": "good", "title": "x", "label": 1, "id": 3}', ("text", "label")),
    ],
)
def test_init_takes_the_columns_of_the_data(
    file: str, content: str, columns: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(content)
    assert main(["init", "classifier", "--folder", "x", "--data", file]) == 0
    train = yaml.safe_load(Path("x/run.yaml").read_text())["data"]["train"]
    assert (train["text"], train["label"]) == columns


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"messages": CHAT, "id": "7"}, {"messages": "messages"}),
        ({"conversations": [{"from": "human", "value": "hi"}], "tools": [{"type": "function"}]},
         {"messages": "conversations", "tools": "tools"}),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, {"messages": "prompt", "label": "completion"}),
        ({"prompt": "hi", "completion": "hello"}, {"text": "prompt", "label": "completion"}),
        ({"text": "hi", "label": 1}, {"text": "text", "packed": True}),
        ({"prompt": "hi", "chosen": "a", "rejected": "b"},
         {"text": "prompt", "label": "chosen", "rejected": "rejected"}),
        ({"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": CHAT[1:]},
         {"messages": "prompt", "label": "chosen", "rejected": "rejected"}),
        ({"prompt": "hi", "chosen": CHAT, "rejected": CHAT}, {"messages": "chosen", "rejected": "rejected"}),
        ({"prompt": "hi", "completion": "a", "label": 1},
         {"text": "prompt", "label": "completion", "desirable": "label"}),
        ({"prompt": CHAT[:1], "completion": CHAT[1:], "label": True},
         {"messages": "prompt", "label": "completion", "desirable": "label"}),
        ({"messages": CHAT, "label": False}, {"messages": "messages", "desirable": "label"}),
    ],
)  # fmt: skip
def test_init_finetune_writes_the_keys_of_the_data(
    row: dict[str, object], columns: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["init", "finetune", "--data", "a.jsonl"]) == 0
    config = yaml.safe_load(Path("run.yaml").read_text())
    train, kinds = config["data"]["train"], {"rejected": "dpo", "desirable": "kto"}
    assert [config.get("objective", {}).get("kind")] == ([kinds[key] for key in kinds if key in columns] or [None])
    keys = ("text", "label", "rejected", "desirable", "messages", "tools", "packed")
    assert {key: train[key] for key in keys if key in train} == columns
    assert main(["config", "check", "run.yaml"]) == 0


def test_init_refuses_a_chat_for_a_classifier_and_a_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chat.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}], "id": "7"}')
    for data, message in (("chat.jsonl", "messages"), ("*.jsonl", "give the files' folder")):
        assert main(["init", "classifier", "--folder", "x", "--data", data]) == 2
        assert message in capsys.readouterr().err
        assert not Path("x").exists()


def test_the_check_names_a_missing_column_of_local_data_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("txt,labels\ngood,1\n")
    assert main(["init", "classifier", "--data", "a.csv"]) == 0
    capsys.readouterr()
    assert main(["config", "check", "run.yaml"]) == 2
    assert gives(capsys.readouterr().err, "data.train:", "text", "txt?", "txt, labels")
    assert main(["config", "check", "run.yaml", "data.train.text=txt", "data.train.label=labels"]) == 0


def test_the_columns_of_parquet_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    parquet.write_table(pyarrow.table({"text": [["a"]], "label": [1]}), tmp_path / "a.parquet")
    data, folder = str(tmp_path / "a.parquet"), str(tmp_path / "x")
    assert main(["init", "classifier", "--folder", folder, "--data", data]) == 0
    assert main(["config", "check", f"{folder}/run.yaml"]) == 2
    assert gives(capsys.readouterr().err, "text", "['a']")
