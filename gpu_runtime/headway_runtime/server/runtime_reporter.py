"""A replica's load report, and the load hint of each response: the engine's load plus the sequences not yet applied.

Builds documents; does no I/O, and keeps only the sequence number and the highest dispatch numbers.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable

from headway_core.contract.policy import Knobs
from headway_core.contract.reports import (
    Acknowledgement,
    ClassLoad,
    EngineLimits,
    LoadHint,
    ReplicaState,
    RuntimeReport,
)

from headway_runtime.ipc.messages import EngineLoad, Ready
from headway_runtime.server.engine_client import Unconfirmed

MAX_GATEWAYS = 64
"""Gateway boot ids that are kept: a restarted gateway has a new one, and the least recently used are dropped."""

_NO_LIMITS = EngineLimits(max_num_seqs=0, prefill_token_budget=0, max_model_len=0, block_size=0, total_blocks=0)


class RuntimeReporter:
    """Makes the numbered reports of one replica."""

    def __init__(self, replica_id: str, pool: str, model: str, emulated_pace: str | None = None) -> None:
        self._replica_id = replica_id
        self._pool = pool
        self._model = model
        self._emulated_pace = emulated_pace
        self._seq = 0
        self._dispatched: dict[str, int] = {}
        self.boot_id = uuid.uuid4().hex[:16]

    def record_dispatch(self, gateway: str, number: int) -> None:
        """A request with this dispatch number has arrived: from now on reports include it, or it has ended."""
        # Removed and inserted again: the most recently used is the last in the dictionary.
        self._dispatched[gateway] = max(number, self._dispatched.pop(gateway, 0))
        while len(self._dispatched) > MAX_GATEWAYS:
            del self._dispatched[next(iter(self._dispatched))]

    def report(
        self,
        *,
        at: float,
        state: ReplicaState,
        ready: Ready | None,
        load: EngineLoad | None,
        unconfirmed: Iterable[Unconfirmed],
        policy: Acknowledgement | None,
        cordoned: bool,
        message: str | None,
    ) -> RuntimeReport:
        """The whole report. Before the engine is ready it has no load."""
        self._seq += 1
        limits = ready.limits if ready is not None else _NO_LIMITS
        bare = RuntimeReport(
            replica_id=self._replica_id,
            pool=self._pool,
            model=self._model,
            boot_id=self.boot_id,
            seq=self._seq,
            at=at,
            state=state,
            limits=limits,
            effective=Knobs(),
            policy=policy,
            cordoned=cordoned,
            dispatched=dict(self._dispatched),
            kv_bytes_per_token=ready.kv_bytes_per_token if ready is not None else None,
            emulated_pace=self._emulated_pace,
            message=message,
        )
        if load is None:
            return bare
        waiting = list(unconfirmed)
        return dataclasses.replace(
            bare,
            effective=load.knobs,
            running=load.running,
            waiting=load.waiting + len(waiting),
            free_slots=load.free_slots,
            free_blocks=load.free_blocks,
            classes=_with_unconfirmed(load.classes, waiting),
            prefill_rate=load.prefill_rate,
            completion_rate=load.completion_rate,
            block_release_rate=load.block_release_rate,
            iteration_seconds=load.iteration_seconds,
            step_time=load.step_time,
            mix=load.mix,
            iterations=load.iterations,
            prompt_tokens=load.prompt_tokens,
            output_tokens=load.output_tokens,
            finished=load.finished,
            preemptions=sum(load.preemptions.values()),
        )

    def hint(self, load: EngineLoad | None, unconfirmed: Iterable[Unconfirmed]) -> LoadHint | None:
        """The short form; None before the engine's first load."""
        if load is None:
            return None
        self._seq += 1
        waiting = list(unconfirmed)
        return LoadHint(
            boot_id=self.boot_id,
            seq=self._seq,
            running=load.running,
            waiting=load.waiting + len(waiting),
            free_slots=load.free_slots,
            free_blocks=load.free_blocks,
            remaining_prefill_tokens={
                one.priority: one.remaining_prefill_tokens for one in _with_unconfirmed(load.classes, waiting)
            },
            dispatched=dict(self._dispatched),
            prefill_rate=load.prefill_rate,
            completion_rate=load.completion_rate,
        )


def _with_unconfirmed(classes: tuple[ClassLoad, ...], unconfirmed: Iterable[Unconfirmed]) -> tuple[ClassLoad, ...]:
    by_priority = {one.priority: one for one in classes}
    for extra in unconfirmed:
        known = by_priority.get(extra.priority, ClassLoad(extra.priority, 0, 0, 0))
        by_priority[extra.priority] = dataclasses.replace(
            known,
            waiting=known.waiting + 1,
            remaining_prefill_tokens=known.remaining_prefill_tokens + extra.prompt_tokens,
        )
    return tuple(by_priority[priority] for priority in sorted(by_priority, reverse=True))
