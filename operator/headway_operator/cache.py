"""What the watches have shown, in memory: objects as the controller needs them, and which ServingSLO changed.

A renewed watch can miss events, so `replace` takes a whole list now and then; an older version never replaces a newer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from headway_core.contract.kubernetes import GROUP, PLURAL, VERSION

from headway_operator.access import Access
from headway_operator.kube import Kube
from headway_operator.resources import Deployment, Pod, Service, deployment_of, pod_of, service_of

WATCHED: dict[str, tuple[str, str]] = {
    PLURAL: (GROUP, VERSION),
    "deployments": ("apps", "v1"),
    "pods": ("", "v1"),
    "services": ("", "v1"),
}
"""Plural → (group, version)."""

RELIST = 60.0
"""Seconds between whole lists: deletions that a watch has missed."""

T = TypeVar("T")
Key = tuple[str, str]
"""(namespace, name)."""


class KindCache(Generic[T]):
    """Objects of one kind by namespace and name."""

    def __init__(
        self,
        read: Callable[[Mapping[str, Any]], T | None],
        changed: Callable[[Key], None] = lambda _: None,
        notable: Callable[[T], object] = lambda item: item,
    ) -> None:
        """`read` makes an object from the API server's document, or None for one that is not ours. `changed` is told of
        an object that came, went, or whose `notable` part is another than before."""
        self._read = read
        self._changed = changed
        self._notable = notable
        self._items: dict[Key, tuple[int, T]] = {}
        self.changes = 0
        """Grows with each object that came, went or changed: what was derived from them is valid until then."""

    def get(self, namespace: str, name: str) -> T | None:
        """The object, or None."""
        return self._items.get((namespace, name), (0, None))[1]

    def keys(self) -> list[Key]:
        """Every (namespace, name), sorted."""
        return sorted(self._items)

    def values(self) -> list[T]:
        """Every object."""
        return [item for _, item in self._items.values()]

    def take(self, kind: str | None, document: Mapping[str, Any]) -> None:
        """One watch event."""
        if kind == "DELETED":
            self._drop(_key(document))
        else:
            self.put(document)

    def put(self, document: Mapping[str, Any]) -> None:
        """This version, unless a newer one is here already."""
        key, version = _key(document), _version(document)
        known = self._items.get(key)
        if known is not None and version < known[0]:
            return
        item = self._read(document)
        if item is None:
            self._drop(key)
        else:
            self._items[key] = (version, item)
            if known is None or self._notable(known[1]) != self._notable(item):
                self.changes += 1
                self._changed(key)

    def replace(self, documents: Iterable[Mapping[str, Any]], version: int, namespace: str) -> None:
        """A whole list, as of `version`, of one namespace ("" for all): what it lacks and is not newer is gone."""
        listed = {_key(document): document for document in documents}
        for document in listed.values():
            self.put(document)
        for key, (known, _) in list(self._items.items()):
            if namespace in ("", key[0]) and key not in listed and known <= version:
                self._drop(key)

    def _drop(self, key: Key) -> None:
        if self._items.pop(key, None) is not None:
            self.changes += 1
            self._changed(key)


class Cache:
    """All four kinds. `on_change` is told the key of a ServingSLO that was added, changed or removed."""

    def __init__(self, on_change: Callable[[Key], None]) -> None:
        self.slos: KindCache[dict[str, Any]] = KindCache(dict, on_change, _edited_part)
        self.deployments: KindCache[Deployment] = KindCache(deployment_of)
        self.pods: KindCache[Pod] = KindCache(pod_of)
        self.services: KindCache[Service] = KindCache(service_of)
        self.kinds: dict[str, KindCache[Any]] = {
            PLURAL: self.slos,
            "deployments": self.deployments,
            "pods": self.pods,
            "services": self.services,
        }
        """By the plural that the API server knows."""
        self._labelled: dict[tuple[str, str, str], list[Pod]] = {}
        self._labelled_at = -1
        self._owners: dict[Key, str] = {}
        self._owners_at = -1

    def pods_behind(self, service: Service) -> list[Pod]:
        """The pods that a Service selects, sorted by name."""
        if self._labelled_at != self.pods.changes:
            self._labelled, self._labelled_at = {}, self.pods.changes
            for pod in sorted(self.pods.values(), key=lambda pod: pod.name):
                for label in pod.labels.items():
                    self._labelled.setdefault((pod.namespace, *label), []).append(pod)
        labelled = [self._labelled.get((service.namespace, *label), []) for label in service.selector.items()]
        return [pod for pod in min(labelled, key=len, default=[]) if service.selects(pod.labels)]

    def owner(self, namespace: str, target: str) -> str | None:
        """Name of the oldest ServingSLO that targets a Deployment; None when there is none."""
        if self._owners_at != self.slos.changes:
            self._owners, self._owners_at = {}, self.slos.changes
            for document in sorted(self.slos.values(), key=_seniority):
                reference = (document.get("spec") or {}).get("targetRef")
                if isinstance(reference, Mapping):
                    place, name = _key(document)
                    self._owners.setdefault((place, str(reference.get("name"))), name)
        return self._owners.get((namespace, target))


class Relister:
    """Replaces a cache's objects by whole lists once a minute: an object whose deletion a watch has missed goes."""

    def __init__(
        self, kube: Kube, cache: Cache, namespaces: tuple[str, ...], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kube = kube
        self._cache = cache
        self._places = namespaces or ("",)
        self._clock = clock
        self._listed_at = float("-inf")

    def expire(self) -> None:
        """Makes the next `relist` list, whenever the last one was."""
        self._listed_at = float("-inf")

    async def relist(self, access: Access) -> bool:
        """Lists when that is due; True when it did. Kinds that may not be listed stay as they are. Raises KubeError."""
        now = self._clock()
        if now - self._listed_at < RELIST:
            return False
        for plural, (group, version) in WATCHED.items():
            root = f"/apis/{group}/{version}" if group else f"/api/{version}"
            for place in self._places:
                if access.may(place, "list", plural):
                    await self._list(root, plural, place)
        self._listed_at = now
        return True

    async def _list(self, root: str, plural: str, place: str) -> None:
        scope = f"/namespaces/{place}" if place else ""
        answer = await self._kube.get(f"{root}{scope}/{plural}", resourceVersion="0")
        self._cache.kinds[plural].replace(answer.get("items") or (), _version(answer), place)


def _seniority(document: Mapping[str, Any]) -> tuple[str, str]:
    metadata = document["metadata"]
    return metadata.get("creationTimestamp", ""), metadata["name"]


def _edited_part(document: dict[str, Any]) -> object:
    """The part that a person changes: the operator's own status writes must not cause a reconciliation."""
    metadata = document["metadata"]
    return metadata.get("uid"), metadata.get("generation"), metadata.get("annotations")


def _key(document: Mapping[str, Any]) -> Key:
    metadata = document["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _version(document: Mapping[str, Any]) -> int:
    """The resourceVersion of an object or a list; 0 when it is no number."""
    text = str(document.get("metadata", {}).get("resourceVersion", ""))
    return int(text) if text.isdigit() else 0
