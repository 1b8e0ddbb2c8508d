"""The typed configuration: one torch-free module per room, read from TOML files and dotted overrides."""

from equigrad.config.job import Job
from equigrad.config.load import dump_toml, load_job

__all__ = ["Job", "dump_toml", "load_job"]
