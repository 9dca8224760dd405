"""One optimizer step, top to bottom.

    batches --> accumulate --> verdict --> update(keep) --> report
                    |            |
                    '--- vote ---'   losses, requests, and the counts of the next batch, which will divide its loss

A session is one run on one rank. An update is a transaction: it is prepared (`accumulate`), and kept or discarded by a
verdict that is the same on all ranks (`commit`). Schedule, cursor and triggers follow attempted updates.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from lockstep.core.deferred_signals import DEFERRAL
from lockstep.core.errors import Paused, PeerFailed, ReplicasDiffer, RunFailed, Stopped, UnusableSamples
from lockstep.core.formatting import listed
from lockstep.core.out_of_memory import note_location
from lockstep.core.phase_clock import Phase
from lockstep.core.progress import Progress, running
from lockstep.core.records import EvaluationReport, GlobalBatch, Request, StepReport, TrainingState, Verdict
from lockstep.distributed import generators
from lockstep.distributed.consensus import FIRST_REQUEST, FIRST_TALLY, gradients_agree, requests_in
from lockstep.distributed.user_collectives import print_once
from lockstep.loop.bad_updates import BadUpdates
from lockstep.loop.components import FailureState, Saves
from lockstep.loop.evaluate import evaluate
from lockstep.loop.ledger import Ledger, order_of
from lockstep.loop.left_out import LeftOutSamples, with_remedy
from lockstep.loop.readback import PendingReport
from lockstep.loop.replicas import difference
from lockstep.loop.written_parameters import REQUIRES_GRAD, ParameterWatch
from lockstep.monitor import metric_log
from lockstep.optim.norms import clip_divisor
from lockstep.plan.refusals import before_unused
from lockstep.plan.schedule import fraction_done, is_finished
from lockstep.resilience.verdicts import Verdicts, ranks_differ
from lockstep.sharding.buffers import BufferSnapshot
from lockstep.sharding.single import unused_parameters

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.core.protocols import ObjectStore
    from lockstep.loop.components import Components
    from lockstep.monitor.metric_log import Logged
    from lockstep.plan.batch import BatchPlan
    from lockstep.resilience.verdicts import Limits

_NAMED = 3
_MODEL = "model."  # before the names of the model's tensors in a saved state


def refuse_unused(components: Components) -> None:
    """Raise for parameters without a gradient, which are a bug; under DDP they would stop the next step."""
    if components.config.parallel.ddp.find_unused_parameters:
        return
    if unused := components.sharding.step.parameters_without_gradient():
        plan = components.plan
        raise unused_parameters(unused, remedy=before_unused(plan.strategy, plan.mesh))


def note_changed_buffers(before: BufferSnapshot | None, micro_batches: int) -> None:
    """Print which buffers each of an update's forwards changes; of torch's norms, `plan` does."""
    changed = before.changed() if before is not None and micro_batches > 1 else []
    if changed:
        print_once(
            f"lockstep: the forward changes {listed(changed, _NAMED)} in each of {micro_batches} micro-batches: "
            "the run depends on batch.micro_size and the number of ranks (lockstep.step() counts updates)"
        )


class Session:
    """A run on one rank, between two updates. Iterating over it trains, and yields a report per update.

    Attributes:
        progress: attempted updates and the data that they consumed, identical on every rank.
        reports, left_out, bad_updates, saves, failure_state: for Lockstep's own run loop.
        copies: wait for copies of the state that saves are making, which must end before it changes.
    """

    def __init__(self, components: Components) -> None:
        self._components = components
        self.progress = running.progress = Progress()
        self._verdicts = Verdicts(components.config.recovery.bad_numbers, scaled=components.update.scaler.enabled)
        self._ranks = components.world.size
        self._ledger = Ledger(components.world.size, order_of(components))
        self.left_out = LeftOutSamples(components)
        self.saves = Saves()
        self.copies: list[Callable[[], None]] = []
        buffers = BufferSnapshot(components.sharding.state.model)
        self.failure_state = FailureState(components.world.size == 1, buffers if buffers.names else None)
        self.bad_updates = BadUpdates(components, self._verdicts, self.failure_state)
        self._began = time.perf_counter()
        self._parameters = ParameterWatch(components)
        self._failure: Exception | None = None
        self._batches: Iterator[GlobalBatch] | None = None
        self._batch: GlobalBatch | None = None
        self._upcoming: GlobalBatch | None = None
        self._count = self._divisor = cast("float | Tensor", 1.0)  # of targets; of this update's loss
        self.reports = components.update.readback
        self.reports.act = self._receive
        self._requests: set[Request] = set()

    def __iter__(self) -> Iterator[StepReport]:
        """Train until the run is finished, and yield a report per update; on an accelerator one update late."""
        for _ in updates_of(self, lambda before: self.finished):
            yield from self.reports

    def batches(self) -> Iterator[GlobalBatch]:
        """Yield this rank's share of each update that is left. Call `accumulate` and `commit` once for each."""
        self.failure_state.refuse_half_update(self.saves)
        self.begin()
        known = self._components.config.run.steps or 0
        while self.progress.steps < known or not self.finished:
            if self._failure is not None:
                raise self._failure
            step = self.progress.steps
            assert self._batch is not None, "begin() has fetched it"
            yield self._batch
            if self.failure_state.updating:
                self.failure_state.refuse_half_update(self.saves)
            if self.progress.steps == step:
                raise RuntimeError("each batch of Session.batches() needs one accumulate(batch) and one commit()")

    def begin(self) -> None:
        """Fetch the first batch, unless that was done; all ranks together."""
        if self._batch is not None:
            return
        self._batches = self._components.loader.updates(self.progress)
        try:
            batch = next(self._batches)
        except UnusableSamples as error:
            raise with_remedy(error) from error.__cause__
        self.left_out.begin(batch, self.failure_state)
        counts = (batch.count, batch.tokens) if self._components.position.reports_counts else (0, 0)
        count, tokens = self._components.update.consensus.announce(*counts)
        self._count = count
        self._components.update.readback.start(int(tokens))
        self._batch = batch  # at the end: an interrupted call is repeated

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        return self._components.world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks of the run."""
        return self._components.world.size

    @property
    def is_main_process(self) -> bool:
        """True on rank 0, which prints and writes files for all."""
        return self.rank == 0

    @property
    def batch_plan(self) -> BatchPlan:
        """The split of the global batch: `global_size`, `micro_size`, `accumulation`, and the data-parallel `ranks`."""
        return self._components.plan.batch

    @property
    def seconds(self) -> float:
        """Seconds since the run's first update began, over all its attempts."""
        return time.perf_counter() - self._began

    @property
    def finished(self) -> bool:
        """True once the run has consumed the data that its config grants."""
        return is_finished(self._components.config.run, self.progress, self._components.plan.epoch_samples)

    def accumulate(self, batch: GlobalBatch) -> None:
        """Run forward and backward of this rank's micro-batches; the vote is opened in between."""
        components, running.progress = self._components, self.progress
        if self.failure_state.updating:
            self.failure_state.refuse_half_update(self.saves)
        if self.failure_state.accumulating:
            self.failure_state.discard_attempt(components.sharding, self._rate)  # interrupted, and is repeated
        self.failure_state.begin_forward()
        components.sharding.step.begin_update(batch.samples)
        count = self._count  # with class weights it may be below 1; 0: no valid target, and the sum is 0
        self._divisor = (count or 1.0) if isinstance(count, float) else count.masked_fill(count == 0, 1.0)
        seed_scale = components.update.scaler.scale / self._divisor
        if batch.step & (batch.step - 1):  # not one of those that are watched
            components.engine.accumulate(batch, seed_scale, self._open_vote)
        else:
            self._parameters.accumulate(partial(components.engine.accumulate, batch, seed_scale, self._open_vote))
        if list(map(REQUIRES_GRAD, self._parameters.held)) != self._parameters.trained:
            raise self._parameters.thawed()
        if batch.step == 0:
            refuse_unused(components)
            note_changed_buffers(self.failure_state.buffers, len(batch.micro_batches))

    def request(self, requests: Iterable[Request]) -> None:
        """Make requests, which all ranks receive with the next vote that is opened."""
        self._requests.update(requests)

    def commit(self) -> PendingReport:
        """Update parameters and optimizer state with the accumulated gradient, or discard it; the same on all ranks.

        Returns:
            This update's report, on its way: `result()` waits for its numbers if they are still on a GPU.
        """
        components, upcoming = self._components, self._upcoming
        assert upcoming is not None, "commit() comes after accumulate()"
        step, scale, clock = components.sharding.step, components.update.scaler.scale, components.world.clock
        DEFERRAL.begin()
        try:
            clock.enter(Phase.OPTIMIZER)
            before, rate = self.progress, self._rate()
            batch, count = self._batch, self._count
            assert batch is not None, "batches() begins the session"
            outcome = components.update.consensus.close(step.squared_norm)
            norm = outcome.squared_norm**0.5 / scale
            decision = self._verdicts.decide(batch.step + 1, outcome.loss_sum, self._divisor, norm)
            self.failure_state.updating = True
            if self.copies:
                finish_copies(self)
            try:
                step.update(rate, clip_divisor(norm, components.config.optim.clip_norm, scale), decision.keep)
            except Exception as error:
                note_location(error, "update", f"in the optimizer's step of update {batch.step + 1}")
                raise
            components.update.scaler.update(decision.finite)
            clock.enter(Phase.HOST)
            tokens = self.reports.tokens()
            self.progress = running.progress = before.advance(batch.samples, tokens)
            reporter = partial(self._report, batch, self.progress, rate, tokens, decision.limits)
            self.bad_updates.losses.append((before, components.engine.losses))
            pending = self.reports.push(outcome, (norm, decision.keep, scale, count), reporter)
            self._batch, self._count, self._upcoming = upcoming, outcome.next_count, None
            self.failure_state.updated(decision.keep)
            if not batch.step & (batch.step + 1):
                self._parameters.updated()
            self.reports.receive()
            clock.updated()
            return pending
        finally:
            DEFERRAL.end()

    def evaluate(self, stops: Callable[[], bool] | None = None) -> list[EvaluationReport]:
        """Evaluate on each of the evaluation sets, exactly over all ranks; the reports are the same on every rank."""
        with self._components.world.clock.phase(Phase.EVALUATION), evaluation_weights(self):
            return evaluate(self._components, self.progress.steps, stops)

    def logged(self) -> Logged:
        """Return what `lockstep.log` recorded on all ranks since the last call, merged; all ranks together.

        `.numbers()` has it as one number a name, for a tracker of your own.
        """
        return metric_log.collected(metric_log.current(), self._components.world.axis)

    def checkpoints(
        self, place: str | os.PathLike[str] | ObjectStore, *, fresh: bool = False, accept_changes: bool = False
    ) -> Saves:
        """Resume from the newest checkpoint in `place` that verifies, and return what saves further ones there.

        All ranks call it together, before the first batch. `.resumed_from` is the step, `.save()` begins a save in
        the background, `.finish()` waits for it.

        Args:
            place: a folder, or an object store.
            fresh: start from the beginning; existing checkpoints are renamed.
            accept_changes: resume although data, model or seed differ from the checkpoint's.

        Raises:
            ConfigError: the checkpoints there are of another run.
            RunFailed: none of the checkpoints there can be read.
        """
        return self._components.open_checkpoints(self, place, fresh=fresh, accept_changes=accept_changes)

    # --- state ----------------------------------------------------------------------------------------------------

    def state(self, *, synchronized: bool = True) -> TrainingState:
        """Return the whole state of a run between two updates; `restore` continues from it bit for bit.

        Args:
            synchronized: all ranks together, with the first rank's buffers; false: only this rank, with its own.
        """
        components = self._components
        self.failure_state.refuse_half_update(self.saves)
        if (why := self.failure_state.inconsistency(components.sharding.state.model)) is not None:
            raise RunFailed(f"{why}; commit() it first, or leave the session and open it again")
        components.update.readback.land()
        if synchronized:
            components.sharding.state.synchronize()
        own = {
            "progress": asdict(self.progress),
            "loss_scale": components.update.scaler.state(),
            "patience": self._verdicts.state(),
            "seconds": self.seconds,
            "ledger": self._ledger.state(),
            "left_out": self.left_out.state(),
        }
        live = components.sharding.state.live_state()
        names = {name.removeprefix(_MODEL) for name in live.tensors if name.startswith(_MODEL)}
        components.tensors.refuse_missing_names(names, "the tensors to be saved")
        drawn = generators.states(components.world.rank)
        return TrainingState(
            {**live.tensors, **drawn}, {**own, "sharding": live.values}, live.changes_in_forward | set(drawn)
        )

    def restore(self, state: TrainingState) -> None:
        """Continue from `state`: before the first batch, or instead of the progress so far."""
        self.failure_state.discard_attempt(self._components.sharding, self._rate)
        values = state.values
        self._components.sharding.state.restore(TrainingState(state.tensors, values["sharding"]))
        generators.restore(state.tensors, self._components.world.rank)
        self.progress = running.progress = Progress(**values["progress"])
        self._components.update.scaler.restore(values["loss_scale"])
        self._verdicts.restore(values["patience"])
        self._ledger.restore(values["ledger"])
        self.left_out.restore(values.get("left_out", ()), self.progress.samples)
        self._began = time.perf_counter() - values["seconds"]
        self.failure_state.accumulating = self.failure_state.updating = False
        self._parameters.forget()
        self._batch = self._upcoming = None

    def close(self) -> None:
        """End the loader's worker processes, and unlock the folder of checkpoints; the session trains no more."""
        self._components.loader.close()
        self._components.sharding.step.close()
        error = sys.exc_info()[1]
        if not isinstance(error, Stopped) or isinstance(error, Paused):  # stopped at once, it waits for no save
            self.saves.close()
        if error is None:
            self._components.sharding.state.end_training()

    # --- parts of an update -------------------------------------------------------------------------------------

    def _report(
        self, batch: GlobalBatch, progress: Progress, rate: float, tokens: int, limits: Limits,
        slots: list[float], norm: float, keep: bool, scale: float, count: float,
    ) -> StepReport:  # fmt: skip
        """Return the report of the update that led to `progress`, once its numbers are on the host."""
        if self._ranks > 1 and not gradients_agree(slots, self._ranks):
            fault = difference(self._components)
            text, ranks = ("", ()) if fault is None else (f"; {fault.text}", fault.ranks)
            raise ReplicasDiffer(f"{ranks_differ(progress.steps - 1)}{text}", ranks)
        loss = slots[0] / (count or 1.0)
        result, spike = self._verdicts.see(progress.steps, loss, norm, limits, count=count, keep=keep)
        digest, settled, failed = slots[FIRST_TALLY:FIRST_REQUEST]
        self._ledger.add(progress.samples - batch.samples, progress.samples, digest)
        self.saves.receive(settled, failed)
        return StepReport(
            step=progress.steps,
            samples=progress.samples,
            tokens=progress.tokens,
            epoch=batch.epoch,
            loss=loss if count or not keep else math.nan,
            count=count,
            grad_norm=norm,
            lr=rate,
            verdict=result,
            loss_scale=scale,
            discarded=self._verdicts.discarded,
            seconds=time.perf_counter() - self._began,
            update_samples=batch.samples,
            update_tokens=tokens,
            requests=requests_in(slots),
            spike=spike,
        )

    def _open_vote(self, loss_sum: Tensor) -> None:
        assert self._batch is not None, "batches() begins the session"
        if self._upcoming is None:  # else an accumulate was interrupted by an error, and is repeated
            assert self._batches is not None, "batches() begins the session"
            enter = self._components.world.clock.enter
            before = enter(Phase.DATA)
            try:
                self._upcoming = next(self._batches)
            except (Stopped, KeyboardInterrupt, SystemExit):  # it has ended the iterator; the call may be repeated
                progress = self.progress.advance(self._batch.samples, 0)
                self._batches = self._components.loader.updates(progress)
                raise
            except Exception as error:  # all ranks finish the current update, and learn of it
                self._failure = with_remedy(error)
                self.request((Request.FAIL,))
                self._upcoming = replace(self._batch, count=0, tokens=0)
            finally:
                enter(before)
            if self._upcoming.left_out:
                self.request(self.left_out.fetched(self._upcoming))
        position = self._components.position
        digest, count, tokens = self._batch.digest, self._upcoming.count, self._upcoming.tokens
        if not position.reports_counts:  # another rank with the same samples does
            digest, count, tokens = 0, 0.0, 0
        tallies = (float(digest), *self.saves.status())
        loss_sum = loss_sum if position.reports_loss else loss_sum.new_zeros(())
        self._components.update.consensus.open(loss_sum, count, tokens, tallies, self._requests)
        self._requests.clear()

    def _receive(self, report: StepReport) -> None:
        if report.requests:
            if Request.FAIL in report.requests and report.step == self.progress.steps:
                self.failure_state.fails_together = True
                failure = PeerFailed(f"another rank has no data for the update after step {report.step}")
                self._failure = self._failure or failure
            if Request.LEFT_OUT in report.requests:
                self.left_out.exchange(self.failure_state)
        if report.verdict is not Verdict.KEPT or not report.count or report.spike:
            self.bad_updates.receive(report)

    def _rate(self) -> float:
        plan = self._components.plan
        done = fraction_done(self._components.config.run, self.progress, plan.epoch_samples)
        return self._components.update.rate(done, self.progress.steps, plan.steps)


