"""kubectl and helm against one kubeconfig, as the tests use them."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster import binaries
from cluster.audit import AuditLog
from cluster.errors import CannotRun, CommandFailed


class Client:
    """A cluster that somebody else runs: what `KUBECONFIG` names, or the base of our own."""

    audit: AuditLog | None = None

    def __init__(self, kubeconfig: Path, home: Path) -> None:
        """`home` takes kubectl's discovery cache and helm's files, so that nothing of the user's is read or written."""
        self.kubeconfig = kubeconfig
        self._home = home

    def kubectl(self, *args: str, stdin: str | None = None, timeout: float = 120.0) -> str:
        """Standard output of kubectl. Raises CommandFailed with its standard error."""
        return self._run("kubectl", args, stdin, timeout)

    def helm(self, *args: str, stdin: str | None = None, timeout: float = 300.0) -> str:
        """Standard output of helm. Raises CommandFailed with its standard error, CannotRun where helm is not built."""
        return self._run("helm", args, stdin, timeout)

    def get(self, what: str, *args: str, namespace: str | None = None) -> dict[str, Any]:
        """One object (``deployment/chat``) or list (``pods``) as the API server has it."""
        scope = ("-n", namespace) if namespace else ()
        document: dict[str, Any] = json.loads(self.kubectl("get", what, *scope, *args, "-o", "json"))
        return document

    def service_account_kubeconfig(self, namespace: str, name: str) -> Path:
        """A kubeconfig with the account's token (one hour) and nothing else. The account must exist."""
        document = json.loads(self.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
        token = self.kubectl("create", "token", name, "-n", namespace, "--duration", "1h").strip()
        for user in document["users"]:
            user["user"] = {"token": token}
        path = self._home / f"{namespace}-{name}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(json.dumps(document))
        return path

    def wait_for(self, condition: Callable[[], bool], what: str, *, patience: float = 60.0, pause: float = 0.1) -> None:
        """Polls until `condition` holds; a command that fails counts as not yet. Raises TimeoutError naming `what`."""
        deadline = time.monotonic() + patience
        last = ""
        while True:
            try:
                if condition():
                    return
            except CommandFailed as error:
                last = f"; last: {error}"
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {patience:.0f} s{last}")
            time.sleep(pause)

    def stop_api_server(self, *, kill: bool = False) -> None:
        """Raises CannotRun: this cluster is not ours to stop."""
        raise CannotRun(
            f"the cluster of {self.kubeconfig} is not ours to stop (kill={kill}): unset KUBECONFIG to test on "
            "one of our own"
        )

    def start_api_server(self) -> None:
        """Raises CannotRun: this cluster is not ours to start."""
        raise CannotRun(
            f"the cluster of {self.kubeconfig} is not ours to start: unset KUBECONFIG to test on one of our own"
        )

    def _run(self, program: str, args: tuple[str, ...], stdin: str | None, timeout: float) -> str:
        binaries.require([program])
        env = {**os.environ, "KUBECONFIG": str(self.kubeconfig), "HOME": str(self._home)}
        done = subprocess.run(
            [binaries.path(program), *args],
            input=stdin,
            capture_output=True,
            text=True,
            env=env,
            check=False,
            timeout=timeout,
        )
        if done.returncode:
            raise CommandFailed(f"{program} {' '.join(args)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout
