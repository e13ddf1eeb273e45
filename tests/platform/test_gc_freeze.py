"""What lives for good is not walked again, and does not put off the collection of what comes and goes."""

from __future__ import annotations

import subprocess
import sys

# Lets 8,000 circles of references die beside much that stays, each when it is of the oldest generation; prints how many
# are left at the end.
PROGRAM = """
import collections, gc, weakref
from modelserver.core.interpreter import collect_rarely, keep_for_good

class Circle:
    def __init__(self):
        self.itself = self
        self.filling = [[] for _ in range(10)]

collect_rarely()
long_lived = [[] for _ in range(500_000)]
keep_for_good()
circles = weakref.WeakSet()
youngest = collections.deque(maxlen=1500)
for _ in range(8000):
    youngest.append(Circle())
    circles.add(youngest[-1])
print(gc.get_freeze_count() > 500_000, len(circles))
"""


def test_circles_are_collected_beside_much_that_stays() -> None:
    printed = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout.split()
    assert printed[0] == "True"
    assert int(printed[1]) < 6000
