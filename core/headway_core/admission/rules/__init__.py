"""The rules that decide who is admitted, each by the name that people look for; `RULES` finds them by that name.

Each is one class with one decision, `decide`, taken from an `AdmissionView`. A rule changes nothing and remembers
nothing: what was learned is in the view. What becomes of its decision (Retry-After, the queue, the dispatch) is the
business of `controller` and `pool_admission`, never of a rule.
"""

from collections.abc import Mapping
from types import MappingProxyType

from headway_core.admission.rules.littles_law import LittlesLaw
from headway_core.admission.rules.moore import Moore
from headway_core.admission.rules.open_admission import OpenAdmission
from headway_core.admission.rules.predicted_ttft import PredictedTtft
from headway_core.admission.rules.queued_tokens import QueuedTokens
from headway_core.admission.rules.rule import AdmissionRule

RULES: Mapping[str, AdmissionRule] = MappingProxyType(
    {rule.name: rule for rule in (Moore(), PredictedTtft(), LittlesLaw(), QueuedTokens(), OpenAdmission())}
)
"""Every rule by its name, the default first."""

__all__ = ["RULES", "AdmissionRule", "LittlesLaw", "Moore", "OpenAdmission", "PredictedTtft", "QueuedTokens"]
