"""Keys that were added to the configuration after runs had been recorded without them."""

from __future__ import annotations

from typing import Any

# In dotted form, each with the value at which a run does what it did before the key existed. A recorded
# configuration takes the value of conf/ for any other key that it lacks.
ADDED: dict[str, Any] = {}
