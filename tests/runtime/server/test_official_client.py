"""The official `openai` client, unmodified, in two versions about a year apart: the pinned one and an older one in a
folder of its own."""

import importlib.metadata


def test_the_newest_client_is_served(run_client, shared_runtime):
    assert run_client(shared_runtime.url) == importlib.metadata.version("openai")


def test_a_client_of_a_year_ago_is_served(run_client, shared_runtime, older_client):
    folder, version = older_client
    assert version != importlib.metadata.version("openai")
    assert run_client(shared_runtime.url, folder) == version
