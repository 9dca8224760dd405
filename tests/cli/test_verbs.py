"""Each verb passes its arguments on; `config` and `recipes` print their results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.commands import run_lockstep
from kit.failures import gives

from lockstep.cli.arguments import size, split
from lockstep.cli.main import main
from lockstep.config.loading import validate
from lockstep.config.override import Override
from lockstep.plan.stated_facts import facts_of_config
from lockstep.resuming.resuming import Resume

Calls = list[tuple[Any, ...]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replace the functions that the verbs call, and record every call."""
    calls: Calls = []

    def stand_in(package: str, module: str, name: str, answer: Any) -> None:
        def call(*args: Any, **options: Any) -> Any:
            calls.append((name, *args, options))
            return answer

        monkeypatch.setitem(sys.modules, f"lockstep.{package}.{module}", SimpleNamespace(**{name: call}))

    stand_in("training", "start_run", "train", (7, None))
    stand_in("assembly", "planning", "plan_run", None)
    monkeypatch.setattr("lockstep.plan.plan.describe", lambda plan: "the plan")
    finished = SimpleNamespace(
        evaluate_run=lambda *args, **options: (calls.append(("evaluate", *args, options)), (7, None))[1],
        generate_text=lambda *args, **options: (calls.append(("generate", *args, options)), [" and so on"])[1],
    )
    monkeypatch.setitem(sys.modules, "lockstep.training.finished_run", finished)
    return calls


UNTRUSTED = {"trust_remote_code": False, "trust_run": False}


@pytest.mark.parametrize(
    ("words", "own", "overrides"),
    [
        ("digits --ranks 2 --json", ["digits", "--ranks", "2", "--json"], []),
        ("--optim.lr 1e-3 digits", ["digits"], [("optim.lr", "1e-3")]),
        ("digits --optim.lr=1e-3 run.steps=5", ["digits"], [("optim.lr", "1e-3"), ("run.steps", "5")]),
        ("--model.compile --ranks=2", ["--ranks=2"], [("model.compile", None)]),
        ("--model.compile run.steps=5", [], [("model.compile", None), ("run.steps", "5")]),
        ("--optim.weight_decay -1", [], [("optim.weight_decay", "-1")]),
        ("--run.folder=a=b lr=", [], [("run.folder", "a=b"), ("lr", "")]),
        ("--run.folder a=b=c digits", ["digits"], [("run.folder", "a=b=c")]),
        ("-h", ["-h"], []),
    ],
)
def test_arguments_and_overrides_are_separated(
    words: str, own: list[str], overrides: list[tuple[str, str | None]]
) -> None:
    flags = {"--ranks": True, "--json": False, "--help": False}
    assert split(words.split(), flags) == (own, [Override(key, text) for key, text in overrides])


def test_train_passes_the_config_and_how_to_resume(command: Calls) -> None:
    assert main(["train", "digits", "--ranks", "3", "--optim.lr", "1e-2", "--json", "run.seed=5", "--fresh"]) == 7
    [(name, loaded, recipe, resume, options)] = command
    assert (name, recipe, resume) == ("train", "digits", Resume(fresh=True))
    assert options == {"trust_remote_code": False}
    assert (loaded.config.launch.ranks, loaded.config.optim.lr, loaded.config.run.seed) == (3, 1e-2, 5)
    assert loaded.origins["launch.ranks"] == "--ranks"


def test_train_passes_that_code_of_a_model_is_trusted(command: Calls) -> None:
    assert main(["train", "digits", "--trust-remote-code"]) == 7
    [(_, loaded, recipe, resume, options)] = command
    assert (recipe, resume, options) == ("digits", Resume(), {"trust_remote_code": True})
    assert loaded.config.launch.ranks == "auto"


