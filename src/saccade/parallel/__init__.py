"""Context parallelism: one attention call whose rows are dealt to ranks, planned from its mask.

`plan` deals rows so that all ranks have as much work; `attention` and `attention_varlen` take each
rank's rows. `torch.distributed` is all that is needed.
"""

from saccade.parallel.calls import attention, attention_varlen
from saccade.parallel.costs import Cost, Machine
from saccade.parallel.planner import Plan, plan

__all__ = ["Cost", "Machine", "Plan", "attention", "attention_varlen", "plan"]
