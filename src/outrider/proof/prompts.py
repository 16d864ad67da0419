"""Prompts of the parity part: short and long, code and prose, some that repeat themselves."""

from __future__ import annotations

PROMPTS = (
    "def quicksort(items):",
    "Question: Anna has 12 apples and gives a third of them to Ben. How many are left?\nAnswer:",
    'class Stack:\n    """A last-in, first-out list."""\n\n    def __init__(self):\n',
    "The river rises in the hills and reaches the sea after",
    "import math\n\n\ndef is_prime(n):\n    if n < 2:\n        return False\n    for i in range(",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Question: A train leaves at 9:40 and arrives at 11:15. How many minutes does it take? "
    "A second train takes 20 minutes longer and leaves at the same time. When does it arrive?\n"
    "Answer:",
    "# English to German\ncheese: Käse\nbread: Brot\nwater: Wasser\nmilk:",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\n"
    "def multiply(a, b):\n    return a * b\n\n\ndef divide(a, b):\n",
    "tick tock tick tock tick tock tick tock tick",
    'def word_counts(text):\n    """How often each word occurs in text.\n\n'
    '    >>> word_counts("a b a")\n    {"a": 2, "b": 1}\n    """\n',
    "Dear Sir or Madam,\n\nthank you for your letter of 3 May. We have looked into the matter and",
)
