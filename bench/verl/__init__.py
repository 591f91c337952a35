"""The small harness around an unmodified verl, a frozen baseline, and what `python -m bench verl` measures with both.

Only `environment`, `lines` and `sections` may be imported where verl is not installed.
"""
