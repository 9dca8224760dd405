"""One optimizer step, top to bottom.

    batches --> accumulate --> judge --> update(keep) --> report
                    |            |
                    '--- vote ---'   losses, requests, and the counts of the next batch, whose loss they will divide

A session holds what one run has on one rank. An update is a transaction: it is prepared (`accumulate`), judged by all
ranks alike, and kept or discarded (`commit`). Schedule, cursor and cadence follow attempted updates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lockstep.core.errors import PeerFailed, RunFailed, Stopped
from lockstep.core.out_of_memory import mark
from lockstep.core.progress import Progress
from lockstep.core.records import EvaluationReport, GlobalBatch, Request, StepReport, TrainingState
from lockstep.distributed import generators
from lockstep.distributed.consensus import Consensus, gradients_agree, requests_in, tallies_in
from lockstep.distributed.user_collectives import print_once
from lockstep.optim.norms import clip_divisor
from lockstep.plan.pieces import before_unused
from lockstep.plan.schedule import fraction_done, is_finished
from lockstep.resilience.guard import DiscardLimit, is_finite, ranks_differ, verdict
from lockstep.sharding.buffers import BufferCopies
from lockstep.sharding.state import unused_parameters
from lockstep.training.evaluate import evaluate
from lockstep.training.ledger import Ledger, OrderFacts
from lockstep.training.memory_watch import MemoryWatch
from lockstep.training.readback import Judgement, Readback, Reporter

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.config.schema import Config
    from lockstep.core.protocols import Engine, EvaluatedObjective, Sharding, Source
    from lockstep.data.loader import TrainingLoader
    from lockstep.distributed.mesh_position import MeshPosition
    from lockstep.distributed.process_group import World
    from lockstep.models.model_tensors import ModelTensors
    from lockstep.optim.precision import LossScaler
    from lockstep.plan.plan import Plan

_MODEL = "model."  # before the names of the model's tensors in a saved state
Rate = Callable[[float, int, int | None], float]


@dataclass(frozen=True, slots=True)
class Rooms:
    """What `assemble` put together.

    Attributes:
        tensors: the full list of the whole model's.
        coupled: why the loss of a batch of this model is no sum over its samples, if so.
        flops_per_token: of the whole model; None: not known.
        rate: learning rate of (share of the run done, step from 0, steps of the run or None).
        evaluation: sources by name.
        watch: of this rank's memory, if anybody asked for one.
        updates_ahead: told the learning rate before a backward that updates; None: updates come after the backward.
    """

    config: Config
    plan: Plan
    world: World
    place: MeshPosition
    objective: EvaluatedObjective
    sharding: Sharding
    tensors: ModelTensors
    engine: Engine
    loader: TrainingLoader
    source: Source
    evaluation: Mapping[str, Source]
    consensus: Consensus
    readback: Readback
    scaler: LossScaler
    rate: Rate
    coupled: str | None
    flops_per_token: float | None
    watch: MemoryWatch | None = None
    updates_ahead: Callable[[float], None] | None = None


class Session:
    """A run on one rank, between two updates.

    Attributes:
        progress: attempted updates and the data consumed by them, identical on every rank.
        rooms: everything that the run is made of.
        ledger: which samples the updates so far have had.
        standing: asked in each vote: saves that this rank has settled, and how many of them failed.
        heard: told what the vote said of them: the sums over all ranks.
        rescue: saves the state of a run that this error ends, if it can; returns what to report, None if there is
            nothing to.
        fails_together: all ranks know that one of them fails, and have finished the same update.
    """

    def __init__(self, rooms: Rooms) -> None:
        self.rooms = rooms
        self.progress = Progress()
        self.patience = DiscardLimit()
        self.ledger = Ledger(rooms.world.size, _order_facts(rooms))
        self.standing: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.heard: Callable[[float, float], None] = lambda settled, failed: None
        self.rescue: Callable[[BaseException], str | None] = lambda error: None
        self.fails_together = rooms.world.size == 1
        self._failure: Exception | None = None
        self._accumulating = self._updating = False
        self._buffers_before: BufferCopies | None = None
        self._batches: Iterator[GlobalBatch] | None = None
        self._batch: GlobalBatch | None = None
        self._upcoming: GlobalBatch | None = None
        self._count: float | Tensor = 1.0
        self._requests: set[Request] = set()
        self._let_update: Callable[[], None] | None = None
        self._began = time.perf_counter()

    # --- the loop -----------------------------------------------------------------------------------------------

    def batches(self) -> Iterator[GlobalBatch]:
        """This rank's share of each update that is left. `accumulate` and `commit` each before asking for the next."""
        self.begin()
        while not self.finished:
            if self._failure is not None:
                raise self._failure
            step = self.progress.steps
            yield self._current
            if self.progress.steps == step:
                raise RuntimeError("each batch of Session.batches() needs one accumulate(batch) and one commit()")

    def begin(self) -> None:
        """Fetches the first batch, unless that was done; all ranks together."""
        if self._batch is not None:
            return
        self._batches = self.rooms.loader.updates(self.progress)
        self._batch = next(self._batches)
        count, tokens = self.rooms.consensus.announce(*self._told(self._batch))
        if not float(count):
            step = self.progress.steps + 1
            print_once(
                f"lockstep: update {step} has no valid target (all are -100): nothing is learned; look at labels"
            )
        self._count = nonzero_count(count)
        self.rooms.readback.start(int(tokens))

    @property
    def _current(self) -> GlobalBatch:
        assert self._batch is not None, "batches() begins the session"
        return self._batch

    @property
    def finished(self) -> bool:
        """Whether the run has consumed what its config says."""
        plan = self.rooms.plan
        return is_finished(self.rooms.config.run, self.progress, plan.epoch_samples)

    def accumulate(self, batch: GlobalBatch) -> None:
        """Forward and backward of this rank's micro-batches; the vote is opened in between."""
        scale = self.rooms.scaler.scale / self._count
        if self._buffers_before is not None and not self._accumulating:
            self._buffers_before.take()
        self._accumulating = True
        if self.rooms.updates_ahead is not None:
            self._updating = True
            self._before_changes()
            self.rooms.updates_ahead(self._rate())
        self.rooms.engine.accumulate(batch, scale, self._open_vote)
        if batch.step == 0:
            self._refuse_unused_parameters()

    @property
    def gradient_unit(self) -> float | Tensor:
        """What the accumulated gradient is divided by to be the update's. A mean over ranks is made good here: what it
        takes, multiplied into the loss, would overflow fp16 that much earlier than in one process."""
        return self.rooms.scaler.scale / self.rooms.sharding.averages_over

    def request(self, requests: Iterable[Request]) -> None:
        """Heard by all ranks in the next vote that is opened."""
        self._requests.update(requests)

    def commit(self) -> StepReport | None:
        """Lets all ranks judge the accumulated gradient, and updates or discards.

        Returns:
            The report of this update; on a GPU that of the update before (None at first; `flush` has the last).
        """
        rooms, batch, upcoming = self.rooms, self._current, self._upcoming
        assert upcoming is not None, "commit() comes after accumulate()"
        outcome = rooms.consensus.close(rooms.sharding.squared_norm(), whole=rooms.sharding.norm_is_whole)
        scale, unit = rooms.scaler.scale, self.gradient_unit
        norm = outcome.squared_norm**0.5 / unit
        keep = is_finite(norm + outcome.loss_sum)
        rate = self._rate()
        self._updating = True
        self._before_changes()
        try:
            rooms.sharding.update(rate, clip_divisor(norm, rooms.config.optim.clip_norm, unit), keep)
        except Exception as error:
            mark(error, "update", f"in the optimizer's step of update {batch.step + 1}")
            raise
        rooms.scaler.update(keep)
        tokens = rooms.readback.tokens()
        self.progress = self.progress.advance(batch.samples, tokens)
        judgement = Judgement(outcome, norm, keep, scale, self._count)
        report = rooms.readback.push(judgement, self._reporter(batch, rate, tokens))
        self._batch, self._count, self._upcoming = upcoming, nonzero_count(outcome.next_count), None
        self._accumulating = self._updating = False
        self._hear_of_failure(report)
        self._watch_memory(report)
        return report

    def flush(self) -> StepReport | None:
        """The report that is still on its way from a GPU; None on the CPU, where none is."""
        return self.rooms.readback.flush()

    @property
    def seconds(self) -> float:
        """Since the run's first update began, in whatever process."""
        return time.perf_counter() - self._began

    def hold(self, let_update: Callable[[], None]) -> None:
        """Somebody still reads parameters and optimizer state: `let_update` is called before they change."""
        self._let_update = let_update

    def state(self) -> TrainingState:
        """All that a run is, between two updates: what `restore` goes on from, to the bit. All ranks together."""
        self.rooms.readback.land()
        self.rooms.sharding.synchronize()
        return self.own_state()

    def own_state(self) -> TrainingState:
        """The same on this rank, as it is: buffers may differ from those of other ranks."""
        self.rooms.readback.land()
        own = {
            "progress": {
                "steps": self.progress.steps,
                "samples": self.progress.samples,
                "tokens": self.progress.tokens,
            },
            "loss_scale": self.rooms.scaler.state(),
            "patience": self.patience.state(),
            "seconds": self.seconds,
            "ledger": self.ledger.state(),
        }
        found = self.rooms.sharding.state()
        names = {name.removeprefix(_MODEL) for name in found.tensors if name.startswith(_MODEL)}
        self.rooms.tensors.refuse_missing_names(names, "the tensors to be saved")
        drawn = generators.states(self.rooms.world.rank)
        return TrainingState(
            {**found.tensors, **drawn}, {**own, "sharding": found.values}, found.changes_in_forward | set(drawn)
        )

    def restore(self, state: TrainingState) -> None:
        """Goes on from `state`; before the first batch, or in place of what was done until now."""
        values = state.values
        self.rooms.sharding.restore(TrainingState(state.tensors, values["sharding"]))
        generators.restore(state.tensors, self.rooms.world.rank)
        self.progress = Progress(**values["progress"])
        self.rooms.scaler.restore(values["loss_scale"])
        self.patience.restore(values["patience"])
        self.ledger.restore(values["ledger"])
        self._began = time.perf_counter() - values["seconds"]
        self._batch = self._upcoming = None

    def evaluate(self) -> list[EvaluationReport]:
        """Every evaluation set of the config, exact over all ranks; the same reports on every rank."""
        return evaluate(self)

    def close(self) -> None:
        """Ends the loader's worker processes; trains no more."""
        self.rooms.loader.close()
        self.rooms.sharding.close()

    # --- parts of an update -------------------------------------------------------------------------------------

    def _open_vote(self, loss_sum: Tensor) -> None:
        if self._upcoming is None:  # else an accumulate was cut short by an error, and is made again
            assert self._batches is not None, "batches() begins the session"
            self._upcoming = self._next_batch(self._batches)
        upcoming = self._upcoming
        place = self.rooms.place
        tallies = (float(self._current.digest) if place.reports_counts else 0.0, *self.standing())
        loss_sum = loss_sum if place.reports_loss else loss_sum.new_zeros(())
        self.rooms.consensus.open(loss_sum, *self._told(upcoming), tallies, self._requests)
        self._requests.clear()

    def _next_batch(self, batches: Iterator[GlobalBatch]) -> GlobalBatch:
        """The next update's. If its data fail, the update under way is finished first, and all ranks hear of it."""
        try:
            return next(batches)
        except Stopped:
            raise
        except Exception as error:
            self._failure = error
            self.request((Request.FAIL,))
            return replace(self._current, count=0, tokens=0)

    def _hear_of_failure(self, report: StepReport | None) -> None:
        """On a GPU the report is of the update before, and comes too late: there the others fail with their peer."""
        if report is None or report.step != self.progress.steps or Request.FAIL not in report.requests:
            return
        self.fails_together = True
        if self._failure is None:
            self._failure = PeerFailed(f"another rank has no data for the update after step {report.step}")

    @property
    def is_updating(self) -> bool:
        """Whether an update has begun to change parameters and optimizer state, and has not ended."""
        return self._updating

    def keep_buffers(self) -> None:
        """From now on, keeps copies of the model's buffers while a forward may change them."""
        self._buffers_before = BufferCopies(self.rooms.sharding.bare)

    def undo_forward(self) -> list[str]:
        """Puts back the buffers that forwards have changed since the last update. Returns the names of what they may
        have changed besides."""
        if not self._accumulating:
            return []
        model = self.rooms.sharding.bare
        lost = model.state_dict().keys() - {name for name, _ in model.named_parameters(remove_duplicate=False)}
        if self._buffers_before is not None:
            self._buffers_before.put_back()
            lost -= self._buffers_before.names
        return [*sorted(lost), *generators.registered()]

    def _told(self, batch: GlobalBatch) -> tuple[float, int]:
        """What this rank says of a batch: valid targets and tokens, unless another one with the same samples does."""
        return (batch.count, batch.tokens) if self.rooms.place.reports_counts else (0, 0)

    def _before_changes(self) -> None:
        """Of parameters and optimizer state: nobody reads them any more."""
        if self._let_update is not None:
            self._let_update()
            self._let_update = None

    def _watch_memory(self, report: StepReport | None) -> None:
        watch = self.rooms.watch
        if watch is None:
            return
        self.request(watch.requests(self.progress.steps))
        if report is not None:
            watch.hear(report)

    def _rate(self) -> float:
        plan = self.rooms.plan
        done = fraction_done(self.rooms.config.run, self.progress, plan.epoch_samples)
        return self.rooms.rate(done, self.progress.steps, plan.steps)

    def _reporter(self, batch: GlobalBatch, rate: float, tokens: int) -> Reporter:
        progress = self.progress

        def report(slots: list[float], norm: float, keep: bool, scale: float, count: float) -> StepReport:
            if not gradients_agree(slots, self.rooms.world.axis.size):
                raise RunFailed(ranks_differ(progress.steps - 1))
            found = verdict(keep, scaled=self.rooms.scaler.enabled)
            self.patience.see(found, progress.steps)
            digest, settled, failed = tallies_in(slots)
            self.ledger.add(progress.samples - batch.samples, progress.samples, digest)
            self.heard(settled, failed)
            return StepReport(
                step=progress.steps,
                samples=progress.samples,
                tokens=progress.tokens,
                epoch=batch.epoch,
                loss=slots[0] / count,
                count=count,
                grad_norm=norm,
                lr=rate,
                verdict=found,
                loss_scale=scale,
                discarded=self.patience.discarded,
                seconds=time.perf_counter() - self._began,
                update_samples=batch.samples,
                update_tokens=tokens,
                requests=requests_in(slots),
            )

        return report

    def _refuse_unused_parameters(self) -> None:
        """Under DDP a parameter without a gradient stops the run at the next step; under any strategy it is a bug."""
        if self.rooms.config.parallel.ddp.find_unused_parameters:
            return
        unused = self.rooms.sharding.unreached()
        if unused:
            plan = self.rooms.plan
            raise unused_parameters(unused, before=before_unused(plan.strategy, plan.mesh))


def _order_facts(rooms: Rooms) -> OrderFacts:
    config, source = rooms.config, rooms.source
    return OrderFacts(
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        samples=source.facts.samples,
        epoch_samples=rooms.plan.epoch_samples,
        fingerprint=source.fingerprint,
    )


def nonzero_count(count: float | Tensor) -> float | Tensor:
    """Return what a loss is divided by: 1 for an update without a valid target, whose loss is 0, not 0 / 0.

    A count may be less than 1, since class weights count by their sum.
    """
    return (count or 1.0) if isinstance(count, float) else count.masked_fill(count == 0, 1.0)


def steps(session: Session) -> Iterator[StepReport]:
    """The rest of the run, a report an update. The loop is a `for`."""
    for batch in session.batches():
        session.accumulate(batch)
        report = session.commit()
        if report is not None:
            yield report
    last = session.flush()
    if last is not None:
        yield last
