"""etcd, an API server and a controller manager: a Kubernetes with all its rules and no nodes. Runs as any user, on any
free port."""

from __future__ import annotations

import json
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from cluster import audit, binaries
from cluster.audit import AuditLog
from cluster.certificates import Authority
from cluster.client import Client
from cluster.daemons import Daemon, free_port
from cluster.errors import NotReady


class ControlPlane(Client):
    """Everything it has lies in `folder`; several run side by side."""

    def __init__(self, folder: Path, *, bound: bool = False) -> None:
        """`bound`: its programs die with the process that calls `up`."""
        super().__init__(folder / "admin.kubeconfig", folder / "home")
        self.folder = folder
        self.audit = AuditLog(folder / "audit.log")
        self.authority = Authority(folder / "pki")
        self.address = "127.0.0.1"
        self.services = "10.96.0.0/16"
        self.kubernetes_service = "10.96.0.1"
        self._etcd = Daemon(folder, "etcd", bound=bound)
        self._api_server = Daemon(folder, "kube-apiserver", bound=bound)
        self._controllers = Daemon(folder, "kube-controller-manager", bound=bound)

    def up(self, say: Callable[[str], None]) -> None:
        """Starts everything and returns when pods could be made. Raises CannotRun or NotReady; what did start is then
        stopped again."""
        binaries.require(binaries.CONTROL_PLANE)
        if self.folder.exists():
            self.down()
        self._home.mkdir(parents=True)
        try:
            self._prepare(say)
            say("certificates, etcd and API server")
            self._make_certificates()
            self._start_etcd()
            self._start_api_server_somewhere()
            say("controller manager")
            self._start_controllers()
            self._finish(say)
        except BaseException:
            self._stop_all()
            raise

    def down(self) -> None:
        """Stops everything and removes the folder. Nothing running: nothing done."""
        self._stop_all()
        shutil.rmtree(self.folder, ignore_errors=True)

    def running(self) -> list[str]:
        """Names of the programs that run now."""
        return [daemon.name for daemon in self._daemons() if daemon.process() is not None]

    def stop_api_server(self, *, kill: bool = False) -> None:
        """An outage: connections are refused until `start_api_server`."""
        self._api_server.stop(kill=kill)

    def start_api_server(self) -> None:
        """Starts it where it was, with the data it had; returns when it says that it is ready. Raises NotReady."""
        command = json.loads((self.folder / "kube-apiserver.command").read_text())
        self._api_server.start(command)
        self._api_server.wait_until(self._api_ready, "the API server is ready")

    @property
    def server(self) -> str:
        """The API server's URL."""
        return str(json.loads(self.kubeconfig.read_text())["clusters"][0]["cluster"]["server"])

    def _prepare(self, say: Callable[[str], None]) -> None:
        """What must be there before the API server starts; nodes use it."""

    def _finish(self, say: Callable[[str], None]) -> None:
        """What comes after the controllers; nodes use it."""

    def _daemons(self) -> list[Daemon]:
        return [self._controllers, self._api_server, self._etcd]

    def _stop_all(self) -> None:
        for daemon in self._daemons():
            daemon.stop(
                kill=True
            )  # nothing of it is kept, and an API server with watchers takes ten seconds to leave politely

    def _make_certificates(self) -> None:
        pki = self.authority
        pki.create()
        names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost")
        addresses = {"127.0.0.1", self.kubernetes_service, self.address}
        hosts = (*(f"DNS:{name}" for name in names), *(f"IP:{address}" for address in sorted(addresses)))
        pki.issue("apiserver", user="kube-apiserver", hosts=hosts)
        pki.issue("admin", user="admin", group="system:masters")
        pki.issue("kubelet-client", user="apiserver-kubelet-client", group="system:masters")
        pki.issue("front-proxy", user="front-proxy-client")
        pki.issue("controllers", user="system:kube-controller-manager")

    def _start_etcd(self) -> None:
        for attempt in range(3):
            client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
            (self.folder / "etcd.url").write_text(client)
            self._etcd.start(
                [
                    *(
                        binaries.path("etcd"),
                        "--name",
                        "etcd",
                        "--data-dir",
                        str(self.folder / "etcd"),
                        "--unsafe-no-fsync",
                    ),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *(
                        "--listen-peer-urls",
                        peer,
                        "--initial-advertise-peer-urls",
                        peer,
                        "--initial-cluster",
                        f"etcd={peer}",
                    ),
                ]
            )
            try:
                self._etcd.wait_until(lambda url=client: _answers(f"{url}/health"), "etcd answers", patience=30)  # type: ignore[misc]
                return
            except NotReady:
                self._etcd.stop(kill=True)  # most likely somebody took the port between the look and the bind
                shutil.rmtree(self.folder / "etcd", ignore_errors=True)
                if attempt == 2:
                    raise

    def _start_api_server_somewhere(self) -> None:
        for attempt in range(3):
            port = free_port(self.address)
            (self.folder / "kube-apiserver.command").write_text(json.dumps(self._api_server_command(port)))
            self.authority.kubeconfig(self.kubeconfig, f"https://{self.address}:{port}", cert="admin")
            self.authority.kubeconfig(
                self.folder / "controllers.kubeconfig", f"https://{self.address}:{port}", cert="controllers"
            )
            try:
                self.start_api_server()
                return
            except NotReady:
                self._api_server.stop(kill=True)
                if attempt == 2:
                    raise

    def _api_server_command(self, port: int) -> list[str]:
        pki = self.authority
        policy = self.folder / "audit-policy.json"
        policy.write_text(json.dumps(audit.POLICY))
        # Without nodes nobody resolves the Service `kubernetes`, and a loopback address may not stand in its endpoints.
        endpoint = (
            ("--endpoint-reconciler-type=none", "--advertise-address=192.0.2.1") if self.address == "127.0.0.1" else ()
        )
        return [
            *(binaries.path("kube-apiserver"), f"--etcd-servers={(self.folder / 'etcd.url').read_text()}"),
            *(f"--bind-address={self.address}", f"--secure-port={port}", *endpoint),
            *(f"--tls-cert-file={pki.cert('apiserver')}", f"--tls-private-key-file={pki.key('apiserver')}"),
            *(
                f"--client-ca-file={pki.certificate}",
                "--authorization-mode=Node,RBAC",
                "--enable-admission-plugins=NodeRestriction",
            ),
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki.folder / 'accounts.pub'}",
            f"--service-account-signing-key-file={pki.key('accounts')}",
            f"--service-cluster-ip-range={self.services}",
            f"--kubelet-client-certificate={pki.cert('kubelet-client')}",
            f"--kubelet-client-key={pki.key('kubelet-client')}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--requestheader-client-ca-file={pki.certificate}",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            *(
                f"--proxy-client-cert-file={pki.cert('front-proxy')}",
                f"--proxy-client-key-file={pki.key('front-proxy')}",
            ),
            *(
                f"--audit-policy-file={policy}",
                f"--audit-log-path={self.folder / 'audit.log'}",
                "--audit-log-mode=blocking",
            ),
            "--feature-gates=ImageVolume=true",
            "--profiling=false",
        ]

    def _start_controllers(self) -> None:
        pki = self.authority
        self._controllers.start(
            [
                *(binaries.path("kube-controller-manager"), f"--kubeconfig={self.folder / 'controllers.kubeconfig'}"),
                *(
                    "--bind-address=127.0.0.1",
                    "--secure-port=0",
                    "--leader-elect=false",
                    "--use-service-account-credentials=true",
                ),
                *(f"--service-account-private-key-file={pki.key('accounts')}", f"--root-ca-file={pki.certificate}"),
                *("--kube-api-qps=500", "--kube-api-burst=1000"),
            ]
        )
        self._controllers.wait_until(self._accounts_ready, "service accounts are made")

    def _accounts_ready(self) -> bool:
        return self._api("/api/v1/namespaces/default/serviceaccounts/default")

    def _api_ready(self) -> bool:
        return self._api("/readyz")

    def _api(self, path: str) -> bool:
        trust = ssl.create_default_context(cafile=str(self.authority.certificate))
        trust.load_cert_chain(self.authority.cert("admin"), self.authority.key("admin"))
        return _answers(self.server + path, trust)


def _answers(url: str, trust: ssl.SSLContext | None = None) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5, context=trust) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
