"""`headway up`: a gateway, replicas and their knobs on one machine, from one command; Ctrl-C leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from headway_core.contract.policy import Endpoint
from headway_core.contract.reports import ReplicaState
from headway_core.errors import InvalidInput

from headway_cli.live_view import LiveView
from headway_cli.local_controller import LocalController
from headway_cli.policy_writer import PolicyWriter, write_policy
from headway_cli.report_poller import gateway_report, runtime_reports
from headway_cli.slo_file import read_slo
from headway_cli.supervisor import START_LIMIT, Child, Supervisor, free_port
from headway_cli.up_settings import UpSettings

_POLL = 1.0


class LocalStack:
    """The processes of one `headway up`, with the ports and files they share."""

    def __init__(self, settings: UpSettings, state: Path) -> None:
        self.settings = settings
        self.policies = state / "policy"
        self.endpoints = {
            f"replica-{n + 1}": Endpoint("127.0.0.1", free_port(), free_port()) for n in range(settings.replicas)
        }
        self.gateway_control = free_port()
        self.controller = LocalController(settings.slo, self.endpoints)
        write_policy(self.policies, self.controller.policy())
        self.policy_writer = PolicyWriter(self.policies)
        self.policy_writer.put(self.controller.policy())
        # Read now, not at the end of the start: an edit while the model loads counts too.
        self.slo_content = _content(settings.slo_path)
        self.slo_misses = 0
        """Polls in a row that found no file."""
        self.gateway = Child("gateway", self._gateway_arguments(), state / "gateway.log")
        self.replicas = {
            name: Child(name, self._runtime_arguments(name), state / f"{name}.log") for name in self.endpoints
        }
        # The gateway stops first, so that it can finish its streams on replicas that still run.
        self.supervisor = Supervisor([self.gateway, *self.replicas.values()])

    def _gateway_arguments(self) -> list[str]:
        settings = self.settings
        return [
            *("headway_gateway", "--host", settings.host, "--port", str(settings.port)),
            *("--control-port", str(self.gateway_control), "--policy", str(self.policies)),
            *("--drain-seconds", str(max(0.01, settings.drain_seconds))),
        ]

    def _runtime_arguments(self, name: str) -> list[str]:
        settings, endpoint = self.settings, self.endpoints[name]
        return [
            *("headway_runtime", "--model", str(settings.model), "--pool", settings.slo.target_name),
            *("--replica-id", name, "--policy", str(self.policies)),
            *("--host", endpoint.host, "--port", str(endpoint.port), "--control-port", str(endpoint.control_port)),
            *("--threads", str(settings.threads), "--drain-seconds", str(settings.drain_seconds)),
            *settings.runtime_arguments,
        ]

    @property
    def url(self) -> str:
        """Where the gateway answers."""
        return f"http://{_reachable(self.settings.host)}:{self.settings.port}"

    @property
    def gateway_control_url(self) -> str:
        """The gateway's control port."""
        return f"http://{_reachable(self.settings.host)}:{self.gateway_control}"

    @property
    def runtime_control_urls(self) -> dict[str, str]:
        """Replica → its control port."""
        return {name: f"http://{endpoint.host}:{endpoint.control_port}" for name, endpoint in self.endpoints.items()}

    @property
    def alive(self) -> list[str]:
        """Replicas whose process runs."""
        return [name for name, child in self.replicas.items() if child.alive]


def _reachable(host: str) -> str:
    """The host of a URL for what listens on `host`."""
    if host in ("0.0.0.0", "::"):  # noqa: S104 -- compared, not bound
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


