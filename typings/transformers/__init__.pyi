"""The names of transformers that our code reads, for pyright alone.

The package's own `__init__` imports every model there is, 3,600 files, which pyright would bind
whenever a file of ours is checked, and without types that say more than this.
"""

from typing import Any

from transformers import utils as utils

__version__: str
AutoConfig: Any
AutoModelForCausalLM: Any
AutoModelForImageTextToText: Any
GptOssConfig: Any
