"""A world for the operator to act in: a real API server, and pods whose kubelet, gateway and runtime are scripted here.

`world` builds it in a namespace of its own. Nobody runs containers: `World` gives pods an address and readiness,
answers their load reports on loopback addresses, and has them read the policy when they are touched, as a kubelet
would.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
import yaml
from headway_core.contract.documents import dump, load_policy
from headway_core.contract.kubernetes import ANNOTATION_POLICY_TOUCH
from headway_core.contract.policy import Knobs
from headway_core.contract.reports import (
    Acknowledgement,
    ClassReport,
    EngineLimits,
    GatewayReport,
    Mix,
    PoolReport,
    ReplicaState,
    RuntimeReport,
    StepTimeReport,
)
from kubernetes import client, config

ROOT = Path(__file__).parents[3]
CRD = ROOT / "crds" / "servingslos.headway.dev.yaml"
TARGET, GATEWAY = "chat-runtime", "headway-gateway"
MODEL = StepTimeReport(0.010, 2e-4, 2e-4, 1e-6, 0.0, 0.0, 1, 5000, 256, 4096, 0.02)
MIX = Mix(500, 400.0, 0.0, 100.0, 450.0)
CAPACITY = EngineLimits(256, 4096, 8192, 16, 65536)
RULES = [
    ("coordination.k8s.io", "leases", "create get update"),
    ("headway.dev", "servingslos", "list watch"),
    ("headway.dev", "servingslos/status", "patch"),
    ("apps", "deployments", "list watch"),
    ("apps", "deployments/scale", "get patch"),
    ("", "pods", "list watch patch"),
    ("", "services", "list watch"),
    ("", "configmaps", "get patch"),
    ("autoscaling", "horizontalpodautoscalers", "list"),
    ("", "events", "create"),
]
"""(API group, resource, verbs): what the operator needs, and nothing else."""


def without(verb, resource):
    """The rules, less one verb."""
    return [
        (group, name, " ".join(v for v in verbs.split() if (v, name) != (verb, resource)))
        for group, name, verbs in RULES
    ]


def _words(body):
    """A status patch as its conditions, short enough for the line of an assertion; anything else whole."""
    listed = (body or {}).get("status", {}).get("conditions")
    if listed is None:
        return [json.dumps(body)]
    return [f"{known['type']}={known['status']}/{known['reason']}: {known['message']}" for known in listed]


class Operator:
    """The real program in a process of its own, with its own account's credentials."""

    def __init__(self, kubeconfig, namespace, log, *flags):
        command = [
            sys.executable,
            "-m",
            "headway_operator",
            "--namespace",
            namespace,
            "--port",
            "0",
            "--interval",
            "1s",
            *flags,
        ]
        self.log = log
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        with log.open("ab") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, cwd="/")

    def stop(self, number=signal.SIGTERM):
        """The exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=30)

    @property
    def text(self):
        return self.log.read_text()

    @property
    def port(self):
        """Where it answers, by its own words; None before it says so."""
        found = re.search(r"/healthz on port (\d+)", self.text)
        return int(found[1]) if found else None

    def metrics(self):
        """The text of /metrics; empty before it answers."""
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer,
        ):
            return answer.read().decode()
        return ""

    @property
    def leads(self):
        return self.port is not None and "headway_operator_leading 1.0" in self.metrics()

    def cpu(self):
        """CPU seconds used so far."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system


