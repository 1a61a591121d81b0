"""Image editors behind one protocol: encode the condition once, predict velocity, decode."""

from rl_recipes.editors.base import Conditions, Editor, EditorError, group_by_size
from rl_recipes.editors.registry import load_editor, supported_pipelines

__all__ = ["Conditions", "Editor", "EditorError", "group_by_size", "load_editor", "supported_pipelines"]
