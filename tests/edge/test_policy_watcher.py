"""Reading policy documents: whatever lies in the folder, the reader comes back, and the last good policy stays."""

import logging
import os

import pytest
from headway_core.contract import documents
from headway_core.contract.policy import Policy, Pool
from headway_core.slo import DEFAULT_CLASS
from headway_edge import policy_watcher
from headway_edge.policy_watcher import PolicyWatcher
from headway_edge.watched_files import read_files


def document(pool, revision):
    policy = Policy(revision, "u", 1, Pool(pool), (DEFAULT_CLASS,), DEFAULT_CLASS.name)
    return documents.dump(policy).encode()


def watcher(path, pool=None):
    """A watcher, and the list of the policies that it reports, as (pool, revision)."""
    reported = []
    return PolicyWatcher(
        path, lambda: 0.0, lambda policy: reported.append((policy.pool.name, policy.revision)), pool
    ), reported


def test_what_is_no_regular_file_is_passed_over(tmp_path):
    """A pipe without a writer would block the thread that opens it."""
    (tmp_path / "good.json").write_bytes(b"{}")
    (tmp_path / ".hidden.json").write_bytes(b"{}")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nowhere")
    assert read_files(tmp_path, ".json") == {"good.json": b"{}"}
    with pytest.raises(OSError, match="neither a file nor a folder"):
        read_files(tmp_path / "pipe.json")


@pytest.mark.parametrize("kind", ["nothing", "pipe", "no JSON", "too long"])
def test_the_last_good_policy_stays_and_the_fault_is_logged_once(tmp_path, kind, caplog, monkeypatch):
    path = tmp_path / "policy.json"
    path.write_bytes(document("p", 1))
    monkeypatch.setattr(policy_watcher, "MAX_FILE_BYTES", len(document("p", 1)) + 10)
    policies, reported = watcher(path)
    policies.read()
    path.unlink()
    {
        "nothing": lambda: None,
        "pipe": lambda: os.mkfifo(path),
        "no JSON": lambda: path.write_bytes(b"{"),
        "too long": lambda: path.write_bytes(b" " * 20 + document("p", 2)),
    }[kind]()
    with caplog.at_level(logging.WARNING):
        policies.read()
        policies.read()
    assert reported == [("p", 1)] and policies.store.policies["p"].revision == 1
    assert len(caplog.records) == 1 and "the last good one stays in force" in caplog.text


def test_each_policy_is_reported_once_and_of_one_pool_only_if_so_asked(tmp_path):
    everything, all_reported = watcher(tmp_path)
    own, own_reported = watcher(tmp_path, "b")
    for name in "ab":
        (tmp_path / f"{name}.json").write_bytes(document(name, 1))
    for policies in (everything, own, everything, own):
        policies.read()
    assert (all_reported, own_reported) == ([("a", 1), ("b", 1)], [("b", 1)])


async def test_a_changed_file_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(policy_watcher, "READ_SECONDS", 0.01)
    path = tmp_path / "policy.json"
    path.write_bytes(document("p", 1))

    class Noticed(Exception):
        pass

    def changed(policy):
        if policy.revision == 2:
            raise Noticed
        path.write_bytes(document("p", 2))

    with pytest.raises(Noticed):
        await PolicyWatcher(path, lambda: 0.0, changed).run()
