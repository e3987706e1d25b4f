"""Environments: tasks, agents and rewards by others, as rollouts with exact samples. Outside the server."""
