"""A scripted API server on a real socket, for the parts of the operator that talk to one but need no Kubernetes."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml


class ApiServer:
    """Leases and ConfigMaps with resourceVersions, and scripted answers for everything else."""

    def __init__(self):
        self.leases, self.config_maps, self.version, self.calls = {}, {}, 0, []
        self.script = {}
        """path → list of (status, headers, text), used up one by one; the last one stays."""
        self.down = False
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def answer(self, method, path, body):
        self.calls.append((method, path, body))
        if self.down:
            return 503, {}, "down"
        if path in self.script:
            answers = self.script[path]
            return answers.pop(0) if len(answers) > 1 else answers[0]
        collection, _, name = path.partition("/leases")
        if collection.endswith("/coordination.k8s.io/v1/namespaces/ns"):
            return self.lease(method, name.lstrip("/"), body)
        _, _, name = path.partition("/configmaps/")
        if name in self.config_maps:
            return self.config_map(method, name, body)
        return 404, {}, json.dumps({"message": "not found"})

    def lease(self, method, name, body):
        name = name or body["metadata"]["name"]
        known = self.leases.get(name)
        if method == "POST" and known:
            return 409, {}, json.dumps({"message": "exists"})
        if method != "POST" and not known:
            return 404, {}, json.dumps({"message": "not found"})
        if method != "GET":
            if known and body["metadata"].get("resourceVersion") != known["metadata"]["resourceVersion"]:
                return 409, {}, json.dumps({"message": "stale"})
            self.version += 1
            self.leases[name] = {**body, "metadata": {"name": name, "resourceVersion": str(self.version)}}
        return 200, {}, json.dumps(self.leases[name])

    def config_map(self, method, name, body):
        """GET, and a server-side apply that adds its keys."""
        with self.lock:
            known = self.config_maps[name]
            if method == "PATCH":
                if body["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
                    return 409, {}, json.dumps({"message": "stale"})
                self.version += 1
                metadata = {**known["metadata"], "resourceVersion": str(self.version)}
                known = {"metadata": metadata, "data": {**known["data"], **body["data"]}}
                self.config_maps[name] = known
            return 200, {}, json.dumps(known)

    def _handler(world):  # noqa: N805 -- the handler's own self comes below
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_any(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                status, headers, text = world.answer(self.command, self.path.split("?")[0], body)
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(text.encode()))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST = do_PUT = do_PATCH = handle_any  # noqa: N815 -- the names that http.server looks for

            def log_message(self, *args):
                pass

        return Handler


@pytest.fixture
def api_server(tmp_path, monkeypatch):
    """Credentials of this process lead to it."""
    server = ApiServer()
    user = {"name": "u", "user": {"token": "secret-token"}}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "users": [user],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(document))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    yield server
    server.close()
