"""The gateway's load report: what the operator and `headway up` read from the control port."""

from __future__ import annotations

import itertools
import time

from headway_core.contract.policy import Knobs
from headway_core.contract.reports import GatewayReport, PoolReport
from headway_core.policy_store import PolicyStore

from headway_gateway.pools import Pools, ServedPool


class GatewayReporter:
    """Writes reports, numbered. `gateway` is this gateway's name for people, `boot_id` tells its lives apart."""

    def __init__(self, gateway: str, boot_id: str, pools: Pools, policies: PolicyStore | None) -> None:
        self._gateway = gateway
        self._boot_id = boot_id
        self._pools = pools
        self._policies = policies
        self._numbers = itertools.count(1)

    def report(self, now: float) -> GatewayReport:
        """All pools at the instant `now` (the event loop's clock)."""
        return GatewayReport(
            gateway=self._gateway,
            boot_id=self._boot_id,
            seq=next(self._numbers),
            at=time.time(),
            state=self._pools.state,
            pools=tuple(self._pool(pool, now) for pool in self._pools),
        )

    def _pool(self, pool: ServedPool, now: float) -> PoolReport:
        fleet = pool.admission.fleet
        return PoolReport(
            pool=pool.name,
            classes={name: counters.read() for name, counters in pool.counters.items()},
            # The knobs are the runtimes' to apply; a gateway acknowledges that it has read them.
            policy=self._policies.acknowledgement(pool.name, Knobs(), {}, now) if self._policies else None,
            ready_replicas=pool.ready(now),
            known_replicas=len(fleet),
            saturated=pool.admission.saturated(now),
            replica_in_flight={replica: fleet.in_flight(replica) for replica in fleet},
        )
