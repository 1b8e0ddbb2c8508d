"""Reading the data files of this room."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from equigrad.errors import UserError

T = TypeVar("T", bound=BaseModel)


def checked(kind: type[T], path: Path) -> T:
    """The data file, checked. ``UserError`` where it is not what it should be."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValidationError as error:
        lines = (f"{path}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError("\n".join(lines)) from None
