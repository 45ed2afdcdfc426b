"""Open-loop load in a process of its own, with its own stopwatch: the server cannot slow it down, and a busy test
cannot make it late.

From a test::

    load = Load(rate=4.0, seconds=30, prompt_tokens=60, output_tokens=40, seed=1)
    with OpenLoop.start(["http://10.96.0.7"], "chat", load, tmp_path / "stage-1.jsonl") as running:
        ...                                   # change something meanwhile; running.lines() tells what has ended so far
        summary = running.finish()            # waits for the last stream
    assert (summary.failed, summary.truncated) == (0, 0)

By hand: ``PYTHONPATH=tests/e2e python -m open_loop --url http://10.96.0.7 --model chat --rate 4 --seconds 30 --out
run.jsonl``.

Every request is a streamed chat completion. With several URLs the requests take turns. The file gets one JSON line for
each request within a second of its end, in order of ending: `due`, `sent`, `first`, `last`, `end` and `chunks` are
seconds of the wall clock since the epoch (None where it did not come that far), `ttft` (from due) and `tpot` seconds;
then `outcome`, `status`, `tokens` and `prompt_tokens` as the server counted them, `finish_reason`, `error`, `in_band`.
Nothing is ever sent twice, so an outcome is what one client without retries saw.

Outcomes, one for each request:

* ``ok``         the stream came to its proper end, with all its tokens where `ignore_eos` promises how many;
* ``shed``       refused with 429 or 503;
* ``failed``     no answer (connection refused, reset, timed out before a status), or any other status;
* ``lost``       an answer began and ended in an in-band error: the documented way to lose a stream;
* ``truncated``  an answer began and just stopped: no error event, no finish_reason or [DONE], or fewer tokens than
  asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from headway_cli.load_generator import (
    BenchTarget,
    PlannedRequest,
    PromptWriter,
    RequestResult,
    learn_prompt_length,
    run_load,
)


@dataclass(frozen=True, slots=True)
class Load:
    """What to send. The same values make the same requests at the same times; another seed makes other prompts."""

    rate: float
    """Arrivals per second."""
    seconds: float
    """How long requests are sent; the last streams end later."""
    prompt_tokens: int
    output_tokens: int
    arrivals: str = "poisson"
    """``poisson``, or ``uniform`` for equal gaps."""
    ignore_eos: bool = True
    seed: int = 0
    service_tier: str | None = None
    tokens_per_word: float | None = None
    """What the model's tokenizer makes of a word; None: two requests ask the server first. Exact lengths need a
    tokenizer made for it."""
    template_tokens: float = 0.0
    """What the chat template adds, where `tokens_per_word` is given."""
    timeout: float = 300.0
    """Seconds after which a request is given up as failed."""

    def planned(self) -> list[PlannedRequest]:
        """The requests; there are rate·seconds of them within one with ``uniform``, and about as many with
        ``poisson``."""
        due: list[float] = []
        if self.arrivals == "uniform":
            due = [number / self.rate for number in range(math.ceil(self.rate * self.seconds - 1e-9))]
        else:
            rng = random.Random(self.seed)
            at = rng.expovariate(self.rate)
            while at < self.seconds:
                due.append(at)
                at += rng.expovariate(self.rate)
        return [PlannedRequest(at, self.prompt_tokens, self.output_tokens, self.service_tier) for at in due]


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts of outcomes, and how late the generator itself was: seconds between due and sent."""

    offered: int
    ok: int
    shed: int
    failed: int
    lost: int
    truncated: int
    lag_p99: float
    lag_max: float
    started: float
    """Of the first second of the load, wall clock."""

    @classmethod
    def of(cls, lines: Sequence[dict[str, Any]], started: float) -> Summary:
        """From the lines of all requests."""
        counts = Counter(line["outcome"] for line in lines)
        lags = sorted(line["sent"] - line["due"] for line in lines) or [0.0]
        return cls(
            offered=len(lines),
            ok=counts["ok"],
            shed=counts["shed"],
            failed=counts["failed"],
            lost=counts["lost"],
            truncated=counts["truncated"],
            lag_p99=lags[math.ceil(0.99 * len(lags)) - 1],
            lag_max=lags[-1],
            started=started,
        )


