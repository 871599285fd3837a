"""Surgetank's Python side: derives facts about files from a workflow's graph, and sends hints to the agent."""

__version__ = "0.1.0"
