"""Quantized bases by bitsandbytes: the same run under each strategy that allows it, and the library's own numbers."""

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
from training.test_adapters import _attempts, logits, losses, of_llama
from training.test_adapters import adapted as narrow

import lockstep
from lockstep.cli.main import main
from lockstep.core.errors import ConfigError
from lockstep.loop.session import components_of
from lockstep.training.exporting import ExportArguments, export
from lockstep.training.finished_run import generate_text

pytest.importorskip("bitsandbytes")
CUT = 2


def adapted(**sections: Any) -> dict[str, Any]:
    """Return a run with matrices that bitsandbytes' kernels for CPUs take."""
    run = narrow(**sections)
    return {**run, "model": {**run["model"], "width": 64}}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=260, max_position_embeddings=64, **sizes))


def trained_logits(model: Any) -> torch.Tensor:
    """Return what the kernels of training give; those of an evaluation compute in bf16 on a CPU."""
    with torch.no_grad():
        found: torch.Tensor = model.train()(input_ids=torch.arange(32)[None]).logits
    return found


def quantized(kind: str, run: dict[str, Any]) -> dict[str, Any]:
    return {**run, "model": {**run["model"], "quantization": {"kind": kind}}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    llama().save_pretrained(folder)
    return folder


def by_hand(base: Path, kind: str) -> Any:
    """Return the model by transformers and peft, without Lockstep's code."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    how = BitsAndBytesConfig(
        load_in_4bit=kind == "nf4", load_in_8bit=kind == "int8", bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=how, dtype=torch.float32, device_map="cpu")
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_numbers_are_those_of_the_model_made_by_hand(kind: str, base: Path, tmp_path: Path) -> None:
    run = quantized(kind, of_llama(base, tmp_path))
    with lockstep.session(run) as session:
        model = components_of(session).sharding.state.model
        ours, adapter = trained_logits(model), dict(components_of(session).sharding.state.weights())
    hand = by_hand(base, kind)
    hand.get_base_model().load_state_dict(adapter, strict=False)
    assert torch.equal(ours, trained_logits(hand))
    plain = losses(of_llama(base, tmp_path))
    own = losses(run)
    assert own[0] != plain[0]
    assert own == pytest.approx(plain, rel=1e-2)


@pytest.mark.parametrize(
    ("kind", "names"), [("nf4", ["ddp", "fsdp", "pipeline-1f1b", "context"]), ("int8", ["ddp", "pipeline-1f1b"])]
)
def test_a_layout_is_the_single_process(kind: str, names: list[str]) -> None:
    runs = [quantized(kind, adapted(parallel=asking_for(name, 2))) for name in names]
    [expected] = recorded_all([quantized(kind, adapted())], 1, 3)
    for name, run in zip(names, recorded_all(runs, 2, 3), strict=True):
        assert differences(run, expected) == [], name


def test_the_library_still_needs_whole_blocks_on_a_cpu() -> None:
    import bitsandbytes.functional as functional

    torch.manual_seed(0)
    weight = torch.randn(64, 96)
    found = functional.dequantize_4bit(*functional.quantize_4bit(weight, quant_type="nf4"))
    assert (found - weight).abs().max() > 1, "mended: remove the refusal in models/adapters.py"
    with pytest.raises(ConfigError) as refused, lockstep.session(quantized("nf4", narrow())):
        pass
    assert gives(str(refused.value), "model.quantization.kind", "nf4", "32", "64", "int8")


@pytest.mark.parametrize(("kind", "name"), [("nf4", "fsdp"), ("int8", "ddp")])
def test_a_run_resumes_bit_for_bit(kind: str, name: str, tmp_path: Path) -> None:
    run = adapted(parallel=asking_for(name, 2), run={"steps": 4}, precision={"compute": "bf16"})
    run = quantized(kind, run)
    uncut, cut = f"{tmp_path}/uncut", f"{tmp_path}/cut"
    other = f"{tmp_path}/other"
    attempts = [(run, uncut, None), (run, cut, CUT), (run, other, CUT), (run, cut, None)]
    whole, half, _, rest = in_world(2, _attempts, attempts)[0]
    assert (half["from"], rest["from"]) == (None, CUT)
    assert rest["weights"] == whole["weights"]
    assert {name.split(".")[-3] for name in whole["names"]} == {"lora_A", "lora_B"}
    [alone] = in_world(1, _attempts, [({**run, "parallel": {}}, other, None)])[0]
    assert alone["from"] == CUT
    assert alone["names"] == whole["names"]


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_base_in_bf16_is_the_single_process(name: str) -> None:
    of_base = {"kind": "distill", "companion": "initial"}  # which is quantized, too
    sections = [{"precision": {"compute": "bf16"}, "objective": each} for each in ({}, of_base)]
    expected = recorded_all([quantized("nf4", adapted(**each)) for each in sections], 1, 3)
    runs = [quantized("nf4", adapted(**each, parallel=asking_for(name, 2))) for each in sections]
    for run, alone in zip(recorded_all(runs, 2, 3), expected, strict=True):
        assert run.losses == pytest.approx(alone.losses, rel=2e-3)


@pytest.mark.parametrize("kind", ["nf4", "int8", None])
def test_a_base_in_fp16_learns(kind: str | None, base: Path, tmp_path: Path) -> None:
    run = of_llama(base, tmp_path, "fp16")
    with lockstep.session(quantized(kind, run) if kind else run) as session:
        weights = dict(components_of(session).sharding.state.model.named_parameters())
        assert {each.dtype for name, each in weights.items() if name.endswith("norm.weight")} == {torch.float16}
        assert {each.dtype for each in weights.values() if each.requires_grad} == {torch.float32}
        reports = list(session)
    assert all(report.kept for report in reports)
    assert reports[0].loss == pytest.approx(losses(of_llama(base, tmp_path))[0], rel=2e-2)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_an_evaluated_run_trains_on_and_exports(kind: str, base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = quantized(kind, of_llama(base, folder))
    run["evaluation"] = {"every": "1 step"}
    run["run"]["steps"] = 3
    lockstep.train(run)
    evaluated = json.loads((folder / "summary.json").read_text())["evaluation"]["same"]["loss"]
    silent = {**run, "evaluation": {}, "run": {"steps": 3, "folder": str(tmp_path / "silent")}}
    lockstep.train(silent)  # an evaluation between updates changes nothing
    lora = "model/adapter_model.safetensors"
    assert (folder / lora).read_bytes() == (tmp_path / "silent" / lora).read_bytes()

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    made = export(folder, ExportArguments(to=tmp_path / "adapter"))
    assert (made.form, made.tensors) == ("peft", 2 * 2 * 7)
    hand = PeftModel.from_pretrained(by_hand(base, kind).unload(), str(tmp_path / "adapter"))
    assert export(folder, ExportArguments(to=tmp_path / "merged", merge=True)).form == "hf"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    plain = PeftModel.from_pretrained(llama(), str(tmp_path / "adapter"))
    assert not torch.equal(logits(merged), logits(plain))
    if kind == "nf4":  # int8 also rounds activations
        assert torch.allclose(trained_logits(merged), trained_logits(hand), atol=1e-5)
    code = main(["eval", str(folder), "--json"])
    assert code == 0
    assert evaluated > 0


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_text_is_generated_beside_the_values_that_were_trained_beside(
    kind: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bitsandbytes.functional as functional

    lockstep.train(quantized(kind, of_llama(base, tmp_path / "run")))
    used: list[Any] = []
    monkeypatch.setattr("lockstep.loop.text.continuations", lambda codec, model, *_: used.append(model))
    trust = {"trust_remote_code": False, "trust_run": True}
    generate_text(tmp_path / "run", ["def "], 4, (0.0, None, 1.0, 0), chat=False, tokenizer=None, **trust)
    for name in ("q_proj", "o_proj"):
        layer = by_hand(base, kind).get_base_model().model.layers[1].self_attn.get_submodule(name).base_layer
        if kind == "nf4":
            expected = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        else:
            expected = functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
        found = used[0].model.layers[1].self_attn.get_submodule(name)
        assert torch.allclose(found.base_layer.weight, expected.float(), atol=1e-6)
        assert found.lora_B["default"].weight.any()


def test_the_plan_counts_half_a_byte_a_weight(capsys: pytest.CaptureFixture[str]) -> None:
    llama2 = "{model_type: llama, vocab_size: 32000}"
    words = [
        "plan",
        "llama2-lora-wikitext",
        "--run.steps",
        "10",
        "--model.pretrained",
        "null",
        "--parallel.strategy",
        "single",
    ]
    assert main([*words, "--model.architecture", llama2, "--model.quantization", "{kind: nf4}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 6_738_415_616 + 39_976_960


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [("zero3", "nf4", ["nf4 base", "fsdp"]), ("fsdp", "int8", ["int8 base", "nf4"]), ("tensor", "nf4", ["adapters"])],
)
def test_where_it_does_not_work_it_is_refused(name: str, kind: str, said: list[str]) -> None:
    from lockstep.plan.features import cell
    from lockstep.strategies.registry import layouts

    found = cell(layouts()[name], f"{kind} base" if "base" in said[0] else said[0])
    assert found.standing == "refused"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"adapter": None}, ["quantization", "adapter"]),
        ({"adapter": {"kind": "lora", "use_dora": True}}, ["quantization", "use_dora: false"]),
        ({"quantization": {"kind": "fp4"}}, ["model.quantization.kind", "fp4", "nf4"]),
    ],
)
def test_what_cannot_be_quantized_is_refused(model: dict[str, Any], said: list[str]) -> None:
    run = quantized("nf4", adapted())
    run["model"].update(model)
    with pytest.raises(ConfigError) as refused, lockstep.session(run):
        pass
    assert gives(str(refused.value), *said)


def test_another_companion_is_refused() -> None:
    run = quantized("nf4", adapted(objective={"kind": "distill", "companion": "teacher"}))
    with pytest.raises(ConfigError) as refused, lockstep.session(run):
        pass
    assert gives(str(refused.value), "model.quantization", "companion")
