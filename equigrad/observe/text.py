"""Numbers as people read them, the same in the terminal and in the report."""

import math


def compact(value: float, digits: int = 3) -> str:
    """Significant digits and a suffix: 999, 12.4k, 3.1M, 2.75G; exponents beyond, names for NaN and infinity."""
    if not math.isfinite(value):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e15:
        return exponent(value, digits)
    for suffix in ("", "k", "M", "G"):
        if abs(float(f"{value:.{digits}g}")) < 1000:
            return f"{value:.{digits}g}{suffix}"
        value /= 1000
    return f"{value:.{digits}g}T"


def exponent(value: float, digits: int = 3) -> str:
    """3e-3, 2.5e-4, 0."""
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}" if value else "0"


def loss_text(value: float) -> str:
    """Three decimals, or three digits where the value is small."""
    return f"{value:.3f}" if not 0 < abs(value) < 0.1 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Two units at most: 42s, 12m34s, 1h02m, 3d04h."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    d, h = divmod(hours, 24)
    if d:
        return f"{d}d{h:02}h"
    return f"{h}h{m:02}m" if h else f"{m}m{s:02}s" if m else f"{s}s"


def memory(megabytes: float) -> str:
    """Megabytes (10^6 bytes) as MB or GB."""
    return f"{megabytes:.0f} MB" if megabytes < 10_000 else f"{megabytes / 1000:.1f} GB"
