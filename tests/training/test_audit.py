"""A ledger records which samples a run has had, through kills and other ranks; the audit notices every wrong one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit import small
from kit.failures import fails
from kit.worlds import in_world

import lockstep
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.reading import read_manifest
from lockstep.checkpoint.storage import names_by_step
from lockstep.core.errors import VerificationError
from lockstep.core.progress import Progress
from lockstep.data.order import MODULUS, SampleOrder, digest
from lockstep.loop.ledger import Audit, Ledger, OrderFacts, audit, expected_digest
from lockstep.loop.session import components_of
from lockstep.resuming.checkpoints import Checkpoints
from lockstep.resuming.resuming import Resume

ORDER = OrderFacts(seed=3, shuffle=True, samples=40, epoch_samples=40, fingerprint="points")


# --- attempts of a real run ---------------------------------------------------------------------------------------


def _attempt(config: dict[str, Any], folder: str, until: int, save_at: int, fault: str | None = None) -> None:
    """Resume from the newest checkpoint, save at one step, and stop after another: the updates between them are lost.

    A fault is planted before the first update.
    """
    with lockstep.session(config) as session:
        checkpoints = Checkpoints(session, LocalStorage(Path(folder)), {})
        checkpoints.begin(Resume())
        if fault is not None:
            FAULTS[fault](session)
        for report in session:
            if report.step == save_at:
                checkpoints.save()
                [ended] = checkpoints.finish()
                assert ended.failure is None
            if report.step == until:
                return


def _audited(folder: Path) -> Audit:
    """Of the newest checkpoint."""
    storage = LocalStorage(folder)
    steps = names_by_step(storage.names())
    manifest = read_manifest(storage, steps[max(steps)])
    return audit(manifest.state, manifest.samples)


@pytest.mark.parametrize("data", [{}, {"drop_last": True}, {"shuffle": False}], ids=str)
def test_a_run_that_is_killed_and_goes_on_elsewhere_is_complete(tmp_path: Path, data: dict[str, Any]) -> None:
    config = small.config(run={"steps": 99})
    config["data"] = {**config["data"], **data}
    for ranks, until, save_at in ((1, 5, 3), (2, 9, 7), (3, 12, 12)):
        in_world(ranks, _attempt, config, str(tmp_path), until, save_at)
    found = _audited(tmp_path)
    assert found.complete, found
    epoch = 39 if data.get("drop_last") else 40
    assert [(one.attempt, one.ranks) for one in found.segments] == [(1, 1), (2, 2), (3, 3)]
    assert [one.first for one in found.segments] == [0, *[one.last for one in found.segments[:-1]]]
    assert found.segments[-1].last == found.samples
    assert {one.order.epoch_samples for one in found.segments} == {epoch}
    assert found.changes == ()


# --- faults -------------------------------------------------------------------------------------------------------


def _updates(session: Any, change: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
    """Changes the stream of updates."""
    updates = components_of(session).loader.updates
    components_of(session).loader.updates = lambda progress: change(updates(progress))


def skipped_batch(session: Any) -> None:
    """The third update of the attempt is left out."""
    _updates(session, lambda updates: (update for number, update in enumerate(updates) if number != 2))


def repeated_batch(session: Any) -> None:
    """The third update is made twice."""
    _updates(session, lambda updates: (one for number, one in enumerate(updates) for _ in range(1 + (number == 2))))


def swapped_sample(session: Any) -> None:
    """One sample of one epoch is another one."""

    class Other:
        def __init__(self, order: SampleOrder) -> None:
            self._order = order

        def indices(self, epoch: int, positions: np.ndarray) -> np.ndarray:
            found = self._order.indices(epoch, positions).copy()
            found[(positions == 5) & (epoch == 0)] += 1
            return found % self._order.samples

    components_of(session).loader._order = Other(components_of(session).loader._order)


def share_of_another_rank(session: Any) -> None:
    """Every rank trains on the first one's samples."""
    components_of(session).loader._rank = 0


def too_late(session: Any) -> None:
    """The run continues one update later than it was."""
    _shift(session, 13)


