"""Language models of Lockstep and of transformers generate text."""

from __future__ import annotations

import pytest
import torch
from kit.failures import fails, gives
from torch import nn

from lockstep.config.loading import validate
from lockstep.config.schema import HuggingFaceModel, TransformerModel
from lockstep.core.errors import RunFailed
from lockstep.core.records import DataFacts
from lockstep.models.build import build_model
from lockstep.models.generation import Sampling
from lockstep.models.generation import generate as generate_all
from lockstep.training.job import Job, run_job

GPT2 = HuggingFaceModel(
    kind="huggingface",
    task="causal-lm",
    architecture={"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 8},
)


def generate(model, prompt, tokens, **options):
    sampling = Sampling(**{name: options.pop(name) for name in Sampling._fields if name in options})
    return generate_all(model, [prompt], tokens, sampling, **options)[0]


class _NextIsOneMore(nn.Module):
    """A model that predicts t + 1 after t, and refuses windows of more than 4 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, tokens):
        assert tokens.shape[1] <= 4
        assert not self.training
        return nn.functional.one_hot((tokens + 1) % 10, 10) * 50.0


@pytest.mark.parametrize("choice", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 1, "temperature": 5.0}])
def test_the_most_likely_token_is_generated(choice):
    model = _NextIsOneMore()
    assert generate(model, [3], 9, context=4, **choice) == [4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert model.training


@pytest.mark.parametrize(
    "section",
    [
        TransformerModel(kind="transformer", layers=1, width=16, heads=2),
        GPT2,
    ],
    ids=["transformer", "gpt2"],
)
def test_draws_depend_only_on_the_seed(section):
    model = build_model(section, DataFacts(10, 8, vocabulary=40), 1)

    def drawn(seed):
        return generate(model, [1, 2, 3], 12, seed=seed)

    assert drawn(1) == drawn(1) != drawn(2)
    assert all(0 <= token < 40 for token in drawn(3))


def test_generation_stops_at_the_end_token():
    assert generate(_NextIsOneMore(), [3], 9, temperature=0, context=4, ends=[7]) == [4, 5, 6]
    model = build_model(GPT2, DataFacts(10, 8, vocabulary=40), 1)
    first, second, *_ = made = generate(model, [1, 2, 3], 5, temperature=0)
    assert generate(model, [1, 2, 3], 5, temperature=0, ends=[first]) == []
    assert generate(model, [1, 2, 3], 5, temperature=0, ends=[second]) == made[: made.index(second)]


def test_the_library_generates_what_forwards_on_whole_texts_do():
    model = build_model(GPT2, DataFacts(10, 8, vocabulary=40), 1)
    made = generate(model, [1, 2, 3], 5, temperature=0)
    assert made == generate(model, [1, 2, 3], 5, temperature=0, is_whole=False)
    model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(RunFailed, match="aren't finite"):
        generate(model, [1, 2, 3], 5, temperature=0)


def test_a_batch_of_prompts_is_continued_as_each_alone():
    model = build_model(GPT2, DataFacts(10, 8, vocabulary=40), 1)
    prompts = [[1, 2, 3], [7], [4, 5]]
    alone = [generate(model, prompt, 4, temperature=0) for prompt in prompts]
    end = alone[1][1]
    assert generate_all(model, prompts, 4, Sampling(0.0)) == alone
    expected = [row[: row.index(end)] if end in row else row for row in alone]
    assert generate_all(model, prompts, 4, Sampling(0.0), ends=[end]) == expected
    assert expected != alone


@pytest.mark.parametrize("model", [None, GPT2])
def test_top_p_draws_from_the_likeliest_tokens(model):
    probabilities = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    if model is None:
        model = _Diverged(probabilities[0].tolist())
    else:
        model = build_model(model, DataFacts(10, 8, vocabulary=4), 1)
        model.lm_head = nn.Linear(16, 4)
        nn.init.zeros_(model.lm_head.weight)
        model.lm_head.bias.data.copy_(probabilities[0])
    drawn = {
        share: {generate(model, [0], 1, top_p=share, seed=seed)[0] for seed in range(60)} for share in (0.4, 0.79, 1)
    }
    assert (drawn[0.4], drawn[0.79]) == ({0}, {0, 1})
    assert {0, 1, 2} <= drawn[1]


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(_NextIsOneMore(), [], 1)


class _Diverged(nn.Module):
    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, tokens):
        return self.logits.expand(1, tokens.shape[1], -1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logits", [[0.0, float("nan")], [0.0, float("inf")], [-float("inf")] * 2])
def test_logits_that_are_not_finite_are_refused(logits, temperature):
    with fails(RunFailed, "logits", "finite"):
        generate(_Diverged(logits), [0], 1, temperature=temperature)


def test_a_token_with_a_logit_of_minus_infinity_is_never_drawn():
    assert generate(_Diverged([0.0, -float("inf")]), [0], 3) == [0, 0, 0]


def test_a_failed_sample_text_does_not_fail_the_run(tmp_path):
    steps = {"run": {"steps": 1, "folder": str(tmp_path / "run")}, "launch": {"device": "cpu", "ranks": 1}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.models.generation.full_logits", lambda _: torch.full((1, 1, 2), torch.nan))
        config = validate({**TINY, **steps}).config
        assert run_job(Job(config, "diverged")).summary["steps"] == 1
    assert gives((tmp_path / "run" / "events.jsonl").read_text(), "logits", "finite")


TINY = {
    "model": {"kind": "transformer", "layers": 1, "width": 16, "heads": 2},
    "data": {"train": {"kind": "stdlib-text", "samples": 8}},
    "batch": {"global_size": 4},
    "optim": {"lr": 0.01},
    "evaluation": {"prompt": "def "},
}
