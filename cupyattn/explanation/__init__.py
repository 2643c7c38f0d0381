"""Why a kernel runs: what could have served a batch, what does, and what its launches do."""

from .of_plan import explain, explain_schedule
from .record import Choice, Explanation, PlannedLaunch, Refusal

__all__ = ["Choice", "Explanation", "PlannedLaunch", "Refusal", "explain", "explain_schedule"]