@contextlib.contextmanager
def _exclusive(state: Path) -> Iterator[None]:
    """Locks the folder: two would set the knobs of each other's replicas. Raises InvalidInput if it is locked."""
    with (state / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInput(f"--state {state}: another `headway up` runs with it: name another") from None
        yield


class StartFailed(Exception):
    """A process ended before the first answer; the message holds the end of its log."""


def run(settings: UpSettings) -> int:
    """Runs until a signal; 0 after a clean stop, 1 when it could not start. Raises InvalidInput: the folder is used."""
    state = settings.state or Path(tempfile.mkdtemp(prefix="headway-"))
    with _exclusive(state):
        code = _run(LocalStack(settings, state), state)
    if code == 0 and settings.state is None:
        shutil.rmtree(state, ignore_errors=True)
    return code


def _run(stack: LocalStack, state: Path) -> int:
    try:
        asyncio.run(_serve(stack, state))
    except StartFailed as error:
        stack.supervisor.kill()
        print(f"headway up: {error}", file=sys.stderr)
        return 1
    except BaseException:
        stack.supervisor.kill()
        raise
    return 0


async def _serve(stack: LocalStack, state: Path) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    supervisor = stack.supervisor
    with LiveView(sys.stdout) as view:
        async with httpx.AsyncClient(timeout=2.0) as client:
            view.say(f"starting {stack.settings.replicas} x {stack.settings.model.name}; logs and policy in {state}")
            supervisor.start(time.monotonic())
            if await _until_ready(stack, client, stop, view.say):
                view.say(_welcome(stack, await _model_name(client, stack.url)))
                await _watch(stack, client, stop, view)
        view.say("stopping: running requests may finish; Ctrl-C again ends them now")
    loop.add_signal_handler(signal.SIGINT, supervisor.kill)
    loop.add_signal_handler(signal.SIGTERM, supervisor.kill)
    await asyncio.to_thread(supervisor.stop, stack.settings.drain_seconds + 5)


async def _until_ready(
    stack: LocalStack, client: httpx.AsyncClient, stop: asyncio.Event, say: Callable[[str], None]
) -> bool:
    """True when gateway and replicas are ready, False when `stop` was set before. Raises StartFailed."""
    started = time.monotonic()
    shown: dict[str, str] = {}
    while not stop.is_set():
        for child in stack.supervisor.children:
            if not child.alive:
                raise StartFailed(
                    f"{child.name} ended while starting; the end of {child.log_path}:\n{child.last_lines()}"
                )
        reports = await runtime_reports(client, stack.runtime_control_urls)
        for name, report in reports.items():
            message = report.message or report.state.value
            if shown.get(name) != message:
                shown[name] = message
                say(f"[{time.monotonic() - started:5.1f} s] {name}: {message}")
        # The gateway's own view decides: a request that comes right after "ready" must find a replica there.
        gateway = await gateway_report(client, stack.gateway_control_url)
        if gateway is not None and sum(pool.ready_replicas for pool in gateway.pools) == len(stack.endpoints):
            return True
        if time.monotonic() - started > START_LIMIT:
            raise StartFailed(f"not ready after {START_LIMIT:.0f} s; see the logs in {stack.gateway.log_path.parent}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.3)
    return False


async def _watch(stack: LocalStack, client: httpx.AsyncClient, stop: asyncio.Event, view: LiveView) -> None:
    """Restarts processes, adjusts the knobs and shows the status, until `stop` is set."""
    controller, writer = stack.controller, stack.policy_writer
    while not stop.is_set():
        now = time.monotonic()
        for line in stack.supervisor.check(now):
            view.say(line)
        _reread(stack, view.say)
        reports = await runtime_reports(client, stack.runtime_control_urls)
        gateway = await gateway_report(client, stack.gateway_control_url)
        healthy = [name for name, report in reports.items() if report.state is not ReplicaState.FAILED]
        if gateway is not None:
            healthy.append(stack.gateway.name)
        for line in stack.supervisor.end_hung(healthy, time.monotonic()):
            view.say(line)
        changed = controller.observe(reports, gateway, stack.alive, now)
        if changed is not None:
            writer.put(changed)
            knobs = changed.knobs
            view.say(f"knobs: max_num_seqs {knobs.max_num_seqs}, prefill token budget {knobs.prefill_token_budget}")
        for line in writer.write():
            view.say(line)
        view.show(controller.status(stack.alive, now), now)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _POLL)


def _reread(stack: LocalStack, say: Callable[[str], None]) -> None:
    """Adopts the SLO file when its content changed; one that is broken, or gone, changes nothing and is said once."""
    path, controller = stack.settings.slo_path, stack.controller
    content = _content(path)
    stack.slo_misses = stack.slo_misses + 1 if content is None else 0
    if stack.slo_misses == 2:  # an editor that renames leaves a gap, too short for two polls
        say(f"the promise stays as it was: {path} is no file that can be read any more")
    if content is None or content == stack.slo_content:
        return
    stack.slo_content = content
    try:
        slo = read_slo(path)
        if slo.target_name != controller.slo.target_name:
            raise InvalidInput(f"must stay {controller.slo.target_name!r} while it runs", "spec.targetRef.name")
    except InvalidInput as error:
        say(f"the promise stays as it was: {error}")
        return
    stack.policy_writer.put(controller.adopt(slo))
    say(f"{path} changed: its promise is in force from now")


def _content(path: Path) -> bytes | None:
    """What the file holds; None if it cannot be read. A pipe is read at the start only, since reading it may block."""
    try:
        return path.read_bytes() if path.is_file() else None
    except OSError:
        return None


async def _model_name(client: httpx.AsyncClient, url: str) -> str:
    response = await client.get(f"{url}/v1/models")
    return str(response.json()["data"][0]["id"])


def _welcome(stack: LocalStack, model: str) -> str:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": model, "messages": question, "max_tokens": 40, "temperature": 0})
    control = stack.gateway_control_url
    return (
        f"\nready: {stack.url}  (its status page is the same address in a browser)\n\n"
        f"curl {stack.url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}\n\n"
        f"the promise: {stack.settings.slo_path} (edit it, it is read again); Ctrl-C stops\n"
        f"metrics: {control}/metrics; why the knobs are as they are: `headway plan --from {control}`\n"
    )
