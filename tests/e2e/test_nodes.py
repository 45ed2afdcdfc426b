"""Nodes that come up with real pods, and go without a trace, whatever ends them."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
import zlib
from pathlib import Path

import psutil
import pytest
from cluster import addresses, binaries
from cluster.errors import CannotRun
from cluster.full_cluster import FullCluster

pytestmark = pytest.mark.cluster

WEB = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 4
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: DoNotSchedule
          labelSelector: {matchLabels: {app: web}}
      volumes: [{name: www, emptyDir: {}}]
      containers:
        - name: web
          image: headway.test/pause:1
          command:
            - /bin/busybox
            - sh
            - -c
            - /bin/busybox hostname > /www/index.html; exec /bin/busybox httpd -f -p 8080 -h /www
          volumeMounts: [{name: www, mountPath: /www}]
          readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}
"""


@pytest.fixture
def folder() -> Path:
    return binaries.CACHE / "run" / f"tests-{os.getpid()}-own"


def test_two_nodes_serve_through_a_service_and_leave_nothing_behind(folder: Path):
    cluster = started(FullCluster(folder, nodes=2, bound=True))
    try:
        cluster.kubectl("apply", "-f", "-", stdin=WEB)
        cluster.wait_for(
            lambda: cluster.get("deployment/web")["status"].get("readyReplicas") == 4, "four pods are ready"
        )
        pods = cluster.get("pods")["items"]
        assert {pod["spec"]["nodeName"] for pod in pods} == {"node1", "node2"}
        address = cluster.get("service/web")["spec"]["clusterIP"]
        answers = {fetch(address) for _ in range(30)}
        assert len(answers & {pod["metadata"]["name"] for pod in pods}) > 1, "one address, several pods behind it"
        assert "Name:" in cluster.kubectl(
            "exec", "deploy/web", "--", "/bin/busybox", "nslookup", "web.default.svc.cluster.local"
        )
        cable = device(folder)
        assert len({trace.split()[0] for trace in traces(folder, cable)}) >= 4, "the test sees what must go"
    finally:
        cluster.down()
    assert traces(folder, cable) == []


def test_a_test_run_that_is_killed_takes_its_cluster_along(folder: Path):
    script = f"""
        import sys, time
        from pathlib import Path
        from cluster.full_cluster import FullCluster
        FullCluster(Path({str(folder)!r}), bound=True).up(lambda text: None)
        print("up", flush=True)
        time.sleep(600)
    """
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    skip_where_nodes_cannot_run()
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, env=env, text=True)
    try:
        assert run.stdout is not None and run.stdout.readline() == "up\n"
        assert FullCluster(folder).running() != []
        cable = device(folder)
    finally:
        run.send_signal(signal.SIGKILL)
        run.communicate()
    deadline = time.monotonic() + 20
    while (running := FullCluster(folder).running()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert running == [], "its programs outlived it"
    FullCluster(folder).down()
    assert traces(folder, cable) == []


def started(cluster: FullCluster) -> FullCluster:
    skip_where_nodes_cannot_run()
    try:
        cluster.up(lambda text: None)
    except CannotRun as error:
        pytest.fail(str(error))
    return cluster


def skip_where_nodes_cannot_run() -> None:
    if lack := FullCluster.lacking() or [f"not built: {name}" for name in binaries.missing(binaries.FULL)]:
        pytest.skip("; ".join(lack))


def fetch(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/", timeout=5) as answer:
        return answer.read().decode().strip()


def device(folder: Path) -> str:
    plan = addresses.remembered(folder)
    assert plan is not None
    return plan.cable


def traces(folder: Path, cable: str) -> list[str]:
    """What of the cluster in `folder` can still be seen on this machine. Its control groups go only when no process is
    left in them."""
    group = f"headway-{zlib.crc32(str(folder).encode()):08x}-"
    seen = [f"control group {path}" for path in Path("/sys/fs/cgroup").glob(f"*/{group}*")]
    seen += [f"control group {path}" for path in Path("/sys/fs/cgroup").glob(f"{group}*")]
    seen += [f"mount {line}" for line in Path("/proc/self/mounts").read_text().splitlines() if str(folder) in line]
    seen += [f"folder {folder}"] if folder.exists() else []
    seen += [f"device {cable}"] if Path("/sys/class/net", cable).exists() else []
    for process in psutil.process_iter(["cmdline", "status"]):
        zombie = process.info["status"] == psutil.STATUS_ZOMBIE
        if not zombie and process.pid != os.getpid() and str(folder) in " ".join(process.info["cmdline"] or []):
            seen.append(f"process {process.info['cmdline'][:3]}")
    return seen
