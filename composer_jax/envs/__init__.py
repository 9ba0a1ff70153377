"""Environments: tasks, the agent loop, tools, rewards; the sandbox they run in."""