def too_early(session: Any) -> None:
    """The run continues one update before where it was."""
    _shift(session, -13)


def _shift(session: Any, by: int) -> None:
    progress = session.progress
    session.progress = Progress(progress.steps, progress.samples + by, progress.tokens)


FAULTS: dict[str, Callable[[Any], None]] = {
    "skipped batch": skipped_batch,
    "repeated batch": repeated_batch,
    "swapped sample": swapped_sample,
    "share of another rank": share_of_another_rank,
    "too late": too_late,
    "too early": too_early,
}


@pytest.mark.parametrize(
    ("fault", "ranks"),
    [
        ("skipped batch", 1),
        ("skipped batch", 3),
        ("repeated batch", 1),
        ("swapped sample", 1),
        ("swapped sample", 2),
        ("share of another rank", 2),
    ],
)
def test_other_samples_show(tmp_path: Path, fault: str, ranks: int) -> None:
    in_world(ranks, _attempt, small.config(), str(tmp_path), 6, 6, fault)
    found = _audited(tmp_path)
    assert not found.complete
    assert found.mismatches == ((0, found.samples),)
    assert (found.gaps, found.repeats) == ((), ())


def test_only_the_attempt_that_went_wrong_is_blamed(tmp_path: Path) -> None:
    for number, fault in enumerate((None, "skipped batch", None), 1):
        in_world(1, _attempt, small.config(run={"steps": 99}), str(tmp_path), 4 * number, 4 * number, fault)
    assert _audited(tmp_path).mismatches == ((40, 80),)


@pytest.mark.parametrize(("fault", "gaps", "repeats"), [("too late", ((39, 52),), ()), ("too early", (), ((26, 39),))])
def test_going_on_elsewhere_shows(tmp_path: Path, fault: str, gaps: Any, repeats: Any) -> None:
    in_world(1, _attempt, small.config(), str(tmp_path), 3, 3)
    in_world(1, _attempt, small.config(), str(tmp_path), 6, 6, fault)
    found = _audited(tmp_path)
    assert (found.gaps, found.repeats, found.mismatches) == (gaps, repeats, ())


def test_another_length_of_epochs_is_not_gone_on_with_unasked(tmp_path: Path) -> None:
    """An epoch of 39 samples becomes one of 36: the cursor would stand elsewhere in the next epoch."""
    config = small.config(batch={"global_size": 13})
    config["data"] = {**config["data"], "drop_last": True}
    in_world(1, _attempt, config, str(tmp_path), 4, 4)
    config["batch"] = {"global_size": 12}
    with fails(AssertionError, 39, 36):
        in_world(1, _attempt, config, str(tmp_path), 6, 6)
    assert _audited(tmp_path).complete


# --- the ledger alone ---------------------------------------------------------------------------------------------


def _ledger(*spans: tuple[int, int], order: OrderFacts = ORDER) -> list[dict[str, Any]]:
    """Of updates that had the samples that belong there."""
    ledger = Ledger(1, order)
    for first, last in spans:
        ledger.add(first, last, float(expected_digest(order, first, last)))
    return ledger.state()


def _of(ledger: list[dict[str, Any]], samples: int) -> Audit:
    return audit({"ledger": json.loads(json.dumps(ledger))}, samples)


def test_updates_that_follow_each_other_are_one_segment() -> None:
    ledger = Ledger(2, ORDER)
    assert ledger.segments == []
    ledger.add(0, 13, MODULUS - 1.0)
    ledger.add(13, 26, 3.0)
    [one] = ledger.segments
    assert (one.attempt, one.ranks, one.first, one.last, one.digest, one.order) == (1, 2, 0, 26, 2, ORDER)
    again = Ledger(3, dataclasses.replace(ORDER, seed=4))
    again.restore(json.loads(json.dumps(ledger.state())))
    assert again.segments == [one]
    again.add(26, 30, 5.0)
    first, second = again.segments
    assert first == one
    assert (second.attempt, second.ranks, second.first, second.last, second.digest) == (2, 3, 26, 30, 5)
    assert second.order.seed == 4


