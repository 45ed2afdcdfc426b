"""Reading policy documents: whatever lies in the folder, the reader comes back."""

import os

from headway_runtime.server.policy_watcher import read_documents


def test_what_is_no_regular_file_is_passed_over(tmp_path):
    """A pipe without a writer would block the thread that opens it."""
    (tmp_path / "good.json").write_bytes(b"{}")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nowhere")
    assert read_documents(tmp_path) == {"good.json": b"{}"}
    assert read_documents(tmp_path / "pipe.json") == {}