# --- for other parts of Lockstep ----------------------------------------------------------------------------------


def components_of(session: Session) -> Components:
    """Return the parts of a session."""
    return session._components


def updates_of(session: Session, reads_now: Callable[[Progress], bool]) -> Iterator[Progress]:
    """Train until the run is finished; after each update, yield the progress before it.

    Args:
        reads_now: returns whether something follows the update that began at this progress, the same on all ranks:
            its report is then waited for.
    """
    for batch in session.batches():
        before = session.progress
        session.accumulate(batch)
        session.commit()
        if session.reports.late and reads_now(before):
            session.reports.flush()
        yield before


def ledger_of(session: Session) -> Ledger:
    """Return the record of the samples that the run's updates have consumed, by attempt."""
    session._components.update.readback.land()
    return session._ledger


def finish_copies(session: Session) -> None:
    """Return once parameters and optimizer state may change."""
    while session.copies:
        with session._components.world.clock.phase(Phase.SAVE):
            session.copies[-1]()
        session.copies.pop()


@contextmanager
def evaluation_weights(session: Session) -> Iterator[None]:
    """Give parameters the values that the optimizer has for evaluation while the block runs."""
    finish_copies(session)
    session._parameters.forget()  # they may have other values until the block ends
    with components_of(session).sharding.state.evaluation():
        yield
    session._parameters.refuse()
