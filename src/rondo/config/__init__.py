"""The typed configuration: schema, loading, validation, printing. Nothing here imports torch or ray."""

from rondo.config.load import LoadedConfig, load
from rondo.config.printing import show, to_yaml
from rondo.config.tree import Origin

__all__ = ["LoadedConfig", "Origin", "load", "show", "to_yaml"]
