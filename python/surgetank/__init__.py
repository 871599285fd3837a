"""Surgetank's Python side: what a workflow's graph knows about its files, and what the agent is told of it."""

__version__ = "0.1.0"
