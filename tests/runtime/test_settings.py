"""Settings: everything is checked before anything heavy, and a complaint names the flag."""

import json
from pathlib import Path

import pytest
from headway_runtime.settings import DEFAULT_MODEL_PACKAGE, SettingsError, from_arguments

WRONG = [
    (["--model", "/nowhere"], "--model: '/nowhere' does not exist"),
    (["--model", "/etc/hostname"], "--model: '/etc/hostname' is a file but no .gguf"),
    (["--model", "/etc"], "--model: the folder '/etc' holds no config.json"),
    (["--max-num-seqs", "0"], "--max-num-seqs: must be from 1"),
    (["--max-num-seqs", "many"], "--max-num-seqs: must be a whole number, not 'many'"),
    (["--dtype", "int8"], "--dtype: invalid choice"),
    (["--max-num-seqs", "1000000"], "--max-num-seqs: must be from 1"),
    (["--prefill-token-budget", "0"], "--prefill-token-budget: must be from 1"),
    (["--block-size", "0"], "--block-size: must be from 1"),
    (["--kv-cache-memory-bytes", "lots"], "--kv-cache-memory-bytes: 'lots' is not a size"),
    (["--kv-cache-memory-bytes", "1GiB", "--num-blocks", "5"], "either --num-blocks or --kv-cache-memory-bytes"),
    (["--port", "8000", "--control-port", "8000"], "--control-port: must differ"),
    (["--port", "70000"], "--port: must be from 0"),
    (["--policy", "/nowhere/at/all"], "--policy: neither"),
    (["--pool", "a b"], "--pool: must be letters"),
    (["--replica-id", "x" * 200], "--replica-id: must be letters"),
    (["--device", "tpu"], "--device: must be cpu"),
    (["--no-calibration"], "--no-calibration: without calibration"),
    (["--drain-seconds", "-1"], "--drain-seconds: must be from 0"),
    (["--drain-seconds", "nan"], "--drain-seconds: must be from 0"),
    (["--max-body-bytes", "0"], "--max-body-bytes: must be at least 1"),
]


@pytest.mark.parametrize(("flags", "says"), WRONG)
def test_a_wrong_value_is_refused_naming_the_flag(flags, says, tiny_llama):
    start = [] if "--model" in flags else ["--model", str(tiny_llama)]
    with pytest.raises(SettingsError) as refused:
        from_arguments([*start, *flags])
    assert says in str(refused.value)


def test_defaults_come_from_the_model_and_the_machine(tiny_llama):
    settings = from_arguments(["--model", str(tiny_llama), "--device", "cpu"])
    assert settings.served_model_name == tiny_llama.name
    assert (settings.engine.max_num_seqs, settings.engine.prefill_token_budget, settings.engine.num_blocks) == (
        32,
        None,
        None,
    )
    assert settings.engine.threads >= 1 and settings.control_host == settings.host == "127.0.0.1"
    assert from_arguments(["--host", "0.0.0.0", "--model", str(tiny_llama)]).control_host == "0.0.0.0"


def test_idle_connections_are_kept_longer_than_a_gateway_keeps_its_own(tiny_llama):
    """Otherwise a request now and then meets a connection that is being closed."""
    from headway_gateway.upstream import POOL_IDLE

    assert from_arguments(["--model", str(tiny_llama)]).keep_alive_seconds > 2 * POOL_IDLE
    schema = json.loads((Path(__file__).parents[2] / "charts/headway/values.schema.json").read_text())
    assert schema["properties"]["runtime"]["properties"]["keepAliveSeconds"]["minimum"] > POOL_IDLE


def test_the_default_model_is_found_without_importing_its_package():
    import sys

    settings = from_arguments([])
    assert settings.engine.model.endswith(".gguf") and settings.served_model_name.startswith("SmolLM2-135M-Instruct")
    assert DEFAULT_MODEL_PACKAGE not in sys.modules
