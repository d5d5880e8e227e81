"""The first-bugs generator: every bug is real, every fix fixes, and the splits do not touch."""

import json
from random import Random
from typing import Any

import pytest

from examples.first_bugs import KINDS, Draw, demonstrations, generate_suite
from examples.first_bugs.demonstrations import Style, wrong_edits
from examples.first_bugs.suite import Instance, draw_instances, instantiate, normalised
from examples.first_bugs.verify import call, passes

SEED, NUM_TRAIN, NUM_HELDOUT = 7, 320, 96


@pytest.fixture(scope="module")
def suite() -> dict[str, Any]:
    return generate_suite(SEED, NUM_TRAIN, NUM_HELDOUT)


@pytest.fixture(scope="module")
def instances() -> list[Instance]:
    train, heldout = draw_instances(SEED, NUM_TRAIN, NUM_HELDOUT)
    return [*train, *heldout]


def test_kinds_when_listed_then_at_least_24_with_dates_among_them() -> None:
    names = [kind.name for kind in KINDS]
    assert len(set(names)) == len(names) >= 24
    assert {"parse_date", "leap_year"} <= set(names)


def test_bugs_when_each_is_drawn_then_each_makes_a_sound_instance() -> None:
    for kind in KINDS:
        for bug in kind.bugs:
            rng = Random(f"{kind.name}/{bug.name}")
            drawn = [instantiate(kind, bug, rng) for _ in range(60)]
            assert any(drawn), f"{kind.name}/{bug.name} never makes an instance"


def test_task_when_generated_then_it_has_the_shape_of_the_rest_body(suite: dict[str, Any]) -> None:
    task = suite["tasks"][0]
    assert set(task) == {"name", "split", "instruction", "workspace", "tools", "grader", "tags"}
    assert task["name"].startswith("first-bugs/train/0000-")
    assert task["grader"]["editable"] == [
        path for path in task["workspace"]["files"] if not path.startswith("test_")
    ]
    assert json.loads(json.dumps(suite)) == suite


def test_hidden_tests_when_run_on_the_task_then_fail_and_pass_on_the_fix(instances: list[Instance]) -> None:
    for instance in instances:
        assert not passes(instance.broken, instance.hidden_tests)
        assert passes(instance.broken.replace(instance.buggy, instance.right), instance.hidden_tests)


def test_visible_tests_when_run_on_the_task_then_fail_and_pass_on_the_fix(instances: list[Instance]) -> None:
    for instance in instances:
        assert not passes(instance.broken, instance.visible_tests)
        assert passes(instance.fixed, instance.visible_tests)


def test_workspace_when_generated_then_holds_neither_hidden_tests_nor_the_fix(
    suite: dict[str, Any], instances: list[Instance]
) -> None:
    for task, instance in zip(suite["tasks"], instances, strict=True):
        shown = [task["instruction"], *task["workspace"]["files"], *task["workspace"]["files"].values()]
        assert "test_hidden.py" not in shown
        assert task["grader"]["files"]["test_hidden.py"] not in shown
        assert instance.fixed not in shown


def test_splits_when_compared_then_share_no_module(instances: list[Instance]) -> None:
    train, heldout = instances[:NUM_TRAIN], instances[NUM_TRAIN:]
    for text in ("fixed", "broken"):
        shared = {normalised(getattr(i, text)) for i in train} & {
            normalised(getattr(i, text)) for i in heldout
        }
        assert not shared


def test_suite_when_generated_again_then_equal_and_other_for_another_seed(suite: dict[str, Any]) -> None:
    draw_instances.cache_clear()
    assert generate_suite(SEED, NUM_TRAIN, NUM_HELDOUT) == suite
    assert generate_suite(SEED + 1, 8, 0)["tasks"] != suite["tasks"][:8]


def test_suite_when_longer_then_heldout_stays_the_same(suite: dict[str, Any]) -> None:
    longer = generate_suite(SEED, NUM_TRAIN + 10, NUM_HELDOUT)
    assert longer["tasks"][NUM_TRAIN + 10 :] == suite["tasks"][NUM_TRAIN:]


def test_demonstrations_when_replayed_then_the_edit_applies_and_only_the_right_third_passes(
    suite: dict[str, Any],
) -> None:
    tasks = {task["name"]: task for task in suite["tasks"]}
    shown = demonstrations(suite, seed=3, each=3)
    for demonstration in shown:
        task = tasks[demonstration.task]
        assert task["split"] == "train"
        assert [call["name"] for call in demonstration.calls] == task["tools"]
        edit = demonstration.calls[1]["arguments"]
        text = task["workspace"]["files"][edit["path"]]
        assert text.count(edit["old"]) == 1
        edited = text.replace(edit["old"], edit["new"])
        assert passes(edited, task["grader"]["files"]["test_hidden.py"]) == demonstration.right
    assert len(shown) == 3 * NUM_TRAIN
    # 960 draws at 1/3: the standard deviation of the share is 0.015
    assert sum(d.right for d in shown) / len(shown) == pytest.approx(1 / 3, abs=0.06)


def test_demonstrations_when_made_again_then_equal(suite: dict[str, Any]) -> None:
    assert demonstrations(suite, seed=3) == demonstrations(suite, seed=3)
    assert demonstrations(suite, seed=3) != demonstrations(suite, seed=4)


def test_demonstrations_when_suite_is_of_another_maker_then_value_error() -> None:
    with pytest.raises(ValueError, match="version"):
        demonstrations({"name": "other", "version": "2.0", "tasks": []}, seed=0)


def test_wrong_edits_when_listed_then_nearly_every_task_has_one_and_most_both(
    instances: list[Instance],
) -> None:
    styles = [dict(wrong_edits(instance)) for instance in instances]
    assert all(Style.FIX not in found for found in styles)
    # Where none applies, the demonstration shows the fix instead.
    assert sum(bool(found) for found in styles) > 0.98 * len(styles)
    assert sum(len(found) == 2 for found in styles) > 0.6 * len(styles)


def test_call_when_the_function_raises_then_names_the_exception() -> None:
    source = "def f(x):\n    return 1 // x\n"
    assert call(source, "f", (2,)) == 0
    assert call(source, "f", (0,)) == "raises ZeroDivisionError"
    assert call("def f(x:\n", "f", (0,)) == "raises SyntaxError"


def test_draws_when_of_one_seed_share_the_heldout_tasks_and_differ_in_training() -> None:
    practice = generate_suite(SEED, NUM_TRAIN, NUM_HELDOUT)["tasks"]
    shown = generate_suite(SEED, NUM_TRAIN, NUM_HELDOUT, Draw.DEMONSTRATION)["tasks"]
    assert practice[NUM_TRAIN:] == shown[NUM_TRAIN:]
    texts = [{str(task["workspace"]) for task in tasks[:NUM_TRAIN]} for tasks in (practice, shown)]
    assert len(texts[0] & texts[1]) < NUM_TRAIN // 10
    heldout = {str(task["workspace"]) for task in practice[NUM_TRAIN:]}
    assert not heldout & (texts[0] | texts[1])
