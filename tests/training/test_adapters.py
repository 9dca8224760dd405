"""Adapters by peft: the same run under every strategy, checkpoints of what is trained only, exports that peft loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.failures import gives
from kit.layouts import asking_for
from kit.runs import differences, recorded_all
from kit.worlds import in_world
from torch import nn
from training.test_same_run import config

import lockstep
from lockstep.assembly.adapters import base_of
from lockstep.cli.main import main
from lockstep.config.schema import GivenModel
from lockstep.core.errors import ConfigError
from lockstep.distributed.collectives import LocalGroup
from lockstep.loop.session import components_of
from lockstep.models.adapters import seen_through
from lockstep.training.exporting import ExportArguments, export
from lockstep.training.finished_run import evaluate_run, generate_text

LORA = {"kind": "lora", "rank": 4, "alpha": 8}
KINDS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "gaussian rslora and a whole module": {
        **LORA, "use_rslora": True, "init_lora_weights": "gaussian", "modules_to_save": ["norm"], "targets": ["query"],
    },
    "dora": {**LORA, "use_dora": True},
    "ia3": {"kind": "ia3", "targets": ["query", "value"], "feedforward_modules": []},
}  # fmt: skip


def adapted(kind: str = "lora", **sections: Any) -> dict[str, Any]:
    found = config(13, 3, **sections)
    return {**found, "model": {**found["model"], "adapter": KINDS[kind]}}


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero3", "pipeline-1f1b"])
def test_every_kind_is_the_single_process(name: str) -> None:
    """Other layouts: test_features."""
    runs = [adapted(kind, parallel=asking_for(name, 2)) for kind in KINDS]
    plain = [adapted(kind) for kind in KINDS]
    for kind, run, expected in zip(KINDS, recorded_all(runs, 2, 3), recorded_all(plain, 1, 3), strict=True):
        assert differences(run, expected) == [], kind


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero2", "pipeline-1f1b"])
def test_a_base_in_bf16_is_the_single_process(name: str) -> None:
    bf16 = {"precision": {"compute": "bf16"}}
    [expected] = recorded_all([adapted(**bf16)], 1, 3)
    [run] = recorded_all([adapted(**bf16, parallel=asking_for(name, 2))], 2, 3)
    assert run.losses == pytest.approx(expected.losses, rel=2e-3)
    assert run.weights.keys() == expected.weights.keys()


# --- checkpoints --------------------------------------------------------------------------------------------------

CUT = 2


def _attempt(config: dict[str, Any], folder: str, until: int | None) -> dict[str, Any]:
    """Train from the checkpoint in a folder, if any, until a step, and save."""
    with lockstep.session(config) as session:
        saves = session.checkpoints(folder)
        for report in session:
            if report.step == until:
                break
        saves.save()
        assert all(ended.failure is None for ended in saves.finish())
        names = {name.removeprefix("model.") for name in session.state().tensors if name.startswith("model.")}
        weights = {name: value.numpy().tobytes() for name, value in components_of(session).sharding.state.weights()}
        return {"names": names, "weights": weights, "from": saves.resumed_from}


def _attempts(runs: list[tuple[dict[str, Any], str, int | None]]) -> list[dict[str, Any]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        return [_attempt(*run) for run in runs]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero3", "pipeline-1f1b"])
def test_a_run_resumes_bit_for_bit_and_under_other_strategies(name: str, tmp_path: Path) -> None:
    dropout = {**LORA, "dropout": 0.25}
    run = adapted(parallel=asking_for(name, 2), run={"steps": 4}, precision={"compute": "bf16"})
    run["model"]["adapter"] = dropout
    uncut, cut = f"{tmp_path}/uncut", f"{tmp_path}/cut"
    whole, half, other, rest = in_world(
        2, _attempts, [(run, uncut, None), (run, cut, CUT), (run, f"{tmp_path}/other", CUT), (run, cut, None)]
    )[0]
    assert (half["from"], rest["from"]) == (None, CUT)
    assert rest["weights"] == whole["weights"]
    assert {name.split(".")[-3] for name in other["names"]} == {"lora_A", "lora_B"}
    [alone] = in_world(1, _attempts, [({**run, "parallel": {}}, f"{tmp_path}/other", None)])[0]
    assert alone["from"] == CUT
    assert alone["names"] == whole["names"]


# --- models of the transformers library ---------------------------------------------------------------------------


def llama(seed: int = 0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=260, max_position_embeddings=64, **sizes))


def of_llama(base: Path, folder: Path, compute: str = "fp32", **sections: Any) -> dict[str, Any]:
    text = {"kind": "stdlib-text", "length": 16, "samples": 40}
    return {
        "model": {"kind": "huggingface", "task": "causal-lm", "pretrained": str(base), "adapter": LORA},
        "data": {"train": text, "evaluation": {"same": text}},
        "batch": {"global_size": 8},
        "optim": {"lr": 0.05},
        "launch": {"device": "cpu"},
        "precision": {"compute": compute},
        "evaluation": {"prompt": "def "},
        "monitor": {"tensorboard": False, "progress": "none"},
        "run": {"steps": 2, "folder": str(folder)},
        **sections,
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    run = of_llama(base, folder, "bf16")
    run["model"]["adapter"] = {**LORA, "modules_to_save": ["lm_head"], "dropout": 0.1}
    lockstep.train(run)
    return folder


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(32)[None]).logits
    return found


def of_peft(base: Path, folder: Path) -> nn.Module:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))


def losses(config: dict[str, Any], **objects: Any) -> list[float]:
    with lockstep.session(config, **objects) as session:
        return [report.loss for report in session]


def test_the_first_loss_is_the_bases_and_peft_trains_alike(base: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    run = of_llama(base, tmp_path)
    plain = {**run, "model": {**run["model"], "adapter": None}}
    own = losses(run)
    assert own[0] == losses(plain)[0]
    assert own[1] < own[0]
    model = get_peft_model(llama(), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    with lockstep.session(run) as session:  # the same values
        initial = dict(components_of(session).sharding.state.weights())
    model.get_base_model().load_state_dict(initial, strict=False)
    given = {key: value for key, value in run.items() if key != "model"}
    assert losses(given, model=model) == own


def test_an_export_loads_in_peft_and_merged_without(trained: Path, base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    left = {"XXH128SUMS", "adapter_config.json", "adapter_model.safetensors"}
    assert {file.name for file in (trained / "model").iterdir()} == left
    made = export(trained, ExportArguments(to=tmp_path / "adapter"))
    assert (made.form, made.tensors) == ("peft", 2 * 2 * 7 + 1)
    one, other = logits(of_peft(base, tmp_path / "adapter")), logits(of_peft(base, trained / "model"))
    assert torch.equal(one, other)
    assert not torch.equal(one, logits(AutoModelForCausalLM.from_pretrained(base)))
    assert export(trained, ExportArguments(to=tmp_path / "merged", merge=True)).form == "hf"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(merged), one, atol=1e-5)


def test_what_a_run_leaves_is_evaluated_and_generates(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, metrics = evaluate_run(trained, None, trust_remote_code=False, trust_run=True)
    ended = json.loads((trained / "summary.json").read_text())["evaluation"]
    assert code == 0
    assert metrics == ended
    trust = {"trust_remote_code": False, "trust_run": True}
    sampling = (0.0, None, 1.0, 0)
    [text] = generate_text(trained, ["def "], 4, sampling, chat=False, tokenizer=None, **trust)
    assert isinstance(text, str)
    for command in ("show", "verify", "diff"):
        assert main(["ckpt", command, str(trained), *([str(trained)] if command == "diff" else [])]) == 0


def test_a_new_head_of_a_classifier_is_trained_and_saved() -> None:
    bert = {"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
    architecture = {**bert, "num_attention_heads": 4, "max_position_embeddings": 64}
    model = {"kind": "huggingface", "task": "sequence-classification", "architecture": architecture, "adapter": LORA}
    run = {
        "model": {
            **model,
            "architecture": {**architecture, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
        },
        "data": {"train": {"kind": "stdlib-functions", "split": "train", "length": 32}},
        "batch": {"global_size": 8},
        "precision": {"compute": "fp32"},
        "run": {"steps": 2},
    }
    [expected] = recorded_all([run], 1, 2)
    assert {name for name in expected.weights if "lora" not in name} == {
        f"classifier.modules_to_save.default.{name}" for name in ("weight", "bias")
    }
    [sharded] = recorded_all([{**run, "parallel": asking_for("fsdp", 2)}], 2, 2)
    assert differences(sharded, expected) == []


def test_an_adapter_is_continued(trained: Path, base: Path, tmp_path: Path) -> None:
    run = of_llama(base, tmp_path)
    run["model"]["adapter"] = {**LORA, "modules_to_save": ["lm_head"]}
    run["model"]["init_from"] = str(trained / "model")
    with lockstep.session(run) as session:
        continued = logits(components_of(session).sharding.state.model)
    assert torch.equal(continued, logits(of_peft(base, trained / "model")))


def test_an_adapter_that_has_changed_its_base_is_not_continued(base: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights="pissa")
    get_peft_model(llama(), lora).save_pretrained(tmp_path / "pissa")
    run = of_llama(base, tmp_path)
    run["model"]["init_from"] = str(tmp_path / "pissa")
    with pytest.raises(ConfigError) as refused, lockstep.session(run):
        pass
    assert gives(str(refused.value), "model.init_from", "init_lora_weights", "pissa")


def test_an_adapter_is_not_the_base(trained: Path) -> None:
    from peft import LoraConfig, get_peft_model

    section = GivenModel(kind="given", init_from=str(trained / "model"))
    bases = []
    for seed in (0, 1):
        model = seen_through(get_peft_model(llama(seed), LoraConfig(r=4, target_modules=["q_proj"])))
        bases.append(base_of(section, model, LocalGroup()))
    assert bases[0] is not None
    assert bases[0]["repository"] is None
    assert bases[0] != bases[1]


def test_a_changed_base_is_refused(base: Path, tmp_path: Path) -> None:
    place = tmp_path / "base"
    llama(1).save_pretrained(place)
    lockstep.train(of_llama(place, tmp_path / "run"))
    llama(2).save_pretrained(place)
    with pytest.raises(ConfigError) as refused:
        lockstep.train(of_llama(place, tmp_path / "run", run={"steps": 3, "folder": str(tmp_path / "run")}))
    assert gives(str(refused.value), "base", str(place), str(place))


def test_a_peft_model_is_seen_through(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj"]))
    run = of_llama(tmp_path, tmp_path / "run")
    del run["model"], run["evaluation"]
    before = logits(model).clone()
    lockstep.train(run, model=model)
    assert not torch.equal(logits(model), before)
    with pytest.raises(ConfigError) as refused:
        lockstep.train({**run, "model": {"kind": "given", "adapter": LORA}}, model=model)
    assert gives(str(refused.value), "model.adapter")
    made = export(tmp_path / "run", ExportArguments(to=tmp_path / "adapter"))
    assert (made.form, made.tensors) == ("peft", 4)
    llama().save_pretrained(tmp_path / "base")
    assert torch.equal(logits(of_peft(tmp_path / "base", tmp_path / "adapter")), logits(model))


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ({"kind": "prompt-tuning"}, ["model.adapter.kind", "prompt-tuning", "lora"]),
        ({"kind": "lora", "rnak": 4}, ["model.adapter.rnak", "rank"]),
        ({"kind": "lora", "init_lora_weights": "pissa"}, ["model.adapter.init_lora_weights", "pissa", "gaussian"]),
        ({"kind": "lora", "targets": ["q_prj"]}, ["model.adapter.targets", "q_prj"]),
        ({"kind": "ia3"}, ["model.adapter.targets"]),
    ],
)
def test_what_is_no_adapter_is_refused(adapter: dict[str, Any], said: list[str]) -> None:
    run = adapted()
    run["model"]["adapter"] = adapter
    with pytest.raises(ConfigError) as refused, lockstep.session(run):
        pass
    assert gives(str(refused.value), *said)


def test_a_frozen_dtype_that_has_no_effect_is_refused() -> None:
    for sections in ({"compute": "fp32", "frozen": "bf16"}, {"compute": "fp16", "frozen": "bf16"}):
        with pytest.raises(ConfigError) as refused, lockstep.session(adapted(precision=sections)):
            pass
        assert gives(str(refused.value), "bf16")
        assert "frozen" in str(refused.value)


def test_a_learned_prompt_is_refused() -> None:
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    run = of_llama(Path(), Path())
    del run["model"], run["evaluation"]
    with pytest.raises(ConfigError) as refused, lockstep.session(run, model=model):
        pass
    assert gives(str(refused.value), "model", "prompt", "LoRA")
