"""The reward, which a policy that starts with random weights learns in 40 steps. verl loads this file by its path.

verl does not enter the module into `sys.modules`, which dataclasses need: it is apart from `task` for that reason.
"""

from __future__ import annotations

import re
from typing import Any

#: The vocabulary has w0 to w249, and six marks.
WORDS = 250
#: A word below this number is a good one. Half of all words: a policy that knows nothing gets about 0.5.
GOOD_WORDS = WORDS // 2


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Which part of the words of an answer are good ones, in [0, 1]."""
    words = [int(number) for number in re.findall(r"w(\d+)", solution_str)]
    return sum(word < GOOD_WORDS for word in words) / max(1, len(words))
