"""Templates: what grows from them, and that nothing is used twice."""

from hypothesis import given, settings
from hypothesis import strategies as st

from equigrad.plan.mixed.exhaustive import templates
from equigrad.plan.mixed.template import Kind, Space, Stage, Template, ordered, shown

SPACE = Space({"a": Kind(4, 4, (1, 2)), "b": Kind(3, 3, (1,))}, stages=6, runs=3)


def test_every_template_is_there_once_and_uses_no_gpu_twice() -> None:
    found = list(templates(SPACE))
    assert len(found) == len(set(found))
    assert all(ordered(template) == template for template in found)
    assert all(min(SPACE.left(template).values()) >= 0 for template in found)
    assert all(stage.gpus % stage.tp == 0 for template in found for pipeline in template for stage in pipeline)
    assert all(len(pipeline) <= SPACE.stages for template in found for pipeline in template)


def test_templates_that_one_would_name_are_among_them() -> None:
    a, b = Stage("a", 4, 2), Stage("b", 3, 1)
    half = Stage("a", 2, 1)
    one: Template = ((a,), (b,))
    for template in (((a,),), one, ((b, a),), ((half, half, b),), ((half, b, half),), ((half,), (half, b))):
        assert ordered(template) in set(templates(SPACE))


@settings(max_examples=50)
@given(data=st.data())
def test_a_changed_template_is_as_good_a_template(data: st.DataObject) -> None:
    template = data.draw(st.sampled_from(sorted(templates(SPACE))))
    for changed in SPACE.changed(template):
        assert changed
        assert all(changed)
        assert min(SPACE.left(changed).values()) >= 0


def test_a_template_in_words() -> None:
    pipeline = (Stage("h100", 4, 2), Stage("h100", 4, 2), Stage("a100", 8, 1))
    assert shown((pipeline, (Stage("a100", 8, 1),))) == "2 x h100 4 (tp 2) > a100 8 | a100 8"
