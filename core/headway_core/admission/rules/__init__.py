"""The rules that decide who is admitted, by name in `RULES`.

Each is one class with one decision, `decide`, taken from an `AdmissionView`. A rule changes nothing and remembers
nothing: what was learned is in the view. `controller` and `pool_admission` carry its decision out.
"""

from collections.abc import Mapping
from types import MappingProxyType

from headway_core.admission.rules.moore import Moore
from headway_core.admission.rules.newcomer_rules import LittlesLaw, OpenAdmission, PredictedTtft, QueuedTokens
from headway_core.admission.rules.rule import AdmissionRule

RULES: Mapping[str, AdmissionRule] = MappingProxyType(
    {rule.name: rule for rule in (Moore(), PredictedTtft(), LittlesLaw(), QueuedTokens(), OpenAdmission())}
)
"""Every rule by its name, the default first."""

__all__ = ["RULES", "AdmissionRule", "LittlesLaw", "Moore", "OpenAdmission", "PredictedTtft", "QueuedTokens"]