def test_sizes_are_parsed(command: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert [size(text) for text in ("80GiB", "80 GB", "24G", "1.5k", "4194304", "512b")] == [
        80 * 2**30, 80 * 10**9, 24 * 2**30, 1536, 4194304, 512
    ]  # fmt: skip
    assert main(["plan", "digits", "--memory", "2KiB", "--peak", "none"]) == 0
    assert command[0][2] == 2048
    assert main(["plan", "digits", "--memory", "lots"]) == 2
    assert gives(capsys.readouterr().err, "'lots'", "80GiB", "80GB")


def test_plan_eval_and_generate_pass_their_arguments(
    command: Calls, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/x").mkdir(parents=True)
    assert main(["plan", "digits", "--ranks", "8", "--peak", "none"]) == 0
    assert main(["eval", "runs/x", "--ranks", "auto", "--json"]) == 7
    assert (
        main(["generate", "runs/x", "def ", "--tokens", "5", "--top-k", "3", "--seed", "1", "--temperature", "0"]) == 0
    )
    (_, loaded, memory, decision, options), evaluated, generated = command
    assert decision == (None, "")
    assert (loaded.config.launch.ranks, memory, options) == (8, None, {"trust_remote_code": False})
    assert evaluated == ("evaluate", Path("runs/x"), "auto", UNTRUSTED)
    defaults = {"chat": False, "tokenizer": None, **UNTRUSTED}
    assert generated == ("generate", Path("runs/x"), ["def "], 5, (0.0, 3, 1.0, 1), defaults)
    assert capsys.readouterr().out == "digits\nthe plan\ndef  and so on\n"


def test_the_defaults_of_generate(command: Calls) -> None:
    assert main(["generate", "runs/x", "a"]) == 0
    assert command[0][3:] == (256, (0.8, None, 1.0, 42), {"chat": False, "tokenizer": None, **UNTRUSTED})


def test_data_prepare_passes_its_arguments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    received: dict[str, Any] = {}

    def prepare(inputs: list[str], output: Path, **options: Any) -> dict[str, Any]:
        received.update(inputs=inputs, output=output, **options)
        return {"train": SimpleNamespace(tokens=1234, documents=2)}

    monkeypatch.setitem(sys.modules, "lockstep.data.prepare", SimpleNamespace(prepare=prepare))
    assert (
        main(["data", "prepare", "a.txt", "b.txt", "--output", "out", "--tokenizer", "bytes", "--held-out", "9"]) == 0
    )
    assert received == {
        "inputs": ["a.txt", "b.txt"], "output": Path("out"), "tokenizer": "bytes", "split": "train", "column": "text",
        "configuration": None, "held_out": 9,
    }  # fmt: skip
    assert capsys.readouterr().out == "out: train, 1,234 tokens of 2 documents\n"


def test_data_fetch_passes_its_arguments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("lockstep.data.hub.fetch", lambda config: iter([f"model {config.model.pretrained}"]))
    assert main(["data", "fetch", "bert-imdb"]) == 0
    assert capsys.readouterr().out == "model bert-base-uncased\n"


def test_recipes_prints_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["stdlib-lm", "A", "byte-level"]
    assert any(line.startswith("bert-imdb ") and "lockstep data fetch bert-imdb" in line for line in lines)


def test_config_show_prints_value_and_origin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "digits", "--optim.lr", "0.5"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert ["optim.lr", "0.5", "--optim.lr"] in rows
    assert ["optim.eps", "1e-08", "default"] in rows
    assert [row[1] for row in rows if row[0] == "model.kind"] == ["image-classifier"]
    assert next(row[-1] for row in rows if row[0] == "model.kind").endswith("recipes/digits.yaml:4:9")


def test_config_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "digits", "--json", "--launch.port=5"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["launch.port"] == {"value": 5, "from": "--launch.port"}
    assert shown["evaluation.every"]["value"] == "5 epochs"


def test_config_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check"]) == 0
    assert capsys.readouterr().out == "ok\n"
    assert main(["config", "check", "--optim.lr=x", "--optim.eps=y"]) == 2
    err = capsys.readouterr().err
    assert gives(err, "2 problems")
    assert gives(err, "--optim.lr: 'x'", 0)
    assert gives(err, "--optim.eps: 'y'", 0)


def test_config_notes_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "--run.epochs=2"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "ok\n"
    assert gives(captured.err, "run.epochs", "run.steps")


def test_config_schema_is_a_json_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["properties"]["run"]["$ref"] == "#/$defs/Run"


CUTS = [
    (("--ranks", "8", "--parallel.pipeline", "8"), "8 stages, but Transformer has 4 blocks; take at most that many"),
    (
        ("--ranks", "2", "--parallel.pipeline", "2", "--parallel.pipeline_parallel.split", "[blocks.9]"),
        "parallel.pipeline_parallel.split: blocks.9: name the first block of each of the 2 stages",
    ),
    (
        ("--ranks", "2", "--parallel.tensor", "2", "--parallel.tensor_parallel.plan", "{blocks.*.foo: colwise}"),
        "no module of the model is called blocks.*.foo",
    ),
]


@pytest.mark.parametrize(("words", "message"), CUTS)
def test_plan_checks_how_a_model_can_be_partitioned(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = run_lockstep("plan", "stdlib-lm", "--peak", "none", "--model.layers", "4", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


# --- without data and network -------------------------------------------------------------------------------------

FROM_THE_HUB = {
    "model": {"kind": "huggingface", "task": "causal-lm", "architecture": {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 512}},
    "data": {"train": {"kind": "huggingface", "name": "no/such-data", "tokenizer": "no/such-tokenizer", "packed": True,
                       "max_length": 128}},
    "batch": {"global_size": 8, "micro_size": 2},
    "run": {"steps": 50},
}  # fmt: skip


def test_a_plan_needs_no_data_if_the_config_has_the_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.core.hub._answers", lambda endpoint: pytest.fail("asked the hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (tmp_path / "hub.json").write_text(json.dumps(FROM_THE_HUB))
    assert main(["plan", str(tmp_path / "hub.json"), "--ranks", "4", "--peak", "none", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["steps"], result["samples"], result["tokens"]) == (50, 400, 400 * 128)
    assert result["parameters"] > 512 * 64
    assert (result["epoch_steps"], result["warnings"]) == (0, []), "the length is the config's: nothing is assumed"


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({}, (400, 128)),
        ({"run": {"tokens": 128_000}}, (1000, 128)),
        ({"run": {"samples": 77}}, (77, 128)),
        ({"run": {"epochs": 1}}, None),
        ({"data": {"train": {"kind": "tokens", "folder": "/no/such", "length": 64}}}, (400, 64)),
        ({"data": {"train": {"kind": "stdlib-text"}}}, None),
        ({"model": {"kind": "transformer"}}, None),
        ({"model": {"kind": "transformer", "vocabulary": 300}}, (400, 128)),
    ],
)
def test_facts_from_the_config_only(change: dict[str, Any], facts: tuple[int, int] | None) -> None:
    result = facts_of_config(validate({**FROM_THE_HUB, **change}).config)
    assert (None if result is None else (result.samples, result.tokens_per_sample)) == facts


@pytest.mark.parametrize("words", [("recipes",), ("config", "schema")])
def test_an_output_that_is_full_is_one_sentence(words: tuple[str, ...], tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", *words], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "No space left on device" in done.stderr


def test_bytes_of_a_command_line_that_are_no_text_are_refused(tmp_path: Path) -> None:
    done = run_lockstep("plan", "digits", "--run.folder=a\udcff", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("lockstep: --run.folder: ")