class World:
    """One namespace with a target, a gateway, a policy ConfigMap and an account for the operator."""

    rules = RULES

    def __init__(self, plane, namespace, tmp):
        self.plane, self.namespace, self.tmp = plane, namespace, tmp
        self.api = config.new_client_from_config(str(plane.kubeconfig))
        self.core, self.apps, self.custom = (
            client.CoreV1Api(self.api),
            client.AppsV1Api(self.api),
            client.CustomObjectsApi(self.api),
        )
        self.born_at = plane.audit.path.stat().st_size if plane.audit else 0
        """Where the audit log was before this namespace had anything in it."""
        self.user = f"system:serviceaccount:{namespace}:operator"
        self.operators = []
        self.rate = 0.0
        """Requests a second that arrive at the gateway."""
        self.quality = 1.0
        """Share of requests that keep their promise."""
        self.start_up, self.pause = 0.0, 0.2
        """Seconds until a runtime is ready; between two rounds of the kubelet."""
        self.delay = 0.0
        """Seconds that every pod takes to report."""
        self.model, self.mix, self.limits = MODEL, MIX, CAPACITY
        self.silent, self.garbage, self.deaf, self.stuck = set(), set(), set(), {}
        """Pods that do not answer; that answer nonsense; that never read a policy; that fail to start, with the reason
        why."""
        self.never, self.refusal, self.clamped = False, None, {}
        """Whether runtimes never answer; why they cannot read a policy; what they clamp."""
        self.running = {}
        self.born, self.addresses, self.policies, self.touched = {}, {}, {}, {}
        self.offered = 0.0
        self.counted_at = time.monotonic()
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("0.0.0.0", 0), self._handler())
        self.server.handle_error = lambda *args: None  # an operator that is killed resets its connections
        self.server.daemon_threads = True
        self.port = self.server.server_port
        self.stopping = threading.Event()
        self.threads = [
            threading.Thread(target=self.server.serve_forever, daemon=True),
            threading.Thread(target=self._kubelet, daemon=True),
        ]

    def start(self):
        for thread in self.threads:
            thread.start()

    def close(self):
        for operator in self.operators:
            operator.stop(signal.SIGKILL)
        self.stopping.set()
        self.server.shutdown()
        self.server.server_close()
        for thread in self.threads:
            thread.join(10)
        self.api.close()

    # ------------------------------------------------------------ objects

    def build(self, replicas=1, gateways=1):
        """Account, ConfigMap, Services, target and gateway pods."""
        self.grant(RULES)
        self.core.create_namespaced_config_map(self.namespace, {"metadata": {"name": f"{GATEWAY}-policy"}})
        self.service(TARGET, {"headway.dev/runtime": TARGET})
        self.service(GATEWAY, {"headway.dev/gateway": GATEWAY})
        self.deploy(TARGET, replicas, {"headway.dev/runtime": TARGET})
        self.deploy(GATEWAY, gateways, {"headway.dev/gateway": GATEWAY})

    def grant_all(self):
        """The account and its rights, nothing else."""
        self.grant(RULES)

    def grant(self, rules, account="operator"):
        rbac = client.RbacAuthorizationV1Api(self.api)
        with contextlib.suppress(client.ApiException):
            self.core.create_namespaced_service_account(self.namespace, {"metadata": {"name": account}})
        body = {
            "metadata": {"name": account},
            "rules": [
                {"apiGroups": [group], "resources": [name], "verbs": verbs.split()}
                for group, name, verbs in rules
                if verbs
            ],
        }
        try:
            rbac.create_namespaced_role(self.namespace, body)
        except client.ApiException:
            rbac.replace_namespaced_role(account, self.namespace, body)
        with contextlib.suppress(client.ApiException):
            rbac.create_namespaced_role_binding(
                self.namespace,
                {
                    "metadata": {"name": account},
                    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": account},
                    "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": self.namespace}],
                },
            )

    def service(self, name, selector):
        ports = [{"name": "http", "port": 8000}, {"name": "control", "port": 8001}]
        self.core.create_namespaced_service(
            self.namespace,
            {"metadata": {"name": name}, "spec": {"clusterIP": "None", "selector": selector, "ports": ports}},
        )

    def deploy(self, name, replicas, labels):
        container = {"name": "main", "image": "none", "ports": [{"name": "control", "containerPort": self.port}]}
        self.apps.create_namespaced_deployment(
            self.namespace,
            {
                "metadata": {"name": name},
                "spec": {
                    "replicas": replicas,
                    "selector": {"matchLabels": labels},
                    "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
                },
            },
        )

    def slo(self, name="chat", annotations=None, **spec):
        whole = {
            "targetRef": {"name": TARGET},
            "gatewayRef": {"name": GATEWAY},
            "objectives": {"ttft": {"target": "2s"}, "tpot": {"target": "50ms"}},
            "evaluation": {"window": "4s", "minSamples": 10},
            "behavior": {"scaleDown": {"stabilizationWindow": "6s"}},
            **spec,
        }
        body = {
            "apiVersion": "headway.dev/v1alpha1",
            "kind": "ServingSLO",
            "metadata": {"name": name, "annotations": annotations or {}},
            "spec": {key: value for key, value in whole.items() if value is not None},
        }
        return self.custom.create_namespaced_custom_object(
            "headway.dev", "v1alpha1", self.namespace, "servingslos", body
        )

    def edit(self, patch, name="chat"):
        return self.custom.patch_namespaced_custom_object(
            "headway.dev", "v1alpha1", self.namespace, "servingslos", name, patch
        )

    def get(self, name="chat"):
        return self.custom.get_namespaced_custom_object("headway.dev", "v1alpha1", self.namespace, "servingslos", name)

    def delete(self, name="chat"):
        return self.custom.delete_namespaced_custom_object(
            "headway.dev", "v1alpha1", self.namespace, "servingslos", name
        )

    def status(self, name="chat"):
        return self.get(name).get("status") or {}

    def condition(self, kind, name="chat"):
        """(status, reason, message)."""
        found = next((known for known in self.status(name).get("conditions", []) if known["type"] == kind), {})
        return found.get("status"), found.get("reason"), found.get("message", "")

    def policy(self, name="chat"):
        text = (self.core.read_namespaced_config_map(f"{GATEWAY}-policy", self.namespace).data or {}).get(
            f"{name}.json"
        )
        return load_policy(text) if text else None

    def scale(self):
        return self.apps.read_namespaced_deployment(TARGET, self.namespace).spec.replicas

    def pods(self, label="headway.dev/runtime"):
        return sorted(
            pod.metadata.name for pod in self.core.list_namespaced_pod(self.namespace, label_selector=label).items
        )

    def events(self):
        return [
            (event.reason, event.message)
            for event in self.core.list_namespaced_event(self.namespace).items
            if event.involved_object.kind == "ServingSLO"
        ]

    def outage(self, seconds, meanwhile=lambda: None):
        """Kills the API server, starts it again, and waits until the controllers have noticed: their informers back off
        for a minute."""
        self.plane.stop_api_server(kill=True)
        try:
            time.sleep(seconds)
            meanwhile()
        finally:
            self.plane.start_api_server()

    def wait_for_controllers(self):
        """After an outage Deployments make no pods for up to a minute; tests that follow should not have to know."""
        self.deploy("probe", 1, {"probe": "x"})
        self.wait(lambda: self.pods("probe"), "the controllers work again", patience=180)
        self.apps.delete_namespaced_deployment("probe", self.namespace)

    # ------------------------------------------------------------ the operator

    def operator(self, *flags, account="operator"):
        kubeconfig = self.plane.service_account_kubeconfig(self.namespace, account)
        own = self.tmp / f"kubeconfig-{len(self.operators)}"
        own.write_text(kubeconfig.read_text())
        started = Operator(own, self.namespace, self.tmp / f"operator-{len(self.operators)}.log", *flags)
        self.operators.append(started)
        return started

    def wait(self, holds, what, patience=40.0):
        """Polls until `holds()` is true and returns it; the operators' logs are in the message when it does not
        come."""
        deadline = time.monotonic() + patience
        while True:
            with contextlib.suppress(client.ApiException):
                if found := holds():
                    return found
            if time.monotonic() > deadline:
                logs = "\n".join(operator.text[-3000:] for operator in self.operators)
                state = json.dumps(self.status(), indent=1)[:6000]
                raise AssertionError(f"{what}: not within {patience:.0f} s\n{state}\n{logs}")
            time.sleep(0.15)

    def wait_condition(self, kind, status, reason, patience=40.0, name="chat"):
        """The message of the condition, once it has this status and reason."""
        wanted = lambda: self.condition(kind, name)[:2] == (status, reason)  # noqa: E731
        self.wait(wanted, f"{kind}={status}/{reason}", patience)
        return self.condition(kind, name)[2]

    def changes(self, since):
        """Audit entries of everything that the account changed, the lease and reviews of rights apart."""
        self.plane.audit.settle()
        verbs = {"create", "update", "patch", "delete"}
        entries = self.plane.audit.entries(since=since, user=self.user, verb=verbs)
        return [
            entry
            for entry in entries
            if entry.resource not in ("leases", "selfsubjectaccessreviews") and entry.code < 300
        ]

    def writes(self, since):
        """(verb, resource[/subresource]) of each change."""
        return [
            (entry.verb, f"{entry.resource}/{entry.subresource}" if entry.subresource else entry.resource)
            for entry in self.changes(since)
        ]

    def wait_until_silent(self, quiet=3.0, patience=60.0):
        """Returns when nothing was written for `quiet` seconds."""
        deadline = time.monotonic() + patience
        while True:
            mark = self.plane.audit.mark()
            time.sleep(quiet)
            if not (written := self.writes(mark)):
                return
            assert time.monotonic() < deadline, written

    def assert_silent(self, since, note=""):
        """Nothing was written; else what it was, word by word."""
        written = [
            f"{entry.verb} {entry.resource} {entry.name}\n  " + "\n  ".join(_words(entry.body))
            for entry in self.changes(since)
        ]
        assert not written, "\n".join([str(note), *written])

    # ------------------------------------------------------------ the scripted pods

    def _kubelet(self):
        while not self.stopping.wait(self.pause):
            with contextlib.suppress(Exception):  # the API server is stopped by some tests
                self._round()

    def _round(self):
        for pod in self.core.list_namespaced_pod(self.namespace).items:
            name, now = pod.metadata.name, time.monotonic()
            self.born.setdefault(name, now)
            if name in self.stuck:
                self._fail(name, self.stuck[name])
            elif not (pod.status.pod_ip) and now - self.born[name] >= (
                self.start_up if "headway.dev/runtime" in pod.metadata.labels else 0
            ):
                self._ready(name)
            touch = (pod.metadata.annotations or {}).get(ANNOTATION_POLICY_TOUCH)
            if (
                pod.status.pod_ip
                and name not in self.deaf
                and (touch != self.touched.get(name) or name not in self.policies)
            ):
                self.read_policies(name)
                self.touched[name] = touch

    def _ready(self, name):
        index = len(self.addresses) + 1
        address = f"127.77.{index // 250}.{index % 250 + 1}"
        self.addresses[address] = name
        self._status(name, {"phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": "True"}]})

    def _fail(self, name, reason):
        waiting = [
            {
                "name": "main",
                "image": "none",
                "imageID": "",
                "ready": False,
                "restartCount": 9,
                "state": {"waiting": {"reason": reason}},
            }
        ]
        self._status(
            name,
            {"phase": "Pending", "containerStatuses": waiting, "conditions": [{"type": "Ready", "status": "False"}]},
        )

    def unready(self, name):
        """Fails its readiness probe from now on."""
        self._status(name, {"conditions": [{"type": "Ready", "status": "False"}]})

    def _status(self, name, status):
        self.core.patch_namespaced_pod_status(name, self.namespace, {"status": status})

    def read_policies(self, name):
        try:
            data = self.core.read_namespaced_config_map(f"{GATEWAY}-policy", self.namespace).data or {}
        except client.ApiException:
            return
        found = [load_policy(text) for text in data.values()]
        known = self.policies.get(name)
        for policy in found:
            if policy.pool.name == TARGET and (known is None or policy.revision > known.revision):
                known = policy
        self.policies[name] = known

    def count(self):
        """Lets time pass at the gateway's counters."""
        with self.lock:
            now = time.monotonic()
            self.offered += self.rate * (now - self.counted_at)
            self.counted_at = now
            return int(self.offered)

    def report(self, name):
        policy = self.policies.get(name)
        knobs = policy.knobs if policy else Knobs()
        effective = Knobs(
            min(knobs.max_num_seqs or self.limits.max_num_seqs, self.limits.max_num_seqs),
            min(knobs.prefill_token_budget or self.limits.prefill_token_budget, self.limits.prefill_token_budget),
        )
        answer = (
            Acknowledgement(policy.revision, policy.slo_uid, effective, self.clamped, 0.0, self.refusal)
            if policy
            else None
        )
        if name.startswith(GATEWAY):
            offered = self.count()
            good = int(offered * self.quality)
            counted = ClassReport(
                offered=offered,
                admitted=offered,
                outcomes={"ok": offered},
                attained={"ttft": good, "tpot": good, "all": good},
                judged={"ttft": offered, "tpot": offered, "all": offered},
                ttft={110: offered},
                tpot={78: offered},
            )
            default = policy.default_class if policy else "default"
            pool = PoolReport(TARGET, {default: counted}, answer, replica_in_flight=dict(self.running))
            return GatewayReport(name, f"boot-{name}", 1, time.time(), ReplicaState.READY, (pool,))
        return RuntimeReport(
            replica_id=name,
            pool=TARGET,
            model="m",
            boot_id=f"boot-{name}",
            seq=1,
            at=time.time(),
            state=ReplicaState.READY,
            limits=self.limits,
            effective=effective,
            policy=answer,
            running=self.running.get(name, 0),
            step_time=self.model,
            mix=self.mix,
        )

    def _handler(world):  # noqa: N805 -- the handler's own self comes below
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self):
                name = world.addresses.get(self.connection.getsockname()[0], "")
                if name in world.silent or (world.never and name.startswith(TARGET)):
                    self.close_connection = True
                    return
                time.sleep(world.delay)
                body = b"<html>not a report</html>" if name in world.garbage else dump(world.report(name)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        return Handler


@pytest.fixture(scope="session")
def crd(control_plane):
    """The control plane, with the ServingSLO resource established."""
    control_plane.kubectl("apply", "--server-side", "-f", str(CRD))
    control_plane.kubectl("wait", "--for=condition=Established", "crd/servingslos.headway.dev", "--timeout=30s")
    control_plane.wait_for(
        lambda: control_plane.kubectl("explain", "sslo") != "", "kubectl knows the short name", patience=30
    )
    return control_plane


@pytest.fixture
def world(crd, namespace, tmp_path):
    """A namespace where nothing stands yet; `build` it."""
    made = World(crd, namespace, tmp_path)
    made.start()
    yield made
    made.close()


@pytest.fixture
def tools():
    """What tests need beside the world."""
    return type(
        "Tools",
        (),
        {"without": staticmethod(without), "rules": RULES, "crd": yaml.safe_load(CRD.read_text()), "path": CRD},
    )