class OpenLoop:
    """A running generator. Leaving the `with` block ends its process, finished or not."""

    def __init__(self, process: subprocess.Popen[str], out: Path) -> None:
        self._process = process
        self.out = out

    @classmethod
    def start(cls, urls: Sequence[str], model: str, load: Load, out: Path, begin: float | None = None) -> OpenLoop:
        """Starts the process. The load begins at `begin` (wall clock), or within a second or so (`Summary.started`)."""
        out.unlink(missing_ok=True)
        values = {name: value for name, value in asdict(load).items() if name != "ignore_eos" and value is not None}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()] + (
            [] if load.ignore_eos else ["--obey-eos"]
        )
        command = [
            sys.executable,
            __file__,
            *(f"--url={url}" for url in urls),
            f"--model={model}",
            f"--out={out}",
            *flags,
        ]
        command += [] if begin is None else [f"--begin={begin}"]
        return cls(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True), out)

    def __enter__(self) -> OpenLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether requests are still to be sent or to end."""
        return self._process.poll() is None

    def lines(self) -> list[dict[str, Any]]:
        """Of the requests that have ended so far."""
        if not self.out.exists():
            return []
        whole, _, _ = self.out.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def enough(self) -> None:
        """Sends nothing more; what is open comes to its end (`finish` waits for it)."""
        self._process.send_signal(signal.SIGTERM)

    def finish(self, timeout: float = 600.0) -> Summary:
        """Waits until the last request has ended. Raises RuntimeError with what the process said when it failed."""
        said, complained = self._process.communicate(timeout=timeout)
        if self._process.returncode != 0:
            raise RuntimeError(f"the load generator ended with status {self._process.returncode}: {complained[-2000:]}")
        return Summary(**json.loads(said))

    def stop(self) -> None:
        """Ends the process now; its open requests are dropped. Nothing when it has ended already."""
        if self.running:
            self._process.kill()
        self._process.communicate()


class _FreshPrompts(PromptWriter):
    """Prompts that no other seed has, so that a second load gains nothing from the first one's prefixes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def text(self, words: int, number: int) -> str:
        return super().text(words, number + 1_000_003 * self._seed)


def line_of(record: RequestResult, ignore_eos: bool, started: float) -> dict[str, Any]:
    """A record as the file has it; `started` is the wall clock's time of the record's zero."""

    def wall(at: float | None) -> float | None:
        return None if at is None else round(started + at, 4)

    return {
        "due": wall(record.planned.at),
        "sent": wall(record.sent),
        "first": wall(record.first_token),
        "last": wall(record.token_times[-1] if record.token_times else None),
        "end": wall(record.end),
        "ttft": record.ttft,
        "tpot": record.tpot,
        "chunks": [wall(at) for at in record.token_times],
        "outcome": outcome(record, ignore_eos),
        "status": record.status,
        "tokens": record.output_tokens,
        "prompt_tokens": record.prompt_tokens,
        "finish_reason": record.finish_reason,
        "error": record.error,
        "in_band": record.in_band,
    }


def outcome(record: RequestResult, ignore_eos: bool) -> str:
    """The word for what became of it."""
    if record.status in (429, 503):
        return "shed"
    if record.status != 200:
        return "failed"
    if record.in_band:
        return "lost"
    short = ignore_eos and record.output_tokens != record.planned.output_tokens
    return "truncated" if not record.ok or short else "ok"


async def _run(given: argparse.Namespace, load: Load) -> Summary:
    writers = [_FreshPrompts(load.seed * len(given.url) + place) for place in range(len(given.url))]
    targets = [BenchTarget(url.rstrip("/"), given.model, None, load.ignore_eos, load.timeout) for url in given.url]
    for target, writer in zip(targets, writers, strict=True):
        writer.tokens_per_word, writer.fixed_tokens = load.tokens_per_word or 1.0, load.template_tokens
        if load.tokens_per_word is None:
            await learn_prompt_length(target, writer)
    planned = load.planned()
    enough = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, enough.set)
    lines: list[dict[str, Any]] = []
    with given.out.open("w") as file:

        def write_ended(records: Sequence[RequestResult], written: set[int]) -> None:
            for record in records:
                if record.end is not None and id(record) not in written:
                    written.add(id(record))
                    lines.append(line_of(record, load.ignore_eos, started))
                    file.write(json.dumps(lines[-1]) + "\n")
            file.flush()

        async def drive(place: int) -> None:
            written: set[int] = set()
            await run_load(
                targets[place],
                planned[place :: len(targets)],
                writers[place],
                lambda all_: write_ended(all_, written),
                enough,
            )

        await asyncio.sleep((given.begin or 0.0) - time.time())
        started = time.time()
        await asyncio.gather(*(drive(place) for place in range(len(targets))))
    return Summary.of(lines, started)


def main() -> int:
    """Sends the load that the command line describes; prints the summary as JSON."""
    parser = argparse.ArgumentParser(
        description="open-loop load on an OpenAI endpoint; one JSON line per request, a summary at the end"
    )
    parser.add_argument("--url", action="append", required=True, help="base URL without /v1; several take turns")
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True, help="file for one JSON line per request")
    parser.add_argument("--rate", type=float, required=True, help="arrivals per second")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--arrivals", choices=("poisson", "uniform"), default="poisson")
    parser.add_argument("--obey-eos", action="store_true", help="let the model end early")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--service-tier")
    parser.add_argument("--tokens-per-word", type=float, help="default: ask the server")
    parser.add_argument("--template-tokens", type=float, default=0.0)
    parser.add_argument("--begin", type=float, help="wall clock's time of the first second, default: now")
    parser.add_argument("--timeout", type=float, default=300.0)
    given = parser.parse_args()
    fields = {name: value for name, value in vars(given).items() if name in Load.__slots__}
    summary = asyncio.run(_run(given, Load(**fields, ignore_eos=not given.obey_eos)))
    sys.stdout.write(json.dumps(asdict(summary)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
