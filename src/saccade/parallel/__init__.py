"""Context parallelism: one call whose rows are dealt to ranks, planned from its mask.

`plan` deals rows so that all ranks have as much work; `attention`, `linear_attention` and
`gated_delta_rule`, and their `_varlen` forms, take each rank's rows. `ShardedCache` deals the
tokens of a cache. `torch.distributed` is all that is needed.
"""

from saccade.parallel.cache import ShardedCache
from saccade.parallel.calls import attention, attention_varlen
from saccade.parallel.costs import Cost, Machine
from saccade.parallel.delta import gated_delta_rule, gated_delta_rule_varlen
from saccade.parallel.linear import linear_attention, linear_attention_varlen
from saccade.parallel.planner import Plan, plan

__all__ = [
    "Cost",
    "Machine",
    "Plan",
    "ShardedCache",
    "attention",
    "attention_varlen",
    "gated_delta_rule",
    "gated_delta_rule_varlen",
    "linear_attention",
    "linear_attention_varlen",
    "plan",
]
