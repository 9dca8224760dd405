"""Models of transformers train in each task, have keyed values, and are refused with a remedy."""

from __future__ import annotations

import argparse
import json
import logging

import pytest
import torch
from kit.failures import fails, gives
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from lockstep.config.schema import HuggingFaceModel, ObjectiveConfig
from lockstep.core.errors import ConfigError
from lockstep.core.records import Batch, DataFacts
from lockstep.models.blocks import repeated_blocks
from lockstep.models.build import build_meta_model, build_model, describe_model, parameter_facts
from lockstep.models.building_objectives import build_objective, coupling
from lockstep.models.heads import head_of, preparation

FACTS = DataFacts(100, 16, vocabulary=60, classes=3)
SMALL = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2}
BERT = {"model_type": "bert", **SMALL}
LLAMA = {"model_type": "llama", "num_key_value_heads": 1, **SMALL}
T5 = {"model_type": "t5", "num_layers": 2, "d_model": 16, "num_heads": 2, "d_ff": 32, "d_kv": 8}
BART = {"model_type": "bart", "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
BART |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
MODELS = [
    pytest.param("causal-lm", GPT2, id="gpt2"),
    pytest.param("causal-lm", LLAMA, id="llama"),
    pytest.param("masked-lm", BERT, id="bert"),
    pytest.param("seq2seq", T5, id="t5"),
    pytest.param("seq2seq", BART, id="bart"),
    pytest.param("sequence-classification", BERT, id="bert-classifier"),
    pytest.param("sequence-classification", {**GPT2, "pad_token_id": 0}, id="gpt2-classifier"),
]


def _section(task, architecture=None, **more):
    return HuggingFaceModel(kind="huggingface", task=task, architecture=architecture, **more)


def _batch(task):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 60, (4, 10), generator=generator)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if task == "sequence-classification":
        return Batch(inputs, torch.tensor([0, 1, 2, 1]), 4, 40)
    if task == "seq2seq":
        targets = tokens.flip(1)
        targets[0, 7:] = -100
        return Batch({**inputs, "labels": targets}, targets, 4, 40)
    return Batch(inputs, tokens, 4, 40)


@pytest.mark.parametrize(("task", "architecture"), MODELS)
def test_a_few_steps_lower_the_loss(task, architecture):
    section = _section(task, architecture)
    model = build_model(section, FACTS, 1)
    objective = build_objective(ObjectiveConfig(), section, FACTS)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    batch, losses = _batch(task), []
    for _ in range(8):
        loss = objective.loss_sum(model(**batch.inputs), batch) / objective.count(batch)
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    assert coupling(model) is None


@pytest.mark.parametrize(("task", "architecture"), MODELS)
def test_planning_has_the_same_parameters(task, architecture):
    section = _section(task, architecture, freeze=("*norm*", "*ln_*") if "gpt2" in str(architecture) else ())
    if section.freeze:
        section = section.model_copy(update={"freeze": ("*ln_*",)})
    assert describe_model(section, FACTS) == parameter_facts(build_model(section, FACTS, 1))


def test_values_are_keyed_by_name():
    models = [build_model(_section("causal-lm", {**GPT2, "n_layer": layers}), FACTS, 1) for layers in (2, 2, 3)]
    first, again, deeper = (dict(model.named_parameters()) for model in models)
    torch.rand(3)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert torch.equal(first["transformer.h.1.attn.c_attn.weight"], deeper["transformer.h.1.attn.c_attn.weight"])
    assert not torch.equal(first["transformer.h.0.attn.c_attn.weight"], first["transformer.h.1.attn.c_attn.weight"])
    scale = first["transformer.h.0.attn.c_proj.weight"].std() / first["transformer.h.0.attn.c_attn.weight"].std()
    assert 0.4 < scale < 0.6  # transformers' own rule: 1/sqrt(2 layers)


def test_the_config_adopts_vocabulary_and_classes_of_the_data():
    model = build_model(_section("sequence-classification", BERT), FACTS, 1)
    assert model.config.num_labels == 3
    assert model.config.vocab_size == 60
    assert model.config.use_cache is False
    assert model.training
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


def test_decoder_inputs_are_the_labels_shifted_right():
    model = build_model(_section("seq2seq", T5), FACTS, 1).eval()
    batch = _batch("seq2seq")
    shifted = torch.zeros_like(batch.targets)
    shifted[:, 1:] = batch.targets[:, :-1].clamp(min=0)
    prepare = preparation(head_of(model), with_labels=False)
    prepared = prepare(batch)
    assert torch.equal(prepared.inputs["decoder_input_ids"], shifted)
    assert "labels" not in prepared.inputs
    assert prepare(prepared).inputs.keys() == prepared.inputs.keys()
    assert "labels" in batch.inputs


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    model = build_model(_section("masked-lm", BERT), FACTS, 5)
    model.save_pretrained(folder)
    return folder, model.state_dict()


