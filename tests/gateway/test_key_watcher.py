"""The key file while the gateway runs: a broken edit neither lets anybody in nor locks anybody out."""

import os
import threading

import pytest
from headway_gateway.key_watcher import KeyWatcher

LINE = "alice  sha256:" + "0" * 64 + "\n"


@pytest.mark.parametrize("kind", ["nothing", "empty", "folder without keys", "pipe", "link to itself", "half a line"])
def test_keys_stay_in_force_whatever_stands_in_place_of_their_file(tmp_path, kind):
    path = tmp_path / "keys"
    path.write_text(LINE)
    watcher = KeyWatcher(path)
    path.unlink()
    {
        "nothing": lambda: None,
        "empty": path.touch,
        "folder without keys": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "link to itself": lambda: path.symlink_to(path),
        "half a line": lambda: path.write_text(LINE[:30]),
    }[kind]()
    reading = threading.Thread(target=lambda: [watcher.read() for _ in range(3)], daemon=True)
    reading.start()
    reading.join(20)
    assert not reading.is_alive() and len(watcher.ring) == 1
    path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
    path.write_text(LINE + LINE)
    watcher.read()
    watcher.read()
    assert len(watcher.ring) == 2


def test_a_file_that_is_still_being_written_takes_no_key_away_and_gives_none_more(tmp_path):
    """Cut at every byte: behind a line it would hold fewer keys, behind a hash its last key would have every class."""
    path = tmp_path / "keys"
    text = "".join(f"tenant-{number}  sha256:{number:064x}  batch\n" for number in range(3))
    path.write_text(text)
    watcher = KeyWatcher(path)
    before = watcher.ring
    for size in range(len(text)):
        path.write_text(text[:size])
        watcher.read()
        assert watcher.ring is before
    path.write_text(text + LINE)
    for count in (3, 4, 4):
        watcher.read()
        assert len(watcher.ring) == count


def test_keys_from_a_pipe_are_read_once(tmp_path):
    path = tmp_path / "keys"
    os.mkfifo(path)
    writing = threading.Thread(target=path.write_text, args=(LINE,))
    writing.start()
    watcher = KeyWatcher(path)
    writing.join()
    watcher.read()
    assert len(watcher.ring) == 1
