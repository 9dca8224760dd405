"""Which updates are traced: from a config, after a resume, and on request."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from lockstep.config.training_sections import ProfileConfig
from lockstep.monitor.trace_requests import Span, includes, next_free, span_of


@pytest.mark.parametrize(
    ("config", "span"),
    [
        ({}, None),
        ({"steps": 10}, Span(10, 10, 1)),
        ({"steps": "10..13"}, Span(10, 13, 1)),
        ({"steps": "10..13", "warmup": 2}, Span(10, 13, 2)),
        ({"steps": "1..2"}, Span(1, 2, 0)),  # nothing comes before the first update
    ],
)
def test_the_trace_of_a_config(config: dict[str, object], span: Span | None) -> None:
    assert span_of(ProfileConfig.model_validate(config)) == span


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"steps": "13..10"}, "steps 13..10 is empty"),
        ({"steps": "0..2"}, "steps 0..2 is empty"),
        ({"steps": "ten"}, "no range of updates such as 10..13"),
        ({"ranks": ()}, "ranks is empty"),
    ],
)
def test_wrong_configs(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ProfileConfig.model_validate(config)


@pytest.mark.parametrize(
    ("next_update", "left"),
    [(1, Span(10, 13, 1)), (9, Span(10, 13, 1)), (10, Span(10, 13, 0)), (12, Span(12, 13, 0)), (14, None)],
)
def test_a_resumed_run_records_what_is_left(next_update: int, left: Span | None) -> None:
    assert Span(10, 13, 1).resumed(next_update) == left


@pytest.mark.parametrize(
    ("planned", "expected"),
    [
        ([], Span(24, 26, 1)),
        ([Span(10, 13, 1)], Span(24, 26, 1)),
        ([Span(24, 24, 1)], Span(26, 28, 1)),
        ([Span(28, 30, 1), Span(24, 26, 1)], Span(32, 34, 1)),
    ],
)
def test_a_request_waits_for_what_is_planned(planned: list[Span], expected: Span) -> None:
    assert next_free(20, ProfileConfig(steps="1..3"), planned) == expected


def test_requests_pass_as_json() -> None:
    request = ProfileConfig(steps="1..3", ranks=(0, 3), flops=True)
    assert ProfileConfig.model_validate_json(request.model_dump_json()) == request
    assert includes(ProfileConfig(ranks="all"), 7)
    assert not includes(ProfileConfig(), 1)
