import pytest
from headway_cli.slo_file import DEFAULT, SloFileError, read_slo

GOOD = """\
apiVersion: headway.dev/v1alpha1
kind: ServingSLO
metadata: {name: chat}
spec:
  targetRef: {name: chat}
  objectives:
    ttft:
      target: 1s
  defaultClass: a
  classes:
    - {name: a, priority: 1}
    - name: b
      priority: 0
"""


def test_the_default_promise_is_a_valid_object():
    slo = read_slo(DEFAULT)
    assert [known.name for known in slo.classes] == ["interactive", "batch"]


@pytest.mark.parametrize(
    ("old", "new", "line", "field"),
    [
        ("target: 1s", "target: 1.5s", 8, "spec.objectives.ttft.target"),
        ("target: 1s", "taget: 1s", 8, "spec.objectives.ttft.taget"),
        ("      target: 1s", "      percentile: 90", 7, "spec.objectives.ttft.target"),
        ("priority: 0", "priority: high", 13, "spec.classes[1].priority"),
        ("defaultClass: a", "defaultClass: c", 9, "spec.defaultClass"),
        ("kind: ServingSLO", "kind: Deployment", 2, "kind"),
        ("  targetRef: {name: chat}\n", "", 4, "spec.targetRef"),
        ("      priority: 0", "      priority: 0\n      priority: 3", 14, "priority"),
        ("target: 1s", "target: [", None, ""),
        ("target: 1s", "\ttarget: 1s", 8, ""),
    ],
)
def test_a_fault_is_named_by_file_line_and_field(tmp_path, old, new, line, field):
    path = tmp_path / "slo.yaml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(SloFileError) as caught:
        read_slo(path)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{path}:{line}:" if line else f"{path}")


@pytest.mark.parametrize(
    "text", ["", "---\n", GOOD + "---\n" + GOOD, "\x00", "- a\n- b\n", "!!python/object:os.system x"]
)
def test_what_is_not_one_object_is_refused(tmp_path, text):
    path = tmp_path / "slo.yaml"
    path.write_text(text)
    with pytest.raises(SloFileError):
        read_slo(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SloFileError, match=r"nowhere\.yaml"):
        read_slo(tmp_path / "nowhere.yaml")


BOMB = "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghijklmno", "bcdefghijklmnop", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [1, 1, 1]\n" + BOMB,
        "a: &a [1, 1, 1]\n" + BOMB + GOOD.replace("name: chat}\nspec", "name: *p}\nspec"),
        "a: &a [1, 1, 1]\n" + BOMB + "? *p\n: 1\n",
        "a: &a [*a]\n",
        "a: &a {b: *a}\n",
    ],
)
def test_aliases_of_aliases_are_not_written_out(tmp_path, text):
    (tmp_path / "slo.yaml").write_text(text)
    with pytest.raises(SloFileError, match="aliases written out"):
        read_slo(tmp_path / "slo.yaml")


def test_an_alias_that_saves_typing_is_taken(tmp_path):
    (tmp_path / "slo.yaml").write_text(
        GOOD.replace("name: chat}\nspec", "name: &chat chat}\nspec").replace(
            "{name: chat}\n  obj", "{name: *chat}\n  obj"
        )
    )
    assert read_slo(tmp_path / "slo.yaml").target_name == "chat"
