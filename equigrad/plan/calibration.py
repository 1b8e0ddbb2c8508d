"""The constants that are fitted rather than looked up: few, physical, in proportion to something measured elsewhere.

``data/calibration.json`` holds them with what they were fitted on; ``python -m equigrad.plan.calibrate`` writes it.
"""

from functools import cache
from pathlib import Path

from equigrad.config.base import Section
from equigrad.plan.datafile import checked
from equigrad.plan.hardware import DATA, Constant

FILE = DATA / "calibration.json"


class Calibration(Section):
    """How training stands to what the hardware can do at best."""

    product: Constant
    """Of the best matrix product's rate, that of the arithmetic of products in a long run."""
    operands: Constant
    """How many times a product moves its operands and result, in time that its arithmetic does not hide: tiles read
    them again, and the first and last tiles have nothing to hide behind."""
    flash: dict[str, Constant]
    """Of the peak, that of attention in tiles, by architecture; causal operations only."""
    half_head: Constant
    """Of the rate of attention in tiles, that with heads of 64 entries instead of 128."""
    link: Constant
    """Of a link's bandwidth, that of collectives beside computation."""

    def flash_share(self, architecture: str) -> float:
        """Where an architecture was not calibrated, the lowest share of those that were."""
        known = self.flash.get(architecture)
        return known.value if known is not None else min(share.value for share in self.flash.values())


@cache
def calibration(path: Path = FILE) -> Calibration:
    """The data file, checked. ``UserError`` where it is not what it should be."""
    return checked(Calibration, path)
