"""equigrad: language-model training whose answer does not depend on how the work was divided.

Importing the package costs nothing: the rooms (``equigrad.config``, ``equigrad.trainer``, ...) load on their own.
"""

__version__ = "0.1.0"
