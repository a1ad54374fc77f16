"""Other people's models, made efficient."""

from .convert import execution_plan, make_efficient, restore

__all__ = ["execution_plan", "make_efficient", "restore"]
