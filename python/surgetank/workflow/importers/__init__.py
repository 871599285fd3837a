"""From a description in an engine's own language to the one graph (`surgetank.workflow.graph`)."""