def test_pretrained_weights_are_loaded_and_a_new_head_is_keyed(saved, caplog):
    folder, state = saved
    section = _section("sequence-classification", pretrained=str(folder))
    with caplog.at_level(logging.WARNING):
        first = build_model(section, FACTS, 1)
    assert "classifier.weight" in caplog.text
    torch.rand(5)
    again, other = build_model(section, FACTS, 1), build_model(section, FACTS, 2)
    assert torch.equal(first.classifier.weight, again.classifier.weight)
    assert not torch.equal(first.classifier.weight, other.classifier.weight)
    assert torch.equal(first.bert.pooler.dense.weight, again.bert.pooler.dense.weight)
    shared = [name for name in first.state_dict() if name in state]
    assert len(shared) > 20
    assert all(torch.equal(first.state_dict()[name], state[name]) for name in shared)


def _edited(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _with(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def _index(folder, prefix):
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    names = dict.fromkeys(
        load_file(folder.parent / "model.safetensors"), f"{prefix or folder.parent}/model.safetensors"
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def _as_torch(folder, **more):
    torch.save({**load_file(folder / "model.safetensors"), **more}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _cut(folder):
    _as_torch(folder)
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-500])


UP = "model.layers.0.mlp.up_proj.weight"
DEFECTS = {
    "another shape": (lambda f: _edited(f, lambda t: t.update({UP: torch.ones(40, 16)})),
                      rf"{UP} \[40, 16\] where the model has \[32, 16\]"),
    "a tensor of a layer too few": (lambda f: _edited(f, lambda t: t.pop(UP)), rf"missing: {UP} \[32, 16\]"),
    "one too many": (lambda f: _edited(f, lambda t: t.update({"model.layers.0.extra": torch.ones(4)})),
                     r"unexpected: model\.layers\.0\.extra \[4\]"),
    "a layer too many": (lambda f: _with(f, num_hidden_layers=1), r"unexpected: model\.layers\.1\..* and 3 more"),
    "a layer too few": (lambda f: _with(f, num_hidden_layers=3, layer_types=None), r"missing: model\.layers\.2\."),
    "an index to the parent": (lambda f: _index(f, ".."), r"names a file \.\./model.safetensors that"),
    "an index to a place": (lambda f: _index(f, None), r"names a file /.*/model.safetensors that isn't in the same"),
    "an object": (lambda f: _as_torch(f, args=argparse.Namespace()), "needs argparse.Namespace to be unpickled"),
    "cut": (_cut, "it is cut"),
    "integers": (lambda f: _edited(f, lambda t: t.update({UP: t[UP].to(torch.int8)})), f"{UP} is torch.int8"),
    "a quantized config": (lambda f: _with(f, quantization_config={"quant_method": "gptq", "bits": 4}), "is quantized"),
}  # fmt: skip


@pytest.mark.parametrize("build", [build_model, build_meta_model])
@pytest.mark.parametrize("defect", DEFECTS)
def test_pretrained_weights_that_do_not_fit_are_refused(defect, build, tmp_path):
    (folder := tmp_path / "saved").mkdir()
    build_model(_section("causal-lm", LLAMA), FACTS, 5).save_pretrained(folder)
    spoil, reason = DEFECTS[defect]
    spoil(folder)
    section = _section("causal-lm", pretrained=str(folder))
    with pytest.raises(ConfigError, match=rf"(?s)model\.pretrained: .*{reason}") as refused:
        build(section, FACTS, 1) or build_model(section, FACTS, 1)  # without a meta model, a run builds the other
    assert "weights_only=True" not in str(refused.value)


def test_init_partial_allows_layers_that_differ(tmp_path, caplog):
    build_model(_section("causal-lm", LLAMA), FACTS, 5).save_pretrained(tmp_path)
    _with(tmp_path, num_hidden_layers=1)
    with caplog.at_level(logging.WARNING):
        build_model(_section("causal-lm", pretrained=str(tmp_path), init_partial=True), FACTS, 1)
    assert "unexpected: model.layers.1." in caplog.text


def test_buffers_that_models_once_saved_are_ignored(tmp_path, caplog):
    build_model(_section("causal-lm", LLAMA), FACTS, 5).save_pretrained(tmp_path)
    _edited(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    section = _section("causal-lm", pretrained=str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert build_meta_model(section, FACTS, 1) is not None
        build_model(section, FACTS, 1)
    assert caplog.text == ""


def test_a_model_of_masked_texts_is_no_causal_one(saved):
    folder, _ = saved
    for section in (_section("causal-lm", pretrained=str(folder)), _section("causal-lm", BERT)):
        with fails(ConfigError, "bert", "masked-lm", "architecture.is_decoder: true", key="model.task"):
            build_model(section, FACTS, 1)
    build_model(_section("causal-lm", {**BERT, "is_decoder": True}), FACTS, 1)
    build_model(_section("causal-lm", BART), FACTS, 1)


@pytest.mark.parametrize(
    ("name", "reason"), [("adapter_config.json", "merge_and_unload"), ("checkpoint-5", "name one")]
)
def test_folders_without_a_model_say_what_they_are(tmp_path, name, reason):
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=rf"model\.pretrained: .*{reason}"):
        build_model(_section("causal-lm", pretrained=str(tmp_path)), FACTS, 1)


def test_new_tokens_of_the_data_get_rows_in_the_embedding(saved, caplog):
    folder, state = saved
    section = _section("masked-lm", pretrained=str(folder))
    facts = DataFacts(100, 16, vocabulary=63)
    with caplog.at_level(logging.WARNING):
        model, again = build_model(section, facts, 1), build_model(section, facts, 1)
    assert gives(caplog.text, 63, 60)
    rows = model.get_input_embeddings().weight
    assert rows.shape == (63, 16)
    assert torch.equal(rows[:60], state["bert.embeddings.word_embeddings.weight"])
    assert torch.equal(rows, again.get_input_embeddings().weight)
    assert describe_model(section, facts) == parameter_facts(model)


@pytest.mark.parametrize(
    ("section", "facts", "message"),
    [
        (
            _section("causal-lm", {**GPT2, "n_layers": 3}),
            FACTS,
            "architecture.n_layers: gpt2 has no such key; did you mean n_layer",
        ),
        (_section("masked-lm", {"model_type": "brt"}), FACTS, "no type 'brt'; did you mean bert"),
        (_section("masked-lm", GPT2), FACTS, "model.task: gpt2 has no model for masked-lm"),
        (_section("masked-lm", {**BERT, "vocab_size": 20}), FACTS, "vocab_size: 20 is too few: the data has 60"),
        (_section("masked-lm", {**BERT, "hidden_size": 15}), FACTS, "architecture: transformers refuses it"),
        (_section("sequence-classification", GPT2), FACTS, "pad_token_id: a classifier of type gpt2"),
        (
            _section("sequence-classification", BERT),
            DataFacts(1, 1, vocabulary=9),
            "classes: the data doesn't determine",
        ),
        (_section("sequence-classification", BERT, classes=2), FACTS, "classes: 2 is too few: the data has 3"),
    ],
)
def test_contradictions_are_refused(section, facts, message):
    with pytest.raises(ConfigError, match=message):
        build_model(section, facts, 1)


def test_a_name_that_is_not_cached_is_refused_with_the_command_to_fetch(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="lockstep data fetch"):
        build_model(_section("masked-lm", pretrained="nobody/nothing-here"), FACTS, 1)


def test_code_of_pretrained_weights_needs_trust_remote_code(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}')
    (tmp_path / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ConfigError, match="--trust-remote-code"):
        build_model(_section("masked-lm", pretrained=str(tmp_path)), FACTS, 1)


@pytest.mark.parametrize(
    ("task", "architecture", "expected"),
    [
        ("causal-lm", GPT2, ["transformer.h.0", "transformer.h.1"]),
        ("causal-lm", LLAMA, ["model.layers.0", "model.layers.1"]),
        ("masked-lm", BERT, ["bert.encoder.layer.0", "bert.encoder.layer.1"]),
        ("seq2seq", T5, ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]),
    ],
    ids=["gpt2", "llama", "bert", "t5"],
)
def test_the_blocks_of_each_architecture(task, architecture, expected):
    assert repeated_blocks(build_model(_section(task, architecture), FACTS, 1)) == expected


def test_a_balancing_loss_does_not_decompose():
    mixtral = {"model_type": "mixtral", "num_local_experts": 2, "num_key_value_heads": 1, **SMALL}
    model = build_model(_section("causal-lm", {**mixtral, "output_router_logits": True}), FACTS, 1)
    assert "balancing loss" in coupling(model)
    assert coupling(build_model(_section("causal-lm", mixtral), FACTS, 1)) is None
