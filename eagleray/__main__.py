"""`python -m eagleray`: the command line, wherever Eagleray is installed."""

from __future__ import annotations

from launch import main

main()
