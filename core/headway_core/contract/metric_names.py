"""Names and labels of the metrics that more than one component reads. Prometheus adds _total to counters."""

from __future__ import annotations


class Metric:
    """Names and label sets, all closed: no label ever takes a value from a client."""

    REQUESTS = "headway_requests"  # gateway; pool, class, outcome
    OFFERED = "headway_offered_requests"  # gateway; pool, class
    RETRIES = "headway_client_retries"  # gateway; pool, class: offered requests that a client SDK marked as retries
    SLO_ATTAINED = "headway_slo_attained_requests"  # gateway; pool, class, objective
    SLO_JUDGED = "headway_slo_judged_requests"  # gateway; pool, class, objective
    SHED = "headway_shed_requests"  # gateway; pool, class, reason
    TTFT = "headway_ttft_seconds"  # gateway, arrival to first content; pool, class
    TPOT = "headway_tpot_seconds"  # gateway, per request; pool, class
    ITL = "headway_itl_seconds"  # gateway, per gap; pool, class
    TTFT_ERROR = "headway_ttft_prediction_error_seconds"  # gateway, predicted - actual; pool, decision
    QUEUE_DEPTH = "headway_queue_depth"  # gateway; pool, class
    IN_FLIGHT = "headway_in_flight_requests"  # gateway; pool
    READY_REPLICAS = "headway_ready_replicas"  # gateway; pool
    SATURATED = "headway_saturated"  # gateway; pool
    POLICY_REVISION = "headway_policy_revision"  # both; pool
    POLICY_AGE = "headway_policy_age_seconds"  # both; since the last good read
    ENGINE_TTFT = "headway_engine_ttft_seconds"  # runtime, arrival at the runtime to first token; class
    ENGINE_ITL = "headway_engine_itl_seconds"  # runtime; class
    ITERATION_SECONDS = "headway_engine_iteration_seconds"  # runtime
    ITERATION_ERROR = "headway_engine_iteration_prediction_relative_error"  # runtime: |predicted - actual| / actual
    PREEMPTIONS = "headway_engine_preemptions"  # runtime; kind, cause
    RUNNING = "headway_engine_running_sequences"  # runtime
    WAITING = "headway_engine_waiting_sequences"  # runtime
    BLOCKS = "headway_engine_kv_blocks"  # runtime; state = free | cached | used
    PROMPT_TOKENS = "headway_engine_prompt_tokens"  # runtime; source = computed | cached | recomputed
    OUTPUT_TOKENS = "headway_engine_output_tokens"  # runtime
    EMULATED = "headway_engine_emulated_accelerator"  # runtime: 1 when --pace shapes the iterations


OUTCOMES = ("ok", "shed", "client_closed", "client_error", "upstream_error", "timeout")
"""The closed set of `Metric.REQUESTS`' label `outcome`: every offered request ends in exactly one."""
