"""What gateway, runtime and operator must spell alike: ports, paths, headers, labels, metric names, documents.

* `Policy` goes down: the operator (or `headway up`) writes it as a file, gateway and runtime read it.
* `RuntimeReport` and `GatewayReport` come up: polled from the control port (`GET /load`); a runtime's report also
  rides, in short, on every response as the header `LOAD`.

Absent is unknown, never zero. Counters in reports only grow until `boot_id` changes; readers difference them.
"""
