"""Not there for programs that tests start: see `tests/conftest.py`."""

raise ImportError("only tests need it")
