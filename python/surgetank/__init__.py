"""Surgetank's Python side: questions to the agent (`locate`, `hint`), and what a workflow's graph knows (`surgetank.workflow`)."""

from .client import AgentError, hint, hint_each, locate, node, nodelist

__version__ = "0.1.0"
__all__ = ["AgentError", "hint", "hint_each", "locate", "node", "nodelist"]
