"""How fast fillings are, from what readers report; and whether one of them lags: it slows those behind it down although
its source has the bytes.

It judges by rates within one graph, never by absolute ones, and changes nothing but its own records. What follows from
a judgement, `stragglers.py` does.
"""

from __future__ import annotations

from collections import deque

from tensorhub.server.rates import Pace
from tensorhub.server.settings import (
    FAR_SLOWER,
    FRESH_NS,
    LEAD_CHUNKS,
    LEAD_NS,
    PACE_WINDOW_NS,
    PAYS_NS,
    RATES_MAX,
    SECOND_NS,
    SLOWER,
)
from tensorhub.server.state import Holding, HoldingState


def note(filling: Holding, now_ns: int, period_ns: int) -> None:
    """It has told how many bytes are verified, `period_ns` after it last did by its own clock.

    Reports are late when processors are busy, and bunch: over the times of their arrival rates would mean little.
    """
    pace = filling.pace
    if not pace.has_begun:
        # Plans and first reads take their time, on healthy hosts, too: it counts from the first report of bytes.
        pace.has_begun, pace.from_bytes = filling.bytes_done > pace.from_bytes, filling.bytes_done
        return
    pace.open_ns += max(0, period_ns)
    if pace.open_ns < PACE_WINDOW_NS:
        return
    pace.rate = (filling.bytes_done - pace.from_bytes) * SECOND_NS // pace.open_ns
    pace.measured_ns, pace.open_ns, pace.from_bytes = now_ns, 0, filling.bytes_done
    pace.below = pace.below + 1 if _is_far_below_others(filling, pace.rate) else 0
    pace.behind = pace.behind + 1 if _is_behind(filling, SLOWER, now_ns) else 0


def restart(filling: Holding, now_ns: int) -> None:
    """It reads from another source from now on; what it was before says nothing."""
    began_ns = filling.pace.began_ns or now_ns
    filling.pace = Pace(began_ns, from_bytes=filling.bytes_done)


def lag(filling: Holding, now_ns: int) -> str:
    """Why this filling counts as slow, with the figures; empty when it does not.

    Behind a filling the rates of the two are compared, and its source must be ahead by more than what may be under
    way; once is enough if it is far slower, else it takes two periods. Behind a complete source nothing runs ahead:
    there the measure is how fast others filled this shard lately, it must read alone, and be slow twice.
    """
    source, pace = filling.upstream, filling.pace
    if source is None or not filling.readers or not _is_fresh(pace, now_ns):
        return ""
    if source.state is HoldingState.FILLING:
        theirs = source.pace.rate
        is_slow = pace.behind > 1 or _is_behind(filling, FAR_SLOWER, now_ns)
        if is_slow and _is_fresh(source.pace, now_ns) and _pays(filling, theirs):
            return f"slower than its source: {_rates(pace.rate, theirs)} of {source.member.seat}"
        return ""
    others = fastest(filling)
    is_alone = len(source.readers) == 1 and not source.member.slow and source.root is not None
    if is_alone and pace.below > 1 and _pays(filling, others):
        return f"slower than others were: {_rates(pace.rate, others)} alone at {source.member.seat}"
    return ""


def _is_behind(filling: Holding, times: int, now_ns: int) -> bool:
    """Whether its source is so many times faster, and ahead."""
    source, pace = filling.upstream, filling.pace
    if source is None or source.state is not HoldingState.FILLING or not _is_fresh(source.pace, now_ns):
        return False
    ahead = source.bytes_done - filling.bytes_done
    sharing = max(1, sum(not reader.asked for reader in source.readers.values()))
    return source.pace.rate > times * pace.rate * sharing and ahead >= _lead(filling, source.pace.rate)


def _is_far_below_others(filling: Holding, rate: int) -> bool:
    return SLOWER * rate < fastest(filling)


def _is_fresh(pace: Pace, now_ns: int) -> bool:
    """Whether it has been measured, and lately."""
    return pace.measured_ns > 0 and now_ns - pace.measured_ns <= FRESH_NS


def _lead(filling: Holding, rate: int) -> int:
    """More bytes than may be on their way at this rate."""
    content = filling.slot.content
    return max(rate * LEAD_NS // SECOND_NS, LEAD_CHUNKS * content.shard_bytes // max(1, content.chunks))


def _pays(filling: Holding, rate: int) -> bool:
    """Whether enough is left to read for a move to be worth its calls."""
    return filling.slot.content.shard_bytes - filling.bytes_done >= rate * PAYS_NS // SECOND_NS


def _rates(mine: int, theirs: int) -> str:
    return f"{mine / 1e6:.1f} MB/s to {theirs / 1e6:.1f} MB/s"


# ---------------------------------------------------------------- what is usual


def fastest(filling: Holding) -> int:
    """Bytes per second of the fastest of the last fillings of this shard; 0 when none is known."""
    return max(filling.slot.record.model.rates.get(filling.slot.shard, ()), default=0)


def finish(filling: Holding, now_ns: int) -> bool:
    """It is complete: remember how fast it was. Whether that was no slower than usual."""
    took_ns = now_ns - filling.pace.began_ns
    if took_ns < PACE_WINDOW_NS:
        return True  # too short to be measured, and to slow anybody
    rate = filling.bytes_done * SECOND_NS // took_ns
    is_usual = not _is_far_below_others(filling, rate)
    rates = filling.slot.record.model.rates.setdefault(filling.slot.shard, deque(maxlen=RATES_MAX))
    rates.append(rate)
    return is_usual
