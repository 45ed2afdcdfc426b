"""From what was observed to the knobs and replicas that keep the objectives, with reasons.

Pure: a snapshot in, actions out. No Kubernetes, no HTTP, no waiting: the operator executes the actions.

* `plan.plan` decides knobs and replicas, and which writes follow.
* `knobs.plan_knobs` decides knobs alone, for `headway up`.
* `capacity.solve` is the formula behind both.
* `counter_window.CounterWindow` makes increments of counters that restart.
* `conditions` says in words how well the objectives are kept.
"""
