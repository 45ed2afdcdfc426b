"""One certificate authority for each cluster, and the kubeconfigs that carry what it issues. Uses the openssl
command."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from cluster.errors import CannotRun

DAYS = "3650"


class Authority:
    """Keys and certificates in one folder, elliptic curve P-256 throughout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.certificate = folder / "ca.crt"

    def create(self) -> None:
        """Makes the authority's own key and certificate, and the key pair that signs service account tokens."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
        _openssl(
            "req",
            "-x509",
            *_NEW_KEY,
            "-days",
            DAYS,
            "-subj",
            "/CN=headway-test",
            *usage,
            "-keyout",
            self.key("ca"),
            "-out",
            self.cert("ca"),
        )
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", self.key("accounts"))
        _openssl("pkey", "-in", self.key("accounts"), "-pubout", "-out", str(self.folder / "accounts.pub"))

    def key(self, name: str) -> str:
        """Path of the private key of that name."""
        return str(self.folder / f"{name}.key")

    def cert(self, name: str) -> str:
        """Path of the certificate of that name."""
        return str(self.folder / f"{name}.crt")

    def issue(self, name: str, *, user: str, group: str | None = None, hosts: tuple[str, ...] = ()) -> None:
        """A certificate for `user` (common name) in `group` (organisation), for `hosts` such as ``DNS:localhost`` or
        ``IP:127.0.0.1``."""
        subject = (f"/O={group}" if group else "") + f"/CN={user}"
        extensions = self.folder / f"{name}.ext"
        extensions.write_text(
            "extendedKeyUsage=serverAuth,clientAuth\n" + (f"subjectAltName={','.join(hosts)}\n" if hosts else "")
        )
        request = str(self.folder / f"{name}.csr")
        _openssl("req", *_NEW_KEY, "-subj", subject, "-keyout", self.key(name), "-out", request)
        _openssl(
            *(
                "x509",
                "-req",
                "-in",
                request,
                "-days",
                DAYS,
                "-CA",
                self.cert("ca"),
                "-CAkey",
                self.key("ca"),
                "-CAcreateserial",
            ),
            *("-extfile", str(extensions), "-out", self.cert(name)),
        )

    def kubeconfig(self, path: Path, server: str, *, cert: str | None = None, token: str | None = None) -> Path:
        """Writes a kubeconfig for the certificate named `cert`, or for a bearer token. Returns `path`."""
        user = (
            {"token": token}
            if token
            else {"client-certificate": self.cert(str(cert)), "client-key": self.key(str(cert))}
        )
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "test", "cluster": {"server": server, "certificate-authority": str(self.certificate)}}
            ],
            "users": [{"name": "test", "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "current-context": "test",
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(document, indent=1))
        return path


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def _openssl(*args: str) -> None:
    try:
        done = subprocess.run(["openssl", *args], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise CannotRun("there is no `openssl` on PATH: install it") from None
    if done.returncode:
        raise CannotRun(f"openssl {args[0]} failed: {done.stderr.strip()[-500:]}")
