"""When rights, schema and whole lists are asked for again."""

from types import SimpleNamespace

import pytest
from headway_operator import access, schema
from headway_operator.access import NEEDED, Access, AccessReview
from headway_operator.cache import Cache, Relister
from headway_operator.kube import KubeError
from headway_operator.schema import SchemaCheck, Served


class Answers:
    """Answers calls one by one, raises what is an error, and counts them."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), 0

    async def __call__(self, *args, **kwargs):
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


DOWN = KubeError(503, "down", "GET /")
LACKING = Access(frozenset([("", NEEDED[0])]))


async def test_rights_are_reviewed_each_minute_while_one_is_missing_or_something_was_refused(monkeypatch):
    answers = Answers(DOWN, LACKING, Access())
    monkeypatch.setattr(access, "review", answers)
    kube, now = SimpleNamespace(denied=False), [0.0]
    rights = AccessReview(kube, (), lambda: now[0])
    with pytest.raises(KubeError):
        await rights.refresh()
    assert not rights.known
    asked = []
    for now[0] in (1.0, 60.0, 61.0, 500.0):
        await rights.refresh()
        asked.append(answers.asked)
    assert (asked, rights.known, rights.access) == ([2, 2, 3, 3], True, Access())
    kube.denied = True
    await rights.refresh()
    assert (answers.asked, kube.denied) == (4, False)


async def test_a_refused_schema_is_read_again_sooner_than_a_good_one(monkeypatch):
    answers = Answers(DOWN, Served(False, "install it"), Served(True, "upgrade it"), Served(True))
    monkeypatch.setattr(schema, "served", answers)
    now = [0.0]
    check = SchemaCheck(None, lambda: now[0])
    with pytest.raises(KubeError):
        await check.refresh()
    assert not check.known
    asked = []
    for now[0] in (1.0, 10.0, 11.0, 21.0, 620.0, 621.0):
        await check.refresh()
        asked.append(answers.asked)
    assert asked == [2, 2, 3, 4, 4, 5]
    assert check.served == Served(True)


async def test_lists_are_whole_once_a_minute_and_leave_out_what_may_not_be_listed():
    items = [{"metadata": {"namespace": "a", "name": "s", "resourceVersion": "3"}}]
    answers, now = Answers({"metadata": {"resourceVersion": "7"}, "items": items}), [0.0]
    cache = Cache(lambda key: None)
    forbidden = frozenset((place, right) for place in "ab" for right in NEEDED if right.resource != "services")
    relister = Relister(SimpleNamespace(get=answers), cache, ("a", "b"), lambda: now[0])
    done = []
    for now[0] in (0.0, 59.0, 60.0):
        done.append(await relister.relist(Access(forbidden)))
    assert (done, answers.asked) == ([True, False, True], 4), "services, in two namespaces, twice"
    assert [known.name for known in cache.services.values()] == ["s"]
    relister.expire()
    assert await relister.relist(Access(forbidden))