def test_a_jump_begins_a_segment() -> None:
    ledger = Ledger(1, ORDER)
    for first, last in ((5, 10), (10, 15), (20, 25)):
        ledger.add(first, last, 1.0)
    assert [(one.first, one.last, one.digest) for one in ledger.segments] == [(5, 15, 2), (20, 25, 1)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("epoch_samples", [40, 39])
@pytest.mark.parametrize(("first", "last"), [(0, 0), (0, 1), (3, 39), (39, 41), (0, 40), (5, 200), (80, 120)])
def test_the_expected_digest_is_the_sum_over_single_samples(
    first: int, last: int, epoch_samples: int, shuffle: bool
) -> None:
    order = dataclasses.replace(ORDER, epoch_samples=epoch_samples, shuffle=shuffle)
    total = 0
    for cursor in range(first, last):
        epoch, position = divmod(cursor, epoch_samples)
        total += digest(epoch, SampleOrder(40, 3, shuffle=shuffle).indices(epoch, np.array([position])))
    assert expected_digest(order, first, last) == total % MODULUS


def test_a_long_epoch_is_the_sum_of_its_parts() -> None:
    order = OrderFacts(seed=3, shuffle=True, samples=600_000, epoch_samples=600_000, fingerprint="")
    parts = sum(expected_digest(order, first, last) for first, last in ((0, 7), (7, 300_001), (300_001, 600_000)))
    assert expected_digest(order, 0, 600_000) == parts % MODULUS


def test_what_belongs_there_is_complete() -> None:
    found = _of(_ledger((0, 13), (13, 26), (26, 95)), 95)
    assert found.complete
    assert found.expected == tuple(one.digest for one in found.segments)


@pytest.mark.parametrize(
    ("spans", "samples", "gaps", "repeats"),
    [
        ([(13, 26)], 26, ((0, 13),), ()),
        ([(0, 13), (26, 39)], 39, ((13, 26),), ()),
        ([(0, 26), (13, 39)], 39, (), ((13, 26),)),
        ([(0, 39), (13, 26)], 39, (), ((13, 26),)),
        ([(0, 13)], 26, ((13, 26),), ()),
        ([(0, 26)], 13, (), ((13, 26),)),
        ([(0, 13), (20, 39), (26, 50)], 52, ((13, 20), (50, 52)), ((26, 39),)),
    ],
)
def test_segments_must_lie_end_to_end(spans: list[tuple[int, int]], samples: int, gaps: Any, repeats: Any) -> None:
    found = _of(_ledger(*spans), samples)
    assert (found.gaps, found.repeats, found.mismatches) == (gaps, repeats, ())
    assert not found.complete


def test_another_seed_or_other_data_are_told() -> None:
    other = dataclasses.replace(ORDER, seed=4, fingerprint="others", samples=50, epoch_samples=50)
    after = [{**one, "attempt": 2} for one in _ledger((13, 26), order=other)]
    found = _of(_ledger((0, 13)) + after, 26)
    assert found.complete
    assert found.changes == (
        (13, "run.seed: 3, then 4"),
        (13, "samples of the dataset: 40, then 50"),
        (13, "samples of an epoch: 40, then 50"),
        (13, "other data"),
    )


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "it has no ledger, so there is no record of the samples it was trained on"),
        ({"ledger": []}, "it has no ledger, so there is no record of the samples it was trained on"),
        ({"ledger": [{"first": 0}]}, "its ledger can't be read: 'order'"),
        ({"ledger": 7}, "its ledger can't be read: 'int' object is not iterable"),
        ({"ledger": [{**_ledger((0, 5))[0], "first": 5}]}, "its ledger is invalid: segment 0 is Segment("),
        ({"ledger": [{**_ledger((0, 5))[0], "digest": "x"}]}, "its ledger is invalid: segment 0 is Segment("),
    ],
)
def test_what_is_no_ledger_proves_nothing(state: dict[str, Any], message: str) -> None:
    with pytest.raises(VerificationError) as caught:
        audit(state, 5)
    assert str(caught.value).startswith(message)
    assert caught.value.exit_code == 3
