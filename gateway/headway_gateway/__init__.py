"""An OpenAI-compatible HTTP gateway that admits, queues, routes, relays and accounts.

No torch and no Kubernetes client here; decisions come from headway_core.admission, this package does the I/O.

A request that the model does not answer has one of three reasons, each with one word:

- *shed*: the admission gave it up, for lack of capacity (429) or because no replica can serve it (503);
- *rejected*: the request itself is at fault (4xx);
- *failed*: the replica broke off or answered 5xx. It is *unreachable* without a connection, *unavailable* after 503.
"""
