"""What every configuration section shares. Knows pydantic, knows nothing of any section."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen, strictly typed part of the job. Unknown keys are errors; a field's docstring is its help text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
