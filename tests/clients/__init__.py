"""Real client programs against the server; `python -m tests.clients`."""
