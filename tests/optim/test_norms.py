"""Gradient norms are exact enough for clipping, and clipping is the same as torch's."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep.config.schema import Optim
from lockstep.optim.groups import parameter_groups
from lockstep.optim.norms import clip_divisor, squared_norm
from lockstep.optim.optimizers import build_optimizer


def exact(grads):
    return sum(float((grad.double() ** 2).sum()) for grad in grads)


@pytest.mark.parametrize(
    "shapes",
    [
        [(64, 64), (64,), (3, 64), (3,)],  # few and small
        [(300, 200), (4096,), (8192,), (4097,), (5,), ()],  # rows, remainders, scalars
        [(1000, 4000)],
    ],
)
def test_squared_norm_is_exact_to_single_precision(shapes):
    torch.manual_seed(0)
    grads = [torch.randn(shape) for shape in shapes]
    squared = squared_norm(grads)
    assert squared.shape == ()
    assert squared.dtype is torch.float32
    assert float(squared) == pytest.approx(exact(grads), rel=5e-7)


def test_many_equal_elements_do_not_drift():
    """Equal summands round the same way each time: the worst case."""
    grads = [torch.full((4096, 2048), 0.1)]
    assert float(squared_norm(grads)) == pytest.approx(exact(grads), rel=1e-6)
    few = [torch.full((16_000,), 0.1)]
    assert float(squared_norm(few)) == pytest.approx(exact(few), rel=2e-5)


def test_many_elements_do_not_get_lost():
    """torch's own sums of squares stop growing at 2^24 x the width of its registers."""
    assert float(squared_norm([torch.ones(30_000_000)])) == pytest.approx(30_000_000, rel=1e-6)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=6), st.integers(1, 8))
def test_squared_norms_of_shards_sum_to_that_of_the_whole(sizes, ranks):
    grads = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in sizes]
    shards = [[part for grad in grads if (part := grad.tensor_split(ranks)[rank]).numel()] for rank in range(ranks)]
    summed = sum(float(squared_norm(shard)) for shard in shards)
    assert summed == pytest.approx(float(squared_norm(grads)), rel=1e-6)


@pytest.mark.parametrize("size", [4, 100_000])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_nonfinite_element_makes_the_norm_nonfinite(size, bad):
    grads = [torch.ones(size), torch.ones(3)]
    for index in range(2):
        nonfinite = [grad.clone() for grad in grads]
        nonfinite[index][-1] = bad
        assert not math.isfinite(squared_norm(nonfinite))


def test_other_precisions_layouts_and_an_empty_list():
    low = [torch.full((300, 300), 0.1, dtype=torch.bfloat16), torch.ones(7)]
    assert squared_norm(low).dtype is torch.float32
    assert float(squared_norm(low)) == pytest.approx(exact(low), rel=1e-6)
    double = [torch.ones(5, dtype=torch.float64), torch.ones(5)]
    assert squared_norm(double).dtype is torch.float64
    assert float(squared_norm([torch.randn(500, 300).T.fill_(2.0)])) == 600_000
    assert float(squared_norm([])) == 0


def test_the_norm_of_a_single_tensor():
    norms = [float(squared_norm([grad]).double().sqrt()) for grad in (torch.tensor([3.0, 4.0]), torch.ones(10_000))]
    assert norms == pytest.approx([5.0, 100.0])


@pytest.mark.parametrize("clip", [0.5, 100.0])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_clipping_is_the_same_as_torchs(clip, as_tensor):
    """Compare one divisor for loss scale and clipping with unscaling, clip_grad_norm_ and a plain step."""
    torch.manual_seed(0)
    model = nn.Linear(20, 30)
    reference = nn.Linear(20, 30)
    reference.load_state_dict(model.state_dict())
    optim = Optim(name="sgd", momentum=0.0, weight_decay=0.0)
    optimizer = build_optimizer(optim, parameter_groups(model.named_parameters(), optim))
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        expected.grad = torch.randn_like(expected)
        parameter.grad = expected.grad * 1024.0
    norm = squared_norm([parameter.grad for parameter in model.parameters()]).double().sqrt() / 1024.0
    total = nn.utils.clip_grad_norm_(reference.parameters(), clip)
    assert float(norm) == pytest.approx(float(total), rel=1e-6)
    scale = torch.tensor(1024.0) if as_tensor else 1024.0
    optimizer.update(1.0, clip_divisor(norm if as_tensor else float(norm), clip, scale), True)
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=1e-6)


def test_gradients_below_the_clip_norm_are_not_clipped():
    assert clip_divisor(10.0, None, 4.0) == 4.0
    assert clip_divisor(0.5, 1.0, 4.0) == 4.0
    assert clip_divisor(2.0, 1.0, 4.0) == pytest.approx(8.0)
    assert float(clip_divisor(torch.tensor(0.5), 1.0, 4.0)) == 4.0
    assert math.isfinite(clip_divisor(0.0, 1.0, 1.0))
