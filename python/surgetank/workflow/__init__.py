"""Workflows: import a description, derive patterns, lifetimes and hints, run, replay, record (docs/workflows.md)."""
