"""A task from a user's Python file: ``my_task.py:Task``. Imported in verifier processes only, see ``worker``."""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from equigrad.errors import UserError
from equigrad.rl.tasks.protocol import Task


def load_task(name: str, options: Mapping[str, Any]) -> Task:
    """The task of ``FILE.py:CLASS``, made with the options. The file may import what lies beside it.

    Raises ``UserError`` where there is no such file or class; what the file itself raises comes through.
    """
    path, _, attribute = name.rpartition(":")
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise UserError(f"{path}: no such file")
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    found = getattr(module, attribute, None)
    if not (isinstance(found, type) and issubclass(found, Task)):
        what = "has no" if found is None else "is no task:"
        raise UserError(f"{path} {what} {attribute}; a task is a class that derives from equigrad.rl.tasks.Task")
    return found(**options)
